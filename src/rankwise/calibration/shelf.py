"""Tensors put aside in files, each of them there whole or not at all: a job that was killed goes on from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from rankwise.core import files
from rankwise.errors import RankwiseError


class Shelf:
    """A folder of safetensors files. What `get` gives is mapped: pages are read when they are looked at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files.make_folder(folder, "give another folder")

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def __contains__(self, name: str) -> bool:
        return self.path(name).is_file()

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        files.write_whole(self.path(name), to_safetensors({k: t.detach().contiguous() for k, t in tensors.items()}))

    def get(self, name: str) -> dict[str, Tensor]:
        try:
            with safe_open(self.path(name), framework="pt", device="cpu") as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, RuntimeError) as err:
            raise RankwiseError(f"{self.path(name)} is damaged ({err}): remove it, and it is made again") from None

    def put_list(self, name: str, tensors: list[Tensor]) -> None:
        self.put(name, {str(i): t for i, t in enumerate(tensors)})

    def get_list(self, name: str) -> list[Tensor]:
        found = self.get(name)
        return [found[str(i)] for i in range(len(found))]
