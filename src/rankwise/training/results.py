"""Result rows: one JSON file for each run, written whole or not at all, with where it came from."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rankwise.core import files
from rankwise.errors import RankwiseError
from rankwise.planning.table import Progress
from rankwise.version import __version__

FORMAT = 1
ROWS = "rows"
_NEEDED: dict[str, type] = dict.fromkeys(("study", "cell", "mode", "model", "data", "method", "label"), str)
_MEASURED: dict[str, type] = {
    **dict.fromkeys(("asked", "CR-P"), float),
    **dict.fromkeys(("keep", "reference", "compressed", "retrain"), dict),
}
_PERHAPS: dict[str, type] = {
    **dict.fromkeys(("dataset", "split", "unit", "plan", "spectra"), str),
    "CR-F": float,
    **dict.fromkeys(("repeat", "seed", "round"), int),
    **dict.fromkeys(("retrained", "settings", "seconds", "provenance"), dict),
}
_NUMBERS = {
    "keep": ("params", "macs"),
    "reference": ("top1", "top5", "miou", "n"),
    "compressed": ("top1", "top5", "miou"),
    "retrained": ("top1", "top5", "miou"),
    "retrain": ("share", "epochs"),
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
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None  # inside somebody else's repository, perhaps: that commit would say nothing about us
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def write_row(path: Path, row: dict[str, Any]) -> None:
    """Numbers that are none (a loss that diverged) become null: JSON has no other word for them."""
    files.make_folder(path.parent)
    text = json.dumps(finite(row), indent=1, ensure_ascii=False, allow_nan=False)
    files.write_whole(path, (text + "\n").encode())


def finite(value: Any) -> Any:
    """Plain values with None for numbers that are none."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(folder: str | Path, progress: Progress | None = None) -> list[dict[str, Any]]:
    """The rows of a study, from FOLDER/rows or FOLDER itself; what is no row of a study is passed over.

    Networks and methods come in the order of FOLDER/study.json, if there is one, and otherwise by name.

    A row has status "done" or "failed"; failed ones have an "error" and no scores. Keys: docs/studies.md.
    """
    root = Path(folder)
    if not os.path.isdir(root):
        raise RankwiseError(f"{folder} is not a folder: give one that `rankwise run` or `rankwise demo` wrote")
    place = root / ROWS if (root / ROWS).is_dir() else root
    paths, found = sorted(place.glob("*.json")), []
    for at, path in enumerate(paths):
        if progress is not None:
            progress(ROWS, at, len(paths))
        found.append(_read_row(path))
    order = _order(root / "study.json")
    return sorted((row for row in found if row is not None), key=lambda row: [order(row["model"]), order(row["label"])])


def _order(path: Path) -> Callable[[str], int]:
    """From the name of a network or a method to its place in the study; all are alike where it is not known."""
    try:
        study = files.parse(files.read(path), str(path))
        names = [n["model"] for n in study["networks"]] + [e["label"] for e in study["entries"]]
        place = {str(name): i for i, name in enumerate(names)}
    except (RankwiseError, LookupError, TypeError):
        return lambda name: 0
    return lambda name: place.get(name, len(place))


def _read_row(path: Path) -> dict[str, Any] | None:
    return parse_row(files.read(path), str(path))


def parse_row(text: bytes, where: str) -> dict[str, Any] | None:
    """Refuse what could not be compared or drawn: a score that is a text, say. Unknown keys stay."""
    row = files.parse(text, where)
    if row.get("kind") != "cell":
        return None
    files.check_format(row, FORMAT, where)
    status = files.field(row, "status", str, where)
    if status not in ("done", "failed"):
        raise RankwiseError(
            f"'status' of {where} must be done or failed, and it is {status!r}: restore it or remove it"
        )
    for key, kind in {**_NEEDED, **(_MEASURED if status == "done" else {"error": str})}.items():
        files.field(row, key, kind, where)
    for key, kind in _PERHAPS.items():
        if row.get(key) is not None:
            files.typed(row[key], kind, f"{key!r} of {where}")
    for key, names in _NUMBERS.items():
        body = files.typed(row.get(key) or {}, dict, f"{key!r} of {where}")
        for name in names:
            if body.get(name) is not None:
                files.typed(body[name], float, f"{name!r} in {key!r} of {where}")
    if status == "done":
        files.field(row["retrain"], "share", float, f"'retrain' of {where}")
    return {"unit": "params", **row}
