"""`whitened-cp`: a convolution as 1×1, depthwise with the layer's own kernel, 1×1, in the metric of data.

The kernel becomes a sum of R products of a filter's vector, a channel's vector and a small kernel,

    Ŵ[f, c, t] = Σ_{r ≤ R} A[f, r] · B[r, c] · K[r, t],

a canonical polyadic decomposition with all taps in one mode. Row r of P is B[r] ⊗ K[r], and with M = E[x xᵀ] of the
patches and the metric SᵀS of the outputs the pair costs

    ‖S (W − A P) M^{1/2}‖²_F.

For given P the best A is a least-squares fit, so only B and K are searched for (variable projection), by L-BFGS. The
gradient is that of A at its best, and one product P M serves both. A ridge on A, relative to the energy of each
component, keeps components from growing against each other.

*Start.* The right singular vectors of S W are channels × taps; their own singular vectors give the strongest products.
A search may also begin with factors that are known to be near.
*Curves.* Ranks of one decomposition are no part of those of another, so some ranks are fitted, each on one part of the
inputs and measured on the other; the logarithm of the error is interpolated between them. Of a wide layer fewer ranks
are fitted, and one way only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankwise.core.fold import fold_for
from rankwise.core.layer import Layer, canonical
from rankwise.core.linalg import Array, cholesky, eigenvectors, eye_like, precise, singular
from rankwise.core.option import Option
from rankwise.core.parts import Part
from rankwise.decompositions.base import METRIC, Decomposition, Factors, Sample, Scores, Selection, Target
from rankwise.decompositions.tucker import has_taps
from rankwise.decompositions.whitened import is_wide
from rankwise.errors import RankwiseError

SHARES = (0.06, 0.14, 0.28, 0.48, 0.75)  # of the largest useful rank: where a curve is fitted
COARSE = (0.1, 0.3, 0.7)  # the same where a fit takes long
SCORED, BUILT = 20, 60  # steps of L-BFGS at most
WORK = 1e11, 3e11  # multiply-adds to spend on a rank that is scored, and on one that is built
LEAST = 4  # steps, whatever they cost
RIDGE = 1e-5
WIDE = 256  # from this many entries of a patch on, numbers are single


Start = tuple[Tensor, Tensor]  # B (R, c) and K (R, taps)


class WhitenedCP(Decomposition):
    """Pointwise, depthwise, pointwise. Only where there is a kernel, and more than one channel and filter."""

    name = "whitened-cp"
    about = "1×1, a depthwise layer with the layer's own kernel, 1×1, in the metric of calibration data"
    needs = METRIC
    timed_as: str | None = "depthwise"

    def option(self, layer: Layer) -> Option:
        return Option(fold_for(0, layer.dims), 1, self.name)

    def full_rank(self, layer: Layer, option: Option) -> int:
        taps = math.prod(layer.kernel)
        return min(layer.group_channels * taps, layer.group_filters * min(layer.group_channels, taps))

    def parts(self, layer: Layer, option: Option, rank: Any) -> tuple[Part, ...]:
        g, middle = layer.groups, layer.groups * rank
        return (
            Part("encoder", (), layer.channels, middle, g),
            Part("kernel", tuple(range(layer.dims)), middle, middle, middle),
            Part("decoder", (), middle, layer.filters, g),
        )

    def candidates(self, layer: Layer, selection: Selection) -> list[Option]:
        return super().candidates(layer, selection) if is_possible(layer) else []

    def wanted(self, layer: Layer, there: list[Option], selection: Selection) -> list[Option]:
        """It is neither a fold nor a slice: it is offered where neither is asked for."""
        if selection.folds != "all" or selection.slices != "all":
            return []
        return super().wanted(layer, there, selection)

    def check(self, layer: Layer, option: Option, where: str) -> None:
        super().check(layer, option, where)
        if not is_possible(layer):
            raise RankwiseError(
                f"{where} has the decomposition {self.name!r}, which needs a kernel and no transposed convolution: "
                f"take 'whitened' or 'svd' there"
            )

    def score(self, target: Target, selection: Selection) -> Scores:
        layer = target.layer
        if not is_possible(layer) or selection.folds != "all" or selection.slices != "all":
            return Scores()
        option = self.option(layer)
        grid = self.grid(layer, option)
        samples = target.measured()[:1] if is_wide(layer) else target.measured()
        found = np.mean([_curve(target, sample, grid) for sample in samples], axis=0)
        curve = between(found, grid, self.full_rank(layer, option))
        return Scores(given={option: {"effect": curve}})

    def grid(self, layer: Layer, option: Option) -> list[int]:
        """Ranks up to the largest that is smaller than the layer in some unit."""
        most = 1
        for by_rank, whole in zip(self.costs(layer, option), (layer.params, layer.macs), strict=True):
            if by_rank is not None and whole:
                most = max(most, int(by_rank.searchsorted(whole)) - 1)
        most = min(most, self.full_rank(layer, option))
        return sorted({max(1, round(share * most)) for share in (COARSE if is_wide(layer) else SHARES)})

    def factors(self, target: Target, option: Option, rank: int) -> Factors:
        layer = target.layer
        problems = _problems(_with_moment(target))
        starts = _starts(target.start, layer.groups)
        effort = (BUILT, WORK[1]) if target.start is None else (SCORED, WORK[0])
        found = [fit(problem, rank, *effort, start) for problem, start in zip(problems, starts, strict=True)]
        decoder, encoder, kernel = (torch.stack(p) for p in zip(*(one.balanced() for one in found), strict=True))
        ones, g = (1,) * layer.dims, layer.groups
        return Factors(
            {
                "encoder": [precise(encoder).reshape(g, rank, -1, *ones)],
                "kernel": [precise(kernel).reshape(g * rank, 1, 1, *layer.kernel)],
                "decoder": [precise(decoder).reshape(g, -1, rank, *ones)],
            }
        )


DECOMPOSITION = WhitenedCP()


def is_possible(layer: Layer) -> bool:
    return has_taps(layer) and not layer.transposed and min(layer.group_filters, layer.group_channels) > 1


def between(errors: Array, grid: list[int], most: int) -> Array:
    """A curve over all ranks from those of the grid; `errors` begins with that of rank 0. It never rises."""
    errors = np.minimum.accumulate(np.maximum(errors, 0.0))
    ranks = [0, *grid]
    floor = 1e-12 * max(errors[0], 1e-300)
    curve: Array = np.exp(np.interp(np.arange(most + 1), ranks, np.log(np.maximum(errors, floor))))
    curve[curve <= 1.001 * floor] = 0.0
    return curve


@dataclass(frozen=True, eq=False)
class Problem:
    """One group: the weight W (f, d) with d = channels × taps, M (d, d), the root S (f, f) of the metric, or none."""

    weight: Tensor
    moment: Tensor
    root: Tensor | None
    taps: int

    @property
    def scaled(self) -> Tensor:
        """S W."""
        return self.weight if self.root is None else self.root @ self.weight


@dataclass(frozen=True, eq=False)
class Found:
    """A (f, R), B (R, c) and K (R, taps)."""

    decoder: Tensor
    encoder: Tensor
    kernel: Tensor

    @property
    def weight(self) -> Tensor:
        """(f, d)."""
        return self.decoder @ _products(self.encoder, self.kernel)

    def balanced(self) -> tuple[Tensor, Tensor, Tensor]:
        """Components as large in every mode: finite in float16, and alike under weight decay."""
        modes = [self.decoder.t(), self.encoder, self.kernel]
        sizes = torch.stack([mode.norm(dim=1) for mode in modes])
        share = sizes.prod(dim=0) ** (1 / 3)
        safe = sizes.where(sizes > 0, torch.ones_like(sizes))
        left, encoder, kernel = (mode * (share / size)[:, None] for mode, size in zip(modes, safe, strict=True))
        return left.t(), encoder, kernel


def _with_moment(target: Target) -> Target:
    """The weight alone where nothing was seen: all patches and outputs count alike."""
    if target.moment is not None:
        return target
    layer = target.layer
    size = layer.group_channels * math.prod(layer.kernel)
    return replace(target, moment=torch.eye(size, dtype=torch.float64).expand(layer.groups, size, size))


def _problems(target: Target, sample: Sample | None = None) -> list[Problem]:
    layer = target.layer
    moment = target.moment if sample is None else sample.moment
    metric = target.metric if sample is None else sample.metric
    assert moment is not None, "whoever fits has seen data"
    rows = precise(canonical(target.weight.detach(), layer).flatten(2))
    kind = torch.float32 if rows.shape[-1] >= WIDE else torch.float64
    return [
        Problem(
            rows[g].to(moment.device, kind),
            moment[g].to(kind),
            None if metric is None else metric[g].to(kind),
            math.prod(layer.kernel),
        )
        for g in range(layer.groups)
    ]


def _curve(target: Target, sample: Sample, grid: list[int]) -> Array:
    """At rank 0 and at the ranks of the grid: fitted to the sample, measured on what it was not fitted to."""
    lost = np.zeros(1 + len(grid))
    for g, problem in enumerate(_problems(target, sample)):
        moment = sample.test_moment[g].to(problem.weight)
        metric = None if sample.test_metric is None else sample.test_metric[g].to(problem.weight)
        gaps = [problem.weight, *(problem.weight - one.weight for one in fits(problem, grid))]
        for i, gap in enumerate(gaps):
            outputs = gap if metric is None else metric @ gap
            lost[i] += float((outputs * (gap @ moment)).sum())
    return lost


def fits(problem: Problem, grid: list[int]) -> list[Found]:
    return [fit(problem, rank, SCORED, WORK[0]) for rank in grid]


def _starts(start: Factors | None, groups: int) -> list[Start | None]:
    """B and K for each group, of factors that `factors` gave."""
    if start is None:
        return [None] * groups
    encoder, kernel = start.weights["encoder"][0], start.weights["kernel"][0]
    return list(zip(encoder.flatten(2), kernel.reshape(groups, encoder.shape[1], -1), strict=True))


def fit(problem: Problem, rank: int, steps: int, work: float, start: Start | None = None) -> Found:
    """L-BFGS over B and K from the start, or the strongest products; the best point that was seen."""
    size = problem.weight.shape[1]
    if rank >= min(size, len(problem.weight) * min(problem.taps, size // problem.taps)):
        return _whole(problem)
    each = rank * size * (size + rank + 2 * len(problem.weight))
    steps = int(min(steps, max(LEAST, work / max(1, each))))
    search = _Search(problem, start or strongest(problem, rank))
    if search.total > 0:
        solver = torch.optim.LBFGS(
            [search.encoder, search.kernel],
            max_iter=steps,
            max_eval=steps + 2 + steps // 4,
            history_size=20,
            line_search_fn="strong_wolfe",
        )
        solver.step(search)  # type: ignore[no-untyped-call]
    return search.best()


def _whole(problem: Problem) -> Found:
    """Full rank, exactly: every component is one tap of one channel, or a singular direction of one filter."""
    filters, size = problem.weight.shape
    each = min(problem.taps, size // problem.taps)
    if size <= filters * each:
        same = torch.unflatten(eye_like(problem.moment), 1, (-1, problem.taps))
        return Found(problem.weight, same.sum(2), same.sum(1))
    left, sizes, right = singular(torch.unflatten(problem.weight, 1, (-1, problem.taps)))
    mine = torch.eye(filters, dtype=sizes.dtype, device=sizes.device)[:, :, None] * sizes
    return Found(mine.flatten(1), left.mT.flatten(0, 1), right.flatten(0, 1))


def _products(encoder: Tensor, kernel: Tensor) -> Tensor:
    """P (R, c · taps)."""
    return (encoder[:, :, None] * kernel[:, None, :]).flatten(1)


def strongest(problem: Problem, rank: int) -> tuple[Tensor, Tensor]:
    """B and K of the strongest products of a channel's and a tap's vector in S W."""
    scaled = problem.scaled
    if len(scaled) <= scaled.shape[1]:
        rows = eigenvectors(scaled @ scaled.t())[1].t() @ scaled  # Σ Vᵀ
    else:
        values, vectors = eigenvectors(scaled.t() @ scaled)
        rows = values.clamp_min(0).sqrt()[:, None] * vectors.t()
    left, sizes, right = singular(torch.unflatten(rows, 1, (-1, problem.taps)))
    order = sizes.flatten().argsort(descending=True, stable=True)[:rank]
    encoder, kernel = left.mT.flatten(0, 1)[order], right.flatten(0, 1)[order]
    return encoder.contiguous(), kernel.contiguous()


class _Search:
    """The loss as a function of B and K, as L-BFGS asks for it, with the gradient in closed form."""

    def __init__(self, problem: Problem, start: Start) -> None:
        self.problem = problem
        encoder, kernel = (part.detach().to(problem.weight).clone() for part in start)
        self.encoder, self.kernel = encoder.requires_grad_(), kernel.requires_grad_()
        scaled = problem.scaled
        self.aim = scaled @ problem.moment  # S W M
        self.total = float((self.aim * scaled).sum())
        self.lowest, self.kept = math.inf, (encoder.detach(), kernel.detach())

    @torch.no_grad()
    def __call__(self) -> float:
        encoder, kernel = self.encoder.detach(), self.kernel.detach()
        decoder, turned, kept = self.decoder(encoder, kernel)
        loss = (self.total - kept) / self.total
        if loss < self.lowest:
            self.lowest, self.kept = loss, (encoder.clone(), kernel.clone())
        square = decoder.t() @ decoder
        square.diagonal().mul_(1 + RIDGE)
        slope = (square @ turned - decoder.t() @ self.aim) * (2 / self.total)
        slope = torch.unflatten(slope, 1, (-1, self.problem.taps))
        self.encoder.grad = (slope @ kernel[:, :, None]).squeeze(2)
        self.kernel.grad = (encoder[:, None] @ slope).squeeze(1)
        return loss

    def decoder(self, encoder: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor, float]:
        """S A at its best, P M, and what is explained."""
        products = _products(encoder, kernel)
        turned = products @ self.problem.moment
        square = turned @ products.t()
        square = (square + square.t()) / 2
        scale = square.diagonal().clamp_min(1e-30).rsqrt()
        square = scale[:, None] * square * scale
        square.diagonal().add_(RIDGE)
        root = cholesky(square, 1e-9)
        cross = (self.aim @ products.t()) * scale
        half = torch.linalg.solve_triangular(root, cross.t(), upper=False)
        found: Tensor = torch.linalg.solve_triangular(root.t(), half, upper=True).t() * scale
        return found, turned, float(half.square().sum())

    @torch.no_grad()
    def best(self) -> Found:
        encoder, kernel = self.kept
        decoder = self.decoder(encoder, kernel)[0]
        if self.problem.root is not None:
            decoder = torch.linalg.pinv(self.problem.root, hermitian=True) @ decoder
        return Found(decoder, encoder, kernel)
