"""Sizes of options: how many params and macs one rank costs, before anything is built.

Conventions: one multiply-add is one mac; biases are not counted as macs; both equal torch's own numbers
(`sum(p.numel())`, and `torch.utils.flop_counter` halved). Both are a multiple of the rank, plus a
constant for some options, so an option is described by its cost for one rank and what it costs beside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rankwise.errors import RankwiseError
from rankwise.fold import folds_for, kernel_sides
from rankwise.layer import Call, Layer


@dataclass(frozen=True)
class Option:
    """A fold, the number of slices of consecutive input channels, and how the factors are found.

    `decomposition` is "svd" (from the weight alone) or "pca" (from the layer's outputs over calibration data).
    """

    fold: str
    groups: int
    decomposition: str = "svd"


DECOMPOSITIONS = ("svd", "pca")


@dataclass(frozen=True)
class Cost:
    """Params and macs; macs are None when no example input was given."""

    params: int
    macs: int | None


def slice_width(channels: int, groups: int) -> int:
    """Channels in a slice: at most ⌈c/k⌉; the last slice may have fewer."""
    return -(-channels // groups)


def real_groups(channels: int, groups: int) -> int:
    """How many slices of ⌈c/k⌉ channels there really are: 16 channels cut "in 5" are 4 slices of 4."""
    return -(-channels // slice_width(channels, groups))


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def groups_for(groups: str | int | Iterable[int], layer: Layer) -> list[int]:
    """Candidate numbers of slices for a layer.

    "all": every divisor of the channels; "any": every number by the paper's rule of slices with at most
    ⌈c/k⌉ channels; a number or a list: those, by the same rule where they do not divide. A convolution
    that has groups of its own takes divisors only (its slices must be equal to stay one convolution), so
    a number that does not divide becomes the largest divisor below it.
    """
    channels = layer.group_channels
    if groups == "all":
        return divisors(channels)
    wanted = range(1, channels + 1) if groups == "any" else [groups] if isinstance(groups, int) else groups
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise RankwiseError(f'groups={groups!r} is unknown: give "all", "any", a number or a list of numbers')
    found = set()
    for k in wanted:
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise RankwiseError(f"groups must be whole numbers from 1 on, and {k!r} was given")
        if layer.groups > 1:
            found.add(max(d for d in divisors(channels) if d <= k))
        else:
            found.add(real_groups(channels, k))
    if not found:
        raise RankwiseError('an empty list of groups was given: ask for groups="all" or at least one number')
    return sorted(found)


def full_rank(layer: Layer, option: Option) -> int:
    """The rank at which the pair is the same function as the layer."""
    if option.decomposition == "pca":
        return layer.group_filters
    left, right = kernel_sides(option.fold)
    rows = layer.group_filters * math.prod(layer.kernel[a] for a in left)
    width = slice_width(layer.group_channels, option.groups)
    return min(rows, width * math.prod(layer.kernel[a] for a in right))


def unit_cost(layer: Layer, option: Option) -> Cost:
    """Cost of the pair at rank 1, without the bias; rank j costs j times as much.

    The encoder sees the inputs along the left axes and gives the outputs along the right ones: between
    the two factors lie Π_right outputs · Π_left inputs positions.
    """
    left, right = kernel_sides(option.fold)
    width = slice_width(layer.group_channels, option.groups)
    encoder = layer.groups * option.groups * width * math.prod(layer.kernel[a] for a in right)
    decoder = layer.filters * option.groups * math.prod(layer.kernel[a] for a in left)
    if layer.calls is None:
        return Cost(encoder + decoder, None)
    macs = 0
    for call in layer.calls:
        middle = math.prod(call.outputs[a] for a in right) * math.prod(call.inputs[a] for a in left)
        first = math.prod(call.inputs) if layer.transposed else middle
        second = middle if layer.transposed else math.prod(call.outputs)
        macs += call.count * (encoder * first + decoder * second)
    return Cost(encoder + decoder, macs)


def fixed_cost(layer: Layer, option: Option) -> Cost:
    """What a pair costs beside its rank: principal components need a bias for the mean, also where there was none."""
    bias = layer.filters if option.decomposition == "pca" and not layer.bias else 0
    return Cost(bias, None if layer.calls is None else 0)


def options_for(
    layer: Layer, folds: str | int | Iterable[str | int], groups: str | int | Iterable[int]
) -> list[Option]:
    """The options to consider for a layer, from its weight alone.

    Folds that differ only along kernel axes of size 1 give the same matrix. Only one of them is offered:
    the one with the fewest macs (a stride is best applied early, an upsampling late).
    """
    best: dict[tuple[int, ...], str] = {}
    for fold in folds_for(folds, layer.dims):
        key = tuple(a for a in kernel_sides(fold)[0] if layer.kernel[a] > 1)
        if key not in best or _fewer_macs(layer, fold, best[key]):
            best[key] = fold
    return [Option(fold, k) for fold in best.values() for k in groups_for(groups, layer)]


def _fewer_macs(layer: Layer, fold: str, other: str) -> bool:
    """Compare two folds of the same matrix; without an example, as if every axis had 8 positions."""
    if layer.calls is None:
        before = 8 * math.prod(layer.stride)
        sizes = [(before // s, before) if layer.transposed else (before, before // s) for s in layer.stride]
        call = Call(tuple(i for i, _ in sizes), tuple(o for _, o in sizes), 1)
        layer = replace(layer, calls=(call,))
    ours, theirs = (unit_cost(layer, Option(f, 1)).macs or 0 for f in (fold, other))
    return ours < theirs
