"""The ways to decompose a layer: one file each, one protocol (base.py), one registry (here)."""

from __future__ import annotations

from importlib import import_module

from rankwise.core.layer import Layer
from rankwise.core.linalg import Ints
from rankwise.core.option import Cost, Option
from rankwise.decompositions import slices
from rankwise.decompositions.base import (
    METRIC,
    NOTHING,
    OUTPUTS,
    TOKENS,
    Alone,
    Decomposition,
    Factors,
    Sample,
    Scores,
    Selection,
    Target,
)
from rankwise.errors import RankwiseError

__all__ = [
    "DECOMPOSITIONS",
    "FITTED",
    "LOOKUPS",
    "METRIC",
    "NOTHING",
    "OUTPUTS",
    "PLAIN",
    "TOKENS",
    "Alone",
    "Decomposition",
    "Factors",
    "Sample",
    "Scores",
    "Selection",
    "Target",
    "check_option",
    "cost_at",
    "costs",
    "full_rank",
    "of",
]

_FILES = (
    "slices",
    "pca",
    "clusters",
    "tucker",
    "whitened",
    "whitened_tucker",
    "cp",
    "whitened_cp",
    "embedding",
)


def _load(name: str) -> Decomposition:
    found = import_module(f"{__name__}.{name}").DECOMPOSITION
    assert isinstance(found, Decomposition), f"{name}.py has a DECOMPOSITION"
    return found


DECOMPOSITIONS: dict[str, Decomposition] = {found.name: found for found in map(_load, _FILES)}
PLAIN = slices.DECOMPOSITION  # of the weight alone: what is left where others have nothing to offer
FITTED = tuple(name for name, one in DECOMPOSITIONS.items() if one.needs == METRIC)
LOOKUPS = tuple(name for name, one in DECOMPOSITIONS.items() if one.needs == TOKENS)  # for embeddings


def of(option: Option) -> Decomposition:
    """The decomposition of an option."""
    return DECOMPOSITIONS[option.decomposition]


def costs(layer: Layer, option: Option) -> tuple[Ints, Ints | None]:
    """Params and macs by rank, from 0 to the full rank; entry j is what rank j costs."""
    return of(option).costs(layer, option)


def cost_at(layer: Layer, option: Option, rank: int) -> Cost:
    params, macs = costs(layer, option)
    return Cost(int(params[rank]), None if macs is None else int(macs[rank]))


def full_rank(layer: Layer, option: Option) -> int:
    """The largest rank worth having."""
    return of(option).full_rank(layer, option)


def check_option(layer: Layer, option: Option, where: str) -> None:
    """Refuse an option that cannot be built for the layer; `where` begins the sentence."""
    if option.decomposition not in DECOMPOSITIONS:
        raise RankwiseError(
            f"{where} has the unknown decomposition {option.decomposition!r}: known are {', '.join(DECOMPOSITIONS)}"
        )
    of(option).check(layer, option, where)
