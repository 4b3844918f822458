"""The least total error under a budget: a multiple-choice knapsack.

1. Lower hulls of the layers' fronts, steepest step first: the optimum of the linear relaxation, hence a
   lower bound; at most one layer is fractional in it, so rounding down is nearly optimal already.
2. Greedy filling of what is left gives an incumbent.
3. Points whose reduced cost alone exceeds the gap between the two cannot be part of anything better.
4. Dynamic programming over what remains closes the gap: partial sums as a Pareto front, each with the relaxation of
   the layers to come as its bound. Layers with long steps come first, because relaxations are off by one step; the
   most promising sum, completed as in 1 and 2, is a new incumbent.

With several budgets steps 1 and 2 see one mixed cost, Σ weight · cost / budget; the bound is a bound for
every weight, and the best one is used. Step 4 sees all costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rankwise.core.linalg import Array
from rankwise.planning.fronts import Fronts, Steps, all_steps, mixtures, steps_along
from rankwise.planning.hull import Ints, undominated
from rankwise.planning.menu import Menu
from rankwise.planning.minimax import Solution, combine

# Partial sums kept for each layer. Beyond this the most promising stay and the gap is no longer zero.
STATES = 20_000
SEVERAL = 2_000  # the same for three budgets, where finding out which are worth keeping takes longer


class Pass(NamedTuple):
    """How many partial sums to make, and at most such a part (an eighth, …) of those left in one layer.

    Counted, not timed, so that the same request gives the same plan on every machine.
    """

    work: int
    part: int
    above: float = 0.0  # only where the gap is still larger


# Many sums in few layers find what is hard, few sums in many layers finish it; each pass profits from the incumbent
# before it. The last is for layers whose errors fall in one long step (flat spectra), where relaxations say little.
PASSES = (Pass(250_000, 8), Pass(1_000_000, 64), Pass(2_000_000, 8), Pass(8_000_000, 8, above=1e-6))


@dataclass(frozen=True)
class Relaxation:
    """The linear relaxation in a mixed cost: its value, its multiplier, and its steps rounded down."""

    mix: Array
    bound: float
    slope: float
    picks: Ints


@dataclass(frozen=True)
class Incumbent:
    """The best picks so far (none: nothing is known to fit), their value, and a lower bound."""

    picks: Ints | None
    value: float
    bound: float

    @property
    def gap(self) -> float:
        if self.value <= self.bound:
            return 0.0
        return 1.0 if math.isinf(self.value) else (self.value - self.bound) / self.value


def least_sum(menus: list[Menu], room: Sequence[int]) -> Solution | None:
    """The choice of points with the least sum of errors within the room; None if nothing fits."""
    fronts = Fronts(menus, len(room))
    space = np.array(room, dtype=np.float64)
    tries = [_relax(fronts, np.array(w) / np.maximum(space, 1), space) for w in mixtures(len(room))]
    if any(t is None for t in tries):
        return None  # some mixed cost, and so at least one of the budgets, cannot be met
    relaxed = [t for t in tries if t is not None]
    every = np.arange(len(fronts.error))
    found = [picks for t in relaxed if (picks := _greedy(fronts, t.picks, space, every)) is not None]
    if not found and (fitting := _fitting(fronts, room)) is not None:
        # Every mixed cost leans too far to one side: start from what fits all.
        found = [picks for picks in [_greedy(fronts, fitting, space, every)] if picks is not None]
    tightest = max(relaxed, key=lambda t: t.bound)
    picks = min(found, key=fronts.value, default=None)
    best = Incumbent(picks, math.inf if picks is None else fronts.value(picks), tightest.bound)
    for each in PASSES:
        if best.gap > each.above:
            best = _improve(fronts, best, tightest, space, each)
    if best.picks is None:
        return None
    return Solution(fronts.points(best.picks), best.value, min(best.value, best.bound))


def _fitting(fronts: Fronts, room: Sequence[int]) -> Ints | None:
    """Picks that fit several budgets at once, if there are any."""
    points = combine([menu.at(math.inf) for menu in fronts.menus], room)
    if points is None:
        return None
    within = [(m.front.costs <= p.cost).all(axis=1) for m, p in zip(fronts.menus, points, strict=True)]
    return np.array([int(first + w.argmax()) for first, w in zip(fronts.first, within, strict=False)], dtype=np.int64)


def _relax(fronts: Fronts, mix: Array, space: Array) -> Relaxation | None:
    """The linear relaxation: steps by falling steepness while they fit, the next one in part."""
    cost = fronts.costs @ mix
    steps = all_steps(fronts, cost)
    left = float(space @ mix) - sum(cost[steps.start].tolist())
    if left < -1e-9:
        return None
    before = np.subtract.accumulate(np.concatenate([[left], steps.extra]))[:-1]  # what is left before each step
    over = np.flatnonzero(steps.extra > before)
    if not len(over):
        picks = steps.taken(len(steps.to))
        return Relaxation(mix, fronts.value(picks), 0.0, picks)
    first = int(over[0])
    picks, slope = steps.taken(first), float(steps.slope[first])
    return Relaxation(mix, max(0.0, fronts.value(picks) + slope * float(before[first])), -slope, picks)


def _greedy(fronts: Fronts, picks: Ints, space: Array, pool: Ints) -> Ints | None:
    """Spend what is left, each time on the point of the pool that lowers the error most among those that fit."""
    picks = picks.copy()
    while True:
        left = space - fronts.spent(picks)
        if (left < 0).any():
            return None  # the mixed cost fits, a single one does not
        layer, have = fronts.layer[pool], fronts.error[picks]
        better = fronts.error[pool] < have[layer]
        better &= (fronts.costs[pool] <= (left + fronts.costs[picks])[layer]).all(axis=1)
        if not better.any():
            return picks
        fitting, layer = pool[better], layer[better]
        gain = have[layer] - fronts.error[fitting]
        most = layer[np.flatnonzero(gain == gain.max())[-1]]  # of equals the last layer
        own = fitting[layer == most]
        picks[most] = own[fronts.error[own].argmin()]
        if len(space) == 1:
            pool = fitting  # in one unit room only shrinks: what does not fit now never will


@dataclass(frozen=True)
class Core:
    """The points of each layer that may be part of something better, and the hulls of these; longest steps first."""

    order: Ints  # of the layers; below, a layer is its place in this order
    alive: list[Ints]
    steps: Steps
    mix: Array
    tolerance: float  # what rounding may add to a bound

    def most(self, place: int, work: int, part: int) -> int:
        """How many partial sums may go on to the layer at this place, so that it makes its part of the work."""
        if place == len(self.alive):
            return STATES
        sharing = sum(len(points) > 1 for points in self.alive[place:])
        return max(1, work // max(1, min(sharing, part)) // len(self.alive[place]))


@dataclass(frozen=True)
class Rest:
    """The relaxation of the layers to come: their least error by the room for them, linear between corners."""

    steps: Steps
    room: Array
    error: Array

    def picks(self, room: float) -> Ints:
        """The steps that fit the room."""
        return self.steps.taken(max(0, int(np.searchsorted(self.room, room, side="right")) - 1))


@dataclass(frozen=True)
class Sums:
    """Partial sums over the first layers: costs (n, units), errors (n,), bounds, and how they were made."""

    costs: Array
    errors: Array
    promise: Array
    history: tuple[tuple[Ints, Ints], ...]  # for each layer: the sum before, the point

    def pick(self, rows: Ints) -> Sums:
        parent, point = self.history[-1]
        history = (*self.history[:-1], (parent[rows], point[rows]))
        return Sums(self.costs[rows], self.errors[rows], self.promise[rows], history)

    def picks(self, row: int) -> Ints:
        found = []
        for parent, point in reversed(self.history):
            found.append(int(point[row]))
            row = int(parent[row])
        return np.array(found[::-1], dtype=np.int64)


def _improve(fronts: Fronts, best: Incumbent, relaxed: Relaxation, space: Array, limits: Pass) -> Incumbent:
    """One pass of reduction and dynamic programming. The bound is the value if nothing was dropped."""
    core = _reduce(fronts, best.value, relaxed, space)
    least = _suffix([fronts.costs[points].min(axis=0) for points in core.alive])
    sums = Sums(np.zeros((1, len(space))), np.zeros(1), np.zeros(1), ())
    picks, value, missed, work = best.picks, best.value, math.inf, limits.work
    pool, rounded = np.sort(np.concatenate(core.alive)), np.zeros(0, dtype=np.int64)
    for place, points in enumerate(core.alive):
        work -= len(points) * len(sums.errors)
        rest = _rest(fronts, core, place)
        sums = _grow(fronts, core, sums, points, rest, space)
        good = (sums.costs + least[place + 1] <= space).all(axis=1) & (sums.promise <= value + core.tolerance)
        sums, dropped = _thin(sums.pick(np.flatnonzero(good)), core.most(place + 1, work, limits.part))
        missed = min(missed, dropped - core.tolerance)
        if not len(sums.errors):
            break
        before, rounded = rounded, _complete(core, sums, rest, space)
        if np.array_equal(before, rounded):
            continue
        filled = _greedy(fronts, rounded, space, pool)
        if filled is not None and fronts.value(filled) < value:
            picks, value = filled, fronts.value(filled)
    return Incumbent(picks, value, max(best.bound, min(value, missed)))


def _reduce(fronts: Fronts, value: float, relaxed: Relaxation, space: Array) -> Core:
    """Leave out what cannot improve on the value: dual bound + reduced cost is above it."""
    price = relaxed.slope * relaxed.mix
    reduced = fronts.error + fronts.costs @ price
    low = np.minimum.reduceat(reduced, fronts.first[:-1])
    # Never above the incumbent, which rounding could make it: every layer needs a point that is alive.
    dual = min(value, float(low.sum()) - float(space @ price))
    alive = fronts.split(np.flatnonzero(dual + (reduced - low[fronts.layer]) <= value))
    mix = relaxed.mix if len(space) > 1 else np.ones(1)  # in one unit counts, whose sums are exact
    steps = steps_along(fronts, fronts.costs @ mix, alive)
    longest = np.zeros(len(alive))
    np.maximum.at(longest, steps.layer, steps.extra)
    order = np.argsort(-longest, kind="stable")
    steps = Steps(steps.start[order], steps.slope, steps.extra, np.argsort(order)[steps.layer], steps.to)
    rounding = 1e-12 * float(fronts.error[steps.start].sum())
    if len(space) > 1:
        rounding += 1e-15 * float(np.abs(steps.slope).max(initial=0.0))  # room for the rest is of the order of 1
    return Core(order, [alive[i] for i in order], steps, mix, rounding)


def _rest(fronts: Fronts, core: Core, place: int) -> Rest:
    every = core.steps
    coming = every.layer > place
    layer, start = every.layer[coming] - place - 1, every.start[place + 1 :]
    steps = Steps(start, every.slope[coming], every.extra[coming], layer, every.to[coming])
    least = float(fronts.spent(start) @ core.mix)
    room = np.cumsum(np.concatenate([[least], steps.extra]))
    error = np.cumsum(np.concatenate([[fronts.error[start].sum()], steps.slope * steps.extra]))
    return Rest(steps, room, error)


def _grow(fronts: Fronts, core: Core, sums: Sums, points: Ints, rest: Rest, space: Array) -> Sums:
    """Every partial sum with every point of the next layer."""
    count = len(sums.errors)
    parent, point = np.repeat(np.arange(count), len(points)), np.tile(points, count)
    costs, errors = sums.costs[parent] + fronts.costs[point], sums.errors[parent] + fronts.error[point]
    promise = errors + np.interp((space - costs) @ core.mix, rest.room, rest.error)
    return Sums(costs, errors, promise, (*sums.history, (parent, point)))


def _thin(sums: Sums, most: int) -> tuple[Sums, float]:
    """The sums that no other one undercuts, at most so many, and the least that those left out promised.

    In several units finding them takes long, so what is too much is left out before as well.
    """
    units = sums.costs.shape[1]
    most = min(most, STATES if units < 3 else SEVERAL)
    dropped = math.inf
    for before in (True, False):
        if len(sums.errors) > most and (units > 1 or not before):
            ranked = np.argsort(sums.promise, kind="stable")
            dropped = min(dropped, float(sums.promise[ranked[most]]))
            sums = sums.pick(ranked[:most])
        if before:
            sums = sums.pick(undominated(sums.costs, sums.errors))
    return sums, dropped


def _complete(core: Core, sums: Sums, rest: Rest, space: Array) -> Ints:
    """The most promising sum with those steps of the rest that fit, by layer."""
    row = int(sums.promise.argmin())
    tail = rest.picks(float((space - sums.costs[row]) @ core.mix))
    return np.concatenate([sums.picks(row), tail])[np.argsort(core.order)]


def _suffix(parts: list[Array]) -> Array:
    """Sums of the parts from each one on; the last entry is nothing."""
    whole = np.array([*parts, np.zeros_like(parts[0])])
    return np.cumsum(whole[::-1], axis=0)[::-1]
