"""Probes: what flows through the layers of a network, as means and covariances over calibration data.

Sums are kept in float64 and merged batch by batch around the running mean, so that many batches or a
large offset cost no digits. Labels are never needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.calibration.padding import without_padding
from rankwise.core.border import margins, with_zeros
from rankwise.core.layer import Layer
from rankwise.core.moments import Moments
from rankwise.errors import RankwiseError
from rankwise.surgery.forward import Batches, Example, run_example, undisturbed
from rankwise.surgery.hooks import Seen, watching


@runtime_checkable
class Labelled(Protocol):
    """Batches of inputs with labels, such as a split of `rankwise.data`: the labels are not looked at."""

    def batches(self, batch_size: int, /) -> Iterable[tuple[Example, object]]: ...


FEW = 64  # places that are cut out one by one

Data = Batches | Labelled
Samples = Callable[[Layer, Tensor, Tensor], Tensor]  # what a layer gets and gives → one sample for each position
Size = Callable[[Layer], int]  # entries of a covariance


def output_moments(model: nn.Module, data: Data, layers: Iterable[Layer], max_gb: float = 2.0) -> dict[str, Moments]:
    """Moments of every layer's outputs before what follows, G = 1 and d = filters: one sample for each position."""
    return {la.name: seen for la, seen in _collect(model, data, layers, _outputs, lambda la: la.filters**2, max_gb)}


def input_moments(model: nn.Module, data: Data, layers: Iterable[Layer], max_gb: float = 2.0) -> dict[str, Moments]:
    """Moments of the patches that every layer sees, (G, c/G · Πκ) in the order of the fold f│chw.

    A transposed convolution sees single positions: d = c/G, since each input position meets all taps.
    """
    return {layer.name: seen for layer, seen in each_input_moments(model, data, layers, max_gb)}


def each_input_moments(
    model: nn.Module, data: Data, layers: Iterable[Layer], max_gb: float = 2.0
) -> Iterator[tuple[Layer, Moments]]:
    """`input_moments` one by one: whoever does not keep them needs memory for one pass only."""
    for layer, seen in _collect(model, data, layers, patches, lambda la: la.groups * patch_size(la) ** 2, max_gb):
        yield layer, moments_by_channel(layer, seen)


def patch_size(layer: Layer) -> int:
    taps = 1 if layer.transposed else torch.Size(layer.kernel).numel()
    return layer.group_channels * taps


def _outputs(layer: Layer, given: Tensor, output: Tensor) -> Tensor:
    return positions_of(output, layer.dims)[None]


def patches(layer: Layer, given: Tensor, output: Tensor) -> Tensor:
    """What a layer multiplies with its weights: (G, samples, Πκ · c/G), the channels of a tap side by side.

    Images lie in memory with their channels innermost, so such rows are copied in long runs: two to ten times faster
    than with the taps of a channel side by side, as weights have them. `by_channel` turns what was summed up.
    """
    if layer.dims == 0 or layer.transposed:
        samples = positions_of(given, layer.dims)
        return torch.unflatten(samples, 1, (layer.groups, -1)).transpose(0, 1)
    windows = _windows(layer, given)  # (n, c, *places, *taps)
    rows = windows.permute(0, *range(2, windows.ndim), 1).reshape(-1, math.prod(layer.kernel), layer.channels)
    return _grouped_rows(layer, rows)


def by_channel(layer: Layer, sums: Tensor, *axes: int) -> Tensor:
    """What was summed up over patches, in the order of weights: in each of `axes` taps × channels → channels × taps."""
    taps = patch_size(layer) // layer.group_channels
    if taps == 1 or not sums.numel():
        return sums
    order = torch.arange(patch_size(layer), device=sums.device).view(taps, -1).t().flatten()
    for axis in axes:
        sums = sums.index_select(axis, order)
    return sums


def moments_by_channel(layer: Layer, seen: Moments) -> Moments:
    """Moments of patches in the order of weights."""
    if seen.mean.shape[-1] != patch_size(layer):  # of single entries
        return seen
    return Moments(seen.count, by_channel(layer, seen.mean, 1), by_channel(layer, seen.scatter, 1, 2))


def _grouped_rows(layer: Layer, rows: Tensor) -> Tensor:
    """(samples, taps, c) → (G, samples, taps · c/G)."""
    apart = torch.unflatten(rows, 2, (layer.groups, -1)).permute(2, 0, 1, 3)
    return apart.reshape(layer.groups, len(rows), -1)


def spots_of(layer: Layer, given: Tensor, output: Tensor, most: int, random: torch.Generator) -> Tensor:
    """Numbers of at most so many places where a layer is applied, drawn at random: the same for all inputs of a batch.

    Places of a convolution are those of its outputs, of a transposed one those of its inputs; of a linear layer they
    are what lies between the first and the last axis.
    """
    if layer.dims and (layer.transposed or given.ndim == layer.dims + 2):
        total = math.prod((given if layer.transposed else output).shape[-layer.dims :])
    else:
        total = math.prod(given.shape[1:-1]) if layer.dims == 0 else math.prod(output.shape[-layer.dims :])
    if total <= most:
        return torch.arange(total)
    return torch.randperm(total, generator=random)[:most].sort()[0]


def patches_at(layer: Layer, given: Tensor, spots: Tensor) -> Tensor:
    """`patches` at some places only: (G, inputs · places, Πκ · c/G). The others are never copied."""
    spots = spots.to(given.device)
    if layer.dims == 0 or layer.transposed:
        last = given.movedim(given.ndim - layer.dims - 1, -1)
        whole = last.ndim > 2 and (layer.dims == 0 or given.ndim == layer.dims + 2)
        rows = last.reshape(len(last), -1, last.shape[-1])[:, spots] if whole else last
        samples = rows.reshape(-1, last.shape[-1])
        return torch.unflatten(samples, 1, (layer.groups, -1)).transpose(0, 1)
    batch = padded(layer, given if given.ndim == layer.dims + 2 else given[None])
    sizes = [(n - r) // s + 1 for n, r, s in zip(batch.shape[2:], _reach(layer), layer.stride, strict=True)]
    if len(spots) == math.prod(sizes):
        return patches(layer, given, given)
    seen = _windows_at(layer, batch, spots, sizes)  # (n, places, *taps, c)
    return _grouped_rows(layer, seen.reshape(len(seen) * len(spots), -1, layer.channels))


def _windows_at(layer: Layer, batch: Tensor, spots: Tensor, sizes: list[int]) -> Tensor:
    """Of a padded batch what a convolution sees at some of its places: (n, places, *taps, c)."""
    last = batch.movedim(1, -1)
    steps = [slice(0, (n - 1) * s + 1, s) for n, s in zip(sizes, layer.stride, strict=True)]
    if math.prod(layer.kernel) == 1:
        return last[:, *steps].flatten(1, layer.dims)[:, spots]
    corners = torch.unravel_index(spots, tuple(sizes))
    if len(spots) > FEW:
        taps = [torch.arange(0, r, d) for r, d in zip(_reach(layer), layer.dilation, strict=True)]
        grid = torch.meshgrid(*taps, indexing="ij")
        ones = (1,) * layer.dims
        at = [c.view(-1, *ones) * s + g.to(c.device) for c, s, g in zip(corners, layer.stride, grid, strict=True)]
        where: tuple[Any, ...] = (slice(None), *at)
        return last[where]
    reach = list(zip(layer.stride, _reach(layer), layer.dilation, strict=True))
    parts = []
    for corner in torch.stack(corners, 1).tolist():
        here = [slice(p * s, p * s + r, d) for p, (s, r, d) in zip(corner, reach, strict=True)]
        parts.append(last[:, *here])
    return torch.stack(parts, 1)


def pooled_patches(layer: Layer, given: Tensor) -> Tensor:
    """The mean of an input's patches over all places, (G, inputs, Πκ · c/G). Not for transposed convolutions."""
    if layer.dims == 0:
        means = given.reshape(len(given), -1, given.shape[-1]).mean(1)
        return torch.unflatten(means, 1, (layer.groups, -1)).transpose(0, 1)
    batch = padded(layer, given if given.ndim == layer.dims + 2 else given[None])
    for size, stride, dilation in zip(layer.kernel, layer.stride, layer.dilation, strict=True):
        # Places of one axis at a time are averaged, and its taps go to the end.
        span = (batch.shape[2] - (size - 1) * dilation - 1) // stride * stride + 1
        starts = range(0, size * dilation, dilation)
        batch = torch.stack([batch[:, :, at : at + span : stride].mean(2) for at in starts], -1)
    return _grouped_rows(layer, batch.movedim(1, -1).reshape(len(batch), -1, layer.channels))


def _windows(layer: Layer, given: Tensor) -> Tensor:
    """A view of what a convolution sees: (n, c, *positions, *taps)."""
    batch = padded(layer, given if given.ndim == layer.dims + 2 else given[None])
    for axis, reach in enumerate(_reach(layer)):  # one axis at a time
        batch = batch.unfold(2 + axis, reach, layer.stride[axis])[..., :: layer.dilation[axis]]
    return batch


def _reach(layer: Layer) -> list[int]:
    """How far the taps of a kernel lie apart, first to last, ends included."""
    return [(size - 1) * dilation + 1 for size, dilation in zip(layer.kernel, layer.dilation, strict=True)]


def padded(layer: Layer, batch: Tensor) -> Tensor:
    """A batch as the taps of a convolution see it, margins included."""
    if layer.border:
        sides = margins(layer.border, batch.shape[2:], layer.kernel, layer.stride, layer.dilation)
        batch = with_zeros(batch, sides)
    if layer.padding_mode == "zeros":
        return F.pad(batch, [side for both in reversed(_margins(layer)) for side in both])
    for axis, (before, after) in enumerate(_margins(layer)):
        batch = _pad(batch, layer.dims, axis, before, after, layer.padding_mode)
    return batch


def _margins(layer: Layer) -> list[tuple[int, int]]:
    """Padding before and after, for each axis; 'same' puts the odd one behind, as torch does."""
    if layer.padding == "valid":
        return [(0, 0)] * layer.dims
    if layer.padding == "same":
        wide = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel, strict=True)]
        return [(w // 2, w - w // 2) for w in wide]
    return [(int(p), int(p)) for p in layer.padding]


def _pad(batch: Tensor, dims: int, axis: int, before: int, after: int, mode: str) -> Tensor:
    if not before and not after:
        return batch
    # One axis at a time, brought to the end: what every padding mode of torch can do.
    moved = batch.movedim(2 + axis, -1)
    flat = moved.reshape(1, -1, moved.shape[-1])
    padded = F.pad(flat, (before, after), mode="constant" if mode == "zeros" else mode)
    return padded.reshape(*moved.shape[:-1], -1).movedim(-1, 2 + axis)


def positions_of(activation: Tensor, dims: int) -> Tensor:
    """(…, channels, *positions) or (…, features) → (samples, channels)."""
    last = activation.movedim(activation.ndim - dims - 1, -1)
    return last.reshape(-1, last.shape[-1])


def _collect(
    model: nn.Module, data: Data, layers: Iterable[Layer], samples: Samples, size: Size, max_gb: float
) -> Iterator[tuple[Layer, Moments]]:
    """Run the data once for each pass; a pass takes as many layers as their covariances fit into memory."""
    passes = _passes(list(layers), size, max_gb)
    if len(passes) > 1 and isinstance(data, Iterator):
        raise RankwiseError(
            f"the covariances need {len(passes)} passes over the calibration data, and a generator can be read once: "
            f"give a list, or raise max_gb={max_gb:g}"
        )
    for group in passes:
        found = _one_pass(model, data, group, samples)
        for layer in group:
            yield layer, found.pop(layer.name)


def _passes(layers: list[Layer], size: Size, max_gb: float) -> list[list[Layer]]:
    room = max_gb * 2**30 / 8
    passes: list[list[Layer]] = []
    used = 0.0
    for layer in layers:
        need = 2 * size(layer)  # the sum so far, and that of a batch
        if need > room:
            raise RankwiseError(
                f"the covariance of layer {layer.name!r} alone needs {need * 8 / 2**30:.2f} GB, and max_gb={max_gb:g}: "
                f"raise max_gb, or exclude the layer"
            )
        if not passes or used + need > room:
            passes.append([])
            used = 0.0
        passes[-1].append(layer)
        used += need
    return passes


def _one_pass(model: nn.Module, data: Data, layers: list[Layer], samples: Samples) -> dict[str, Moments]:
    moments = {layer.name: Moments() for layer in layers}
    batch_number = 0

    def look(layer: Layer, call: Seen) -> None:
        seen = samples(layer, call.given.detach(), call.output.detach())
        check_finite(seen, batch_number, layer.name)
        moments[layer.name].add(seen)

    with undisturbed(model), watching(model, {layer.name: partial(look, layer) for layer in layers}):
        for batch_number, batch in enumerate(batches(data), start=1):  # noqa: B007
            run_example(model, batch)
    check_some(batch_number)
    return moments


def check_finite(seen: Tensor, batch_number: int, name: str) -> None:
    if not bool(torch.isfinite(seen).all()):
        raise RankwiseError(
            f"calibration batch {batch_number} gives NaN or infinite values at layer {name!r}: "
            f"check the data and its normalisation"
        )


def check_some(batches_seen: int) -> None:
    if not batches_seen:
        raise RankwiseError("the calibration data is empty: give at least one batch of inputs")


def batches(data: Data) -> Iterator[Example]:
    """Inputs one by one: a tensor is one batch, a split of `rankwise.data` gives its images without labels.

    Padded batches of text are cut into batches without padding (padding.py).
    """
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Labelled):
        for inputs, _ in data.batches(128):
            yield inputs
    else:
        for batch in data:
            yield from without_padding(batch)
