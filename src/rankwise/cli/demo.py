"""The whole story on data that ships with scikit-learn: train, compress, retrain, report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors

from rankwise.compression import Compression, Request
from rankwise.core import files
from rankwise.core.disk import only_user
from rankwise.core.option import Option
from rankwise.data import splits
from rankwise.methods import build_table
from rankwise.models import networks
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Plan
from rankwise.planning.table import Progress, Table
from rankwise.reports.html import write_report
from rankwise.surgery import checkpoint
from rankwise.training.evaluate import evaluate
from rankwise.training.loop import fit_
from rankwise.training.results import provenance, write_row
from rankwise.training.resume import model_tensors

MODEL, DATA = "digits-cnn", "digits"
METHODS = ("auto", "alds+", "alds", "svd-energy", "svd")
KEEPS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1)
RETRAINED = (0.5, 0.25, 0.15, 0.1)  # the others are compressed only
REPEATS = 3
EPOCHS, RETRAIN = 12, 3
CALIBRATE = 256  # images without labels, for auto
SHOWN = ("auto", 0.25)  # the network that is saved as a folder


@dataclass(frozen=True)
class Trained:
    """One repeat: a network trained from its own seed, and what is measured once for it."""

    repeat: int
    seed: int
    jobs: dict[str, Compression]
    reference: dict[str, Any]
    spectra: str
    weights: str


def run_demo(out: Path, seed: int = 0, progress: Progress | None = None) -> dict[str, Any]:
    """Train REPEATS networks, one row for each of them, method and keep; writes a RESULTS folder and its report."""
    files.make_folder(out)
    with only_user(out):
        return _run_demo(out, seed, progress)


def _run_demo(out: Path, seed: int, progress: Progress | None) -> dict[str, Any]:
    for folder in (out / name for name in ("rows", "plans", "spectra", "weights")):
        files.make_folder(folder)
    say = progress or (lambda name, done, total: None)
    cells = [(method, keep) for keep in KEEPS for method in METHODS]
    total = REPEATS * (len(cells) + 1)
    train, test = splits.load(DATA, "train"), splits.load(DATA, "test")
    rows = []
    with _one_thread():
        for repeat in range(REPEATS):
            done = repeat * (len(cells) + 1)
            say("training", done, total)
            trained = _train(train, test, repeat, seed + repeat, out)
            for at, (method, keep) in enumerate(cells, start=1):
                say(f"{method} at keep {keep:g}", done + at, total)
                rows.append(_cell(trained, train, test, method, keep, out))
    title = f"Handwritten digits: {len(METHODS)} methods, {len(KEEPS)} budgets, 1 network, {REPEATS} seeds"
    written = write_report(out, out / "report.html", title)
    say("", total, total)
    return {**written, "reference": rows[0]["reference"], "rows": rows}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Layers this small take microseconds: threads that wait for each other cost more than they do, far more on a
    machine with other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(train: splits.Split, test: splits.Split, repeat: int, seed: int, out: Path) -> Trained:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = networks.build(MODEL)
    fit_(model, train, epochs=EPOCHS, seed=seed)
    model.eval()
    example = torch.zeros(1, 1, 8, 8)
    table = build_table(model, example, slices="all")
    images = train.thin(CALIBRATE)
    jobs = {}
    for method in METHODS:
        request = Request(method, {} if method == "auto" else {"seed": seed}, name=MODEL)
        one_table = None if method == "auto" else lambda settings, make: table
        jobs[method] = Compression(model, example, request, images, tables=one_table, coverage=table.coverage)
    if "auto" in jobs:
        jobs["auto"].basis(None)  # made here, as the table is: neither belongs to the time of a cell
    spectra = f"spectra/{table.fingerprint[:20]}.json"
    files.write_whole(out / spectra, (json.dumps(_spectra(table)) + "\n").encode())
    weights = f"weights/{MODEL}-{repeat}.safetensors"
    files.write_whole(out / weights, to_safetensors(model_tensors(model)))
    return Trained(repeat, seed, jobs, evaluate(model, test).to_json(), spectra, weights)


def _spectra(table: Table) -> dict[str, Any]:
    """σᵢ/σ₁ of every fold of every layer, without slices."""
    layers: dict[str, dict[str, list[float]]] = {}
    for name, option in table.spectra:
        if option == Option(option.fold, 1):
            values = sorted(table.spectra[name, option][..., :-1].flatten().tolist(), reverse=True)
            layers.setdefault(name, {})[option.fold] = [v / (values[0] or 1.0) for v in values]
    return {"model": MODEL, "layers": layers}


def _cell(
    trained: Trained, train: splits.Split, test: splits.Split, method: str, keep: float, out: Path
) -> dict[str, Any]:
    start = time.perf_counter()
    small, plan = trained.jobs[method].run(Budget(params=keep))
    seconds = {"compress": time.perf_counter() - start}
    scores = {"reference": trained.reference, "compressed": evaluate(small, test).to_json()}
    epochs = RETRAIN if keep in RETRAINED else 0
    if epochs:
        start = time.perf_counter()
        fit_(small, train, epochs=epochs, lr=0.03, seed=trained.seed)
        seconds["retrain"] = time.perf_counter() - start
        scores["retrained"] = evaluate(small, test).to_json()
    if (method, keep, trained.repeat) == (*SHOWN, 0):
        checkpoint.save(small, plan, out / "compressed")
    cell = f"{method}-{keep:g}-{trained.repeat}"
    plan.save(out / "plans" / f"{cell}.json")
    row = {
        **_about(trained, plan, cell, keep),
        **scores,
        "retrain": {"share": epochs / EPOCHS, "epochs": epochs},
        "seconds": seconds,
        "provenance": provenance(),
    }
    write_row(out / "rows" / f"{cell}.json", row)
    return row


def _about(trained: Trained, plan: Plan, cell: str, keep: float) -> dict[str, Any]:
    kept = {unit: plan.keep(unit) for unit in ("params", "macs")}
    return {
        "format": 1,
        "status": "done",
        "kind": "cell",
        "study": "demo",
        "cell": cell,
        "mode": "oneshot",
        "model": MODEL,
        "data": DATA,
        "split": "test",
        "method": plan.method,
        "label": plan.method,
        "settings": plan.settings,
        "unit": "params",
        "asked": keep,
        "keep": kept,
        "CR-P": 100 * (1 - kept["params"]),
        "CR-F": 100 * (1 - kept["macs"]),
        "params": plan.after.params,
        "macs": plan.after.macs,
        "repeat": trained.repeat,
        "seed": trained.seed,
        "plan": f"plans/{cell}.json",
        "spectra": trained.spectra,
        "weights": trained.weights,
        "calibrate": CALIBRATE,
    }
