"""The cells of a study as `run` sees them: where they run, what is said meanwhile, and what they may take."""

from __future__ import annotations

import os
import sys
from fnmatch import fnmatch
from typing import Any

import torch
from rich.table import Table as Grid

from rankwise.cli import output
from rankwise.core import workers as places
from rankwise.studies import runner
from rankwise.studies.estimate import Estimate, estimate
from rankwise.studies.study import Cell, Study


def watched_run(
    study: Study,
    out: str,
    workers: runner.MakeWorkers,
    only: list[str],
    again: bool,
    as_json: bool,
) -> runner.Outcome:
    lines = sys.stderr if as_json else sys.stdout
    cells = [cell for cell in study.cells() if matches(cell, only)]
    missing = sum(runner.status_of(cell, out) != "done" for cell in cells)
    if not sys.stderr.isatty():
        said = f"{study.name}: {len(cells)} cells, {missing} to run, results in {out}"
        print(output.printable(said), file=lines, flush=True)
    with output.progress("cells") as report:
        report("", len(cells) - missing, len(cells))

        def say(row: dict[str, Any], done: int, total: int) -> None:
            report(row["cell"], done, total)
            if not sys.stderr.isatty():
                print(output.printable(f"{done}/{total} {row['cell']}: {_told(row)}"), file=lines, flush=True)

        try:
            return runner.run_study(study, out, workers, say, again, lambda cell: matches(cell, only))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; the same command goes on with {out} where it stands") from None


def matches(cell: Cell, only: list[str]) -> bool:
    return not only or any(fnmatch(cell.entry.label, p) or fnmatch(cell.name, p) for p in only)


def _told(row: dict[str, Any]) -> str:
    if row["status"] == "failed":
        return f"failed: {row['error']}"
    score = row.get("retrained") or row["compressed"]
    metric, name = ("miou", "mean IoU") if "miou" in score else ("top1", "top-1")
    change = score[metric] - row["reference"][metric]
    return f"CR-P {row['CR-P']:.1f} %, {name} {score[metric]:.2f} % ({change:+.2f}), {row['seconds']['all']:.1f} s"


def engine(ray: str | None, workers: int | None, study: Study) -> runner.MakeWorkers:
    """From the number of cells that are missing to where they run."""
    if ray is not None:
        return lambda count: places.Ray(ray, workers)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # A GPU runs one cell at a time; without one, every process has the cores that its network asks for.
    default = torch.cuda.device_count() or max(1, cores // max(1, *(int(n.cpus) for n in study.networks)))

    def make(count: int) -> places.Here | places.Pool:
        wanted = min(workers or default, count)
        return places.Here() if wanted == 1 else places.Pool(wanted, max(1, cores // wanted))

    return make


def print_estimate(study: Study, out: str, only: list[str], as_json: bool) -> None:
    cells = [cell for cell in study.cells() if matches(cell, only)]
    found = estimate(cells, out)
    if as_json:
        listed = [{"cell": cell.name, "status": runner.status_of(cell, out)} for cell in cells]
        output.print_json({"study": study.name, "out": out, **found.to_json(), "list": listed})
        return
    terminal = output.console()
    terminal.print(f"{study.title} ({study.mode})")
    terminal.print(cells_grid(cells, out))
    terminal.print(_estimate(found))


def cells_grid(cells: list[Cell], out: str) -> Grid:
    """One line for each cell. Their names, which are long, are in --json."""
    grid = output.new_grid()
    for name in ("network", "data", "method"):
        grid.add_column(name, overflow="fold")
    for name in ("keep", "epochs", "seed", "status"):
        grid.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        epochs = str(cell.epochs if cell.share else 0)
        what = (cell.network.model, cell.network.data, cell.entry.label)
        grid.add_row(*what, f"{cell.asked:.4g}", epochs, str(cell.seed), runner.status_of(cell, out))
    return grid


def _estimate(found: Estimate) -> str:
    size = f"{found.cells} cells, {found.missing} missing"
    if not found.missing:
        return size
    size += f": {found.references} networks to start from, {found.epochs:,} epochs"
    if found.seconds is None:
        return f"{size}; how long that takes depends on data that the study does not know"
    return f"{size}; very roughly {duration(found.seconds)} on one core of this machine, planning not counted"


def duration(seconds: float) -> str:
    """
    >>> duration(90), duration(7200), duration(1e6)
    ('2 minutes', '2.0 hours', '11.6 days')
    """
    if seconds < 60:
        return "a minute"
    if seconds < 3600:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
