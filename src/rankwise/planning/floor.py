"""The least that any plan can reach, from shapes alone: a budget below it is refused before anything is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from rankwise.core.layer import Coverage, Layer
from rankwise.core.option import Option
from rankwise.decompositions import DECOMPOSITIONS, NOTHING, Selection
from rankwise.errors import BudgetError
from rankwise.planning.budget import Budget
from rankwise.planning.times import Times
from rankwise.planning.units import UNITS, Unit

REACHED = "the least possible is"  # by the options that there are
BOUND = "the least possible is at least"  # by those that there may be, once data has been looked at


def check_reachable(
    coverage: Coverage, budget: Budget | None, selection: Selection, decompositions: tuple[str, ...], multiple: int = 1
) -> None:
    """Refuse a budget that no plan can meet, as `find_plan` would after the table.

    Every layer is as small as its options allow at their smallest rank, for each unit on its own. Units that must be
    measured first are left out.
    """
    units = [] if budget is None else [UNITS[name] for name in budget.units if not UNITS[name].timed]
    if budget is None or not units or any(unit.whole(coverage, None) is None for unit in units):
        return
    alike = Counter(replace(layer, name="") for layer in coverage.layers)  # blocks of a network are alike
    options = {
        layer: [o for name in decompositions for o in DECOMPOSITIONS[name].candidates(layer, selection)]
        for layer in alike
    }
    least = {
        unit.name: unit.fixed(coverage, None)
        + sum(alike[layer] * _smallest(layer, found, unit, units, multiple) for layer, found in options.items())
        for unit in units
    }
    limits = {unit.name: unit.limit(getattr(budget, unit.name), unit.total(coverage, None)) for unit in units}
    if any(least[name] > limit for name, limit in limits.items()):
        known = all(DECOMPOSITIONS[name].needs == NOTHING for name in decompositions)
        raise cannot_be_met(coverage, None, limits, least, REACHED if known else BOUND)


def _smallest(layer: Layer, options: list[Option], unit: Unit, units: list[Unit], multiple: int) -> int:
    """Of the layer as it is and of its options at their smallest rank, where that is smaller in every unit."""
    whole = {one: one.layer(layer, None) for one in units}
    found = [whole[unit] or 0]
    for option in options:
        costs = {one: one.by_rank(layer, option, None) for one in units}
        slices = layer.groups * option.slices
        ranks = range(1, min(multiple + 1, *(len(c) for c in costs.values() if c is not None)))
        rank = next((r for r in ranks if slices * r % multiple == 0), None)
        if rank is None:
            continue
        at = {one: None if by_rank is None else int(by_rank[rank]) for one, by_rank in costs.items()}
        if all(cost is not None and (not whole[one] or cost < (whole[one] or 0)) for one, cost in at.items()):
            found.append(at[unit] or 0)
    return min(found)


def cannot_be_met(
    coverage: Coverage, times: Times | None, limits: Mapping[str, int], least: Mapping[str, int], word: str = REACHED
) -> BudgetError:
    """What is asked for and the least that is possible, for each unit on its own, in a sentence."""
    parts = []
    for name, limit in limits.items():
        unit = UNITS[name]
        keep = unit.keep_for(least[name], unit.total(coverage, times))  # a budget of this keep can be met
        asked, possible = unit.amount(limit), unit.show(least[name])
        parts.append(f"at most {asked} are asked for and {word} {possible} (keep {keep:.4f})")
    together = "" if len(parts) == 1 else ", each on its own"
    return BudgetError(
        f"the budget cannot be met: {'; '.join(parts)}{together}; raise the budget, or allow more options "
        f"(folds, slices, fewer excluded layers)"
    )
