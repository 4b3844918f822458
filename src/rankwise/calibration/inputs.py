"""What a plan looks at: calibration data, or inputs that are made up where there is none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankwise.calibration.activations import Data, batches
from rankwise.calibration.synthetic import noise, norms_of, synthetic_images
from rankwise.surgery.forward import Example

CALIBRATION, SYNTHETIC, NOISE = "calibration", "synthetic", "noise"
SHRINKAGE = 0.1  # of moments of inputs that are not data, towards the identity, at least
ENTRIES = 1 << 21  # of a batch of images: 13 of 3×224×224


@dataclass(frozen=True, eq=False)
class Inputs:
    """Batches of inputs, and of what `kind` they are."""

    batches: list[Example]
    kind: str

    @property
    def real(self) -> bool:
        """Whether they are data: a layer that data does not reach stays as it is."""
        return self.kind == CALIBRATION

    @property
    def means(self) -> bool:
        """Whether means of activations are to be trusted, so that layers can be fitted one after the other."""
        return self.kind != NOISE

    @property
    def least(self) -> float:
        """How far moments are drawn towards the identity at least."""
        return 0.0 if self.real else SHRINKAGE


def find_inputs(
    model: nn.Module, example: Example | None, data: Data | None, macs: int | None, seed: int = 0
) -> Inputs:
    """The data; without any, images that fit the batch norms, or smooth noise where there are none.

    Raises `NoInputs` with the reason where nothing can be made up. `macs` are those of the example.
    """
    if data is not None:
        return Inputs(in_parts(data), CALIBRATION)
    if norms_of(model):
        return Inputs(in_parts(synthetic_images(model, example, macs, seed)), SYNTHETIC)
    return Inputs(in_parts(noise(model, example, macs, seed)), NOISE)


def in_parts(data: Data) -> list[Example]:
    """All batches, since they are read for every layer; large ones cut, since gradients of all layers are held."""
    return [part for batch in batches(data) for part in _parts(batch)]


def _parts(batch: Example) -> Iterable[Example]:
    if not isinstance(batch, Tensor) or batch.ndim != 4 or batch.numel() <= ENTRIES:
        return (batch,)
    return torch.split(batch, max(1, ENTRIES * len(batch) // batch.numel()))
