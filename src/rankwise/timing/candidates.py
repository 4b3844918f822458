"""Which options of a layer are timed, and at which ranks: few enough to be timed, near enough to all others.

    pairs       every fold, with 1, 2, 4, … slices, each number at least twice the last one, and the largest
    the rest    one for each way of being timed (`Decomposition.timed_as`), at some outer ranks where there are two

Nothing here knows a decomposition by its name: the registry is asked what there is and what can be built.
"""

from __future__ import annotations

from dataclasses import replace

from rankwise.core.fold import all_folds
from rankwise.core.layer import Layer
from rankwise.core.option import Option
from rankwise.core.slicing import divisors
from rankwise.decompositions import DECOMPOSITIONS, PLAIN, Decomposition, Selection, costs, of
from rankwise.errors import RankwiseError

SHARES = (0.8, 0.55, 0.35, 0.2, 0.1)  # of the rank at which a pair has as many macs as the layer
FEWER = (0.8, 0.4, 0.15)  # the same where there are several slices or a second rank, and of the outer rank
FEWEST = (0.8, 0.3)  # for many slices
MANY = 8

Candidate = tuple[Option, list[int]]  # ranks are falling


def candidates(layer: Layer) -> list[Candidate]:
    """Options worth timing and ranks of each: one of every kind, then the others, the most promising first."""
    options = sorted([*_pairs(layer), *_others(layer)], key=lambda option: option.slices)
    found = [(option, ranks) for option in options if (ranks := _ranks(layer, option))]
    first = {of(option).timed_as: option for option, _ in reversed(found)}
    return sorted(found, key=lambda one: one[0] != first[of(one[0]).timed_as])


def kinds() -> tuple[str, ...]:
    """All that layers are timed as."""
    return tuple(sorted({one.timed_as for one in DECOMPOSITIONS.values() if one.timed_as is not None}))


def some_slices(channels: int) -> list[int]:
    """Divisors with a factor of two or more between them; the smallest and the largest are always among them.

    >>> some_slices(64), some_slices(24), some_slices(15)
    ([1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 24], [1, 3, 15])
    """
    found = [1]
    for k in divisors(channels):
        if k >= 2 * found[-1]:
            found.append(k)
    return found


def _pairs(layer: Layer) -> list[Option]:
    return PLAIN.options(layer, Selection("all", some_slices(layer.group_channels)))


def _others(layer: Layer) -> list[Option]:
    found: dict[tuple[str, int], Option] = {}
    for name, decomposition in DECOMPOSITIONS.items():
        timed_as = decomposition.timed_as
        if timed_as is None or timed_as == PLAIN.timed_as:
            continue
        family = Option(all_folds(layer.dims)[0], 1, name)
        for outer in _outers(decomposition, layer, family):
            option = replace(family, outer=outer)
            if (timed_as, outer) not in found and _is_possible(decomposition, layer, option):
                found[timed_as, outer] = option
    return list(found.values())


def _is_possible(decomposition: Decomposition, layer: Layer, option: Option) -> bool:
    """Whether a table could offer it: a decomposition may be no use to some layers."""
    try:
        decomposition.check(layer, option, "a candidate")
    except RankwiseError:
        return False
    return option in decomposition.wanted(layer, [option], Selection())


def _outers(decomposition: Decomposition, layer: Layer, family: Option) -> list[int]:
    """Some outer ranks, the least of them the first that leaves the other rank free; 0 where there is one rank only."""
    most = decomposition.outers(layer)
    if not most:
        return [0]
    whole = decomposition.full_rank(layer, replace(family, outer=most))
    free = (o for o in range(1, most + 1) if decomposition.full_rank(layer, replace(family, outer=o)) == whole)
    least = next(free)
    return sorted({least, *(outer for outer in _some(most, FEWER) if outer >= 2 * least)}, reverse=True)


def _ranks(layer: Layer, option: Option) -> list[int]:
    """Up to the rank at which the option is as large as the layer in params and in macs."""
    params, macs = costs(layer, option)
    limits = [int(params.searchsorted(layer.params)) - 1]
    limits += [int(macs.searchsorted(layer.macs)) - 1] if macs is not None and layer.macs else []
    plain = option.slices == 1 and not option.outer
    most = max(limits)
    return _some(most, SHARES if plain else FEWER if option.slices < MANY else FEWEST) if most >= 1 else []


def _some(most: int, shares: tuple[float, ...]) -> list[int]:
    """From a large rank down to 1; round numbers, which hardware likes, where there is a choice."""
    near = {round(most * share / 8) * 8 if most * share > 12 else round(most * share) for share in shares}
    return sorted({1, *(r for r in near if 1 <= r <= most)}, reverse=True)
