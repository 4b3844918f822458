"""Times: seconds that were measured on one machine, and what a rank of an option takes between them.

The whole network is a fixed part (activations, norms, additions) and its layers:

    seconds(plan) = beside + Σ layers as the plan has them

Where batch norms are folded away afterwards, or the weights laid out anew, all of these are times of such a network.

Planning counts whole nanoseconds, so that budgets in time are budgets like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankwise.core.layer import Layer
from rankwise.core.linalg import Array, Ints
from rankwise.core.option import Option
from rankwise.decompositions import full_rank, of

NANO = 1_000_000_000
LAYOUTS = ("contiguous", "channels-last")
# A pair counts as faster only if it is so by more than a measurement is off.
MARGIN = 0.97
BLOCK = 8

Samples = tuple[tuple[int, ...], tuple[float, ...]]  # ranks, rising, and the seconds of each


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds beside the layers, of each layer, and of pairs at some ranks, by (layer, fold, slices).

    `whole` are the seconds of the network as it is, where its parts were timed in another form of it: with batch norms
    folded, or in another `layout`, because it is faster. `timing` says how all were measured. Options that are not here
    were not measured, and are not offered for a budget in time.
    """

    beside: float
    layers: Mapping[str, float]
    pairs: Mapping[tuple[str, str, int], Samples]
    timing: dict[str, Any] = field(default_factory=dict)
    whole: float | None = None
    layout: str | None = None

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

    def dense(self, name: str) -> int:
        """A layer as it is, in nanoseconds; 0 for one that is never called."""
        return round(self.layers.get(name, 0.0) * NANO)

    def by_rank(self, layer: Layer, option: Option) -> Ints | None:
        """Nanoseconds of a pair by rank, from 0 to the full rank; None where nothing was measured.

        Straight lines between the measured ranks, and through the origin beyond the last, in steps of 8. More rank is
        never taken to be faster: where measurements say so it is noise, and their mean is taken (isotonic regression).
        """
        every = np.arange(full_rank(layer, option) + 1)
        if not self.dense(layer.name):
            return 0 * every  # a layer that is never called takes no time whatever becomes of it
        samples = self.pairs.get((layer.name, option.fold, option.slices))
        # Pairs of the same modules whatever their numbers are: one measurement serves several decompositions.
        if of(option).timed_as != "pair" or samples is None:
            return None
        ranks, seconds = np.array(samples[0]), rising(np.array(samples[1]))
        # Processors compute channels in blocks: 17 of them take as long as 24, so more than 8 are rounded up.
        blocks = np.where(every > BLOCK, -(-every // BLOCK) * BLOCK, every)
        blocks = np.where(every <= ranks[-1], np.minimum(blocks, ranks[-1]), blocks)
        found = np.interp(blocks, ranks, seconds) * np.maximum(1.0, blocks / ranks[-1])
        whole: Ints = np.ceil(found * NANO).astype(np.int64)
        return whole

    def seconds(self, layer: Layer, option: Option | None, rank: int) -> float:
        """What a layer takes after a decision."""
        if option is None:
            return self.dense(layer.name) / NANO
        found = self.by_rank(layer, option)
        return float("nan") if found is None else int(found[rank]) / NANO


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
