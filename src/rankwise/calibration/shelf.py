"""Tensors put aside in files, each of them there whole or not at all: a job that was killed goes on from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from rankwise.core import files
from rankwise.core.disk import why
from rankwise.core.shards import UNREADABLE
from rankwise.errors import RankwiseError

KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of numbers that networks compute with
NOTHING = (0,)  # the shape of a tensor that stands for none


class Shelf:
    """A folder of safetensors files. What is read is mapped: pages are looked up when somebody looks at them.

    Whoever reads says which shapes there must be: a file may be damaged, of another job, or made by a stranger.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files.make_folder(folder, "give another folder")

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def __contains__(self, name: str) -> bool:
        return self.path(name).is_file()

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        files.write_whole(self.path(name), to_safetensors({k: t.detach().contiguous() for k, t in tensors.items()}))

    def get(self, name: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Tensors of these names and shapes, and no others."""
        found = self.read(name)
        if {key: tuple(t.shape) for key, t in found.items()} != {key: tuple(shape) for key, shape in shapes.items()}:
            raise self.damaged(name, "it holds other tensors than this job writes")
        return found

    def read(self, name: str) -> dict[str, Tensor]:
        """Whatever there is; names and shapes are for the caller to check."""
        try:
            with safe_open(self.path(name), framework="pt", device="cpu") as file:
                found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except UNREADABLE as err:
            raise self.damaged(name, why(err)) from None
        if not all(t.dtype in KINDS for t in found.values()):
            raise self.damaged(name, "it holds numbers of another kind than this job writes")
        return found

    def put_list(self, name: str, tensors: list[Tensor]) -> None:
        self.put(name, {str(i): t for i, t in enumerate(tensors)})

    def get_list(self, name: str, shapes: Sequence[Sequence[int]], gaps: bool = False) -> list[Tensor]:
        """Tensors of these shapes, in order; with `gaps` some may be nothing."""
        found = self.read(name)
        names = [str(i) for i in range(len(shapes))]
        if set(names) != set(found) or not all(
            found[key].shape == tuple(shape) or (gaps and found[key].shape == NOTHING)
            for key, shape in zip(names, shapes, strict=True)
        ):
            raise self.damaged(name, "it holds other tensors than this job writes")
        return [found[key] for key in names]

    def damaged(self, name: str, reason: str) -> RankwiseError:
        return RankwiseError(f"{self.path(name)} is damaged ({reason}): remove it, and it is made again")
