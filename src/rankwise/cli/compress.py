"""The command `compress`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from rankwise.calibration.distill import read_effort
from rankwise.cli import show
from rankwise.cli.flags import open_model, read_budget, read_folds, read_groups, read_multiple
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
from rankwise.compression import (
    Planner,
    Seen,
    build_network,
    finish,
    folds_norms,
    is_free,
    kept_in_time,
    planner,
    recovered,
    seen_for,
    times_for,
    with_multiple,
)
from rankwise.core.layer import Coverage
from rankwise.data.splits import load as load_data
from rankwise.decompositions import DECOMPOSITIONS
from rankwise.decompositions.clusters import CLUSTERINGS
from rankwise.errors import RankwiseError
from rankwise.methods import METHODS, needs_budget, needs_data, settings_for
from rankwise.models import networks
from rankwise.models.inputs import example_for
from rankwise.planning.plan import Plan
from rankwise.pruning.filters import Filters
from rankwise.pruning.trials import OUTPUT
from rankwise.surgery import checkpoint
from rankwise.surgery.coverage import COMPRESSED, EXCLUDED, OTHER_KIND, find_layers
from rankwise.surgery.forward import run_example, side_of, tensors_of, undisturbed
from rankwise.timing.clock import read_timing
from rankwise.training.evaluate import evaluate as score
from rankwise.training.forecast import can_forecast, forecast
from rankwise.training.limits import ROUNDS, Trial, smallest


def compress(
    model: ModelArg,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder to write.")] = None,
    keep: Annotated[float | None, typer.Option("--keep", help="Fraction of all params that may remain.")] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", metavar="UNIT=VALUE", help="params=0.4, macs=0.5 or latency=0.6; may be repeated."),
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option("--max-drop", metavar="POINTS", help="Instead of a budget: lose at most this on val."),
    ] = None,
    unit: Annotated[str, typer.Option("--unit", help="For --max-drop: smallest in params or in macs.")] = "params",
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
    groups: Annotated[
        str | None, typer.Option("--groups", metavar="K", help="all, any, a number or a list such as 1,2,4.")
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
            help="A layer stays whole unless its pair was measured to be faster; on for auto with an input shape.",
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
        "groups": read_groups(groups),
        "folds": read_folds(folds),
        "decompositions": decompositions.split(",") if decompositions else None,
        "clustering": clustering,
        "never_slower": never_slower,
        "rank_multiple": read_multiple(rank_multiple),
    }
    if max_drop is not None and (keep is not None or budget):
        raise RankwiseError("a budget and --max-drop were given: drop one, since --max-drop finds the budget")
    if max_drop is not None and data is None:
        raise RankwiseError("--max-drop measures what is lost, and there is nothing to measure it on: add --data")
    how, _ = read_timing(timing), read_effort(recover)  # what is not understood is said before anything is done
    network = open_model(model, weights, None)
    example = example_for(model, input, network)
    source: Any = None
    seen, small, trials = Seen(), None, None
    if plan is None:
        coverage = find_layers(network, example, exclude or ())
        if method == "auto" and never_slower is None:
            changes["never_slower"] = example is not None
        changes = with_multiple(changes, network, example, how, coverage)
        settings, free = settings_for(method, **changes), is_free(method, changes)
        check_coverage(coverage, strict, isinstance(settings, Filters))
        images = None
        if data is not None and (free or needs_data(settings)):
            images = load_data(data, "calibration", size=side_of(example)).thin(calibrate)
        title, asked = networks.architecture(model), None
        if max_drop is None and (keep is not None or budget or needs_budget(settings)):
            asked = read_budget(keep, budget)
        folded = folds_norms(fuse, asked)
        with show.progress("timing") as report:
            times = times_for(network, example, coverage, settings, asked, how, report, folded)
        with show.progress("layers") as report:
            make = planner(network, example, coverage, settings, method, title, images, report, free, times)
        if max_drop is None:
            with show.progress("timing the plan"):
                found, seen = kept_in_time(make, asked, network, example, how, folded)
        else:
            small, found, trials = _within(network, example, make, max_drop, unit, str(data))
        if strict:
            check_pruned(found)
    else:
        _only_with_a_search(keep, budget, {"max-drop": max_drop, **changes})
        found = Plan.load(plan)
        folded = bool(found.fused) if fuse is None else fuse
        source = None if data is None else load_data(data, "calibration", size=side_of(example)).thin(calibrate)
        seen = seen_for(network, example, found, source)
    expected = None
    if dry_run and data is not None and small is None and can_forecast(found, seen):
        expected = forecast(network, found, seen, load_data(data, split, size=side_of(example))).to_json()
    elif small is None:
        small, found = build_network(network, found, seen)
    if any(read_effort(recover)) and small is not None:
        with show.progress("recovery") as report:
            source = seen.data
            if source is None and data is not None:
                source = load_data(data, "calibration", size=side_of(example)).thin(calibrate)
            small = recovered(small, network, source, recover, lambda i, n, loss: report("", i, n))
    if small is not None:
        small, found = finish(small, found, example, folded)
    scores = None
    if data is not None and small is not None:
        test = load_data(data, split, size=side_of(example))
        scores = {"before": score(network, test).to_json(), "after": score(small, test).to_json()}
    verified = None
    if out is not None and not dry_run and small is not None:
        checkpoint.save(small, found, out)
        verified = verify(out, small, network, example)
    if as_json:
        written = None if verified is None else str(out)
        more = {"expected": expected, "trials": None if trials is None else [t.to_json() for t in trials]}
        show.print_json({"out": written, "verified": verified, "scores": scores, **more, "plan": found.to_json()})
        return
    _print_plan(found, scores)
    if expected is not None:
        show.console().print(show.expectation(expected, split))
    if verified is not None:
        show.console().print(f"done: {out} was written and read back; {verified}")


def check_coverage(coverage: Coverage, strict: bool, prunes: bool) -> None:
    compressed = [s.name for s in coverage.skipped if s.reason == COMPRESSED]
    if compressed:
        raise RankwiseError(
            f"the model is already compressed (layer {compressed[0]!r}, for one): compress the original instead"
        )
    if prunes:
        return  # which filters can be removed is another question, and the plan answers it
    if not coverage.layers:
        raise RankwiseError("the model has no layer that can be decomposed: rankwise inspect says why")
    gaps = [s for s in coverage.skipped if s.reason not in (OTHER_KIND, EXCLUDED)]
    if strict and gaps:
        first = "; ".join(f"{s.name}: {s.reason}" for s in gaps[:3])
        raise RankwiseError(
            f"--strict was given and {len(gaps)} layers cannot be decomposed ({first}): exclude them by name, "
            f"or leave --strict out"
        )


def check_pruned(plan: Plan) -> None:
    """--strict for methods that remove filters: every filter must be free to go, but for the network's output."""
    held = [g for g in plan.search.get("whole", ()) if g["reason"] != OUTPUT and not g["reason"].endswith(EXCLUDED)]
    if held:
        first = "; ".join(f"{g['layers'][0]}: {g['reason']}" for g in held[:3])
        raise RankwiseError(
            f"--strict was given and the filters of {len(held)} groups of layers cannot be removed ({first}): exclude "
            f"them by name, or leave --strict out"
        )


def verify(folder: Path, small: nn.Module, original: nn.Module, example: Tensor | None) -> str:
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


def _within(
    network: nn.Module, example: Tensor | None, make: Planner, limit: float, unit: str, data: str
) -> tuple[nn.Module, Plan, list[Trial]]:
    """The smallest network that loses at most `limit` points on the validation split."""
    images = load_data(data, "val", size=side_of(example))
    with show.progress("looking for the smallest") as report:
        tried: list[Trial] = []

        def tell(trial: Trial) -> None:
            tried.append(trial)
            report(show.trial(trial, unit), len(tried), ROUNDS)

        report("", 0, ROUNDS)
        return smallest(
            lambda budget: build_network(network, *make(budget)),
            lambda small: score(small, images).main,
            score(network, images).main,
            limit,
            unit,
            tell,
        )


def _only_with_a_search(keep: float | None, budget: list[str] | None, changes: dict[str, Any]) -> None:
    every = {"keep": keep, "budget": budget, **changes}
    given = [f"--{name.replace('_', '-')}" for name, value in every.items() if value is not None]
    if given:
        raise RankwiseError(
            f"--plan replays decisions that are made already, and {given[0]} asks for new ones: drop one"
        )


def _print_plan(plan: Plan, scores: dict[str, Any] | None) -> None:
    terminal = show.console()
    terminal.print(show.plan_grid(plan, str(plan.settings.get("error", "energy"))))
    whole = [f"{s.name} ({s.reason})" for s in plan.kept if s.reason not in (OTHER_KIND, EXCLUDED)]
    whole = show.held_filters(plan) if plan.pruned else whole
    if whole:
        terminal.print("left whole: " + "; ".join(whole))
    for note in show.remarks(plan):
        terminal.print(note)
    terminal.print(show.before_after_grid(plan, scores))


def register(app: typer.Typer) -> None:
    app.command()(compress)
