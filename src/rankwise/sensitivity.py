"""Sensitivities of channels over calibration data, for `pfp` (Liebenwein et al. 2020).

A layer that reads channels computes zᵢ = Σⱼ zᵢⱼ, where zᵢⱼ is what channel j adds to output i at one position.
Products of weight and activation that are positive and those that are negative are kept apart, zᵢⱼ = pᵢⱼ − nᵢⱼ.
The sensitivity of a channel is the largest share that it ever has,

    sⱼ = max over data, positions, i, readers of max(pᵢⱼ / Σₖ pᵢₖ, nᵢⱼ / Σₖ nᵢₖ),

so that without the channels R both parts of every zᵢ change by at most Σ_{j∈R} sⱼ of themselves on this data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.channels import Channels, Group
from rankwise.forward import run_example, undisturbed
from rankwise.layer import Layer, canonical
from rankwise.probe import batches, check_finite, check_some, patches

CHUNK = 2**18  # numbers in one go: what a processor's cache holds
WIDE = 2**24  # numbers in the patches of one go
Slots = dict[int, Tensor]  # group → (channels, indices of each) at one reader


def sensitivities(
    model: nn.Module, data: Iterable[Any], channels: Channels, groups: Sequence[Group]
) -> list[Tensor | None]:
    """For every group the sensitivity of each channel, in [0, 1]; None where the data never reaches a reader."""
    layers = {part.name: part.layer for part in channels.parts if part.layer is not None}
    readers: dict[str, Slots] = {}
    for number, group in enumerate(groups):
        for member in group.members:
            if member.side == "in":
                readers.setdefault(member.name, {})[number] = torch.tensor(member.indices)
    best = {(name, g): torch.zeros(len(slots)) for name, here in readers.items() for g, slots in here.items()}
    seen: set[str] = set()
    batch_number = 0

    def watch(name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            given = (args[0] if args else next(iter(kwargs.values()))).detach()
            check_finite(given, batch_number, name)
            seen.add(name)
            for g, found in largest_shares(layers[name], module.weight.detach(), given, readers[name]):
                best[name, g] = torch.maximum(best[name, g], found.cpu().to(best[name, g].dtype))

        return model.get_submodule(name).register_forward_hook(hook, with_kwargs=True)

    handles: list[Any] = []
    try:
        with undisturbed(model):
            handles = [watch(name) for name in readers]
            for batch_number, batch in enumerate(batches(data), start=1):  # noqa: B007
                run_example(model, batch)
    finally:
        for handle in handles:
            handle.remove()
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
    shares = _transposed if layer.transposed else _straight
    for part in _images(layer, given):
        yield from shares(layer, weight, part, slots)


def _images(layer: Layer, given: Tensor) -> Iterator[Tensor]:
    """A few images at a time, so that their patches fit into memory."""
    if not layer.dims:
        yield given
        return
    taps = torch.Size(layer.kernel).numel() * (2 * layer.filters if layer.transposed else 1)
    few = max(1, WIDE // max(1, given[0].numel() * taps))
    yield from torch.split(given, few)


def _straight(layer: Layer, weight: Tensor, given: Tensor, slots: Slots) -> Iterator[tuple[int, Tensor]]:
    """Convolutions and linear layers: patches (rows, c, taps) times weights (c, taps, 2f)."""
    signed = canonical(weight, layer)[0].flatten(2) if layer.dims else canonical(weight, layer)[0][:, :, None]
    signed = signed.permute(1, 2, 0)  # (c, taps, f)
    w = torch.cat([signed.clamp(min=0), (-signed).clamp(min=0)], dim=2)
    rows = torch.unflatten(patches(layer, given, given)[0], 1, (layer.channels, -1))
    if bool((rows < 0).any()):
        # A negative activation turns the sign of its products around.
        swapped = torch.cat([(-signed).clamp(min=0), signed.clamp(min=0)], dim=2)
        rows = torch.cat([rows.clamp(min=0), (-rows).clamp(min=0)], dim=2)
        w = torch.cat([w, swapped], dim=1)
    tiny = torch.finfo(rows.dtype).tiny
    parts = {g: w[index].flatten(1, 2) for g, index in slots.items()}  # (n, width · taps, 2f)
    best = {g: rows.new_zeros(len(index)) for g, index in slots.items()}
    wide = max(len(index) for index in slots.values()) * w.shape[2]
    for some in torch.split(rows, max(1, CHUNK // wide)):
        total = (some.flatten(1) @ w.flatten(0, 1)).clamp_(min=tiny).reciprocal_()  # (rows, 2f)
        for g, index in slots.items():
            x = some[:, index].flatten(2).transpose(0, 1)  # (n, rows, width · taps)
            best[g] = torch.maximum(best[g], torch.bmm(x, parts[g]).mul_(total).amax(dim=(1, 2)))
    yield from best.items()


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
    sides = ((given.clamp(min=0), w), ((-given).clamp(min=0), swapped))

    def spread(index: Tensor | None) -> Tensor:
        """(b, n, 2f, positions): what every channel adds; without an index, all of them together as n = 1."""
        n = 1 if index is None else len(index)
        took = [(x, v) if index is None else (x[:, index], v[index]) for x, v in sides]
        out: Tensor = up(*took[0], groups=n, **shape) + up(*took[1], groups=n, **shape)
        return torch.unflatten(out.flatten(2), 1, (n, 2 * layer.filters))

    total = spread(None).clamp_(min=torch.finfo(given.dtype).tiny)
    for g, index in slots.items():
        added = torch.stack([spread(column) for column in index.unbind(1)]).sum(0)
        yield g, (added / total).amax(dim=(0, 2, 3))
