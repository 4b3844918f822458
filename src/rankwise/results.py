"""Result rows: one JSON file for each run, written whole or not at all, with where it came from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rankwise import jsonio
from rankwise.errors import RankwiseError
from rankwise.version import __version__

FORMAT = 1
ROWS = "rows"
_NEEDED: dict[str, type] = dict.fromkeys(("study", "cell", "mode", "model", "data", "method", "label"), str)
_MEASURED: dict[str, type] = {
    **dict.fromkeys(("asked", "CR-P"), float),
    **dict.fromkeys(("keep", "reference", "compressed", "retrain"), dict),
}


def provenance() -> dict[str, Any]:
    """Versions and machine, so that a number can be traced."""
    return {
        "rankwise": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "commit": commit(),
    }


@cache
def commit() -> str | None:
    """The git commit that this code is from, with -dirty after it where files differ; None for an installed copy."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None  # inside somebody else's repository, perhaps: that commit would say nothing about us
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def write_row(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    jsonio.write_whole(path, (json.dumps(row, indent=1, ensure_ascii=False) + "\n").encode())


def read_rows(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of a study, from FOLDER/rows or FOLDER itself, by name; what is no row of a study is passed over.

    A row has status "done" or "failed"; failed ones have an "error" and no scores. Keys: docs/studies.md.
    """
    root = Path(folder)
    if not root.is_dir():
        raise RankwiseError(f"{folder} is not a folder: give one that `rankwise run` wrote")
    place = root / ROWS if (root / ROWS).is_dir() else root
    found = [_read_row(path) for path in sorted(place.glob("*.json"))]
    return [row for row in found if row is not None]


def _read_row(path: Path) -> dict[str, Any] | None:
    row = jsonio.parse(jsonio.read(path), str(path))
    if row.get("kind") != "cell":
        return None
    jsonio.check_format(row, FORMAT, str(path))
    for key, kind in _NEEDED.items():
        jsonio.field(row, key, kind, str(path))
    status = jsonio.field(row, "status", str, str(path))
    if status == "done":
        for key, kind in _MEASURED.items():
            jsonio.field(row, key, kind, str(path))
    elif status == "failed":
        jsonio.field(row, "error", str, str(path))
    else:
        raise RankwiseError(f"{path} has the status {status!r}: it is done or failed; restore it or remove it")
    return row
