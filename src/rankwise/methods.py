"""Methods: named settings for the search, and the whole job in one call.

A method is a value. Another ablation is another row in the registry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rankwise import pca
from rankwise.budget import Budget
from rankwise.coverage import COMPRESSED, find_layers
from rankwise.errors import RankwiseError
from rankwise.layer import Coverage
from rankwise.plan import Plan
from rankwise.probe import output_moments
from rankwise.search import Settings, find_plan
from rankwise.surgery import apply_plan
from rankwise.table import Progress, Table, build, module_weights


@dataclass(frozen=True)
class Method:
    """A way to decide: what it is, and the settings it stands for."""

    name: str
    about: str
    settings: Settings


def _register(*methods: Method) -> dict[str, Method]:
    return {m.name: m for m in methods}


_ALDS = Settings(folds=(0,), groups="all", error="bound", search="alternate")
_ONE = replace(_ALDS, groups=1)

METHODS: dict[str, Method] = _register(
    Method("alds", "Algorithm 1 of the paper: slices and ranks by the largest error bound", _ALDS),
    Method("alds+", "alds that also chooses among the four folds", replace(_ALDS, folds="all")),
    Method("alds-error", "alds with a fixed number of slices (3)", replace(_ALDS, groups=3, search="minimax")),
    Method(
        "alds-simple",
        "a fixed number of slices (3), the same keep in every layer",
        replace(_ALDS, groups=3, search="constant"),
    ),
    Method("svd-error", "alds-error with one slice", replace(_ONE, search="minimax")),
    Method("svd", "one slice, the same keep in every layer", replace(_ONE, search="constant")),
    Method(
        "l-rank",
        "one slice, least residual energy + λ · cost in every layer, λ by the budget",
        replace(_ONE, error="residual", search="penalty"),
    ),
    Method(
        "svd-energy",
        "one slice, the same relative energy in every layer",
        replace(_ONE, error="energy", search="minimax"),
    ),
    Method(
        "pca",
        "principal components of the outputs over calibration data, largest product of energies",
        replace(_ONE, error="output", search="product", decompositions=("pca",)),
    ),
    Method("auto", "the best we know without data: least total energy, all folds and slices", Settings()),
)


def get_method(name: str) -> Method:
    if name not in METHODS:
        raise RankwiseError(f"unknown method {name!r}: the methods are {', '.join(METHODS)}")
    return METHODS[name]


def settings_for(method: str, **changes: Any) -> Settings:
    """A method's settings with some of them replaced; None leaves one as it is."""
    known = set(Settings.__dataclass_fields__)
    unknown = sorted(set(changes) - known)
    if unknown:
        raise RankwiseError(f"unknown setting {unknown[0]!r}: the settings are {', '.join(sorted(known))}")
    return replace(get_method(method).settings, **{k: v for k, v in changes.items() if v is not None})


def build_table(
    model: nn.Module,
    example: Any = None,
    folds: str | int | Iterable[str | int] = "all",
    groups: str | int | Iterable[int] = "all",
    exclude: Iterable[str] | str = (),
    progress: Progress | None = None,
    data: Any = None,
) -> Table:
    """The spectra of every layer of a model; `example` is needed for budgets in macs.

    With calibration `data` (any iterable of inputs) the decomposition `pca` is offered too.
    """
    coverage = find_layers(model, example, exclude)
    settings = Settings(folds=folds, groups=groups, decompositions=("svd",) if data is None else ("svd", "pca"))
    return table_for(model, coverage, settings, data, progress)


def table_for(
    model: nn.Module, coverage: Coverage, settings: Settings, data: Any = None, progress: Progress | None = None
) -> Table:
    """What the settings need: spectra of the weights, and components of the outputs over the data."""
    needs_data = [decomposition for decomposition in settings.decompositions if decomposition != "svd"]
    if needs_data and data is None:
        raise RankwiseError(
            f"{needs_data[0]!r} looks at what flows through the layers, and no calibration data was given: "
            f"pass data= (on the command line: --data)"
        )
    weights = module_weights(model, coverage)
    table = build(coverage, weights, settings.folds, settings.groups, progress, settings.decompositions)
    if "pca" in settings.decompositions:
        table.moments = output_moments(model, data, coverage.layers)
        for layer in coverage.layers:
            seen = table.moments[layer.name]
            if seen.count:  # a layer that the data does not reach has no components: it stays as it is
                curves = pca.curves(weights[layer.name], layer, seen.covariance[0])
                table.given[layer.name, pca.option(layer)] = curves
    return table


def allocate(table: Table, budget: Budget, method: str = "auto", model: str = "", **changes: Any) -> Plan:
    """One choice for each layer. `changes` replace settings of the method: error=, search=, groups=, seed= …"""
    return find_plan(table, budget, settings_for(method, **changes), method, model)


def compress(
    model: nn.Module,
    example: Any = None,
    method: str = "auto",
    keep: float | None = None,
    macs: float | None = None,
    exclude: Iterable[str] | str = (),
    progress: Progress | None = None,
    data: Any = None,
    **changes: Any,
) -> tuple[nn.Module, Plan]:
    """The whole job: a smaller copy of the model, and the plan it follows.

    `keep` is the fraction of all parameters (or their number) that may remain, `macs` the same for
    multiply-adds, which needs an example input. `data`, any iterable of inputs without labels, is for
    methods that look at activations.
    """
    settings = settings_for(method, **changes)
    budget = Budget(params=keep, macs=macs)
    coverage = find_layers(model, example, exclude)
    if any(s.reason == COMPRESSED for s in coverage.skipped):
        raise RankwiseError("the model is already compressed: densify it first, or compress the original again")
    if not coverage.layers:
        raise RankwiseError("the model has no layer that can be decomposed: rankwise.find_layers says why")
    table = table_for(model, coverage, settings, data, progress)
    plan = find_plan(table, budget, settings, method, type(model).__name__)
    return apply_plan(model, plan, table.moments), plan
