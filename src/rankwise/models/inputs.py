"""Example inputs: the shape that a user gives, or the one that a network is known for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rankwise.errors import RankwiseError
from rankwise.models import networks


def example_for(spec: str, shape: str | None, network: nn.Module) -> Tensor | None:
    """A seeded random input of the shape that was asked for, or of the network's own; None if nobody knows."""
    if shape is None:
        sizes = networks.default_input(spec)
    else:
        parts = shape.replace("x", ",").split(",")
        if not all(p.strip().isdigit() and int(p) > 0 for p in parts):
            raise RankwiseError(f"--input {shape} is not a shape: give whole numbers such as 1,3,224,224")
        sizes = tuple(int(p) for p in parts)
    if sizes is None:
        return None
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(dtype)
