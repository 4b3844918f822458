"""Partial Tucker decomposition of both channel modes: Tucker-2 of Kim et al. (2015).

A kernel W (f, c, taps) becomes

    Ŵ[f, c, t] = Σ_{i ≤ r} Σ_{j ≤ s} U[f, i] · C[i, j, t] · V[c, j]

three layers: 1×1 with Vᵀ, the layer's own kernel with the core C, 1×1 with U. `outer` is r, the rank is s.

Scored by the truncated HOSVD: U and V are the leading eigenvectors of both unfoldings' Gram matrices, and one
core holds the errors of all (r, s) at once, since the projections are orthogonal:

    ‖W − Ŵ‖²_F = Σ ‖C[i, j, :]‖² over all (i, j) with i > r or j > s

Built by HOOI, alternating U and V from there: each step can only lower the error, so what is built is never
worse than what was scored. A grouped convolution has the same ranks in every group.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from rankwise.core.fold import fold_for
from rankwise.core.layer import Layer, canonical
from rankwise.core.linalg import Array
from rankwise.core.option import Option, full_outer

STEPS = 50
SETTLED = 1e-5  # HOOI ends when a step gains less than this share of the weight's energy


def family(layer: Layer) -> Option:
    """The option without its outer rank: what all the options of a layer have in common."""
    return Option(fold_for(0, layer.dims), 1, "tucker2")


def has_taps(layer: Layer) -> bool:
    """Whether there is a kernel between the two channel modes; without one, tucker2 is an svd in three parts."""
    return math.prod(layer.kernel) > 1


def modes(weight: Tensor, layer: Layer) -> Tensor:
    """The weight as (G, f/G, c/G, taps) in float64."""
    whole = canonical(weight.detach(), layer)
    return (whole.flatten(3) if layer.dims else whole[..., None]).to("cpu", torch.float64)


def _leading(matrix: Tensor, rank: int | None = None) -> Tensor:
    """Orthonormal eigenvectors of A Aᵀ, strongest first, with canonical signs."""
    vectors: Tensor = torch.linalg.eigh(matrix @ matrix.t())[1].flip(-1)[:, :rank]
    peak = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
    return vectors * torch.where(peak < 0, -1.0, 1.0).to(vectors)


def hosvd(weight: Tensor, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """U (G, f/G, f/G), V (G, c/G, c/G) and the core (G, f/G, c/G, taps) in their coordinates."""
    parts = []
    for w in modes(weight, layer):
        outer, inner = _leading(w.flatten(1)), _leading(w.transpose(0, 1).flatten(1))
        parts.append((outer, inner, _core(w, outer, inner)))
    outer, inner, core = (torch.stack(p) for p in zip(*parts, strict=True))
    return outer, inner, core


def curves(weight: Tensor, layer: Layer) -> dict[str, Array]:
    """Errors of the truncated HOSVD by both ranks: row r − 1 is outer rank r, entry s is rank s.

    `energy` is relative to ‖W‖²_F, `residual` is not.
    """
    energy = hosvd(weight, layer)[2].square().sum(dim=(0, 3)).numpy()
    return by_ranks(energy, full_outer(layer))


def by_ranks(energy: Array, rows: int) -> dict[str, Array]:
    """energy[i, j] of the core's entries → what is lost by keeping i ≤ r and j ≤ s."""
    total = float(energy.sum())
    kept = np.zeros((energy.shape[0], energy.shape[1] + 1))
    kept[:, 1:] = energy.cumsum(axis=0).cumsum(axis=1)
    lost = np.maximum(0.0, total - kept)
    lost[-1, -1] = 0.0
    # Rounding must not make a curve rise.
    lost = np.minimum.accumulate(lost[:rows], axis=1)
    return {"energy": lost / total if total > 0 else np.zeros_like(lost), "residual": lost}


def factors(weight: Tensor, layer: Layer, outer: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """U (G, f/G, r), core (G, r, s, *kernel), V (G, c/G, s) by HOOI, in float64."""
    parts = [_hooi(w, outer, rank) for w in modes(weight, layer)]
    left, core, right = (torch.stack(p) for p in zip(*parts, strict=True))
    return left, torch.unflatten(core, -1, layer.kernel) if layer.kernel else core.squeeze(-1), right


def _hooi(w: Tensor, outer: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    total = float(w.square().sum())
    left = _leading(w.flatten(1), outer)
    right = _leading(w.transpose(0, 1).flatten(1), rank)
    kept = float(_core(w, left, right).square().sum())
    for _ in range(STEPS):
        new_left = _leading(torch.einsum("fct,cj->fjt", w, right).flatten(1), outer)
        narrow = torch.einsum("fct,fi->cit", w, new_left)
        new_right = _leading(narrow.flatten(1), rank)
        now = float((new_right.t() @ narrow.flatten(1)).square().sum())
        if now <= kept:
            break  # settled, but for rounding
        gain, kept, left, right = now - kept, now, new_left, new_right
        if gain <= SETTLED * total:
            break
    return left, _core(w, left, right), right


def _core(w: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return torch.einsum("fct,fi,cj->ijt", w, left, right)


def compose(left: Tensor, core: Tensor, right: Tensor) -> Tensor:
    """The weight (G, f/G, c/G, *kernel) that three factors stand for."""
    whole = torch.einsum("gfi,gijt,gcj->gfct", left, core.flatten(3) if core.ndim > 3 else core[..., None], right)
    return torch.unflatten(whole, -1, core.shape[3:]) if core.ndim > 3 else whole.squeeze(-1)
