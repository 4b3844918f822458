"""`whitened`: slices in the metric of data, of what flows into a layer and of what the network makes of what flows out.

With M = E[x xᵀ] of the patches a layer sees and a metric SᵀS of its outputs, an approximation costs

    E ‖S (W − Ŵ) x‖² = ‖S (W − Ŵ) M^{1/2}‖²_F.

1. The encoder of a slice are the leading right singular vectors of S W_i C_i, times C_i⁻¹, with C_i the root of the
   slice's own block of M (averaged over the taps that the decoder owns): the best one if slices were independent.
2. The decoder is the least-squares fit of the outputs to what all encoders give, over all slices and taps together:
   the best one for these encoders, correlations between slices included.

The features of rank j are a part of those of rank j + 1, so one Cholesky factorisation of their second moments gives
the errors of all ranks: row by row, what each rank explains. M is drawn a little towards a multiple of the identity,
so that few samples do not decide alone (shrinkage).

A transposed convolution spreads each input over its taps; every tap is an output of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankwise.core.fold import all_folds, kernel_sides, to_matrix
from rankwise.core.layer import Layer, canonical
from rankwise.core.linalg import Array, array, cholesky, eigenvectors, eye_like, precise, tail
from rankwise.core.option import Option
from rankwise.core.parts import Part
from rankwise.core.slicing import taps
from rankwise.decompositions import held_out, slices
from rankwise.decompositions.base import METRIC, Decomposition, Factors, Sample, Scores, Selection, Target
from rankwise.decompositions.slices import cut

FLOOR = 1e-6  # of the mean, added to eigenvalues: a direction that was never seen costs a little
JITTER = 1e-9  # of the mean diagonal, so that dependent features do not stop Cholesky


# Fitted are options whose rough error is within SLACK of the best at one of ROOMS costs. On ResNet20 a slack of 1.1
# keeps what all options together can reach to 3.5 % on average, 1.25 keeps all of it.
SLACK, ROOMS = 1.1, 40
NARROW, FEW = 96, (2, 8)
WIDE = 1_000  # inputs to a filter


class Whitened(Decomposition):
    """The same pairs as slices have, fitted."""

    name = "whitened"
    about = "the same slices as svd, in the metric of calibration data"
    needs = METRIC

    def full_rank(self, layer: Layer, option: Option) -> int:
        return slices.DECOMPOSITION.full_rank(layer, option)

    def parts(self, layer: Layer, option: Option, rank: Any) -> tuple[Part, ...]:
        return slices.DECOMPOSITION.parts(layer, option, rank)

    def check(self, layer: Layer, option: Option, where: str) -> None:
        slices.DECOMPOSITION.check(layer, option, where)

    def candidates(self, layer: Layer, selection: Selection) -> list[Option]:
        return [replace(option, decomposition=self.name) for option in slices.DECOMPOSITION.options(layer, selection)]

    def wanted(self, layer: Layer, there: list[Option], selection: Selection) -> list[Option]:
        return slices.narrowed(super().wanted(layer, there, selection), layer, selection, screened=True)

    def score(self, target: Target, selection: Selection) -> Scores:
        """The measure `effect`, up to the largest rank that is smaller than the layer in one unit or the other."""
        options = self.candidates(target.layer, selection)
        if selection.slices == "all":
            options = offered(target.layer, options)
        found = Scores()
        for option in worth_fitting(target, options):
            most = smaller_ranks(target.layer, option)
            found.given[option] = {"effect": measured_errors(target, option, most)}
        return found

    def factors(self, target: Target, option: Option, rank: int) -> Factors:
        if target.moment is None:
            return slices.DECOMPOSITION.factors(target, option, rank)
        left, right = fit(target, option, rank).factors(rank)
        # Columns of norm 1 in the decoder, so that each part gets its half of Σ.
        size = left.norm(dim=-2)
        left = left / size.where(size > 0, torch.ones_like(size))[..., None, :]
        return slices.pair_factors(left, right * size[..., None], target.layer, option)

    def compose(self, layer: Layer, option: Option, weights: Mapping[str, Sequence[Tensor]]) -> Tensor:
        return slices.DECOMPOSITION.compose(layer, option, weights)


DECOMPOSITION = Whitened()


def offered(layer: Layer, options: list[Option]) -> list[Option]:
    """Of all options those that have been seen to win somewhere, and can be fitted in a reasonable time.

    Slices of a layer without taps win in narrow layers only. A kernel takes few numbers of slices: 1, FEW of them, and
    one for each channel (a depthwise encoder); a wide one is taken whole, since whitened-cp is ahead there, and folds
    that leave taps to the decoder take minutes. A filter of a depthwise layer is no matrix.
    """
    if layer.groups > 1 and layer.group_filters == 1:
        return []
    if math.prod(layer.kernel) == 1:
        return [option for option in options if option.slices == 1 or layer.group_channels <= NARROW]
    if is_wide(layer):
        return [option for option in options if option.slices == 1 and option.fold == all_folds(layer.dims)[0]]
    return [option for option in options if option.slices in (1, *FEW, layer.group_channels)]


def is_wide(layer: Layer) -> bool:
    """Whether fits to its moments take long."""
    return layer.group_channels * math.prod(layer.kernel) > WIDE


def worth_fitting(target: Target, options: list[Option]) -> list[Option]:
    """All options of a small layer; of a large one those that are among the best for some cost by a rough measure."""
    layer = target.layer
    assert target.moment is not None, "effects are measured on data"
    if len(options) <= 2:
        return options
    errors = [rough_errors(target, option) for option in options]
    near: set[int] = set()
    for unit, whole in enumerate((layer.params, layer.macs)):
        by_rank = [cost for option in options if (cost := DECOMPOSITION.costs(layer, option)[unit]) is not None]
        if not whole or len(by_rank) < len(options):
            continue
        rooms = np.linspace(0, whole, ROOMS + 2)[1:-1]
        fits = [cost.searchsorted(rooms, side="right") - 1 for cost in by_rank]  # the largest rank for each room
        at = np.array([error[rank.clip(0, len(error) - 1)] for rank, error in zip(fits, errors, strict=True)])
        near |= set(np.flatnonzero((at <= SLACK * at.min(axis=0)).any(axis=1)))
    return [options[i] for i in sorted(near)] or options


def smaller_ranks(layer: Layer, option: Option) -> int:
    """The largest rank at which the pair is smaller than the layer in params or macs; beyond, errors are not needed."""
    params, macs = DECOMPOSITION.costs(layer, option)
    ranks = [int(params.searchsorted(layer.params)) - 1]
    if macs is not None and layer.macs:
        ranks.append(int(macs.searchsorted(layer.macs)) - 1)
    return max(1, *ranks)


def measured_errors(target: Target, option: Option, most: int) -> Array:
    """By rank, on inputs that the factors were not fitted to (`Target.samples`), mean of both ways."""
    curves = [_sample_errors(target, sample, option, most) for sample in target.measured()]
    return np.minimum.accumulate(np.maximum(0.0, np.mean(curves, axis=0)))


def _sample_errors(target: Target, sample: Sample, option: Option, most: int) -> Array:
    lost = np.zeros(1)
    fitting = replace(target, moment=sample.moment, metric=sample.metric)
    testing = replace(target, moment=sample.test_moment, metric=sample.test_metric)
    for fitted, tested in zip(groups_of(fitting, option), groups_of(testing, option), strict=True):
        matrices, rows, blocks, scale = fitted
        if option.slices == rows.shape[1] == 1:
            wide = blocks.reshape(rows.shape[-1], -1), tested[2].reshape(rows.shape[-1], -1)
            lost = lost + held_out.whole_slice_errors(rows[:, 0], wide[0], scale, wide[1], tested[3])[: most + 1]
            continue
        encoder = encoders(matrices, scale, blocks)[:, :most]
        root, cross = features(rows, encoder, blocks)
        decoder = torch.linalg.solve_triangular(root, cross.t(), upper=False).t()
        whole = held_out.total(rows, tested[2], tested[3])
        test = products(rows, encoder, tested[2])
        lost = lost + held_out.feature_errors(whole, root, decoder, test, tested[3], encoder.shape[1])
    return lost


@dataclass(frozen=True, eq=False)
class Fitted:
    """Encoders of all ranks, and what is needed to fit the decoder of any rank."""

    encoder: Tensor  # (G, k, r, columns of a slice)
    roots: tuple[Tensor, ...]  # for each group: Cholesky factor of the features' second moments, rank by rank
    cross: tuple[Tensor, ...]  # for each group: (outputs, features)
    rows: int  # of a slice: filters of a group times the decoder's taps
    given: tuple[tuple[Tensor, Tensor | None, Tensor], ...]  # for each group: weight, S, blocks of M

    @cached_property
    def errors(self) -> Array:
        """By rank, E ‖S (W − Ŵ) x‖². Whoever wants factors alone does not wait for them."""
        rank, found = self.encoder.shape[2], zip(self.given, self.roots, self.cross, strict=True)
        return sum((_errors(*given, (root, cross), rank) for given, root, cross in found), start=np.zeros(1))

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """U (G, k, rows, j) and V (G, k, j, columns), as `decompose.factors` gives them."""
        k, r = self.encoder.shape[1:3]
        lefts = []
        for root, cross in zip(self.roots, self.cross, strict=True):
            each = len(root) // r  # features of one rank: slices × taps
            n = rank * each
            decoder = torch.cholesky_solve(cross[:, :n].t(), root[:n, :n]).t()
            whole = decoder.reshape(-1, rank, k, each // k).permute(2, 0, 3, 1)  # (k, outputs, taps, j)
            lefts.append(whole.reshape(k, self.rows, rank))
        return torch.stack(lefts), self.encoder[:, :, :rank]


def fit(target: Target, option: Option, most: int | None = None) -> Fitted:
    """All ranks at once, or those up to `most`, by `target.moment` (G, d, d) and `target.metric` S (G, f/G, f/G)."""
    found, roots, crosses, given = [], [], [], []
    for matrices, rows, blocks, scale in groups_of(target, option):
        encoder = encoders(matrices, scale, blocks)[:, :most]
        root, cross = features(rows, encoder, blocks)
        found.append(encoder)
        roots.append(root)
        crosses.append(cross)
        given.append((rows, scale, blocks))
    rows_of_slice = target.layer.group_filters * taps(target.layer, option.fold)[0]
    return Fitted(torch.stack(found), tuple(roots), tuple(crosses), rows_of_slice, tuple(given))


def groups_of(target: Target, option: Option) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """For each group: its slices (k, rows, columns), the weight (outputs, taps, c·taps), blocks of M, and S."""
    layer, weight, moment, metric = target.layer, target.weight, target.moment, target.metric
    assert moment is not None, "whoever fits has seen data"
    sliced = precise(cut(weight, layer, option)).to(moment)
    left = taps(layer, option.fold)[0]
    whole = precise(to_matrix(canonical(weight.detach(), layer), option.fold)).to(moment)
    whole = whole.reshape(layer.groups, layer.group_filters, left, -1)
    for g, matrices in enumerate(sliced):
        rows, scale = whole[g], None if metric is None else metric[g]
        if layer.transposed:
            rows = rows.reshape(-1, 1, rows.shape[-1])
            scale = None if scale is None else torch.kron(scale, torch.eye(left).to(scale))
        yield matrices, rows, _blocks(layer, option, moment[g]), scale


def _blocks(layer: Layer, option: Option, moment: Tensor) -> Tensor:
    """M as (taps of the decoder, c·taps of the encoder, the same again)."""
    left, right = kernel_sides(option.fold)
    outer, inner = taps(layer, option.fold)
    c, n = layer.group_channels, layer.dims
    if layer.transposed:
        return torch.kron(moment, torch.eye(inner).to(moment))[None, :, None]
    here = [*(1 + a for a in left), 0, *(1 + a for a in right)]
    turned = moment.reshape(c, *layer.kernel, c, *layer.kernel).permute(*here, *(i + n + 1 for i in here))
    return turned.reshape(outer, c * inner, outer, c * inner)


def rough_errors(target: Target, option: Option) -> Array:
    """By rank, what the pair would lose if slices and taps were independent: the energy that encoders leave behind.

    No decoder is fitted, so it takes a fraction of the time. Options of one layer come in nearly the same order.
    """
    lost = np.zeros(1)
    for matrices, _, blocks, scale in groups_of(target, option):
        energy = torch.stack([torch.linalg.eigvalsh(_gram(*each)[0]) for each in _turned(matrices, scale, blocks)])
        lost = lost + tail(array(energy.clamp_min(0).sum(0))[::-1])
    return lost


def encoders(matrices: Tensor, scale: Tensor | None, blocks: Tensor) -> Tensor:
    """(k, r, columns), strongest first. `scale` may have fewer rows than there are outputs.

    For A = S W_i and M_i = C Cᵀ: the leading right singular vectors of A C, times C⁻¹. From the left ones they are
    UᵀA / σ, so that a wide slice needs no root of M_i at all.
    """
    found = []
    for matrix, moment in _turned(matrices, scale, blocks):
        gram, root = _gram(matrix, moment)
        values, vectors = eigenvectors(gram)
        if root is None:
            real = values > 1e-14 * values[0].clamp_min(0)  # the others have no energy and are never needed
            found.append(torch.where(real, values.clamp_min(1e-300).rsqrt(), 0.0)[:, None] * (vectors.t() @ matrix))
        else:
            found.append(torch.linalg.solve_triangular(root, vectors.t(), upper=False, left=False))
    return torch.stack(found)


def _turned(matrices: Tensor, scale: Tensor | None, blocks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """A = S W_i and M_i of each slice; M_i is the mean over the taps that the decoder owns."""
    same = blocks.diagonal(dim1=0, dim2=2).mean(-1)
    k, _, columns = matrices.shape
    missing = k * columns - len(same)
    if missing:
        same = torch.constant_pad_nd(same, (0, missing, 0, missing))
    least = FLOOR * float(same.diagonal().mean()) or 1.0  # nothing was seen: any unit will do
    for i, matrix in enumerate(matrices):
        here = slice(i * columns, (i + 1) * columns)
        if scale is not None:
            matrix = (scale @ matrix.reshape(scale.shape[1], -1)).reshape(-1, columns)
        yield matrix, same[here, here] + least * eye_like(same[here, here])


def _gram(matrix: Tensor, moment: Tensor) -> tuple[Tensor, Tensor | None]:
    """A M Aᵀ, or for a tall A: Cᵀ AᵀA C and the Cholesky factor C of M."""
    if len(matrix) < matrix.shape[1]:
        return matrix @ moment @ matrix.t(), None
    root = torch.linalg.cholesky(moment)
    return root.t() @ (matrix.t() @ matrix) @ root, root


def features(rows: Tensor, encoder: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Second moments of the encoders' outputs, factorised, and theirs with the layer's; order (rank, slice, tap).

    An encoder reads its own slice only, so slices are multiplied one by one.
    """
    square, cross = products(rows, encoder, blocks)
    small = JITTER * max(1.0, float(square.diagonal().mean()))
    return cholesky(square, small), cross


def products(rows: Tensor, encoder: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Second moments of the encoders' outputs, and theirs with the layer's."""
    k, rank, columns = encoder.shape
    taps, wide = blocks.shape[:2]
    missing = k * columns - wide
    if missing:
        blocks = torch.constant_pad_nd(blocks, (0, missing, 0, 0, 0, missing))
        rows = torch.constant_pad_nd(rows, (0, missing))
    parted = torch.unflatten(blocks, 3, (k, columns)).permute(3, 4, 0, 1, 2)  # (k, y, a, x, b)
    seen = torch.bmm(encoder, parted.flatten(2))  # (k, r, a·x·b)
    seen = seen.reshape(k, rank, taps, k, columns, taps).permute(3, 4, 2, 1, 0, 5)  # (l, x, a, r, k, b)
    square = torch.bmm(encoder, seen.flatten(2)).reshape(k, rank, taps, -1).transpose(0, 1)
    square = square.reshape(rank * k * taps, -1)
    turned = torch.unflatten(rows, 2, (k, columns)).permute(0, 2, 3, 1)  # (f, l, x, a)
    cross = turned.reshape(len(rows), -1) @ seen.reshape(k * columns * taps, -1)
    return square, cross


def _errors(rows: Tensor, scale: Tensor | None, blocks: Tensor, seen: tuple[Tensor, Tensor], rank: int) -> Array:
    root, cross = seen
    measured = cross if scale is None else scale @ cross
    explained = torch.linalg.solve_triangular(root, measured.t(), upper=False).square().sum(1)
    by_rank = array(explained.reshape(rank, -1).sum(1).cumsum(0))
    outputs = rows if scale is None else torch.einsum("gf,fax->gax", scale, rows)
    total = float(torch.einsum("fax,axby,fby->", outputs, blocks, outputs))
    return np.minimum.accumulate(np.maximum(0.0, total - np.append(0.0, by_rank)))


def shrunk(moment: Tensor, share: float) -> Tensor:
    """(1 − share) · M + share · mean variance · I, for each group."""
    mean = moment.diagonal(dim1=1, dim2=2).mean(1)
    found = (1 - share) * moment
    found.diagonal(dim1=1, dim2=2).add_(share * mean[:, None])
    return found


def share_for(count: int, size: int) -> float:
    """How far to draw a moment of `count` samples in `size` dimensions towards the identity."""
    return size / (size + count) if count else 1.0


def root_of(metric: Tensor, share: float = 1e-3) -> Tensor:
    """S with SᵀS the metric (G, f, f), drawn towards the identity, a little unless it is said how far."""
    values, vectors = eigenvectors(shrunk(metric, share))
    values, vectors = values.flip(-1), vectors.flip(-1)  # weakest first, so that small numbers are added up first
    root: Tensor = (vectors * values.clamp_min(0).sqrt()[:, None]) @ vectors.transpose(1, 2)
    return root
