"""Options: what a layer can become, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """A decomposition (by its name in `rankwise.decompositions`) with its fold and its slices of input channels.

    `outer` is the rank of the filters' mode, for decompositions with two ranks; `clusters` name the channels that
    belong together, for those that gather channels.
    """

    fold: str
    slices: int
    decomposition: str = "svd"
    outer: int = 0
    clusters: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Cost:
    """Params and macs; macs are None when no example input was given."""

    params: int
    macs: int | None
