"""From a study to its rows: what is missing, in which order, and what became of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankwise.core import files
from rankwise.core.workers import Job, Workers, run
from rankwise.errors import RankwiseError
from rankwise.studies.cell import row_path, run_cell, write_failure
from rankwise.studies.reference import prepare, reference_key
from rankwise.studies.store import digest
from rankwise.studies.study import Cell, Study
from rankwise.training.results import parse_row

Say = Callable[[dict[str, Any], int, int], None]  # a row that was written, cells done, cells in all
MakeWorkers = Callable[[int], AbstractContextManager[Workers]]  # from the number of cells to where they run


@dataclass
class Outcome:
    """Names of cells: with a row from before, done now, failed now or before."""

    before: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def status_of(cell: Cell, out: str | Path) -> str:
    """`done`, `failed`, or `missing` where there is no row. What lies there and is none is refused: it hides a cell."""
    path = row_path(cell, out)
    if not path.exists():
        return "missing"
    row = parse_row(files.read(path), str(path))
    if row is None:
        raise RankwiseError(f"{path} is no row of a study: remove it, and the cell is run again")
    return str(row["status"])


def run_study(
    study: Study,
    out: str | Path,
    make_engine: MakeWorkers,
    say: Say | None = None,
    again: bool = False,
    chosen: Callable[[Cell], bool] = lambda _: True,
) -> Outcome:
    """Write the rows that are missing, of those `chosen`; with `again` also those that failed.

    `make_engine` gets the number of missing cells and gives a context in which they run (cluster.py).
    """
    folder = Path(out)
    cells = [cell for cell in study.cells() if chosen(cell)]
    status = {cell.name: status_of(cell, folder) for cell in cells}
    for cell in cells:
        if again and status[cell.name] == "failed":
            row_path(cell, folder).unlink()
            status[cell.name] = "missing"
    missing = [cell for cell in cells if status[cell.name] == "missing"]
    outcome = Outcome(
        [n for n, s in status.items() if s == "done"], [], [n for n, s in status.items() if s == "failed"]
    )
    files.make_folder(folder)
    text = json.dumps(study.to_json(), indent=1, ensure_ascii=False)
    files.write_whole(folder / "study.json", (text + "\n").encode())
    if not missing:
        return outcome
    by_name = {cell.name: cell for cell in missing}

    def told(job: Job, error: str | None) -> None:
        cell = by_name.get(job.name)
        if cell is not None:
            _record(cell, folder, error, outcome, say, len(cells))

    with make_engine(len(missing)) as engine:
        run(jobs_for(missing, folder), engine, told)
    return outcome


def _record(cell: Cell, out: Path, error: str | None, outcome: Outcome, say: Say | None, total: int) -> None:
    path = row_path(cell, out)
    if not path.exists():  # the process died, or a job before this one failed
        missing = "its row is not here: every machine of a cluster needs the results folder under the same path"
        write_failure(cell, str(out), error or missing)
    row = files.parse(files.read(path), str(path))
    (outcome.done if row["status"] == "done" else outcome.failed).append(cell.name)
    if say is not None:
        say(row, len(outcome.before) + len(outcome.done) + len(outcome.failed), total)


def reference_of(cell: Cell) -> str:
    """What the job is called that makes the cell's reference network."""
    return "reference " + digest(reference_key(cell))


def jobs_for(cells: Iterable[Cell], out: Path) -> list[Job]:
    """References first, then the cells that need them; a round comes after the round before it."""
    jobs: dict[str, Job] = {}
    chains: dict[str, str] = {}
    folder = str(out.resolve())  # workers of a cluster have another working directory
    for cell in cells:
        cpus, gpus = cell.network.cpus, cell.network.gpus
        after = reference_of(cell)
        jobs.setdefault(after, Job(after, prepare, (cell, folder), None, cpus, gpus))
        if cell.round:
            chain = digest([after, cell.entry.label, cell.share])
            after = chains.get(chain, after)
            chains[chain] = cell.name
        jobs[cell.name] = Job(cell.name, run_cell, (cell, folder), after, cpus, gpus)
    return list(jobs.values())
