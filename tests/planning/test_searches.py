"""Searches against brute force: what is called optimal is, what is called a gap is one, and budgets hold."""

from __future__ import annotations

import importlib
import math
import re
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rankwise as rw
from rankwise.core.measures import MEASURES, Curve
from rankwise.core.option import Option
from rankwise.planning import hull, knapsack, walks
from rankwise.planning import table as table_module
from rankwise.planning.menu import Menu, Offer, Point
from rankwise.planning.minimax import Solution
from rankwise.planning.planner import SEARCHES, Settings
from sentences import check_sentence
from strategies import DATA_FREE
from targets import unit_cost

searches = importlib.import_module("rankwise.planning.minimax")  # as an attribute of the package it is the function

UNITS = [("params",), ("macs",), ("params", "macs")]
FEW = settings(deadline=None, max_examples=25)
MANY = settings(deadline=None, max_examples=150)
Points = list[tuple[tuple[int, ...], float]]


# ---- small problems --------------------------------------------------------------------------------------


def network(seed: int, convs: int = 2) -> nn.Module:
    """`convs` tiny convolutions of random sizes and a linear layer; batch norm so that not all is up for decision."""
    rng = np.random.default_rng(seed)
    parts: list[nn.Module] = []
    channels = 2
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for _ in range(convs):
            filters = int(rng.integers(2, 6))
            kernel = [(1, 1), (2, 2), (3, 1), (1, 2), (2, 3)][rng.integers(5)]
            parts += [
                nn.Conv2d(channels, filters, kernel, stride=int(rng.integers(1, 3)), padding=1),
                nn.BatchNorm2d(filters),
            ]
            channels = filters
        parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, int(rng.integers(3, 8)))]
        model = nn.Sequential(*parts)
        # Real weights have falling spectra; flat ones make every choice look alike.
        for layer in model:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.weight.data *= (
                    torch.rand(layer.weight.shape[0]).pow(2).reshape(-1, *[1] * (layer.weight.ndim - 1))
                )
    return model


def table_of(seed: int, convs: int = 2, **options: Any) -> rw.Table:
    return rw.build_table(network(seed, convs), torch.randn(1, 2, 6, 6), **options)


def every_point(table: rw.Table, units: tuple[str, ...], measure: str) -> list[Points]:
    """For each layer: dense, and every option at every rank that is smaller in every unit (cost, error)."""
    found = []
    for layer in table.coverage.layers:
        dense = tuple(getattr(layer, u) for u in units)
        points = [(dense, 0.0)]
        for option in table.options(layer):
            unit = [getattr(unit_cost(layer, option), u) for u in units]
            errors = table.curve(layer, option, measure).values()
            for rank in range(1, len(errors)):
                cost = tuple(rank * u for u in unit)
                if all(c < d for c, d in zip(cost, dense, strict=True)):
                    points.append((cost, float(errors[rank])))
        found.append(points)
    return found


def fixed_part(table: rw.Table, units: tuple[str, ...]) -> list[int]:
    """What no decision changes."""
    return [getattr(table.coverage, u) - sum(getattr(la, u) for la in table.coverage.layers) for u in units]


def brute_force(layers: list[Points], room: list[int], join: Any) -> float | None:
    """The least value of `join` over all errors (np.maximum or np.add), of all combinations that fit the room."""
    errors = reduce(join.outer, [np.array([e for _, e in points]) for points in layers])
    fits = np.ones(errors.shape, dtype=bool)
    for u, most in enumerate(room):
        fits &= reduce(np.add.outer, [np.array([c[u] for c, _ in points]) for points in layers]) <= most
    return float(errors[fits].min()) if fits.any() else None


def limits_for(table: rw.Table, units: tuple[str, ...], measure: str, shares: list[float]) -> list[int]:
    """Limits between the least and the whole, for each unit; above 1, so that they are counts."""
    limits = []
    for u, (fixed, share) in enumerate(zip(fixed_part(table, units), shares, strict=False)):
        layers = every_point(table, units, measure)
        least, whole = (fixed + sum(f(c[u] for c, _ in points) for points in layers) for f in (min, max))
        limits.append(max(2, math.floor(least + share * (whole - least))))
    return limits


def plan_of(table: rw.Table, units: tuple[str, ...], limits: list[int], **changes: Any) -> rw.Plan | None:
    """The plan, or None where the budget cannot be met; anything above the budget fails here."""
    try:
        plan = rw.allocate(table, rw.Budget(**dict(zip(units, limits, strict=True))), **changes)
    except rw.RankwiseError as err:
        assert "cannot be met" in str(err)  # noqa: PT017
        return None
    for unit, limit in zip(units, limits, strict=True):
        assert getattr(plan.after, unit) <= limit
    return plan


def worst(plan: rw.Plan, measure: str) -> float:
    return max((c.error[measure] for c in plan.choices), default=0.0)


shares = st.lists(st.floats(0, 1), min_size=2, max_size=2)


def offer(k: int, unit: tuple[int, ...], curve: np.ndarray, most: int) -> Offer:
    """Rank j costs j times `unit`."""
    return Offer(Option("f│c", k + 1), np.outer(np.arange(len(curve)), unit), Curve(curve, curve), most)


@st.composite
def menus(draw: st.DrawFn, units: int, distinct: bool = False) -> list[Menu]:
    """Menus without a network behind them: coarse errors, so that many choices tie, or `distinct` ones."""
    found, used = [], set()
    for i in range(draw(st.integers(2, 4))):
        offers = []
        for k in range(draw(st.integers(0, 3))):
            most = draw(st.integers(1, 4))
            unit = tuple(draw(st.integers(1, 9)) for _ in range(units))
            values = sorted((draw(st.integers(0, 1000 if distinct else 8)) / 8 for _ in range(most)), reverse=True)
            if distinct:
                values = [v + len(used) * 1e-6 for v in values]
            used |= {*values, object()}
            curve = np.array([max([1000.0, *values]), *values, 0.0])
            offers.append(offer(k, unit, curve, most))
        floor = [max([o.cost(o.most)[u] for o in offers], default=0) for u in range(units)]
        dense = tuple(f + draw(st.integers(1, 6)) for f in floor)
        found.append(Menu(rw.Layer(str(i), "Linear", 1, 1), tuple(offers), Point(dense, 0.0, None, 0)))
    return found


def menu(offers: list[tuple[tuple[int, ...], float]], dense: tuple[int, ...]) -> Menu:
    """A menu written out: the cost and error of each offer at rank 1."""
    curves = [np.array([9.0, error, 0.0]) for _, error in offers]
    found = [offer(k, unit, c, 1) for k, ((unit, _), c) in enumerate(zip(offers, curves, strict=True))]
    return Menu(rw.Layer("", "Linear", 1, 1), tuple(found), Point(dense, 0.0, None, 0))


def points_of(menu: Menu) -> Points:
    points = [(menu.dense.cost, 0.0)]
    for offer in menu.offers:
        points += [(offer.cost(j), float(offer.curve.values()[j])) for j in range(1, offer.most + 1)]
    return points


@st.composite
def rooms(draw: st.DrawFn, offered: list[Menu]) -> list[int]:
    """Anything from just below the least to the whole."""
    room = []
    for u in range(len(offered[0].dense.cost)):
        costs = [[c[u] for c, _ in points_of(m)] for m in offered]
        room.append(draw(st.integers(sum(map(min, costs)) - 1, sum(map(max, costs)))))
    return room


def check_fits(found: Solution, offered: list[Menu], room: list[int]) -> None:
    """Every point is one its menu has, and together they fit."""
    for point, menu in zip(found.points, offered, strict=True):
        assert (point.cost, point.error) in points_of(menu)
    for u, most in enumerate(room):
        assert sum(p.cost[u] for p in found.points) <= most


# ---- minimax ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("units", UNITS)
@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 10**6), shares=shares)
def test_minimax_is_the_brute_force_optimum(
    units: tuple[str, ...], measure: str, seed: int, shares: list[float]
) -> None:
    table = table_of(seed)
    limits = limits_for(table, units, measure, shares)
    room = [most - f for most, f in zip(limits, fixed_part(table, units), strict=True)]
    plan = plan_of(table, units, limits, search="minimax", error=measure)
    best = brute_force(every_point(table, units, measure), room, np.maximum)
    assert (plan is None) == (best is None)
    if plan is not None:
        assert worst(plan, measure) == pytest.approx(best, abs=1e-9)
        assert plan.search.objective == worst(plan, measure)


@pytest.mark.parametrize("units", [1, 2, 3])
@MANY
@given(data=st.data())
def test_minimax_is_the_brute_force_optimum_of_any_menus(units: int, data: st.DataObject) -> None:
    offered = data.draw(menus(units))
    room = data.draw(rooms(offered))
    found = searches.minimax(offered, room)
    best = brute_force([points_of(m) for m in offered], room, np.maximum)
    assert (found is None) == (best is None)
    if found is not None:
        check_fits(found, offered, room)
        assert found.objective == best == max(p.error for p in found.points)


@MANY
@given(data=st.data())
def test_minimax_is_the_lexicographic_optimum_where_no_two_errors_tie(data: st.DataObject) -> None:
    offered = data.draw(menus(1, distinct=True))
    room = data.draw(rooms(offered))
    found = searches.minimax(offered, room)
    assume(found is not None)
    every = np.stack(np.meshgrid(*[range(len(points_of(m))) for m in offered], indexing="ij"), -1).reshape(
        -1, len(offered)
    )
    ordered = []
    for picks in every:
        chosen = [points_of(m)[i] for m, i in zip(offered, picks, strict=True)]
        if sum(c[0] for c, _ in chosen) <= room[0]:
            ordered.append(sorted((e for _, e in chosen), reverse=True))
    assert sorted((p.error for p in found.points), reverse=True) == min(ordered)


@pytest.mark.parametrize("units", [1, 2, 3])
@MANY
@given(data=st.data())
def test_minimax_leaves_no_room_in_which_a_layer_could_improve(units: int, data: st.DataObject) -> None:
    offered = data.draw(menus(units))
    room = data.draw(rooms(offered))
    found = searches.minimax(offered, room)
    assume(found is not None)
    left = [most - sum(p.cost[u] for p in found.points) for u, most in enumerate(room)]
    for point, menu in zip(found.points, offered, strict=True):
        space = [free + c for free, c in zip(left, point.cost, strict=True)]
        fitting = [e for cost, e in points_of(menu) if all(c <= s for c, s in zip(cost, space, strict=True))]
        assert min(fitting) == point.error


def test_levels_that_nearly_tie_are_told_apart() -> None:
    """With two budgets both layers must move at once, from .5 to a level a billionth below."""
    a = menu([((1, 4), 0.5), ((4, 1), 0.5 - 1e-9)], (9, 9))
    b = menu([((4, 1), 0.3), ((1, 4), 0.3)], (9, 9))
    assert searches.minimax([a, b], [5, 5]).objective == 0.5 - 1e-9


def test_room_that_one_layer_frees_is_offered_to_those_already_settled() -> None:
    """b goes from (12, 1) to the better (2, 3), and only then a fits whole; c cannot improve at all."""
    a = menu([((4, 4), 0.5)], (10, 5))
    b = menu([((12, 1), 0.4), ((2, 3), 0.3)], (13, 8))
    c = menu([((1, 1), 0.9)], (50, 50))
    found = searches.minimax([a, b, c], [21, 9])
    assert [p.error for p in found.points] == [0.0, 0.3, 0.9]


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("folds", ["all", 0, [0, 3], ["fh|cw"]])
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 10**6), shares=shares, measure=st.sampled_from(MEASURES), start=st.integers(0, 99))
def test_minimax_is_never_above_alternate(
    units: tuple[str, ...], folds: Any, seed: int, shares: list[float], measure: str, start: int
) -> None:
    table = table_of(seed, 3)
    limits = limits_for(table, units, measure, shares)
    exact, paper = (
        plan_of(table, units, limits, search=s, error=measure, folds=folds, seed=start)
        for s in ("minimax", "alternate")
    )
    assert (exact is None) == (paper is None)
    if exact is not None:
        assert worst(exact, measure) <= worst(paper, measure)


# ---- alternate -------------------------------------------------------------------------------------------


@MANY
@given(data=st.data(), seed=st.integers(0, 1000))
def test_alternate_goes_down_and_keeps_the_best(data: st.DataObject, seed: int) -> None:
    offered = data.draw(menus(data.draw(st.integers(1, 2))))
    room = data.draw(rooms(offered))
    found = searches.alternate(offered, room, seed=seed, starts=4)
    best = brute_force([points_of(m) for m in offered], room, np.maximum)
    assert (found is None) == (best is None)
    if found is not None:
        check_fits(found, offered, room)
        assert list(found.trace) == sorted(found.trace, reverse=True)
        assert found.trace[-1] == found.objective == max(p.error for p in found.points) >= best
        assert found.objective <= searches.alternate(offered, room, seed=seed, starts=1).objective


@FEW
@given(seed=st.integers(0, 10**6), shares=shares, start=st.integers(0, 99))
def test_the_same_seed_gives_the_same_plan(seed: int, shares: list[float], start: int) -> None:
    units = ("params", "macs")
    limits = limits_for(table_of(seed), units, "bound", shares)
    one, two = (plan_of(table_of(seed), units, limits, method="alds+", seed=start) for _ in range(2))
    assert one == two


def test_a_single_start_depends_on_the_seed() -> None:
    """The example of docs/math.md: two of four starts are trapped at .8, the optimum is .3."""
    a = torch.zeros(4, 8)
    a[0, 0], a[2, 2], a[1, 4], a[3, 5] = 1.0, 0.1, 0.8, 0.1
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].weight.data, model[1].weight.data = a, torch.diag(torch.tensor([1, 0.3, 0.2, 0.1]))
    table = rw.build_table(model, groups=[1, 2])
    found = {
        round(rw.allocate(table, rw.Budget(params=28), method="alds", seed=s, starts=1).search.objective, 6)
        for s in range(20)
    }
    assert found == {0.3, 0.8}
    for changes in ({"method": "alds"}, {"search": "minimax", "error": "bound"}):
        assert rw.allocate(table, rw.Budget(params=28), **changes).search.objective == pytest.approx(0.3)


def test_alternate_starts_15_times_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    original = searches._random_start
    monkeypatch.setattr(searches, "_random_start", lambda *a: (started.append(1), original(*a))[1])
    table = table_of(1)
    rw.allocate(table, rw.Budget(params=0.8), method="alds")
    assert len(started) == 15
    rw.allocate(table, rw.Budget(params=0.8), method="alds", starts=3)
    assert len(started) == 18


@pytest.mark.parametrize("units", UNITS)
def test_alternate_works_where_random_starts_do_not_fit(units: tuple[str, ...]) -> None:
    """At the least budget only one start in many fits; Algorithm 1 must still find it."""
    table = table_of(3, 3)
    limits = limits_for(table, units, "bound", [0.0, 0.0])
    if len(units) > 1:
        limits[1] = table.coverage.macs
    plan = plan_of(table, units, limits, method="alds+", starts=1)
    assert plan is not None
    assert getattr(plan.after, units[0]) == limits[0]


# ---- sum -------------------------------------------------------------------------------------------------


def check_sum(found: Solution | None, offered: list[Menu], room: list[int], best: float | None) -> None:
    """What fits is found, it fits, and the gap is honest: objective · (1 − gap) ≤ optimum ≤ objective."""
    assert (found is None) == (best is None)
    if found is None or best is None:
        return
    check_fits(found, offered, room)
    assert found.objective == pytest.approx(sum(p.error for p in found.points), abs=1e-12)
    assert found.gap is not None
    assert 0 <= found.gap <= 1
    assert found.objective * (1 - found.gap) <= best + 1e-9
    assert found.objective >= best - 1e-9


@pytest.mark.parametrize("units", [1, 2, 3])
@MANY
@given(data=st.data())
def test_sum_is_the_brute_force_optimum_of_any_menus(units: int, data: st.DataObject) -> None:
    offered = data.draw(menus(units, distinct=data.draw(st.booleans())))
    room = data.draw(rooms(offered))
    best = brute_force([points_of(m) for m in offered], room, np.add)
    found = knapsack.least_sum(offered, room)
    check_sum(found, offered, room, best)
    if found is not None:
        assert found.gap == 0
        assert found.objective == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("states", [1, 5])
@pytest.mark.parametrize("units", [1, 2, 3])
@MANY
@given(data=st.data())
def test_the_gap_is_honest_when_states_are_dropped(states: int, units: int, data: st.DataObject) -> None:
    offered = data.draw(menus(units, distinct=True))
    room = data.draw(rooms(offered))
    best = brute_force([points_of(m) for m in offered], room, np.add)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knapsack, "STATES", states)
        check_sum(knapsack.least_sum(offered, room), offered, room, best)


@pytest.mark.parametrize("work", [1, 100])
@pytest.mark.parametrize("units", [1, 2, 3])
@MANY
@given(data=st.data())
def test_the_gap_is_honest_when_work_is_left_undone(work: int, units: int, data: st.DataObject) -> None:
    offered = data.draw(menus(units, distinct=True))
    room = data.draw(rooms(offered))
    best = brute_force([points_of(m) for m in offered], room, np.add)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knapsack, "PASSES", (knapsack.Pass(work, 1),))
        check_sum(knapsack.least_sum(offered, room), offered, room, best)


def test_what_fits_two_budgets_is_found_even_where_no_mixture_of_them_leads_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(knapsack, "STATES", 1)
    offered = [menu([((1, 6), 0.375), ((1, 4), 1.0)], (3, 9)), menu([((5, 2), 0.125), ((1, 6), 0.25)], (7, 7))]
    check_sum(knapsack.least_sum(offered, [4, 10]), offered, [4, 10], 1.25)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("units", UNITS)
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10**6), shares=shares, cap=st.booleans())
def test_sum_is_within_its_gap_on_networks(
    units: tuple[str, ...], measure: str, seed: int, shares: list[float], cap: bool
) -> None:
    table = table_of(seed)
    limits = limits_for(table, units, measure, shares)
    room = [most - f for most, f in zip(limits, fixed_part(table, units), strict=True)]
    best = brute_force(every_point(table, units, measure), room, np.add)
    with pytest.MonkeyPatch.context() as patch:
        if cap:
            patch.setattr(knapsack, "STATES", 5)
        plan = plan_of(table, units, limits, search="sum", error=measure)
    assert (plan is None) == (best is None)
    if plan is not None:
        value = sum(c.error[measure] for c in plan.choices)
        assert plan.search.objective == pytest.approx(value, abs=1e-9)
        assert value * (1 - plan.search.gap) <= best + 1e-9
        if not cap:
            assert value <= best * 1.005 + 1e-9


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_only_what_nothing_undercuts_stays(data: st.DataObject) -> None:
    units = data.draw(st.integers(1, 2))
    small = st.integers(0, 4)
    rows = data.draw(st.lists(st.tuples(*[small] * (units + 1)), min_size=1, max_size=12))
    kept = hull.undominated(np.array([r[:-1] for r in rows], dtype=float), np.array([float(r[-1]) for r in rows]))
    expected = {r for r in rows if not any(s != r and all(a <= b for a, b in zip(s, r, strict=True)) for s in rows)}
    assert sorted(rows[i] for i in kept) == sorted(expected)


@settings(deadline=None, max_examples=300)
@given(st.data(), st.booleans())
def test_the_lower_hull_is_that_of_the_monotone_chain(data: st.DataObject, swept: bool) -> None:
    """Coarse numbers, so that many points lie on one line; no sweeps at all must give the same."""
    grid = st.tuples(st.integers(0, 40), st.integers(0, 40))
    rows = data.draw(st.lists(grid, min_size=1, max_size=40))
    cost, error = (np.array([r[i] / 8 for r in rows]) for i in (0, 1))
    expected: list[int] = []
    for i in np.lexsort((error, cost)):
        if expected and error[i] >= error[expected[-1]]:
            continue
        while len(expected) > 1:
            a, b = expected[-2:]
            if (error[b] - error[a]) * (cost[i] - cost[a]) < (error[i] - error[a]) * (cost[b] - cost[a]):
                break
            expected.pop()
        expected.append(int(i))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hull, "SWEEPS", 8 if swept else 0)
        assert hull.lower_hull(cost, error).tolist() == expected


def many_layers(layers: int, ranks: int, seed: int, coarse: int = 1) -> list[Menu]:
    """Falling spectra with noise, some options for each layer, costs in multiples of different units.

    `coarse` makes costs so small that a table of all sums can be made.
    """
    rng = np.random.default_rng(seed)
    found = []
    for i in range(layers):
        filters, channels = (int(n) for n in rng.integers(ranks, 3 * ranks, 2))
        weight, decay = 10 ** rng.uniform(-3, 0), rng.uniform(0.2, 1.2)
        dense, offers = max(2, filters * channels // coarse), []
        for k in range(3):
            spectrum = np.sort(np.arange(1, ranks // 2**k + 1) ** -decay * rng.lognormal(0, 0.3, ranks // 2**k))[::-1]
            tail = np.append(np.cumsum(spectrum[::-1] ** 2)[::-1], 0.0)
            unit = max(1, (channels + filters * 2**k) // coarse)
            most = min(len(spectrum), (dense - 1) // unit)
            if most >= 1:
                offers.append(offer(k, (unit,), weight * tail / tail[0], most))
        found.append(Menu(rw.Layer(str(i), "Linear", 1, 1), tuple(offers), Point((dense,), 0.0, None, 0)))
    return found


def least_by_size(offered: list[Menu], room: int) -> float:
    """The least sum of errors within the room, by dynamic programming over every size there is."""
    best = np.zeros(room + 1)
    for menu in offered:
        each = np.full(room + 1, np.inf)
        for (cost,), error in points_of(menu):
            if cost <= room:
                each[cost:] = np.minimum(each[cost:], best[: room + 1 - cost] + error)
        best = each
    return float(best[room])


@pytest.mark.parametrize("passes", [knapsack.PASSES, (knapsack.Pass(3000, 8), knapsack.Pass(3000, 64))])
@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 10**6), keep=st.floats(0.2, 0.9))
def test_sum_of_many_layers_is_that_of_a_table_of_all_sizes(passes: Any, seed: int, keep: float) -> None:
    offered = many_layers(30, 24, seed, coarse=10)
    room = int(keep * sum(m.dense.cost[0] for m in offered))
    best = least_by_size(offered, room)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knapsack, "PASSES", passes)
        found = knapsack.least_sum(offered, [room])
    check_sum(found, offered, [room], best)
    assert found is not None
    assert found.gap is not None
    if passes is knapsack.PASSES:
        assert found.gap == 0
        assert found.objective == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("keep", [0.3, 0.5, 0.7])
def test_sum_of_a_large_network_has_a_tiny_gap_and_bounded_work(keep: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """224 layers with 2,000 ranks. The bound is at least that of one multiplier, which is computed another way."""
    made = []
    original = knapsack._grow
    monkeypatch.setattr(knapsack, "_grow", lambda *a: (made.append(len(a[2].errors) * len(a[3])), original(*a))[1])
    offered = many_layers(224, 2000, seed=0)
    room = int(keep * sum(m.dense.cost[0] for m in offered))
    found = knapsack.least_sum(offered, [room])
    assert found is not None
    assert found.gap is not None
    assert sum(p.cost[0] for p in found.points) <= room
    assert found.gap < 1e-6
    assert sum(made) < 1.2 * sum(each.work for each in knapsack.PASSES if not each.above)
    for price in np.geomspace(1e-14, 1e-6, 40):
        fronts = [(m.front.costs[:, 0], m.front.error) for m in offered]
        dual = sum(float((error + price * cost).min()) for cost, error in fronts) - price * room
        assert dual <= found.objective * (1 - found.gap) + 1e-9


# ---- product ---------------------------------------------------------------------------------------------


def slow_product(offered: list[Menu], room: list[int]) -> list[Point] | None:
    """Step by step, looking at every layer each time: the smallest ΔE / (E · Δcost), of equals the first layer's."""
    space = np.array(room, dtype=np.float64)
    fronts = [[m.front_point(i) for i in range(len(m.front.error))] for m in offered]
    share = [np.array([p.cost for p in f], dtype=np.float64) @ (1 / np.maximum(space, 1)) for f in fronts]
    order = [np.argsort(-s, kind="stable") for s in share]
    place = [0] * len(fronts)
    while True:
        points = [f[o[at]] for f, o, at in zip(fronts, order, place, strict=True)]
        if all(sum(p.cost[u] for p in points) <= most for u, most in enumerate(room)):
            return points
        best: tuple[float, int] | None = None
        for i, (front, steps) in enumerate(zip(fronts, order, strict=True)):
            if place[i] + 1 < len(steps):
                here, there = steps[place[i]], steps[place[i] + 1]
                kept = max(1 - front[here].error, 1e-300)
                loss = (front[there].error - front[here].error) / kept
                loss /= max(share[i][here] - share[i][there], 1e-300)
                best = min(best or (math.inf, i), (float(loss), i))
        if best is None:
            return None
        place[best[1]] += 1


@pytest.mark.parametrize("units", [1, 2, 3])
@MANY
@given(data=st.data())
def test_product_takes_the_steps_of_the_slow_greedy(units: int, data: st.DataObject) -> None:
    offered = data.draw(menus(units, distinct=data.draw(st.booleans())))
    room = data.draw(rooms(offered))
    found, expected = walks.product(offered, room), slow_product(offered, room)
    assert (None if found is None else found.points) == expected


def test_product_takes_the_steps_of_the_slow_greedy_on_larger_problems() -> None:
    for seed in range(5):
        offered = many_layers(12, 30, seed)
        for keep in (0.2, 0.5, 0.8):
            room = [int(keep * sum(m.dense.cost[0] for m in offered))]
            found = walks.product(offered, room)
            assert found is not None
            assert found.points == slow_product(offered, room)


# ---- constant and equal energy ---------------------------------------------------------------------------


def share_of(choice: rw.Choice) -> float:
    return choice.after.params / choice.before.params


@pytest.mark.parametrize("method", ["svd", "alds-simple"])
@FEW
@given(seed=st.integers(0, 10**6), keep=st.floats(0.3, 0.99))
def test_constant_gives_every_layer_the_same_share_as_large_as_possible(method: str, seed: int, keep: float) -> None:
    """One option in each layer, so there is one number: no layer's next rank may fit a share all others fit too."""
    table = table_of(seed, 3, folds=0, groups=[1, 3])
    plan = plan_of(table, ("params",), [max(2, int(keep * table.coverage.params))], method=method)
    assume(plan is not None)
    assume(plan.choices)
    step = {c.name: c.after.params // c.rank for c in plan.choices}
    used = max([share_of(c) for c in plan.choices if c.rank > 1], default=0.0)
    following = []
    for c in plan.choices:
        after = (c.after.params + step[c.name]) / c.before.params
        assert after > used  # its next rank would have needed a larger common share
        following.append(after)
    # The next common share at which anything changes costs more than the budget.
    grown = min([f for f in following if f < 1], default=1.0)
    if grown < 1:
        more = sum(step[c.name] for c, f in zip(plan.choices, following, strict=True) if f == grown)
        assert plan.after.params + more > plan.budget.params
    else:
        assert table.coverage.params > plan.budget.params


@FEW
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1), measure=st.sampled_from(MEASURES))
def test_constant_picks_the_best_option_within_the_share(seed: int, share: float, measure: str) -> None:
    table = table_of(seed)
    limits = limits_for(table, ("params",), measure, [share])
    plan = plan_of(table, ("params",), limits, search="constant", error=measure)
    assume(plan is not None)
    assume(plan.choices)
    points = dict(zip([la.name for la in table.coverage.layers], every_point(table, ("params",), measure), strict=True))
    for choice in plan.choices:
        same_size = [e for cost, e in points[choice.name] if cost[0] <= choice.after.params]
        assert choice.error[measure] == min(same_size)


@MANY
@given(st.data())
def test_constant_finds_what_fits(data: st.DataObject) -> None:
    offered = data.draw(menus(data.draw(st.integers(1, 2))))
    room = data.draw(rooms(offered))
    found = searches.constant(offered, room)
    assert (found is None) == (brute_force([points_of(m) for m in offered], room, np.maximum) is None)
    if found is not None:
        check_fits(found, offered, room)
        assert found.objective == max(p.error for p in found.points)


@FEW
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1))
def test_equal_energy_is_the_largest_energy_made_least(seed: int, share: float) -> None:
    table = table_of(seed, folds=0, groups=1)
    limits = limits_for(table, ("params",), "energy", [share])
    plan = plan_of(table, ("params",), limits, method="svd-energy")
    room = [limits[0] - fixed_part(table, ("params",))[0]]
    assert plan is not None
    assert worst(plan, "energy") == pytest.approx(
        brute_force(every_point(table, ("params",), "energy"), room, np.maximum), abs=1e-12
    )
    assert all(c.fold.startswith("f│") and c.groups == 1 for c in plan.choices)


# ---- budgets ---------------------------------------------------------------------------------------------

BAD = [0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf, True, False, "0.4", 1.5, [0.4], 10.25, 1j]


@pytest.mark.parametrize("unit", ["params", "macs"])
@pytest.mark.parametrize("value", BAD)
def test_a_budget_must_be_a_fraction_or_a_count(unit: str, value: Any) -> None:
    assert f"{unit}={value!r}" in check_sentence(lambda: rw.Budget(**{unit: value}))


def test_a_budget_needs_a_unit() -> None:
    assert "params=" in check_sentence(lambda: rw.Budget())
    assert "params=" in check_sentence(lambda: rw.Budget(params=None, macs=None))


def test_a_count_may_be_of_any_length() -> None:
    """JSON has no limit for integers; a count above the whole is the whole."""
    assert rw.Budget(params=10**400).limit("params", 100) == 100


def test_what_is_no_budget_is_refused() -> None:
    assert "Budget" in check_sentence(lambda: rw.allocate(table_of(0), 0.4))  # type: ignore[arg-type]


@given(keep=st.integers(1, 10_000), total=st.integers(1, 10**7).map(lambda n: 100 * n))
@example(keep=2900, total=100)
def test_a_fraction_means_its_decimal_digits(keep: int, total: int) -> None:
    """0.29 of 100 is 29, although 0.29 * 100 is 28.999999999999996 in floating point."""
    assert rw.Budget(params=keep / 10_000).limit("params", total) == keep * total // 10_000


def test_a_budget_in_macs_needs_an_example() -> None:
    table = rw.build_table(network(0))
    assert "example" in check_sentence(lambda: rw.allocate(table, rw.Budget(macs=0.5)))
    assert "example" in check_sentence(lambda: rw.allocate(table, rw.Budget(params=0.9, macs=0.5)))
    assert rw.allocate(table, rw.Budget(params=0.9)).after.macs is None


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("budget", [rw.Budget(params=1.0), rw.Budget(macs=1.0), rw.Budget(params=1, macs=1)], ids=str)
def test_keeping_all_leaves_all_whole(search: str, budget: rw.Budget) -> None:
    plan = rw.allocate(table_of(5), budget, search=search)
    assert plan.choices == ()
    assert plan.after == plan.before
    assert plan.keep() == plan.keep("macs") == 1.0


@pytest.mark.parametrize("search", SEARCHES)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), keep=st.floats(0.05, 1), macs=st.floats(0.05, 1), unit=st.sampled_from(UNITS))
def test_a_fraction_is_never_exceeded(search: str, seed: int, keep: float, macs: float, unit: tuple[str, ...]) -> None:
    asked = {u: v for u, v in {"params": keep, "macs": macs}.items() if u in unit}
    try:
        plan = rw.allocate(table_of(seed), rw.Budget(**asked), search=search)
    except rw.RankwiseError as err:
        assert "cannot be met" in str(err)  # noqa: PT017
        return
    for u, value in asked.items():
        assert plan.keep(u) <= value


def stated(message: str) -> tuple[int, float]:
    found = re.search(r"least possible is ([\d,]+) \(keep ([\d.]+)\)", message)
    assert found, message
    return int(found[1].replace(",", "")), float(found[2])


@pytest.mark.parametrize("unit", ["params", "macs"])
@pytest.mark.parametrize("search", SEARCHES)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_a_budget_that_cannot_be_met_states_one_that_can(search: str, unit: str, seed: int) -> None:
    table = table_of(seed)
    least, keep = stated(check_sentence(lambda: rw.allocate(table, rw.Budget(**{unit: 2}), search=search)))
    assert getattr(rw.allocate(table, rw.Budget(**{unit: least}), search=search).after, unit) == least
    assert getattr(rw.allocate(table, rw.Budget(**{unit: keep}), search=search).after, unit) >= least
    assert stated(check_sentence(lambda: rw.allocate(table, rw.Budget(**{unit: least - 1}), search=search)))[0] == least


@pytest.mark.parametrize("search", SEARCHES)
def test_of_two_budgets_that_cannot_be_met_both_are_stated(search: str) -> None:
    message = check_sentence(lambda: rw.allocate(table_of(2), rw.Budget(params=2, macs=2), search=search))
    assert message.count("least possible") == 2
    assert "each on its own" in message


def test_a_network_without_layers_to_decide_keeps_what_it_has() -> None:
    table = rw.build_table(nn.Sequential(nn.BatchNorm1d(3)))
    for search in SEARCHES:
        assert rw.allocate(table, rw.Budget(params=1.0), search=search).after.params == 6
        assert stated(check_sentence(lambda s=search: rw.allocate(table, rw.Budget(params=0.5), search=s)))[0] == 6


# ---- exact, evaluated only where asked -------------------------------------------------------------------


class Wide(nn.Module):
    """Layers with many ranks, one of which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 24, 3, padding=1)
        self.second = nn.Conv2d(24, 16, 3, padding=1)
        self.spare = nn.Linear(30, 20)
        self.last = nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).mean((2, 3)))


@pytest.fixture(scope="module")
def wide() -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Wide(), torch.randn(1, 8, 5, 5)


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("keep", [0.4, 0.7])
def test_minimax_evaluates_few_entries_of_exact(
    wide: tuple[nn.Module, Tensor], units: tuple[str, ...], keep: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = table_module.residual_norm
    monkeypatch.setattr(table_module, "residual_norm", lambda *a: (calls.append(1), original(*a))[1])
    budget = rw.Budget(**dict.fromkeys(units, keep))
    lazy = rw.build_table(*wide)
    plan = rw.allocate(lazy, budget, search="minimax", error="exact")
    entries = sum(a.shape[-1] - 1 for a in lazy.spectra.values())
    assert 0 < len(calls) < entries / 3

    full = rw.build_table(*wide)
    for layer in full.coverage.layers:
        for option in full.options(layer):
            values = full.curve(layer, option, "exact").values()
            full.cache[layer.name, option, "exact"] = Curve(values, values)
    whole = rw.allocate(full, budget, search="minimax", error="exact")
    assert [(c.name, c.option, c.rank) for c in plan.choices] == [(c.name, c.option, c.rank) for c in whole.choices]
    assert plan.search.objective == pytest.approx(whole.search.objective, abs=1e-9)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_lazy_curve_is_the_curve_it_hides(data: st.DataObject) -> None:
    """Whatever is asked in whatever order, between whatever bounds."""
    values = np.array([*sorted(data.draw(st.lists(st.floats(0, 1), min_size=1, max_size=8)), reverse=True), 0.0])
    loose = data.draw(st.lists(st.floats(0, 1), min_size=len(values), max_size=len(values)))
    upper = np.maximum.accumulate((values + np.array(loose) * (values > 0))[::-1])[::-1]
    lower = np.minimum.accumulate(np.maximum(0, values - np.array(loose)))
    curve = Curve(lower.copy(), upper.copy(), lambda j: float(values[j]))
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            rank = data.draw(st.integers(0, len(values) - 1))
            assert curve[rank] == values[rank]
        else:
            level = data.draw(st.one_of(st.floats(0, 2), st.sampled_from(values.tolist())))
            assert curve.first(level) == int(np.argmax(values <= level))
    assert curve.values().tolist() == values.tolist()


# ---- layers that the example does not call ---------------------------------------------------------------


@pytest.mark.parametrize("search", SEARCHES)
def test_a_layer_never_called_is_left_alone_by_macs_and_shrinks_by_params(
    wide: tuple[nn.Module, Tensor], search: str
) -> None:
    table = rw.build_table(*wide)
    by_macs = rw.allocate(table, rw.Budget(macs=0.4), search=search)
    assert "spare" in {s.name for s in by_macs.kept}
    least, _ = stated(check_sentence(lambda: rw.allocate(table, rw.Budget(params=2, macs=1.0), search=search)))
    both = rw.allocate(table, rw.Budget(params=least, macs=1.0), search=search)
    spare = {c.name: c.after for c in both.choices}["spare"]
    assert spare.macs == 0
    assert spare.params < 600


# ---- everything with everything --------------------------------------------------------------------------

OPTIONS = {
    "all": {},
    "scheme 0": {"folds": 0},
    "two folds": {"folds": [0, "fhw|c"], "groups": [1, 2]},
    "one slice": {"groups": 1},
    "three slices": {"groups": 3},
}


@pytest.fixture(scope="module")
def anything() -> tuple[nn.Module, rw.Table]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 8, 2, stride=2), nn.ReLU()),
            *(nn.Conv2d(8, 12, 3, stride=2, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10)),
        )
    return model, rw.build_table(model, torch.randn(2, 4, 6, 6), groups="any")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("search", SEARCHES)
def test_every_search_works_with_every_measure_and_set_of_options(
    anything: tuple[nn.Module, rw.Table], search: str, measure: str, options: str
) -> None:
    model, table = anything
    for budget in (rw.Budget(params=0.8), rw.Budget(macs=0.8), rw.Budget(params=0.9, macs=0.8)):
        plan = rw.allocate(table, budget, search=search, error=measure, **OPTIONS[options])
        assert plan.choices
        for unit in budget.units:
            assert plan.keep(unit) <= getattr(budget, unit)
        small = rw.apply_plan(model, plan)
        assert sum(p.numel() for p in small.parameters()) == plan.after.params
        assert rw.Plan.loads(plan.dumps()) == plan


@pytest.mark.parametrize("method", DATA_FREE)
def test_every_method_keeps_its_budget(anything: tuple[nn.Module, rw.Table], method: str) -> None:
    plan = rw.allocate(anything[1], rw.Budget(params=0.8), method=method)
    assert plan.method == method
    assert plan.keep() <= 0.8
    assert plan.choices


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"search": "best"}, "minimax"),
        ({"error": "mse"}, "energy"),
        ({"method": "alds++"}, "alds-simple"),
        ({"starts": 0}, "start"),
        ({"starts": 1.5}, "starts"),
        ({"starts": True}, "starts"),
        ({"seed": -1}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"fold": 0}, "folds"),
        ({"folds": "hw"}, "f│chw"),
        ({"folds": 4}, "f│chw"),
        ({"folds": []}, "all"),
        ({"folds": 2.5}, "folds"),
        ({"slices": 0}, "slices"),
        ({"slices": -2}, "slices"),
        ({"slices": 2.5}, "slices"),
        ({"slices": [1, 2.0]}, "slices"),
        ({"groups": []}, "all"),
        ({"groups": "some"}, "any"),
    ],
)
def test_settings_are_strict(changes: dict[str, Any], named: str) -> None:
    assert named in check_sentence(lambda: rw.allocate(table_of(0), rw.Budget(params=0.9), **changes))


@pytest.mark.parametrize(
    "wanted", [(0, 3), [0, 3], {0, 3}, range(0, 4, 3), iter([0, 3])], ids=lambda w: type(w).__name__
)
def test_settings_take_any_collection_and_can_be_saved(wanted: Any) -> None:
    table = table_of(0)
    plan = rw.allocate(table, rw.Budget(params=0.9), folds=wanted)
    assert rw.Plan.loads(plan.dumps()) == plan
    assert plan == rw.allocate(table, rw.Budget(params=0.9), folds=[0, 3])


def test_settings_have_the_papers_defaults() -> None:
    assert rw.METHODS["alds"].settings.starts == Settings().starts == 15
