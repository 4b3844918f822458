"""The command `compress`: its flags, and what must be right before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rankwise.calibration.distill import read_effort
from rankwise.cli import show
from rankwise.cli.flags import (
    budget_help,
    check_folder,
    check_random,
    open_model,
    read_budget,
    read_folds,
    read_multiple,
    read_slices,
)
from rankwise.cli.flags import random_weights as untrained
from rankwise.cli.options import (
    DataOpt,
    ExcludeOpt,
    FuseOpt,
    InputOpt,
    JsonOpt,
    ModelArg,
    SplitOpt,
    TimingOpt,
    WeightsOpt,
)
from rankwise.cli.outcome import Limit, Wanted, check_strict, compressed, interruptible, print_outcome, read_limit
from rankwise.cli.report import single_report
from rankwise.compression import Compression, Request
from rankwise.core.measures import ALL_MEASURES
from rankwise.decompositions import DECOMPOSITIONS
from rankwise.decompositions.clusters import CLUSTERINGS
from rankwise.errors import RankwiseError
from rankwise.methods import METHODS, needs_budget, settings_for
from rankwise.models import networks
from rankwise.models.inputs import example_for
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Plan
from rankwise.planning.planner import SEARCHES
from rankwise.planning.units import UNITS
from rankwise.pruning.filters import SEARCHES as FILTER_SEARCHES
from rankwise.timing.clock import read_timing


def compress(
    model: ModelArg,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder to write.")] = None,
    keep: Annotated[float | None, typer.Option("--keep", help="Fraction of all params that may remain.")] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", metavar="UNIT=VALUE", help=budget_help()),
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            "--max-drop", metavar="POINTS", help="Instead of a budget: lose at most this on val, or of --metric."
        ),
    ] = None,
    unit: Annotated[str, typer.Option("--unit", help=f"For --max-drop: smallest in {', '.join(UNITS)}.")] = "params",
    method: Annotated[str, typer.Option("--method", help=f"One of {', '.join(METHODS)}.")] = "auto",
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
        int, typer.Option("--calibrate", metavar="N", help="Training images for methods that look at activations.")
    ] = 256,
    error: Annotated[str | None, typer.Option("--error", help=f"Of a layer: {', '.join(ALL_MEASURES)}.")] = None,
    search: Annotated[
        str | None, typer.Option("--search", help=f"{', '.join(SEARCHES)}; for pfp {' or '.join(FILTER_SEARCHES[1:])}.")
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
        str | None, typer.Option("--decompositions", metavar="D", help=f"A list of {', '.join(DECOMPOSITIONS)}.")
    ] = None,
    clustering: Annotated[
        str | None, typer.Option("--clustering", help=f"For messi: {', '.join(CLUSTERINGS)}.")
    ] = None,
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
        bool, typer.Option("--random-weights", help="Go on although nobody has trained the weights.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what --out holds.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Plan, decompose, write a folder, and read it back before saying done."""
    if out is None and not dry_run:
        raise RankwiseError("no folder was given to write to: add --out DIR, or --dry-run to see the plan only")
    changes = {
        "error": error,
        "search": search,
        "seed": seed,
        "slices": read_slices(slices),
        "folds": read_folds(folds),
        "decompositions": decompositions.split(",") if decompositions else None,
        "clustering": clustering,
        "never_slower": never_slower,
        "rank_multiple": read_multiple(rank_multiple),
    }
    # What is not understood or not possible is said before anything is opened or computed.
    limit = read_limit(max_drop, unit, data, metric, lower, bool(keep is not None or budget))
    how, _ = read_timing(timing), read_effort(recover)
    made = None
    if plan is not None:
        _only_with_a_search(keep, budget, {"max-drop": max_drop, **changes})
        made = Plan.load(plan)
    name, left_alone = networks.architecture(model), tuple(exclude or ())
    request = Request(method, changes, left_alone, recover, fuse, how, name, calibrate, made)
    asked = _read_asked(request, limit, keep, budget)
    writes = out is not None and not dry_run
    if out is not None and writes:
        check_folder(out, force)
        if Path(model).exists() and out.resolve() == Path(model).resolve():
            raise RankwiseError(f"--out {out} is the network that is compressed: give another folder")
    random = untrained(model) if weights is None else ""
    check_random(random, random_weights or not writes)
    with interruptible(out if writes else None), show.progress("compress"):
        network = open_model(model, weights, None)
        job = Compression(network, example_for(model, input, network), request, data, show.progress)
        if strict and made is None:
            check_strict(job)
        done = compressed(job, asked, limit, Wanted(data, split, strict, dry_run, out))
    if random:
        show.warn(random)
    found = done.to_json()
    page, said = single_report(found, network, model, data, split, weights) if report else (None, "")
    if as_json:
        show.print_json({**found, "report": page, **({"random_weights": True} if random else {})})
    else:
        print_outcome(done, split)
        typer.echo(said, nl=bool(said))


def _read_asked(request: Request, limit: Limit | None, keep: float | None, budget: list[str] | None) -> Budget | None:
    """The budget, if one is needed; settings that no method knows are refused on the way."""
    if request.plan is not None:
        return None
    changes = {key: value for key, value in request.changes.items() if value != "measured"}
    settings = settings_for(request.method, **changes)
    if limit is None and (keep is not None or budget or needs_budget(settings)):
        return read_budget(keep, budget)
    return None


def _only_with_a_search(keep: float | None, budget: list[str] | None, changes: dict[str, Any]) -> None:
    every = {"keep": keep, "budget": budget, **changes}
    given = [f"--{name.replace('_', '-')}" for name, value in every.items() if value is not None]
    if given:
        raise RankwiseError(
            f"--plan replays decisions that are made already, and {given[0]} asks for new ones: drop one"
        )
