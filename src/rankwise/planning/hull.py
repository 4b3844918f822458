"""Points that are worth having: those that nothing undercuts, and the lower convex hull of them. Arrays only."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from rankwise.core.linalg import Array

Ints = NDArray[np.int64]

# Sweeps over all points at once before the rest is walked through one by one; real fronts need two or three.
SWEEPS = 8


def undominated(costs: Array | Ints, errors: Array) -> Ints:
    """Indices of the rows that no other one undercuts in every cost and the error; of equals the first.

    In one unit they come with rising cost, in several with rising error.
    """
    if costs.shape[1] == 1:
        order = np.lexsort((errors, costs[:, 0]))
        return order[falls(errors[order])]
    return _of_two(costs, errors) if costs.shape[1] == 2 else _of_many(costs, errors)


def falls(values: Array) -> NDArray[np.bool_]:
    """Where a sequence goes below everything before it."""
    lowest = np.minimum.accumulate(values)
    return np.concatenate([[True], lowest[1:] < lowest[:-1]])[: len(values)]


def _of_two(costs: Array | Ints, errors: Array) -> Ints:
    kept, stairs = [], [(-np.inf, np.inf), (np.inf, -np.inf)]  # rising first cost, falling second cost
    order = np.lexsort((costs[:, 1], costs[:, 0], errors))
    for i, one, other in zip(order.tolist(), *costs[order].T.tolist(), strict=True):
        if stairs[bisect_left(stairs, (one, np.inf)) - 1][1] <= other:
            continue
        at = bisect_left(stairs, (one, other))
        while stairs[at][1] >= other:
            stairs.pop(at)
        insort(stairs, (one, other))
        kept.append(i)
    return np.array(kept, dtype=np.int64)


def _of_many(costs: Array | Ints, errors: Array) -> Ints:
    """The same for any number of costs: every row against those kept so far, which have no larger error."""
    order = np.lexsort((*costs.T[::-1], errors))
    stored, kept = np.empty_like(costs), list[int]()
    for i in order.tolist():
        if not (stored[: len(kept)] <= costs[i]).all(axis=1).any():
            stored[len(kept)] = costs[i]
            kept.append(i)
    return np.array(kept, dtype=np.int64)


def lower_hull(cost: Array, error: Array) -> Ints:
    """Indices of the lower convex hull from the cheapest point to the one with the least error.

    A point on or above the line between any two others is no corner, so all such points between two neighbours go
    at once; far neighbours first, because where two curves cross, near ones would take off one point at a time. Where
    every point is below the line between the next ones, the rest is convex at every corner and therefore as a whole.
    """
    order = np.lexsort((error, cost))
    order = order[falls(error[order])]
    for _ in range(SWEEPS):
        if _below(cost[order], error[order], 1).all():
            return order
        reach = len(order) // 2
        while reach > 0:
            order = order[_below(cost[order], error[order], reach)]
            reach //= 2
    return order[_chain(cost[order].tolist(), error[order].tolist())]


def _below(cost: Array, error: Array, reach: int) -> NDArray[np.bool_]:
    """Which points lie below the line between those so many places before and after; both ends count as below."""
    middle = np.arange(1, len(cost) - 1)
    before, after = np.maximum(middle - reach, 0), np.minimum(middle + reach, len(cost) - 1)
    c, e = cost[before], error[before]
    below = (error[middle] - e) * (cost[after] - c) < (error[after] - e) * (cost[middle] - c)
    return np.concatenate([[True], below, [True]])[: len(cost)]


def _chain(cost: list[float], error: list[float]) -> list[int]:
    """Andrew's monotone chain: costs rise and errors fall."""
    found: list[int] = []
    for i in range(len(cost)):
        while len(found) > 1:
            a, b = found[-2], found[-1]
            if (error[b] - error[a]) * (cost[i] - cost[a]) < (error[i] - error[a]) * (cost[b] - cost[a]):
                break
            found.pop()  # b lies on or above the line from a to i
        found.append(i)
    return found
