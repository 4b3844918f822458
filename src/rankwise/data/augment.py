"""Random views of training images, exactly as the supplement of the paper lists them.

    shift      zero padding by 1 pixel on each side, random crop to the old size (ours, for digits)
    cifar      zero padding by 2 (32×32 → 36×36), random crop to the old size, horizontal flip
    imagenet   random area and shape scaled to size×size, horizontal flip
    voc        shorter side scaled to 256 … 1024, random crop to size×size, horizontal flip, masks alike

Every function is pure: `chance`, numbers in [0, 1) drawn beforehand, decides everything, so that the same seed
gives the same views in any number of threads. Padding comes before normalisation, so it is black.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rankwise.errors import RankwiseError, need

if TYPE_CHECKING:
    from PIL.Image import Image

PADDING = {"shift": 1, "cifar": 2}
FLIPPED = ("cifar", "imagenet", "voc")
IGNORED = 255  # the class of pixels that count for nothing
_AREA, _SHAPE, _TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10  # as torchvision's RandomResizedCrop
_VOC_SIDES = (256, 1024)
DRAWS = {"none": 0, "shift": 2, "cifar": 3, "imagenet": 2 * _TRIES + 3, "voc": 4}  # numbers for one image


def choose(augment: str, classes_are_pixels: bool, channels: int, side: int | None) -> str:
    """What `auto` stands for: grey images shift, small ones as CIFAR, large ones as ImageNet.

    >>> choose("auto", False, 1, 8), choose("auto", False, 3, 32), choose("auto", False, 3, 224)
    ('shift', 'cifar', 'imagenet')
    """
    if augment == "auto":
        if classes_are_pixels:
            return "voc"
        return "imagenet" if (side or 224) > 96 else "shift" if channels == 1 else "cifar"
    if (augment == "voc") != classes_are_pixels and augment != "none":
        kind = "segmentation" if classes_are_pixels else "classification"
        raise RankwiseError(f"augment={augment} was given for {kind} data: give auto or none")
    return augment


def shift_flip(images: Tensor, chance: Tensor, padding: int, flip: bool) -> Tensor:
    """uint8, B×C×H×W → the same shape: each image moved by up to `padding` pixels, and half of them mirrored.

    `chance`, B×2 or B×3: row, column, mirror.
    """
    height, width = images.shape[-2:]
    windows = F.pad(images, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)  # B×C×rows×columns×H×W
    rows, columns = ((chance[:, i] * (2 * padding + 1)).long().to(images.device) for i in (0, 1))
    moved = windows[torch.arange(len(images), device=images.device), :, rows, columns]
    if not flip:
        return moved
    mirrored = (chance[:, 2] < 0.5).to(images.device)
    return torch.where(mirrored[:, None, None, None], moved.flip(-1), moved)


def crop_box(width: int, height: int, chance: Tensor) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of 8 to 100 % of the area and 3:4 to 4:3 in shape; `chance` is 2·tries + 2 numbers."""
    numbers = chance.tolist()
    for area, shape in zip(numbers[:_TRIES], numbers[_TRIES : 2 * _TRIES], strict=True):
        target = width * height * (_AREA[0] + area * (_AREA[1] - _AREA[0]))
        aspect = math.exp(math.log(_SHAPE[0]) + shape * math.log(_SHAPE[1] / _SHAPE[0]))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = (int(numbers[2 * _TRIES + i] * (room + 1)) for i, room in enumerate((width - w, height - h)))
            return left, top, left + w, top + h
    w = min(width, round(height * _SHAPE[1]))  # a very long image: its middle, as long as the shapes allow
    h = min(height, round(width / _SHAPE[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def resized_crop(image: Image, size: int, chance: Tensor) -> Tensor:
    """A PIL image → uint8, C×size×size."""
    bilinear = need("PIL.Image", extra="train", purpose="scaling images").Resampling.BILINEAR
    box = crop_box(image.width, image.height, chance[:-1])
    view = to_tensor(image.resize((size, size), bilinear, box=box))
    return view.flip(-1) if chance[-1] < 0.5 else view


def scaled_crop(image: Image, mask: Image, size: int, chance: Tensor) -> tuple[Tensor, Tensor]:
    """A PIL image and its mask → uint8, C×size×size and size×size; what the image does not cover is black and ignored.

    `chance`, 4 numbers: scale, row, column, mirror.
    """
    resampling = need("PIL.Image", extra="train", purpose="scaling images").Resampling
    scale, row, column, mirror = chance.tolist()
    shorter = round(_VOC_SIDES[0] + scale * (_VOC_SIDES[1] - _VOC_SIDES[0]))
    sides = tuple(max(shorter, round(side * shorter / min(image.size))) for side in image.size)
    pixels = to_tensor(image.resize(sides, resampling.BILINEAR))
    classes = to_tensor(mask.resize(sides, resampling.NEAREST))
    right, below = (max(0, size - side) for side in sides)
    pixels, classes = F.pad(pixels, (0, right, 0, below)), F.pad(classes, (0, right, 0, below), value=IGNORED)
    top, left = (int(c * (n - size + 1)) for c, n in zip((row, column), pixels.shape[1:], strict=True))
    views = [t[:, top : top + size, left : left + size] for t in (pixels, classes)]
    pixels, classes = (t.flip(-1) if mirror < 0.5 else t for t in views)
    return pixels, classes[0]


def to_tensor(image: Image) -> Tensor:
    """A PIL image → uint8, C×H×W."""
    pixels = torch.from_numpy(np.array(image))
    return pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1)
