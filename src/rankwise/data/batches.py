"""Batches for training: shuffled, cut into shares for several processes, augmented, decoded ahead of time.

The batches of an epoch are a function of (seed, epoch, process), so a training that resumes at an epoch sees what it
would have seen. Images held in memory are augmented as one tensor; encoded ones are decoded in threads, while the
step before is still computing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from rankwise.data.augment import DRAWS, FLIPPED, PADDING, resized_crop, scaled_crop, shift_flip
from rankwise.data.images import colour_mode, opened, readable
from rankwise.data.splits import Split
from rankwise.errors import RankwiseError

_AHEAD = 2  # batches that are decoded before they are asked for


@dataclass(frozen=True)
class Feed:
    """The training data of one process: `rank` of `world`. `size` is the side of augmented large images."""

    split: Split
    batch_size: int
    augment: str
    seed: int = 0
    size: int | None = None
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.split.rows is None and self.augment in ("imagenet", "voc"):
            raise RankwiseError(
                f"augment={self.augment} needs encoded images, and {self.split.name} has none: give auto"
            )
        if self.size is None and self.augment in ("imagenet", "voc"):
            raise RankwiseError(f"augment={self.augment} needs the side of the images that the network takes")
        if len(self.split) < 2 * self.world:
            raise RankwiseError(
                f"{self.split.name} has {len(self.split)} images in {self.split.split}: training needs at least "
                f"{2 * self.world}"
            )

    @property
    def steps(self) -> int:
        """Batches in an epoch, the same for every process."""
        return sum(1 for _ in self._shares(torch.arange(len(self.split))))

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(images uint8 B×C×H×W, targets int64) of this process."""
        seed = self.seed * 100_003 + epoch  # a different order in each epoch, and for each seed
        order = torch.randperm(len(self.split), generator=torch.Generator().manual_seed(seed))
        draw = torch.Generator().manual_seed((seed * 1_009 + self.rank + 1) % 2**63)
        shares = ((own, torch.rand(len(own), DRAWS[self.augment], generator=draw)) for own in self._shares(order))
        if self.augment in ("imagenet", "voc"):
            yield from self._decoded(shares)
            return
        for own, chance in shares:
            images = self.split.pixels(own)
            if self.augment in PADDING:
                images = shift_flip(images, chance, PADDING[self.augment], self.augment in FLIPPED)
            yield images, self.split.targets(own)

    def _shares(self, order: Tensor) -> Iterator[Tensor]:
        """This process' part of every batch. All take equally many, or their gradients would not be a mean."""
        for batch in torch.split(order, self.batch_size):
            each = len(batch) // self.world
            if each < min(2, self.batch_size // self.world or 1):
                continue  # batch norm cannot take the statistics of a single image
            yield batch[self.rank * each : (self.rank + 1) * each]

    def _decoded(self, shares: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        mode = colour_mode(self.split.rows) if self.split.rows is not None else ""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            waiting: list[tuple[Tensor, list[Future[tuple[Tensor, Tensor]]]]] = []
            for own, chance in shares:
                at = own.tolist()
                waiting.append((own, [pool.submit(self._view, mode, *one) for one in zip(at, chance, strict=True)]))
                if len(waiting) > _AHEAD:
                    yield self._joined(*waiting.pop(0))
            for own, views in waiting:
                yield self._joined(own, views)

    def _view(self, mode: str, at: int, chance: Tensor) -> tuple[Tensor, Tensor]:
        """One augmented image, and its mask (or its label, for classification)."""
        rows, size = self.split.rows, self.size
        assert rows is not None
        assert size is not None
        one = torch.tensor([at])
        _, image = next(opened(rows, one))
        with readable(rows, at):
            image = image.convert(mode)
        if self.augment == "imagenet":
            return resized_crop(image, size, chance), self.split.labels[at]
        _, mask = next(opened(rows.of_masks(), one))
        return scaled_crop(image, mask, size, chance)

    def _joined(self, own: Tensor, views: list[Future[tuple[Tensor, Tensor]]]) -> tuple[Tensor, Tensor]:
        done = [view.result() for view in views]
        return torch.stack([image for image, _ in done]), torch.stack([target for _, target in done]).long()
