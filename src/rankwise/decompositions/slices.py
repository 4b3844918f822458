"""Decompositions: slices of a weight, their spectra, their factors, and the way back.

What scores an option and what builds it start from the same slices (`cut`): the channels are cut first,
then each slice is folded. All numerics run in float64 on the CPU, from the smaller Gram matrix of a
slice: several times faster than an SVD, and singular values are right to about 1e-8 of the largest
(docs/math.md, "Spectra").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from rankwise.core.fold import from_matrix, kernel_sides, to_matrix
from rankwise.core.layer import Layer, canonical, stored
from rankwise.core.linalg import Array
from rankwise.core.option import Option, full_rank, slice_width, widths
from rankwise.errors import RankwiseError

# A weight is brought to float64 in blocks of about this many entries, so that it is never copied whole.
BLOCK = 1 << 18
LARGEST = 1e140  # float64 ends at 1.8e308, and Gram matrices hold sums of squares
# Matrices from this size on go to LAPACK one by one: it works on a copy.
LARGE = 128


def check_finite(weight: Tensor, name: str) -> None:
    """Refuse NaN, infinity and what would overflow, with the layer's name."""
    weight = weight.detach()
    if not bool(torch.isfinite(weight).all()):
        bad = int((~torch.isfinite(weight)).sum())
        raise RankwiseError(
            f"layer {name!r} has {bad} weights that are NaN or infinite: mend the checkpoint, or leave the "
            f"layer alone with exclude=[{name!r}]"
        )
    if weight.numel() and float(weight.abs().max()) > LARGEST:
        raise RankwiseError(f"layer {name!r} has weights above {LARGEST:g}, whose squares overflow: rescale them")


def cut(weight: Tensor, layer: Layer, option: Option) -> Tensor:
    """The slices of a weight as matrices: (G, k, rows, columns), zeros where a slice is narrower than the widest."""
    whole = canonical(weight.detach(), layer)
    if option.clusters:
        whole = torch.constant_pad_nd(whole, [0, 0] * layer.dims + [0, 1])[:, :, _places(layer, option)]
    missing = option.groups * max(widths(layer, option)) - whole.shape[2]
    if missing:
        whole = torch.constant_pad_nd(whole, [0, 0] * layer.dims + [0, missing])
    matrix = to_matrix(whole, option.fold)
    return torch.unflatten(matrix, 2, (option.groups, -1)).transpose(1, 2)


def _places(layer: Layer, option: Option) -> Tensor:
    """The channels of one cluster after the other, each filled up with the channel behind the last one."""
    wide = max(widths(layer, option))
    filled = [[*cluster, *[layer.channels] * (wide - len(cluster))] for cluster in option.clusters]
    return torch.tensor(filled).flatten()


def gram(weight: Tensor, fold: str, inner: bool) -> Tensor:
    """AᵀA (inner) or AAᵀ in float64, for A the folded matrix of a weight (f, c, *kernel).

    Summed up over blocks of filters or of channels, whichever are added up by the product.
    """
    axis = 0 if inner else 1
    step = max(1, BLOCK * weight.shape[axis] // max(1, weight.numel()))
    total: Tensor | None = None
    for block in torch.split(weight, step, dim=axis):
        part = to_matrix(block[None], fold)[0].to("cpu", torch.float64)
        part = part if inner else part.t()
        total = part.t() @ part if total is None else total.addmm_(part.t(), part)
    assert total is not None, "a weight has at least one filter and one channel"
    return total


def _eigenvalues(matrices: Tensor) -> Tensor:
    """Eigenvalues of positive semi-definite matrices (n, m, m), largest first, never negative."""
    if matrices.shape[-1] >= LARGE and len(matrices) > 1:
        return torch.cat([_eigenvalues(m) for m in torch.split(matrices, 1)])
    try:
        values: Tensor = torch.linalg.eigvalsh(matrices).flip(-1)
    except LinAlgError:
        values = torch.linalg.svdvals(matrices)  # another driver; the same numbers for such matrices
    return values.clamp_min(0)


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


def spectra(weight: Tensor, layer: Layer, fold: str, groups: Iterable[int]) -> dict[int, Array]:
    """Singular values of every slice, for each number of slices.

    Each array has shape (G, k, r + 1): entry j is σ_{j+1}, the first singular value that rank j drops, and
    the last one is 0: at full rank nothing is dropped.
    """
    widths = {slice_width(layer.group_channels, k): k for k in groups}
    found: dict[int, list[Tensor]] = {k: [] for k in groups}
    for group in canonical(weight.detach(), layer):
        for width, grams in _grams(group, fold, widths):
            found[widths[width]].append(torch.constant_pad_nd(_eigenvalues(grams).sqrt(), (0, 1)))
    return {k: torch.unflatten(torch.cat(parts), 0, (layer.groups, k)).numpy() for k, parts in found.items()}


def cluster_spectra(weight: Tensor, layer: Layer, option: Option) -> Array:
    """Singular values of every cluster, (1, k, r + 1) like those of slices; narrow clusters end with zeros."""
    slices = cut(weight, layer, option)[0].to("cpu", torch.float64)
    small = slices @ slices.mT if slices.shape[1] < slices.shape[2] else slices.mT @ slices
    values = _eigenvalues(small).sqrt()[:, : full_rank(layer, option)]
    return torch.constant_pad_nd(values, (0, 1))[None].numpy()


def _factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A = U V with orthonormal columns in U and V = ΣVᵀ, strongest first, signs made canonical."""
    matrix = matrix.to("cpu", torch.float64)
    wide = matrix.shape[0] < matrix.shape[1]
    small = matrix @ matrix.t() if wide else matrix.t() @ matrix
    try:
        vectors = torch.linalg.eigh(small)[1].flip(-1)
    except LinAlgError:
        vectors = torch.linalg.svd(small)[0]
    if wide:
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
    """The factors as weights of two layers, in canonical layout, each with its half of Σ.

    The paper gives all of Σ to the encoder. Sharing √σ is the same product; it keeps both within the range
    of float16, and retraining with weight decay treats both alike.

    Encoder (G·k, j, c/(G·k), *kernel with 1 on the left axes), decoder (G, f/G, k·j, *kernel with 1 on
    the right axes).
    """
    left_axes, right_axes = kernel_sides(option.fold)
    root = right.norm(dim=-1).sqrt()
    left, right = left * root[..., None, :], right / root.where(root > 0, torch.ones_like(root))[..., None]
    rank = left.shape[-1]
    n = layer.groups * option.groups
    width = max(widths(layer, option))
    here = [layer.kernel[a] if a in right_axes else 1 for a in range(layer.dims)]
    there = [layer.kernel[a] if a in left_axes else 1 for a in range(layer.dims)]
    encoder = right.reshape(n, rank, width, *here)
    # rows of U are (f, left axes); its columns become the k·j channels between the two layers
    stacked = left.transpose(1, 2).flatten(2)
    shape = (layer.groups, layer.group_filters, stacked.shape[-1], *there)
    return encoder, from_matrix(stacked, option.fold, shape)


def compose(encoder: Tensor, decoder: Tensor, layer: Layer, option: Option) -> Tensor:
    """The dense weight that a pair stands for, in the layer's own layout; inverse of `pair_weights`."""
    _, rank, width = encoder.shape[:3]
    right = encoder.reshape(layer.groups, option.groups, rank, -1)
    left = torch.unflatten(to_matrix(decoder, option.fold), 2, (option.groups, rank)).transpose(1, 2)
    matrix = (left @ right).transpose(1, 2).flatten(2)
    shape = (layer.groups, layer.group_filters, option.groups * width, *layer.kernel)
    whole = from_matrix(matrix, option.fold, shape)
    if option.clusters:
        gathered = torch.zeros_like(whole[:, :, : layer.channels + 1])
        gathered[:, :, _places(layer, option)] = whole  # what was filled up lands behind the last channel
        whole = gathered
    return stored(whole[:, :, : layer.group_channels], layer).contiguous()


def spread(right: Tensor, layer: Layer, option: Option) -> Tensor:
    """Right factors of one group's slices, (k, j, columns) → (k, j, columns of all channels) with zeros elsewhere."""
    k, rank, columns = right.shape
    wide = max(widths(layer, option))
    each = columns // wide
    places = _places(layer, option) if option.clusters else torch.arange(k * wide)
    whole = right.new_zeros(k, rank, max(k * wide, layer.group_channels + 1), each)
    for i, (mine, slots) in enumerate(zip(right, torch.split(places, wide), strict=True)):
        whole[i, :, slots] = mine.reshape(rank, wide, each)
    return whole[:, :, : layer.group_channels].flatten(2)


def residual_norm(left: Tensor, right: Tensor, rank: int) -> float:
    """‖W − Ŵ‖₂ at a rank, from all factors of all slices: one symmetric eigenvalue for each group."""
    rest = left[..., rank:] @ right[..., rank:, :]
    worst = 0.0
    for group in rest.transpose(1, 2).flatten(2):
        small = group @ group.t() if group.shape[0] <= group.shape[1] else group.t() @ group
        worst = max(worst, float(_eigenvalues(small[None])[0, 0]))
    return math.sqrt(worst)
