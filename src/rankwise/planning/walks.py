"""Searches that walk along the layers' fronts until the budget is met: `penalty` and `product`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankwise.core.linalg import Array
from rankwise.planning.fronts import Fronts, all_steps, mixtures
from rankwise.planning.hull import Ints
from rankwise.planning.menu import Menu, Point
from rankwise.planning.minimax import Solution

TINY = 1e-300  # in place of a divisor of 0


def penalty(menus: list[Menu], room: Sequence[int]) -> Solution | None:
    """Each layer minimises error + λ · cost on its own; the smallest λ whose choices stay within the room.

    Nothing is filled up afterwards. With several budgets the cost is a mixed one, with the weight that ends best.
    """
    fronts = Fronts(menus, len(room))
    space = np.array(room, dtype=np.float64)
    best: Solution | None = None
    for weight in mixtures(len(room)):
        # In the budget's own unit where there is one, so that λ is the error that one param or mac is worth.
        mix = np.array(weight) / (1.0 if len(room) == 1 else np.maximum(space, 1))
        picks, price = _descend(fronts, mix, space)
        value = fronts.value(picks)
        if (fronts.spent(picks) <= space).all() and (best is None or value < best.objective):
            best = Solution(fronts.points(picks), value, price=price)
    return best


def _descend(fronts: Fronts, mix: Array, space: Array) -> tuple[Ints, float]:
    """Lower λ step by step from where every layer is smallest, until the next step leaves the room."""
    steps = all_steps(fronts, fronts.costs @ mix)
    spent = fronts.spent_along(steps.start, steps.layer, steps.to)
    over = np.flatnonzero((spent[1:] > space).any(axis=1))
    if not len(over):
        return steps.taken(len(steps.to)), 0.0
    return steps.taken(int(over[0])), -float(steps.slope[over[0]])


def product(menus: list[Menu], room: Sequence[int]) -> Solution | None:
    """The greedy of Zhang et al. (2015), eq. 14: keep the product of the layers' energies large.

    With E = 1 − error, from every layer as it is: the step down with the smallest ΔE / (E · Δcost) is taken, of equals
    the first layer's, again and again, until the budget is met. The cost is in the budget's own unit; with two, in
    shares of both.

    Taking the smallest of the layers' next steps sorts all steps by the largest value that their layer has shown so
    far: a step smaller than one before it in its layer is taken as soon as that one is.
    """
    fronts = Fronts(menus, len(room))
    space = np.array(room, dtype=np.float64)
    order, losses = zip(*(_losses(menu, space) for menu in menus), strict=True) if menus else ((), ())
    start = fronts.first[:-1] + np.array([o[0] for o in order], dtype=np.int64)
    layer = np.repeat(np.arange(len(menus)), [len(loss) for loss in losses])
    to = fronts.first[layer] + np.concatenate([np.zeros(0, dtype=np.int64), *(o[1:] for o in order)])
    taken = np.argsort(np.concatenate([np.zeros(0), *map(np.maximum.accumulate, losses)]), kind="stable")
    layer, to = layer[taken], to[taken]
    met = (fronts.spent_along(start, layer, to) <= space).all(axis=1)
    if not met.any():
        return None
    count = int(met.argmax())
    picks = start.copy()
    picks[layer[:count]] = to[:count]
    return Solution(fronts.points(picks), float(-np.sum(np.log1p(-np.minimum(fronts.error[picks], 1 - 1e-16)))))


def _losses(menu: Menu, space: Array) -> tuple[Ints, Array]:
    """A layer's points from the layer itself to the smallest choice, and ΔE / (E · Δcost) of each step between them."""
    share = menu.front.costs.astype(np.float64) @ (1 / np.maximum(space, 1))
    order = np.argsort(-share, kind="stable")
    share, error = share[order], menu.front.error[order]
    with np.errstate(over="ignore"):
        return order, np.diff(error) / np.maximum(1 - error[:-1], TINY) / np.maximum(-np.diff(share), TINY)


def at_price(menus: list[Menu], price: float) -> list[Point]:
    """What every layer becomes at a given λ (one unit): the least error + λ · cost, of equals the smallest error."""
    fronts = [menu.front for menu in menus]
    best = [np.lexsort((f.error, f.error + price * f.costs[:, 0]))[0] for f in fronts]
    return [menu.front_point(int(i)) for menu, i in zip(menus, best, strict=True)]
