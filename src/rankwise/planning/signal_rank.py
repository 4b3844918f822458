"""Ranks without a budget, for tucker2: as many directions as are signal rather than noise (Kim et al. 2015).

Empirical VBMF (vbmf.py) says how many directions of the unfolding along the filters are signal, and how many of
the unfolding along the channels; those are the two ranks. A layer whose factors would not be smaller stays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rankwise.core.fold import fold_for
from rankwise.core.layer import Layer
from rankwise.core.option import Option, costs, full_outer, full_rank
from rankwise.decompositions import tucker
from rankwise.errors import RankwiseError
from rankwise.planning.menu import Point
from rankwise.planning.table import Table
from rankwise.planning.vbmf import signal_rank


def signal_points(table: Table, measure: str) -> list[Point]:
    """For every layer of the table what tucker2 makes of it, costs in params."""
    weights = table.weights
    if weights is None:
        raise RankwiseError(
            "ranks without a budget are read from the weights, and a table read from a file has none: "
            "open it with Table.load(path, model), or give a budget"
        )
    return [_point(table, layer, weights[layer.name], measure) for layer in table.coverage.layers]


def _point(table: Table, layer: Layer, weight: Tensor, measure: str) -> Point:
    dense = Point((layer.params,), 0.0, None, 0)
    if not table.options(layer):
        return dense  # the calibration data does not reach it
    outer, inner = signal_ranks(weight, layer)
    fold = fold_for(0, layer.dims)
    if tucker.has_taps(layer):
        option = Option(fold, 1, "tucker2", outer=min(outer, full_outer(layer)))
    else:
        option, inner = Option(fold, 1), outer
        option = next((o for o in table.options(layer) if (o.decomposition, o.groups) == ("svd", 1)), option)
    rank = min(inner, full_rank(layer, option))
    params = int(costs(layer, option)[0][rank])
    if params >= layer.params:
        return dense
    return Point((params,), table.curve(layer, option, measure)[rank], option, rank)


def signal_ranks(weight: Tensor, layer: Layer) -> tuple[int, int]:
    """Ranks of the filters' and the channels' unfolding, at least 1; the largest of all groups."""
    found = [(1, 1)]
    for w in tucker.modes(weight, layer):
        matrices = (w.flatten(1), w.transpose(0, 1).flatten(1))
        ranks = [signal_rank(torch.linalg.svdvals(m).numpy(), *m.shape) for m in matrices]
        found.append((ranks[0], ranks[1]))
    return max(outer for outer, _ in found), max(inner for _, inner in found)
