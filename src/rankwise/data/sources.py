"""Where labelled images come from: folders and the Hugging Face hub, all read by the `datasets` library.

Its builders are called by their own names, so that nothing in a folder can choose what code runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankwise.data.hub import hub_or_cache
from rankwise.data.images import Rows
from rankwise.errors import RankwiseError, need

_IMAGE_COLUMNS = ("img", "image")
_LABEL_COLUMNS = ("label", "labels", "fine_label")
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


@dataclass(frozen=True)
class Source:
    """A data set that has been found, not yet read; `read` takes the name of one of its splits."""

    splits: tuple[str, ...]
    read: Callable[[str], Rows]


def parquet(place: str) -> Source:
    """Files belong to the split that their name begins with, or that the folder they are in is called."""
    found: dict[str, list[str]] = {}
    for path in sorted(_folder(place).rglob("*.parquet")):
        found.setdefault(split_of(path), []).append(escape(str(path)))
    if not found:
        raise RankwiseError(f"{place} holds no .parquet file: give a folder with train.parquet, test.parquet")
    if not set(found) & set(_SPLIT_NAMES.values()):
        found = {"train": [path for paths in found.values() for path in paths]}
    return Source(tuple(found), lambda split: _read("parquet", place, {split: found[split]}, split))


def holds_text(place: str, columns: tuple[str, ...]) -> bool:
    """Whether the first parquet file of a folder has one of these columns, and none with images."""
    first = next(iter(sorted(Path(place).rglob("*.parquet"))), None) if os.path.isdir(place) else None
    if first is None:
        return False
    with _one_sentence(f"parquet:{place}", "check or replace its files"):
        names = _arrow().ParquetFile(first).schema_arrow.names
    return not set(_IMAGE_COLUMNS) & set(names) and bool(set(columns) & set(names))


def column_of(path: Path, columns: tuple[str, ...]) -> Iterator[str]:
    """The texts in the first of these columns that a parquet file has."""
    with _one_sentence(str(path), "check or replace it"):
        file = _arrow().ParquetFile(path)
        wanted = next((name for name in columns if name in file.schema_arrow.names), None)
    if wanted is None:
        raise RankwiseError(f"{path} has no column of text: call it {' or '.join(columns)}")
    for batch in file.iter_batches(columns=[wanted]):
        yield from (str(text) for text in batch.column(0).to_pylist() if text is not None)


def _arrow() -> Any:
    return need("pyarrow.parquet", extra="train", purpose="reading parquet files")


def imagefolder(place: str) -> Source:
    """FOLDER/SPLIT/CLASS/*.png, or FOLDER/CLASS/*.png, which is all train."""
    root = _folder(place)
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    if not folders:
        raise RankwiseError(f"{place} holds no folders: put the images of each class into a folder of its own")
    splits = {_SPLIT_NAMES[path.name.lower()]: path for path in folders if path.name.lower() in _SPLIT_NAMES}
    found = {split: [f"{escape(str(path))}/**"] for split, path in (splits or {"train": root}).items()}
    # All splits are named to the builder, so that a class has the same number in each of them.
    return Source(tuple(found), lambda split: _read("imagefolder", place, found, split, drop_labels=False))


def hub(place: str) -> Source:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", place):
        raise RankwiseError(f"{place!r} is no name on the Hugging Face hub: give NAME or OWNER/NAME")
    library = _datasets()
    with (
        _one_sentence(f"hub:{place}", "check the name and the network, or give parquet:FOLDER"),
        _quiet(library),
        hub_or_cache(),
    ):
        table = library.load_dataset(place)
    found = {_SPLIT_NAMES.get(split, split): split for split in table}
    return Source(tuple(found), lambda split: _rows(f"hub:{place}", table[found[split]]))


def voc(place: str) -> Source:
    """JPEGImages/NAME.jpg, SegmentationClass/NAME.png, and the names in ImageSets/Segmentation/{train,val}.txt.

    The extra labels of Hariharan et al. (2011) are used where they are found: the names in trainaug.txt, the masks
    in SegmentationClassAug. The classes are those of Pascal VOC, or the lines of classes.txt.
    """
    root = _folder(place)
    lists = root / "ImageSets" / "Segmentation"
    found = {split: lists / f"{name}.txt" for name, split in _SPLIT_NAMES.items() if (lists / f"{name}.txt").is_file()}
    if (lists / "trainaug.txt").is_file():
        found["train"] = lists / "trainaug.txt"
    if not found:
        raise RankwiseError(
            f"{place} has no ImageSets/Segmentation/train.txt: give a folder in the layout of Pascal VOC"
        )
    return Source(tuple(found), lambda split: _voc_rows(place, root, found[split]))


def _voc_rows(place: str, root: Path, names_file: Path) -> Rows:
    name = f"voc:{place}"
    with _one_sentence(name, "check its lists of names"):
        names = names_file.read_text().split()
        own = root / "classes.txt"
        classes = tuple(line for line in own.read_text().splitlines() if line) if own.is_file() else VOC_CLASSES
    extra = root / "SegmentationClassAug"
    masks = extra if extra.is_dir() else root / "SegmentationClass"
    images = [root / "JPEGImages" / f"{n}.jpg" for n in names]
    targets = [masks / f"{n}.png" for n in names]
    missing = [path for path in (*images, *targets) if not path.is_file()]
    if missing or not names:
        what = f"names {missing[0]}, which is not there" if missing else "names no images"
        raise RankwiseError(f"{names_file} {what}: check the lists of {name}")
    labels = torch.zeros(len(names), dtype=torch.int64)
    return Rows(name, classes, labels, partial(_paths, images), partial(_paths, targets))


def _paths(paths: list[Path], positions: list[int]) -> list[bytes | str]:
    return [str(paths[at]) for at in positions]


VOC_CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)

SOURCES: dict[str, tuple[Callable[[str], Source], str]] = {
    "parquet": (parquet, "FOLDER"),
    "imagefolder": (imagefolder, "FOLDER"),
    "hub": (hub, "NAME"),
    "voc": (voc, "FOLDER"),
}


def _datasets() -> Any:
    return need("datasets", extra="train", purpose="reading image data")


def _folder(place: str) -> Path:
    path = Path(place)
    if not os.path.isdir(path):
        raise RankwiseError(f"there is no folder {place}: give the folder that holds the data")
    return path.resolve()


def split_of(path: Path) -> str:
    """
    >>> split_of(Path("data/validation-00000-of-00002.parquet")), split_of(Path("test/0000.parquet"))
    ('val', 'test')
    """
    start = path.stem.lower().split("-")[0]
    return _SPLIT_NAMES.get(start) or _SPLIT_NAMES.get(path.parent.name.lower()) or start


def _read(builder: str, place: str, files: dict[str, list[str]], split: str, **options: Any) -> Rows:
    library, name = _datasets(), f"{builder}:{place}"
    with _one_sentence(name, "check or replace its files"), _quiet(library):
        table = library.load_dataset(builder, data_files=files, split=split, **options)
    return _rows(name, table)


def _rows(name: str, table: Any) -> Rows:
    image = _column(name, table, _IMAGE_COLUMNS, "images")
    label = _column(name, table, _LABEL_COLUMNS, "labels")
    if not len(table):
        raise RankwiseError(f"{name} is empty: give data with at least one image")
    labels = _labels(name, table, label)
    feature = table.features[label]
    names = getattr(feature, "names", None) or [str(i) for i in range(int(labels.max()) + 1)]
    library = _datasets()
    if isinstance(table.features[image], library.Image):
        table = table.cast_column(image, library.Image(decode=False))  # PIL is called by us, batch by batch
    # Only the builder of image folders may hand out paths: in a table they could name any file at all.
    paths = name.startswith("imagefolder:")
    return Rows(name, tuple(names), labels, partial(_encoded, name, table, image, paths))


def _column(name: str, table: Any, wanted: tuple[str, ...], purpose: str) -> str:
    for column in wanted:
        if column in table.column_names:
            return column
    raise RankwiseError(
        f"{name} has the columns {', '.join(table.column_names)}: call the one with the {purpose} {' or '.join(wanted)}"
    )


def _labels(name: str, table: Any, column: str) -> Tensor:
    values = table.with_format("numpy")[column][:]
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise RankwiseError(f"the column {column} of {name} holds no whole numbers: number the classes from 0")
    labels = torch.as_tensor(values.astype("int64"))
    if int(labels.min()) < 0:
        raise RankwiseError(f"{name} has images without a label (label {int(labels.min())}): use another split")
    return labels


def _encoded(name: str, table: Any, column: str, paths: bool, positions: list[int]) -> list[bytes | str]:
    found = []
    for at, value in zip(positions, table[positions][column], strict=True):
        content = value.get("bytes") if isinstance(value, dict) else value
        if not content and paths and isinstance(value, dict):
            content = value.get("path")
        if not isinstance(content, bytes | (str if paths else bytes)):
            raise RankwiseError(
                f"row {at} of {name} holds no encoded image in the column {column}: "
                "store the content of each image file, as the `datasets` library does"
            )
        found.append(content)
    return found


@contextmanager
def _one_sentence(name: str, remedy: str) -> Iterator[None]:
    """The library's own errors, of many types and sometimes many lines, in one sentence."""
    try:
        yield
    except Exception as err:
        cause = err.__cause__ or err
        why = (str(cause).strip() or str(err).strip()).split("\n")[0]
        raise RankwiseError(f"{name} cannot be read ({type(cause).__name__}: {why}): {remedy}") from err


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """No progress bars and log lines of the library: ours is the one that speaks to the user."""
    logging = library.utils.logging
    level, bars = logging.get_verbosity(), not library.are_progress_bars_disabled()
    logging.set_verbosity(logging.CRITICAL)
    library.disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            library.enable_progress_bars()
