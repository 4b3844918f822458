"""Result folders made up for tests of curves and reports: the numbers are invented, the plans are real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import rankwise as rw
from rankwise.models import networks


def row(label: str = "auto", asked: float = 0.5, top1: float = 90.0, repeat: int = 0, **more: Any) -> dict[str, Any]:
    """A row that is done, as `rankwise run` writes it, with what is given in `more` instead."""
    return {
        "format": 1,
        "status": "done",
        "kind": "cell",
        "study": "made up",
        "cell": f"{label}-{asked:g}-{repeat}",
        "mode": "oneshot",
        "model": "digits-cnn",
        "data": "digits",
        "split": "test",
        "method": label,
        "label": label,
        "settings": {"seed": repeat},
        "unit": "params",
        "asked": asked,
        "keep": {"params": asked, "macs": asked},
        "CR-P": 100 * (1 - asked),
        "CR-F": 90 * (1 - asked),
        "params": 1000,
        "macs": 1000,
        "reference": {"n": 355, "top1": 91.0, "top5": None, "loss": 0.1},
        "compressed": {"n": 355, "top1": top1, "top5": None, "loss": 0.2},
        "retrain": {"share": 0, "epochs": 0},
        "repeat": repeat,
        "seed": repeat,
        "seconds": {"compress": 0.5},
        "plan": None,
        "spectra": None,
        "provenance": {"torch": "2.13.0", "machine": "a made-up machine", "commit": "0123abc"},
        **more,
    }


def failed(cell: str, error: str) -> dict[str, Any]:
    whole = row(cell=cell)
    kept = ("format", "kind", "study", "cell", "mode", "model", "data", "split", "method", "label", "settings")
    return {**{k: whole[k] for k in kept}, "status": "failed", "error": error, "provenance": whole["provenance"]}


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    for i, one in enumerate(rows):
        (folder / "rows" / f"{i:05d}.json").write_text(json.dumps(one))
    return folder


def as_format_1(path: Path) -> None:
    """A plan as it was written before slices had their name."""
    body = json.loads(path.read_text())
    body["format"] = 1
    body["layers"] = [{"groups" if k == "slices" else k: v for k, v in e.items()} for e in body["layers"]]
    path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n")


def with_plans(folder: Path, keeps: tuple[float, ...] = (0.2, 0.4, 0.6)) -> Path:
    """Rows of a digits-cnn with real plans by two methods, some of format 1; scores and spectra are invented."""
    torch.manual_seed(0)
    model = networks.build("digits-cnn").eval()
    table = rw.build_table(model, torch.zeros(1, 1, 8, 8), groups="all")
    for name in ("plans", "spectra"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    layers = {la.name: {"f│chw": [1.0, 0.5, 0.25], "fhw│c": [1.0, 0.1]} for la in table.coverage.layers}
    (folder / "spectra" / "s.json").write_text(json.dumps({"model": "digits-cnn", "layers": layers}))
    rows = []
    for method in ("auto", "svd"):
        for keep in keeps:
            plan = rw.allocate(table, rw.Budget(params=keep), method=method, model="digits-cnn")
            name = f"plans/{method}-{keep:g}.json"
            plan.save(folder / name)
            if keep == keeps[0]:
                as_format_1(folder / name)
            for repeat in (0, 1):
                top1 = 91 - 3 * (1 - keep) * (1 + (method == "svd")) - repeat / 4
                body = {"n": 355, "top1": top1 + 0.7, "top5": None, "loss": 0.1}
                cut = {"CR-P": 100 * (1 - plan.keep()), "CR-F": 100 * (1 - plan.keep("macs"))}
                more = {"plan": name, "spectra": "spectra/s.json", "retrained": body, **cut}
                rows.append(row(method, keep, top1, repeat, **more, retrain={"share": 1.0, "epochs": 3}))
    rows.append(failed("svd-0.6-2", "the loss became nan in epoch 1: train with a learning rate below 0.1"))
    return write(folder, rows)
