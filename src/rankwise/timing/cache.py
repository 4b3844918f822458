"""Measured times on disk, by machine, torch and number of threads: what was timed once need not be timed again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from rankwise.core import files
from rankwise.core.disk import alone
from rankwise.errors import RankwiseError
from rankwise.planning.times import LAYOUTS

FORMAT = 3  # 2 knew pairs of 1, 2 and 4 slices only, and not whether the machine was busy


class Store:
    """Measurements by key, in one JSON file; what cannot be read there is measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            data = files.parse(files.read(self.path), str(self.path))
        except RankwiseError:
            return {}
        if data.get("format") != FORMAT or not isinstance(data.get("cells"), dict):
            return {}
        return {k: v for k, v in data["cells"].items() if _sound(v)}

    def save(self) -> None:
        """What is known here, and what other processes have measured since."""
        try:
            files.make_folder(self.path.parent)
            with alone(self.path.with_suffix(".lock")):
                self._write()
        except RankwiseError:
            pass  # a cache that cannot be written costs time, nothing else

    def _write(self) -> None:
        self.known = {**self._read(), **self.known}
        text = json.dumps({"format": FORMAT, "machine": machine(), "cells": self.known}, indent=1)
        files.write_whole(self.path, text.encode())


def _sound(value: Any) -> bool:
    """What `cost_model._measure` gives."""
    if not isinstance(value, dict) or set(value) != {"whole", "layout", "beside", "layers", "forms", "conditions"}:
        return False
    layers, forms = value["layers"], value["forms"]
    if not isinstance(layers, dict) or not isinstance(forms, dict) or not set(forms) <= set(layers):
        return False
    if value["layout"] not in (None, *LAYOUTS) or not all(isinstance(options, dict) for options in forms.values()):
        return False
    samples = [(option, rows) for options in forms.values() for option, rows in options.items()]
    return (
        all(map(_positive, (value["whole"], value["beside"], *layers.values())))
        and _conditions(value["conditions"])
        and all(
            _form(option) and isinstance(rows, list) and rows and all(map(_sample, rows)) for option, rows in samples
        )
    )


def _form(text: str) -> bool:
    """`cost_model._form`: what it is timed as, fold, slices, outer rank."""
    parts = text.split("/")
    return len(parts) == 4 and parts[2].isdigit() and parts[3].isdigit()


def _conditions(value: Any) -> bool:
    """`Conditions.to_json`."""
    if not isinstance(value, dict) or set(value) - {"load"} != {"cores", "spread", "busy"}:
        return False
    numbers = [value["cores"], value["spread"], value.get("load", 0.0)]
    return isinstance(value["busy"], bool) and all(type(n) in (int, float) and n >= 0 for n in numbers)


def _sample(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 2 and type(row[0]) is int and row[0] > 0 and _positive(row[1])


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def place(cache: str | Path | None, threads: int) -> Path:
    default = os.environ.get("RANKWISE_CACHE") or Path.home() / ".cache" / "rankwise"
    # Versions of rankwise that measure in another way have files of their own.
    name = hashlib.sha256(f"{machine()}|{threads}|{FORMAT}".encode()).hexdigest()[:16]
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
