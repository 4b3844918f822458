"""The commands `run` and `summary`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from rankwise.cli import show
from rankwise.cli.options import JsonOpt
from rankwise.errors import RankwiseError
from rankwise.reports.curves import DELTAS
from rankwise.reports.tables import tables
from rankwise.reports.text import RENDER
from rankwise.studies import runner
from rankwise.studies import workers as places
from rankwise.studies.estimate import Estimate, estimate
from rankwise.studies.study import Cell, Study, asks, fill_in
from rankwise.studies.study_file import read_study
from rankwise.training.results import read_rows


def run(
    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="A study file, such as studies/smoke.toml.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for the results; results/STUDY unless given.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="[NAME=]D", help="What <NAME> in the study is, such as cifar10=parquet:FOLDER."),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option("--weights", metavar="[NETWORK=]FILE", help="Trained weights of a network; repeatable."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Only methods whose label is like this, or cells; repeatable."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option("--ray", metavar="auto|ADDRESS", help="Run on Ray: a running cluster, or one on this machine."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", help="Processes on this machine; its cores unless given.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Another seed for the first repeat.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="What happens anyway: what is done stays done.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed cells again, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells and an estimate; run nothing.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Run the missing cells of a study; kill it at any moment and run it again."""
    if workers is not None and workers < 1:
        raise RankwiseError(f"--workers {workers} was given: give 1 or more")
    chosen = read_study(study)
    chosen = chosen if seed is None else replace(chosen, seed=seed)
    folder = str(out or Path("results") / chosen.name)
    if dry_run:
        known = data or weights or not asks(chosen)
        _print_estimate(fill_in(chosen, data or [], weights or []) if known else chosen, folder, only or [], as_json)
        return
    chosen = fill_in(chosen, data or [], weights or [])
    outcome = _watched_run(chosen, folder, _engine(ray, workers, chosen), only or [], retry_failed, as_json)
    if as_json:
        show.print_json({"study": chosen.name, "out": folder, **vars(outcome)})
    else:
        failed = f", {len(outcome.failed)} failed (their rows say why)" if outcome.failed else ""
        before = f", {len(outcome.before)} from before" if outcome.before else ""
        show.console().print(f"{len(outcome.done)} cells done{before}{failed}: {folder}")
    if outcome.failed:
        raise typer.Exit(1)


def _watched_run(
    study: Study,
    out: str,
    engine: runner.MakeWorkers,
    only: list[str],
    again: bool,
    as_json: bool,
) -> runner.Outcome:
    lines = sys.stderr if as_json else sys.stdout
    cells = [cell for cell in study.cells() if matches(cell, only)]
    missing = sum(runner.status_of(cell, out) != "done" for cell in cells)
    if not sys.stderr.isatty():
        print(f"{study.name}: {len(cells)} cells, {missing} to run, results in {out}", file=lines, flush=True)
    with show.progress("cells") as report:
        report("", len(cells) - missing, len(cells))

        def say(row: dict[str, Any], done: int, total: int) -> None:
            report(row["cell"], done, total)
            if not sys.stderr.isatty():
                print(f"{done}/{total} {row['cell']}: {_told(row)}", file=lines, flush=True)

        try:
            return runner.run_study(study, out, engine, say, again, lambda cell: matches(cell, only))
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


def _engine(ray: str | None, workers: int | None, study: Study) -> runner.MakeWorkers:
    """From the number of cells that are missing to where they run."""
    if ray is not None:
        return lambda count: places.Ray(ray, workers)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # A GPU is shared by nobody; without one, every process has the cores that its network asks for.
    default = torch.cuda.device_count() or max(1, cores // max(1, *(int(n.cpus) for n in study.networks)))

    def make(count: int) -> places.Here | places.Pool:
        wanted = min(workers or default, count)
        return places.Here() if wanted == 1 else places.Pool(wanted, max(1, cores // wanted))

    return make


def _print_estimate(study: Study, out: str, only: list[str], as_json: bool) -> None:
    cells = [cell for cell in study.cells() if matches(cell, only)]
    found = estimate(cells, out)
    if as_json:
        listed = [{"cell": cell.name, "status": runner.status_of(cell, out)} for cell in cells]
        show.print_json({"study": study.name, "out": out, **found.to_json(), "list": listed})
        return
    terminal = show.console()
    grid = show.new_grid(f"{study.title} ({study.mode})")
    for name in ("cell", "network and data", "method"):
        grid.add_column(name, overflow="fold")
    for name in ("keep", "epochs", "seed", "status"):
        grid.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        epochs = str(cell.epochs if cell.share else 0)
        place = (cell.name, f"{cell.network.model}, {cell.network.data}", cell.entry.label)
        grid.add_row(*place, f"{cell.asked:.4g}", epochs, str(cell.seed), runner.status_of(cell, out))
    terminal.print(grid)
    terminal.print(_estimate(found))


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


def summary(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A folder that `rankwise run` wrote.")],
    to: Annotated[str, typer.Option("--to", help=f"One of {', '.join(RENDER)}.")] = "md",
    delta: Annotated[
        list[float] | None,
        typer.Option("--delta", metavar="POINTS", help="Points that may be lost; repeatable; else 0, 0.5, 1, 2, 3."),
    ] = None,
    published: Annotated[bool, typer.Option("--published/--ours", help="Show the paper's numbers beside ours.")] = True,
    as_json: JsonOpt = False,
) -> None:
    """Tables of a study: accuracy by keep, the paper's numbers beside them.

    Also the largest CR-P within a loss of δ.
    """
    if to not in RENDER:
        raise RankwiseError(f"--to {to} was given: possible are {', '.join(RENDER)}")
    rows = read_rows(results)
    if not rows:
        raise RankwiseError(f"{results} holds no row of a study: give a folder that `rankwise run` wrote")
    found = tables(rows, tuple(delta or DELTAS), published)
    if as_json:
        show.print_json([table.to_json() for table in found])
        return
    sys.stdout.write("\n".join(RENDER[to](table) for table in found))
