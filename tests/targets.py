"""Short ways to say what tests of decompositions say often."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rankwise.core.layer import Layer
from rankwise.core.option import Cost, Option
from rankwise.decompositions import PLAIN, Selection, Target, cost_at, whitened, whitened_tucker
from rankwise.surgery.pairs import fill_pair_


def fit(
    weight: Tensor,
    layer: Layer,
    option: Option,
    moment: Tensor,
    metric: Tensor | None = None,
    most: int | None = None,
) -> whitened.Fitted:
    return whitened.fit(Target(layer, weight, moment=moment, metric=metric), option, most)


def cored_factors(
    weight: Tensor, layer: Layer, option: Option, rank: int, moment: Tensor, metric: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return whitened_tucker.factors(Target(layer, weight, moment=moment, metric=metric), option, rank)


def fill(
    pair: nn.Sequential, layer: Layer, option: Option, rank: int, module: nn.Module, outputs: Any | None = None
) -> None:
    """The factors of a module's weight, and its bias, in a pair."""
    old: Any = module
    fill_pair_(pair, Target(layer, old.weight, old.bias, outputs=outputs), option, rank)


def unit_cost(layer: Layer, option: Option) -> Cost:
    """What rank 1 of a pair costs; rank j costs j times as much."""
    return cost_at(layer, option, 1)


def options_for(layer: Layer, folds: Any, slices: Any) -> list[Option]:
    return PLAIN.options(layer, Selection(folds, slices))
