"""Sensitivities of channels over calibration data, for `pfp` (Liebenwein et al. 2020).

A layer that reads channels computes zᵢ = Σⱼ zᵢⱼ, where zᵢⱼ is what channel j adds to output i at one position.
Products of weight and activation that are positive and those that are negative are kept apart, zᵢⱼ = pᵢⱼ − nᵢⱼ.
The sensitivity of a channel is the largest share that it ever has,

    sⱼ = max over data, positions, i, readers of max(pᵢⱼ / Σₖ pᵢₖ, nᵢⱼ / Σₖ nᵢₖ),

so that without the channels R both parts of every zᵢ change by at most Σ_{j∈R} sⱼ of themselves on this data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.calibration.activations import Data, batches, by_channel, check_finite, check_some, padded, patches
from rankwise.core.layer import Layer, canonical
from rankwise.pruning.channels import Channels, Group
from rankwise.surgery.forward import run_example, undisturbed
from rankwise.surgery.hooks import Seen, watching

CHUNK = 2**18  # numbers in one go: what a processor's cache holds
LEAST = 64  # positions in one go, so that large weights are not read again for every position
Slots = dict[int, Tensor]  # group → (channels, indices of each) at one reader


def sensitivities(model: nn.Module, data: Data, channels: Channels, groups: Sequence[Group]) -> list[Tensor | None]:
    """For every group the sensitivity of each channel, in [0, 1]; None where the data never reaches a reader."""
    layers = {part.name: part.layer for part in channels.parts if part.layer is not None}
    readers: dict[str, Slots] = {}
    for number, group in enumerate(groups):
        for member in group.members:
            if member.side == "in":
                readers.setdefault(member.name, {})[number] = torch.tensor(member.indices)
    best = {
        (n, g): torch.zeros(len(slots), dtype=torch.float64) for n, here in readers.items() for g, slots in here.items()
    }
    seen: set[str] = set()
    batch_number = 0

    def look(name: str, call: Seen) -> None:
        given, weight = call.given.detach(), cast(Tensor, call.module.weight).detach()
        check_finite(given, batch_number, name)
        seen.add(name)
        for g, found in largest_shares(layers[name], weight, given, readers[name]):
            best[name, g] = torch.maximum(best[name, g], found.to(best[name, g]))

    with undisturbed(model), watching(model, {name: partial(look, name) for name in readers}):
        for batch_number, batch in enumerate(batches(data), start=1):  # noqa: B007
            run_example(model, batch)
    check_some(batch_number)
    return [_over_readers(g, group, best, seen) for g, group in enumerate(groups)]


def _over_readers(g: int, group: Group, best: dict[tuple[str, int], Tensor], seen: set[str]) -> Tensor | None:
    names = group.names("in")
    if not seen.issuperset(names):
        return None
    found = torch.stack([best[name, g] for name in names]) if names else torch.zeros(1, group.size)
    return found.amax(0).double().clamp(max=1.0)


def largest_shares(layer: Layer, weight: Tensor, given: Tensor, slots: Slots) -> Iterator[tuple[int, Tensor]]:
    """The largest share of each channel in the outputs of one reader for one batch, by group."""
    dtype = torch.float64 if given.dtype == torch.float64 else torch.float32
    given, weight = given.to(dtype), weight.to(given.device, dtype)
    if given.ndim == layer.dims + 1 and layer.dims:
        given = given[None]
    yield from (_transposed if layer.transposed else _straight)(layer, weight, given, slots)


def _straight(layer: Layer, weight: Tensor, given: Tensor, slots: Slots) -> Iterator[tuple[int, Tensor]]:
    """Convolutions and linear layers: weights (c, 2f, taps) times patches (c, taps, positions)."""
    signed = canonical(weight, layer)[0].flatten(2) if layer.dims else canonical(weight, layer)[0][:, :, None]
    signed = signed.transpose(0, 1)  # (c, f, taps)
    w = torch.cat([signed.clamp(min=0), (-signed).clamp(min=0)], dim=1)
    turned = bool((given < 0).any())
    if turned:  # a negative activation turns the sign of its products around
        w = torch.cat([w, torch.cat([(-signed).clamp(min=0), signed.clamp(min=0)], dim=1)], dim=2)
    every = torch.arange(layer.channels)
    took = {g: None if torch.equal(i.flatten(), every) and i.shape[1] == 1 else i for g, i in slots.items()}
    parts = {g: w if i is None else w[i].transpose(1, 2).flatten(2) for g, i in took.items()}  # (n, 2f, width · taps)
    best = {g: given.new_zeros(len(i)) for g, i in slots.items()}
    flat = w.transpose(0, 1).flatten(1)  # (2f, c · taps)
    tiny = torch.finfo(given.dtype).tiny
    few = max(LEAST, CHUNK // (max(map(len, slots.values())) * w.shape[1]))
    for block in _blocks(layer, given):
        if turned:
            block = torch.cat([block.clamp(min=0), (-block).clamp(min=0)], dim=1)
        for x in torch.split(block, few, dim=2):
            one_over = (flat @ x.flatten(0, 1)).clamp_(min=tiny).reciprocal_()  # (2f, positions)
            for g, index in took.items():
                mine = x if index is None else x[index].flatten(1, 2)  # (n, width · taps, positions)
                best[g] = torch.maximum(best[g], _largest(parts[g], mine, one_over))
    yield from best.items()


def _largest(w: Tensor, x: Tensor, one_over: Tensor) -> Tensor:
    """max over outputs and positions of (w · x) · one_over for each of n channels, a few channels at a time."""
    some = max(1, CHUNK // one_over.numel())
    both = zip(torch.split(w, some), torch.split(x, some), strict=True)
    return torch.cat([torch.bmm(a, b).mul_(one_over).amax(dim=(1, 2)) for a, b in both])


def _blocks(layer: Layer, given: Tensor) -> Iterator[Tensor]:
    """Patches (c, taps, positions): of one image at a time, or of all rows of a linear layer."""
    if not layer.dims:
        yield given.flatten(0, -2).t().contiguous()[:, None]
        return
    for image in torch.split(given, 1):
        if layer.dims == 2:
            columns = F.unfold(padded(layer, image), layer.kernel, layer.dilation, 0, layer.stride)[0]
        else:
            columns = by_channel(layer, patches(layer, image, image), 2)[0].t()
        yield columns.reshape(layer.channels, -1, columns.shape[1])


def _transposed(layer: Layer, weight: Tensor, given: Tensor, slots: Slots) -> Iterator[tuple[int, Tensor]]:
    """Transposed convolutions, weights (c, f, *kernel): one group for each channel gives what it adds."""
    up = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[layer.dims]
    shape: dict[str, Any] = {
        "stride": layer.stride,
        "padding": layer.padding,
        "output_padding": layer.output_padding,
        "dilation": layer.dilation,
    }
    w = torch.cat([weight.clamp(min=0), (-weight).clamp(min=0)], dim=1)
    swapped = torch.cat([(-weight).clamp(min=0), weight.clamp(min=0)], dim=1)
    tiny = torch.finfo(given.dtype).tiny
    best = {g: given.new_zeros(len(index)) for g, index in slots.items()}
    for image in torch.split(given, 1):
        sides = ((image.clamp(min=0), w), ((-image).clamp(min=0), swapped))

        def added(index: Tensor | None, sides: Any = sides) -> Tensor:
            """(n, 2f, positions): what every channel adds; without an index all of them together, n = 1."""
            n = 1 if index is None else len(index)
            took = [(x, v) if index is None else (x[:, index], v[index]) for x, v in sides]
            out: Tensor = up(*took[0], groups=n, **shape) + up(*took[1], groups=n, **shape)
            return out.reshape(n, 2 * layer.filters, -1)

        total = added(None).clamp_(min=tiny)
        for g, index in slots.items():
            mine = torch.stack([added(column) for column in index.unbind(1)]).sum(0)
            best[g] = torch.maximum(best[g], (mine / total).amax(dim=(1, 2)))
    yield from best.items()
