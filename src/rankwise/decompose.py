"""Decompositions: slices of a weight, their spectra, their factors, and the way back.

What scores an option and what builds it start from the same slices (`cut`): the channels are cut first,
then each slice is folded. All numerics run in float64 on the CPU, from the smaller Gram matrix of a
slice: several times faster than an SVD, and singular values are right to about 1e-8 of the largest
(docs/math.md, "Spectra").
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.nn.functional import pad

from rankwise.cost import Option, slice_width
from rankwise.errors import RankwiseError
from rankwise.fold import from_matrix, kernel_sides, to_matrix
from rankwise.layer import Layer, canonical, stored

Array = NDArray[np.float64]

# Slices are brought to float64 in blocks of this many entries, so that a large layer is never copied whole.
BLOCK = 1 << 22


def check_finite(weight: Tensor, name: str) -> None:
    """Refuse NaN and infinity, with the layer's name."""
    if not bool(torch.isfinite(weight).all()):
        bad = int((~torch.isfinite(weight)).sum())
        raise RankwiseError(
            f"layer {name!r} has {bad} weights that are NaN or infinite: mend the checkpoint, or leave the "
            f"layer alone with exclude=[{name!r}]"
        )


def cut(weight: Tensor, layer: Layer, option: Option) -> Tensor:
    """The slices of a weight as matrices: (G, k, rows, columns), zeros where the last slice is narrower."""
    whole = canonical(weight.detach(), layer)
    width = slice_width(layer.group_channels, option.groups)
    missing = option.groups * width - layer.group_channels
    if missing:
        whole = pad(whole, [0, 0] * layer.dims + [0, missing])
    matrix = to_matrix(whole, option.fold)
    return torch.unflatten(matrix, 2, (option.groups, -1)).transpose(1, 2)


def gram(matrix: Tensor) -> Tensor:
    """AᵀA or AAᵀ in float64, whichever is smaller, for A of shape (rows, columns) in any dtype."""
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.t()
    step = max(1, BLOCK // max(1, tall.shape[1]))
    if tall.shape[0] <= step:
        tall = tall.to("cpu", torch.float64)
        return tall.t() @ tall
    total = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64)
    for block in torch.split(tall, step):
        part = block.to("cpu", torch.float64)
        total.addmm_(part.t(), part)
    return total


def _eigenvalues(matrices: Tensor) -> Tensor:
    """Eigenvalues of positive semi-definite matrices (n, m, m), largest first, never negative."""
    try:
        values: Tensor = torch.linalg.eigvalsh(matrices).flip(-1)
    except LinAlgError:
        values = torch.linalg.svdvals(matrices)  # another driver; the same numbers for such matrices
    return values.clamp_min(0)


def spectra(weight: Tensor, layer: Layer, fold: str, groups: Iterable[int]) -> dict[int, Array]:
    """Singular values of every slice, for each number of slices.

    Each array has shape (G, k, r + 1): entry j is σ_{j+1}, the first singular value that rank j drops, and
    the last one is 0: at full rank nothing is dropped.
    """
    found = {}
    for k in groups:
        slices = cut(weight, layer, Option(fold, k)).flatten(0, 1)
        grams = torch.stack([gram(s) for s in slices])
        values = _eigenvalues(grams).sqrt()
        found[k] = torch.unflatten(pad(values, (0, 1)), 0, (layer.groups, k)).numpy()
    return found


def _factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A = U V with orthonormal columns in U and V = ΣVᵀ, strongest first, signs made canonical."""
    small = gram(matrix)
    matrix = matrix.to("cpu", torch.float64)
    try:
        vectors = torch.linalg.eigh(small)[1].flip(-1)
    except LinAlgError:
        vectors = torch.linalg.svd(small)[0]
    if matrix.shape[0] <= matrix.shape[1]:
        left, right = vectors, vectors.t() @ matrix
    else:
        left = matrix @ vectors
        sigma = left.norm(dim=0)
        # A direction with σ = 0 has no left vector; zeros there leave the product as it is.
        left = left / sigma.where(sigma > 0, torch.ones_like(sigma))
        right = sigma[:, None] * vectors.t()
    peak = left.gather(0, left.abs().argmax(dim=0, keepdim=True)).squeeze(0)
    sign = torch.where(peak < 0, -1.0, 1.0).to(left)
    return left * sign, right * sign[:, None]


def factors(weight: Tensor, layer: Layer, option: Option, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """U (G, k, rows, j) and V (G, k, j, columns) of every slice in float64; all of them without a rank."""
    slices = cut(weight, layer, option)
    pairs = [_factor(s) for s in slices.flatten(0, 1)]
    left = torch.unflatten(torch.stack([u[:, :rank] for u, _ in pairs]), 0, slices.shape[:2])
    right = torch.unflatten(torch.stack([v[:rank] for _, v in pairs]), 0, slices.shape[:2])
    return left, right


def pair_weights(left: Tensor, right: Tensor, layer: Layer, option: Option) -> tuple[Tensor, Tensor]:
    """The factors as weights of two layers, in canonical layout.

    Encoder (G·k, j, c/(G·k), *kernel with 1 on the left axes), decoder (G, f/G, k·j, *kernel with 1 on
    the right axes).
    """
    left_axes, right_axes = kernel_sides(option.fold)
    rank = left.shape[-1]
    n = layer.groups * option.groups
    width = slice_width(layer.group_channels, option.groups)
    here = [layer.kernel[a] if a in right_axes else 1 for a in range(layer.dims)]
    there = [layer.kernel[a] if a in left_axes else 1 for a in range(layer.dims)]
    encoder = right.reshape(n, rank, width, *here)
    # rows of U are (f, left axes); its columns become the k·j channels between the two layers
    stacked = left.transpose(1, 2).flatten(2)
    decoder = from_matrix_left(stacked, layer, option, there)
    return encoder, decoder


def from_matrix_left(stacked: Tensor, layer: Layer, option: Option, kernel: list[int]) -> Tensor:
    """(G, f·left, k·j) → (G, f, k·j, *kernel with 1 on the right axes)."""
    shape = (layer.groups, layer.group_filters, stacked.shape[-1], *kernel)
    return from_matrix(stacked, option.fold, shape)


def compose(encoder: Tensor, decoder: Tensor, layer: Layer, option: Option) -> Tensor:
    """The dense weight that a pair stands for, in the layer's own layout; inverse of `pair_weights`."""
    _, rank, width = encoder.shape[:3]
    right = encoder.reshape(layer.groups, option.groups, rank, -1)
    left = torch.unflatten(to_matrix(decoder, option.fold), 2, (option.groups, rank)).transpose(1, 2)
    matrix = (left @ right).transpose(1, 2).flatten(2)
    shape = (layer.groups, layer.group_filters, option.groups * width, *layer.kernel)
    whole = from_matrix(matrix, option.fold, shape)
    return stored(whole[:, :, : layer.group_channels], layer).contiguous()


def residual_norm(left: Tensor, right: Tensor, rank: int) -> float:
    """‖W − Ŵ‖₂ at a rank, from all factors of all slices: one symmetric eigenvalue for each group."""
    rest = left[..., rank:] @ right[..., rank:, :]
    worst = 0.0
    for group in rest.transpose(1, 2).flatten(2):
        worst = max(worst, float(_eigenvalues(gram(group)[None])[0, 0]))
    return math.sqrt(worst)
