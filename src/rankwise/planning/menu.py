"""Menus: what a layer can become, at what cost and with what error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rankwise.core.layer import Layer
from rankwise.core.linalg import Array, Ints
from rankwise.core.measures import Curve
from rankwise.core.option import Option
from rankwise.decompositions import DECOMPOSITIONS, NOTHING, PLAIN, Selection
from rankwise.errors import RankwiseError
from rankwise.planning.hull import undominated
from rankwise.planning.table import Table
from rankwise.planning.units import LATENCY, UNITS, Unit


class Point(NamedTuple):
    """One thing a layer can become. `option` None: it stays as it is, without error."""

    cost: tuple[int, ...]  # in each unit of the budget
    error: float
    option: Option | None
    rank: int

    def fits(self, room: Sequence[int]) -> bool:
        return all(c <= r for c, r in zip(self.cost, room, strict=True))


@dataclass(frozen=True, eq=False)
class Offer:
    """An option of a layer: its costs (ranks, units) and its error by rank, and the largest rank worth having.

    Where only some ranks are wanted everything is indexed by their number, and `ranks` says which they are.
    """

    option: Option
    costs: Ints
    curve: Curve
    most: int
    ranks: Ints | None = None

    def cost(self, rank: int) -> tuple[int, ...]:
        return tuple(self.costs[rank].tolist())

    def point(self, rank: int) -> Point:
        return Point(self.cost(rank), self.curve[rank], self.option, self.real_rank(rank))

    def real_rank(self, rank: int) -> int:
        return rank if self.ranks is None else int(self.ranks[rank])

    def errors(self) -> Array:
        """The errors of the ranks from 1 to `most`; a curve that is not known yet evaluates no others."""
        if self.curve.known:
            return self.curve.values()[1 : self.most + 1]
        return np.array([self.curve[rank] for rank in range(1, self.most + 1)])

    def rank_within(self, room: Sequence[float]) -> int:
        """The largest rank whose cost stays within `room`; 0 if there is none."""
        ranks = [int(column.searchsorted(r, side="right")) - 1 for column, r in zip(self.costs.T, room, strict=True)]
        return max(0, min([self.most, *ranks]))


class Front(NamedTuple):
    """Points of a layer as arrays: costs (n, units), error, offer (−1: the layer as it is) and rank of each."""

    costs: Ints
    error: Array
    offer: Ints
    rank: Ints


@dataclass(frozen=True)
class Rules:
    """What an offer must be beside smaller: `never_slower` than the layer; channels in between a `multiple`."""

    never_slower: bool = False
    multiple: int = 1


@dataclass(frozen=True)
class Menu:
    """The offers for one layer, every one smaller than the layer itself in every unit of the budget."""

    layer: Layer
    offers: tuple[Offer, ...]
    dense: Point

    @cached_property
    def front(self) -> Front:
        """Every point that no other one undercuts. In one unit costs rise and errors fall."""
        ranks = [np.arange(1, o.most + 1) if o.ranks is None else o.ranks[1 : o.most + 1] for o in self.offers]
        dense = np.array([self.dense.cost], dtype=np.int64)
        cost = np.concatenate([dense, *(o.costs[1 : o.most + 1] for o in self.offers)])
        error = np.concatenate([[0.0], *(o.errors() for o in self.offers)])
        which = np.concatenate([[-1], *(np.full(len(r), i) for i, r in enumerate(ranks))])
        rank = np.concatenate([[0], *ranks])
        kept = undominated(cost, error)
        return Front(cost[kept], error[kept], which[kept], rank[kept])

    def front_point(self, index: int) -> Point:
        costs, errors, offers, ranks = self.front
        offer = offers.item(index)
        if offer < 0:
            return self.dense
        return Point(tuple(costs[index].tolist()), errors.item(index), self.offers[offer].option, ranks.item(index))

    @cached_property
    def _falling(self) -> Array:
        return -self.front.error

    def at(self, level: float) -> list[Point]:
        """The cheapest points with an error of at most `level`; more than one only for several units."""
        if len(self.dense.cost) == 1 and all(o.curve.known for o in self.offers):
            return [self.front_point(int(self._falling.searchsorted(-level)))]
        found = [self.dense]
        # Cheapest lower bounds first: an offer that cannot beat what is there needs no evaluation at all.
        floor = [(max(1, int((-o.curve.lower).searchsorted(-level))), o) for o in self.offers]
        able = [(least, o) for least, o in floor if least <= o.most]
        for least, offer in sorted(able, key=lambda f: f[1].cost(f[0])[0]):
            if not any(p.fits(offer.cost(least)) for p in found):
                rank = max(1, offer.curve.first(level))
                if rank <= offer.most:
                    found = pareto([*found, offer.point(rank)])
        return found

    def only(self, offer: Offer) -> Menu:
        """The same layer with this one option, or as it is."""
        return Menu(self.layer, (offer,), self.dense)


def pareto(points: list[Point]) -> list[Point]:
    """Drop every point that another one undercuts in every unit (the first of equals stays)."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost, p.error)):
        if not any(other.fits(point.cost) for other in kept):
            kept.append(point)
    return kept


def menus(
    table: Table,
    units: tuple[str, ...],
    measure: str,
    selection: Selection | None = None,
    decompositions: tuple[str, ...] = (PLAIN.name,),
    rules: Rules | None = None,
) -> list[Menu]:
    """A menu for every layer of the table, with the options that `selection` and `decompositions` allow."""
    selection = selection or Selection()
    rules = rules or Rules()
    asked = tuple(UNITS[name] for name in units)
    if rules.never_slower and table.times is None:
        raise RankwiseError(
            "never_slower needs measured times: give an example input (--input) "
            "(in Python, for a table: table.times = rankwise.measure_times(model, example))"
        )
    # Units and times themselves, not their names: a key keeps what it stands for alive, so it cannot stand for another.
    key = ("menus", asked, measure, repr(selection), decompositions, rules, table.times)
    if key not in table.cache:
        table.cache[key] = [
            _menu(table, layer, asked, measure, _wanted(table, layer, selection, decompositions), rules)
            for layer in table.coverage.layers
        ]
    return table.cache[key]  # type: ignore[no-any-return]


def _menu(
    table: Table, layer: Layer, units: tuple[Unit, ...], measure: str, options: list[Option], rules: Rules
) -> Menu:
    smaller = dict.fromkeys([*units, *([LATENCY] if rules.never_slower else [])])  # in which an offer must be
    whole = {unit: unit.layer(layer, table.times) for unit in smaller}
    dense = tuple(int(whole[unit] or 0) for unit in units)
    offers = []
    for option in options:
        by_unit = {unit: unit.by_rank(layer, option, table.times) for unit in smaller}
        known = {unit: by_rank for unit, by_rank in by_unit.items() if by_rank is not None}
        if len(known) < len(by_unit):
            continue  # its cost or its time is not known
        curve = table.curve(layer, option, measure)
        limits = [_largest(by_rank, unit.margin, whole[unit]) for unit, by_rank in known.items()]
        most = min([len(curve) - 1, *(m for m in limits if m is not None)]) if any(dense) else 0
        offer = Offer(option, np.stack([known[unit] for unit in units], axis=1), curve, most)
        offer = offer if rules.multiple == 1 else _round(offer, layer, rules.multiple)
        if offer.most >= 1:
            offers.append(offer)
    return Menu(layer, tuple(offers), Point(dense, 0.0, None, 0))


def _largest(by_rank: Ints, margin: float, dense: int | None) -> int | None:
    """The largest rank that costs less than the layer itself; by more than measurements are off, where it is measured.

    A unit in which the layer costs nothing (it is not called) cannot get smaller and does not count: None.
    """
    return int(by_rank.searchsorted(dense * margin)) - 1 if dense else None


def _round(offer: Offer, layer: Layer, multiple: int) -> Offer:
    """Only those ranks that make the number of channels between the factors a multiple."""
    slices = layer.groups * offer.option.slices
    ranks = [0, *(r for r in range(1, offer.most + 1) if slices * r % multiple == 0)]
    return Offer(offer.option, offer.costs[ranks], offer.curve.at(ranks), len(ranks) - 1, np.array(ranks))


def _wanted(table: Table, layer: Layer, selection: Selection, decompositions: tuple[str, ...]) -> list[Option]:
    """The table's options for a layer, narrowed to those a method asks for.

    A layer that the calibration data does not reach may have none.
    """
    missing = [d for d in decompositions if d not in table.decompositions]
    if missing:
        data = DECOMPOSITIONS[missing[0]].needs != NOTHING
        raise RankwiseError(
            f"the table has no {missing[0]!r}: build it with decompositions={decompositions!r}"
            f"{', and calibration data (data=)' if data else ''}"
        )
    there = table.options(layer)
    found = [option for name in decompositions for option in DECOMPOSITIONS[name].wanted(layer, there, selection)]
    return list(dict.fromkeys(found))
