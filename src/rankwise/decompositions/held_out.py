"""What fitted factors lose on inputs that they were not fitted to, for all ranks at once.

Factors that follow from moments M and a metric SᵀS of some inputs are measured with M' and G' of others:

    tr(G' (W − Ŵ) M' (W − Ŵ)ᵀ)

Ŵ of rank j is a sum of j terms, and those of rank j are the first of those of rank j + 1. So the error is a sum over
the entries of a product of two matrices, entry by entry, and all ranks are its leading (or trailing) blocks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rankwise.core.layer import Layer, canonical
from rankwise.core.linalg import Array, array, eigenvectors, eye_like, precise

TINY = 1e-12  # of the largest eigenvalue: below it a root has no inverse
CHUNKS = 24  # ranks at which both ranks of a core are measured together


def leading(products: Tensor) -> Array:
    """Sums of the leading blocks of a symmetric matrix: entry j is that of the first j rows and columns."""
    steps = 2 * products.tril(-1).sum(1) + products.diagonal()
    return np.append(0.0, array(steps.cumsum(0)))


def trailing(products: Tensor) -> Array:
    """Entry j is the sum without the first j rows and columns."""
    return leading(products.flip(0, 1))[::-1].copy()


def any_root(square: Tensor) -> tuple[Tensor, Tensor]:
    """R with RᵀR a positive semi-definite matrix, and its inverse where it has one: by Cholesky, or symmetric."""
    root, info = torch.linalg.cholesky_ex(square, upper=True)
    if not int(info):
        return root, _inverse(root)
    return root_from(*eigenvectors(square))


def _inverse(root: Tensor) -> Tensor:
    """Of a triangular root; of a symmetric one where it has one."""
    found: Tensor
    if bool(root.tril(-1).any()):
        found = torch.linalg.pinv(root, hermitian=True)
    else:
        found = torch.linalg.solve_triangular(root, eye_like(root), upper=True)
    return found


def root_from(values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    root = values.clamp_min(0).sqrt()
    real = values > TINY * values[0].clamp_min(1e-300)
    inverse = torch.where(real, root, 1.0).reciprocal() * real
    return (vectors * root) @ vectors.t(), (vectors * inverse) @ vectors.t()


def projection_errors(
    root: tuple[Tensor, Tensor] | None, inner: Tensor, outer_test: Tensor | None, inner_test: Tensor
) -> Array:
    """Of Δ = (1 − P) for projections P on the strongest directions, tr(outer' Δ inner' Δᵀ) by rank.

    `root` is R with RᵀR the outer matrix, and its inverse (None: the identity); the directions U are those of
    R · inner · Rᵀ, and P = R⁻¹ U Uᵀ R. With inner = W M Wᵀ and the metric outside these are the outputs' directions;
    with inner = Wᵀ SᵀS W and M outside they are the inputs'.
    """
    gram = inner if root is None else root[0] @ inner @ root[0].t()
    directions = eigenvectors((gram + gram.t()) / 2)[1]
    one, other = (directions, directions) if root is None else (root[1] @ directions, root[0].t() @ directions)
    outside = one.t() @ (one if outer_test is None else outer_test @ one)
    inside = other.t() @ (inner_test @ other)
    return trailing(outside * inside)


def whole_slice_errors(
    weight: Tensor, moment: Tensor, metric: Tensor | None, test_moment: Tensor, test_metric: Tensor | None
) -> Array:
    """One group, one slice, all taps in the encoder: the optimum in closed form, on the smaller side of W (f, d)."""
    if len(weight) <= weight.shape[1]:
        root = None if metric is None else (metric, _inverse(metric))
        return projection_errors(root, weight @ moment @ weight.t(), test_metric, weight @ test_moment @ weight.t())
    left = weight if metric is None else metric @ weight
    inner = left.t() @ left
    inner_test = weight.t() @ (weight if test_metric is None else test_metric @ weight)
    return projection_errors(any_root(moment), inner, test_moment, inner_test)


def total(rows: Tensor, blocks: Tensor, metric: Tensor | None) -> float:
    """tr(G' W M' Wᵀ) for W as (outputs, taps, columns) and blocks of M'."""
    flat = rows.flatten(1)
    wide = blocks.reshape(flat.shape[1], -1)
    outputs = flat @ wide @ flat.t()
    return float(outputs.diagonal().sum() if metric is None else (metric * outputs).sum())


def feature_errors(
    whole: float, root: Tensor, fitted: Tensor, test: tuple[Tensor, Tensor], metric: Tensor | None, ranks: int
) -> Array:
    """Decoders fitted to features, rank by rank: `root` L and `fitted` X L⁻ᵀ = D (outputs, features) are of the fit.

    `test` are second moments of the features and theirs with the outputs, on the other inputs.
    """
    moments, cross = _turned(root, test)
    weighted = fitted if metric is None else metric @ fitted
    explained = (weighted * cross).sum(0)
    square = leading((weighted.t() @ fitted) * moments)
    gained = np.append(0.0, array(explained.cumsum(0)))
    each = len(explained) // ranks
    return (whole - 2 * gained + square)[:: max(1, each)]


def _turned(root: Tensor, test: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Moments of features and theirs with the outputs, for features that were orthonormal in the fit."""
    square, cross = test
    half = torch.linalg.solve_triangular(root, square, upper=False)
    moments = torch.linalg.solve_triangular(root, half.t(), upper=False)
    return moments, torch.linalg.solve_triangular(root, cross.t(), upper=False).t()


def core_errors(
    whole: float,
    root: Tensor,
    turned: Tensor,
    back: Tensor,
    test: tuple[Tensor, Tensor],
    metric: Tensor | None,
    ranks: int,
) -> Array:
    """Of both ranks of a core: row r is outer rank r (from 0 on), entry s is rank s.

    `turned` (features, directions) are the fitted outputs in the directions U of the outputs, `back` = S⁻¹ U turns them
    back. Every s is measured with the inner ranks of one in CHUNKS; what lies between is interpolated.
    """
    moments, cross = _turned(root, test)
    wanted = back.t() @ (cross if metric is None else metric @ cross)  # (directions, features)
    each, many = len(turned) // ranks, turned.shape[1]

    def by_rank(parts: Tensor) -> Array:
        summed = array(parts.reshape(many, ranks, each).sum(2).cumsum(1).cumsum(0))
        return np.pad(summed, ((1, 0), (1, 0)))

    gained, plain = by_rank(wanted * turned.t()), by_rank(turned.t().square())
    outside = back.t() @ (back if metric is None else metric @ back)
    ends = np.unique(np.linspace(0, ranks, min(ranks, CHUNKS) + 1).astype(int))
    square = torch.zeros(many, many, dtype=turned.dtype, device=turned.device)
    excess = [np.zeros(many + 1)]
    for begin, end in zip(ends[:-1] * each, ends[1:] * each, strict=True):
        new = turned[begin:end]
        mixed = (moments[begin:end, :begin] @ turned[:begin]).t() @ new
        square = square + mixed + mixed.t() + new.t() @ moments[begin:end, begin:end] @ new
        excess.append(leading(outside * square) - plain[:, end // each])
    between = np.stack([np.interp(np.arange(ranks + 1), ends, row) for row in np.array(excess).T])
    found: Array = whole - 2 * gained + plain + between
    return found


def plain_errors(weight: Tensor, layer: Layer, moment: Tensor, metric: Tensor | None) -> Array:
    """By rank, what the SVD of the weight alone loses, one slice with all taps in the encoder: nothing is fitted."""
    rows = precise(canonical(weight.detach(), layer).flatten(2))
    lost = np.zeros(1)
    for g, matrix in enumerate(rows):
        outer = None if metric is None else metric[g].to(matrix)
        one = moment[g].to(matrix)
        if len(matrix) <= matrix.shape[1]:
            inner, turned = matrix @ matrix.t(), matrix @ one @ matrix.t()
            lost = lost + projection_errors(None, inner, outer, turned)
        else:
            inner, turned = matrix.t() @ matrix, matrix.t() @ (matrix if outer is None else outer @ matrix)
            lost = lost + projection_errors((eye_like(inner), eye_like(inner)), inner, one, turned)
    return lost
