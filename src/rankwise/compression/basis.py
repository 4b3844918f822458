"""What plans are made from, whatever the budget: a table of errors, times, and what was seen on the way.

`auto` measures the effect on the network's outputs: on data, on synthetic inputs or on noise. Where none of them can be
had it looks at the weights alone, and the plan says why (`Plan.warnings`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from torch import nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from rankwise.calibration import effect_table
from rankwise.calibration.activations import Data
from rankwise.calibration.influence import Influence
from rankwise.calibration.inputs import Inputs, find_inputs
from rankwise.calibration.synthetic import NoInputs
from rankwise.core.layer import Coverage
from rankwise.core.moments import Moments
from rankwise.decompositions import FITTED, LOOKUPS, PLAIN
from rankwise.errors import RankwiseError
from rankwise.methods import needs_data, no_data, table_for
from rankwise.planning.budget import Budget
from rankwise.planning.findings import NATS
from rankwise.planning.plan import Plan, listed
from rankwise.planning.planner import Settings, find_plan
from rankwise.planning.table import Progress, Table
from rankwise.planning.times import Times
from rankwise.surgery.forward import Example, tensors_of

# Watches a stage of the work by its name: what is entered gets (name, done, total), if anything.
Watch = Callable[[str], AbstractContextManager[Progress | None]]
# Makes a table by calling its second argument, or knows it from before by these settings.
Tables = Callable[[Settings, Callable[[], Table]], Table]

ALONE = "this plan looks at the weights alone (least Σ of `convex` over layers)"
VOCABULARY = 1000  # rows of an embedding that are those of tokens


@dataclass(frozen=True, eq=False)
class Ground:
    """A network, its layers, an example input and calibration data, if there are any."""

    model: nn.Module
    example: Example | None
    coverage: Coverage
    data: Data | None = None
    watch: Watch | None = None
    tables: Tables | None = None

    def stage(self, name: str) -> AbstractContextManager[Progress | None]:
        return nullcontext() if self.watch is None else self.watch(name)


@dataclass(frozen=True, eq=False)
class Observations:
    """What building a plan needs beside the weights: moments of outputs, or inputs and the influence of layers."""

    moments: Mapping[str, Moments] = field(default_factory=dict)
    inputs: Inputs | None = None
    influence: Mapping[str, Influence] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Basis:
    """A table with the settings that it was made for, measured times where they were asked for, and what was seen."""

    table: Table
    settings: Settings
    times: Times | None
    seen: Observations
    warnings: tuple[str, ...] = ()

    def corrected(self, factors: Mapping[str, float]) -> Basis:
        """With effects of layers times a factor."""
        return replace(self, table=self.table.scaled("effect", factors)) if factors else self

    def plan(self, budget: Budget | None, method: str, name: str) -> Plan:
        self.table.times = self.times  # others may plan from the same table
        plan = find_plan(self.table, budget, self.settings, method, name).warned(*self.warnings)
        inputs = self.seen.inputs
        if inputs is None:
            return plan.warned(*_unreached(self.unseen, "calibration data"))
        first = next(iter(self.seen.influence.values()), None)
        variance, unit = (0.0, None) if first is None else (first.variance, NATS if first.nats else None)
        plan = replace(plan, search=replace(plan.search, inputs=inputs.kind, variance=variance, unit=unit))
        return plan.warned(*self._by_their_weights(plan, inputs))

    @property
    def unseen(self) -> list[str]:
        """Layers that the data does not reach: there is nothing to choose for them."""
        seen, table = self.seen.moments, self.table
        return [la.name for la in table.coverage.layers if not table.options(la) or _none(seen.get(la.name))]

    def _by_their_weights(self, plan: Plan, inputs: Inputs) -> list[str]:
        """Layers that could not be fitted to the inputs."""
        found, chosen = self.seen.influence, [choice.name for choice in plan.choices]
        wide = [name for name in chosen if not found[name].whole and found[name].count]
        said = []
        if wide:
            many = f"more than {effect_table.largest_for(inputs):,} inputs to a filter"
            said.append(f"{listed(wide)}: {many}, so these layers are decomposed by the SVD of their weights alone")
        if inputs.real:
            return said + _unreached([name for name, one in found.items() if not one.count], "calibration data")
        missed = [name for name in chosen if not found[name].count]
        if missed:
            said.append(f"the {inputs.kind} inputs do not reach {listed(missed)}: decomposed by their weights alone")
        return said


def make_basis(ground: Ground, settings: Settings, times: Times | None, free: bool) -> Basis:
    """What the settings ask for; if `auto` is `free` to choose, the best that the inputs allow."""
    if free:
        return _auto(ground, settings, times)
    if settings.error != "effect" and not set(FITTED) & set(settings.decompositions):
        return by_weights(ground, settings, times)
    if ground.data is None:
        raise no_data(settings)
    names = set(settings.decompositions)
    if settings.error != "effect" or not set(FITTED) & names or not names <= {*FITTED, PLAIN.name}:
        raise RankwiseError(
            f"error={settings.error!r} with decompositions={settings.decompositions!r} was asked for: 'effect' and "
            f"{' or '.join(map(repr, FITTED))} are known together only, and method='auto' with data= takes both"
        )
    return _by_effect(ground, settings, times, _inputs(ground, settings))


def by_weights(ground: Ground, settings: Settings, times: Times | None, *warnings: str) -> Basis:
    """From the weights, and for pca and errors of outputs from activations over the data."""
    data = ground.data if needs_data(settings) else None
    with ground.stage("layers") as report:

        def make() -> Table:
            return table_for(ground.model, ground.coverage, settings, data, report)

        table = make() if ground.tables is None else ground.tables(settings, make)
    return Basis(table, settings, times, Observations(table.moments), warnings)


def _auto(ground: Ground, settings: Settings, times: Times | None) -> Basis:
    wanted = replace(settings, error="effect", decompositions=(*FITTED, PLAIN.name))
    try:
        inputs = _inputs(ground, settings)
        if inputs.real and times is None and ground.coverage.embeddings:
            ground = replace(ground, coverage=ground.coverage.with_embeddings())
            wanted = replace(wanted, decompositions=(*wanted.decompositions, *LOOKUPS))
        return _by_effect(ground, wanted, times, inputs)
    except NoInputs as err:
        why = f"no data was given, and {err}"
    except LinAlgError as err:  # numbers that no shrinkage could save
        why = failed(err)
    except RankwiseError as err:
        if ground.data is not None:
            raise
        why = f"no data was given, and the effect of layers could not be measured without ({err})"
    return weights_alone(ground, settings, times, why)


def weights_alone(ground: Ground, settings: Settings, times: Times | None, why: str) -> Basis:
    """What `auto` does when nothing but weights is known, and the plan says so."""
    return by_weights(ground, settings, times, f"{why}: {ALONE}", *_ruinous(ground))


def _ruinous(ground: Ground) -> list[str]:
    """Weights alone say little of what networks of tokens do."""
    tables = (m.num_embeddings for m in ground.model.modules() if isinstance(m, nn.Embedding))
    if all(t.is_floating_point() for t in tensors_of(ground.example)) and max(tables, default=0) < VOCABULARY:
        return []
    return [
        "the network reads tokens, and by their weights alone such networks are mostly ruined: do not use the result "
        "before it is evaluated, or give text (--data text:FILE; in Python: data=)"
    ]


def _by_effect(ground: Ground, settings: Settings, times: Times | None, inputs: Inputs) -> Basis:
    with ground.stage("layers") as report:
        table, influence = effect_table.effect_table(ground.model, ground.coverage, settings, inputs, report)
    return Basis(table, settings, times, Observations({}, inputs, influence))


def _inputs(ground: Ground, settings: Settings) -> Inputs:
    return find_inputs(ground.model, ground.example, ground.data, ground.coverage.macs, settings.seed)


def _none(seen: Moments | None) -> bool:
    return seen is not None and not seen.count


def _unreached(names: list[str], what: str) -> list[str]:
    return [f"the {what} does not reach {listed(names)}: left whole"] if names else []


def failed(err: LinAlgError) -> str:
    return f"calibration failed ({(str(err).splitlines() or [''])[0]})"
