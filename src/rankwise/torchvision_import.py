"""The one place that makes `import torchvision` work beside a torch that its compiled part was not built for.

PyPI's torchvision is built for CUDA: beside a CPU-only torch its compiled part does not load, and the import ends with
"operator torchvision::nms does not exist"; so do timm and the vision networks of transformers, which import it.
Networks and transforms need none of that part. So before torchvision is imported, by any module, the two operators
that it describes to torch are declared, without an implementation, if its compiled part does not load.

`import rankwise` installs this as an import hook. Nothing is imported until somebody asks for torchvision.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

# torchvision describes these two to torch while it is imported; its compiled part declares them first.
SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[Any] = []  # a Library takes its declarations along when it is collected


class Declaring:
    """A finder that finds nothing itself: it gets ready for torchvision, and leaves finding it to the others."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision" and not _declared:
            found = PathFinder.find_spec(name, path)
            if found is not None and found.submodule_search_locations:
                _prepare(Path(next(iter(found.submodule_search_locations))))
        return None


def install() -> None:
    """Put the hook in front of all finders, once."""
    if Declaring not in sys.meta_path:
        sys.meta_path.insert(0, Declaring)


def _prepare(folder: Path) -> None:
    try:
        import torch
    except ImportError:
        return  # torchvision will say so
    compiled = next((p for p in sorted(folder.glob("_C*")) if p.suffix in (".so", ".pyd", ".dylib")), None)
    if compiled is not None:
        try:
            load: Any = torch.ops.load_library
            load(compiled)  # as torchvision does; a second time changes nothing
            return
        except (OSError, RuntimeError):
            pass
    new_library: Any = torch.library.Library  # torch gives it no types
    library = new_library("torchvision", "FRAGMENT")  # FRAGMENT: may exist in part already
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + schema)
    _declared.append(library)
