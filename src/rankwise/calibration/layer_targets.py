"""How far the replaced layers of a network are from those of the original, while both run on the same inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.surgery.hooks import Seen, watching
from rankwise.surgery.modules import mark_of


def replaced(small: nn.Module, original: nn.Module) -> list[str]:
    """The names of layers that are one in the original and several in the small network.

    Without heads of embeddings: what they give is seen at the end of the network.
    """
    known = dict(original.named_modules())
    marks = {name: mark for name, module in small.named_modules() if (mark := mark_of(module)) is not None}
    heads = {head for mark in marks.values() for head in mark.get("heads", ())}
    return [name for name in marks if name in known and name not in heads]


def relative(given: Tensor, wanted: Tensor) -> Tensor:
    """‖y − y°‖² / Var(y°), summed over a batch.

    Layers give as much as a network holds, so every pass over it counts: rows as they lie in memory, the mean as a
    product, and one pass for the squares of differences.
    """
    wanted = wanted.to(given.device, torch.float32)
    last = wanted.dim() == 4 and wanted.is_contiguous(memory_format=torch.channels_last)
    y, there = ((x.permute(0, 2, 3, 1) if last else x).reshape(len(x), -1) for x in (given.float(), wanted))
    with torch.no_grad(), torch.autocast(there.device.type, enabled=False):  # the mean is not rounded to bf16
        mean = there.new_ones(len(there)) @ there / len(there)
        spread = (there - mean).square_().sum().clamp_min(1e-6 * len(there) * mean.square().sum())
    return F.mse_loss(y, there, reduction="sum") / spread.clamp_min(1e-30)


@contextmanager
def outputs_of(model: nn.Module, names: list[str]) -> Iterator[dict[str, list[Tensor]]]:
    """What layers give, call by call; copies, since what follows may work in place."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(mine: list[Tensor], call: Seen) -> None:
        if isinstance(call.output, Tensor) and call.output.is_floating_point():
            mine.append(call.output.detach().clone())

    with watching(model, {name: partial(keep, mine) for name, mine in found.items()}):
        yield found


@contextmanager
def errors_of(model: nn.Module, wanted: Mapping[str, list[Tensor]]) -> Iterator[list[Tensor]]:
    """‖y − y°‖² / Var(y°) for every call of a layer while the model runs."""
    found: list[Tensor] = []

    def compare(left: Iterator[Tensor], call: Seen) -> None:
        there = next(left, None)
        if there is not None and isinstance(call.output, Tensor) and call.output.shape == there.shape:
            found.append(relative(call.output, there))

    with watching(model, {name: partial(compare, iter(given)) for name, given in wanted.items()}):
        yield found
