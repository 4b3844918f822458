"""The least total error under a budget: a multiple-choice knapsack.

1. Lower hulls of the layers' fronts, steepest step first: the optimum of the linear relaxation, hence a
   lower bound; at most one layer is fractional in it, so rounding down is nearly optimal already.
2. Greedy filling of what is left gives an incumbent.
3. Points whose reduced cost alone exceeds the gap between the two cannot be part of anything better.
4. Dynamic programming over what remains, partial sums kept as a Pareto front, closes the gap.

With several budgets steps 1 and 2 see one mixed cost, Σ weight · cost / budget; the bound is a bound for
every weight, and the best one is used. Step 4 sees all costs.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from itertools import product as product_of

import numpy as np
from numpy.typing import NDArray

from rankwise.core.linalg import Array
from rankwise.planning.menu import Menu, Point
from rankwise.planning.minimax import Solution, combine

Ints = NDArray[np.int64]

# Partial sums kept for each layer. Beyond this the most promising stay and the gap is no longer zero.
STATES = 20_000
SEVERAL = 2_000  # the same for three budgets, where finding out which are worth keeping takes longer


def _weights(units: int) -> list[list[float]]:
    """Ways to mix so many costs, each summing to 1: sixteenths for two, quarters for three."""
    parts = {1: 1, 2: 16}.get(units, 4)
    every = [w for w in product_of(range(parts + 1), repeat=units - 1) if sum(w) <= parts]
    return [[*(i / parts for i in w), (parts - sum(w)) / parts] for w in every]


class Front:
    """The points of one layer that no other one undercuts: costs (n, units) and errors (n,)."""

    def __init__(self, menu: Menu) -> None:
        if len(menu.dense.cost) == 1:
            self.points = [menu.front_point(i) for i in range(len(menu.front[0]))]
        else:
            offered = [o.point(rank) for o in menu.offers for rank in range(1, o.most + 1)]
            self.points = _undercut([menu.dense, *offered])
        self.costs = np.array([p.cost for p in self.points], dtype=np.float64)
        self.error = np.array([p.error for p in self.points])


@dataclass(frozen=True)
class Relaxation:
    """The linear relaxation in a mixed cost: its value, its multiplier, and its steps rounded down."""

    mix: Array
    bound: float
    slope: float
    picks: list[int]


def least_sum(menus: list[Menu], room: Sequence[int]) -> Solution | None:
    """The choice of points with the least sum of errors within the room; None if nothing fits."""
    fronts = [Front(menu) for menu in menus]
    space = np.array(room, dtype=np.float64)
    tries = [_relax(fronts, np.array(w) / np.maximum(space, 1), space) for w in _weights(len(room))]
    if any(t is None for t in tries):
        return None  # some mixed cost, and so at least one of the budgets, cannot be met
    relaxed = [t for t in tries if t is not None]
    found = [picks for t in relaxed if (picks := _greedy(fronts, t.picks, space)) is not None]
    if not found and (cheapest := combine([m.at(math.inf) for m in menus], room)) is not None:
        # Every mixed cost leans too far to one side: start from what fits both.
        start = [int(np.flatnonzero((f.costs <= p.cost).all(axis=1))[0]) for f, p in zip(fronts, cheapest, strict=True)]
        found = [picks for picks in [_greedy(fronts, start, space)] if picks is not None]
    best = min(found, key=lambda picks: _value(fronts, picks), default=None)
    tightest = max(relaxed, key=lambda t: t.bound)
    value = np.inf if best is None else _value(fronts, best)
    exact = value <= tightest.bound
    if not exact:
        best, exact = _improve(fronts, best, value, tightest, space)
        if best is None:
            return None
        value = _value(fronts, best)
    points = [f.points[i] for f, i in zip(fronts, best or [], strict=True)]
    return Solution(points, value, value if exact else min(value, tightest.bound))


def penalty(menus: list[Menu], room: Sequence[int]) -> Solution | None:
    """Each layer minimises error + λ · cost on its own; the smallest λ whose choices stay within the room.

    Nothing is filled up afterwards. With several budgets the cost is a mixed one, with the weight that ends best.
    """
    fronts = [Front(menu) for menu in menus]
    space = np.array(room, dtype=np.float64)
    best: Solution | None = None
    for weight in _weights(len(room)):
        # In the budget's own unit where there is one, so that λ is the error that one param or mac is worth.
        mix = np.array(weight) / (1.0 if len(room) == 1 else np.maximum(space, 1))
        picks, price = _descend(fronts, mix, space)
        value = _value(fronts, picks)
        if (_spent(fronts, picks) <= space).all() and (best is None or value < best.objective):
            points = [f.points[i] for f, i in zip(fronts, picks, strict=True)]
            best = Solution(points, value, price=price)
    return best


def _descend(fronts: list[Front], mix: Array, space: Array) -> tuple[list[int], float]:
    """Lower λ step by step from where every layer is smallest, until the next step leaves the room."""
    picks, steps = _hull_steps(fronts, mix)
    spent = _spent(fronts, picks)
    for slope, layer, to, _ in steps:
        spent = spent + fronts[layer].costs[to] - fronts[layer].costs[picks[layer]]
        if (spent > space).any():
            return picks, -slope
        picks[layer] = to
    return picks, 0.0


def product(menus: list[Menu], room: Sequence[int]) -> Solution | None:
    """The greedy of Zhang et al. (2015), eq. 14: keep the product of the layers' energies large.

    With E = 1 − error, from every layer as it is: the step down with the smallest ΔE / (E · Δcost) is taken,
    again and again, until the budget is met. The cost is in the budget's own unit; with two, in shares of both.
    """
    fronts = [Front(menu) for menu in menus]
    space = np.array(room, dtype=np.float64)
    share = [f.costs @ (1 / np.maximum(space, 1)) for f in fronts]
    order = [np.argsort(-s, kind="stable") for s in share]  # from the layer itself to the smallest choice
    place = [0] * len(fronts)
    picks = [int(o[0]) for o in order]
    while (_spent(fronts, picks) > space).any():
        best: tuple[float, int] | None = None
        for i, (front, steps) in enumerate(zip(fronts, order, strict=True)):
            if place[i] + 1 < len(steps):
                here, there = steps[place[i]], steps[place[i] + 1]
                kept = max(1 - front.error[here], 1e-300)
                loss = (front.error[there] - front.error[here]) / kept / max(share[i][here] - share[i][there], 1e-300)
                best = min(best or (np.inf, i), (float(loss), i))
        if best is None:
            return None
        place[best[1]] += 1
        picks[best[1]] = int(order[best[1]][place[best[1]]])
    points = [f.points[i] for f, i in zip(fronts, picks, strict=True)]
    return Solution(points, float(-np.sum(np.log1p(-np.minimum([p.error for p in points], 1 - 1e-16)))))


def at_price(menus: list[Menu], price: float) -> list[Point]:
    """What every layer becomes at a given λ (one unit): the least error + λ · cost, of equals the smallest error."""
    fronts = [Front(menu) for menu in menus]
    return [f.points[int(np.lexsort((f.error, f.error + price * f.costs[:, 0]))[0])] for f in fronts]


def _value(fronts: list[Front], picks: list[int]) -> float:
    return float(sum(f.error[i] for f, i in zip(fronts, picks, strict=True)))


def _spent(fronts: list[Front], picks: list[int]) -> Array:
    return np.sum([f.costs[i] for f, i in zip(fronts, picks, strict=True)], axis=0)  # type: ignore[no-any-return]


def _hull(cost: Array, error: Array) -> list[int]:
    """Indices of the lower convex hull from the cheapest point to the one without error."""
    found: list[int] = []
    for i in np.lexsort((error, cost)):
        if found and error[i] >= error[found[-1]]:
            continue
        while len(found) > 1:
            a, b = found[-2], found[-1]
            if (error[b] - error[a]) * (cost[i] - cost[a]) < (error[i] - error[a]) * (cost[b] - cost[a]):
                break
            found.pop()  # b lies on or above the line from a to i
        found.append(int(i))
    return found


Step = tuple[float, int, int, float]  # slope, layer, point to go to, extra cost


def _hull_steps(fronts: list[Front], mix: Array) -> tuple[list[int], list[Step]]:
    """The first point of every hull, and all steps from there, steepest first; a layer's come in order (convexity)."""
    steps, picks = [], []
    for layer, front in enumerate(fronts):
        cost = front.costs @ mix
        hull = _hull(cost, front.error)
        picks.append(hull[0])
        for a, b in pairwise(hull):
            extra = float(cost[b] - cost[a])
            steps.append((float(front.error[b] - front.error[a]) / extra, layer, b, extra))
    return picks, sorted(steps)


def _relax(fronts: list[Front], mix: Array, space: Array) -> Relaxation | None:
    """The linear relaxation: steps by falling steepness while they fit, the next one in part."""
    picks, steps = _hull_steps(fronts, mix)
    left = float(space @ mix) - sum(float(f.costs[i] @ mix) for f, i in zip(fronts, picks, strict=True))
    if left < -1e-9:
        return None
    for slope, layer, to, extra in steps:
        if extra > left:
            return Relaxation(mix, max(0.0, _value(fronts, picks) + slope * left), -slope, picks)
        picks[layer] = to
        left -= extra
    return Relaxation(mix, _value(fronts, picks), 0.0, picks)


def _greedy(fronts: list[Front], picks: list[int], space: Array) -> list[int] | None:
    """Spend what is left, each time on the point that lowers the error most among those that fit."""
    picks = list(picks)
    while True:
        left = space - _spent(fronts, picks)
        if (left < 0).any():
            return None  # the mixed cost fits, a single one does not
        best = (0.0, -1, -1)
        for layer, (front, have) in enumerate(zip(fronts, picks, strict=True)):
            fits = np.flatnonzero((front.costs <= left + front.costs[have]).all(axis=1))
            i = int(fits[front.error[fits].argmin()])
            best = max(best, (float(front.error[have] - front.error[i]), layer, i))
        if best[0] <= 0:
            return picks
        picks[best[1]] = best[2]


def _improve(
    fronts: list[Front], picks: list[int] | None, value: float, relaxed: Relaxation, space: Array
) -> tuple[list[int] | None, bool]:
    """Reduction and dynamic programming. Gives the best picks and whether they are proven optimal."""
    price = relaxed.slope * relaxed.mix
    reduced = [f.error + f.costs @ price for f in fronts]
    # Never above the incumbent, which rounding could make it: every layer needs a point that is alive.
    dual = min(value, sum(float(r.min()) for r in reduced) - float(space @ price))
    alive = [np.flatnonzero(dual + (r - r.min()) <= value) for r in reduced]
    # Of the layers still to come: the Lagrangian bound on their errors, and the least they cost.
    hope = _suffix([r.min() for r in reduced])
    least = _suffix([f.costs[a].min(axis=0) for f, a in zip(fronts, alive, strict=True)])
    costs, errors = np.zeros((1, len(space))), np.zeros(1)
    history: list[tuple[Ints, Ints]] = []
    exact, most = True, STATES if len(space) < 3 else SEVERAL
    for i, (front, points) in enumerate(zip(fronts, alive, strict=True)):
        parent, point = np.repeat(np.arange(len(errors)), len(points)), np.tile(points, len(errors))
        costs, errors = costs[parent] + front.costs[point], errors[parent] + front.error[point]
        promise = errors + hope[i + 1] - (space - costs) @ price
        good = np.flatnonzero((costs + least[i + 1] <= space).all(axis=1) & (promise <= value))
        if len(space) > 1 and len(good) > most:
            good, exact = good[np.argsort(promise[good], kind="stable")[:most]], False
        good = good[_undominated(costs[good], errors[good])]
        if len(good) > most:
            good, exact = good[np.argsort(promise[good], kind="stable")[:most]], False
        if not len(good):
            return picks, exact
        costs, errors = costs[good], errors[good]
        history.append((parent[good], point[good]))
    state = int(errors.argmin())
    return (_backtrack(history, state), exact) if errors[state] < value else (picks, exact)


def _suffix(parts: list[Array]) -> Array:
    """Sums of the parts from each one on; the last entry is nothing."""
    whole = np.array([*parts, np.zeros_like(parts[0])])
    return np.cumsum(whole[::-1], axis=0)[::-1]


def _backtrack(history: list[tuple[Ints, Ints]], state: int) -> list[int]:
    found = []
    for parents, chosen in reversed(history):
        found.append(int(chosen[state]))
        state = int(parents[state])
    return found[::-1]


def _undominated(costs: Array, errors: Array) -> Ints:
    """Indices of the rows that no other one undercuts in every cost and the error."""
    if costs.shape[1] == 1:
        order = np.lexsort((errors, costs[:, 0]))
        best = np.minimum.accumulate(errors[order])
        return order[np.concatenate([[True], best[1:] < best[:-1]])] if len(order) else order
    if costs.shape[1] > 2:
        return _undominated_of_many(costs, errors)
    kept, stairs = [], [(-np.inf, np.inf), (np.inf, -np.inf)]  # rising first cost, falling second cost
    for i in np.lexsort((costs[:, 1], costs[:, 0], errors)):
        step = (float(costs[i, 0]), float(costs[i, 1]))
        at = bisect_left(stairs, (step[0], np.inf))
        if stairs[at - 1][1] <= step[1]:
            continue
        at = bisect_left(stairs, step)
        while stairs[at][1] >= step[1]:
            stairs.pop(at)
        insort(stairs, step)
        kept.append(i)
    return np.array(kept, dtype=np.int64)


def _undominated_of_many(costs: Array, errors: Array) -> Ints:
    """The same for any number of costs: every row against those kept so far, which have no larger error."""
    order = np.lexsort((*costs.T[::-1], errors))
    stored, kept = np.empty_like(costs), list[int]()
    for i in order:
        if not (stored[: len(kept)] <= costs[i]).all(axis=1).any():
            stored[len(kept)] = costs[i]
            kept.append(i)
    return np.array(kept, dtype=np.int64)


def _undercut(points: list[Point]) -> list[Point]:
    kept = _undominated(np.array([p.cost for p in points], dtype=np.float64), np.array([p.error for p in points]))
    return [points[i] for i in kept]
