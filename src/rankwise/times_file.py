"""Measured times on disk, by machine, torch and number of threads: what was timed once need not be timed again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from rankwise import jsonio
from rankwise.errors import RankwiseError

FORMAT = 1


class Store:
    """Measurements by key, in one JSON file; what cannot be read there is measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, dict[str, Any]] = {}
        try:
            data = jsonio.parse(jsonio.read(path), str(path))
            if data.get("format") == FORMAT and isinstance(data.get("cells"), dict):
                self.known = {k: v for k, v in data["cells"].items() if _sound(v)}
        except RankwiseError:
            pass

    def save(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"format": FORMAT, "machine": machine(), "cells": self.known}, indent=1)
            jsonio.write_whole(self.path, text.encode())
        except (OSError, RankwiseError):
            pass  # a cache that cannot be written costs time, nothing else


def _sound(value: Any) -> bool:
    """What `stopwatch.layer_times` and `stopwatch.network_times` give."""
    if not isinstance(value, dict):
        return False
    if set(value) == {"fixed", "layers"}:
        layers = value["layers"]
        return _positive(value["fixed"]) and isinstance(layers, dict) and all(map(_positive, layers.values()))
    if set(value) != {"dense", "pairs"} or not _positive(value["dense"]) or not isinstance(value["pairs"], dict):
        return False
    return all(
        option.rpartition("/")[2].isdigit()
        and isinstance(rows, list)
        and all(
            isinstance(r, list) and len(r) == 2 and type(r[0]) is int and r[0] > 0 and _positive(r[1]) for r in rows
        )
        for option, rows in value["pairs"].items()
    )


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def place(cache: str | Path | None, threads: int) -> Path:
    default = os.environ.get("RANKWISE_CACHE") or Path.home() / ".cache" / "rankwise"
    name = hashlib.sha256(f"{machine()}|{threads}".encode()).hexdigest()[:16]
    return Path(cache or default) / f"times-{name}.json"


def machine() -> str:
    """The processor, how many cores of it, and torch: what measured times depend on."""
    model = ""
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    parts = (
        model or platform.processor(),
        str(os.cpu_count()),
        device,
        isa,
        f"torch {torch.__version__}",
    )
    return ", ".join(part for part in parts if part)
