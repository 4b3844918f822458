"""Budgets: how much may remain of a network."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from rankwise.core.layer import Coverage
from rankwise.errors import BudgetError, RankwiseError
from rankwise.planning.times import Times
from rankwise.planning.units import PARAMS, UNITS, Unit

Value = float | int | None


@dataclass(frozen=True, init=False, repr=False)
class Budget:
    """What may remain, in one unit or several at once.

    A value up to 1 is a fraction of the whole network, above 1 a count. `params` counts every parameter
    of the network, also those of layers that are left alone; `macs` every multiply-add of the example; `latency` is a
    fraction of the time that the network takes as it is, which has to be measured. Further units of the registry
    (units.py) are given and read by their names as well, and are kept in `others`.

    >>> Budget(params=0.4)
    Budget(params=0.4, macs=None, latency=None)
    """

    params: Value
    macs: Value
    latency: Value
    others: tuple[tuple[str, float | int], ...]

    def __init__(self, params: Value = None, macs: Value = None, latency: Value = None, **others: Value) -> None:
        kept = cast(Iterable[tuple[str, Value]], others.pop("others", None) or ())  # from dataclasses.replace
        others = {**dict(kept), **others}
        unknown = [name for name in others if name not in UNITS]
        if unknown:
            raise RankwiseError(f"the budget has the unknown unit {unknown[0]!r}: possible are {', '.join(UNITS)}")
        given = tuple((name, others[name]) for name in UNITS if others.get(name) is not None)
        for field, value in {"params": params, "macs": macs, "latency": latency, "others": given}.items():
            object.__setattr__(self, field, value)
        if not self.units:
            raise RankwiseError(f"no budget was given: give keep=0.4, for instance, or one of {_possible()}")
        for name in self.units:
            _check(UNITS[name], getattr(self, name))

    def __getattr__(self, name: str) -> Value:
        """A unit that is no field: its value, or None."""
        if name in UNITS:
            return dict(self.__dict__.get("others", ())).get(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(name for name in UNITS if getattr(self, name) is not None)

    @property
    def timed(self) -> bool:
        """Whether times have to be measured for it."""
        return any(UNITS[name].timed for name in self.units)

    def limit(self, unit: str, total: int) -> int:
        """The count that it names; `limits` also keep the unit's reserve."""
        return UNITS[unit].asked(getattr(self, unit), total)

    def limits(self, coverage: Coverage, times: Times | None = None) -> dict[str, int]:
        """The most of every unit that a plan may have; some units need `times` that were measured."""
        totals = {name: UNITS[name].total(coverage, times) for name in self.units}
        return {name: UNITS[name].limit(getattr(self, name), total) for name, total in totals.items()}

    def to_json(self) -> dict[str, float | int]:
        return {name: getattr(self, name) for name in self.units}

    def __repr__(self) -> str:
        parts = [("params", self.params), ("macs", self.macs), ("latency", self.latency), *self.others]
        return f"Budget({', '.join(f'{name}={value!r}' for name, value in parts)})"

    def __str__(self) -> str:
        return ", ".join(f"{name} {getattr(self, name):g}" for name in self.units)


def check_sizes(budget: Budget | None, coverage: Coverage) -> None:
    """Ask back where a count looks like percent: 40 of 269,722 parameters would be next to nothing."""
    for name in () if budget is None else budget.units:
        value, unit = getattr(budget, name), UNITS[name]
        total = None if unit.timed else unit.whole(coverage, None)
        if total is not None and 1 < value <= 100 and 10 * value < total:
            keyword = "keep" if name == PARAMS.name else name
            raise BudgetError(
                f"{keyword}={value:g} is above 1, so it is a count: {unit.amount(int(value))} of {unit.show(total)}; "
                f"{value:g} % is {keyword}={value / 100:g}?"
            )


def _possible() -> str:
    """The keywords, and whether each takes counts."""
    counts = ", ".join(f"{u.name}=" for u in UNITS.values() if not u.fraction_of)
    fractions = ", ".join(f"{u.name}=" for u in UNITS.values() if u.fraction_of)
    return f"{counts} (a fraction or a count) and {fractions} (a fraction)"


def _check(unit: Unit, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (isinstance(value, float) and not math.isfinite(value)):
        raise RankwiseError(f"the budget {unit.name}={value!r} must be a number: a fraction up to 1 or a count")
    assert isinstance(value, int | float)
    if value <= 0:
        raise RankwiseError(f"the budget {unit.name}={value!r} must be above 0: a fraction up to 1 or a count")
    if unit.fraction_of and value > 1:
        raise RankwiseError(
            f"the budget {unit.name}={value!r} is above 1: it is a fraction of {unit.fraction_of}, such as 0.6"
        )
    if value > 1 and value != int(value):
        raise RankwiseError(
            f"the budget {unit.name}={value!r} is above 1, so it is a count, and counts are whole numbers: "
            f"for a fraction give a value up to 1 (0.4 keeps 40 %)"
        )
