"""Folds: the ways a kernel becomes a matrix.

A fold is a string of axes such as `fh│cw`. The letters left of the bar are the rows, those right of it
the columns: f filters, c channels, d/h/w the kernel axes. Cutting the matrix into two factors along the
bar gives two layers: the encoder owns the kernel axes on the right, the decoder those on the left.

    f│chw   scheme 0 of the paper   κ₁×κ₂ encoder, 1×1 decoder
    fh│cw   scheme 1                1×κ₂ encoder, κ₁×1 decoder
    fw│ch   scheme 2                κ₁×1 encoder, 1×κ₂ decoder
    fhw│c   scheme 3                1×1 encoder, κ₁×κ₂ decoder

Everything else is derived from the string. A linear layer has the one fold `f│c`, a 1-D kernel two, a
3-D kernel eight: every subset of the kernel axes may go left.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import combinations

from torch import Tensor

from rankwise.errors import RankwiseError

BAR = "│"


def kernel_axes(dims: int) -> str:
    """Letters of the kernel axes: '' for linear layers, 'w', 'hw' or 'dhw'."""
    return "dhw"[3 - dims :]


def name_fold(left: str, dims: int) -> str:
    """The fold of a kernel with `dims` axes that puts the axes in `left` with the filters.

    >>> name_fold("h", 2)
    'fh│cw'
    """
    axes = kernel_axes(dims)
    return "f" + "".join(a for a in axes if a in left) + BAR + "c" + "".join(a for a in axes if a not in left)


@lru_cache
def all_folds(dims: int) -> tuple[str, ...]:
    """Every fold of a kernel with `dims` axes; for two axes these are the paper's schemes 0 to 3, in order.

    >>> all_folds(2)
    ('f│chw', 'fh│cw', 'fw│ch', 'fhw│c')
    """
    axes = kernel_axes(dims)
    subsets = (left for size in range(dims + 1) for left in combinations(axes, size))
    return tuple(name_fold("".join(left), dims) for left in subsets)


SCHEMES = all_folds(2)


@lru_cache
def kernel_sides(fold: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of the kernel axes on the left (decoder) and on the right (encoder).

    >>> kernel_sides("fh│cw")
    ((0,), (1,))
    """
    left, right = (side[1:] for side in fold.split(BAR))
    axes = kernel_axes(len(left) + len(right))
    return tuple(map(axes.index, left)), tuple(map(axes.index, right))


def fold_for(fold: str | int, dims: int) -> str:
    """What a scheme number or a fold's name means for a kernel with `dims` axes.

    Axes that the kernel does not have are dropped. An axis that the name does not mention (the depth of
    a 3-D kernel under a 2-D name) stays with the channels, unless no kernel axis does.

    >>> fold_for(3, 1), fold_for("fh|cw", 3), fold_for("fhw│c", 3)
    ('fw│c', 'fh│cdw', 'fdhw│c')
    """
    if isinstance(fold, int) and not isinstance(fold, bool) and 0 <= fold < len(SCHEMES):
        fold = SCHEMES[fold]
    text = str(fold).replace("|", BAR)
    sides = text.split(BAR)
    letters = "".join(sides)
    if len(sides) != 2 or not (sides[0].startswith("f") and sides[1].startswith("c")):
        raise _unknown(fold)
    named = letters.replace("f", "", 1).replace("c", "", 1)
    if len(set(named)) != len(named) or not set(named) <= set("dhw"):
        raise _unknown(fold)
    everything_left = len(sides[0]) > 1 and len(sides[1]) == 1
    return name_fold("dhw" if everything_left else sides[0][1:], dims)


def folds_for(folds: str | int | Iterable[str | int], dims: int) -> tuple[str, ...]:
    """The folds that a request such as "all", 0, "fh│cw" or [0, 3] means for a kernel with `dims` axes."""
    if folds == "all":
        return all_folds(dims)
    if not isinstance(folds, str | int | Iterable):
        raise RankwiseError(f'folds={folds!r} is unknown: ask for folds="all", a scheme 0 to 3 or a list of them')
    wanted = [folds] if isinstance(folds, str | int) else list(folds)
    if not wanted:
        raise RankwiseError('no folds were given: ask for folds="all", a scheme 0 to 3 or a list of them')
    return tuple(dict.fromkeys(fold_for(f, dims) for f in wanted))


def _unknown(fold: object) -> RankwiseError:
    return RankwiseError(
        f"unknown fold {fold!r}: the folds are {', '.join(SCHEMES)} (also written with | or as schemes 0 to 3)"
    )


def to_matrix(weight: Tensor, fold: str) -> Tensor:
    """(G, f, c, *kernel) → (G, f·left, c·right), channels slowest on the right so that slices stay together."""
    left, right = kernel_sides(fold)
    order = [0, 1, *(3 + a for a in left), 2, *(3 + a for a in right)]
    rows = weight.shape[1]
    for a in left:
        rows *= weight.shape[3 + a]
    return weight.permute(order).reshape(weight.shape[0], rows, -1)


def from_matrix(matrix: Tensor, fold: str, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `to_matrix`: (G, f·left, c·right) → `shape` = (G, f, c, *kernel)."""
    left, right = kernel_sides(fold)
    order = [0, 1, *(3 + a for a in left), 2, *(3 + a for a in right)]
    back = [order.index(i) for i in range(len(shape))]
    return matrix.reshape([shape[i] for i in order]).permute(back)
