"""`svd`: slices of consecutive input channels, each decomposed on its own. The paper's decomposition.

What scores an option and what builds it start from the same slices (`cut`): the channels are cut first, then each slice
is folded. Every slice is a matrix A ≈ U V of rank j; the V of all slices are one grouped encoder, the U side by side
one decoder. Clusters of channels (clusters.py) are slices of gathered channels, so they share what is here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.core.fold import folds_for, from_matrix, kernel_sides, to_matrix
from rankwise.core.layer import Layer, canonical, stored
from rankwise.core.linalg import Array, array, eigenvalues, factor
from rankwise.core.option import Option
from rankwise.core.parts import Part
from rankwise.core.slicing import distinct_folds, long_axes, real_slices, slice_width, slices_for, taps
from rankwise.decompositions.base import (
    Decomposition,
    Factors,
    Scores,
    Selection,
    Target,
    check_extras,
    check_fold,
    falling,
    patch_moment,
)
from rankwise.decompositions.spectra import spectra
from rankwise.errors import RankwiseError

NAME = "svd"


class Slices(Decomposition):
    """One encoder with a group for each slice, one decoder for all of them."""

    name = NAME
    about = "svd of each slice of consecutive channels, from the weight alone"

    def options(self, layer: Layer, selection: Selection) -> list[Option]:
        """Every fold that gives another matrix, with every number of slices that is asked for."""
        folds, slices = distinct_folds(layer, selection.folds), slices_for(selection.slices, layer)
        return [Option(fold, k, self.name) for fold in folds for k in slices]

    def candidates(self, layer: Layer, selection: Selection) -> list[Option]:
        return self.options(layer, selection)

    def full_rank(self, layer: Layer, option: Option) -> int:
        return max(slice_ranks(layer, option))

    def parts(self, layer: Layer, option: Option, rank: Any) -> tuple[Part, ...]:
        left, right = kernel_sides(option.fold)
        slices = layer.groups * option.slices
        wide, middle = slices * max(widths(layer, option)), slices * rank
        return Part("encoder", right, wide, middle, slices), Part("decoder", left, middle, layer.filters, layer.groups)

    def wanted(self, layer: Layer, there: list[Option], selection: Selection) -> list[Option]:
        return narrowed(super().wanted(layer, there, selection), layer, selection)

    def check(self, layer: Layer, option: Option, where: str) -> None:
        check_fold(layer, option, where)
        check_extras(option, where)
        check_slices(layer, option, where)

    def score(self, target: Target, selection: Selection) -> Scores:
        return score_slices(target, self.options(target.layer, selection))

    def output_errors(self, target: Target, options: Iterable[Option]) -> dict[Option, Array]:
        return {option: falling(lost_outputs(target, option)) for option in options}

    def factors(self, target: Target, option: Option, rank: int) -> Factors:
        left, right = factors(target.weight, target.layer, option, rank)
        return pair_factors(left, right, target.layer, option)

    def compose(self, layer: Layer, option: Option, weights: Mapping[str, Sequence[Tensor]]) -> Tensor:
        return compose(weights["encoder"][0], weights["decoder"][0], layer, option)


DECOMPOSITION = Slices()


def widths(layer: Layer, option: Option) -> tuple[int, ...]:
    """Channels that each slice of a group stores, padding included."""
    if option.clusters:
        return tuple(len(cluster) for cluster in option.clusters)
    return (slice_width(layer.group_channels, option.slices),) * option.slices


def slice_ranks(layer: Layer, option: Option) -> tuple[int, ...]:
    """The rank at which each slice is whole."""
    left, right = taps(layer, option.fold)
    return tuple(min(layer.group_filters * left, width * right) for width in widths(layer, option))


def check_slices(layer: Layer, option: Option, where: str) -> None:
    channels = layer.group_channels
    if not 1 <= option.slices <= channels or real_slices(channels, option.slices) != option.slices:
        raise RankwiseError(f"{where} cuts {channels} channels into {option.slices} slices, which cannot be done")
    if layer.groups > 1 and channels % option.slices:
        raise RankwiseError(
            f"{where} cuts {channels} channels of a grouped convolution into {option.slices} unequal slices: "
            f"only divisors of {channels} can be built"
        )


def narrowed(there: list[Option], layer: Layer, selection: Selection, screened: bool = False) -> list[Option]:
    """Those options that have one of the folds and one of the numbers of slices that are asked for.

    None may be missing, unless they were `screened`: of large layers only what is worth it is fitted.
    """
    everything = there
    if selection.slices != "all":
        ks = slices_for(selection.slices, layer)
        missing = sorted(set(ks) - {o.slices for o in there})
        if missing and there and not screened:
            raise RankwiseError(
                f"the table has no spectra for {missing[0]} slices of layer {layer.name!r}: "
                f"build it with slices={selection.slices!r}"
            )
        there = [o for o in there if o.slices in ks]
    if selection.folds != "all":
        # Folds of one matrix are stored once, so compare what they do to axes longer than 1.
        asked = {long_axes(layer, f): f for f in folds_for(selection.folds, layer.dims)}
        missing_folds = set(asked) - {long_axes(layer, o.fold) for o in everything}
        if missing_folds and everything and not screened:
            fold = asked[missing_folds.pop()]
            raise RankwiseError(
                f"the table has no spectra for the fold {fold} of {layer.name!r}: build it with that fold"
            )
        there = [o for o in there if long_axes(layer, o.fold) in asked]
    return there


def score_slices(target: Target, options: Iterable[Option], folds: Iterable[str] = ()) -> Scores:
    """The spectra of slices, and ‖W‖₂ of their folds and of those in `folds` (one slice holds it)."""
    found = Scores()
    by_fold: dict[str, list[Option]] = {fold: [] for fold in folds}
    for option in options:
        by_fold.setdefault(option.fold, []).append(option)
    for fold, mine in by_fold.items():
        arrays = spectra(target.weight, target.layer, fold, sorted({1, *(o.slices for o in mine)}))
        found.norms[fold] = float(arrays[1].max())
        found.spectra.update({option: arrays[option.slices] for option in mine})
    return found


def cut(weight: Tensor, layer: Layer, option: Option) -> Tensor:
    """The slices of a weight as matrices: (G, k, rows, columns), zeros where a slice is narrower than the widest."""
    whole = canonical(weight.detach(), layer)
    if option.clusters:
        whole = torch.constant_pad_nd(whole, [0, 0] * layer.dims + [0, 1])[:, :, places(layer, option)]
    missing = option.slices * max(widths(layer, option)) - whole.shape[2]
    if missing:
        whole = torch.constant_pad_nd(whole, [0, 0] * layer.dims + [0, missing])
    matrix = to_matrix(whole, option.fold)
    return torch.unflatten(matrix, 2, (option.slices, -1)).transpose(1, 2)


def places(layer: Layer, option: Option) -> Tensor:
    """The channels of one cluster after the other, each filled up with the channel behind the last one."""
    wide = max(widths(layer, option))
    filled = [[*cluster, *[layer.channels] * (wide - len(cluster))] for cluster in option.clusters]
    return torch.tensor(filled).flatten()


def factors(weight: Tensor, layer: Layer, option: Option, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """U (G, k, rows, j) and V (G, k, j, columns) of every slice in float64; all of them without a rank."""
    slices = cut(weight, layer, option)
    pairs = [factor(s) for s in slices.flatten(0, 1)]
    left = torch.unflatten(torch.stack([u[:, :rank] for u, _ in pairs]), 0, slices.shape[:2])
    right = torch.unflatten(torch.stack([v[:rank] for _, v in pairs]), 0, slices.shape[:2])
    return left, right


def pair_factors(left: Tensor, right: Tensor, layer: Layer, option: Option, bias: Tensor | None = None) -> Factors:
    encoder, decoder = pair_weights(left, right, layer, option)
    return Factors({"encoder": [encoder], "decoder": [decoder]}, bias)


def pair_weights(left: Tensor, right: Tensor, layer: Layer, option: Option) -> tuple[Tensor, Tensor]:
    """The factors as weights of two layers, in canonical layout, each with its half of Σ; columns of U have norm 1.

    The paper gives all of Σ to the encoder. Sharing √σ is the same product; it keeps both within the range
    of float16, and retraining with weight decay treats both alike.

    Encoder (G·k, j, c/(G·k), *kernel with 1 on the left axes), decoder (G, f/G, k·j, *kernel with 1 on
    the right axes).
    """
    left_axes, right_axes = kernel_sides(option.fold)
    root = right.norm(dim=-1).sqrt()
    left, right = left * root[..., None, :], right / root.where(root > 0, torch.ones_like(root))[..., None]
    rank = left.shape[-1]
    n = layer.groups * option.slices
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
    right = encoder.reshape(layer.groups, option.slices, rank, -1)
    left = torch.unflatten(to_matrix(decoder, option.fold), 2, (option.slices, rank)).transpose(1, 2)
    matrix = (left @ right).transpose(1, 2).flatten(2)
    shape = (layer.groups, layer.group_filters, option.slices * width, *layer.kernel)
    whole = from_matrix(matrix, option.fold, shape)
    if option.clusters:
        gathered = torch.zeros_like(whole[:, :, : layer.channels + 1])
        gathered[:, :, places(layer, option)] = whole  # what was filled up lands behind the last channel
        whole = gathered
    return stored(whole[:, :, : layer.group_channels], layer).contiguous()


def residual_norm(left: Tensor, right: Tensor, rank: int) -> float:
    """‖W − Ŵ‖₂ at a rank, from all factors of all slices: one symmetric eigenvalue for each group."""
    rest = left[..., rank:] @ right[..., rank:, :]
    worst = 0.0
    for group in rest.transpose(1, 2).flatten(2):
        small = group @ group.t() if group.shape[0] <= group.shape[1] else group.t() @ group
        worst = max(worst, float(eigenvalues(small[None])[0, 0]))
    return math.sqrt(worst)


def lost_outputs(target: Target, option: Option) -> Array:
    """E ‖(W − Ŵ) x‖² by rank, for the svd of slices or clusters, over `target.inputs`."""
    assert target.inputs is not None, "the measure output was asked for with calibration data"
    layer = target.layer
    left, right = factors(target.weight, layer, option)
    rank = left.shape[-1]
    blocks = _blocks(layer, option, patch_moment(layer, target.inputs.second_moment))
    lost = left.new_zeros(rank, rank)
    for l, r, m in zip(left, right, blocks, strict=True):
        # components in the order (rank, slice), so that a rank is one block of k
        wide = _spread(r, layer, option).transpose(0, 1).flatten(0, 1)
        rows = torch.unflatten(l, 1, (layer.group_filters, -1)).permute(2, 1, 3, 0).flatten(2)  # (taps, f, rank·k)
        for a in range(len(m)):
            for b in range(a + 1):
                both = (wide @ m[a, :, b] @ wide.t()) * (rows[a].t() @ rows[b])
                part = both.reshape(rank, option.slices, rank, option.slices).sum(dim=(1, 3))
                lost += part if a == b else part + part.t()
    ends = lost.flip(0, 1).cumsum(0).cumsum(1).flip(0, 1).diagonal()
    return array(torch.constant_pad_nd(ends, (0, 1)))


def _spread(right: Tensor, layer: Layer, option: Option) -> Tensor:
    """Right factors of one group's slices, (k, j, columns) → (k, j, columns of all channels) with zeros elsewhere."""
    k, rank, columns = right.shape
    wide = max(widths(layer, option))
    each = columns // wide
    slots_of = places(layer, option) if option.clusters else torch.arange(k * wide)
    whole = right.new_zeros(k, rank, max(k * wide, layer.group_channels + 1), each)
    for i, (mine, slots) in enumerate(zip(right, torch.split(slots_of, wide), strict=True)):
        whole[i, :, slots] = mine.reshape(rank, wide, each)
    return whole[:, :, : layer.group_channels].flatten(2)


def _blocks(layer: Layer, option: Option, moment: Tensor) -> Tensor:
    """(G, left taps, c·right taps, left taps, c·right taps)."""
    left, right = kernel_sides(option.fold)
    n, c = layer.dims, layer.group_channels
    whole = moment.reshape(-1, c, *layer.kernel, c, *layer.kernel)
    here = [*(2 + a for a in left), 1, *(2 + a for a in right)]
    there = [i + n + 1 for i in here]
    outer, inner = taps(layer, option.fold)
    return whole.permute(0, *here, *there).reshape(-1, outer, c * inner, outer, c * inner)
