"""`embedding`: an embedding of low rank, and with it the heads that multiply with the same weight.

The weight E (V, d) has a row for every token of the vocabulary. Where the network looks up token t its outputs change
with the error E_t − Ê_t, and where a head multiplies by E the error at output v is (E_v − Ê_v) · h. With a metric N of
the d columns and a weight D_v of every row, both are

    cost = tr(N (E − Ê)ᵀ D (E − Ê)),

the first with how often tokens occur in D and the gradients behind the embedding in N, the second with the curvature of
the network's outputs in D and the second moments of h in N. E − Ê = E (1 − P) for one projection P of rank r, so all
that is needed is K = EᵀDE and N, d × d both: nothing is as large as the vocabulary squared. If N and K are the only
ones, P = N^{1/2} U Uᵀ N^{-1/2} for the leading eigenvectors U of N^{1/2} K N^{1/2} is optimal; uses are added up in N
and in K, which is close, since a network predicts tokens as often as they occur.

The pair is an embedding of r columns and a linear layer to d; a head becomes a linear layer to r, and one whose weight
is that of the small embedding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankwise.core.fold import all_folds
from rankwise.core.layer import LOOKUP, Layer
from rankwise.core.linalg import Array, Ints, eigenvectors, eye_like, precise
from rankwise.core.option import Option
from rankwise.core.parts import Part
from rankwise.decompositions.base import TOKENS, Decomposition, Factors, Scores, Selection, Target
from rankwise.decompositions.held_out import root_from, trailing
from rankwise.errors import RankwiseError

ROWS = (0.0, 0.01, 0.1, 0.5, 1.0)  # shares of uniform weights among those of rows
WIDE = 1024  # columns from which on numbers are single
COLUMNS = (0.0, 0.01, 0.1, 0.5, 1.0)  # shares of the identity in the metric of columns


@dataclass(frozen=True, eq=False)
class Use:
    """One way in which some inputs use an embedding: K = EᵀDE and N (d, d), so that tr(N K) is what all of it costs."""

    rows: Tensor
    columns: Tensor

    def shrunk(self, shares: tuple[float, float], plain: Tensor) -> Use:
        """Rows drawn towards equal weights (`plain` = EᵀE), columns towards the identity, of equal size."""
        level = float(self.rows.diagonal().sum() / plain.diagonal().sum().clamp_min(1e-300))
        mean = float(self.columns.diagonal().mean())
        return Use(
            (1 - shares[0]) * self.rows + shares[0] * level * plain,
            (1 - shares[1]) * self.columns + shares[1] * mean * eye_like(self.columns),
        )


Uses = Sequence[Use]  # by the same inputs: as an embedding, and as each of the heads


@dataclass(frozen=True, eq=False)
class Halves:
    """What two halves of the inputs say, and how far it is drawn to equal weights once that was chosen."""

    uses: tuple[Uses, Uses]
    plain: Tensor  # EᵀE

    def both(self) -> Uses:
        pairs = zip(*self.uses, strict=True)
        return [Use((a.rows + b.rows) / 2, (a.columns + b.columns) / 2) for a, b in pairs]

    def errors(self, shares: tuple[float, float]) -> Array:
        """By rank, of what is fitted to one half on the other, mean of both ways."""
        found = [
            errors(directions(fitted, shares, self.plain), tested) for fitted, tested in (self.uses, self.uses[::-1])
        ]
        mean: Array = np.mean(found, axis=0)
        return mean

    @cached_property
    def shares(self) -> tuple[float, float]:
        """The best ones of a grid, one side after the other, over all ranks."""
        rows = min(ROWS, key=lambda s: _loss(self.errors((s, COLUMNS[1]))))
        return rows, min(COLUMNS, key=lambda s: _loss(self.errors((rows, s))))


def ready(weight: Tensor) -> Tensor:
    """An embedding as it is computed with: single where it is wide, far below the noise of sampling."""
    found = weight.detach()
    return found.float() if found.shape[1] >= WIDE and found.dtype != torch.float64 else precise(found)


def _loss(curve: Array) -> float:
    relative = np.maximum(curve[1:-1] / max(curve[0], 1e-300), 1e-12)
    return float(np.log(relative).mean()) if len(relative) else 0.0


def directions(uses: Uses, shares: tuple[float, float], plain: Tensor) -> tuple[Tensor, Tensor]:
    """C (d, d) and B (d, d), strongest first: P of rank r is C[:, :r] B[:r]."""
    drawn = [use.shrunk(shares, plain) for use in uses]
    columns = sum((use.columns for use in drawn), start=torch.zeros_like(plain))
    size = [float((use.columns * use.rows).sum()) for use in drawn]
    parts = [w * u.rows / u.rows.diagonal().sum().clamp_min(1e-300) for w, u in zip(size, drawn, strict=True)]
    rows = sum(parts, start=torch.zeros_like(plain))
    values, vectors = eigenvectors((columns + columns.t()) / 2)
    least = 1e-9 if values.dtype == torch.float64 else 1e-6
    root, back = root_from(values.clamp_min(least * float(values[0].clamp_min(1e-300))), vectors)
    turned = root @ rows @ root
    found = eigenvectors((turned + turned.t()) / 2)[1]
    return root @ found, found.t() @ back


def errors(found: tuple[Tensor, Tensor], uses: Uses) -> Array:
    """By rank, tr(N (1 − P)ᵀ K (1 − P)) of all uses: 1 − P is the sum of what lies beyond the rank."""
    left, right = found
    lost = np.zeros(len(left) + 1)
    for use in uses:
        lost = lost + trailing((left.t() @ use.rows @ left) * (right @ use.columns @ right.t()))
    return lost


class Embedding(Decomposition):
    """One option, with a rank."""

    name = "embedding"
    about = "an embedding of low rank, together with heads that share its weight"
    needs = TOKENS
    timed_as = None

    def full_rank(self, layer: Layer, option: Option) -> int:
        return min(layer.filters, layer.channels)

    def parts(self, layer: Layer, option: Option, rank: Any) -> tuple[Part, ...]:
        return (Part("encoder", (), layer.channels, rank), Part("decoder", (), rank, layer.filters))

    def candidates(self, layer: Layer, selection: Selection) -> list[Option]:
        return [Option(all_folds(layer.dims)[0], 1, self.name)] if layer.kind == LOOKUP else []

    def check(self, layer: Layer, option: Option, where: str) -> None:
        super().check(layer, option, where)
        if layer.kind != LOOKUP:
            raise RankwiseError(f"{where} is {layer.kind}, and {self.name!r} is a decomposition of embeddings only")

    def costs(self, layer: Layer, option: Option) -> tuple[Ints, Ints | None]:
        """A look-up costs no macs; the linear layer behind it does, and so do both of a head."""
        ranks = np.arange(self.full_rank(layer, option) + 1)
        params = ranks * (layer.channels + layer.filters * (1 + len(layer.heads)))
        if layer.calls is None:
            return params, None
        looked_up = sum(call.count * math.prod(call.outputs) for call in layer.calls)
        return params, ranks * (layer.filters * looked_up + (layer.filters + layer.channels) * layer.head_rows)

    def score(self, target: Target, selection: Selection) -> Scores:
        seen = target.tokens
        if not isinstance(seen, Halves):
            return Scores()
        lost = seen.errors(seen.shares)
        option = Option(all_folds(target.layer.dims)[0], 1, self.name)
        return Scores(given={option: {"effect": np.minimum.accumulate(np.maximum(0.0, lost))}})

    def factors(self, target: Target, option: Option, rank: int) -> Factors:
        weight = ready(target.weight)
        if isinstance(target.tokens, Halves):
            seen = target.tokens
            left, right = directions(seen.both(), seen.shares, seen.plain)
        else:
            left = eigenvectors(weight.t() @ weight)[1]
            right = left.t()
        codes, back = weight @ left[:, :rank], right[:rank]
        # Numbers of one size in both parts: finite in float16, and Adam moves both alike.
        scale = (codes.square().mean(0) / back.square().mean(1)).clamp_min(1e-300) ** 0.25
        return Factors({"encoder": [(codes / scale).t()[None]], "decoder": [(scale[:, None] * back).t()[None]]})


DECOMPOSITION = Embedding()
