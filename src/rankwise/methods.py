"""Methods: named settings for the search, and the whole job in one call.

A method is a value. Another ablation is another row in the registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack, cast

from torch import nn

from rankwise.calibration.activations import Data, each_input_moments, output_moments
from rankwise.calibration.inputs import samples_in
from rankwise.core.layer import Coverage
from rankwise.core.slicing import Folds, Slices
from rankwise.data.loaders import clean
from rankwise.data.named import load_for
from rankwise.decompositions import DECOMPOSITIONS, NOTHING, OUTPUTS, PLAIN, Target, of
from rankwise.decompositions.base import relative
from rankwise.decompositions.output_error import variance
from rankwise.errors import RankwiseError
from rankwise.planning import planner
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Plan
from rankwise.planning.planner import Settings, find_plan
from rankwise.planning.table import Progress, Table, Weights, build, module_weights
from rankwise.pruning.filters import Filters
from rankwise.surgery.coverage import find_layers
from rankwise.surgery.forward import Example, side_of

# Calibration inputs where nobody says how many: of images that a ResNet50 takes about a thousand.
WORK, FEWEST, MOST = 4e12, 64, 1024


@dataclass(frozen=True)
class Method:
    """A way to decide: what it is, and the settings it stands for; `Filters` for methods that remove filters."""

    name: str
    about: str
    settings: Settings | Filters


class SearchChanges(TypedDict, total=False):
    """Settings of methods that are no folds or slices; see `SettingChanges`."""

    error: str | None  # of a layer: bound, rss, max, exact, energy, convex, residual, output or effect
    search: str | None  # how the budget is split: sum, minimax, alternate, penalty, product or constant
    seed: int | None  # of random starts
    starts: int | None  # random starts of the search `alternate`, and of clusters
    decompositions: Iterable[str] | None  # which ones may be chosen; see rankwise.decompositions
    clustering: str | None  # for messi
    never_slower: bool | None  # a layer stays whole unless its replacement was measured to be faster
    rank_multiple: int | Literal["measured"] | None  # ranks are multiples of it
    score: str | None  # for ft and pfp: what a filter is worth, norm or sensitivity


class SettingChanges(SearchChanges, total=False):
    """Settings of a method as keywords. A keyword replaces the setting; None leaves it as the method has it."""

    folds: Folds | None  # "all", or schemes such as (0, 3)
    slices: Slices | None  # "all", "any", a number or several
    groups: Slices | None  # another name of slices


class TableOptions(SearchChanges, total=False):
    """What `build_table` takes beside the model, an example, folds and slices."""

    groups: Slices  # another name of slices
    exclude: Iterable[str] | str  # names or patterns of layers to leave alone
    progress: Progress | None  # called with a layer's name, how many are done, and how many there are
    data: Data | str | None  # calibration inputs, or the name of a data set
    input: int | str | None  # which part of a batch of the data the network takes


def _register(*methods: Method) -> dict[str, Method]:
    return {m.name: m for m in methods}


AUTO = Settings(error="convex")  # of weights; with inputs it is `effect` (compression/basis.py)
_ALDS = Settings(folds=(0,), slices="all", error="bound", search="alternate")
_ONE = replace(_ALDS, slices=1)

METHODS: dict[str, Method] = _register(
    Method("alds", "Algorithm 1 of the paper: slices and ranks by the largest error bound", _ALDS),
    Method("alds+", "alds that also chooses among the four folds", replace(_ALDS, folds="all")),
    Method("alds-error", "alds with a fixed number of slices (3)", replace(_ALDS, slices=3, search="minimax")),
    Method(
        "alds-simple",
        "a fixed number of slices (3), the same keep in every layer",
        replace(_ALDS, slices=3, search="constant"),
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
    *(
        Method(
            name,
            one.about,
            replace(_ONE, **vars(one.alone), decompositions=(name,)),
        )
        for name, one in DECOMPOSITIONS.items()
        if one.alone is not None
    ),
    Method(
        "ft",
        "removes the filters with the smallest ℓ1 norm, the same share everywhere",
        Filters(score="norm", search="constant"),
    ),
    Method(
        "pfp",
        "removes the channels with the smallest sensitivity over calibration data, shares by its error guarantee",
        Filters(score="sensitivity", search="sampling"),
    ),
    Method("auto", "the best we know: least total effect on the network's outputs, all folds and slices", AUTO),
)


def get_method(name: str) -> Method:
    if name not in METHODS:
        raise RankwiseError(f"unknown method {name!r}: the methods are {', '.join(METHODS)}")
    return METHODS[name]


def settings_for(method: str, **changes: Any) -> Settings | Filters:
    """A method's settings with some of them replaced; None leaves one as it is. `groups` is another name of slices."""
    settings, given = get_method(method).settings, {k: v for k, v in changes.items() if v is not None}
    if "groups" in given and "slices" in given:
        raise RankwiseError("slices= and groups= were given, which are the same: give slices= only")
    given = {"slices" if key == "groups" else key: value for key, value in given.items()}
    known = set(type(settings).__dataclass_fields__)
    unknown = sorted(set(given) - known)
    if unknown and isinstance(settings, Filters) and unknown[0] in Settings.__dataclass_fields__:
        raise RankwiseError(
            f"the method {method!r} removes filters and decomposes nothing, so {unknown[0]}= means nothing to it: "
            f"leave it out, or use another method"
        )
    if unknown:
        raise RankwiseError(f"unknown setting {unknown[0]!r}: the settings are {', '.join(sorted(known))}")
    return replace(settings, **given)


def needs_data(settings: Settings | Filters) -> bool:
    """Whether a method looks at activations."""
    if isinstance(settings, Filters):
        return settings.needs_data
    looks = any(DECOMPOSITIONS[name].needs != NOTHING for name in settings.decompositions)
    return looks or settings.error in ("output", "effect")


def needs_budget(settings: Settings | Filters) -> bool:
    """A decomposition that reads its ranks from the weights can do without one."""
    return isinstance(settings, Filters) or planner.needs_budget(settings)


def build_table(
    model: nn.Module,
    example: Example | None = None,
    folds: Folds = "all",
    slices: Slices = "all",
    **options: Unpack[TableOptions],
) -> Table:
    """What every option of every layer costs and loses, for any number of budgets.

    Args:
        model: any network.
        example: an input, which budgets in macs need.
        folds: which ways to make a matrix of a kernel: "all", or schemes such as (0, 3).
        slices: how many slices of the channels: "all" divisors of their number, "any", a number or several.
        options: `exclude=` layers to leave alone; `data=` calibration inputs, `input=` the part of a batch;
            `decompositions=` are svd, and with data pca, unless others are named; with error="output" all of them are
            measured on the data. See `TableOptions`.

    Returns:
        A `Table`: give it to `allocate`, or save it.

    >>> import torch, rankwise as rw
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval()
    >>> x = torch.randn(1, 3, 8, 8)
    >>> table = rw.build_table(model, x)
    >>> [round(rw.allocate(table, rw.Budget(params=keep)).keep(), 1) for keep in (0.8, 0.5)]
    [0.8, 0.5]
    """
    changes = cast(dict[str, Any], dict(options))
    exclude, progress, data = changes.pop("exclude", ()), changes.pop("progress", None), changes.pop("data", None)
    slices, part = changes.pop("groups", slices), changes.pop("input", None)
    coverage = find_layers(model, example, exclude)
    decompositions, error = changes.pop("decompositions", None), changes.pop("error", None) or "energy"
    if decompositions is None:
        seen = () if data is None else (name for name, one in DECOMPOSITIONS.items() if one.needs == OUTPUTS)
        decompositions = (PLAIN.name, *seen)
    others = settings_for("auto", **changes)
    assert isinstance(others, Settings), "auto decomposes"
    settings = replace(others, folds=folds, slices=slices, decompositions=tuple(decompositions), error=error)
    return table_for(model, coverage, settings, calibration(data, model, example, part), progress)


def table_for(
    model: nn.Module, coverage: Coverage, settings: Settings, data: Data | None = None, progress: Progress | None = None
) -> Table:
    """What the settings need: spectra of the weights, and components of the outputs over the data."""
    if data is None and needs_data(settings):
        raise no_data(settings)
    if isinstance(data, Iterator) and settings.error == "output":
        data = list(data)  # read more than once
    weights = module_weights(model, coverage)
    table = build(coverage, weights, settings.selection, settings.decompositions, progress)
    seeing = [DECOMPOSITIONS[name] for name in settings.decompositions if DECOMPOSITIONS[name].needs == OUTPUTS]
    if seeing and data is not None:
        table.moments = output_moments(model, data, coverage.layers)
        for layer in coverage.layers:
            seen = table.moments[layer.name]
            if seen.count:  # a layer that the data does not reach has no components: it stays as it is
                target = Target(layer, weights[layer.name], outputs=seen)
                for one in seeing:
                    table.add(layer, one.score(target, settings.selection))
    if settings.error == "output" and data is not None and len(seeing) < len(settings.decompositions):
        _measure_outputs_(table, model, weights, data)
    return table


def no_data(settings: Settings) -> RankwiseError:
    what = next((d for d in settings.decompositions if DECOMPOSITIONS[d].needs != NOTHING), settings.error)
    return RankwiseError(
        f"{what!r} looks at what flows through the layers, and no calibration data was given: "
        f"pass data= (on the command line: --data)"
    )


def _measure_outputs_(table: Table, model: nn.Module, weights: Weights, data: Data) -> None:
    """Add the measure `output` to every option that comes from the weights; a layer at a time leaves memory again."""
    overlapping = [layer for layer in table.coverage.layers if layer.transposed]
    outputs = output_moments(model, data, overlapping) if overlapping else {}
    for layer, seen in each_input_moments(model, data, table.coverage.layers):
        mine = [o for name, o in (*table.spectra, *table.given) if name == layer.name and of(o).needs == NOTHING]
        if not seen.count:  # the data does not reach it, so its loss is not known
            for option in mine:
                table.spectra.pop((layer.name, option), None)
                table.given.pop((layer.name, option), None)
            continue
        target = Target(layer, weights[layer.name], inputs=seen, outputs=outputs.get(layer.name))
        whole = variance(target)
        for option in mine:
            lost = of(option).output_errors(target, [option])[option]
            table.given.setdefault((layer.name, option), {})["output"] = relative(lost, whole)


def calibration(
    data: Data | str | None,
    model: nn.Module,
    example: Example | None = None,
    part: int | str | None = None,
    count: int | None = 256,
    macs: int | None = None,
) -> Data | None:
    """Inputs out of what is given (data/loaders.py), or for a name such as "digits" evenly spaced training inputs.

    Without a `count` as many as pass the network, of so many `macs` for the example, in a minute or two.
    """
    if isinstance(data, str):
        return load_for(model, data, "calibration", side_of(example)).thin(count or affordable(example, macs))
    return None if data is None else cast(Data, clean(data, model, example, part))


def affordable(example: Example | None, macs: int | None) -> int:
    """How many calibration inputs the time allows: WORK multiply-adds, between FEWEST and MOST inputs."""
    each = (macs or 0) / max(1, samples_in(example)) if example is not None else 0.0
    return int(min(MOST, max(FEWEST, WORK / each))) if each > 0 else FEWEST


def allocate(
    table: Table, budget: Budget | None, method: str = "auto", model: str = "", **changes: Unpack[SettingChanges]
) -> Plan:
    """One choice for each layer, never above the budget.

    Args:
        table: what `build_table` gave.
        budget: what may remain; None for tucker2, which reads its ranks from the weights.
        method: a name of `rankwise.METHODS`.
        model: what the plan calls the network.
        changes: settings of the method to replace: error=, search=, slices=, seed= …; see `SettingChanges`.

    Returns:
        A `Plan`: give it to `apply_plan`, or save it.

    >>> import rankwise as rw
    >>> from torch import nn
    >>> table = rw.build_table(nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)))
    >>> len(rw.allocate(table, rw.Budget(params=0.7), "svd").choices)
    2
    """
    settings = settings_for(method, **changes)
    if isinstance(settings, Filters):
        raise RankwiseError(
            f"a table holds spectra and no graph of the network, which {method!r} needs: use rankwise.compress"
        )
    return find_plan(table, budget, settings, method, model)
