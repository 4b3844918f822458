"""`cp`: canonical polyadic decomposition of a convolution, Lebedev et al. (2015).

A kernel becomes a sum of R products of vectors, one vector for each of its modes,

    Ŵ[f, c, h, w] = Σ_{r ≤ R} A[f, r] · B[c, r] · H[h, r] · V[w, r]

and the layer a 1×1 layer (B), a depthwise layer for each kernel axis longer than 1 (κ₁×1 with H, 1×κ₂ with V), and a
1×1 layer (A). Kernels of one or three axes have one or three such layers in the middle; without any, an svd is left.

*Start.* Rotated into the eigenvectors of its kernel modes, W is a grid of matrices f × c; the R strongest singular
directions of all of them together are a decomposition of rank R. They are orthogonal to each other, so the error is the
energy of those that are left out: a closed form for every rank, and exact at rank taps · min(f, c).

*Improvement.* Alternating least squares, each step with a proximal term μ‖X − X_old‖². It minimises the error over one
mode with the others fixed, so the error never rises, and the term keeps components from growing against each other,
where plain alternation degenerates. It is run for GRID ranks; between them a curve holds the last of these, or the
closed form where that is lower. What is built starts from both, so it is never worse than what was scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankwise.core.fold import fold_for
from rankwise.core.layer import Layer, canonical
from rankwise.core.linalg import Array, array, eye_like, factor, leading, precise
from rankwise.core.option import Option
from rankwise.core.parts import Part
from rankwise.decompositions import slices
from rankwise.decompositions.base import Alone, Decomposition, Factors, Scores, Selection, Target, patch_moment

GRID = 14  # ranks at which the error is found by alternation
STEPS = 100  # rounds over all modes at most
WORK = 4e10  # multiply-adds to spend on one rank; three rounds at least
SETTLED = 1e-6  # a round that gains less than this share of the weight's energy is the last
PROXIMAL = 1e-3  # of the mean diagonal of the normal equations

Modes = list[Tensor]  # one matrix (size of the mode, R) for each mode: filters, channels, long kernel axes


class CanonicalPolyadic(Decomposition):
    """Pointwise, depthwise along each kernel axis, pointwise."""

    name = "cp"
    about = "canonical polyadic: 1×1, a depthwise layer along each kernel axis, 1×1; least total energy"
    timed_as: str | None = "cp"
    alone = Alone("energy", "sum")

    def option(self, layer: Layer) -> Option:
        return Option(fold_for(0, layer.dims), 1, self.name)

    def full_rank(self, layer: Layer, option: Option) -> int:
        return math.prod(layer.kernel) * min(layer.group_filters, layer.group_channels)

    def parts(self, layer: Layer, option: Option, rank: Any) -> tuple[Part, ...]:
        g, middle = layer.groups, layer.groups * rank
        along = [Part(f"kernel{i}", axes, middle, middle, middle) for i, axes in enumerate(_stages(layer))]
        return (
            Part("encoder", (), layer.channels, middle, g),
            *along,
            Part("decoder", (), middle, layer.filters, g),
        )

    def candidates(self, layer: Layer, selection: Selection) -> list[Option]:
        if _stages(layer):
            return super().candidates(layer, selection)
        return slices.DECOMPOSITION.candidates(layer, replace(selection, folds=0, slices=1))

    def wanted(self, layer: Layer, there: list[Option], selection: Selection) -> list[Option]:
        if _stages(layer):
            return super().wanted(layer, there, selection)
        return slices.DECOMPOSITION.wanted(layer, there, replace(selection, folds=0, slices=1))

    def score(self, target: Target, selection: Selection) -> Scores:
        """`energy`, relative to ‖W‖²_F, and `residual`, which is not."""
        layer = target.layer
        if not _stages(layer):
            return slices.DECOMPOSITION.score(target, replace(selection, folds=0, slices=1))
        option, kernels = self.option(layer), _kernels(target.weight, layer)
        total = float(kernels.square().sum())
        lost = sum((_closed_form(w) for w in kernels), start=np.zeros(1))
        for rank in self.grid(layer, option):
            found = sum(_error(w, _alternate(w, _start(w, rank))) for w in kernels)
            lost[rank:-1] = np.minimum(lost[rank:-1], found)
        return Scores(given={option: {"energy": lost / total if total > 0 else 0 * lost, "residual": lost}})

    def output_errors(self, target: Target, options: Iterable[Option]) -> dict[Option, Array]:
        """At the ranks of the grid; in between, what the rank below loses."""
        assert target.inputs is not None, "the measure output was asked for with calibration data"
        layer, moment = target.layer, patch_moment(target.layer, target.inputs.second_moment)
        dense = precise(canonical(target.weight, layer).flatten(2))
        found = {}
        for option in options:
            lost = np.full(self.full_rank(layer, option) + 1, float(_through(dense, moment)))
            for rank in self.grid(layer, option):
                gap = dense - canonical(self.approximation(target, option, rank), layer).flatten(2)
                lost[rank:] = min(lost[rank], float(_through(gap, moment)))
            lost[-1] = 0.0
            found[option] = lost
        return found

    def grid(self, layer: Layer, option: Option) -> list[int]:
        """Ranks from 1 to the largest that is smaller than the layer in some unit, evenly spaced on a log scale."""
        most = 1
        for by_rank, whole in zip(self.costs(layer, option), (layer.params, layer.macs), strict=True):
            if by_rank is not None and whole:
                most = max(most, int(by_rank.searchsorted(whole)) - 1)
        most = min(most, self.full_rank(layer, option) - 1)
        return sorted({round(most ** (i / (GRID - 1))) for i in range(GRID)}) if most > 0 else []

    def factors(self, target: Target, option: Option, rank: int) -> Factors:
        layer = target.layer
        below = max((r for r in self.grid(layer, option) if r <= rank), default=0)
        found = [_built(w, rank, below) for w in _kernels(target.weight, layer)]
        modes = [torch.stack(each) for each in zip(*found, strict=True)]  # (G, size, R) for each mode
        ones = (1,) * layer.dims
        weights = {"encoder": [modes[1].mT.reshape(layer.groups, rank, -1, *ones)]}
        for i, axes in enumerate(_stages(layer)):
            shape = [layer.kernel[a] if a in axes else 1 for a in range(layer.dims)]
            weights[f"kernel{i}"] = [modes[2 + i].mT.reshape(layer.groups * rank, 1, 1, *shape)]
        weights["decoder"] = [modes[0].reshape(layer.groups, -1, rank, *ones)]
        return Factors(weights)


DECOMPOSITION = CanonicalPolyadic()


def _stages(layer: Layer) -> list[tuple[int, ...]]:
    """The axes of each depthwise layer: one longer than 1, and with the first of them those of length 1 (strides)."""
    long = [a for a in range(layer.dims) if layer.kernel[a] > 1]
    short = tuple(a for a in range(layer.dims) if layer.kernel[a] == 1)
    return [(a, *short) if a == long[0] else (a,) for a in long]


def _kernels(weight: Tensor, layer: Layer) -> Tensor:
    """The weight as (G, f/G, c/G, long kernel axes) in float64."""
    whole = precise(canonical(weight.detach(), layer))
    return whole.reshape(*whole.shape[:3], *(k for k in layer.kernel if k > 1))


def _through(rows: Tensor, moment: Tensor) -> Tensor:
    return torch.einsum("gfa,gab,gfb->", rows, moment, rows)


def _unfold(w: Tensor, mode: int) -> Tensor:
    return w.movedim(mode, 0).flatten(1)


def _rotated(w: Tensor) -> tuple[Tensor, Modes]:
    """The kernel axes in the coordinates of their own eigenvectors, and these vectors."""
    bases = []
    for mode in range(2, w.ndim):
        bases.append(leading(_unfold(w, mode)))
        w = torch.tensordot(w, bases[-1], dims=([mode], [0])).movedim(-1, mode)
    return w, bases


def _directions(w: Tensor) -> tuple[Modes, Tensor]:
    """Components of full rank, strongest first, as modes, and the energy of each. They are orthogonal to each other."""
    turned, bases = _rotated(w)
    taps = turned.shape[2:]
    columns: list[list[Tensor]] = [[] for _ in range(w.ndim)]
    for place in np.ndindex(*taps):
        left, right = factor(turned[(slice(None), slice(None), *place)])
        count = min(w.shape[:2])
        columns[0].append(left[:, :count])
        columns[1].append(right[:count].t())
        for basis, at, mine in zip(bases, place, columns[2:], strict=True):
            mine.append(basis[:, at : at + 1].expand(-1, count))
    modes = [torch.cat(mine, dim=1) for mine in columns]
    energy = modes[1].square().sum(0)
    order = energy.argsort(descending=True, stable=True)
    return [mode[:, order] for mode in modes], energy[order]


def _closed_form(w: Tensor) -> Array:
    """‖W − Ŵ‖² by rank for the strongest directions; at full rank nothing is lost."""
    energy = array(_directions(w)[1])
    return np.append(np.cumsum(energy[::-1])[::-1], 0.0)


def _start(w: Tensor, rank: int) -> Modes:
    return [mode[:, :rank] for mode in _directions(w)[0]]


def _product(modes: Modes) -> Tensor:
    """Σ_r of the outer products, with all modes."""
    letters = "abcde"[: len(modes)]
    return torch.einsum(",".join(f"{x}r" for x in letters) + "->" + letters, *modes)


def _error(w: Tensor, modes: Modes) -> float:
    return float((w - _product(modes)).square().sum())


def _alternate(w: Tensor, modes: Modes) -> Modes:
    """Proximal alternating least squares from `modes`; the error never rises."""
    rank, total = modes[0].shape[1], float(w.square().sum())
    rounds = int(min(STEPS, max(3, WORK / max(1, w.ndim * w.numel() * rank))))
    best, error = modes, _error(w, modes)
    for _ in range(rounds):
        modes = _round(w, _even(modes))
        now = _error(w, modes)
        if not now < error:
            break  # settled, but for rounding
        gain, best, error = error - now, modes, now
        if gain <= SETTLED * total:
            break
    return _even(best)


def _round(w: Tensor, modes: Modes) -> Modes:
    modes = list(modes)
    for n in range(w.ndim):
        others = [m for i, m in enumerate(modes) if i != n]
        gram = torch.stack([m.t() @ m for m in others]).prod(dim=0)
        letters = "abcde"[: w.ndim]
        terms = ",".join(f"{x}r" for i, x in enumerate(letters) if i != n)
        seen = torch.einsum(f"{letters},{terms}->{letters[n]}r", w, *others)
        near = PROXIMAL * float(gram.diagonal().mean())
        normal = gram + max(near, 1e-300) * eye_like(gram)
        modes[n] = torch.linalg.solve(normal, (seen + near * modes[n]).t()).t()
    return modes


def _even(modes: Modes) -> Modes:
    """The same product with components as large in every mode: finite in float16, and alike under weight decay."""
    sizes = torch.stack([m.norm(dim=0) for m in modes])
    whole = sizes.prod(dim=0)
    share = whole ** (1 / len(modes))
    safe = sizes.where(sizes > 0, torch.ones_like(sizes))
    return [m / size * share for m, size in zip(modes, safe, strict=True)]


def _built(w: Tensor, rank: int, below: int) -> Modes:
    """The best of two: from the strongest directions, and from the grid's rank below and the strongest of the rest."""
    if rank >= math.prod(w.shape[2:]) * min(w.shape[:2]):
        return _even(_start(w, rank))
    found = _alternate(w, _start(w, rank))
    if not 0 < below < rank:
        return found
    first = _alternate(w, _start(w, below))
    rest = _start(w - _product(first), rank - below)
    other = _alternate(w, [torch.cat(both, dim=1) for both in zip(first, rest, strict=True)])
    return min(found, other, key=lambda modes: _error(w, modes))
