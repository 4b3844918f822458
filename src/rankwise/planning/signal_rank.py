"""Ranks without a budget, where a decomposition reads them from the weight; costs are in params.

A layer whose factors would not be smaller stays as it is.
"""

from __future__ import annotations

from torch import Tensor

from rankwise.core.layer import Layer
from rankwise.decompositions import DECOMPOSITIONS, Decomposition, Target, costs
from rankwise.errors import RankwiseError
from rankwise.planning.menu import Point
from rankwise.planning.table import Table


def signal_points(table: Table, decomposition: str, measure: str) -> list[Point]:
    """For every layer of the table what the decomposition makes of it."""
    if table.weights is None:
        raise RankwiseError(
            "ranks without a budget are read from the weights, and a table read from a file has none: "
            "open it with Table.load(path, model), or give a budget"
        )
    found, weights = DECOMPOSITIONS[decomposition], table.weights
    return [_point(table, layer, found, weights[layer.name], measure) for layer in table.coverage.layers]


def _point(table: Table, layer: Layer, decomposition: Decomposition, weight: Tensor, measure: str) -> Point:
    dense = Point((layer.params,), 0.0, None, 0)
    if not table.options(layer):
        return dense  # the calibration data does not reach it
    found = decomposition.unbudgeted(Target(layer, weight))
    if found is None:
        return dense
    option, rank = found
    params = int(costs(layer, option)[0][rank])
    if params >= layer.params:
        return dense
    return Point((params,), table.curve(layer, option, measure)[rank], option, rank)
