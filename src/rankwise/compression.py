"""The whole job: from a model and a budget to a plan, and from a plan to a smaller network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from rankwise.calibration.activations import batches
from rankwise.calibration.distill import Steps, read_effort, recover_
from rankwise.calibration.effect_table import LARGEST, effect_table
from rankwise.calibration.fit import apply_fitted
from rankwise.calibration.output_metric import Influence, influences
from rankwise.calibration.synthetic import imagine, noise
from rankwise.core.layer import Coverage
from rankwise.core.option import FITTED
from rankwise.errors import RankwiseError
from rankwise.methods import calibration, needs_budget, no_data, settings_for, table_for
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Plan
from rankwise.planning.planner import Settings, find_plan
from rankwise.planning.table import Progress
from rankwise.planning.times import Times
from rankwise.pruning.filters import Filters, plan_filters
from rankwise.surgery.coverage import COMPRESSED, find_layers
from rankwise.surgery.fuse import find_norms, fuse_norms
from rankwise.surgery.layout import lay_out_
from rankwise.surgery.replace import apply_plan
from rankwise.timing.clock import Timing
from rankwise.timing.cost_model import SLICES, measure_times
from rankwise.timing.rank_multiple import best_multiple
from rankwise.timing.tune import settle

IMAGINED = 0.1  # how far moments of imagined inputs are drawn towards the identity
NOISE = "noise"
ENTRIES = 1 << 21  # of a batch of images: 13 of 3×224×224


def is_free(method: str, changes: Mapping[str, Any]) -> bool:
    """Whether `auto` may look at data: not if an error or decompositions are asked for."""
    return method == "auto" and changes.get("error") is None and changes.get("decompositions") is None


@dataclass(frozen=True, eq=False)
class Seen:
    """What building a plan needs beside the weights: moments of outputs, or data and the influence of layers."""

    moments: Mapping[str, Any] = field(default_factory=dict)
    data: Any = None
    influence: Mapping[str, Influence] = field(default_factory=dict)
    least: float = 0.0  # how far moments are drawn towards the identity at least
    in_order: bool = True  # whether layers may be fitted one after the other to what flows through the network
    otherwise: Callable[[LinAlgError], tuple[Plan, Seen]] | None = None  # if fitting fails: a plan from weights alone


Planner = Callable[[Budget | None], tuple[Plan, Seen]]


def planner(
    model: nn.Module,
    example: Any,
    coverage: Coverage,
    settings: Settings | Filters,
    method: str,
    title: str,
    data: Any = None,
    progress: Progress | None = None,
    free: bool = False,
    times: Times | None = None,
) -> Planner:
    """From a budget to a plan and what building it needs: all that does not depend on the budget is done once, here.

    `times` were measured, for budgets in latency and never_slower (`times_for`).
    """
    if isinstance(settings, Filters):
        filters = settings
        return lambda budget: _filters(model, example, coverage, filters, budget, method, title, data)
    if times is not None and settings.groups == "all":
        settings = replace(settings, groups=SLICES)  # others were not measured, so they could not be chosen
    if free:
        found = _auto(model, example, coverage, settings, title, data, progress, times)
        if found is not None:
            return found
    elif settings.error == "effect" or set(FITTED) & set(settings.decompositions):
        if data is None:
            raise no_data(settings)
        if settings.error != "effect" or not {"whitened"} <= set(settings.decompositions) <= {*FITTED, "svd"}:
            raise RankwiseError(
                f"error={settings.error!r} with decompositions={settings.decompositions!r} was asked for: 'effect' and "
                f"'whitened' are known together only, and method='auto' with data= takes both"
            )
        return _by_effect(model, coverage, settings, method, title, data, progress, "calibration", 0.0, times)
    table = table_for(model, coverage, settings, data, progress)
    table.times = times
    return lambda budget: (find_plan(table, budget, settings, method, title), Seen(table.moments))


def _filters(
    model: nn.Module,
    example: Any,
    coverage: Coverage,
    settings: Filters,
    budget: Budget | None,
    method: str,
    title: str,
    data: Any,
) -> tuple[Plan, Seen]:
    assert budget is not None, "needs_budget has asked for one"
    return plan_filters(model, example, coverage, settings, budget, method, title, data), Seen()


def _auto(
    model: nn.Module,
    example: Any,
    coverage: Coverage,
    settings: Settings,
    title: str,
    data: Any,
    progress: Progress | None,
    times: Times | None,
) -> Planner | None:
    """By the effect on the network's outputs, on data, on imagined inputs or on noise; None if there are none."""
    given, inputs, least = _inputs(model, example, coverage, data, settings.seed)
    if given is None:
        return None
    # A core between two layers is neither a fold nor a slice, and was not timed.
    free = times is None and settings.folds == settings.groups == "all"
    wanted = replace(settings, error="effect", decompositions=(*(FITTED if free else FITTED[:1]), "svd"))

    def otherwise(err: LinAlgError) -> Planner:
        plain = planner(model, example, coverage, settings, "auto", title, times=times)
        warning = f"calibration failed ({str(err).splitlines()[0]}), so this plan looks at the weights alone"

        def plan(budget: Budget | None) -> tuple[Plan, Seen]:
            found, seen = plain(budget)
            return replace(found, search={**found.search, "warning": warning}), seen

        return plan

    try:
        planned = _by_effect(model, coverage, wanted, "auto", title, given, progress, inputs, least, times)
    except LinAlgError as err:  # numbers that no shrinking could save: the weights alone will do
        return otherwise(err)
    except RankwiseError:
        if inputs != NOISE:
            raise
        return None  # a network that gives no gradients, say; nobody asked for noise

    def plan(budget: Budget | None) -> tuple[Plan, Seen]:
        found, seen = planned(budget)
        return found, replace(seen, otherwise=lambda err: otherwise(err)(budget))

    return plan


def _inputs(model: nn.Module, example: Any, coverage: Coverage, data: Any, seed: int) -> tuple[Any, str, float]:
    """What to look at (None if there is nothing), what that is, and how far its moments are drawn at least."""
    if data is not None:
        return data, "calibration", 0.0
    found = imagine(model, example, coverage.macs, seed)
    if found is not None:
        return found, "imagined", IMAGINED
    return noise(model, example, coverage.macs, seed), NOISE, IMAGINED


def _by_effect(
    model: nn.Module,
    coverage: Coverage,
    settings: Settings,
    method: str,
    title: str,
    data: Any,
    progress: Progress | None,
    inputs: str,
    least: float,
    times: Times | None,
) -> Planner:
    given = [part for batch in batches(data) for part in _parts(batch)]  # read for every layer
    how = {"means": inputs != NOISE, "real": inputs == "calibration"}
    table, influence = effect_table(model, coverage, settings, given, progress, least, **how)
    table.times = times
    variance = next((one.variance for one in influence.values()), 0.0)

    def plan(budget: Budget | None) -> tuple[Plan, Seen]:
        found = find_plan(table, budget, settings, method, title)
        search = {**found.search, "inputs": inputs, "variance": variance}
        return replace(found, search=search), Seen({}, given, influence, least, inputs != NOISE)

    return plan


def _parts(batch: Any) -> Iterable[Any]:
    """A large batch of images in smaller ones, since the gradients of all layers are held at once."""
    if not isinstance(batch, Tensor) or batch.ndim != 4 or batch.numel() <= ENTRIES:
        return (batch,)
    return torch.split(batch, max(1, ENTRIES * len(batch) // batch.numel()))


def seen_for(model: nn.Module, example: Any, plan: Plan, data: Any = None) -> Seen:
    """What building a plan that was read from a file needs, if it was fitted to data: that data, or imagined inputs.

    With the inputs of the time it was made it gives the same network again.
    """
    if not any(choice.decomposition in FITTED for choice in plan.choices):
        return Seen()
    coverage, seed = find_layers(model, example), int(plan.settings.get("seed") or 0)
    data, inputs, least = _inputs(model, example, coverage, data, seed)
    if data is None or (inputs == NOISE and plan.search.get("inputs") != NOISE):
        return Seen()  # surgery says what is missing
    given, likely = [part for batch in batches(data) for part in _parts(batch)], inputs != NOISE
    found = influences(model, given, list(coverage.layers), LARGEST, seed, likely)
    return Seen({}, given, found, least, likely)


def with_multiple(
    changes: Mapping[str, Any], model: nn.Module, example: Any, timing: Timing | None, coverage: Coverage
) -> dict[str, Any]:
    """Changes to settings, with a number where rank_multiple="measured" was asked for."""
    if changes.get("rank_multiple") != "measured":
        return dict(changes)
    return {**changes, "rank_multiple": best_multiple(model, example, timing, coverage)}


def times_for(
    model: nn.Module,
    example: Any,
    coverage: Coverage,
    settings: Settings | Filters,
    budget: Budget | None,
    timing: Timing | None = None,
    progress: Progress | None = None,
    fuse: bool = False,
) -> Times | None:
    """Measured times where a budget in latency or never_slower needs them; None elsewhere."""
    if isinstance(settings, Filters) or not (settings.never_slower or (budget is not None and budget.timed)):
        return None
    return measure_times(model, example, timing, coverage, progress, fuse=fuse)


def kept_in_time(
    make: Planner, budget: Budget | None, model: nn.Module, example: Any, timing: Timing | None, fuse: bool
) -> tuple[Plan, Seen]:
    """The plan for a budget; with a latency in it, one whose network was timed (settle.py)."""
    plan, seen = make(budget)
    if budget is None or budget.latency is None:
        return plan, seen
    return settle(budget, lambda b: make(b)[0], model, example, timing or Timing(), fuse), seen


def folds_norms(fuse: bool | None, budget: Budget | None) -> bool:
    """Whether batch norms are folded at the end: for whoever asks for time, since it costs no accuracy."""
    return budget is not None and budget.timed if fuse is None else fuse


def finish(small: nn.Module, plan: Plan, example: Any, fuse: bool) -> tuple[nn.Module, Plan]:
    """The network as it is shipped, and a plan that says so: with batch norms folded, in the layout of the plan."""
    if fuse:
        norms = find_norms(small, example)
        small = fuse_norms(small, norms)
        params = sum(p.numel() for p in small.parameters())
        plan = replace(plan, fused=norms, after=replace(plan.after, params=params))
    lay_out_(small, plan.layout)
    return small, plan


def build_network(model: nn.Module, plan: Plan, seen: Seen) -> tuple[nn.Module, Plan]:
    """A copy of the model that follows the plan, and that plan: another one if the data could not be fitted."""
    if seen.data is None:
        return apply_plan(model, plan, seen.moments), plan
    try:
        work = None if seen.in_order else 0
        return apply_fitted(model, plan, seen.data, seen.influence, seen.moments, seen.least, work=work), plan
    except LinAlgError as err:
        if seen.otherwise is None:
            raise RankwiseError(f"the calibration data could not be fitted ({err}): give more of it") from None
        plan, seen = seen.otherwise(err)
        return apply_plan(model, plan, seen.moments), plan


def compress(
    model: nn.Module,
    example: Any = None,
    method: str = "auto",
    keep: float | None = None,
    macs: float | None = None,
    exclude: Iterable[str] | str = (),
    progress: Progress | None = None,
    data: Any = None,
    recover: int | str = 0,
    latency: float | None = None,
    timing: Timing | None = None,
    fuse: bool | None = None,
    **changes: Any,
) -> tuple[nn.Module, Plan]:
    """The whole job: a smaller copy of the model, and the plan it follows.

    `keep` is the fraction of all parameters (or their number) that may remain, `macs` the same for
    multiply-adds, which needs an example input, `latency` for the measured time of the example (see `Timing`); only
    tucker2 can do without any. `data`, any iterable of inputs without labels or a specification such as "digits", is
    for methods that look at activations, and for `recover`: so many steps of distillation from the original network at
    the end, or as many as fit into "90s". `fuse` folds batch norms into the layers before them, for inference; a budget
    in latency does so unless `fuse` is False.
    """
    coverage = find_layers(model, example, exclude)
    settings = settings_for(method, **with_multiple(changes, model, example, timing, coverage))
    asked = any(part is not None for part in (keep, macs, latency)) or needs_budget(settings)
    budget = Budget(params=keep, macs=macs, latency=latency) if asked else None
    if any(s.reason == COMPRESSED for s in coverage.skipped):
        raise RankwiseError("the model is already compressed: densify it first, or compress the original again")
    if not coverage.layers and not isinstance(settings, Filters):
        raise RankwiseError("the model has no layer that can be decomposed: rankwise.find_layers says why")
    source = calibration(data, example)
    title, free = type(model).__name__, is_free(method, changes)
    folds = folds_norms(fuse, budget)
    times = times_for(model, example, coverage, settings, budget, timing, progress, folds)
    make = planner(model, example, coverage, settings, method, title, source, progress, free, times)
    plan, seen = kept_in_time(make, budget, model, example, timing, folds)
    small, plan = build_network(model, plan, seen)
    small = recovered(small, model, seen.data or source, recover)
    return finish(small, plan, example, folds)


def recovered(
    small: nn.Module, model: nn.Module, data: Any, effort: int | str, progress: Steps | None = None
) -> nn.Module:
    """The network after so many steps, or seconds, of distillation from the original (recover.py)."""
    steps, seconds = read_effort(effort)
    if not steps or seconds == 0:
        return small
    if data is None:
        raise RankwiseError(
            "recovery learns from the original network's outputs, and there are no inputs: pass data= (or --data)"
        )
    recover_(small, model, data, steps, seconds, progress=progress)
    return small
