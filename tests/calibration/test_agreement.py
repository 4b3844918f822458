"""What a plan states agrees with what its network does on inputs that are held out, or the plan is made again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.calibration import agreement
from rankwise.calibration.agreement import GROUPS, OFF, Agreement, grouped
from rankwise.calibration.answers import change_of
from rankwise.calibration.fit import Closed, fit_closed, fit_in_order, part_of
from rankwise.compression import Compression, Request
from rankwise.core.layer import LOOKUP
from rankwise.planning.plan import Plan

KEEP = rw.Budget(params=0.75)


def network(between: type[nn.Module] = nn.Tanh) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), between(), nn.Linear(32, 32), between(), nn.Linear(32, 12)).eval()


def data() -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return list((torch.randn(480, 24, generator=random) * 0.85 ** torch.arange(24)).split(60))


class Doubted:
    """A job whose effects of one layer are wrong by a factor before they are corrected."""

    def __init__(self, wrong: Mapping[str, float], between: type[nn.Module] = nn.Tanh) -> None:
        self.model, batches = network(between), data()
        self.job = Compression(self.model, batches[0][:1], Request(), batches)
        self.wrong, self.basis = wrong, self.job.basis(KEEP)
        seen = self.basis.seen
        assert seen.inputs is not None
        self.inputs, self.influence = seen.inputs, seen.influence
        self.layers = {layer.name: layer for layer in self.basis.table.coverage.layers}
        self.agreement = Agreement(self.model, self.layers, self.inputs, self.influence)
        self.made: list[dict[str, float]] = []

    def make(self, factors: Mapping[str, float]) -> Plan:
        self.made.append(dict(factors))
        both = {name: self.wrong.get(name, 1.0) * factors.get(name, 1.0) for name in self.layers}
        return self.basis.corrected(both).plan(KEEP, "auto", "net")

    def build(self, plan: Plan) -> Closed:
        return fit_closed(self.model, plan, self.inputs, self.influence)

    def change(self, plan: Plan) -> float:
        variance = next(iter(self.influence.values())).variance
        return change_of(self.model, self.build(plan).network, self.inputs.check, variance)


def test_a_statement_that_is_right_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what is taken for right: layers in a row lose the same directions, so too much is stated."""
    monkeypatch.setattr(agreement, "OFF", 5.0)
    right = Doubted({}, nn.Identity)
    found = right.agreement.found(right.make, right.build)
    assert right.made == [{}]
    assert found.plan.search.uncorrected is None
    assert found.plan.search.objective == right.make({}).search.objective
    assert found.plan.search.expected == found.change == pytest.approx(right.change(found.plan))


def test_wrong_effects_are_corrected_by_what_groups_do() -> None:
    """Nine times too small for one layer, so that it is cut to nothing first."""
    doubted = Doubted({"2": 1 / 9})
    first = doubted.make({})
    found = doubted.agreement.found(doubted.make, doubted.build)
    stated, before = found.plan.search.objective, doubted.change(first)
    assert stated == found.change == pytest.approx(doubted.change(found.plan))
    assert found.change < before / OFF, "the budget goes elsewhere"
    assert found.plan.search.uncorrected == pytest.approx(sum(found.effects.values()))
    assert found.plan.keep("params") <= 0.75
    assert len(doubted.made) > 2
    assert max(doubted.made[-1].values()) > 5


def test_plan_and_network_of_a_job_say_the_same() -> None:
    model, batches = network(), data()
    job = Compression(model, batches[0][:1], Request(), batches)
    plan = job.plan(KEEP)
    assert plan.search.expected == plan.search.stated is not None
    again = Compression(model, batches[0][:1], Request(), batches)
    one, other = job.run(KEEP), again.build(again.plan(KEEP))
    for name, weight in other[0].state_dict().items():
        assert torch.equal(weight, one[0].state_dict()[name]), "whether a network was kept from planning or not"


def test_a_part_of_a_network_changes_nothing_else() -> None:
    doubted = Doubted({})
    plan = doubted.make({})
    closed = doubted.build(plan)
    names = [choice.name for choice in plan.choices]
    part = part_of(doubted.model, closed, [doubted.layers[names[0]]], doubted.influence)
    assert isinstance(part.get_submodule(names[0]), nn.Sequential)
    assert all(isinstance(doubted.model.get_submodule(name), nn.Linear) for name in names)
    assert all(isinstance(part.get_submodule(name), nn.Linear) for name in names[1:])
    whole = part_of(doubted.model, closed, [doubted.layers[name] for name in names], doubted.influence)
    assert torch.equal(whole(data()[0]), closed.network(data()[0]))


def test_groups_are_neighbours_with_equal_shares() -> None:
    layers = Doubted({}).layers
    some = next(iter(layers.values()))
    many = {f"{i}": replace(some, name=f"{i}") for i in range(9)} | {"e": replace(some, name="e", kind=LOOKUP)}
    found = grouped(many, {"e": 5.0, **{f"{i}": 1.0 for i in range(9)}})
    assert found == [["e"], ["0", "1", "2"], ["3", "4", "5"], ["6", "7", "8"]]
    assert grouped(many, {"0": 9.0, "1": 0.0, "2": 0.0}) == [["0"], ["1", "2"]]
    assert grouped(many, {"0": 0.0}) == [["0"]]
    assert len(grouped(many, dict.fromkeys("012345678", 1.0))) == GROUPS


def test_few_pairs_beside_an_embedding_are_not_fitted_in_order() -> None:
    doubted = Doubted({})
    closed = replace(doubted.build(doubted.make({})), change=0.5)
    assert closed.share == 1
    fitted = fit_in_order(doubted.model, replace(closed, share=0.1), doubted.inputs, doubted.influence)
    assert fitted.network is closed.network
    assert (fitted.change, fitted.in_order) == (0.5, False)
    assert fit_in_order(doubted.model, closed, doubted.inputs, doubted.influence).in_order


def test_a_part_of_a_network_with_computed_weights() -> None:
    """Old weight norm keeps a tensor that deepcopy refuses."""
    doubted = Doubted({})
    closed = doubted.build(doubted.make({}))
    torch.nn.utils.weight_norm(doubted.model[4])
    part = part_of(doubted.model, closed, [doubted.layers["0"]], doubted.influence)
    assert part.get_submodule("4").weight_g is doubted.model[4].weight_g
    assert part(data()[0]).shape == (60, 12)
