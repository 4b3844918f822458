"""Singular values of all slices of a weight at once, for many numbers of slices.

Only the widest AᵀA and the narrowest AAᵀ are multiplied out: narrow slices are blocks of wide ones, wide ones sums of
narrow ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rankwise.core.fold import to_matrix
from rankwise.core.layer import Layer, canonical
from rankwise.core.linalg import Array, array, eigenvalues, precise
from rankwise.core.slicing import slice_width

# A weight is brought to float64 in blocks of about this many entries, so that it is never copied whole.
BLOCK = 1 << 18


def gram(weight: Tensor, fold: str, inner: bool) -> Tensor:
    """AᵀA (inner) or AAᵀ in float64, for A the folded matrix of a weight (f, c, *kernel).

    Summed up over blocks of filters or of channels, whichever are added up by the product.
    """
    axis = 0 if inner else 1
    step = max(1, BLOCK * weight.shape[axis] // max(1, weight.numel()))
    total: Tensor | None = None
    for block in torch.split(weight, step, dim=axis):
        part = precise(to_matrix(block[None], fold)[0])
        part = part if inner else part.t()
        total = part.t() @ part if total is None else total.addmm_(part.t(), part)
    assert total is not None, "a weight has at least one filter and one channel"
    return total


def _chains(widths: Iterable[int]) -> list[list[int]]:
    """Widths in descending order, grouped so that within a chain each one divides the one before."""
    chains: list[list[int]] = []
    for width in sorted(widths, reverse=True):
        for chain in chains:
            if chain[-1] % width == 0:
                chain.append(width)
                break
        else:
            chains.append([width])
    return chains


def _inner_grams(weight: Tensor, fold: str, chain: list[int], columns: int) -> Iterator[tuple[int, Tensor]]:
    """AᵀA of the slices, for each width of a chain: narrow ones are the diagonal blocks of wide ones."""
    for piece in torch.split(weight, chain[0], dim=1):
        whole = gram(piece, fold, inner=True)
        missing = chain[0] * columns - len(whole)  # the last slice may be narrower: zeros add eigenvalues 0
        whole = torch.constant_pad_nd(whole, (0, missing, 0, missing)) if missing else whole
        for width in chain:
            size = width * columns
            parts = chain[0] // width
            blocks = whole.reshape(parts, size, parts, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
            yield width, blocks[: -(-piece.shape[1] // width)]


def _outer_grams(weight: Tensor, fold: str, chain: list[int]) -> Iterator[tuple[int, Tensor]]:
    """AAᵀ of the slices, for each width of a chain: wide ones are the sums of narrow ones."""
    sums: dict[int, Tensor] = {}
    pieces = torch.split(weight, chain[-1], dim=1)
    for done, piece in enumerate(pieces, start=1):
        one = gram(piece, fold, inner=False)
        yield chain[-1], one[None]
        for width in chain[:-1]:
            sums[width] = sums[width].add_(one) if width in sums else one.clone()
            if done * chain[-1] % width == 0 or done == len(pieces):
                yield width, sums.pop(width)[None]


def _grams(weight: Tensor, fold: str, widths: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
    """The smaller Gram matrices of all slices of a weight (f, c, *kernel), for each width in channels.

    Only the widest AᵀA and the narrowest AAᵀ of a chain are multiplied out; few are in memory at a time.
    """
    rows, columns = to_matrix(weight[None, :, :1], fold).shape[1:]  # columns of one channel
    for chain in _chains(w for w in widths if w * columns <= rows):
        yield from _inner_grams(weight, fold, chain, columns)
    for chain in _chains(w for w in widths if w * columns > rows):
        yield from _outer_grams(weight, fold, chain)


def spectra(weight: Tensor, layer: Layer, fold: str, slices: Iterable[int]) -> dict[int, Array]:
    """Singular values of every slice, for each number of slices.

    Each array has shape (G, k, r + 1): entry j is σ_{j+1}, the first singular value that rank j drops, and
    the last one is 0: at full rank nothing is dropped.
    """
    widths = {slice_width(layer.group_channels, k): k for k in slices}
    found: dict[int, list[Tensor]] = {k: [] for k in slices}
    for group in canonical(weight.detach(), layer):
        for width, grams in _grams(group, fold, widths):
            found[widths[width]].append(torch.constant_pad_nd(eigenvalues(grams).sqrt(), (0, 1)))
    return {k: array(torch.unflatten(torch.cat(parts), 0, (layer.groups, k))) for k, parts in found.items()}
