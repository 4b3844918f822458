"""Tables for `auto` with data: what every option would do to the network's outputs (the measure `effect`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor, nn

from rankwise.calibration.output_metric import Influence, influences
from rankwise.core.layer import Coverage, Layer
from rankwise.core.option import Option, costs, options_for
from rankwise.decompositions import whitened_tucker
from rankwise.decompositions.slices import check_finite
from rankwise.decompositions.whitened import fit, root_of, rough_errors, share_for, shrunk
from rankwise.planning.planner import Settings
from rankwise.planning.table import Progress, Table, add_slices_, fingerprint, module_weights

NAME = "whitened"
# Layers with more inputs to a filter than this are decomposed without their covariance, which would not fit.
LARGEST = 5_000
# Up to this size every option is fitted; beyond, those whose rough error is within SLACK of the best at one of ROOMS
# costs. On ResNet20 a slack of 1.1 keeps what all options together can reach to 3.5 % on average, 1.25 keeps all of it.
SMALL, SLACK, ROOMS = 1_000, 1.1, 40


def effect_table(
    model: nn.Module,
    coverage: Coverage,
    settings: Settings,
    data: Iterable[Any],
    progress: Progress | None = None,
    least: float = 0.0,
    means: bool = True,
    real: bool = True,
) -> tuple[Table, dict[str, Influence]]:
    """The `effect` of every slice of every layer by rank, and the influence that it was measured with.

    `least` is how far the moments are drawn towards the identity at least; `means` as for `influences`. A layer that
    `real` data does not reach stays as it is; of other inputs nobody expects that they reach all.
    """
    weights = module_weights(model, coverage)
    for layer in coverage.layers:
        check_finite(weights[layer.name], layer.name)
    found = influences(model, data, list(coverage.layers), LARGEST, settings.seed, means)
    table = Table(coverage, {}, {}, fingerprint(coverage, weights), weights)
    table.decompositions = settings.decompositions
    for done, layer in enumerate(coverage.layers):
        if progress:
            progress(layer.name, done, len(coverage.layers))
        one = found[layer.name]
        options = options_for(layer, settings.folds, settings.groups)
        if not one.seen.count and real:
            continue
        if not one.seen.count:
            # Nobody knows what it does: as if the outputs were lost with its weights.
            add_slices_(table, layer, weights[layer.name], options, [])
            for option in options:
                table.given[layer.name, option] = {"effect": table.curve(layer, option, "energy").values()}
        elif one.whole:
            share = max(least, share_for(one.seen.count, one.seen.mean.shape[-1]))
            moment, metric = shrunk(one.moment, share), root_of(one.metric)
            offered = [Option(option.fold, option.groups, NAME) for option in options]
            chosen = _worth_fitting(weights[layer.name], layer, offered, moment, metric)
            start = (
                whitened_tucker.start(layer)
                if whitened_tucker.NAME in settings.decompositions and whitened_tucker.is_possible(layer)
                else None
            )
            for like in dict.fromkeys([*chosen, *([start] if start else [])]):
                fitted = fit(weights[layer.name], layer, like, moment, metric, _most(layer, like))
                if like in chosen:
                    table.given[layer.name, like] = {"effect": fitted.errors}
                if like == start:
                    table.given[layer.name, whitened_tucker.family(layer)] = {
                        "effect": whitened_tucker.curves(fitted, layer, metric)
                    }
        else:
            add_slices_(table, layer, weights[layer.name], options, [])
            for option in options:
                residual = table.curve(layer, option, "residual").values()
                table.given[layer.name, option] = {"effect": residual * _mean(one)}
    if progress:
        progress("", len(coverage.layers), len(coverage.layers))
    return table, found


def _worth_fitting(weight: Tensor, layer: Layer, options: list[Option], moment: Tensor, metric: Tensor) -> list[Option]:
    """All options of a small layer; of a large one those that are among the best for some cost by a rough measure."""
    if moment.shape[-1] <= SMALL:
        return options
    errors = [rough_errors(weight, layer, option, moment, metric) for option in options]
    near: set[int] = set()
    for unit, whole in enumerate((layer.params, layer.macs)):
        by_rank = [cost for option in options if (cost := costs(layer, option)[unit]) is not None]
        if not whole or len(by_rank) < len(options):
            continue
        rooms = np.linspace(0, whole, ROOMS + 2)[1:-1]
        fits = [cost.searchsorted(rooms, side="right") - 1 for cost in by_rank]  # the largest rank for each room
        at = np.array([error[rank.clip(0, len(error) - 1)] for rank, error in zip(fits, errors, strict=True)])
        near |= set(np.flatnonzero((at <= SLACK * at.min(axis=0)).any(axis=1)))
    return [options[i] for i in sorted(near)] or options


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
