"""Tables for `auto` with data: what every option would do to the network's outputs (the measure `effect`)."""

from __future__ import annotations

from torch import Tensor, nn

from rankwise.calibration.inputs import Inputs
from rankwise.calibration.output_metric import Influence, influences
from rankwise.core.layer import Coverage, Layer
from rankwise.core.linalg import check_finite
from rankwise.decompositions import DECOMPOSITIONS, METRIC, PLAIN, Selection, Target
from rankwise.decompositions.whitened import root_of, share_for, shrunk
from rankwise.planning.planner import Settings
from rankwise.planning.table import Progress, Table, fingerprint, module_weights

# Layers with more inputs to a filter than this are decomposed without their covariance, which would not fit.
LARGEST = 5_000


def effect_table(
    model: nn.Module,
    coverage: Coverage,
    settings: Settings,
    inputs: Inputs,
    progress: Progress | None = None,
) -> tuple[Table, dict[str, Influence]]:
    """The `effect` of every slice of every layer by rank, and the influence that it was measured with.

    A layer that real data does not reach stays as it is; of other inputs nobody expects that they reach all.
    """
    weights = module_weights(model, coverage)
    for layer in coverage.layers:
        check_finite(weights[layer.name], layer.name)
    found = influences(model, inputs.batches, list(coverage.layers), LARGEST, settings.seed, inputs.means)
    table = Table(coverage, {}, {}, fingerprint(coverage, weights), weights)
    table.decompositions = settings.decompositions
    for done, layer in enumerate(coverage.layers):
        if progress:
            progress(layer.name, done, len(coverage.layers))
        one, weight = found[layer.name], weights[layer.name]
        if one.whole and one.seen.count:
            target = target_for(layer, weight, one, inputs.least)
            for name in settings.decompositions:
                if DECOMPOSITIONS[name].needs == METRIC:
                    table.add(layer, DECOMPOSITIONS[name].score(target, settings.selection))
        elif one.seen.count or not inputs.real:
            _add_plain(table, layer, weight, one, settings.selection)
    if progress:
        progress("", len(coverage.layers), len(coverage.layers))
    return table, found


def target_for(layer: Layer, weight: Tensor, one: Influence, least: float) -> Target:
    """What a layer is fitted to: its weight, and moments that are drawn towards the identity where samples are few."""
    share = max(least, share_for(one.seen.count, one.seen.mean.shape[-1]))
    return Target(layer, weight, moment=shrunk(one.moment, share), metric=root_of(one.metric))


def _add_plain(table: Table, layer: Layer, weight: Tensor, one: Influence, selection: Selection) -> None:
    """Options from the weight alone, in the same unit: of a layer that is too wide, or that no input reaches.

    Of the latter nobody knows what it does: as if the outputs were lost with its weights.
    """
    scores = PLAIN.score(Target(layer, weight), selection)
    table.add(layer, scores)
    for option in scores.spectra:
        residual = table.curve(layer, option, "residual").values()
        effect = residual * _mean(one) if one.seen.count else table.curve(layer, option, "energy").values()
        table.given[layer.name, option] = {"effect": effect}


def _mean(one: Influence) -> float:
    """What one unit of ‖W − Ŵ‖² costs if inputs and outputs had no preferred direction."""
    power = float(one.seen.second_moment.diagonal(dim1=1, dim2=2).mean())
    return power * float(one.metric.diagonal(dim1=1, dim2=2).mean())
