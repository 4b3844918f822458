"""`tucker2`: partial Tucker decomposition of both channel modes, Kim et al. (2015).

A kernel W (f, c, taps) becomes

    Ŵ[f, c, t] = Σ_{i ≤ r} Σ_{j ≤ s} U[f, i] · C[i, j, t] · V[c, j]

three layers: 1×1 with Vᵀ, the layer's own kernel with the core C, 1×1 with U. `outer` is r, the rank is s.

Scored by the truncated HOSVD: U and V are the leading eigenvectors of both unfoldings' Gram matrices, and one
core holds the errors of all (r, s) at once, since the projections are orthogonal:

    ‖W − Ŵ‖²_F = Σ ‖C[i, j, :]‖² over all (i, j) with i > r or j > s

Built by HOOI, alternating U and V from there: each step can only lower the error, so what is built is never
worse than what was scored. A grouped convolution has the same ranks in every group.

Without a budget the ranks are as many directions of both unfoldings as are signal rather than noise (core/vbmf.py).
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
from rankwise.core.linalg import Array, array, leading, precise
from rankwise.core.option import Option
from rankwise.core.parts import Part
from rankwise.core.vbmf import signal_rank
from rankwise.decompositions import slices
from rankwise.decompositions.base import Alone, Decomposition, Factors, Scores, Selection, Target, falling, patch_moment

STEPS = 50
SETTLED = 1e-5  # HOOI ends when a step gains less than this share of the weight's energy


class Cored(Decomposition):
    """What decompositions with a core share: three parts and two ranks."""

    timed_as: str | None = "core"

    def family(self, layer: Layer) -> Option:
        """The option without its outer rank: what all the options of a layer have in common."""
        return Option(fold_for(0, layer.dims), 1, self.name)

    def outers(self, layer: Layer) -> int:
        return full_outer(layer)

    def full_rank(self, layer: Layer, option: Option) -> int:
        return min(layer.group_channels, option.outer * math.prod(layer.kernel))

    def parts(self, layer: Layer, option: Option, rank: Any) -> tuple[Part, ...]:
        g, axes = layer.groups, tuple(range(layer.dims))
        return (
            Part("encoder", (), layer.channels, g * rank, g),
            Part("core", axes, g * rank, g * option.outer, g),
            Part("decoder", (), g * option.outer, layer.filters, g),
        )


class Tucker(Cored):
    """A layer without taps has nothing between its channel modes: it gets an svd of one slice."""

    name = "tucker2"
    about = "both channel modes at once, least total energy; without a budget as many directions as are signal"
    alone = Alone("energy", "sum")

    def candidates(self, layer: Layer, selection: Selection) -> list[Option]:
        if has_taps(layer):
            return super().candidates(layer, selection)
        return slices.DECOMPOSITION.candidates(layer, _one_slice(selection))

    def wanted(self, layer: Layer, there: list[Option], selection: Selection) -> list[Option]:
        if has_taps(layer):
            return super().wanted(layer, there, selection)
        return slices.DECOMPOSITION.wanted(layer, there, _one_slice(selection))

    def score(self, target: Target, selection: Selection) -> Scores:
        """`energy` of the truncated HOSVD, relative to ‖W‖²_F, and `residual`, which is not."""
        if not has_taps(target.layer):
            return slices.DECOMPOSITION.score(target, _one_slice(selection))
        return Scores(given={self.family(target.layer): curves(target.weight, target.layer)})

    def output_errors(self, target: Target, options: Iterable[Option]) -> dict[Option, Array]:
        return {option: falling(lost_outputs(target)) for option in options}

    def factors(self, target: Target, option: Option, rank: int) -> Factors:
        return cored_factors(*factors(target.weight, target.layer, option.outer, rank), target.layer)

    def unbudgeted(self, target: Target) -> tuple[Option, int] | None:
        layer = target.layer
        outer, inner = signal_ranks(target.weight, layer)
        option = replace(self.family(layer), outer=min(outer, full_outer(layer)))
        decomposition: Decomposition = self
        if not has_taps(layer):
            decomposition = slices.DECOMPOSITION
            option, inner = slices.DECOMPOSITION.options(layer, _one_slice(Selection()))[0], outer
        return option, min(inner, decomposition.full_rank(layer, option))


DECOMPOSITION = Tucker()


def _one_slice(selection: Selection) -> Selection:
    return replace(selection, folds=0, slices=1)


def full_outer(layer: Layer) -> int:
    """The largest rank of the filters' mode that an option with a core can have."""
    return min(layer.group_filters, layer.group_channels * math.prod(layer.kernel))


def has_taps(layer: Layer) -> bool:
    """Whether there is a kernel between the two channel modes; without one, tucker2 is an svd in three parts."""
    return math.prod(layer.kernel) > 1


def modes(weight: Tensor, layer: Layer) -> Tensor:
    """The weight as (G, f/G, c/G, taps) in float64."""
    whole = canonical(weight.detach(), layer)
    return precise(whole.flatten(3) if layer.dims else whole[..., None])


def hosvd(weight: Tensor, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """U (G, f/G, f/G), V (G, c/G, c/G) and the core (G, f/G, c/G, taps) in their coordinates."""
    parts = []
    for w in modes(weight, layer):
        outer, inner = leading(w.flatten(1)), leading(w.transpose(0, 1).flatten(1))
        parts.append((outer, inner, _core(w, outer, inner)))
    outer, inner, core = (torch.stack(p) for p in zip(*parts, strict=True))
    return outer, inner, core


def curves(weight: Tensor, layer: Layer) -> dict[str, Array]:
    """Errors of the truncated HOSVD by both ranks: row r − 1 is outer rank r, entry s is rank s."""
    energy = array(hosvd(weight, layer)[2].square().sum(dim=(0, 3)))
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


def lost_outputs(target: Target) -> Array:
    """E ‖(W − Ŵ) x‖² of the truncated HOSVD: row r − 1 is outer rank r, entry s is rank s.

    U is orthonormal, so the outputs' coordinates are independent: those up to r lose what the channels beyond s
    gave them, the others lose everything.
    """
    assert target.inputs is not None, "the measure output was asked for with calibration data"
    layer = target.layer
    _, inner, core = hosvd(target.weight, layer)
    channels, k = layer.group_channels, math.prod(layer.kernel)
    lost = core.new_zeros(layer.group_filters, channels + 1)
    for g, m in enumerate(patch_moment(layer, target.inputs.second_moment)):
        turned = torch.einsum("atbu,ai,bj->itju", m.reshape(channels, k, channels, k), inner[g], inner[g])
        c = core[g]
        for s in range(channels - 1, -1, -1):
            own = torch.einsum("it,tu,iu->i", c[:, s], turned[s, :, s], c[:, s])
            behind = torch.einsum("it,tju,iju->i", c[:, s], turned[s, :, s + 1 :], c[:, s + 1 :])
            lost[:, s] += own + 2 * behind
    lost = lost.flip(1).cumsum(1).flip(1)
    everything = lost[:, :1].flip(0).cumsum(0).flip(0)
    rows = lost.cumsum(0) + torch.cat([everything[1:], everything.new_zeros(1, 1)])
    return array(rows[: full_outer(layer)])


def factors(weight: Tensor, layer: Layer, outer: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """U (G, f/G, r), core (G, r, s, *kernel), V (G, c/G, s) by HOOI, in float64."""
    parts = [_hooi(w, outer, rank) for w in modes(weight, layer)]
    left, core, right = (torch.stack(p) for p in zip(*parts, strict=True))
    return left, torch.unflatten(core, -1, layer.kernel) if layer.kernel else core.squeeze(-1), right


def cored_factors(left: Tensor, core: Tensor, right: Tensor, layer: Layer) -> Factors:
    """U, core and V as weights of three layers."""
    ones = (1,) * layer.dims
    encoder = right.transpose(1, 2).reshape(layer.groups, right.shape[2], -1, *ones)
    decoder = left.reshape(layer.groups, -1, left.shape[2], *ones)
    return Factors({"encoder": [encoder], "core": [core], "decoder": [decoder]})


def _hooi(w: Tensor, outer: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    total = float(w.square().sum())
    left = leading(w.flatten(1), outer)
    right = leading(w.transpose(0, 1).flatten(1), rank)
    kept = float(_core(w, left, right).square().sum())
    for _ in range(STEPS):
        new_left = leading(torch.einsum("fct,cj->fjt", w, right).flatten(1), outer)
        narrow = torch.einsum("fct,fi->cit", w, new_left)
        new_right = leading(narrow.flatten(1), rank)
        now = float((new_right.t() @ narrow.flatten(1)).square().sum())
        if now <= kept:
            break  # settled, but for rounding
        gain, kept, left, right = now - kept, now, new_left, new_right
        if gain <= SETTLED * total:
            break
    return left, _core(w, left, right), right


def _core(w: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return torch.einsum("fct,fi,cj->ijt", w, left, right)


def signal_ranks(weight: Tensor, layer: Layer) -> tuple[int, int]:
    """Ranks of the filters' and the channels' unfolding, at least 1; the largest of all groups."""
    found = [(1, 1)]
    for w in modes(weight, layer):
        matrices = (w.flatten(1), w.transpose(0, 1).flatten(1))
        ranks = [signal_rank(array(torch.linalg.svdvals(m)), m.shape[0], m.shape[1]) for m in matrices]
        found.append((ranks[0], ranks[1]))
    return max(outer for outer, _ in found), max(inner for _, inner in found)
