"""`pca`: principal components of a layer's outputs, Zhang et al. (2015), symmetric linear version.

For outputs y = W x + b with mean μ and covariance Σ over calibration data, U holds the leading
eigenvectors of Σ, and the layer becomes

    ŷ = U Uᵀ (y − μ) + μ = U (Uᵀ W) x + [U Uᵀ (b − μ) + μ]

an encoder UᵀW, a decoder U, and a bias that carries the mean. Among all subspaces of that rank it loses
the least of the outputs' variance: Σ_{m>j} λ_m.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.core.fold import fold_for
from rankwise.core.layer import Layer
from rankwise.core.linalg import Array, array, eigenvectors, precise, signs, tail
from rankwise.core.option import Option
from rankwise.core.parts import Part
from rankwise.decompositions import slices
from rankwise.decompositions.base import OUTPUTS, Alone, Decomposition, Factors, Scores, Selection, Target, relative


class Components(Decomposition):
    """A pair like that of one slice, with a bias for the mean."""

    name = "pca"
    about = "principal components of the outputs over calibration data, largest product of energies"
    needs = OUTPUTS
    adds_bias = True
    alone = Alone("output", "product")

    def full_rank(self, layer: Layer, option: Option) -> int:
        return layer.group_filters

    def parts(self, layer: Layer, option: Option, rank: Any) -> tuple[Part, ...]:
        return slices.DECOMPOSITION.parts(layer, option, rank)

    def option(self, layer: Layer) -> Option:
        return Option(fold_for(0, layer.dims), 1, self.name)

    def score(self, target: Target, selection: Selection) -> Scores:
        """`output`, the share of the outputs' variance that is lost, and `energy`, of the weight."""
        option = self.option(target.layer)
        values, vectors = components(target)
        rows = (vectors.transpose(1, 2) @ _matrix(target, option)).square().sum(-1)
        return Scores(given={option: {"output": _lost(values), "energy": _lost(rows)}})

    def output_errors(self, target: Target, options: Iterable[Option]) -> dict[Option, Array]:
        return {}  # `score` has them, from the outputs themselves

    def factors(self, target: Target, option: Option, rank: int) -> Factors:
        left, right, bias = factors(target, option, rank)
        return slices.pair_factors(left, right, target.layer, option, bias)

    def compose(self, layer: Layer, option: Option, weights: Mapping[str, Sequence[Tensor]]) -> Tensor:
        return slices.DECOMPOSITION.compose(layer, option, weights)


DECOMPOSITION = Components()


def components(target: Target) -> tuple[Tensor, Tensor]:
    """Eigenvalues (G, f/G), largest first and never negative, and eigenvectors (G, f/G, f/G) of the groups' outputs."""
    assert target.outputs is not None, "whoever asks has given moments of the outputs"
    covariance, wide = target.outputs.covariance[0], target.layer.group_filters
    blocks = [covariance[g * wide : (g + 1) * wide, g * wide : (g + 1) * wide] for g in range(target.layer.groups)]
    values, vectors = eigenvectors(torch.stack(blocks))
    return values.clamp_min(0), vectors * signs(vectors)[:, None]


def _matrix(target: Target, option: Option) -> Tensor:
    return precise(slices.cut(target.weight, target.layer, option).squeeze(1))


def _lost(parts: Tensor) -> Array:
    """(G, r) → entry j is what lies beyond the first j, relative to all; a layer that never varies loses nothing."""
    lost = tail(array(parts.sum(0)))
    return relative(lost, float(lost[0]))


def factors(target: Target, option: Option, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """U (G, 1, f/G, j), UᵀW (G, 1, j, columns) and the bias (f,) of the pair, in float64."""
    assert target.outputs is not None, "surgery has refused a choice without moments"
    layer, mean = target.layer, target.outputs.mean[0]
    left = components(target)[1][:, :, :rank]
    offset = -mean if target.bias is None else precise(target.bias) - mean
    grouped = offset.reshape(layer.groups, layer.group_filters, 1)
    shift = (left @ (left.transpose(1, 2) @ grouped)).flatten() + mean
    return left[:, None], (left.transpose(1, 2) @ _matrix(target, option))[:, None], shift
