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
    return _collect(model, data, layers, patches, lambda la: la.groups * patch_size(la) ** 2, max_gb)


def patch_size(layer: Layer) -> int:
    taps = 1 if layer.transposed else torch.Size(layer.kernel).numel()
    return layer.group_channels * taps


def _outputs(layer: Layer, given: Tensor, output: Tensor) -> Tensor:
    return positions_of(output, layer.dims)[None]


def patches(layer: Layer, given: Tensor, output: Tensor) -> Tensor:
    """What a layer multiplies with its weights: (G, samples, c/G · Πκ), the taps of a channel side by side."""
    if layer.dims == 0 or layer.transposed:
        samples = positions_of(given, layer.dims)
        return torch.unflatten(samples, 1, (layer.groups, -1)).transpose(0, 1)
    batch = torch.unflatten(_windows(layer, given), 1, (layer.groups, layer.group_channels))
    # (n, G, c, *positions, *taps) → (G, n·positions, c·taps)
    spots = [3 + a for a in range(layer.dims)]
    taps = [3 + layer.dims + a for a in range(layer.dims)]
    return batch.permute(1, 0, *spots, 2, *taps).reshape(layer.groups, -1, patch_size(layer))


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
    """`patches` at some places only: (G, inputs · places, c/G · Πκ). The others are never copied."""
    spots = spots.to(given.device)
    if layer.dims == 0 or layer.transposed:
        last = given.movedim(given.ndim - layer.dims - 1, -1)
        whole = last.ndim > 2 and (layer.dims == 0 or given.ndim == layer.dims + 2)
        rows = last.reshape(len(last), -1, last.shape[-1])[:, spots] if whole else last
        samples = rows.reshape(-1, last.shape[-1])
        return torch.unflatten(samples, 1, (layer.groups, -1)).transpose(0, 1)
    windows = _windows(layer, given)
    sizes = windows.shape[2 : 2 + layer.dims]
    where: tuple[Any, ...] = (slice(None), slice(None), *torch.unravel_index(spots, tuple(sizes)))
    chosen = windows[where]  # (n, c, places, *taps)
    chosen = torch.unflatten(chosen, 1, (layer.groups, layer.group_channels))
    taps = [4 + a for a in range(layer.dims)]
    return chosen.permute(1, 0, 3, 2, *taps).reshape(layer.groups, -1, patch_size(layer))


def pooled_patches(layer: Layer, given: Tensor) -> Tensor:
    """The mean of an input's patches over all places, (G, inputs, c/G · Πκ). Not for transposed convolutions."""
    if layer.dims == 0:
        means = given.reshape(len(given), -1, given.shape[-1]).mean(1)
        return torch.unflatten(means, 1, (layer.groups, -1)).transpose(0, 1)
    batch = padded(layer, given if given.ndim == layer.dims + 2 else given[None])
    for axis in reversed(range(layer.dims)):  # places of one axis at a time are averaged, its taps go to the end
        reach = (layer.kernel[axis] - 1) * layer.dilation[axis] + 1
        batch = batch.unfold(2 + axis, reach, layer.stride[axis])[..., :: layer.dilation[axis]].mean(2 + axis)
    batch = batch.permute(0, 1, *range(batch.ndim - 1, 1, -1))
    means = torch.unflatten(batch, 1, (layer.groups, layer.group_channels)).transpose(0, 1)
    return means.reshape(layer.groups, len(batch), -1)


def _windows(layer: Layer, given: Tensor) -> Tensor:
    """A view of what a convolution sees: (n, c, *positions, *taps)."""
    batch = padded(layer, given if given.ndim == layer.dims + 2 else given[None])
    for axis in range(layer.dims):  # one axis at a time
        reach = (layer.kernel[axis] - 1) * layer.dilation[axis] + 1
        batch = batch.unfold(2 + axis, reach, layer.stride[axis])[..., :: layer.dilation[axis]]
    return batch


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
