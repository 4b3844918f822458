"""Searches for the best layer-wise decisions under a budget.

    minimax    the exact optimum of the paper's objective, the largest error of all layers
    alternate  Algorithm 1 of the paper: alternating steps from random starts, a local optimum
    sum        the least total error (knapsack.py)
    penalty    the least total of error + λ · cost, with the λ that meets the budget (walks.py)
    product    the largest product of energies, greedily (walks.py)
    constant   the same share of every layer

Each takes menus and the room left for them (limits minus what is not up for decision) and gives a
`Solution`. docs/math.md proves what is said here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rankwise.planning.menu import Menu, Offer, Point

# More partial sums than this are thinned out when several budgets must be met at once.
STATES = 4096
# Algorithm 1 has converged when ε has not moved for so many steps.
PATIENCE = 3


@dataclass(frozen=True)
class Solution:
    """One point for each menu. `objective` is what the search minimised, `bound` a lower bound of it."""

    points: list[Point]
    objective: float
    bound: float | None = None
    price: float | None = None  # λ, the error that one more unit of cost is worth
    trace: tuple[float, ...] = field(default=())

    @property
    def gap(self) -> float | None:
        """How far from optimal this may be: (objective − bound) / objective."""
        if self.bound is None:
            return None
        return max(0.0, (self.objective - self.bound) / self.objective) if self.objective > 0 else 0.0


def worst(points: Sequence[Point]) -> float:
    return max((p.error for p in points), default=0.0)


def total(points: Sequence[Point], units: int) -> list[int]:
    return [sum(p.cost[u] for p in points) for u in range(units)]


def combine(choices: list[list[Point]], room: Sequence[int]) -> list[Point] | None:
    """One point from each list so that the sums stay within the room, or None.

    With one unit every list has one point. With more, the sums of the lists seen so far are kept as a
    Pareto front: exact, unless it outgrows STATES.
    """
    if all(len(points) == 1 for points in choices):
        points = [p[0] for p in choices]
        return points if all(t <= r for t, r in zip(total(points, len(room)), room, strict=True)) else None
    least = [[min(p.cost[u] for p in points) for u in range(len(room))] for points in choices]
    rest = np.cumsum(np.array(least[::-1]), axis=0)[::-1]
    states: list[tuple[tuple[int, ...], tuple[Point, ...]]] = [(tuple([0] * len(room)), ())]
    for i, points in enumerate(choices):
        left = [r - (rest[i + 1][u] if i + 1 < len(choices) else 0) for u, r in enumerate(room)]
        grown = [
            (tuple(a + b for a, b in zip(cost, p.cost, strict=True)), (*path, p))
            for cost, path in states
            for p in points
        ]
        states = _thin([s for s in grown if all(c <= m for c, m in zip(s[0], left, strict=True))])
        if not states:
            return None
    return list(min(states, key=lambda s: max(c / max(1, r) for c, r in zip(s[0], room, strict=True)))[1])


def _thin(
    states: list[tuple[tuple[int, ...], tuple[Point, ...]]],
) -> list[tuple[tuple[int, ...], tuple[Point, ...]]]:
    kept: list[tuple[tuple[int, ...], tuple[Point, ...]]] = []
    front: list[tuple[int, ...]] = []  # of the units behind the first, by which states are sorted
    for state in sorted(states, key=lambda s: s[0]):
        rest = state[0][1:]
        if not any(all(a <= b for a, b in zip(other, rest, strict=True)) for other in front):
            kept.append(state)
            front = [other for other in front if not all(a >= b for a, b in zip(other, rest, strict=True))] + [rest]
    step = max(1, -(-len(kept) // STATES))
    return kept[::step]


def minimax(menus: list[Menu], room: Sequence[int]) -> Solution | None:
    """The least possible largest error, and then the least possible errors of the other layers.

    At a level ε the layers are independent, and the cheapest points that meet it cost less the higher the
    level: bisection. The last steps go down level by level, so no level is jumped over. Once the layer
    with the largest error cannot improve within the room, it is settled; the others use what is left.
    """
    points = combine([m.at(math.inf) for m in menus], room)
    if points is None:
        return None
    low = 0.0
    for _ in range(24):
        high = worst(points)
        middle = (low + high) / 2
        if not low < middle < high:
            break
        better = combine([m.at(middle) for m in menus], room)
        if better is None:
            low = middle
        else:
            points = better
    if len(room) > 1:
        points = _descend(menus, points, room)
    points = _fill(menus, points, room)
    return Solution(points, worst(points))


def _descend(menus: list[Menu], points: list[Point], room: Sequence[int]) -> list[Point]:
    """Level by level while all layers together can still go below the largest error (several units)."""
    while worst(points) > 0:
        level = math.nextafter(worst(points), -1)
        better = combine([m.at(level) for m in menus], room)
        if better is None:
            break
        points = better
    return points


def _fill(menus: list[Menu], points: list[Point], room: Sequence[int]) -> list[Point]:
    """Improve the worst layer while that fits; one that cannot improve is settled."""
    points = list(points)
    left = [r - t for r, t in zip(room, total(points, len(room)), strict=True)]
    heap = [(-p.error, i) for i, p in enumerate(points) if p.error > 0]
    heapq.heapify(heap)
    settled: list[tuple[float, int]] = []
    while heap:
        _, i = heapq.heappop(heap)
        have = points[i]
        space = [free + c for free, c in zip(left, have.cost, strict=True)]
        fitting = [p for p in menus[i].at(math.nextafter(have.error, -1)) if p.fits(space)]
        if not fitting:
            settled.append((-have.error, i))
            continue
        points[i] = min(fitting, key=lambda p: max(c / max(1, r) for c, r in zip(p.cost, room, strict=True)))
        before, left = left, [s - c for s, c in zip(space, points[i].cost, strict=True)]
        if points[i].error > 0:
            heapq.heappush(heap, (-points[i].error, i))
        if any(now > then for now, then in zip(left, before, strict=True)):
            # A better point can be cheaper in one of two units: what was settled gets another chance.
            heap, settled = [*heap, *settled], []
            heapq.heapify(heap)
    return points


def alternate(menus: list[Menu], room: Sequence[int], seed: int = 0, starts: int = 15) -> Solution | None:
    """Algorithm 1 of the paper, as printed, with the best of all iterates kept.

    From a random option for each layer: OptimalRanks (minimax with that option fixed), then for each
    layer OptimalSubspaces (the option with the least error at the layer's present cost), until neither
    changes anything. `trace` holds ε of the best start after each OptimalRanks; it never increases.
    """
    feasible = combine([m.at(math.inf) for m in menus], room)
    if feasible is None:
        return None
    rng = np.random.default_rng(seed)
    best: Solution | None = None
    for _ in range(starts):
        offers = _random_start(menus, room, feasible, rng)
        found = _alternate_from(menus, offers, room)
        if best is None or found.objective < best.objective:
            best = found
    return best


def _random_start(
    menus: list[Menu], room: Sequence[int], feasible: list[Point], rng: np.random.Generator
) -> list[Offer | None]:
    """RandomInit. Where even rank 1 everywhere is too large, the largest layers start from `feasible`."""
    offers: list[Offer | None] = [m.offers[int(rng.integers(len(m.offers)))] if m.offers else None for m in menus]
    least = [o.cost(1) if o else m.dense.cost for o, m in zip(offers, menus, strict=True)]
    excess = [max(a - b for a, b in zip(cost, p.cost, strict=True)) for cost, p in zip(least, feasible, strict=True)]
    for i in sorted(range(len(menus)), key=lambda i: -excess[i]):
        if all(sum(cost[u] for cost in least) <= r for u, r in enumerate(room)):
            break
        least[i] = feasible[i].cost
        offers[i] = next((o for o in menus[i].offers if o.option == feasible[i].option), None)
    return offers


def _alternate_from(menus: list[Menu], offers: list[Offer | None], room: Sequence[int]) -> Solution:
    trace: list[float] = []
    while True:
        fixed = [m.only(o) if o else Menu(m.layer, (), m.dense) for m, o in zip(menus, offers, strict=True)]
        solution = minimax(fixed, room)
        assert solution is not None, "a start that fits stays within the room"
        trace.append(solution.objective)
        best = solution.points
        before, offers = offers, [_optimal_subspaces(*step) for step in zip(menus, best, offers, strict=True)]
        # ε may rest while options below the worst layer still move, but only so long, or it could cycle.
        if offers == before or trace[-PATIENCE:].count(trace[-1]) == PATIENCE:
            return Solution(best, trace[-1], trace=tuple(trace))


def _optimal_subspaces(menu: Menu, point: Point, present: Offer | None) -> Offer | None:
    """The offer with the least error at the cost of `point`; the present one wins ties."""
    ranks = [(o, o.rank_within(point.cost)) for o in menu.offers]
    errors = [(o.curve[rank], o is not present, i) for i, (o, rank) in enumerate(ranks) if rank >= 1]
    return menu.offers[min(errors)[2]] if errors else present


def constant(menus: list[Menu], room: Sequence[int]) -> Solution | None:
    """The same keep for every layer, as large as the budget allows; of several options the best."""
    smallest = combine([m.at(math.inf) for m in menus], room)
    if smallest is None:
        return None
    low, high = 0.0, 1.0
    points = _constant_points(menus, high, smallest)
    if not _within(points, room):
        points = smallest
        for _ in range(50):
            middle = (low + high) / 2
            better = _constant_points(menus, middle, smallest)
            if _within(better, room):
                low, points = middle, better
            else:
                high = middle
    return Solution(points, worst(points))


def _within(points: list[Point], room: Sequence[int]) -> bool:
    return all(t <= r for t, r in zip(total(points, len(room)), room, strict=True))


def _constant_points(menus: list[Menu], keep: float, smallest: list[Point]) -> list[Point]:
    points = []
    for menu, least in zip(menus, smallest, strict=True):
        if keep >= 1 or not menu.offers:
            points.append(menu.dense)
            continue
        share = [keep * c for c in menu.dense.cost]
        offers = [(o, o.rank_within(share)) for o in menu.offers]
        fitting = [o.point(rank) for o, rank in offers if rank >= 1]
        # Where no rank is small enough: the smallest there is.
        points.append(min(fitting or [least], key=lambda p: (p.error, p.cost)))
    return points
