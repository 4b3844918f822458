"""The smallest network within a limit on what it loses, by bisection over budgets.

A smaller network is taken to lose more. Every size that is tried is built and scored once, and only a network that was
scored is ever given back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from rankwise.errors import BudgetError, RankwiseError
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Plan
from rankwise.planning.units import UNITS

STEP = 0.01  # sizes closer than this are not told apart
ROUNDS = 7  # at most: 2⁻⁷ < STEP

Make = Callable[[Budget], tuple[nn.Module, Plan]]
Tell = Callable[["Trial"], None]


@dataclass(frozen=True)
class Trial:
    """A size that was tried: what was asked, what was reached, and what it lost; None where no plan is that small."""

    asked: float
    keep: float | None
    drop: float | None
    within: bool

    def to_json(self) -> dict[str, Any]:
        return {"asked": self.asked, "keep": self.keep, "drop": self.drop, "within": self.within}


def check_limit(limit: float | str, unit: str) -> None:
    """Refuse a limit that is no number, and a unit that no budget has."""
    if unit not in UNITS:
        raise RankwiseError(f"the unit {unit} was given: possible are {', '.join(UNITS)}")
    allowed(limit, 1.0)


def allowed(limit: float | str, whole: float) -> float:
    """How much of a metric may be lost: a number, or a percentage of what the network has as it is.

    >>> allowed(1.5, 80.0), allowed("5%", 80.0), allowed("5%", -4.0)
    (1.5, 4.0, 0.2)
    """
    share = isinstance(limit, str) and limit.strip().endswith("%")
    try:
        most = float(limit.strip().removesuffix("%")) if isinstance(limit, str) else float(limit)
    except ValueError:
        most = math.nan
    if not 0 <= most < math.inf:
        raise RankwiseError(
            f"a drop of {limit} was given: give how much of the metric may be lost, from 0 on, or a share such as 5%"
        )
    return most * abs(whole) / 100 if share else most


def smallest(
    make: Make,
    score: Callable[[nn.Module], float],
    whole: float,
    limit: float,
    unit: str = "params",
    tell: Tell | None = None,
) -> tuple[nn.Module, Plan, list[Trial]]:
    """The network that `make` builds for the least budget in `unit` that scores at most `limit` points below `whole`.

    Gives the network, its plan, and all that was tried.
    """
    check_limit(limit, unit)
    best: tuple[nn.Module, Plan] | None = None
    trials: list[Trial] = []
    low, high = 0.0, 1.0
    while high - low > STEP:
        asked = round((low + high) / 2, 4)
        try:
            small, plan = make(Budget(**{unit: asked}))
        except BudgetError:
            trial = Trial(asked, None, None, within=False)
        else:
            drop = whole - score(small)
            trial = Trial(asked, plan.keep(unit), drop, within=drop <= limit)
        if trial.within:
            best, high = (small, plan), min(asked, trial.keep or asked)
        else:
            low = asked
        trials.append(trial)
        if tell:
            tell(trial)
    if best is None:
        seen = [t for t in trials if t.drop is not None]
        least = (
            f"the largest that was tried keeps {seen[-1].keep:.3f} and loses {seen[-1].drop:.2f}"
            if seen
            else "none fits"
        )
        raise RankwiseError(
            f"no smaller network loses at most {limit:g}: {least}; allow a larger drop, or retrain afterwards"
        )
    return *best, trials
