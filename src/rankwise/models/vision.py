"""torchvision, imported where it is needed (torchvision_import.py makes it importable)."""

from __future__ import annotations

from typing import Any

import torch

from rankwise.errors import RankwiseError, need
from rankwise.torchvision_import import install


def import_torchvision() -> Any:
    """The package torchvision, with its networks."""
    install()
    try:
        torchvision = need("torchvision", extra="vision", purpose="a torchvision or timm network")
        need("torchvision.models", extra="vision", purpose="a torchvision network")
        return torchvision
    except (RuntimeError, ImportError) as err:
        raise RankwiseError(
            f"the installed torchvision does not fit torch {torch.__version__} ({err}): "
            "install the torchvision that belongs to this torch"
        ) from err
