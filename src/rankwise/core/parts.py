"""Parts: the layers that stand in for a layer, as shapes; and what they cost.

The same description counts a decision and builds it. Sizes may be arrays over ranks, so that one call of
`parts(layer, option, ranks)` gives the costs of all ranks.

Conventions: one multiply-add is one mac; biases are not counted as macs; params and macs equal torch's own numbers
(`sum(p.numel())`, and `torch.utils.flop_counter` halved).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankwise.core.layer import Layer
from rankwise.core.linalg import Ints
from rankwise.core.option import Cost

Size = int | Ints


@dataclass(frozen=True)
class Part:
    """A layer of the same kind that owns some of the kernel axes and is pointwise along the others.

    With `branches` it is several layers side by side: each reads the channels named, and gives so many outputs.
    """

    name: str
    axes: tuple[int, ...]
    inputs: Size
    outputs: Size
    groups: Size = 1
    branches: tuple[tuple[tuple[int, ...], Size], ...] = ()


def weights(layer: Layer, part: Part) -> Size:
    """Entries of the part's weight."""
    taps = math.prod(layer.kernel[a] for a in part.axes)
    if part.branches:
        return sum((len(channels) * outputs for channels, outputs in part.branches), start=0) * taps
    return part.outputs * (part.inputs // np.maximum(part.groups, 1)) * taps


def cost_of(layer: Layer, parts: Sequence[Part]) -> tuple[Size, Size | None]:
    """Params of all parts, and their macs where the calls of the layer are known.

    A part gives the layer's output positions along the axes that it owns; a transposed convolution multiplies at
    its input positions.
    """
    params = sum((weights(layer, part) for part in parts), start=0)
    if layer.calls is None:
        return params, None
    macs: Size = 0
    for call in layer.calls:
        sizes = call.inputs
        for part in parts:
            after = tuple(call.outputs[a] if a in part.axes else size for a, size in enumerate(sizes))
            macs = macs + weights(layer, part) * (call.count * math.prod(sizes if layer.transposed else after))
            sizes = after
    return params, macs


def single(params: Size, macs: Size | None) -> Cost:
    """Costs of one rank as plain numbers."""
    return Cost(int(params), None if macs is None else int(macs))
