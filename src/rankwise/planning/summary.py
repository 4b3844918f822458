"""A plan in words and a table of 80 columns, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.core.layer import Skipped
from rankwise.planning.units import UNITS

if TYPE_CHECKING:
    from rankwise.planning.plan import Choice, Plan, Pruned

NAME = 30  # characters of a layer's name
NAMES = 3  # layers that are named for a reason


def one_line(plan: Plan) -> str:
    """
    >>> from rankwise.planning.plan import Plan
    >>> from rankwise.planning.budget import Budget
    >>> from rankwise.core.option import Cost
    >>> Plan("net", "svd", Budget(params=0.5), Cost(100, None), Cost(40, None), ())
    <Plan of net by svd for params 0.5: 0 of 0 layers changed, params 0.4>
    """
    changed = len(plan.choices) + len(plan.pruned)
    kept = ", ".join(f"{unit} {plan.keep(unit):.4g}" for unit in UNITS if plan.change(unit) is not None)
    name = plan.model or "a network"
    return (
        f"<Plan of {name} by {plan.method} for {plan.budget}: {changed} of {len(plan.layers)} layers changed, {kept}>"
    )


def summary(plan: Plan) -> str:
    """Before and after, every layer that changes, what stays whole and why, and the warnings."""
    lines = [f"plan of {plan.model or 'a network'} by {plan.method} for {plan.budget}"]
    for unit in UNITS.values():
        counts = plan.change(unit.name)
        if counts is not None and counts[0]:
            before, after = counts
            both = f"{unit.recorded(before)} → {unit.recorded(after)}"
            lines.append(f"  {unit.title or unit.name}: {both}, keep {after / before:.4f}")
    lines += _table(plan)
    lines += [f"whole, {line}" for line in _reasons(plan.kept)]
    lines += [f"warning: {text}" for text in plan.warnings]
    return "\n".join(lines)


def _table(plan: Plan) -> list[str]:
    rows = [_choice(plan, one) for one in plan.choices] + [_pruned(one) for one in plan.pruned]
    head = ("layer", "becomes", "error", "params kept") if plan.choices else ("layer", "keeps", "", "params kept")
    return [f"{a:<{NAME}} {b:<26} {c:>8} {d:>12}" for a, b, c, d in [head, *rows]] if rows else []


def _choice(plan: Plan, one: Choice) -> tuple[str, str, str, str]:
    rank = f"{one.outer}×{one.rank}" if one.outer else str(one.rank)
    slices = f", {one.slices} slices" if one.slices > 1 else ""
    measure = str(plan.settings.get("error", ""))
    error = f"{one.error[measure]:.4f}" if measure in one.error else ""
    becomes = f"{one.decomposition} {one.fold} rank {rank}{slices}"
    return _short(one.name), becomes, error, _percent(one.after.params, one.before.params)


def _pruned(one: Pruned) -> tuple[str, str, str, str]:
    outputs, inputs = one.wide
    filters = outputs if one.filters is None else len(one.filters)
    channels = inputs if one.channels is None else len(one.channels)
    becomes = f"{filters} of {outputs} × {channels} of {inputs}"
    return _short(one.name), becomes, "", _percent(one.after.params, one.before.params)


def _reasons(kept: tuple[Skipped, ...]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for skipped in kept:
        reasons.setdefault(skipped.reason, []).append(skipped.name)
    more = {reason: f" and {len(names) - NAMES} more" for reason, names in reasons.items() if len(names) > NAMES}
    return [f"{reason}: {', '.join(names[:NAMES])}{more.get(reason, '')}" for reason, names in reasons.items()]


def _short(name: str) -> str:
    """The end of a long name says more than its beginning."""
    return name if len(name) <= NAME else "…" + name[-(NAME - 1) :]


def _percent(after: int, before: int) -> str:
    return f"{100 * after / before:.1f} %" if before else ""
