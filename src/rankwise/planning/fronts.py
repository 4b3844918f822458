"""What all layers can become, as arrays: every point worth having, and the steps along the lower hulls."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from rankwise.core.linalg import Array
from rankwise.planning.hull import Ints, lower_hull
from rankwise.planning.menu import Menu, Point


class Fronts:
    """The points of all layers that nothing undercuts, one layer after the other: costs (n, units), errors (n,).

    Picks are indices into these arrays, one for each layer; only they become `Point`s in the end.
    """

    def __init__(self, menus: list[Menu], units: int) -> None:
        self.menus = menus
        sizes = [len(menu.front.error) for menu in menus]
        self.costs = np.concatenate([np.zeros((0, units)), *(menu.front.costs for menu in menus)])
        self.error = np.concatenate([np.zeros(0), *(menu.front.error for menu in menus)])
        self.first = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])  # of each layer, and the end
        self.layer = np.repeat(np.arange(len(menus)), sizes)

    def split(self, points: Ints) -> list[Ints]:
        """Some of the points, in their order, by layer."""
        return np.split(points, np.searchsorted(points, self.first[1:-1])) if self.menus else []

    def points(self, picks: Ints) -> list[Point]:
        return [menu.front_point(int(i)) for menu, i in zip(self.menus, picks - self.first[:-1], strict=True)]

    def value(self, picks: Ints) -> float:
        return float(sum(self.error[picks].tolist()))

    def spent(self, picks: Ints) -> Array:
        return self.costs[picks].sum(axis=0)  # type: ignore[no-any-return]

    def spent_along(self, start: Ints, layer: Ints, to: Ints) -> Array:
        """What is spent at the start and after each step, (steps + 1, units). Costs are counts, so this is exact."""
        grouped = np.argsort(layer, kind="stable")
        fresh = np.diff(layer[grouped], prepend=-1) > 0  # a layer's first step
        before = np.empty_like(to)
        before[grouped] = np.where(fresh, start[layer[grouped]], np.roll(to[grouped], 1))
        changes = self.costs[to] - self.costs[before]
        return np.cumsum(np.concatenate([self.spent(start)[None], changes]), axis=0)


@dataclass(frozen=True)
class Steps:
    """Along hulls: the cheapest corner of every layer, and all steps from there on, steepest first.

    Hulls are convex, so the steps of one layer come in their own order.
    """

    start: Ints
    slope: Array
    extra: Array  # cost
    layer: Ints
    to: Ints

    def taken(self, count: int) -> Ints:
        """The picks after so many steps."""
        picks = self.start.copy()
        picks[self.layer[:count]] = self.to[:count]
        return picks


def steps_along(fronts: Fronts, cost: Array, members: list[Ints]) -> Steps:
    """The steps along the hulls of some points of each layer, in a mixed cost."""
    hulls = [m[lower_hull(cost[m], fronts.error[m])] for m in members]
    extras = [np.diff(cost[hull]) for hull in hulls]
    falls = [np.diff(fronts.error[hull]) for hull in hulls]
    # Rounding must not make a step steeper than the one before it: their order would be lost.
    slopes = [np.maximum.accumulate(fall / extra) for fall, extra in zip(falls, extras, strict=True)]
    slope = np.concatenate([np.zeros(0), *slopes])
    order = np.argsort(slope, kind="stable")
    return Steps(
        start=np.array([hull[0] for hull in hulls], dtype=np.int64),
        slope=slope[order],
        extra=np.concatenate([np.zeros(0), *extras])[order],
        layer=np.repeat(np.arange(len(hulls)), [len(extra) for extra in extras])[order],
        to=np.concatenate([np.zeros(0, dtype=np.int64), *(hull[1:] for hull in hulls)])[order],
    )


def all_steps(fronts: Fronts, cost: Array) -> Steps:
    return steps_along(fronts, cost, fronts.split(np.arange(len(fronts.error))))


def mixtures(units: int) -> list[list[float]]:
    """Ways to mix so many costs, each summing to 1: sixteenths for two, quarters for three."""
    parts = {1: 1, 2: 16}.get(units, 4)
    every = [w for w in product(range(parts + 1), repeat=units - 1) if sum(w) <= parts]
    return [[*(i / parts for i in w), (parts - sum(w)) / parts] for w in every]
