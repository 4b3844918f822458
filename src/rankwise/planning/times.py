"""Times: seconds that were measured on one machine, and what every rank of every option takes by them.

The whole network is a fixed part (activations, norms, additions) and its layers:

    seconds(plan) = beside + Σ layers as the plan has them

Where batch norms are folded away afterwards, or the weights laid out anew, all of these are times of such a network.

A few options of each layer were timed at a few ranks. The others lie between them:

    ranks      straight lines, in blocks of channels; through the origin beyond the last
    slices     straight lines in log(slices) between pairs with as many channels between the factors
    cores      straight lines in the outer rank: each part has multiply-adds that are bilinear in both ranks

What lies beyond all that was measured is taken to be slow. Times rise with the rank, so searches stay exact.

Planning counts whole nanoseconds, so that budgets in time are budgets like any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rankwise.core.layer import Layer
from rankwise.core.linalg import Array, Ints
from rankwise.core.option import Option
from rankwise.decompositions import PLAIN, full_rank, of

NANO = 1_000_000_000
LAYOUTS = ("contiguous", "channels-last")
# A pair counts as faster only if it is so by more than a measurement is off.
MARGIN = 0.97
BLOCK = 8

Samples = tuple[tuple[int, ...], tuple[float, ...]]  # ranks, rising, and the seconds of each
Known = list[tuple[int, Samples]]  # by slices or by outer rank, rising


@dataclass(frozen=True)
class Conditions:
    """What a machine did while something was timed: its load against its cores, and how far apart runs were.

    `spread` is the distance of the quartiles of equal runs, as a fraction of their median. `load` is the average
    number of processes that want to run, ours among them; None where the system does not say.
    """

    load: float | None
    cores: int
    spread: float

    @property
    def busy(self) -> bool:
        """Whether others took time from what was measured: more wanted to run than there are cores, or runs differ."""
        return self.spread > 0.2 or (self.load or 0.0) > 1.25 * self.cores

    @property
    def sentence(self) -> str:
        """What was seen, to stand in a sentence."""
        load = "" if self.load is None else f"a load of {self.load:.1f} on {self.cores} cores, "
        return f"the machine was busy ({load}equal runs {100 * self.spread:.0f} % apart)"

    def to_json(self) -> dict[str, float]:
        load = {} if self.load is None else {"load": self.load}
        return {**load, "cores": self.cores, "spread": self.spread, "busy": self.busy}


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds beside the layers, of each layer, and of what stands in for it at some ranks.

    `pairs` are by (layer, fold, slices); `others` by (layer, what it is timed as, outer rank), for decompositions with
    other parts (`Decomposition.timed_as`).
    `whole` are the seconds of the network as it is, where its parts were timed in another form of it: with batch norms
    folded, or in another `layout`, because it is faster. `timing` says how all were measured, and under which
    `conditions`. Folds and decompositions of which nothing was measured are not offered for a budget in time.
    """

    beside: float
    layers: Mapping[str, float]
    pairs: Mapping[tuple[str, str, int], Samples]
    timing: dict[str, Any] = field(default_factory=dict)
    whole: float | None = None
    layout: str | None = None
    others: Mapping[tuple[str, str, int], Samples] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The network as it is, in nanoseconds."""
        if self.whole is not None:
            return round(self.whole * NANO)
        return self.fixed + sum(self.dense(name) for name in self.layers)

    @property
    def fixed(self) -> int:
        """What no decision changes, in nanoseconds."""
        return round(self.beside * NANO)

    @property
    def warnings(self) -> list[str]:
        """What a plan that is made from these times must say about them."""
        if not self.timing.get("busy"):
            return []
        seen = Conditions(self.timing.get("load"), self.timing["cores"], self.timing["spread"])
        return [
            f"layers were timed while {seen.sentence}: delete the times that are kept ($RANKWISE_CACHE, or "
            f"~/.cache/rankwise) and plan again when it is quiet"
        ]

    def dense(self, name: str) -> int:
        """A layer as it is, in nanoseconds; 0 for one that is never called."""
        return round(self.layers.get(name, 0.0) * NANO)

    def by_rank(self, layer: Layer, option: Option) -> Ints | None:
        """Nanoseconds of an option by rank, from 0 to the full rank; None where nothing like it was measured.

        Straight lines between the measured ranks, and through the origin beyond the last, in steps of 8. More rank is
        never taken to be faster: where measurements say so it is noise, and their mean is taken (isotonic regression).
        """
        every = np.arange(full_rank(layer, option) + 1)
        if not self.dense(layer.name):
            return 0 * every  # a layer that is never called takes no time whatever becomes of it
        # The same modules whatever their numbers are: one measurement serves several decompositions.
        timed_as = of(option).timed_as
        if timed_as == PLAIN.timed_as:
            known = self._known.get((layer.name, option.fold), [])
            found = _pair(known, layer, option, every) if known else None
        else:
            known = self._known_others.get((layer.name, timed_as), [])
            found = _between_outers(known, option.outer, every) if known else None
        if found is None:
            return None
        whole: Ints = np.ceil(found * NANO).astype(np.int64)
        return whole

    def seconds(self, layer: Layer, option: Option | None, rank: int) -> float:
        """What a layer takes after a decision."""
        if option is None:
            return self.dense(layer.name) / NANO
        found = self.by_rank(layer, option)
        return float("nan") if found is None else int(found[rank]) / NANO

    @cached_property
    def _known(self) -> dict[tuple[str, str | None], Known]:
        return _index(self.pairs)

    @cached_property
    def _known_others(self) -> dict[tuple[str, str | None], Known]:
        return _index(self.others)


def _index(samples: Mapping[tuple[str, str, int], Samples]) -> dict[tuple[str, str | None], Known]:
    found: dict[tuple[str, str | None], Known] = {}
    for name, what, number in sorted(samples):
        found.setdefault((name, what), []).append((number, samples[name, what, number]))
    return found


def _pair(known: Known, layer: Layer, option: Option, every: Ints) -> Array:
    """Seconds of a pair by rank, from the slices that were measured of its fold."""
    here = dict(known).get(option.slices)
    if here is not None:
        return _curve(here, _blocks(every, here[0][-1]))
    found = _between_slices(known, option.slices, _blocks(every, int(every[-1])))
    if layer.group_channels % option.slices:
        # The input is padded first, which copies it. A pair of rank 1 reads the input and writes the output.
        found = found + _curve(known[0][1], np.ones(1))
    return found


def _between_slices(known: Known, slices: int, ranks: Array) -> Array:
    """Between pairs with as many channels between the factors: their decoders are equal, their encoders similar.

    Beyond the measured slices time is taken to grow with them.
    """
    low, high = _neighbours(known, slices)
    first, second = (_curve(samples, ranks * slices / k) for k, samples in (low, high))
    if low[0] == high[0]:
        return first * max(slices / low[0], low[0] / slices)
    share = math.log(slices / low[0]) / math.log(high[0] / low[0])
    found: Array = (1 - share) * first + share * second
    return found


def _between_outers(known: Known, outer: int, every: Ints) -> Array:
    """The same rank at the nearest outer ranks that were measured; through the origin beyond the last."""
    last = known[-1][0]
    outer = int(_blocks(np.array([outer]), last)[0])
    low, high = _neighbours(known, outer)
    first, second = (
        _curve(samples, np.minimum(_blocks(every, samples[0][-1]), every[-1])) for _, samples in (low, high)
    )
    share = (outer - low[0]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
    return ((1 - share) * first + share * second) * max(1.0, outer / last if last else 1.0)


def _neighbours(known: Known, number: int) -> tuple[tuple[int, Samples], tuple[int, Samples]]:
    """The measured ones around a number; the nearest one twice if there are not two."""
    low = max((one for one in known if one[0] <= number), default=known[0], key=lambda one: one[0])
    high = min((one for one in known if one[0] >= number), default=known[-1], key=lambda one: one[0])
    return low, high


def _blocks(ranks: Ints, last: int) -> Array:
    """Processors compute channels in blocks: 17 of them take as long as 24, so more than 8 are rounded up.

    But not past the `last` one that is known.
    """
    blocks = np.where(ranks > BLOCK, -(-ranks // BLOCK) * BLOCK, ranks)
    return np.where(ranks <= last, np.minimum(blocks, last), blocks).astype(np.float64)


def _curve(samples: Samples, ranks: Array) -> Array:
    """Seconds at ranks: straight lines between the samples, and through the origin beyond the last.

    Below rank 1 (of a neighbour with more slices) the first line goes on; elsewhere nothing is faster than the first.
    """
    at, seconds = np.array(samples[0]), rising(np.array(samples[1]))
    if at[0] == 1 and len(at) > 1:
        least = max(0.0, seconds[0] - (seconds[1] - seconds[0]) / (at[1] - 1))
        at, seconds = np.insert(at, 0, 0), np.insert(seconds, 0, least)
    found: Array = np.interp(ranks, at, seconds) * np.maximum(1.0, ranks / at[-1])
    return found


def rising(values: Array) -> Array:
    """The nearest non-decreasing sequence in the sense of least squares: neighbours out of order become their mean.

    >>> rising(np.array([1.0, 3.0, 2.0, 4.0])).tolist()
    [1.0, 2.5, 2.5, 4.0]
    """
    blocks: list[tuple[float, int]] = []
    for value in values.tolist():
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (b, m), (a, n) = blocks.pop(), blocks.pop()
            blocks.append(((a * n + b * m) / (n + m), n + m))
    return np.concatenate([np.full(n, value) for value, n in blocks]) if blocks else values
