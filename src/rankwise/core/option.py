"""Sizes of options: how many params and macs a rank costs, before anything is built.

Conventions: one multiply-add is one mac; biases are not counted as macs; both equal torch's own numbers
(`sum(p.numel())`, and `torch.utils.flop_counter` halved). For nearly all options both are a multiple of
the rank plus a constant; only clusters of unequal size reach their full rank one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rankwise.core.fold import all_folds, folds_for, kernel_sides
from rankwise.core.layer import Call, Layer
from rankwise.errors import RankwiseError

Ints = NDArray[np.int64]

DECOMPOSITIONS = ("svd", "pca", "messi", "tucker2", "whitened", "whitened-tucker2")
FITTED = ("whitened", "whitened-tucker2")  # to data, in the order of the layers (refit.py)


@dataclass(frozen=True)
class Option:
    """A fold, the number of slices of input channels, and how the factors are found.

    `decomposition` is one of
        svd      of each slice of consecutive channels, from the weight alone
        pca      of the layer's outputs over calibration data
        messi    svd of each of the `clusters`, which name the channels that belong together
        tucker2  both channel modes at once: `outer` is the rank of the filters, the rank that of the channels
        whitened the same slices as svd, in the metric of calibration data
        whitened-tucker2  the same three parts as tucker2, in that metric
    """

    fold: str
    groups: int
    decomposition: str = "svd"
    outer: int = 0
    clusters: tuple[tuple[int, ...], ...] = ()

    @property
    def cored(self) -> bool:
        """Whether it has two ranks: a core with the layer's own kernel between two 1×1 layers."""
        return self.decomposition.endswith("tucker2")


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


def taps(layer: Layer, option: Option) -> tuple[int, int]:
    """Kernel taps on the left (decoder) and on the right (encoder) of the fold."""
    left, right = kernel_sides(option.fold)
    return math.prod(layer.kernel[a] for a in left), math.prod(layer.kernel[a] for a in right)


def widths(layer: Layer, option: Option) -> tuple[int, ...]:
    """Channels that each slice of a group stores, padding included."""
    if option.decomposition == "messi":
        return tuple(len(cluster) for cluster in option.clusters)
    return (slice_width(layer.group_channels, option.groups),) * option.groups


def slice_ranks(layer: Layer, option: Option) -> tuple[int, ...]:
    """The rank at which each slice is whole."""
    left, right = taps(layer, option)
    return tuple(min(layer.group_filters * left, width * right) for width in widths(layer, option))


def full_rank(layer: Layer, option: Option) -> int:
    """The largest rank worth having: there the factors are the same function as the layer.

    With a core that holds where `outer` is full as well.
    """
    if option.decomposition == "pca":
        return layer.group_filters
    if option.cored:
        return min(layer.group_channels, option.outer * math.prod(layer.kernel))
    return max(slice_ranks(layer, option))


def full_outer(layer: Layer) -> int:
    """The largest rank of the filters' mode that an option with a core can have."""
    return min(layer.group_filters, layer.group_channels * math.prod(layer.kernel))


def unit_cost(layer: Layer, option: Option) -> Cost:
    """Cost of the factors at rank 1, without the bias and what `fixed_cost` counts; rank j costs j times as much.

    The encoder sees the inputs along the left axes and gives the outputs along the right ones: between
    the two factors lie Π_right outputs · Π_left inputs positions. (Clusters may reach their full rank earlier.)
    """
    if option.cored:
        core = layer.groups * option.outer * math.prod(layer.kernel)
        return _add(_pointwise(layer, layer.channels, before=True), _like_layer(layer, core))
    left, right = taps(layer, option)
    encoder = layer.groups * sum(widths(layer, option)) * right
    return _pair_cost(layer, option, encoder, layer.filters * option.groups * left)


def fixed_cost(layer: Layer, option: Option) -> Cost:
    """What the factors cost beside the rank.

    Principal components need a bias for the mean, also where there was none; beside a core there is the last factor.
    """
    if option.cored:
        return _pointwise(layer, layer.filters * option.outer, before=False)
    bias = layer.filters if option.decomposition == "pca" and not layer.bias else 0
    return Cost(bias, None if layer.calls is None else 0)


def costs(layer: Layer, option: Option) -> tuple[Ints, Ints | None]:
    """Params and macs by rank, from 0 to the full rank; entry j is what rank j costs."""
    ranks = np.arange(full_rank(layer, option) + 1)
    beside = fixed_cost(layer, option)
    if option.decomposition == "messi":
        left, right = taps(layer, option)
        slices = [_pair_cost(layer, option, width * right, layer.filters * left) for width in widths(layer, option)]
        caps = slice_ranks(layer, option)
    else:
        slices, caps = [unit_cost(layer, option)], (len(ranks) - 1,)
    parts = [(each, np.minimum(ranks, cap)) for each, cap in zip(slices, caps, strict=True)]
    params = sum((each.params * r for each, r in parts), start=beside.params + 0 * ranks)
    if layer.calls is None:
        return params, None
    return params, sum(((each.macs or 0) * r for each, r in parts), start=(beside.macs or 0) + 0 * ranks)


def cost_at(layer: Layer, option: Option, rank: int) -> Cost:
    params, macs = costs(layer, option)
    return Cost(int(params[rank]), None if macs is None else int(macs[rank]))


def _pair_cost(layer: Layer, option: Option, encoder: int, decoder: int) -> Cost:
    """An encoder and a decoder with so many weights each."""
    if layer.calls is None:
        return Cost(encoder + decoder, None)
    left, right = kernel_sides(option.fold)
    macs = 0
    for call in layer.calls:
        middle = math.prod(call.outputs[a] for a in right) * math.prod(call.inputs[a] for a in left)
        first = math.prod(call.inputs) if layer.transposed else middle
        second = middle if layer.transposed else math.prod(call.outputs)
        macs += call.count * (encoder * first + decoder * second)
    return Cost(encoder + decoder, macs)


def _pointwise(layer: Layer, weights: int, before: bool) -> Cost:
    """A 1×1 convolution with so many weights in front of the layer, or behind it."""
    if layer.calls is None:
        return Cost(weights, None)
    sizes = [(c.inputs if before else c.outputs, c.count) for c in layer.calls]
    return Cost(weights, weights * sum(math.prod(size) * count for size, count in sizes))


def _like_layer(layer: Layer, weights: int) -> Cost:
    """A convolution with the layer's own kernel and stride."""
    return _pointwise(layer, weights, before=layer.transposed)


def _add(one: Cost, other: Cost) -> Cost:
    return Cost(one.params + other.params, None if one.macs is None else one.macs + (other.macs or 0))


def check_option(layer: Layer, option: Option, where: str) -> None:
    """Refuse an option that cannot be built for the layer; `where` begins the sentence."""
    if option.decomposition not in DECOMPOSITIONS:
        raise RankwiseError(
            f"{where} has the unknown decomposition {option.decomposition!r}: known are {', '.join(DECOMPOSITIONS)}"
        )
    folds = all_folds(layer.dims)
    if option.fold not in folds:
        raise RankwiseError(f"{where} has the unknown fold {option.fold!r}: possible are {', '.join(folds)}")
    if (option.cored or option.decomposition == "pca") and (option.fold, option.groups) != (folds[0], 1):
        raise RankwiseError(
            f"{where} has the decomposition {option.decomposition!r} with {option.fold}, {option.groups}: "
            f"it takes {folds[0]}, 1"
        )
    if option.cored and not 1 <= option.outer <= full_outer(layer):
        raise RankwiseError(f"{where} has outer rank {option.outer}: possible are 1 to {full_outer(layer)}")
    if option.decomposition == "whitened-tucker2" and (layer.transposed or math.prod(layer.kernel) == 1):
        raise RankwiseError(
            f"{where} has the decomposition 'whitened-tucker2', which needs a kernel and no transposed convolution: "
            f"take 'whitened' or 'tucker2' there"
        )
    if not option.cored and option.outer:
        raise RankwiseError(f"{where} has an outer rank, which {option.decomposition!r} does not have: leave it out")
    if option.decomposition != "messi" and option.clusters:
        raise RankwiseError(f"{where} has clusters, which {option.decomposition!r} does not have: leave them out")
    channels = layer.group_channels
    if option.decomposition == "messi":
        _check_clusters(layer, option, where)
    elif not 1 <= option.groups <= channels or real_groups(channels, option.groups) != option.groups:
        raise RankwiseError(f"{where} cuts {channels} channels into {option.groups} slices, which cannot be done")
    if layer.groups > 1 and channels % option.groups:
        raise RankwiseError(
            f"{where} cuts {channels} channels of a grouped convolution into {option.groups} unequal slices: "
            f"only divisors of {channels} can be built"
        )


def _check_clusters(layer: Layer, option: Option, where: str) -> None:
    members = sorted(channel for cluster in option.clusters for channel in cluster)
    whole = members == list(range(layer.channels)) and all(option.clusters)
    if layer.groups > 1 or len(option.clusters) != option.groups or not whole:
        raise RankwiseError(
            f"{where} has clusters that do not name each of {layer.channels} channels once in {option.groups} "
            f"clusters: make the plan again"
        )


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
