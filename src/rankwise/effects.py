"""Tables for `auto` with data: what every option would do to the network's outputs (the measure `effect`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from rankwise.cost import Option, costs, options_for
from rankwise.decompose import check_finite
from rankwise.influence import Influence, influences
from rankwise.layer import Coverage, Layer
from rankwise.search import Settings
from rankwise.table import Progress, Table, add_slices_, fingerprint, module_weights
from rankwise.whiten import fit, root_of, share_for, shrunk

NAME = "whitened"
# Layers with more inputs to a filter than this are decomposed without their covariance, which would not fit.
LARGEST = 10_000


def effect_table(
    model: nn.Module,
    coverage: Coverage,
    settings: Settings,
    data: Iterable[Any],
    progress: Progress | None = None,
    least: float = 0.0,
) -> tuple[Table, dict[str, Influence]]:
    """The `effect` of every slice of every layer by rank, and the influence that it was measured with.

    `least` is how far the moments are drawn towards the identity at least.
    """
    weights = module_weights(model, coverage)
    for layer in coverage.layers:
        check_finite(weights[layer.name], layer.name)
    found = influences(model, data, list(coverage.layers), LARGEST, settings.seed)
    table = Table(coverage, {}, {}, fingerprint(coverage, weights), weights)
    table.decompositions = settings.decompositions
    for done, layer in enumerate(coverage.layers):
        if progress:
            progress(layer.name, done, len(coverage.layers))
        one = found[layer.name]
        if not one.seen.count:
            continue  # the data does not reach it: it stays as it is
        options = options_for(layer, settings.folds, settings.groups)
        if one.whole:
            share = max(least, share_for(one.seen.count, one.seen.mean.shape[-1]))
            moment, metric = shrunk(one.seen.second_moment, share), root_of(one.metric)
            for option in options:
                like = Option(option.fold, option.groups, NAME)
                fitted = fit(weights[layer.name], layer, like, moment, metric, _most(layer, like))
                table.given[layer.name, like] = {"effect": fitted.errors}
        else:
            add_slices_(table, layer, weights[layer.name], options, [])
            for option in options:
                residual = table.curve(layer, option, "residual").values()
                table.given[layer.name, option] = {"effect": residual * _mean(one)}
    if progress:
        progress("", len(coverage.layers), len(coverage.layers))
    return table, found


def _most(layer: Layer, option: Option) -> int:
    """The largest rank at which the pair is smaller than the layer in params or macs; beyond, errors are not needed."""
    params, macs = costs(layer, option)
    ranks = [int(params.searchsorted(layer.params)) - 1]
    if macs is not None and layer.macs:
        ranks.append(int(macs.searchsorted(layer.macs)) - 1)
    return max(1, *ranks)


def _mean(one: Influence) -> float:
    """What one unit of ‖W − Ŵ‖² costs if inputs and outputs had no preferred direction."""
    power = float(one.seen.second_moment.diagonal(dim1=1, dim2=2).mean())
    return power * float(one.metric.diagonal(dim1=1, dim2=2).mean())
