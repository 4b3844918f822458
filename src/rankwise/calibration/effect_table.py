"""Tables for `auto` with data: what every option would do to the network's outputs (the measure `effect`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor, nn

from rankwise.calibration.activations import patch_size
from rankwise.calibration.influence import Influence
from rankwise.calibration.inputs import Inputs
from rankwise.calibration.objective import is_text
from rankwise.calibration.output_metric import MOST_OUTPUTS, influences
from rankwise.calibration.shrinkage import settle_, target_for
from rankwise.core.fold import all_folds
from rankwise.core.layer import LOOKUP, Coverage, Layer
from rankwise.core.linalg import check_finite
from rankwise.core.memory import give_back, room
from rankwise.core.option import Option
from rankwise.decompositions import DECOMPOSITIONS, METRIC, PLAIN, TOKENS, Selection, Target
from rankwise.decompositions.held_out import plain_errors
from rankwise.planning.planner import Settings
from rankwise.planning.table import Progress, Table, fingerprint, module_weights

# Layers with more inputs to a filter than this are decomposed without their covariance, which would not fit, or would
# take too long: of linear layers that read tokens (LONGEST) only matrices of the smaller side are factorised.
LARGEST, LONGEST = 5_000, 16_384
MEMORY = 1.25 * 2.0**30  # bytes of statistics that are collected at once, beside the network and what a batch takes


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
    table = Table(coverage, {}, {}, fingerprint(coverage, weights), weights)
    table.decompositions = settings.decompositions
    found: dict[str, Influence] = {}
    able = fittable(coverage)
    for layer, one in each_influence(model, inputs, coverage, settings.seed):
        if progress:
            progress(layer.name, len(found), len(able))
        found[layer.name] = one
        add_layer(table, layer, weights[layer.name], one, inputs, settings)
    if progress:
        progress("", len(able), len(able))
    return table, found


def fittable(coverage: Coverage) -> list[Layer]:
    """All but depthwise layers: a filter of theirs is no matrix."""
    return [layer for layer in coverage.layers if layer.group_filters > 1 or layer.groups == 1]


def each_influence(
    model: nn.Module, inputs: Inputs, coverage: Coverage, seed: int
) -> Iterator[tuple[Layer, Influence]]:
    """Layers one by one with all that the inputs say of them, in as many passes over the inputs as memory asks for.

    Whoever takes the next one keeps no more of the last than is needed to fit it (`settle_`).
    """
    weights = module_weights(model, coverage)
    largest = largest_for(inputs)
    for group in passes(fittable(coverage), memory_for_statistics(), largest):
        found = influences(model, inputs, group, largest, seed, inputs.means)
        for layer in group:
            one = found.pop(layer.name)
            yield layer, one
            if layer.kind != LOOKUP:
                settle_(layer, weights[layer.name], one, inputs.least)
            give_back()


def memory_for_statistics() -> float:
    """Bytes of statistics that are collected at once: half of what a limit leaves, if that is less."""
    left = room()
    return MEMORY if left is None else min(MEMORY, left / 2)


def largest_for(inputs: Inputs) -> int:
    """The width up to which covariances are collected."""
    return LONGEST if inputs.batches and is_text(inputs.batches[0]) else LARGEST


def passes(layers: list[Layer], limit: float, largest: int = LARGEST) -> list[list[Layer]]:
    """Layers whose statistics fit into memory together, in order; each has at least one."""
    found: list[list[Layer]] = []
    room = 0.0
    for layer in layers:
        need = needed(layer, largest)
        if not found or need > room:
            found.append([])
            room = limit
        found[-1].append(layer)
        room -= need
    return found


def needed(layer: Layer, largest: int = LARGEST) -> float:
    """Bytes of the moments of a layer: those of patches and of Γ on both sides, for each half, in single precision."""
    size = patch_size(layer)
    inside = size**2 if size <= largest else 0
    outside = layer.group_filters**2 if layer.group_filters <= MOST_OUTPUTS else 0
    return 2 * 2 * 4.0 * layer.groups * (inside + outside)


def add_layer(table: Table, layer: Layer, weight: Tensor, one: Influence, inputs: Inputs, settings: Settings) -> None:
    """The options of a layer with their effects."""
    if layer.kind == LOOKUP:
        _add_lookup(table, Target(layer, weight, tokens=one.tokens), settings)
    elif one.whole and one.count:
        target = target_for(layer, weight, one, inputs.least)
        for name in settings.decompositions:
            if DECOMPOSITIONS[name].needs == METRIC:
                table.add(layer, DECOMPOSITIONS[name].score(target, settings.selection))
        if not one.by_token:  # with so many samples fitting is never behind
            _compete(table, layer, target, settings)
    elif one.count or not inputs.real:
        _add_plain(table, layer, weight, one, settings.selection)


def _add_plain(table: Table, layer: Layer, weight: Tensor, one: Influence, selection: Selection) -> None:
    """Options from the weight alone, in the same unit: of a layer that is too wide, or that no input reaches.

    Of the latter nobody knows what it does: as if the outputs were lost with its weights.
    """
    scores = PLAIN.score(Target(layer, weight), selection)
    table.add(layer, scores)
    for option in scores.spectra:
        residual = table.curve(layer, option, "residual").values()
        effect = residual * _mean(one) if one.count else table.curve(layer, option, "energy").values()
        table.given[layer.name, option] = {"effect": effect}


def _add_lookup(table: Table, target: Target, settings: Settings) -> None:
    for name in settings.decompositions:
        if DECOMPOSITIONS[name].needs == TOKENS:
            table.add(target.layer, DECOMPOSITIONS[name].score(target, settings.selection))


def _mean(one: Influence) -> float:
    """What one unit of ‖W − Ŵ‖² costs if inputs and outputs had no preferred direction."""
    both = one.both
    power = float(one.seen.second_moment.diagonal(dim1=1, dim2=2).mean())
    if one.is_output:
        return power * both.level * both.places / one.variance
    return power * float(both.metric.diagonal(dim1=1, dim2=2).mean())


def _compete(table: Table, layer: Layer, target: Target, settings: Settings) -> None:
    """The SVD of the weight alone beside what is fitted, where it may be chosen: one slice, all taps in the encoder."""
    asked = settings.selection
    if PLAIN.name not in settings.decompositions or (asked.folds, asked.slices) != ("all", "all") or layer.transposed:
        return
    option = Option(all_folds(layer.dims)[0], 1, PLAIN.name)
    found = [plain_errors(target.weight, layer, s.test_moment, s.test_metric) for s in target.measured()]
    table.given[layer.name, option] = {"effect": np.minimum.accumulate(np.maximum(0.0, np.mean(found, axis=0)))}
