"""From a table and a budget to a plan: limits, search, and what becomes of every layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rankwise.core.layer import Layer, Skipped
from rankwise.core.measures import check_measure
from rankwise.core.option import Cost
from rankwise.core.slicing import Folds, Slices
from rankwise.decompositions import DECOMPOSITIONS, PLAIN, Selection, cost_at
from rankwise.decompositions.clusters import check_clustering
from rankwise.errors import RankwiseError
from rankwise.planning.budget import Budget
from rankwise.planning.findings import Findings, Latency
from rankwise.planning.floor import cannot_be_met
from rankwise.planning.knapsack import least_sum
from rankwise.planning.menu import Menu, Point, Rules, menus
from rankwise.planning.minimax import Solution, alternate, combine, constant, minimax
from rankwise.planning.plan import Choice, Plan, listed
from rankwise.planning.signal_rank import signal_points
from rankwise.planning.table import Table
from rankwise.planning.times import MARGIN, NANO
from rankwise.planning.units import LATENCY, UNITS
from rankwise.planning.walks import penalty, product

SEARCHES = ("alternate", "minimax", "sum", "penalty", "product", "constant")


@dataclass(frozen=True)
class Settings:
    """How to search: which options, which error, which search."""

    folds: Folds = "all"
    slices: Slices = "all"
    error: str = "energy"
    search: str = "sum"
    seed: int = 0
    starts: int = 15
    decompositions: tuple[str, ...] = (PLAIN.name,)
    clustering: str = ""  # for messi: the table's, and "projective" where none is built yet
    never_slower: bool = False  # a layer stays as it is unless its pair was measured to be faster
    rank_multiple: int = 1  # for hardware that likes round numbers of channels

    def __post_init__(self) -> None:
        check_measure(self.error)
        if self.clustering:
            check_clustering(self.clustering)
        if self.search not in SEARCHES:
            raise RankwiseError(f"unknown search {self.search!r}: the searches are {', '.join(SEARCHES)}")
        if not isinstance(self.never_slower, bool):
            raise RankwiseError(f"never_slower={self.never_slower!r} was given, and it is True or False")
        for name, least in (("seed", 0), ("starts", 1), ("rank_multiple", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise RankwiseError(f"{name}={value!r} was given, and {name} is a whole number from {least} on")
        for name in ("folds", "slices", "decompositions"):
            value = getattr(self, name)
            if isinstance(value, Iterable) and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))  # read more than once, and saved with the plan
        unknown = [decomposition for decomposition in self.decompositions if decomposition not in DECOMPOSITIONS]
        if unknown or not self.decompositions:
            raise RankwiseError(
                f"decompositions={self.decompositions!r} was given: possible are {', '.join(DECOMPOSITIONS)}"
            )

    @property
    def selection(self) -> Selection:
        """Which options of a layer are asked for."""
        return Selection(self.folds, self.slices, self.clustering, self.seed, self.starts)


def needs_budget(settings: Settings) -> bool:
    """A single decomposition may be able to do without one."""
    return len(settings.decompositions) != 1 or DECOMPOSITIONS[settings.decompositions[0]].needs_budget


def find_plan(table: Table, budget: Budget | None, settings: Settings, method: str, model: str = "") -> Plan:
    """The plan that the search finds; never above the budget, and an error if nothing fits it.

    A decomposition may be able to do without a budget (signal_rank.py).
    """
    if budget is None and not needs_budget(settings):
        points = signal_points(table, settings.decompositions[0], settings.error)
        reached = Budget(params=_after(table, points).params)
        plan = _make_plan(table, points, reached, settings, Findings(ranks="vbmf"))
        return replace(plan, method=method, model=model)
    if not isinstance(budget, Budget):
        raise RankwiseError(f"a Budget is needed, and {budget!r} was given: for instance Budget(params=0.4)")
    if settings.error == "exact" and table.weights is not None:
        table.check(table.weights)  # trained since, it would mix new weights with old spectra
    if table.clustering and settings.clustering not in ("", table.clustering):
        raise RankwiseError(
            f"the table's clusters are {table.clustering!r} and {settings.clustering!r} are asked for: build it with "
            f"clustering={settings.clustering!r}, or ask for those it has"
        )
    settings = replace(settings, clustering=table.clustering)
    limits = budget.limits(table.coverage, table.times)
    offered = _offers(table, budget, settings, settings.never_slower)
    fixed = [UNITS[name].fixed(table.coverage, table.times) for name in budget.units]
    room = [limits[name] - f for name, f in zip(budget.units, fixed, strict=True)]
    solution = run_search(offered, room, settings)
    faster = offered
    if solution is None and settings.never_slower:
        offered = _freed(offered, _offers(table, budget, settings, False), room)
        solution = run_search(offered, room, settings)
    if solution is None:
        least = {name: fixed[i] + sum(_least(menu)[i] for menu in offered) for i, name in enumerate(limits)}
        raise cannot_be_met(table.coverage, table.times, limits, least)
    able = {m.layer.name for m in offered if m.offers}
    findings = replace(
        _findings(solution, _times(table, solution.points)), other=_reached(table, budget, solution.points, fixed)
    )
    plan = _make_plan(table, solution.points, budget, settings, findings, able)
    said = [*_given_up(table, faster, offered, solution.points), *(table.times.warnings if table.times else [])]
    return replace(plan, method=method, model=model).warned(*said)


def _offers(table: Table, budget: Budget, settings: Settings, never_slower: bool) -> list[Menu]:
    rules = Rules(never_slower, settings.rank_multiple)
    return menus(table, budget.units, settings.error, settings.selection, settings.decompositions, rules)


def _freed(faster: list[Menu], every: list[Menu], room: Sequence[int]) -> list[Menu]:
    """The menus of faster pairs, with every pair where the budget needs it: in as few layers as will do.

    The layers that can give most in return come first, so with one budget no fewer would do.
    """

    gains = [
        sum((a - b) / max(1, r) for a, b, r in zip(_least(one), _least(other), room, strict=True))
        for one, other in zip(faster, every, strict=True)
    ]
    offered = list(faster)
    for i in sorted((i for i, gain in enumerate(gains) if gain > 0), key=lambda i: -gains[i]):
        offered[i] = every[i]
        if combine([m.at(math.inf) for m in offered], room) is not None:
            break
    return offered


def _least(menu: Menu) -> list[int]:
    """The least that the layer can cost, in each unit on its own."""
    return [min([c, *(o.cost(1)[u] for o in menu.offers)]) for u, c in enumerate(menu.dense.cost)]


def _given_up(table: Table, faster: list[Menu], offered: list[Menu], points: list[Point]) -> list[str]:
    """A warning that names the layers whose pairs are not faster although never_slower was asked for."""
    names = []
    for one, other, point in zip(faster, offered, points, strict=True):
        if other is not one and point.option is not None and table.times is not None:
            before = table.times.seconds(one.layer, None, 0)
            after = table.times.seconds(one.layer, point.option, point.rank)
            if not after < MARGIN * before:  # also where it was not measured
                names.append(one.layer.name)
    if not names:
        return []
    return [f"never_slower was given up where the budget cannot be met with faster pairs: in {listed(names)}"]


def _reached(table: Table, budget: Budget, points: list[Point], fixed: Sequence[int]) -> dict[str, Any]:
    """What the network has before and after in units of the budget that are neither part of a `Cost` nor time."""
    found = {}
    for i, name in enumerate(budget.units):
        before = UNITS[name].total(table.coverage, table.times)
        after = fixed[i] + sum(point.cost[i] for point in points)
        found[name] = {"before": before, "after": after, "keep": after / before if before else 1.0}
    known = (*Cost.__dataclass_fields__, LATENCY.name)
    return {name: counts for name, counts in found.items() if name not in known}


def _times(table: Table, points: list[Point]) -> Latency | None:
    """What the plan should take by the measured times: the network, each layer before and after, and slower ones."""
    times = table.times
    if times is None:
        return None
    layers = {
        la.name: (times.seconds(la, None, 0), times.seconds(la, p.option, p.rank))
        for la, p in zip(table.coverage.layers, points, strict=True)
        if p.option is not None
    }
    before = times.total / NANO
    whole = (times.fixed + sum(times.dense(la.name) for la in table.coverage.layers)) / NANO
    after = whole + sum(pair - dense for dense, pair in layers.values())
    if math.isnan(after):
        return None  # options without times, in a plan that did not ask for time
    slower = tuple(name for name, (dense, pair) in layers.items() if pair > dense)
    return Latency(before, after, after / before if before else 1.0, layers, slower, dict(times.timing))


def _make_plan(
    table: Table,
    points: list[Point],
    budget: Budget,
    settings: Settings,
    findings: Findings,
    able: set[str] | None = None,
) -> Plan:
    """What becomes of every layer, written down, for a network and by a method that the caller names.

    `able` are the layers that had something to choose.
    """
    layers = table.coverage.layers
    entries = [_entry(table, la, p, settings.error, able) for la, p in zip(layers, points, strict=True)]
    return Plan(
        model="",
        method="",
        budget=budget,
        before=Cost(table.coverage.params, table.coverage.macs),
        after=_after(table, points),
        layers=(*entries, *table.coverage.skipped),
        settings={k: _plain(v) for k, v in vars(settings).items()},
        search=findings,
        layout=table.times.layout if table.times else None,
    )


def run_search(offered: list[Menu], room: Sequence[int], settings: Settings) -> Solution | None:
    if settings.search == "alternate":
        return alternate(offered, room, settings.seed, settings.starts)
    if settings.search == "minimax":
        return minimax(offered, room)
    if settings.search == "sum":
        return least_sum(offered, room)
    if settings.search == "penalty":
        return penalty(offered, room)
    return product(offered, room) if settings.search == "product" else constant(offered, room)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _findings(solution: Solution, latency: Latency | None) -> Findings:
    return Findings(
        objective=float(solution.objective),
        gap=None if solution.gap is None else float(solution.gap),
        price=None if solution.price is None else float(solution.price),
        trace=tuple(map(float, solution.trace)) or None,
        latency=latency,
    )


def _cost(layer: Layer, point: Point) -> Cost:
    if point.option is None:
        return Cost(layer.params, layer.macs)
    return cost_at(layer, point.option, point.rank)


def _after(table: Table, points: list[Point]) -> Cost:
    params, macs = table.coverage.params, table.coverage.macs
    for layer, point in zip(table.coverage.layers, points, strict=True):
        cost = _cost(layer, point)
        params += cost.params - layer.params
        if macs is not None:
            macs += (cost.macs or 0) - (layer.macs or 0)
    return Cost(params, macs)


def _entry(table: Table, layer: Layer, point: Point, measure: str, able: set[str] | None) -> Choice | Skipped:
    if point.option is None:
        chosen = able is not None and layer.name in able
        better = "smaller" if table.times is None else "smaller and faster"
        reason = "the budget leaves it whole" if chosen else f"no pair of factors is {better} than the layer"
        if not table.options(layer):  # no input reaches it, or it is a depthwise one and effects are measured
            reason = "no decomposition was tried on it"
        return Skipped(layer.name, layer.kind, layer.params, reason, layer.macs)
    error = {
        m: table.curve(layer, point.option, m)[point.rank] for m in (*table.measures(layer, point.option), measure)
    }
    return Choice(
        name=layer.name,
        kind=layer.kind,
        shape=layer.shape,
        fold=point.option.fold,
        slices=point.option.slices,
        rank=point.rank,
        decomposition=point.option.decomposition,
        outer=point.option.outer,
        clusters=point.option.clusters,
        heads=layer.heads,
        error={m: float(e) for m, e in error.items()},
        before=Cost(layer.params, layer.macs),
        after=_cost(layer, point),
    )
