"""Weights in several safetensors files that an index (`core/shards.py`) lists."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from rankwise.core import files
from rankwise.core.disk import why
from rankwise.core.shards import UNREADABLE, read_index
from rankwise.errors import RankwiseError

INDEX = ".safetensors.index.json"


def read_sharded(path: Path) -> dict[str, Tensor]:
    """Every tensor that the index names, out of the files beside it."""
    found: dict[str, Tensor] = {}
    for name, keys in read_index(files.read(path), str(path)).items():
        shard = path.parent / name
        if not os.path.isfile(shard):
            raise RankwiseError(f"{path} names the file {name}, which is not beside it: get the missing file")
        try:
            with safe_open(shard, framework="pt", device="cpu") as file:
                missing = sorted(set(keys) - set(file.keys()))
                found |= {key: file.get_tensor(key) for key in keys if key not in missing}
        except UNREADABLE as err:
            raise RankwiseError(f"{shard} is damaged or cut short ({why(err)}): get it again") from None
        if missing:
            raise RankwiseError(f"{path} looks for {missing[0]!r} in {name}, which has no such tensor: get both again")
    return found
