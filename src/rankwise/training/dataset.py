"""What a network is trained and scored on: the splits of one data set, in the form that the network takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from rankwise.data import splits
from rankwise.data.augment import choose
from rankwise.data.splits import Split
from rankwise.models import networks
from rankwise.models.spec import parse

_LARGE = 96  # pixels; larger images are decoded as they are needed


@dataclass(frozen=True, eq=False)
class Material:
    """`fit` is trained on, `stop` decides when to stop; the others are opened when they are asked for."""

    spec: str
    fit: Split
    stop: Split
    augment: str
    side: int | None
    opened: dict[str, Split] = field(default_factory=dict)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """C×H×W of one image."""
        channels, height, width = self.fit.pixels(torch.tensor([0])).shape[1:]
        return channels, height, width

    @property
    def form(self) -> tuple[int, int, int | None]:
        """Classes, channels, and the side of square images: what `networks.fit_spec` takes."""
        channels, height, width = self.shape
        return len(self.fit.classes), channels, height if height == width else None

    def split(self, name: str) -> Split:
        """Another split of the same data; read once."""
        if name not in self.opened:
            known = name == self.stop.split
            self.opened[name] = self.stop if known else splits.load(self.spec, name, size=self.side)
        return self.opened[name]


def side_for(spec: str, network: str, size: int | None = None) -> int | None:
    """The side of the images that the network takes; None where they are taken as they are."""
    if size is None and spec.startswith("voc:"):
        return splits.VOC_SIDE
    if size is None and parse(network).kind in ("torchvision", "timm"):
        shape = networks.default_input(network)
        return shape[-1] if shape is not None and len(shape) == 4 else None
    return size


def open_material(spec: str, network: str, augment: str, size: int | None = None, limit: int | None = None) -> Material:
    """The data `spec` for the network: large images are scaled to the size that it takes, or to `size`."""
    side = side_for(spec, network, size)
    large = (side or 0) > _LARGE
    fit = splits.load(spec, "fit", size=side, hold=not (augment == "imagenet" or (augment == "auto" and large)))
    if limit is not None:
        fit = fit.thin(limit)
    channels, height, _ = fit.pixels(torch.tensor([0])).shape[1:]
    chosen = choose(augment, fit.masks is not None, channels, height)
    return Material(spec, fit, splits.load(spec, "stop", size=side), chosen, side or height)
