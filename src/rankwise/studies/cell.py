"""One cell of a study, from its description to its row. Whatever several cells need is made once (store.py).

RESULTS/rows/CELL.json       the row, written last
RESULTS/plans/CELL.json      the plan
RESULTS/spectra/HASH.json    singular values of the reference network
RESULTS/store/HASH/          reference networks, tables of spectra, statistics of calibration data
RESULTS/work/CELL/           a compressed network while it is retrained; a killed run goes on from there
"""

from __future__ import annotations

import json
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from rankwise.compression import Compression, Request
from rankwise.core import files
from rankwise.core.disk import why
from rankwise.errors import RankwiseError, out_of_memory
from rankwise.methods import get_method
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Plan
from rankwise.pruning.filters import Filters
from rankwise.studies.reference import Reference, images, open_reference, score, table_of
from rankwise.studies.store import lock
from rankwise.studies.study import Cell
from rankwise.surgery import checkpoint
from rankwise.timing.clock import read_timing
from rankwise.timing.load import compare
from rankwise.training import steps
from rankwise.training.results import FORMAT, ROWS, provenance, write_row

SECONDS = (0.5, 3.0)  # to time a network for: at least, and when three runs must do


def run_cell(cell: Cell, out: str) -> None:
    """Write the row of a cell, unless it is there. What goes wrong is a row, too: the study goes on."""
    path = row_path(cell, out)
    with lock(Path(out) / "work" / f"{cell.name}.lock"):
        if path.exists():
            return
        start = time.perf_counter()
        try:
            row = _measured(cell, Path(out))
        except Exception as err:
            write_failure(cell, out, _sentence(err))
            return
        row["seconds"]["all"] = time.perf_counter() - start
        write_row(path, row)
        shutil.rmtree(Path(out) / "work" / cell.name, ignore_errors=True)


def write_failure(cell: Cell, out: str, error: str) -> None:
    write_row(row_path(cell, out), {**_head(cell, "failed"), "error": error, "provenance": provenance()})


def row_path(cell: Cell, out: str | Path) -> Path:
    return Path(out) / ROWS / f"{cell.name}.json"


def _sentence(err: Exception) -> str:
    """For what users can get wrong its sentence; for our own mistakes the place, too."""
    if isinstance(err, RankwiseError):
        return str(err)
    if out_of_memory(err):
        return f"there is not enough memory ({why(err)}): use fewer workers or a larger machine"
    last = traceback.extract_tb(err.__traceback__)[-1]
    return f"{type(err).__name__}: {err} ({Path(last.filename).name}, line {last.lineno})"


def _head(cell: Cell, status: str) -> dict[str, Any]:
    """What a row says about the cell, whatever became of it."""
    network = cell.network
    row = {
        "format": FORMAT,
        "status": status,
        "kind": "cell",
        "study": cell.study,
        "cell": cell.name,
        "mode": cell.mode,
        "model": network.model,
        "data": network.source,
        "dataset": network.data.strip("<>"),
        "split": cell.split,
        "method": cell.entry.method,
        "label": cell.entry.label,
        "settings": cell.entry.settings,
        "unit": cell.unit,
        "asked": cell.asked,
        "retrain": {"share": cell.share, "epochs": cell.epochs},
        "repeat": cell.repeat,
        "seed": cell.seed,
    }
    row |= {key: value for key, value in cell.entry.identity.items() if key not in row}
    row |= {"teacher": True} if network.teacher else {}
    return {**row, "round": cell.round} if cell.round else row


def _measured(cell: Cell, out: Path) -> dict[str, Any]:
    reference = open_reference(cell, out)
    found = _round(cell, out, reference) if cell.mode == "iterate" else _one_shot(cell, out, reference)
    plan: Plan = found.pop("plan")
    small: nn.Module | Path = found.pop("network")
    files.make_folder(out / "plans")
    plan.save(out / "plans" / f"{cell.name}.json")
    keep = plan.after.params / reference.params
    macs = plan.after.macs / reference.macs if plan.after.macs is not None and reference.macs else None
    return {
        **_head(cell, "done"),
        "keep": {"params": keep, "macs": macs},
        "CR-P": 100 * (1 - keep),
        "CR-F": None if macs is None else 100 * (1 - macs),
        "params": plan.after.params,
        "macs": plan.after.macs,
        "reference": reference.score,
        **found,
        **({"warnings": list(plan.warnings)} if plan.warnings else {}),
        **({"time": _time(cell, reference, small, out)} if cell.timing else {}),
        "plan": f"plans/{cell.name}.json",
        "spectra": f"spectra/{reference.name}.json",
        "weights": reference.weights.relative_to(out).as_posix(),
        "calibrate": cell.images,
        "provenance": provenance(),
    }


def _one_shot(cell: Cell, out: Path, reference: Reference) -> dict[str, Any]:
    """Compress, and retrain where a share of the epochs is asked for."""
    if not cell.share:
        with _timed() as seconds:
            small, plan = compressed(cell, out, reference)
        with _timed() as scoring:
            after = score(small, cell)
        spent = {"compress": seconds[0], "score": scoring[0]}
        return {"plan": plan, "network": small, "compressed": after, "seconds": spent}
    work = out / "work" / cell.name
    note = work / "compress.json"
    if not note.is_file():
        with _timed() as seconds:
            small, plan = compressed(cell, out, reference)
        checkpoint.save(small, replace(plan, model=reference.spec), work / "small")
        files.write_whole(note, json.dumps({"seconds": seconds[0]}).encode())
    row = steps.retrain(work / "small", _run(cell, work / "retrained", reference), base=reference.spec)
    spent = {"compress": files.parse(files.read(note), str(note))["seconds"], **row["seconds"]}
    return {
        "plan": checkpoint.read_plan(work / "small"),
        "network": work / "small",
        "compressed": row["compressed"],
        "retrained": row["retrained"],
        "seconds": spent,
    }


def _round(cell: Cell, out: Path, reference: Reference) -> dict[str, Any]:
    """Round i of compressing and retraining; the rounds before it are there already, or are made up for."""
    work = out / "work" / _chain(cell)
    entry = cell.entry
    rounds = steps.Rounds(
        cell.round, entry.method, cell.network.exclude, cell.images, changes=entry.settings, recover=entry.recover
    )
    with lock(work.with_suffix(".lock")):
        rows = steps.iterate(reference.spec, _run(cell, work, reference), rounds, reference.weights)
        plan = checkpoint.read_plan(work / f"round-{cell.round}")
    row = rows[-1]
    scores = {when: row[when] for when in ("compressed", "retrained")}
    return {"plan": plan, "network": work / f"round-{cell.round}", **scores, "seconds": row["seconds"]}


def _time(cell: Cell, reference: Reference, small: nn.Module | Path, out: Path) -> dict[str, Any]:
    """What the network, or the one in a folder, takes beside the original one, measured in turns.

    One cell at a time: two clocks at once would measure each other.
    """
    network = checkpoint.load(small, reference.network) if isinstance(small, Path) else small
    how = read_timing(cell.timing)
    with lock(out / "work" / "clock.lock"):
        found = compare(reference.network, network, reference.example, how, *SECONDS)
    batch = how.batch or reference.example.shape[0]
    return {**found, "batch": batch, "threads": how.to_json()["threads"], "layout": how.layout}


def _run(cell: Cell, folder: Path, reference: Reference) -> steps.Run:
    network = cell.network
    teacher = reference.weights if network.teacher else None
    recipe = replace(network.training, retrain=cell.epochs)
    if network.alpha is not None:
        recipe = replace(recipe, alpha=network.alpha)
    return steps.Run(
        network.source, recipe, folder, cell.seed, True, cell.split, network.limit, network.size, teacher=teacher
    )


def _chain(cell: Cell) -> str:
    """The rounds of one iteration share a folder, which stays: more rounds may be asked for later."""
    return replace(cell, asked=1.0, round=0).name


def compressed(cell: Cell, out: Path, reference: Reference) -> tuple[nn.Module, Plan]:
    """The smaller network and its plan."""
    return _job(cell, out, reference).run(Budget(**{cell.unit: cell.asked}))


_last: dict[str, Compression] = {}  # effects of all options are as large as the network: one method's at a time


def _job(cell: Cell, out: Path, reference: Reference) -> Compression:
    """What does not depend on the budget is done once for cells that follow each other in a process.

    Tables of weights and activations are kept in the store, where other processes find them.
    """
    entry = cell.entry
    changes = {**_seeds(cell), **entry.settings}
    request = Request(entry.method, changes, cell.network.exclude, entry.recover, name=reference.spec)
    key = json.dumps((str(out), reference.name, cell.images, repr(request)))
    if key not in _last:
        data = images(cell) if cell.images and request.looks_at_data else None
        tables = partial(table_of, cell, out, reference)
        job = Compression(
            reference.network, reference.example, request, data, tables=tables, coverage=reference.coverage
        )
        _last.clear()
        _last[key] = job
    return _last[key]


def _seeds(cell: Cell) -> dict[str, Any]:
    """The recipe's number of random starts, and the repeat's seed, for methods that search."""
    if isinstance(get_method(cell.entry.method).settings, Filters):
        return {}
    return {"starts": cell.network.training.starts, "seed": cell.seed}


@contextmanager
def _timed() -> Iterator[list[float]]:
    spent: list[float] = []
    start = time.perf_counter()
    yield spent
    spent.append(time.perf_counter() - start)
