"""The measure `output`: how much of a layer's outputs an option loses on calibration data.

With M = E[x xᵀ] of the patches a layer sees, an approximation Ŵ changes the outputs by

    E ‖(W − Ŵ) x‖² = Σ_f δ_f M δ_fᵀ,   δ_f the rows of W − Ŵ,

given relative to the outputs' variance (to their energy, where they never vary). `pca` is measured the same way
(pca.py), so all decompositions can be compared. Truncation is not optimal in this norm, so the error may rise a
little where a rank is added; a curve holds the largest error from each rank on. Of a transposed convolution, whose
taps overlap in the output, every tap is counted on its own.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from rankwise.core.fold import kernel_sides
from rankwise.core.layer import Layer, canonical
from rankwise.core.linalg import Array
from rankwise.core.moments import Moments
from rankwise.core.option import Option, full_outer, taps
from rankwise.decompositions import tucker
from rankwise.decompositions.slices import factors, spread


def variance(weight: Tensor, layer: Layer, seen: Moments, outputs: Moments | None = None) -> float:
    """Σ_f Var(y_f) over the calibration data, or Σ_f E[y_f²] where nothing varies.

    From the `outputs` where they are known: the patches of a transposed convolution do not say where they overlap.
    """
    if outputs is not None:
        each = float(outputs.covariance.diagonal(dim1=1, dim2=2).sum())
        whole = each * outputs.count / max(1, seen.count)  # taps are counted for each input position
    else:
        whole = _through(weight, layer, seen.covariance)
    energy = _through(weight, layer, seen.second_moment)
    return whole if whole > 1e-12 * energy else energy


def _through(weight: Tensor, layer: Layer, moment: Tensor) -> float:
    rows = canonical(weight.detach(), layer).flatten(2).to("cpu", torch.float64)
    return float(torch.einsum("gfa,gab,gfb->", rows, _patches(layer, moment), rows))


def slice_curve(weight: Tensor, layer: Layer, option: Option, seen: Moments, whole: float) -> Array:
    """Error by rank of the svd of slices or clusters, relative to `whole`, the variance."""
    left, right = factors(weight, layer, option)
    rank = left.shape[-1]
    blocks = _blocks(layer, option, _patches(layer, seen.second_moment))
    lost = torch.zeros(rank, rank, dtype=torch.float64)
    for l, r, m in zip(left, right, blocks, strict=True):
        # components in the order (rank, slice), so that a rank is one block of k
        wide = spread(r, layer, option).transpose(0, 1).flatten(0, 1)
        rows = torch.unflatten(l, 1, (layer.group_filters, -1)).permute(2, 1, 3, 0).flatten(2)  # (taps, f, rank·k)
        for a in range(len(m)):
            for b in range(a + 1):
                both = (wide @ m[a, :, b] @ wide.t()) * (rows[a].t() @ rows[b])
                part = both.reshape(rank, option.groups, rank, option.groups).sum(dim=(1, 3))
                lost += part if a == b else part + part.t()
    tail = lost.flip(0, 1).cumsum(0).cumsum(1).flip(0, 1).diagonal().numpy()
    return _curve(np.append(tail, 0.0), whole)


def tucker_curves(weight: Tensor, layer: Layer, seen: Moments, whole: float) -> Array:
    """Errors of the truncated HOSVD: row r − 1 is outer rank r, entry s is rank s.

    U is orthonormal, so the outputs' coordinates are independent: those up to r lose what the channels beyond s
    gave them, the others lose everything.
    """
    _, inner, core = tucker.hosvd(weight, layer)
    channels, k = layer.group_channels, math.prod(layer.kernel)
    lost = torch.zeros(layer.group_filters, channels + 1, dtype=torch.float64)
    for g, m in enumerate(_patches(layer, seen.second_moment)):
        turned = torch.einsum("atbu,ai,bj->itju", m.reshape(channels, k, channels, k), inner[g], inner[g])
        c = core[g]
        for s in range(channels - 1, -1, -1):
            own = torch.einsum("it,tu,iu->i", c[:, s], turned[s, :, s], c[:, s])
            behind = torch.einsum("it,tju,iju->i", c[:, s], turned[s, :, s + 1 :], c[:, s + 1 :])
            lost[:, s] += own + 2 * behind
    lost = lost.flip(1).cumsum(1).flip(1)
    everything = lost[:, :1].flip(0).cumsum(0).flip(0)
    rows = lost.cumsum(0) + torch.cat([everything[1:], torch.zeros(1, 1, dtype=torch.float64)])
    return _curve(rows[: full_outer(layer)].numpy(), whole)


def _patches(layer: Layer, moment: Tensor) -> Tensor:
    """(G, d, d) over patches in the order c, taps; of a transposed convolution each tap sees the same positions."""
    if not layer.transposed:
        return moment
    same = torch.eye(math.prod(layer.kernel), dtype=moment.dtype)
    return torch.stack([torch.kron(m, same) for m in moment])


def _blocks(layer: Layer, option: Option, moment: Tensor) -> Tensor:
    """(G, left taps, c·right taps, left taps, c·right taps)."""
    left, right = kernel_sides(option.fold)
    n, c = layer.dims, layer.group_channels
    whole = moment.reshape(-1, c, *layer.kernel, c, *layer.kernel)
    here = [*(2 + a for a in left), 1, *(2 + a for a in right)]
    there = [i + n + 1 for i in here]
    outer, inner = taps(layer, option)
    return whole.permute(0, *here, *there).reshape(-1, outer, c * inner, outer, c * inner)


def _curve(lost: Array, whole: float) -> Array:
    falling = np.maximum.accumulate(np.maximum(lost, 0.0)[..., ::-1], axis=-1)[..., ::-1]
    return falling / whole if whole > 0 else np.zeros_like(falling)
