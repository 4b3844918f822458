"""How far moments and metrics are drawn towards the identity, chosen by errors on inputs that were not fitted to.

A covariance of few samples in many dimensions has directions in which nothing seems to happen, and factors that are
fitted to it give them up for free. Drawn towards a multiple of the identity, (1 − s) M + s · mean variance · 1, it does
not. For each layer s is the candidate with the least error of one half of the inputs on the other, both ways; s = 1 for
both is the SVD of the weight alone, so fitting is never worse than that on held-out inputs. Candidates are a grid and
closed forms that count inputs, not patches: d / (d + n), and oracle approximating shrinkage (Chen et al. 2010).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rankwise.calibration.influence import Half, Influence, Shares
from rankwise.core.layer import Layer, canonical
from rankwise.core.linalg import Array, cholesky, eigenvectors, precise, working
from rankwise.decompositions import Sample, Target
from rankwise.decompositions.held_out import projection_errors, root_from
from rankwise.decompositions.whitened import root_of, share_for, shrunk

INPUTS = (0.01, 0.03, 0.1, 0.3, 0.6, 0.85, 1.0)
METRICS = (1e-3, 0.03, 0.2, 0.6, 1.0)
CALM = (0.0, 0.3, 0.7, 1.0)  # towards the moments of single positions
CLEAR = 0.05  # of a mean logarithm of errors
TINY = 1e-9  # of the mean, added to the diagonal of a metric
SINGLE = 256  # inputs of a layer of tokens from which on its errors are measured in single precision
NARROW = 128  # inputs from which on shares are chosen in single precision
FIRST = 1e-3  # share of the metric while that of the inputs is chosen, and of both where there is one half only


def choose_shares_(layer: Layer, weight: Tensor, one: Influence, least: float) -> Shares | None:
    """Choose the shares of a layer and leave those for both halves together in `one`; gives those for one half.

    None where there is a single input: nothing is held out, so a closed form has to do.
    """
    halves = _halves(one)
    if halves is None:
        size = one.means[0].shape[-1]
        one.shares = Shares(max(least, share_for(one.count, size)), FIRST, 0.5)
        return None
    shares = _by_count(one, halves, least) or choose(layer, weight, halves, least)
    one.shares = shares.doubled()
    return shares


def _by_count(one: Influence, halves: tuple[_Evidence, _Evidence], least: float) -> Shares | None:
    """In closed form, d / (d + n), where positions are samples of their own.

    On a Llama the best of the grid was 0.03 to 0.1 for inputs and 0.03 to 0.2 for outputs, and positions count to 0.06
    and to 0.04 to 0.1; the search took half of the time.
    """
    moment, metric = halves[0].test_moment, halves[0].test_metric
    if not one.by_token or moment is not halves[0].calm_moment:
        return None
    seen = min(half.seen.count for half in one.halves)
    pulled = int(min(half.gammas * half.places for half in one.halves))
    outputs = FIRST if metric is None else share_for(pulled, metric.shape[-1])
    return Shares(max(least, share_for(seen, moment.shape[-1])), outputs, 0.0)


def target_for(layer: Layer, weight: Tensor, one: Influence, least: float) -> Target:
    """What a layer is fitted to, and the two halves that errors are measured with; `one` is settled."""
    shares, halves = choose_shares_(layer, weight, one, least), _halves(one)
    samples: tuple[Sample, ...] = ()
    if shares is not None and halves is not None:
        if one.by_token and layer.channels >= SINGLE:
            halves = halves[0].single(), halves[1].single()
        samples = tuple(
            Sample(*fitted.drawn(shares, math.prod(layer.kernel) == 1), tested.test_moment, tested.test_metric)
            for fitted, tested in (halves, halves[::-1])
        )
    settle_(layer, weight, one, least)
    return replace(target_of_both(layer, weight, one), samples=samples)


def target_of_both(layer: Layer, weight: Tensor, one: Influence) -> Target:
    """With the moments of both halves together to fit with."""
    if one.settled is not None:
        moment = working(one.settled[0])
        metric = None if one.settled[1] is None else one.settled[1].to(moment)
    else:
        assert one.shares is not None, "shares are chosen before anything is fitted"
        moment, metric = evidence_of(one, one.both).drawn(one.shares, math.prod(layer.kernel) == 1)
    return Target(layer, weight, moment=moment, metric=metric)


def settle_(layer: Layer, weight: Tensor, one: Influence, least: float) -> None:
    """Choose the shares if that has not been done, and keep no more than a fit needs."""
    if one.settled is not None or not one.whole or not one.count:
        return
    if one.shares is None:
        choose_shares_(layer, weight, one, least)
    target = target_of_both(layer, weight, one)
    assert target.moment is not None
    one.settle_(target.moment, target.metric)


@dataclass(frozen=True, eq=False)
class _Evidence:
    """Of some inputs: what errors are measured with on them, and the moments of single positions, to draw it towards.

    Both are in the same unit: tr(metric ΔW moment ΔWᵀ) is the effect of ΔW.
    """

    test_moment: Tensor
    test_metric: Tensor | None
    calm_moment: Tensor
    calm_metric: Tensor | None
    samples: int

    def mixed(self, share: float) -> tuple[Tensor, Tensor | None]:
        moment = _towards(self.test_moment, self.calm_moment, share)
        if self.test_metric is None or self.calm_metric is None:
            return moment, None
        return moment, _towards(self.test_metric, self.calm_metric, share)

    def single(self) -> _Evidence:
        """In single precision: errors relative to the whole are right to about 1e-6, and take half of the time."""
        found = [
            None if part is None else part.float()
            for part in (self.test_moment, self.test_metric, self.calm_moment, self.calm_metric)
        ]
        if self.test_moment is self.calm_moment:
            found[2:] = found[:2]
        moment, metric, calm_moment, calm_metric = found
        assert moment is not None
        assert calm_moment is not None
        return _Evidence(moment, metric, calm_moment, calm_metric, self.samples)

    def spread(self, taps: int) -> _Evidence:
        """With a metric of so many outputs for each filter."""

        def each(metric: Tensor | None) -> Tensor | None:
            if metric is None:
                return None
            same = torch.eye(taps, dtype=metric.dtype, device=metric.device)
            return torch.stack([torch.kron(one, same) for one in metric])

        return replace(self, test_metric=each(self.test_metric), calm_metric=each(self.calm_metric))

    def drawn(self, shares: Shares, flat: bool = False) -> tuple[Tensor, Tensor | None]:
        """Moment and root S of the metric to fit with.

        Of a layer without taps (`flat`) only SᵀS matters, so the Cholesky factor will do: 25 times faster than the
        symmetric root at a width of 768.
        """
        moment, metric = self.mixed(shares.calm)
        drawn = shrunk(moment, shares.moment)
        if metric is None:
            return drawn, None
        if flat and len(metric) == 1:
            whole = shrunk(metric, shares.metric)[0]
            return drawn, cholesky(whole, TINY * float(whole.diagonal().mean())).t()[None]
        return drawn, root_of(metric, shares.metric)


def _towards(matrix: Tensor, calm: Tensor, share: float) -> Tensor:
    """(1 − share) · matrix + share · the other one, scaled to the same trace."""
    whole, other = (m.diagonal(dim1=1, dim2=2).sum() for m in (matrix, calm))
    if matrix is calm or not float(other) > 0:
        return matrix
    return (1 - share) * matrix + share * float(whole / other) * calm


def evidence_of(one: Influence, half: Half) -> _Evidence:
    seen = half.seen
    calm = working(seen.covariance if one.centred else seen.second_moment)
    if one.is_output:
        moment = calm * (half.level * half.places / one.variance)
        return _Evidence(moment, None, moment, None, half.samples)
    metric = working(half.metric).to(calm)
    if not half.moment.ndim:  # positions as if they were independent
        return _Evidence(calm, metric, calm, metric, half.samples)
    size = float(half.outer.diagonal(dim1=1, dim2=2).sum())
    outer = working(half.outer).to(calm) / (size or 1.0)
    return _Evidence(working(half.moment), outer, calm, metric, half.gammas)


def _halves(one: Influence) -> tuple[_Evidence, _Evidence] | None:
    """Both halves, if both have been seen."""
    if not all(half.seen.count and half.samples and (half.gammas or one.is_output) for half in one.halves):
        return None
    first, second = (evidence_of(one, half) for half in one.halves)
    return first, second


def choose(layer: Layer, weight: Tensor, halves: tuple[_Evidence, _Evidence], least: float) -> Shares:
    """The shares with the least error of one half on the other, both ways, over all useful ranks of one slice."""
    matrices = precise(canonical(weight.detach(), layer).flatten(2)).to(halves[0].calm_moment)
    if layer.transposed:  # every tap is an output of its own
        taps = math.prod(layer.kernel)
        matrices = torch.unflatten(matrices, 2, (-1, taps)).transpose(2, 3).flatten(1, 2)
        halves = halves[0].spread(taps), halves[1].spread(taps)
    elif halves[0].calm_moment.shape[-1] >= NARROW:
        halves = halves[0].single(), halves[1].single()
        matrices = matrices.float()
    both = (halves, halves[::-1])
    size, count = halves[0].calm_moment.shape[-1], halves[0].samples
    closed = (share_for(count, size), _oracle(halves[0].calm_moment, count))
    inputs = sorted({max(least, s) for s in (*INPUTS, *closed)})

    def sides(calm: float) -> list[_Side]:
        return [_Side(w, g, fitted, tested, calm) for fitted, tested in both for g, w in enumerate(matrices)]

    # One share after the other: all of them together would take four times as long, for a few thousandths.
    calm, mixed = 0.0, sides(0.0)
    moment, lowest = _least(inputs, partial(_loss, mixed, FIRST))
    metric = FIRST
    if halves[0].test_metric is not None:
        metric, lowest = _least(METRICS, partial(_loss_by_metric, mixed, moment))
    if halves[0].test_moment is halves[0].calm_moment:
        return Shares(moment, metric, calm)
    for share in CALM[1:]:
        other = sides(share)
        found = _loss(other, metric, moment)
        if found >= lowest:
            break
        calm, mixed, lowest = share, other, found
    if calm:
        moment, _ = _least([s for s in inputs if s <= max(moment, least)] or [moment], partial(_loss, mixed, metric))
    return Shares(moment, metric, calm)


def _oracle(moment: Tensor, count: int) -> float:
    """Oracle approximating shrinkage for `count` samples of a normal distribution, mean over groups."""
    d = moment.shape[-1]
    trace, power = moment.diagonal(dim1=1, dim2=2).sum(1), moment.flatten(1).square().sum(1)
    top = (1 - 2 / d) * power + trace.square()
    bottom = (count + 1 - 2 / d) * (power - trace.square() / d)
    return float((top / bottom.clamp_min(1e-300)).clamp(0.01, 1).mean())


def _least(candidates: Iterable[float], loss: Callable[[float], float]) -> tuple[float, float]:
    """The best of rising candidates and its loss; those behind a clear rise are not tried."""
    best, lowest = 1.0, math.inf
    for candidate in candidates:
        found = loss(candidate)
        if found < lowest:
            best, lowest = candidate, found
        elif found > lowest + CLEAR:
            break
    return best, lowest


class _Side:
    """One group, fitted on one half and measured on the other, on the smaller side of its matrix (f, d)."""

    def __init__(self, weight: Tensor, group: int, fitted: _Evidence, tested: _Evidence, calm: float) -> None:
        self.shape = weight.shape
        self.tall = len(weight) > weight.shape[1]
        moments, metrics = fitted.mixed(calm)
        moment, test = moments[group], tested.test_moment[group]
        metric, test_metric = (None if m is None else m[group] for m in (metrics, tested.test_metric))
        self.mean = float(moment.diagonal().mean())
        self.weigh = 1.0 if metric is None else float(metric.diagonal().mean())
        self.plain = weight.t() @ weight if self.tall else weight @ weight.t()
        self.outer: Tensor | None
        self.outer_test: Tensor | None
        if self.tall:
            self.outer, self.outer_test = moment, test
            self.inner = self.plain if metric is None else weight.t() @ metric @ weight
            self.inner_test = self.plain if test_metric is None else weight.t() @ test_metric @ weight
        else:
            self.outer, self.outer_test = metric, test_metric
            self.inner, self.inner_test = weight @ moment @ weight.t(), weight @ test @ weight.t()
        self.parts = None if self.outer is None else eigenvectors(self.outer)

    def errors(self, moment: float, metric: float) -> Array:
        """By rank. Drawing a matrix towards the identity changes its eigenvalues and not its eigenvectors."""
        inside, outside = (metric, moment) if self.tall else (moment, metric)
        level, height = (self.weigh, self.mean) if self.tall else (self.mean, self.weigh)
        inner = (1 - inside) * self.inner + inside * level * self.plain
        root = None
        if self.parts is not None:
            values, vectors = self.parts
            root = root_from((1 - outside) * values + outside * height, vectors)
        return projection_errors(root, inner, self.outer_test, self.inner_test)


def _loss_by_metric(sides: list[_Side], moment: float, metric: float) -> float:
    return _loss(sides, metric, moment)


def _loss(sides: list[_Side], metric: float, moment: float) -> float:
    """Mean over the ranks at which a pair is smaller than the matrix of log errors: every size of pair counts alike."""
    curves = np.sum([side.errors(moment, metric) for side in sides], axis=0)
    rows, columns = sides[0].shape
    most = max(2, 1 + rows * columns // (rows + columns))
    relative = np.maximum(curves[1:most], 1e-9 * max(curves[0], 1e-300)) / max(curves[0], 1e-300)
    return float(np.log(relative).mean()) if len(relative) else 0.0
