"""Two networks beside each other, and whether the machine was busy: its load against its cores, the spread of runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rankwise.planning.times import Conditions
from rankwise.surgery.forward import Example
from rankwise.timing.clock import Measured, Timing, time_networks


def compare(
    dense: nn.Module, small: nn.Module, example: Example, how: Timing, least: float = 0.0, most: float = 20.0
) -> dict[str, Any]:
    """Seconds of both networks, measured in turns for `least` to `most` seconds, and their ratio.

    Where the machine was busy at that time, its load and cores and the spread of the runs stand beside them.
    """
    runs = time_networks([dense, small], example, how, least, most)
    before, after = (one.median for one in runs)
    seen = conditions(runs)
    return {"dense": before, "small": after, "ratio": after / before, **(seen.to_json() if seen.busy else {})}


def conditions(runs: Sequence[Measured]) -> Conditions:
    """As they are now, at the end of the runs: the load of the last minute, and the largest spread."""
    count, load = cores(), load_average()
    if load is not None:
        load = max(0.0, load - max(0, torch.get_num_threads() - count))  # threads of our own that share a core
    return Conditions(load, count, max((one.spread for one in runs if one.seconds), default=0.0))


def load_average() -> float | None:
    """Processes that want to run, on average over the last minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows has no such function
        return None


def cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1
