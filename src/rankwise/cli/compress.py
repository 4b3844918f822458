"""The command `compress`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from rankwise.calibration.distill import read_effort
from rankwise.cli import show
from rankwise.cli.flags import budget_help, open_model, read_budget, read_folds, read_multiple, read_slices
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
from rankwise.compression import Compression, Request
from rankwise.data.splits import load as load_data
from rankwise.decompositions import DECOMPOSITIONS
from rankwise.decompositions.clusters import CLUSTERINGS
from rankwise.errors import RankwiseError
from rankwise.methods import METHODS, needs_budget
from rankwise.models import networks
from rankwise.models.inputs import example_for
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Plan
from rankwise.planning.planner import Settings
from rankwise.planning.units import UNITS
from rankwise.pruning.filters import Filters
from rankwise.pruning.trials import OUTPUT
from rankwise.surgery import checkpoint
from rankwise.surgery.coverage import EXCLUDED, OTHER_KIND
from rankwise.surgery.forward import Example, run_example, side_of, tensors_of, undisturbed
from rankwise.timing.clock import Timing, read_timing, time_networks
from rankwise.timing.load import conditions
from rankwise.training.evaluate import evaluate as score
from rankwise.training.forecast import can_forecast, forecast
from rankwise.training.limits import ROUNDS, Trial, check_limit, smallest

SECONDS = (1.0, 4.0)  # to time the networks for: at least, and when three runs must do


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
        typer.Option("--max-drop", metavar="POINTS", help="Instead of a budget: lose at most this on val."),
    ] = None,
    unit: Annotated[str, typer.Option("--unit", help=f"For --max-drop: smallest in {', '.join(UNITS)}.")] = "params",
    method: Annotated[str, typer.Option("--method", help=f"One of {', '.join(METHODS)}.")] = "auto",
    weights: WeightsOpt = None,
    data: DataOpt = None,
    split: SplitOpt = "test",
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
    error: Annotated[
        str | None, typer.Option("--error", help="bound, rss, max, exact, energy, residual or output.")
    ] = None,
    search: Annotated[
        str | None, typer.Option("--search", help="alternate, minimax, sum, penalty, product, constant or sampling.")
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
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
    limit = _read_limit(max_drop, unit, data, bool(keep is not None or budget))
    how, _ = read_timing(timing), read_effort(recover)  # what is not understood is said before anything is done
    made = None
    if plan is not None:
        _only_with_a_search(keep, budget, {"max-drop": max_drop, **changes})
        made = Plan.load(plan)
    network = open_model(model, weights, None)
    example = example_for(model, input, network)
    name, left_alone = networks.architecture(model), tuple(exclude or ())
    request = Request(method, changes, left_alone, recover, fuse, how, name, calibrate, made)
    job = Compression(network, example, request, data, show.progress)
    if strict and made is None:
        check_strict(job)
    asked = None
    if made is None and limit is None and (keep is not None or budget or needs_budget(job.settings)):
        asked = read_budget(keep, budget)
    done = _compressed(job, asked, limit, _Wanted(data, split, strict, dry_run, out))
    if as_json:
        show.print_json(done.to_json())
    else:
        _print(done, split)


@dataclass(frozen=True)
class _Limit:
    """What --max-drop asks for: the smallest network, in a unit, that loses at most so many points on val."""

    points: float
    unit: str
    data: str


@dataclass(frozen=True)
class _Wanted:
    """What is done around the job itself: data to score on, --strict, --dry-run, and the folder to write."""

    data: str | None
    split: str
    strict: bool
    dry_run: bool
    out: Path | None


@dataclass(frozen=True)
class _Done:
    """What became of it, to be printed."""

    plan: Plan
    trials: list[Trial] | None = None
    expected: dict[str, Any] | None = None
    scores: dict[str, Any] | None = None
    time: dict[str, float] | None = None
    verified: str | None = None
    out: Path | None = None

    def to_json(self) -> dict[str, Any]:
        trials = None if self.trials is None else [t.to_json() for t in self.trials]
        written = None if self.verified is None else str(self.out)
        more = {"expected": self.expected, "trials": trials, "time": self.time}
        found = {"out": written, "verified": self.verified, "scores": self.scores}
        return {**found, **more, "plan": self.plan.to_json()}


def _compressed(job: Compression, asked: Budget | None, limit: _Limit | None, wanted: _Wanted) -> _Done:
    """Plan, build, recover, finish, score, write: what the flags ask for."""
    small, trials = None, None
    if limit is None:
        plan = job.plan(asked)
    else:
        small, plan, trials = _within(job, limit)
    if wanted.strict:
        check_pruned(plan)
    side = side_of(job.example)
    if wanted.dry_run and wanted.data is not None and small is None and can_forecast(plan, job.seen(plan)):
        expected = forecast(job.model, plan, job.seen(plan), load_data(wanted.data, wanted.split, size=side))
        return _Done(plan, expected=expected.to_json())
    if small is None:
        small, plan = job.build(plan)
    job.recover_(small, plan)
    small, plan = job.finish(small, plan)
    scores = None
    if wanted.data is not None:
        test = load_data(wanted.data, wanted.split, size=side)
        scores = {"before": score(job.model, test).to_json(), "after": score(small, test).to_json()}
    if wanted.dry_run or wanted.out is None:
        return _Done(plan, trials, None, scores)
    checkpoint.save(small, plan, wanted.out)
    verified = verify(wanted.out, small, job.model, job.example)
    return _Done(plan, trials, None, scores, _timed(job, small), verified, wanted.out)


def _timed(job: Compression, small: nn.Module) -> dict[str, float] | None:
    """Seconds of both networks, measured in turns, and their ratio; None where no input is known.

    Where the machine was busy at that time, its load and cores and the spread of the runs stand beside them.
    """
    if job.example is None:
        return None
    how = job.request.timing or Timing()
    runs = time_networks([job.model, small], job.example, how, *SECONDS)
    dense, now = (one.median for one in runs)
    seen = conditions(runs)
    return {"dense": dense, "small": now, "ratio": now / dense, **(seen.to_json() if seen.busy else {})}


def check_strict(job: Compression) -> None:
    """--strict for methods that decompose: every linear layer and convolution must be free for it."""
    job.check()
    if isinstance(job.settings, Filters):
        return  # which filters can be removed is another question, and the plan answers it
    gaps = [s for s in job.coverage.skipped if s.reason not in (OTHER_KIND, EXCLUDED)]
    if gaps:
        first = "; ".join(f"{s.name}: {s.reason}" for s in gaps[:3])
        raise RankwiseError(
            f"--strict was given and {len(gaps)} layers cannot be decomposed ({first}): exclude them by name, "
            f"or leave --strict out"
        )


def check_pruned(plan: Plan) -> None:
    """--strict for methods that remove filters: every filter must be free to go, but for the network's output."""
    whole = plan.search.whole or ()
    held = [group for group in whole if group.reason != OUTPUT and not group.reason.endswith(EXCLUDED)]
    if held:
        first = "; ".join(f"{group.layers[0]}: {group.reason}" for group in held[:3])
        raise RankwiseError(
            f"--strict was given and the filters of {len(held)} groups of layers cannot be removed ({first}): exclude "
            f"them by name, or leave --strict out"
        )


def verify(folder: Path, small: nn.Module, original: nn.Module, example: Example | None) -> str:
    """Read the folder back and compare with what was written; says what was compared."""
    again = checkpoint.load(folder, original)
    if example is None:
        pairs = zip(again.state_dict().values(), small.state_dict().values(), strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            raise RankwiseError(f"{folder} was written, but read back it has other weights: do not use it")
        return "it has the same weights (give --input to compare outputs too)"
    with undisturbed(again), undisturbed(small):
        ours, theirs = tensors_of(run_example(small, example)), tensors_of(run_example(again, example))
    if len(ours) != len(theirs) or not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
        raise RankwiseError(f"{folder} was written, but read back it gives other outputs: do not use it")
    return "it gives the same outputs"


def _within(job: Compression, limit: _Limit) -> tuple[nn.Module, Plan, list[Trial]]:
    """The smallest network that loses at most so many points on the validation split."""
    images = load_data(limit.data, "val", size=side_of(job.example))
    if isinstance(job.settings, Settings):
        job.check()
        job.basis(Budget(**{limit.unit: 1.0}))  # before the bar of the search is shown
    with show.progress("looking for the smallest") as report:
        tried: list[Trial] = []

        def tell(trial: Trial) -> None:
            tried.append(trial)
            report(show.trial(trial, limit.unit), len(tried), ROUNDS)

        report("", 0, ROUNDS)
        return smallest(
            lambda budget: job.build(job.plan(budget)),
            lambda small: score(small, images).main,
            score(job.model, images).main,
            limit.points,
            limit.unit,
            tell,
        )


def _read_limit(points: float | None, unit: str, data: str | None, budget: bool) -> _Limit | None:
    if points is None:
        return None
    if budget:
        raise RankwiseError("a budget and --max-drop were given: drop one, since --max-drop finds the budget")
    if data is None:
        raise RankwiseError("--max-drop measures what is lost, and there is nothing to measure it on: add --data")
    check_limit(points, unit)
    return _Limit(points, unit, data)


def _only_with_a_search(keep: float | None, budget: list[str] | None, changes: dict[str, Any]) -> None:
    every = {"keep": keep, "budget": budget, **changes}
    given = [f"--{name.replace('_', '-')}" for name, value in every.items() if value is not None]
    if given:
        raise RankwiseError(
            f"--plan replays decisions that are made already, and {given[0]} asks for new ones: drop one"
        )


def _print(done: _Done, split: str) -> None:
    plan, terminal = done.plan, show.console()
    terminal.print(show.plan_grid(plan, str(plan.settings.get("error", "energy"))))
    whole = [f"{s.name} ({s.reason})" for s in plan.kept if s.reason not in (OTHER_KIND, EXCLUDED)]
    whole = show.held_filters(plan) if plan.pruned else whole
    if whole:
        terminal.print("left whole: " + "; ".join(whole))
    for note in show.remarks(plan):
        terminal.print(note)
    for warning in plan.warnings:
        terminal.print(f"warning: {warning}")
    terminal.print(show.before_after_grid(plan, done.scores))
    if done.time is not None:
        terminal.print(show.measured_time(done.time))
    if done.expected is not None:
        terminal.print(show.expectation(done.expected, split))
    if done.verified is not None:
        terminal.print(f"done: {done.out} was written and read back; {done.verified}")


def register(app: typer.Typer) -> None:
    app.command()(compress)
