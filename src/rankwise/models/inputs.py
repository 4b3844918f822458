"""Example inputs: the shape that a user gives, or the one that a network is known for."""

from __future__ import annotations

import torch
from torch import nn

from rankwise.errors import RankwiseError
from rankwise.models import networks
from rankwise.models.huggingface import example_of, is_huggingface
from rankwise.surgery.forward import Example


def example_for(spec: str, shape: str | None, network: nn.Module) -> Example | None:
    """A seeded random input of the shape that was asked for, or of the network's own; None if that is not known.

    For a network of transformers a shape of one number is the length of a text.
    """
    sizes = None if shape is None else _sizes(shape)
    if is_huggingface(network) and (sizes is None or len(sizes) == 1):
        return example_of(network, None if sizes is None else sizes[0])
    sizes = networks.default_input(spec) if sizes is None else sizes
    if sizes is None:
        return None
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(dtype)


def _sizes(shape: str) -> tuple[int, ...]:
    parts = shape.replace("x", ",").split(",")
    if not all(p.strip().isdigit() and int(p) > 0 for p in parts):
        raise RankwiseError(
            f"--input {shape} is not a shape: give whole numbers such as 1,3,224,224, or the length of a text"
        )
    return tuple(int(p) for p in parts)
