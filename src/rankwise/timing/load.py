"""Whether a machine was busy while something was timed: its load against its cores, and the spread between runs."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from rankwise.planning.times import Conditions
from rankwise.timing.clock import Measured


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
