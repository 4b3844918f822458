"""Principal components of a layer's outputs: the decomposition of Zhang et al. (2015), symmetric linear version.

For outputs y = W x + b with mean μ and covariance Σ over calibration data, U holds the leading
eigenvectors of Σ, and the layer becomes

    ŷ = U Uᵀ (y − μ) + μ = U (Uᵀ W) x + [U Uᵀ (b − μ) + μ]

an encoder UᵀW, a decoder U, and a bias that carries the mean. Among all subspaces of that rank it loses
the least of the outputs' variance: Σ_{m>j} λ_m.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rankwise.core.fold import fold_for
from rankwise.core.layer import Layer
from rankwise.core.linalg import Array
from rankwise.core.option import Option
from rankwise.decompositions.slices import cut


def components(covariance: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """Eigenvalues (G, f/G), largest first and never negative, and eigenvectors (G, f/G, f/G) of the groups' outputs."""
    wide = layer.group_filters
    blocks = torch.stack(
        [covariance[g * wide : (g + 1) * wide, g * wide : (g + 1) * wide] for g in range(layer.groups)]
    )
    values, vectors = torch.linalg.eigh(blocks)
    values, vectors = values.flip(-1).clamp_min(0), vectors.flip(-1)
    peak = vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True))
    return values, vectors * torch.where(peak < 0, -1.0, 1.0).to(vectors)


def option(layer: Layer) -> Option:
    return Option(fold_for(0, layer.dims), 1, "pca")


def curves(weight: Tensor, layer: Layer, covariance: Tensor) -> dict[str, Array]:
    """Errors by rank: `output`, the share of the outputs' variance that is lost, and `energy`, of the weight."""
    values, vectors = components(covariance, layer)
    matrix = cut(weight, layer, option(layer)).squeeze(1).to("cpu", torch.float64)
    rows = (vectors.transpose(1, 2) @ matrix).square().sum(-1)
    return {"output": _tail(values), "energy": _tail(rows)}


def _tail(parts: Tensor) -> Array:
    """(G, r) → entry j is what lies beyond the first j, relative to all; a layer that never varies loses nothing."""
    tail = np.append(np.cumsum(parts.sum(0).numpy()[::-1])[::-1], 0.0)
    return tail / tail[0] if tail[0] > 0 else np.zeros_like(tail)


def factors(
    weight: Tensor, bias: Tensor | None, layer: Layer, mean: Tensor, covariance: Tensor, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """U (G, 1, f/G, j), UᵀW (G, 1, j, columns) and the bias (f,) of the pair, in float64."""
    _, vectors = components(covariance, layer)
    left = vectors[:, :, :rank]
    matrix = cut(weight, layer, option(layer)).squeeze(1).to("cpu", torch.float64)
    offset = -mean if bias is None else bias.detach().to("cpu", torch.float64) - mean
    grouped = offset.reshape(layer.groups, layer.group_filters, 1)
    shift = (left @ (left.transpose(1, 2) @ grouped)).flatten() + mean
    return left[:, None], (left.transpose(1, 2) @ matrix)[:, None], shift
