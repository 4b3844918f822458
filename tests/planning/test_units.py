"""Units of budgets: the registry is all there is, a new unit works everywhere, and Budget is the value it was."""

from __future__ import annotations

import ast
import copy
import gc
import pickle
from dataclasses import FrozenInstanceError, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rankwise as rw
from rankwise.cli import show
from rankwise.cli.flags import budget_help, read_budget
from rankwise.decompositions import costs
from rankwise.methods import settings_for
from rankwise.planning.planner import SEARCHES, find_plan
from rankwise.planning.times import Times
from rankwise.planning.units import LATENCY, MACS, PARAMS, UNITS, Unit
from rankwise.timing import tune
from rankwise.timing.clock import Measured
from rankwise.training.limits import smallest
from sentences import check_sentence

# A unit that follows from another, and one in which some layers cost nothing.
BYTES = Unit("bytes", lambda c, t: 4 * c.params, lambda la, t: 4 * la.params, lambda la, o, t: 4 * costs(la, o)[0])
CONVOLVED = Unit(
    "convolved",
    lambda c, t: sum(la.params for la in c.layers if la.kernel),
    lambda la, t: la.params if la.kernel else 0,
    lambda la, o, t: costs(la, o)[0] * (1 if la.kernel else 0),
)


@pytest.fixture
def bytes_(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNITS, "bytes", BYTES)  # the one line in the registry


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 16, 3), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(16, 30), nn.Linear(30, 20)),
        )


def table() -> rw.Table:
    return rw.build_table(network(), torch.zeros(1, 3, 8, 8))


# ---- a new unit ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("bytes_")
@pytest.mark.parametrize("search", SEARCHES)
def test_a_plan_in_bytes_is_the_plan_in_params(search: str) -> None:
    """Four bytes each: the same shares, and the same plan."""
    ready = table()
    settings = settings_for("auto", search=search)
    for keep in (0.5, 0.7):
        ours = find_plan(ready, rw.Budget(bytes=keep), settings, "auto")
        theirs = find_plan(ready, rw.Budget(params=keep), settings, "auto")
        assert ours.layers == theirs.layers
        assert ours.search.other["bytes"]["after"] == 4 * ours.after.params <= keep * 4 * ours.before.params
        assert ours.keep("bytes") == theirs.keep("params") == ours.keep()
        assert rw.Plan.loads(ours.dumps()) == ours


@pytest.mark.usefixtures("bytes_")
def test_a_new_unit_goes_with_others_and_through_every_door(tmp_path: Path) -> None:
    model, ready = network(), table()
    budget = read_budget(None, ["bytes=0.6", "macs=0.7"])
    assert budget == rw.Budget(macs=0.7, bytes=0.6)
    assert budget.units == ("macs", "bytes")
    plan = rw.allocate(ready, budget)
    assert plan.keep("bytes") <= 0.6
    assert plan.keep("macs") <= 0.7
    assert sum(4 * p.numel() for p in rw.apply_plan(model, plan).parameters()) == plan.search.other["bytes"]["after"]
    rw.save(rw.apply_plan(model, plan), plan, tmp_path / "out")
    assert rw.Plan.load(tmp_path / "out" / "plan.json") == plan
    assert plan.budget.to_json() == {"macs": 0.7, "bytes": 0.6}
    assert str(budget) == "macs 0.7, bytes 0.6"
    titles = list(show.before_after_grid(plan).columns[0].cells)
    assert titles == ["params", "macs", "bytes"]

    def make(asked: rw.Budget) -> tuple[nn.Module, rw.Plan]:
        found = rw.allocate(ready, asked)
        return rw.apply_plan(model, found), found

    _, least, trials = smallest(make, lambda small: 0.0, 0.0, 1.0, unit="bytes")
    assert least.keep("bytes") == min(t.keep for t in trials if t.keep is not None)


@pytest.mark.usefixtures("bytes_")
def test_errors_speak_of_the_new_unit() -> None:
    ready = table()
    said = check_sentence(lambda: rw.allocate(ready, rw.Budget(bytes=5)))
    assert "at most 5 bytes are asked for" in said
    least = int(said.split("least possible is ")[1].split(" (")[0].replace(",", ""))
    keep = float(said.split("(keep ")[1].split(")")[0])
    assert rw.allocate(ready, rw.Budget(bytes=least)).search.other["bytes"]["after"] == least
    assert rw.allocate(ready, rw.Budget(bytes=keep)).search.other["bytes"]["after"] >= least
    assert "bytes=VALUE" in check_sentence(lambda: read_budget(None, ["grams=3"]))
    assert "bytes=0.0" in check_sentence(lambda: rw.Budget(bytes=0.0))
    assert "bytes" in check_sentence(lambda: rw.allocate(ready, rw.Budget(params=0.9)).keep("bytes"))


@pytest.mark.usefixtures("bytes_")
def test_help_lists_the_new_unit() -> None:
    assert "bytes (a fraction or a count)" in budget_help()
    assert "latency (a fraction)" in budget_help()


def test_a_plan_is_timed_for_any_unit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """`settle` asks the registry which unit is measured, and knows none by its name."""
    monkeypatch.setitem(UNITS, "waiting", replace(LATENCY, name="waiting"))
    monkeypatch.setattr(tune, "time_networks", lambda *given: [Measured((1.0,)), Measured((next(took),))])
    model, ready = network(), rw.build_table(network(), torch.zeros(1, 3, 8, 8), folds=0, slices=1)
    layers = [la.name for la in ready.coverage.layers]
    pairs = {
        (la.name, o.fold, o.slices): ((1, 9), (1e-3, 2e-2)) for la in ready.coverage.layers for o in ready.options(la)
    }
    ready.times = Times(0.0, dict.fromkeys(layers, 0.01), pairs)
    took, asked = iter([0.9, 0.58]), []

    def make(budget: rw.Budget) -> rw.Plan:
        asked.append(budget.waiting)
        return rw.allocate(ready, budget)

    plan = tune.settle(rw.Budget(waiting=0.6), make, model, torch.zeros(1, 3, 8, 8), rw.Timing())
    assert asked == [0.6, pytest.approx(0.6 * tune.AIM * 0.6 / 0.9)]
    assert plan.budget == rw.Budget(waiting=0.6)
    assert plan.search.latency is not None
    assert plan.search.latency.measured == 0.58


def test_filters_are_not_counted_in_a_new_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_pruning")
    monkeypatch.setitem(UNITS, "bytes", BYTES)
    from rankwise.methods import METHODS
    from rankwise.pruning.filters import Filters, plan_filters

    settings = METHODS["ft"].settings
    assert isinstance(settings, Filters)
    model, example = network(), torch.zeros(1, 3, 8, 8)
    coverage = rw.find_layers(model, example)
    message = check_sentence(lambda: plan_filters(model, example, coverage, settings, rw.Budget(bytes=0.5), "ft"))
    assert "bytes" in message


def test_layers_that_have_nothing_of_a_unit_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNITS, "convolved", CONVOLVED)
    ready = table()
    plan = rw.allocate(ready, rw.Budget(convolved=0.6))
    kinds = {la.name: la.kind for la in ready.coverage.layers}
    assert {kinds[c.name] for c in plan.choices} == {"Conv2d"}
    assert plan.keep("convolved") <= 0.6
    both = rw.allocate(ready, rw.Budget(convolved=0.9, params=0.5))
    assert both.keep("convolved") <= 0.9
    assert both.keep("params") <= 0.5


def test_a_unit_that_cannot_be_counted_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = replace(BYTES, name="nothing", whole=lambda c, t: None, unknown="nothing is unknown: count it first")
    monkeypatch.setitem(UNITS, "nothing", nothing)
    assert check_sentence(lambda: rw.allocate(table(), rw.Budget(nothing=0.5))) == nothing.unknown


@given(value=st.integers(1, 10_000), total=st.integers(1, 10**6), unit=st.sampled_from([PARAMS, LATENCY]))
def test_the_fraction_that_is_stated_is_enough_and_not_much_more(value: int, total: int, unit: Unit) -> None:
    """`keep_for` turns `limit` round: what it states allows the count, and nearly as little would not do."""
    count = max(1, value * total // 10_000)
    keep = unit.keep_for(count, total)
    assert unit.limit(keep, total) >= count or keep > 1
    assert unit.limit(max(1e-4, keep - 3e-4), total) <= max(count, unit.limit(1e-4, total)) + 4


# ---- the registry decides, and nobody else ---------------------------------------------------------------


def test_nobody_else_compares_names_of_units() -> None:
    """No `unit == "latency"`, no `"macs" in units`, anywhere in the source but in the registry."""
    source = Path(rw.__file__).parent
    found = []
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            words = (
                [c.value for c in ast.walk(node) if isinstance(c, ast.Constant)]
                if isinstance(node, ast.Compare)
                else []
            )
            if set(map(str, words)) & {"params", "macs", "latency"}:
                found.append(f"{path.relative_to(source)}:{node.lineno} {ast.unparse(node)}")
    assert found == []


def test_the_registry_knows_units_by_their_names() -> None:
    assert list(UNITS) == ["params", "macs", "latency"]
    assert all(unit.name == name for name, unit in UNITS.items())
    assert [UNITS[name] for name in UNITS] == [PARAMS, MACS, LATENCY]


# ---- Budget is the value it was --------------------------------------------------------------------------


def test_a_budget_is_a_frozen_dataclass_with_three_fields_of_its_own() -> None:
    budget = rw.Budget(params=0.4)
    assert is_dataclass(budget)
    assert repr(budget) == "Budget(params=0.4, macs=None, latency=None)"
    assert rw.Budget(0.4, 0.5) == rw.Budget(params=0.4, macs=0.5)
    assert (budget.params, budget.macs, budget.latency) == (0.4, None, None)
    with pytest.raises(FrozenInstanceError):
        budget.params = 0.5  # type: ignore[misc]
    with pytest.raises(AttributeError):
        _ = budget.grams
    assert "grams" in check_sentence(lambda: rw.Budget(grams=0.5))


VALUES: Any = st.one_of(st.none(), st.floats(0.01, 1), st.integers(2, 10**9))


@given(params=VALUES, macs=VALUES, latency=st.one_of(st.none(), st.floats(0.01, 1)), extra=VALUES)
def test_budgets_are_values(params: Any, macs: Any, latency: Any, extra: Any) -> None:
    """Equal if and only if all units are; copied, pickled, replaced and written down without loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(UNITS, "bytes", BYTES)
        given_ = {"params": params, "macs": macs, "latency": latency, "bytes": extra}
        if all(v is None for v in given_.values()):
            return
        one = rw.Budget(**given_)
        assert {u: getattr(one, u) for u in given_} == given_
        assert (
            one == rw.Budget(**one.to_json()) == copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == replace(one)
        )
        assert hash(one) == hash(replace(one))
        assert eval(repr(one), {"Budget": rw.Budget}) == one
        other = replace(one, latency=0.123, bytes=77)
        assert (other.params, other.macs, other.latency, other.bytes) == (params, macs, 0.123, 77)
        assert (other == one) == (latency == 0.123 and extra == 77)


# ---- times that change -----------------------------------------------------------------------------------


def test_menus_follow_the_times_that_a_table_has_now() -> None:
    """Times that are gone may leave their address to others; a table must not mistake these for them."""
    ready = table()
    layers = [la.name for la in ready.coverage.layers]

    def times(slow: str) -> Times:
        pairs = {}
        for la in ready.coverage.layers:
            for o in ready.options(la):
                ranks = (1, 2, 64)
                seconds = np.array(ranks) * (1.0 if la.name == slow else 1e-3)
                pairs[la.name, o.fold, o.slices] = (ranks, tuple(seconds.tolist()))
        return Times(0.0, dict.fromkeys(layers, 0.01), pairs)

    for _ in range(20):
        for slow in layers[:2]:
            ready.times = None
            gc.collect()  # the memory of the times before is free now
            ready.times = times(slow)
            plan = rw.allocate(ready, rw.Budget(latency=0.9))
            assert slow not in {c.name for c in plan.choices}
            assert plan.choices


@pytest.mark.usefixtures("bytes_")
def test_a_new_unit_is_a_keyword_of_compress() -> None:
    small, plan = rw.compress(network(), method="alds", bytes=0.6)
    theirs = rw.compress(network(), method="alds", keep=0.6)[1]
    assert plan.layers == theirs.layers
    assert sum(4 * p.numel() for p in small.parameters()) == 4 * plan.after.params
    assert plan.budget == rw.Budget(bytes=0.6)
