"""The command `compress`: its flags, and the order of what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankwise.cli import output, words
from rankwise.cli.options import (
    BlocksOpt,
    DataOpt,
    ExcludeOpt,
    FuseOpt,
    InputOpt,
    JsonOpt,
    ModelArg,
    RayOpt,
    SplitOpt,
    TimingOpt,
    WeightsOpt,
    WorkersOpt,
)


def compress(
    model: ModelArg,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder to write.")] = None,
    keep: Annotated[float | None, typer.Option("--keep", help="Fraction of all params that may remain.")] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", metavar="UNIT=VALUE", help=words.BUDGET),
    ] = None,
    max_drop: Annotated[
        str | None,
        typer.Option(
            "--max-drop",
            metavar="DROP",
            help="Instead of a budget: lose at most this on val, or of --metric; points, or a share such as 5%.",
        ),
    ] = None,
    unit: Annotated[str, typer.Option("--unit", help=f"For --max-drop: smallest in {words.UNITS}.")] = "params",
    method: Annotated[str, typer.Option("--method", help=f"One of {words.METHODS}.")] = "auto",
    weights: WeightsOpt = None,
    data: DataOpt = None,
    split: SplitOpt = "test",
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="FILE.py:FUNCTION",
            help="For --max-drop: your own metric, a function from a network to a number, in place of --data.",
        ),
    ] = None,
    lower: Annotated[bool, typer.Option("--lower-is-better", help="For --metric: a loss or a perplexity.")] = False,
    recover: Annotated[
        str,
        typer.Option(
            "--recover",
            metavar="N",
            help="Steps of distillation from the original network, or seconds: 90s.",
        ),
    ] = "0",
    calibrate: Annotated[
        str,
        typer.Option(
            "--calibrate", metavar="N", help="Inputs without labels to look at; without a number what the time allows."
        ),
    ] = "auto",
    error: Annotated[str | None, typer.Option("--error", help=f"Of a layer: {words.MEASURES}.")] = None,
    search: Annotated[
        str | None, typer.Option("--search", help=f"{words.SEARCHES}; for pfp {words.FILTER_SEARCHES}.")
    ] = None,
    slices: Annotated[
        str | None,
        typer.Option(
            "--slices", "--groups", metavar="K", help="Slices of a layer: all, any, a number or a list such as 1,2,4."
        ),
    ] = None,
    folds: Annotated[
        str | None, typer.Option("--folds", metavar="F", help="all, or a list of schemes such as 0,3.")
    ] = None,
    decompositions: Annotated[
        str | None, typer.Option("--decompositions", metavar="D", help=f"A list of {words.DECOMPOSITIONS}.")
    ] = None,
    clustering: Annotated[str | None, typer.Option("--clustering", help=f"For messi: {words.CLUSTERINGS}.")] = None,
    timing: TimingOpt = None,
    never_slower: Annotated[
        bool | None,
        typer.Option(
            "--never-slower/--no-never-slower",
            help="A layer stays whole unless its pair was measured to be faster.",
        ),
    ] = None,
    rank_multiple: Annotated[
        str | None,
        typer.Option(
            "--rank-multiple",
            metavar="N",
            help="Channels between factors are multiples of N, or of what was measured to be best (measured).",
        ),
    ] = None,
    fuse: FuseOpt = None,
    blocks: BlocksOpt = None,
    workers: WorkersOpt = None,
    ray: RayOpt = None,
    input: InputOpt = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the random starts.")] = None,
    exclude: ExcludeOpt = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse if a linear or convolution layer is left out.")
    ] = False,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Replay this plan.json.")] = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="A page about every layer, in DIR/report.html.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Go on although the weights are random.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what --out holds.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Plan, decompose, write a folder, and read it back before saying done."""
    from rankwise.calibration.distill import read_effort
    from rankwise.cli import flags
    from rankwise.cli.asked import budget_for, check_out, limit_for, only_with_a_search
    from rankwise.cli.block_by_block import folder_for, job_for, wants_blocks, workers_for
    from rankwise.cli.outcome import Wanted, check_strict, compressed, interruptible, print_outcome
    from rankwise.cli.report import single_report, typed
    from rankwise.compression import Request
    from rankwise.models.networks import architecture
    from rankwise.models.spec import parse
    from rankwise.planning.plan import Plan
    from rankwise.reports.single import About
    from rankwise.timing.clock import read_timing

    changes = {
        "error": error,
        "search": search,
        "seed": seed,
        "slices": flags.read_slices(slices),
        "folds": flags.read_folds(folds),
        "decompositions": decompositions.split(",") if decompositions else None,
        "clustering": clustering,
        "never_slower": never_slower,
        "rank_multiple": flags.read_multiple(rank_multiple),
    }
    # What is not understood or not possible is said before anything is opened or computed.
    limit = limit_for(max_drop, unit, data, metric, lower, bool(keep is not None or budget))
    how, _ = read_timing(timing), read_effort(recover)
    made = None
    if plan is not None:
        only_with_a_search(keep, budget, {"max-drop": max_drop, **changes})
        made = Plan.load(plan)
    name, left_alone, inputs = architecture(model), tuple(exclude or ()), flags.read_inputs(calibrate)
    request = Request(method, changes, left_alone, recover, fuse, how, name, inputs, made)
    asked = budget_for(request, limit, keep, budget)
    target = check_out(model, out, dry_run, force)
    apart = wants_blocks(model, blocks, request, data, asked, weights is not None or max_drop is not None)
    engine = workers_for(workers, ray, apart)
    random = flags.random_weights(model) if weights is None else ""
    flags.check_random(random, random_weights or target is None)
    with flags.reserved(target, force):
        with interruptible(target), output.progress("compress"):
            job = job_for(model, request, data, (weights, input, folder_for(out, apart)), engine)
            if strict and made is None:
                check_strict(job)
            done = compressed(job, asked, limit, Wanted(data, split, strict, dry_run, out))
        if random:
            output.warn(random)
        found = done.to_json()
        base = model if parse(model).kind == "file" else None
        about = About(data, split, None if weights is None else str(weights), typed(), model, input, base)
        page, said = single_report(found, job.model, about) if report else (None, "")
    if as_json:
        output.print_json({**found, "report": page, **({"random_weights": True} if random else {})})
    else:
        print_outcome(done, split)
        typer.echo(said, nl=bool(said))
