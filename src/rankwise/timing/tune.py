"""From predicted to measured time: a planned network is timed, and planned again until it is fast enough.

A search takes what was timed fastest, so it also takes what was timed too fast by chance: predictions of plans for a
latency lean to the optimistic side, and only the network itself can say by how much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from rankwise.errors import RankwiseError
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Plan
from rankwise.planning.times import Conditions
from rankwise.planning.units import UNITS
from rankwise.surgery.forward import Example
from rankwise.surgery.fuse import find_norms, fuse_norms
from rankwise.surgery.layout import lay_out_
from rankwise.surgery.replace import copy_model, replace_layers_
from rankwise.timing.clock import Timing, time_networks
from rankwise.timing.load import conditions

ROUNDS = 5
AIM = 0.97  # of the budget: measured once more, a network is a little faster or slower
CLOSE = (0.92, 0.99)  # of the budget: near enough
SECONDS = 3.0  # of runs in turns at least, so that a median means something


def settle(
    budget: Budget,
    make: Callable[[Budget], Plan],
    model: nn.Module,
    example: Example | None,
    timing: Timing,
    fuse: bool = False,
) -> Plan:
    """A plan whose network, timed in turns with the model, keeps the budget in time and leaves little of it unused.

    Predictions are off by a few percent either way, so the plan is made again with less if it is too slow, and with
    more if it is faster than need be. If none is fast enough it is the fastest. `plan.search.latency` has the
    fraction that was `measured`, and what was asked for, predicted and measured in all `rounds`.
    """
    unit = next(name for name in budget.units if UNITS[name].timed)
    limit = float(getattr(budget, unit))
    asked, found = limit, list[tuple[float, float, Plan]]()
    for _ in range(ROUNDS):
        try:
            plan = make(Budget(**{**budget.to_json(), unit: asked}))
        except RankwiseError:
            if not found:
                raise
            break  # nothing is faster by prediction
        if any(plan.layers == other.layers for *_, other in found):
            break
        dense, small = time_networks([model, shaped(model, plan, example, fuse)], example, timing, SECONDS)
        measured = small.median / dense.median
        found.append((asked, measured, _remarked(plan, conditions([dense, small]))))
        if CLOSE[0] <= measured / limit <= CLOSE[1] or (measured <= limit and not plan.choices):
            break
        asked = min(1.0, asked * AIM * limit / measured)
    kept = [one for one in found if one[1] <= limit]
    _, measured, plan = max(kept, key=lambda one: one[0]) if kept else min(found, key=lambda one: one[1])
    rounds = tuple((a, p.keep(unit), m) for a, m, p in found)
    assert plan.search.latency is not None, "the plan was made for a time"
    latency = replace(plan.search.latency, measured=measured, rounds=rounds)
    plan = replace(plan, budget=budget, search=replace(plan.search, latency=latency))
    if measured <= limit:
        return plan
    return plan.warned(
        f"the network takes {measured:.3f} of the dense network's time, and {limit:g} was asked for: nothing "
        f"faster was found; is the machine busy?"
    )


def _remarked(plan: Plan, seen: Conditions) -> Plan:
    """A plan whose network was timed on a busy machine says so."""
    said = f"the planned network was timed while {seen.sentence}: plan again when it is quiet"
    return plan.warned(said) if seen.busy else plan


def shaped(model: nn.Module, plan: Plan, example: Example | None, fuse: bool) -> nn.Module:
    """A network of the plan's shapes, to be timed; its weights are numbers that mean nothing."""
    small = copy_model(model)
    replace_layers_(small, plan, fill=False)
    for choice in plan.choices:
        for tensor in small.get_submodule(choice.name).parameters():
            tensor.data.normal_(std=0.02)
    small = fuse_norms(small, find_norms(small, example)) if fuse else small
    lay_out_(small, plan.layout)
    return small
