"""Result rows: one JSON file for each run, written whole or not at all, with where it came from."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from rankwise import jsonio
from rankwise.version import __version__


def provenance() -> dict[str, Any]:
    """Versions and machine, so that a number can be traced."""
    return {
        "rankwise": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
    }


def write_row(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    jsonio.write_whole(path, (json.dumps(row, indent=1, ensure_ascii=False) + "\n").encode())
