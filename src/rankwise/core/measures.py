"""Error measures: how wrong a layer is at a rank, nearly all from one set of spectra.

Each gives an array whose entry j is the relative error at rank j; it falls as j rises and ends with 0.
With σ_{i,j+1} the first singular value that slice i drops, and W the matrix of the fold:

    bound   √k · maxᵢ σ_{i,j+1} / ‖W‖₂     Theorem 1 of the paper
    rss     √(Σᵢ σ²_{i,j+1}) / ‖W‖₂        an upper bound too, never looser than `bound`
    max     maxᵢ σ_{i,j+1} / ‖W‖₂          a lower bound: what the authors' own program uses
    exact   ‖W − Ŵ‖₂ / ‖W‖₂                the operator norm itself, from the weights, entry by entry
    energy  Σᵢ Σ_{m>j} σ²_{i,m} / ‖W‖²_F   exactly ‖W − Ŵ‖²_F / ‖W‖²_F

One follows from `energy`, for every decomposition that knows it; sums of it are what `auto` minimises where weights are
all that it has. Most of a layer cannot be given up to save a little of many others:

    convex  energy / (1 − energy)²         r + r² with r = energy lost ÷ energy kept

Two need calibration data: `output` is the share of the layer's outputs' variance that is lost (response.py), `effect`
the share of the network's outputs' variance, for decompositions that are fitted to data (influence.py).
One more is not relative; `l-rank` weighs it against the cost:

    residual  Σᵢ Σ_{m>j} σ²_{i,m}           ‖W − Ŵ‖²_F

A convolution with G groups is block diagonal: the first four take the worst group, `energy` adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rankwise.core.linalg import Array
from rankwise.errors import RankwiseError


def _bound(spectra: Array, norm: float) -> Array:
    return _relative(np.sqrt(spectra.shape[1]) * spectra.max(axis=(0, 1)), norm)


def _rss(spectra: Array, norm: float) -> Array:
    return _relative(np.sqrt(np.square(spectra).sum(axis=1)).max(axis=0), norm)


def _max(spectra: Array, norm: float) -> Array:
    return _relative(spectra.max(axis=(0, 1)), norm)


def _energy(spectra: Array, norm: float) -> Array:
    tail = _residual(spectra, norm)
    return _relative(tail, float(tail[0]))


def _residual(spectra: Array, norm: float) -> Array:
    return np.cumsum(np.square(spectra).sum(axis=(0, 1))[::-1])[::-1]


def _relative(error: Array, norm: float) -> Array:
    # A layer of zeros is reproduced exactly at every rank: 0/0 is no error.
    return error / norm if norm > 0 else np.zeros_like(error)


FROM_SPECTRA: dict[str, Callable[[Array, float], Array]] = {
    "bound": _bound,
    "rss": _rss,
    "max": _max,
    "energy": _energy,
    "residual": _residual,
}


def _convex(energy: Array) -> Array:
    lost = np.clip(energy, 0.0, 1.0)
    found: Array = lost / np.square(np.maximum(1.0 - lost, NOTHING_KEPT))
    return found


NOTHING_KEPT = 1e-6  # of the energy: nobody plans a layer of rank 0, and infinity is no number of JSON
DERIVED: dict[str, tuple[str, Callable[[Array], Array]]] = {"convex": ("energy", _convex)}
RECORDED = ("bound", "rss", "max", "energy")  # what every plan says of every choice
MEASURES = (*FROM_SPECTRA, "exact")  # of the weights alone
ALL_MEASURES = (*MEASURES, *DERIVED, "output", "effect")


def check_measure(name: str) -> str:
    if name not in ALL_MEASURES:
        raise RankwiseError(f"unknown error measure {name!r}: the measures are {', '.join(ALL_MEASURES)}")
    return name


class Curve:
    """An error curve that may be known only between two others until an entry is asked for.

    `lower` and `upper` hold the bounds by rank. For a measure that comes from spectra they are the same
    array. For `exact` they start as `max` and `rss`, and `evaluate(j)` gives an entry; since the curve
    falls, every entry found tightens its neighbours, and a search needs only a few.
    """

    def __init__(self, lower: Array, upper: Array, evaluate: Callable[[int], float] | None = None) -> None:
        self.lower, self.upper, self.evaluate = lower, upper, evaluate

    def __len__(self) -> int:
        return len(self.lower)

    @property
    def known(self) -> bool:
        return self.evaluate is None

    def __getitem__(self, rank: int) -> float:
        low, high = float(self.lower[rank]), float(self.upper[rank])
        if self.evaluate is None or low >= high:
            return high
        value = min(max(self.evaluate(rank), low), high)
        np.maximum(self.lower[: rank + 1], value, out=self.lower[: rank + 1])
        np.minimum(self.upper[rank:], value, out=self.upper[rank:])
        return value

    def first(self, level: float) -> int:
        """The smallest rank whose error is at most `level`; there is one, because the curve ends with 0."""
        low = int(np.searchsorted(-self.lower, -level, side="left"))
        high = low if self.known else int(np.searchsorted(-self.upper, -level, side="left"))
        while low < high:
            middle = (low + high) // 2
            if self[middle] <= level:
                high = middle
            else:
                low = middle + 1
        return low

    def at(self, ranks: Sequence[int]) -> Curve:
        """The curve at some ranks only; entry i is that of rank `ranks[i]`."""
        if self.known:
            return Curve(self.lower[list(ranks)], self.upper[list(ranks)])
        return Curve(self.lower[list(ranks)], self.upper[list(ranks)], lambda i: self[ranks[i]])

    def values(self) -> Array:
        """The whole curve; evaluates whatever is still unknown."""
        return self.upper if self.known else np.array([self[j] for j in range(len(self))])
