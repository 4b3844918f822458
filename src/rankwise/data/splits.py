"""Labelled images for evaluation and training.

    digits                 1,797 real 8×8 digits that ship with scikit-learn
    parquet:FOLDER         FOLDER/{train,test}.parquet or FOLDER/data/train-00000-of-00001.parquet …
    imagefolder:FOLDER     FOLDER/train/CLASS/*.png …, or FOLDER/CLASS/*.png, which counts as train
    hub:NAME               a data set of the Hugging Face hub
    voc:FOLDER             segmentation in the layout of Pascal VOC: images and masks (see `sources.voc`)

The splits are train, val and test. `digits` is cut 60/20/20 % within each class. Where a folder or a hub set
has no val of its own, val is a fixed random 5 % of train, and train is then the other 95 %; where it has no test,
test is its val, the development set.

The paper's splits are made from all of the source's train: fit (90 %), calibration (5 %, for compression that
looks at data) and stop (5 %, for early stopping), by a seed. With seed 0, stop is val where val is a part of train.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rankwise.data.images import Pixels, Rows, held, masks_of, pixels_of
from rankwise.data.sources import SOURCES
from rankwise.errors import RankwiseError, need

PARTS = ("fit", "calibration", "stop")  # the paper's 90/5/5 %
VOC_SIDE = 513
TEXT = ("text", "jsonl")  # data of other kinds of networks (text.py)

_SEED = 0
_MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
_STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


@dataclass(frozen=True, eq=False)
class Split:
    """One split of a data set.

    `labels` is int64, N. `pixels` gives the raw images: positions (int64, B) → uint8, B×C×H×W, where
    `white` stands for 1.0. For segmentation `masks` gives a class for each pixel, B×1×H×W, 255 for none, and the
    labels are all 0. `rows` are the encoded images, where there are any.
    """

    name: str
    split: str
    classes: tuple[str, ...]
    labels: Tensor
    pixels: Pixels
    white: int = 255
    masks: Pixels | None = None
    rows: Rows | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8, B×C×H×W → float32: in [0, 1] for greyscale, and by ImageNet's mean and deviation for RGB."""
        x = pixels.float() / self.white
        return (x - _MEAN.to(x.device)) / _STD.to(x.device) if x.shape[1] == 3 else x

    def targets(self, positions: Tensor) -> Tensor:
        """What the network should say: int64, B, or B×H×W for segmentation."""
        return self.labels[positions] if self.masks is None else self.masks(positions)[:, 0].long()

    def batches(self, batch_size: int, shuffle_seed: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """(x float32 B×C×H×W normalised, y int64 B) over every image once; the last batch may be smaller.

        In the order of the data, or in the random order that belongs to `shuffle_seed`.
        """
        if batch_size < 1:
            raise RankwiseError(f"batch size {batch_size} was given: give 1 or more")
        order = torch.arange(len(self)) if shuffle_seed is None else _shuffled(len(self), shuffle_seed)
        for chosen in torch.split(order, batch_size):
            yield self.normalise(self.pixels(chosen)), self.targets(chosen)

    def subset(self, positions: Tensor) -> Split:
        return replace(
            self,
            labels=self.labels[positions],
            pixels=partial(_chosen, self.pixels, positions),
            masks=None if self.masks is None else partial(_chosen, self.masks, positions),
            rows=None if self.rows is None else self.rows.select(positions),
        )

    def thin(self, count: int) -> Split:
        """`count` evenly spaced images: folders are sorted by class, so the first would be of one class."""
        if count < 1:
            raise RankwiseError(f"{count} images were asked for: ask for 1 or more")
        count = min(count, len(self))
        return self.subset(torch.arange(count) * len(self) // count)


def load(spec: str, split: str = "test", *, size: int | None = None, seed: int = _SEED, hold: bool = True) -> Split:
    """The split `split` of the data `spec` names (see the top of this file).

    With `size`, images of another size are scaled to a shorter side of size·256/224 and their centre of
    size×size is taken (for segmentation: scaled to size×size, 513 unless given). Without it all images have to
    be of one size. `seed` cuts the paper's splits. Without `hold`, images are decoded at every use.
    """
    if size is not None and size < 1:
        raise RankwiseError(f"image size {size} was given: give a number of pixels, such as 224")
    if spec == "digits":
        return _digits(split, size, seed)
    kind, _, place = spec.partition(":")
    if kind in TEXT:
        raise RankwiseError(f"{spec} is text, and images with labels are needed here: give imagefolder:FOLDER")
    if kind not in SOURCES or not place:
        known = ", ".join(
            ["digits", *(f"{k}:{what}" for k, (_, what) in SOURCES.items()), *(f"{k}:FILE" for k in TEXT)]
        )
        raise RankwiseError(f"unknown data {spec!r}: give one of {known}")
    rows = _rows(spec, split, seed)
    if rows.masks is None:
        return Split(spec, split, rows.classes, rows.labels, pixels_of(rows, size, hold), rows=rows)
    side = size or VOC_SIDE
    masks = masks_of(rows, side)
    return Split(spec, split, rows.classes, rows.labels, pixels_of(rows, side), masks=masks, rows=rows)


def _rows(spec: str, split: str, seed: int) -> Rows:
    kind, _, place = spec.partition(":")
    source = SOURCES[kind][0](place)
    has = {name: name for name in source.splits}  # what is offered, and the split of the source that it is
    if "train" in has:
        has.update(dict.fromkeys((*PARTS, *(() if "val" in has else ("val",))), "train"))
    if "val" in source.splits:
        has.setdefault("test", "val")
    if split not in has:
        raise RankwiseError(f"{spec} has no split {split!r}: it has {', '.join(sorted(has))}")
    whole = split != "train" or "val" in source.splits
    if has[split] != "train" or (split == "train" and whole):
        return source.read(has[split])
    rows = source.read("train")
    parts = _carve(len(rows.labels), _SEED if split in ("train", "val") else seed)
    kept = {"train": torch.cat((parts["calibration"], parts["fit"])), "val": parts["stop"], **parts}[split]
    if not len(kept):
        raise RankwiseError(f"{spec} has {_images(rows)}, too few to take a {split} split: use train")
    return rows.select(kept.sort().values)


def _images(rows: Rows) -> str:
    return "a single training image" if len(rows.labels) == 1 else f"{len(rows.labels)} training images"


def _carve(count: int, seed: int) -> dict[str, Tensor]:
    """Positions of the paper's splits: 5 % stop and 5 % calibration, at least one as long as fit keeps one."""
    order = _shuffled(count, seed)
    stop = count // 20 or min(1, count - 1)
    calibration = count // 20 or min(1, count - stop - 1)
    return {"stop": order[:stop], "calibration": order[stop : stop + calibration], "fit": order[stop + calibration :]}


def _digits(split: str, size: int | None, seed: int) -> Split:
    if size not in (None, 8):
        raise RankwiseError(f"digits are 8×8 images and size {size} was asked: leave the size out")
    data = need("sklearn.datasets", extra="train", purpose="the digits data").load_digits()
    labels = torch.as_tensor(data.target).long()
    images = torch.as_tensor(data.images).to(torch.uint8).unsqueeze(1)
    parts = _stratified(labels, {"test": 0.2, "val": 0.2}, rest="train")
    train = parts["train"]
    parts.update({name: train[chosen].sort().values for name, chosen in _carve(len(train), seed).items()})
    if split not in parts:
        raise RankwiseError(f"digits has no split {split!r}: it has {', '.join(sorted(parts))}")
    names = tuple(str(name) for name in data.target_names)
    whole = Split("digits", split, names, labels, held(images), white=16)
    return whole.subset(parts[split])


def _stratified(labels: Tensor, shares: dict[str, float], rest: str) -> dict[str, Tensor]:
    """Positions for each part, every class cut in the same shares; `rest` takes what is left."""
    parts: dict[str, list[Tensor]] = {name: [] for name in (*shares, rest)}
    for label in range(int(labels.max()) + 1):
        members = (labels == label).nonzero().flatten()
        members = members[_shuffled(len(members), _SEED)]
        for name, share in shares.items():
            cut = int(share * int((labels == label).sum()))
            parts[name].append(members[:cut])
            members = members[cut:]
        parts[rest].append(members)
    return {name: torch.cat(found).sort().values for name, found in parts.items()}


def _shuffled(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _chosen(pixels: Pixels, positions: Tensor, wanted: Tensor) -> Tensor:
    return pixels(positions[wanted])
