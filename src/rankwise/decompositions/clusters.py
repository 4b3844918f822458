"""`messi`: an svd of each of several clusters of input channels (Maalouf et al. 2021), and how they are found.

    consecutive         slices of ⌈c/k⌉ neighbours, what `alds` uses
    kmeans              channels with similar kernels: least Σ ‖A_c − mean of the cluster‖²
    projective          k subspaces of dimension j: least Σ dist(A_c, nearest subspace)²   (Maalouf et al. 2021)
    projective-robust   the same with distances that are not squared, so that outliers weigh less

A_c are the columns of the folded matrix that belong to channel c. They stay together, since a channel can be
gathered and a column of a kernel cannot: the supplement's constrained clustering of columns.

The problem is NP-hard. Like the original, expectation–maximisation finds a local optimum from several starts:
every channel goes to its nearest subspace, every subspace becomes the best one for its channels. One start is
`consecutive`, and what is found is compared with it once more at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankwise.core.fold import fold_for, kernel_sides
from rankwise.core.layer import Layer
from rankwise.core.linalg import Array, array, eigenvalues, eigenvectors, precise, smaller_gram
from rankwise.core.option import Option
from rankwise.core.parts import Part
from rankwise.core.slicing import Slices, slice_width, slices_for
from rankwise.decompositions import slices
from rankwise.decompositions.base import (
    Alone,
    Decomposition,
    Factors,
    Scores,
    Selection,
    Target,
    check_extras,
    check_fold,
    falling,
)
from rankwise.errors import RankwiseError

CLUSTERINGS = ("consecutive", "kmeans", "projective", "projective-robust")
DEFAULT = "projective"
ROUNDS = 30
SMALL = 256  # up to so many rows a subspace comes from eigenvectors, beyond from a step of orthogonal iteration
# Rows × columns × dimension of a layer: with more than the first there are fewer starts, beyond the second none at all.
EASY, HARD = 1e8, 1e10
SHARES = (1.0, 0.5, 0.25, 0.125)  # of the largest rank worth having: the dimensions of the subspaces

Clusters = tuple[tuple[int, ...], ...]
# (columns (rows, c, taps), assignment (c,), k, state of the last round) → (cost of each channel in each cluster
# (k, c), new state)
Fit = Callable[[Tensor, Tensor, int, list[Tensor] | None], tuple[Tensor, list[Tensor]]]


class ClusteredSlices(Decomposition):
    """Gathered channels and one encoder for each cluster; a decoder for all of them.

    A convolution with groups of its own has consecutive slices instead.
    """

    name = "messi"
    about = "clusters of channels (3) that lie near a common subspace, the same keep in every layer"
    timed_as = None  # gathering takes time that depends on the clusters
    alone = Alone("energy", "constant", slices=3)

    def full_rank(self, layer: Layer, option: Option) -> int:
        return max(slices.slice_ranks(layer, option))

    def parts(self, layer: Layer, option: Option, rank: Any) -> tuple[Part, ...]:
        left, right = kernel_sides(option.fold)
        ranks = [np.minimum(rank, full) for full in slices.slice_ranks(layer, option)]
        middle = sum(ranks)
        branches = tuple(zip(option.clusters, ranks, strict=True))
        encoder = Part("encoder", right, layer.channels, middle, branches=branches)
        return encoder, Part("decoder", left, middle, layer.filters, 1)

    def candidates(self, layer: Layer, selection: Selection) -> list[Option]:
        """Which channels make a cluster changes no cost at rank 1."""
        if layer.groups > 1:
            return slices.DECOMPOSITION.candidates(layer, _consecutive(selection))
        near = {k: consecutive(layer.channels, k) for k in cluster_counts(selection.slices, layer)}
        return [Option(fold_for(0, layer.dims), k, self.name, clusters=clusters) for k, clusters in near.items()]

    def wanted(self, layer: Layer, there: list[Option], selection: Selection) -> list[Option]:
        if layer.groups > 1:
            return slices.DECOMPOSITION.wanted(layer, there, _consecutive(selection))
        counts = cluster_counts(selection.slices, layer)
        return [option for option in super().wanted(layer, there, selection) if option.slices in counts]

    def check(self, layer: Layer, option: Option, where: str) -> None:
        check_fold(layer, option, where)
        check_extras(option, where, clusters=True)
        members = sorted(channel for cluster in option.clusters for channel in cluster)
        whole = members == list(range(layer.channels)) and all(option.clusters)
        if layer.groups > 1 or len(option.clusters) != option.slices or not whole:
            raise RankwiseError(
                f"{where} has clusters that do not name each of {layer.channels} channels once in {option.slices} "
                f"clusters: make the plan again"
            )

    def score(self, target: Target, selection: Selection) -> Scores:
        layer = target.layer
        if layer.groups > 1:
            return slices.DECOMPOSITION.score(target, _consecutive(selection))
        found = slices.score_slices(target, (), [fold_for(0, layer.dims)])
        for k in cluster_counts(selection.slices, layer):
            for option in options(target.weight, layer, k, selection):
                found.spectra[option] = cluster_spectra(target.weight, layer, option)
        return found

    def output_errors(self, target: Target, options: Iterable[Option]) -> dict[Option, Array]:
        return {option: falling(slices.lost_outputs(target, option)) for option in options}

    def factors(self, target: Target, option: Option, rank: int) -> Factors:
        """Each branch has only the channels of its cluster, and no more rank than that cluster can use."""
        layer = target.layer
        left, right = slices.factors(target.weight, layer, option, rank)
        encoder, decoder = slices.pair_weights(left, right, layer, option)
        sizes = zip(slices.widths(layer, option), slices.slice_ranks(layer, option), strict=True)
        branches = [encoder[i : i + 1, : min(rank, full), :size] for i, (size, full) in enumerate(sizes)]
        return Factors({"encoder": branches, "decoder": [decoder[:, :, _used(layer, option, rank)]]})

    def compose(self, layer: Layer, option: Option, weights: Mapping[str, Sequence[Tensor]]) -> Tensor:
        branches, decoder = weights["encoder"], weights["decoder"][0]
        rank = max(branch.shape[1] for branch in branches)
        widest = max(slices.widths(layer, option))
        whole = decoder.new_zeros(option.slices, rank, widest, *branches[0].shape[3:])
        for i, branch in enumerate(branches):
            whole[i, : branch.shape[1], : branch.shape[2]] = branch[0]
        wide = decoder.new_zeros(1, layer.filters, option.slices * rank, *decoder.shape[3:])
        wide[:, :, _used(layer, option, rank)] = decoder
        return slices.compose(whole, wide, layer, option)


DECOMPOSITION = ClusteredSlices()


def _consecutive(selection: Selection) -> Selection:
    return replace(selection, folds=0)


def _used(layer: Layer, option: Option, rank: int) -> Tensor:
    """Which of the k·j channels between encoder and decoder there really are."""
    full = torch.tensor(slices.slice_ranks(layer, option))
    return (torch.arange(rank) < full[:, None]).flatten()


def cluster_spectra(weight: Tensor, layer: Layer, option: Option) -> Array:
    """Singular values of every cluster, (1, k, r + 1) like those of slices; narrow clusters end with zeros."""
    values = eigenvalues(smaller_gram(precise(slices.cut(weight, layer, option)[0]))).sqrt()
    return array(torch.constant_pad_nd(values[:, : DECOMPOSITION.full_rank(layer, option)], (0, 1))[None])


def check_clustering(name: str) -> str:
    if name not in CLUSTERINGS:
        raise RankwiseError(f"unknown clustering {name!r}: the clusterings are {', '.join(CLUSTERINGS)}")
    return name


def cluster_counts(asked: Slices, layer: Layer) -> list[int]:
    """Numbers of clusters that a request such as 3, [3, 5] or "all" means: never more than there are channels."""
    wanted = slices_for(asked, layer)
    if isinstance(asked, str):
        return wanted
    numbers = [asked] if isinstance(asked, int) else list(asked)
    return sorted({min(k, layer.channels) for k in numbers})


def options(weight: Tensor, layer: Layer, count: int, selection: Selection | None = None) -> list[Option]:
    """The options of a layer without groups of its own: one for each clustering that was found.

    Subspaces have a dimension, and the best clusters depend on it, so a few are tried.
    """
    selection = selection or Selection()
    clustering, seed, starts = check_clustering(selection.clustering or DEFAULT), selection.seed, selection.starts
    k = min(count, layer.channels)
    fold = fold_for(0, layer.dims)
    whole = precise(slices.cut(weight, layer, Option(fold, 1))[0, 0])
    columns = torch.unflatten(whole, 1, (layer.channels, -1))
    near = consecutive(layer.channels, k)
    # Neither needs a dimension, and a zero weight has nothing to cluster by.
    if clustering == "consecutive" or k in (1, layer.channels) or not bool(whole.any()):
        found = [near]
    elif clustering == "kmeans":
        found = [_search(columns, near, k, _means, 1, seed, starts)]
    else:
        robust = clustering == "projective-robust"
        found = []
        for j in _dimensions(layer, near):
            effort = columns.numel() * j
            if effort > HARD:
                found.append(near)
                continue
            tries = max(2, min(starts, int(starts * EASY / effort)))
            few = -(-j // columns.shape[2])  # channels that span j dimensions
            best = _search(columns, near, k, _subspaces(j, robust), few, seed, tries)
            found.append(best if robust else min(best, near, key=lambda c: _lost(columns, c, j)))
    return [Option(fold, k, DECOMPOSITION.name, clusters=clusters) for clusters in dict.fromkeys(found)]


def consecutive(channels: int, k: int) -> Clusters:
    """⌈c/k⌉ channels each; where fewer slices would do, the rest is spread so that there are k."""
    wide = slice_width(channels, k)
    starts = [min(i * wide, channels - (k - i)) for i in range(k)]
    return tuple(tuple(range(a, b)) for a, b in zip(starts, [*starts[1:], channels], strict=True))


def _dimensions(layer: Layer, clusters: Clusters) -> list[int]:
    option = Option(fold_for(0, layer.dims), len(clusters), DECOMPOSITION.name, clusters=clusters)
    params, _ = DECOMPOSITION.costs(layer, option)
    most = max(1, int(params.searchsorted(layer.params)) - 1)
    return sorted({max(1, round(share * most)) for share in SHARES})


def _lost(columns: Tensor, clusters: Clusters, rank: int) -> float:
    """Σ of squared distances from the best subspaces of the clusters, exactly."""
    lost = 0.0
    for members in clusters:
        mine = columns[:, list(members)].flatten(1)
        lost += float(eigenvalues(smaller_gram(mine)[None])[0, rank:].flip(0).sum())
    return lost


def _search(columns: Tensor, near: Clusters, k: int, fit: Fit, few: int, seed: int, starts: int) -> Clusters:
    """The best of several runs: the first from consecutive slices, the others from `few` random channels each."""
    channels = columns.shape[1]
    random = torch.Generator().manual_seed(seed)
    best: tuple[float, Tensor] | None = None
    for start in range(max(1, starts)):
        assigned = torch.full((channels,), -1)
        if start == 0:
            for i, members in enumerate(near):
                assigned[list(members)] = i
        else:
            order = torch.randperm(channels, generator=random)
            for i, chosen in enumerate(order[: k * max(1, min(few, channels // k))].chunk(k)):
                assigned[chosen] = i
            cost, _ = fit(columns, assigned, k, None)
            assigned = _fill_empty(cost.argmin(dim=0), cost, k)
        found = _improve(columns, assigned, k, fit)
        if best is None or found[0] < best[0]:
            best = found
    assert best is not None
    clusters = [tuple((best[1] == i).nonzero().flatten().tolist()) for i in range(k)]
    return tuple(sorted(clusters))


def _improve(columns: Tensor, assigned: Tensor, k: int, fit: Fit) -> tuple[float, Tensor]:
    """Expectation–maximisation from one start: the best assignment on the way, and its cost."""
    state: list[Tensor] | None = None
    best: tuple[float, Tensor] | None = None
    for _ in range(ROUNDS):
        cost, state = fit(columns, assigned, k, state)
        here = float(cost.gather(0, assigned[None]).sum())
        if best is None or here < best[0]:
            best = (here, assigned)
        moved = _fill_empty(cost.argmin(dim=0), cost, k)
        if torch.equal(moved, assigned):
            break
        assigned = moved
    assert best is not None
    return best


def _fill_empty(assigned: Tensor, cost: Tensor, k: int) -> Tensor:
    """An empty cluster gets the channel that fits worst where it is."""
    for i in range(k):
        sizes = torch.bincount(assigned, minlength=k)
        if not sizes[i]:
            own = cost.gather(0, assigned[None])[0].where(sizes[assigned] > 1, -torch.inf)
            assigned = assigned.clone()
            assigned[int(own.argmax())] = i
    return assigned


def _means(columns: Tensor, assigned: Tensor, k: int, state: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
    points = columns.transpose(0, 1).flatten(1)
    means = torch.stack([points[assigned == i].mean(dim=0) for i in range(k)])
    return torch.cdist(means, points).square(), []


def _subspaces(rank: int, robust: bool) -> Fit:
    def fit(columns: Tensor, assigned: Tensor, k: int, state: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        bases = _bases(columns, assigned, k, state, None)
        cost = _distances(columns, bases)
        if not robust:
            return cost, bases
        for _ in range(2):  # weighted by 1/distance, squared distances become plain ones
            far = cost.gather(0, assigned.clamp_min(0)[None])[0].sqrt()
            weights = 1 / far.clamp_min(1e-6 * float(far.max()) + 1e-300)
            bases = _bases(columns, assigned, k, bases, weights)
            cost = _distances(columns, bases)
        return cost.sqrt(), bases

    def _bases(
        columns: Tensor, assigned: Tensor, k: int, state: list[Tensor] | None, weights: Tensor | None
    ) -> list[Tensor]:
        scaled = columns if weights is None else columns * weights.sqrt()[None, :, None]
        found = []
        for i in range(k):
            mine = scaled[:, assigned == i].flatten(1)
            if len(mine) <= SMALL:
                found.append(eigenvectors(mine @ mine.t())[1][:, :rank].flip(1))
                continue
            warm = state is not None and state[i].shape[1] == rank
            basis = state[i] if state is not None and warm else mine[:, :rank]
            for _ in range(1 if warm else 3):
                basis = torch.linalg.qr(mine @ (mine.t() @ basis))[0]
            found.append(basis)
        return found

    return fit


def _distances(columns: Tensor, bases: list[Tensor]) -> Tensor:
    """Squared distances (k, c) of every channel's columns from every subspace."""
    flat = columns.flatten(1)
    whole = columns.square().sum(dim=(0, 2))
    kept = [(basis.t() @ flat).square().sum(dim=0).reshape(len(whole), -1).sum(dim=1) for basis in bases]
    return (whole - torch.stack(kept)).clamp_min(0)
