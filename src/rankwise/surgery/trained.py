"""The weights that a network comes with: which ones they are, and whether they are numbers."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rankwise.core.layer import Coverage
from rankwise.core.linalg import check_finite
from rankwise.surgery.coverage import EXCLUDED


def weights_hash(model: nn.Module) -> str:
    """SHA-256 over all floating-point tensors of the state dict: names, shapes, dtypes and every bit.

    Counters (batches that a norm has seen) are left out: they change nothing that a network computes.
    """
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or is_lazy(value) or not value.is_floating_point() or value.is_meta:
            continue
        digest.update(f"{name}\0{tuple(value.shape)}\0{value.dtype}\0".encode())
        if type(value) is not Tensor or value.layout is not torch.strided:
            continue  # sparse, or quantised by somebody: such layers stay as they are
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_weights(model: nn.Module, coverage: Coverage) -> None:
    """Refuse NaN and infinite parameters before anything is computed from them; excluded layers may have them."""
    excluded = {skipped.name for skipped in coverage.skipped if skipped.reason == EXCLUDED}
    for name, value in model.named_parameters():
        layer = name.rpartition(".")[0]
        plain = type(value) is nn.Parameter and value.layout is torch.strided
        known = plain and value.is_floating_point() and not value.is_meta
        if known and not is_lazy(value) and layer not in excluded:
            check_finite(value, layer)
