"""The commands `run` and `summary`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rankwise.cli import output
from rankwise.cli.options import JsonOpt, RayOpt, WorkersOpt
from rankwise.errors import RankwiseError
from rankwise.reports.curves import DELTAS
from rankwise.reports.tables import tables
from rankwise.reports.text import RENDER


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
    ray: RayOpt = None,
    workers: WorkersOpt = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Another seed for the first repeat.")] = None,
    timing: Annotated[
        str | None,
        typer.Option("--timing", metavar="T", help="Time every network beside the original, such as batch=32."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="What happens anyway: what is done stays done.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed cells again, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells and an estimate; run nothing.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Run the missing cells of a study; kill it at any moment and run it again."""
    from rankwise.cli.cells import engine, print_estimate, watched_run
    from rankwise.cli.flags import check_workers
    from rankwise.studies.study import asks, fill_in
    from rankwise.studies.study_file import read_study
    from rankwise.timing.clock import read_timing

    check_workers(workers)
    chosen = read_study(study)
    chosen = chosen if seed is None else replace(chosen, seed=seed)
    if timing is not None:
        read_timing(timing)
        chosen = replace(chosen, timing=timing)
    folder = str(out or Path("results") / chosen.name)
    if dry_run:
        known = data or weights or not asks(chosen)
        print_estimate(fill_in(chosen, data or [], weights or []) if known else chosen, folder, only or [], as_json)
        return
    chosen = fill_in(chosen, data or [], weights or [])
    outcome = watched_run(chosen, folder, engine(ray, workers, chosen), only or [], retry_failed, as_json)
    if as_json:
        output.print_json({"study": chosen.name, "out": folder, **vars(outcome)})
    else:
        failed = f", {len(outcome.failed)} failed (their rows say why)" if outcome.failed else ""
        before = f", {len(outcome.before)} from before" if outcome.before else ""
        output.console().print(f"{len(outcome.done)} cells done{before}{failed}: {folder}")
    if outcome.failed:
        raise typer.Exit(1)


def summary(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A folder that `rankwise run` wrote.")],
    to: Annotated[
        str | None, typer.Option("--to", help=f"One of {', '.join(RENDER)}; on a terminal text unless given, else md.")
    ] = None,
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
    from rankwise.training.results import read_rows

    to = to or ("text" if sys.stdout.isatty() else "md")
    if to not in RENDER:
        raise RankwiseError(f"--to {to} was given: possible are {', '.join(RENDER)}")
    rows = read_rows(results)
    if not rows:
        raise RankwiseError(f"{results} holds no row of a study: give a folder that `rankwise run` wrote")
    found = tables(rows, tuple(delta or DELTAS), published)
    if as_json:
        output.print_json([table.to_json() for table in found])
        return
    lines = "\n".join(RENDER[to](table) for table in found).split("\n")
    sys.stdout.write("\n".join(map(output.printable, lines)))
