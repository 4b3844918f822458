"""Budgets: how much may remain of a network."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from rankwise.core.layer import Coverage
from rankwise.errors import RankwiseError

# Predicted times are a little off: so much more of the time must go, by prediction, than was asked for.
RESERVE = Fraction(7, 100)


@dataclass(frozen=True)
class Budget:
    """What may remain, in one unit or several at once.

    A value up to 1 is a fraction of the whole network, above 1 a count. `params` counts every parameter
    of the network, also those of layers that are left alone; `macs` every multiply-add of the example; `latency` is a
    fraction of the time that the network takes as it is, which has to be measured.

    >>> Budget(params=0.4)
    Budget(params=0.4, macs=None, latency=None)
    """

    params: float | int | None = None
    macs: float | int | None = None
    latency: float | None = None

    def __post_init__(self) -> None:
        if not self.units:
            raise RankwiseError(
                "a budget needs at least one of params=, macs= (a fraction or a count) and latency= (a fraction)"
            )
        for unit in self.units:
            value = getattr(self, unit)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or (isinstance(value, float) and not math.isfinite(value)):
                raise RankwiseError(f"the budget {unit}={value!r} must be a number: a fraction up to 1 or a count")
            if value <= 0:
                raise RankwiseError(f"the budget {unit}={value!r} must be above 0: a fraction up to 1 or a count")
            if unit == "latency" and value > 1:
                raise RankwiseError(
                    f"the budget latency={value!r} is above 1: it is a fraction of the measured time, such as 0.6"
                )
            if value > 1 and value != int(value):
                raise RankwiseError(
                    f"the budget {unit}={value!r} is above 1, so it is a count, and counts are whole numbers: "
                    f"for a fraction give a value up to 1 (0.4 keeps 40 %)"
                )

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)

    def limit(self, unit: str, total: int) -> int:
        """The count that must not be exceeded. A fraction means its digits: 0.29 of 100 is 29, not 28.99…96."""
        value = getattr(self, unit)
        return math.floor(Fraction(str(float(value))) * total) if value <= 1 else min(int(value), total)

    def limits(self, coverage: Coverage, nanoseconds: int | None = None) -> dict[str, int]:
        """The most of every unit; `nanoseconds` is what the whole network takes, if that was measured."""
        if self.macs is not None and coverage.macs is None:
            raise RankwiseError(
                "a budget in macs needs an example input to count positions: pass one "
                "(on the command line: --input 1,3,224,224)"
            )
        if self.latency is not None and nanoseconds is None:
            raise RankwiseError(
                "a budget in latency needs measured times: use rankwise.compress with an example input, or set "
                "table.times = rankwise.measure_times(model, example); methods that remove filters have none"
            )
        totals = {"params": coverage.params, "macs": coverage.macs or 0, "latency": nanoseconds or 0}
        limits = {unit: self.limit(unit, totals[unit]) for unit in self.units}
        if self.latency is not None:
            total = totals["latency"]
            limits["latency"] = total - math.ceil((total - limits["latency"]) * (1 + RESERVE))
        return limits

    @staticmethod
    def keep_for(nanoseconds: int, total: int) -> float:
        """The least latency to ask for where a plan takes so long: `limits` the other way round, rounded up."""
        share = 1 - Fraction(total - nanoseconds - 2, max(1, total)) / (1 + RESERVE)
        return math.ceil(10_000 * share) / 10_000

    def to_json(self) -> dict[str, Any]:
        return {unit: getattr(self, unit) for unit in self.units}

    def __str__(self) -> str:
        return ", ".join(f"{unit} {getattr(self, unit):g}" for unit in self.units)
