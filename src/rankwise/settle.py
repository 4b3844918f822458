"""From predicted to measured time: a planned network is timed, and planned again with less until it is fast enough.

A search takes what was timed fastest, so it also takes what was timed too fast by chance: predictions of plans for a
latency lean to the optimistic side, and only the network itself can say by how much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from rankwise.budget import Budget
from rankwise.errors import RankwiseError
from rankwise.fuse import find_norms, fuse_norms
from rankwise.latency import Timing, time_networks
from rankwise.plan import Plan
from rankwise.surgery import copy_model, replace_layers_

ROUNDS = 4


def settle(
    budget: Budget, make: Callable[[Budget], Plan], model: nn.Module, example: Any, timing: Timing, fuse: bool = False
) -> Plan:
    """The first plan whose network, timed in turns with the model, keeps the budget in latency; of none, the fastest.

    `plan.search["latency"]["measured"]` is the fraction that was measured.
    """
    assert budget.latency is not None, "there is a latency to keep"
    asked, found = budget.latency, list[tuple[float, Plan]]()
    for _ in range(ROUNDS):
        try:
            plan = make(replace(budget, latency=asked))
        except RankwiseError:
            if not found:
                raise
            break  # nothing is faster by prediction
        dense, small = time_networks([model, _shaped(model, plan, example, fuse)], example, timing)
        measured = small.median / dense.median
        found.append((measured, plan))
        if measured <= budget.latency:
            break
        asked *= 0.99 * budget.latency / measured
    measured, plan = found[-1] if found[-1][0] <= budget.latency else min(found, key=lambda one: one[0])
    latency = {**plan.search.get("latency", {}), "measured": measured}
    return replace(plan, budget=budget, search={**plan.search, "latency": latency})


def _shaped(model: nn.Module, plan: Plan, example: Any, fuse: bool) -> nn.Module:
    """A network of the plan's shapes; its weights are numbers that mean nothing."""
    small = copy_model(model)
    replace_layers_(small, plan, fill=False)
    for choice in plan.choices:
        for tensor in small.get_submodule(choice.name).parameters():
            tensor.data.normal_(std=0.02)
    return fuse_norms(small, find_norms(small, example)) if fuse else small
