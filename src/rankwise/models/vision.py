"""The one place that imports torchvision."""

from __future__ import annotations

import sys
from typing import Any

import torch

from rankwise.errors import RankwiseError, need

# torchvision describes these two to torch while it is imported; its compiled part declares them first.
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[Any] = []  # a Library takes its declarations along when it is collected


def import_torchvision() -> Any:
    """The package torchvision, also where its compiled part does not fit the installed torch.

    PyPI's torchvision is built for CUDA: beside a CPU-only torch its compiled part does not load, and the
    import ends with "operator torchvision::nms does not exist". Networks and transforms need none of that
    part, so the missing operators are declared, without an implementation, and the import is tried again.
    """
    try:
        return _import()
    except RuntimeError as err:
        if "operator torchvision::" not in str(err) or _declared:
            raise
    _forget_half_import()
    _declare_operators()
    try:
        return _import()
    except (RuntimeError, ImportError) as err:
        raise RankwiseError(
            f"the installed torchvision does not fit torch {torch.__version__} ({err}): "
            "install the torchvision that belongs to this torch"
        ) from err


def _import() -> Any:
    torchvision = need("torchvision", extra="vision", purpose="a torchvision or timm network")
    need("torchvision.models", extra="vision", purpose="a torchvision network")
    return torchvision


def _forget_half_import() -> None:
    """Drop the modules that a failed import leaves behind, or the next import would find them unfinished."""
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]


def _declare_operators() -> None:
    new_library: Any = torch.library.Library  # torch gives it no types
    library = new_library("torchvision", "FRAGMENT")  # FRAGMENT: may exist in part already
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + schema)
    _declared.append(library)
