"""What a plan states and what its network does, made to agree.

The effect of a layer is of second order and takes the other layers as whole. That is close for small errors, and can be
several times too low for large ones: of an embedding, of thin layers in deep chains. So the network of a plan is built
in closed form and run on inputs that are held out for such questions. If its outputs change by something else than the
sum of effects says, groups of layers are run alone, the curves of a group are multiplied by what was measured over what
was stated, and the plan is made again: a few forward passes of a few inputs. Of all plans on the way the one whose
network changes the outputs least is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from rankwise.calibration.answers import change_of, changes_of
from rankwise.calibration.fit import Closed, part_of
from rankwise.calibration.influence import Influence
from rankwise.calibration.inputs import Inputs
from rankwise.calibration.judge import LEAST, LITTLE, variance_in
from rankwise.core.layer import LOOKUP, Layer
from rankwise.planning.plan import Plan

OFF = 1.5  # a statement that is off by less is left as it is
ROUNDS = 2  # plans after the first one
GROUPS = 3  # of layers that are no embeddings, in the order of the network, with equal shares of the stated change
FEW = 16  # images that groups are run on, or an eighth as many texts
FARTHEST = 10.0  # what is measured of one group says no more than that of its layers

Factors = Mapping[str, float]  # by layer; of those that are not named it is 1


@dataclass(frozen=True, eq=False)
class PlanTrial:
    """A plan for corrected effects, its network in closed form, and how much that changes the outputs."""

    plan: Plan
    factors: Factors
    closed: Closed
    change: float

    @property
    def stated(self) -> float:
        return self.plan.search.objective or 0.0

    @property
    def effects(self) -> dict[str, float]:
        """By layer, without corrections."""
        return {c.name: c.error["effect"] / self.factors.get(c.name, 1.0) for c in self.plan.choices}

    @property
    def agrees(self) -> bool:
        return max(self.change, self.stated) < LITTLE or 1 / OFF <= self.change / max(self.stated, 1e-300) <= OFF


@dataclass(frozen=True, eq=False)
class Agreement:
    """The loop, for one network and what was seen of it."""

    model: nn.Module
    layers: Mapping[str, Layer]
    inputs: Inputs
    influence: Mapping[str, Influence]

    @property
    def possible(self) -> bool:
        """Whether there are inputs to measure on."""
        return len(self.inputs.check) >= LEAST and variance_in(self.influence) > 0

    def found(self, make: Callable[[Factors], Plan], build: Callable[[Plan], Closed]) -> PlanTrial:
        """`make` gives the plan for corrected effects, `build` its network."""

        def tried(factors: Factors) -> PlanTrial:
            plan = make(factors)
            closed = build(plan)
            change = change_of(self.model, closed.network, self.inputs.check, self._variance)
            return PlanTrial(plan, factors, replace(closed, change=change), change)

        best = trial = tried({})
        for _ in range(ROUNDS):
            if trial.agrees:
                break
            trial = tried(self._corrected(trial))
            best = min(best, trial, key=lambda one: one.change)
        search = replace(best.plan.search, expected=best.change)
        if trial.factors:
            search = replace(search, objective=best.change, uncorrected=sum(best.effects.values()))
        return replace(best, plan=replace(best.plan, search=search))

    @property
    def _variance(self) -> float:
        return variance_in(self.influence)

    def _corrected(self, trial: PlanTrial) -> dict[str, float]:
        """For each group what it does alone over what was stated of it; the mean of these for layers that are whole."""
        effects = trial.effects
        groups = grouped(self.layers, effects)
        networks = [
            part_of(self.model, trial.closed, [self.layers[name] for name in group], self.influence) for group in groups
        ]
        check = self.inputs.check
        changes = changes_of(self.model, networks, check.first(FEW if check.of_images else FEW // 8), self._variance)
        stated = [sum(effects[name] for name in group) for group in groups]
        inner = [i for i, group in enumerate(groups) if self.layers[group[0]].kind != LOOKUP]
        usual = _quotient(sum(changes[i] for i in inner), sum(stated[i] for i in inner))
        found = {name: usual for name, layer in self.layers.items() if layer.kind != LOOKUP}
        for group, change, said in zip(groups, changes, stated, strict=True):
            found.update(dict.fromkeys(group, _quotient(change, said)))
        return found


def _quotient(change: float, stated: float) -> float:
    return min(FARTHEST, max(1 / FARTHEST, change / stated)) if stated > 0 else 1.0


def grouped(layers: Mapping[str, Layer], effects: Mapping[str, float]) -> list[list[str]]:
    """Embeddings together, and the other layers in groups of neighbours with about equal effects."""
    lookups = [name for name in effects if layers[name].kind == LOOKUP]
    others = [name for name in effects if layers[name].kind != LOOKUP]
    whole, sum_before = sum(effects[name] for name in others), 0.0
    groups: list[list[str]] = [[] for _ in range(GROUPS)]
    for name in others:
        groups[min(GROUPS - 1, int(GROUPS * sum_before / whole)) if whole > 0 else 0].append(name)
        sum_before += effects[name]
    return [group for group in (lookups, *groups) if group]
