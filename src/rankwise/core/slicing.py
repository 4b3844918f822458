"""Slices of input channels (the paper's k), and the folds and slices that a layer can have."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from rankwise.core.fold import folds_for, kernel_sides
from rankwise.core.layer import Call, Layer
from rankwise.errors import RankwiseError

Folds = str | int | Iterable[str | int]
Slices = str | int | Iterable[int]


def slice_width(channels: int, slices: int) -> int:
    """Channels in a slice: at most ⌈c/k⌉; the last slice may have fewer."""
    return -(-channels // slices)


def real_slices(channels: int, slices: int) -> int:
    """How many slices of ⌈c/k⌉ channels there really are: 16 channels cut "in 5" are 4 slices of 4."""
    return -(-channels // slice_width(channels, slices))


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def slices_for(slices: Slices, layer: Layer) -> list[int]:
    """Candidate numbers of slices for a layer.

    "all": every divisor of the channels; "any": every number by the paper's rule of slices with at most
    ⌈c/k⌉ channels; a number or a list: those, by the same rule where they do not divide. A convolution
    that has groups of its own takes divisors only (its slices must be equal to stay one convolution), so
    a number that does not divide becomes the largest divisor below it.
    """
    channels = layer.group_channels
    if slices == "all":
        return divisors(channels)
    wanted = range(1, channels + 1) if slices == "any" else [slices] if isinstance(slices, int) else slices
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise RankwiseError(f'slices={slices!r} is unknown: give "all", "any", a number or a list of numbers')
    found = set()
    for k in wanted:
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise RankwiseError(f"slices must be whole numbers from 1 on, and {k!r} was given")
        if layer.groups > 1:
            found.add(max(d for d in divisors(channels) if d <= k))
        else:
            found.add(real_slices(channels, k))
    if not found:
        raise RankwiseError('an empty list of slices was given: ask for slices="all" or at least one number')
    return sorted(found)


def taps(layer: Layer, fold: str) -> tuple[int, int]:
    """Kernel taps on the left (decoder) and on the right (encoder) of a fold."""
    left, right = kernel_sides(fold)
    return math.prod(layer.kernel[a] for a in left), math.prod(layer.kernel[a] for a in right)


def long_axes(layer: Layer, fold: str) -> tuple[int, ...]:
    """What a fold does to the matrix: which kernel axes longer than 1 go left. Folds that agree give one matrix."""
    return tuple(a for a in kernel_sides(fold)[0] if layer.kernel[a] > 1)


def distinct_folds(layer: Layer, folds: Folds) -> list[str]:
    """The folds that a request means for a layer, each matrix once.

    Of folds that differ only along kernel axes of size 1 the one with the fewest macs is offered (a stride is best
    applied early, an upsampling late).
    """
    best: dict[tuple[int, ...], str] = {}
    for fold in folds_for(folds, layer.dims):
        key = long_axes(layer, fold)
        if key not in best or _pair_macs(layer, fold) < _pair_macs(layer, best[key]):
            best[key] = fold
    return list(best.values())


def _pair_macs(layer: Layer, fold: str) -> int:
    """Macs of a pair of rank 1, to compare folds of one matrix; without an example, with 8 positions on every axis."""
    if layer.calls is None:
        before = 8 * math.prod(layer.stride)
        sizes = [(before // s, before) if layer.transposed else (before, before // s) for s in layer.stride]
        layer = replace(layer, calls=(Call(tuple(i for i, _ in sizes), tuple(o for _, o in sizes), 1),))
    left, right = taps(layer, fold)
    encoder, decoder = layer.channels * right, layer.filters * left
    return sum(
        encoder * call.count * math.prod(first) + decoder * call.count * math.prod(second)
        for call in layer.calls or ()
        for first, second in [_positions(layer, fold, call)]
    )


def _positions(layer: Layer, fold: str, call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    left, _ = kernel_sides(fold)
    middle = tuple(call.inputs[a] if a in left else call.outputs[a] for a in range(layer.dims))
    return (call.inputs, middle) if layer.transposed else (middle, call.outputs)
