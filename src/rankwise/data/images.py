"""Encoded images to uint8 tensors: held in memory when they are small and alike, else decoded as needed."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rankwise.errors import RankwiseError, need

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = Callable[[Tensor], Tensor]  # positions (int64, B) → uint8, B×C×H×W
Encoded = Callable[[list[int]], list[bytes | str]]  # positions → files' contents or paths

_HOLD = 10**9  # bytes of pixels that are kept in memory
_AT_ONCE = 256  # encoded images that are fetched together
_LOOK_AT = 32  # images that are looked at to tell greyscale from colour
_GREY = ("1", "L", "LA")
_COLOUR = ("RGB", "RGBA", "P", "CMYK", "YCbCr")


@dataclass(frozen=True, eq=False)
class Rows:
    """Encoded images and their labels (int64, N); `encoded(positions)` gives files' contents or paths.

    For segmentation `masks(positions)` gives the encoded masks, and the labels are all 0.
    """

    name: str
    classes: tuple[str, ...]
    labels: Tensor
    encoded: Encoded
    masks: Encoded | None = None

    def select(self, positions: Tensor) -> Rows:
        chosen = partial(_encoded_among, self.encoded, positions)
        masks = None if self.masks is None else partial(_encoded_among, self.masks, positions)
        return replace(self, labels=self.labels[positions], encoded=chosen, masks=masks)

    def of_masks(self) -> Rows:
        """The masks as if they were the images."""
        if self.masks is None:
            raise RankwiseError(f"{self.name} has no masks: give segmentation data, such as voc:FOLDER")
        return replace(self, encoded=self.masks, masks=None)


def pixels_of(rows: Rows, size: int | None, hold: bool = True) -> Pixels:
    """The images of `rows`, of `size`×`size` if it is given; without `hold` they are decoded at every use."""
    decoder = Decoder(rows, colour_mode(rows), size, exact=rows.masks is not None)
    images = decoder.all_in_one() if hold and rows.masks is None else None
    return decoder if images is None else held(images)


def masks_of(rows: Rows, size: int) -> Pixels:
    """The masks of `rows`: positions (int64, B) → uint8, B×1×size×size."""
    return Decoder(rows.of_masks(), "", size, exact=True)


def held(images: Tensor) -> Pixels:
    """Images (uint8, N×C×H×W) that are in memory already."""
    return partial(torch.index_select, images, 0)


@dataclass(frozen=True, eq=False)
class Decoder:
    """Positions (int64, B) → uint8, B×C×H×W, decoded anew at each call.

    `mode` is PIL's, "L" or "RGB", or empty for masks, whose numbers are classes. `exact` scales to size×size
    whatever the shape; otherwise the middle is taken.
    """

    rows: Rows
    mode: str
    size: int | None
    exact: bool = False

    def __call__(self, positions: Tensor) -> Tensor:
        images = [self._decode(image, at) for at, image in opened(self.rows, positions)]
        if len({image.shape for image in images}) > 1:
            raise self._differing()
        return torch.stack(images)

    def all_in_one(self) -> Tensor | None:
        """All images, N×C×H×W, or None when they are too large or of different sizes."""
        count = len(self.rows.labels)
        _, first = next(opened(self.rows, torch.arange(1)))
        shape = self._decode(first, 0).shape
        if count * len(self.mode) * first.width * first.height > _HOLD or count * shape.numel() > _HOLD:
            return None
        images = torch.empty(count, *shape, dtype=torch.uint8)
        for at, image in opened(self.rows, torch.arange(count)):
            if image.size != first.size:
                if self.size is None:
                    raise self._differing()
                return None
            images[at] = self._decode(image, at)
        return images

    def _decode(self, image: Image, at: int) -> Tensor:
        """A PIL image → uint8, C×H×W."""
        with readable(self.rows, at):
            image = image.convert(self.mode) if self.mode else image.copy()
        if self.size is not None and image.size != (self.size, self.size):
            image = _exact(image, self.size, self.mode) if self.exact else _centre(image, self.size)
        pixels = torch.from_numpy(np.array(image))
        return pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1)

    def _differing(self) -> RankwiseError:
        return RankwiseError(f"the images of {self.rows.name} are of different sizes: give a size, such as 224")


def _centre(image: Image, size: int) -> Image:
    """What ImageNet networks are tested on: shorter side to size·256/224, then the middle size×size."""
    bilinear = need("PIL.Image", extra="train", purpose="scaling images").Resampling.BILINEAR
    shorter = round(size * 256 / 224)
    scale = shorter / min(image.size)
    image = image.resize([max(shorter, int(side * scale)) for side in image.size], bilinear)
    left, top = (round((side - size) / 2) for side in image.size)
    return image.crop((left, top, left + size, top + size))


def _exact(image: Image, size: int, mode: str) -> Image:
    resampling = need("PIL.Image", extra="train", purpose="scaling images").Resampling
    return image.resize((size, size), resampling.BILINEAR if mode else resampling.NEAREST)


def colour_mode(rows: Rows) -> str:
    """Greyscale only if every image looked at is: ImageNet, for one, has grey images among the others."""
    count = len(rows.labels)
    if not count:
        raise RankwiseError(f"{rows.name} holds no images: give data with at least one")
    look_at = torch.arange(min(count, _LOOK_AT)) * count // min(count, _LOOK_AT)
    return "L" if all(image.mode in _GREY for _, image in opened(rows, look_at)) else "RGB"


def opened(rows: Rows, positions: Tensor) -> Iterator[tuple[int, Image]]:
    """(position, PIL image of which only the header is read)."""
    opener = need("PIL.Image", extra="train", purpose="reading images").open
    for chunk in torch.split(positions, _AT_ONCE):
        wanted = chunk.tolist()
        for at, found in zip(wanted, rows.encoded(wanted), strict=True):
            with readable(rows, at):
                image = opener(io.BytesIO(Path(found).read_bytes() if isinstance(found, str) else found))
            if image.mode not in (*_GREY, *_COLOUR):
                raise RankwiseError(
                    f"image {at} of {rows.name} has pixels of kind {image.mode!r}: give images with 8 bits a channel"
                )
            yield at, image


@contextmanager
def readable(rows: Rows, at: int) -> Iterator[None]:
    try:
        yield
    except Exception as err:  # OSError, SyntaxError, ValueError, struct.error …: each format has its own
        why = str(err).split("\n")[0]
        raise RankwiseError(
            f"image {at} of {rows.name} cannot be decoded ({type(err).__name__}: {why}): replace or remove it"
        ) from err


def _encoded_among(encoded: Encoded, positions: Tensor, wanted: list[int]) -> list[bytes | str]:
    return encoded(positions[wanted].tolist())
