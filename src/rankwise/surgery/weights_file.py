"""Tensors on the disk: model.safetensors, or several files that model.safetensors.index.json names.

The header of every file says under "rankwise" which plan its tensors follow. Of several files each is called by its
content, so that files of two versions never mix: the index alone decides which ones count.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from rankwise.core import files
from rankwise.core.disk import remove, why
from rankwise.core.shards import UNREADABLE, read_index
from rankwise.errors import RankwiseError

PLAN, WEIGHTS, INDEX = "plan.json", "model.safetensors", "model.safetensors.index.json"
LARGEST = 4 * 10**9  # bytes of a file of weights


def weights_in(folder: Path) -> Path:
    """The file of weights in a folder: one with tensors, or else an index."""
    alone = not os.path.isfile(folder / WEIGHTS) and os.path.isfile(folder / INDEX)
    return folder / (INDEX if alone else WEIGHTS)


def tensor_files(folder: Path) -> list[Path]:
    """All files with tensors in a folder."""
    return _files(weights_in(folder))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor, and what `save` wrote about them."""
    tensors: dict[str, Tensor] = {}
    header: dict[str, Any] = {}
    for one in _files(path):
        with _opened(one) as file:
            tensors |= {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
            header = header or _about(file, one)
    return tensors, header


def read_header(path: Path) -> dict[str, Any]:
    """What `save` wrote about the tensors."""
    first = _files(path)[0]
    with _opened(first) as file:
        return _about(file, first)


def _about(file: Any, path: Path) -> dict[str, Any]:
    return files.parse((file.metadata() or {}).get("rankwise", "{}"), f"the header of {path}")


def _files(path: Path) -> list[Path]:
    if path.name != INDEX:
        return [path]
    return [path.parent / name for name in sorted(read_index(files.read(path), str(path)))]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not os.path.isfile(path):
        raise RankwiseError(f"{path} is missing: a compressed folder holds {PLAN} and {WEIGHTS}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except RankwiseError:
        raise
    except UNREADABLE as err:
        raise RankwiseError(
            f"{path} is damaged or cut short ({why(err)}): restore it or save the model again"
        ) from None


def write_parts(
    folder: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str], largest: int = LARGEST
) -> dict[Path, bytes]:
    """What is still to be written: the one file of weights, or the index of files that are on the disk by now.

    Until the index is there, nobody looks at those.
    """
    groups = _groups(tensors, largest)
    if len(groups) == 1:
        return {folder / WEIGHTS: _content(tensors, metadata)}
    places: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        content = _content({name: tensors[name] for name in group}, metadata)
        tag = hashlib.sha256(content).hexdigest()[:12]
        name = f"model-{tag}-{number:05}-of-{len(groups):05}.safetensors"
        files.write_whole(folder / name, content)
        places |= dict.fromkeys(group, name)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    return {folder / INDEX: (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}


def _content(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    """As it is written; only one file of them is copied at a time."""
    return to_safetensors(
        {name: value.cpu().contiguous().clone() for name, value in tensors.items()}, metadata=metadata
    )


def _groups(tensors: Mapping[str, Tensor], largest: int) -> list[list[str]]:
    """Names in order, cut where a file would grow too large; a tensor is never cut."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, value in tensors.items():
        own = value.numel() * value.element_size()
        if groups[-1] and size + own > largest:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += own
    return groups


def remove_stale(folder: Path, kept: Path) -> None:
    """Files of weights that were there before and that nobody names any more."""
    named = {kept, *_files(kept)}
    for path in (folder / WEIGHTS, folder / INDEX, *folder.glob("model-*-of-*.safetensors")):
        if path not in named:
            remove(path)
