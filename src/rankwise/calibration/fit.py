"""Fitting a compressed network to the original one, layer by layer, on calibration data without labels.

In the order in which the layers run: the compressed network so far is run beside the original, and the pair of a layer
becomes the best one, in the metric of data (whiten.py), for what it really gets and what the original layer gave:

    min_Ŵ E ‖S (y − Ŵ x̂)‖² = ‖S (W* − Ŵ) M̂^{1/2}‖² + const,   W* = E[y x̂ᵀ] M̂⁻¹,   M̂ = E[x̂ x̂ᵀ]

So a layer makes up for the errors before it as far as it can. W* is drawn towards W where there are few samples. Where
there is a bias, or a batch norm behind the layer, it takes up the mean of what is left, E[y] − Ŵ E[x̂], at no cost:
then x̂ and y above are without their means.

That takes a pass over the data for every layer. Where it would be too much work, neighbours share a pass: they make up
for the errors of earlier passes, not for each other's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rankwise.calibration.activations import batches
from rankwise.calibration.inputs import Inputs
from rankwise.calibration.output_metric import Influence, some_patches
from rankwise.core.layer import Coverage, Layer, canonical, stored
from rankwise.core.linalg import precise
from rankwise.core.moments import Moments
from rankwise.decompositions import METRIC, Target, of
from rankwise.decompositions.whitened import root_of, share_for, shrunk
from rankwise.planning.plan import Choice, Plan
from rankwise.surgery.forward import Batches, Example, run_example, run_until, undisturbed
from rankwise.surgery.hooks import Seen, watching
from rankwise.surgery.modules import mark_of
from rankwise.surgery.pairs import build_pair, fill_pair_, merge_pair, put_factors_
from rankwise.surgery.replace import copy_model, match_layers, replace_layers_, swap_modules_, target_of

WORK = 4 * 10**12  # multiply-adds to spend on running both networks; one pass at least
Task = tuple[Choice, Layer]


def apply_fitted(
    model: nn.Module,
    plan: Plan,
    inputs: Inputs,
    influence: Mapping[str, Influence],
    moments: Mapping[str, Moments] | None = None,
    work: int | None = None,
    coverage: Coverage | None = None,
) -> nn.Module:
    """A copy of the model that follows the plan, with what is fitted to inputs fitted layer after layer.

    `work` is how many multiply-adds may be spent on running the networks, WORK unless given; with 0 nothing is run, and
    layers do not make up for each other. `coverage` is that of the model, if it is known.
    """
    later = {choice.name for choice in plan.choices if of(choice.option).needs == METRIC}
    layers = match_layers(model, plan, coverage)
    tasks = [(choice, layer) for choice, layer in layers if choice.name in later]
    small = copy_model(model)
    replace_layers_(small, plan, fill=True, moments=moments, later=later, layers=layers)  # the others stay for now
    passes = _passes(model, tasks, inputs.batches, work)
    if len(passes) < len(tasks):  # until they are fitted in order, what the original network gives them will do
        for choice, layer in tasks:
            one = influence.get(layer.name)
            if one is not None and one.whole and one.seen.count:
                share = max(inputs.least, share_for(one.seen.count, one.seen.mean.shape[-1]))
                weight, bias = _weights(model, layer)
                mean = one.seen.mean if one.centred else None
                outputs = None if mean is None else _through(weight, layer, mean) + bias.to(mean)
                _fit_(small, model, choice, layer, _PairTarget(weight, shrunk(one.moment, share), mean, outputs), one)
    for together in passes:
        sums = _side_by_side(model, small, together, inputs.batches)
        for choice, layer in together:
            one = influence.get(layer.name)
            centred = one is not None and one.centred
            target = sums.pop(layer.name).target(*_weights(model, layer), layer, inputs.least, centred)
            _fit_(small, model, choice, layer, target, one)
    for choice, layer in tasks:  # what no input reached comes from its weights
        old = small.get_submodule(layer.name)
        if mark_of(old) is None:
            pair = build_pair(layer, choice.option, choice.rank, old)
            fill_pair_(pair, target_of(old, layer), choice.option, choice.rank)
            swap_modules_(small, {old: pair})
    return small


@dataclass(frozen=True)
class _PairTarget:
    """What a pair should be: W* in the layer's own layout, and M̂ (G, d, d).

    `inputs` (G, d) and `outputs` (f,) are means, where a bias makes up for them.
    """

    weight: Tensor
    moment: Tensor
    inputs: Tensor | None = None
    outputs: Tensor | None = None


def _fit_(
    small: nn.Module, model: nn.Module, choice: Choice, layer: Layer, target: _PairTarget, influence: Influence | None
) -> None:
    """Put the pair in place, fitted; until then the original layer stands there."""
    metric = None if influence is None else root_of(influence.metric)
    old = small.get_submodule(layer.name)
    pair: Any = old if mark_of(old) is not None else build_pair(layer, choice.option, choice.rank, old)
    wanted = Target(layer, target.weight, moment=target.moment, metric=metric)
    put_factors_(pair, of(choice.option).factors(wanted, choice.option, choice.rank), layer)
    if pair is not old:
        if layer.bias:
            pair[-1].bias.data.copy_(old.bias)
        swap_modules_(small, {old: pair})
    if influence is not None and target.inputs is not None and target.outputs is not None:
        merged: Any = merge_pair(pair)
        gap = target.outputs - _through(merged.weight, layer, target.inputs)
        with torch.no_grad():
            if layer.bias:
                pair[-1].bias.copy_(gap)
            else:
                mean: Any = model.get_submodule(influence.norm).running_mean
                small.get_submodule(influence.norm).running_mean.copy_(mean - gap.to(mean))  # type: ignore[operator]


def _weights(model: nn.Module, layer: Layer) -> tuple[Tensor, Tensor]:
    """Weight and bias; no bias is none that adds anything."""
    module: Any = model.get_submodule(layer.name)
    return module.weight.detach(), torch.zeros(()) if module.bias is None else module.bias.detach()


def _through(weight: Tensor, layer: Layer, inputs: Tensor) -> Tensor:
    """What a layer without its bias makes of one patch (G, d): (f,)."""
    rows = precise(canonical(weight.detach(), layer).flatten(2))
    return (rows @ inputs[:, :, None]).flatten()


def _passes(model: nn.Module, tasks: list[Task], data: Batches, work: int | None) -> list[list[Task]]:
    """Layers in the order in which they first run, those of one pass together; those that never run are left out."""
    if work == 0:
        return []
    order: dict[str, int] = {}
    counter, runs = FlopCounterMode(display=False), 0

    def look(name: str, _: Seen) -> None:
        order.setdefault(name, len(order))

    with undisturbed(model), watching(model, {layer.name: partial(look, layer.name) for _, layer in tasks}):
        for runs, batch in enumerate(batches(data), start=1):
            if runs == 1:
                with counter:
                    run_example(model, batch)
            elif len(order) < len(tasks):  # another batch may take another way
                run_example(model, batch)
    ordered = sorted([task for task in tasks if task[1].name in order], key=lambda task: order[task[1].name])
    each = runs * counter.get_total_flops()  # macs of both networks in one pass
    count = max(1, min(len(ordered), (work or WORK) // max(1, each)))
    cuts = [i * len(ordered) // count for i in range(count + 1)]
    return [ordered[start:end] for start, end in pairwise(cuts) if end > start]


@dataclass
class _LayerSums:
    """Of one layer, over calls and batches: Σ x̂ x̂ᵀ (G, d, d), Σ y x̂ᵀ (G, f/G, d), the number of samples.

    `inputs` and `outputs` are Σ x̂ (G, d) and Σ y (G, f/G).
    """

    random: torch.Generator
    square: Tensor = field(default_factory=lambda: torch.zeros(()))
    cross: Tensor = field(default_factory=lambda: torch.zeros(()))
    inputs: Tensor = field(default_factory=lambda: torch.zeros(()))
    outputs: Tensor = field(default_factory=lambda: torch.zeros(()))
    count: int = 0

    def add(self, layer: Layer, given: Tensor, wanted: Tensor) -> None:
        """Of inputs in the small network, and outputs of the original."""
        rows, there = some_patches(layer, given, wanted, self.random)
        rows, there = precise(rows), precise(there)
        self.square = self.square + rows.transpose(1, 2) @ rows
        self.count += rows.shape[1]
        self.inputs = self.inputs + rows.sum(1)
        if there.shape[1]:
            outputs = torch.unflatten(there, 1, (layer.groups, -1)).transpose(0, 1)
            self.cross = self.cross + outputs.transpose(1, 2) @ rows
            self.outputs = self.outputs + outputs.sum(1)

    def target(self, weight: Tensor, bias: Tensor, layer: Layer, least: float, centred: bool) -> _PairTarget:
        share = max(least, share_for(self.count, self.square.shape[-1]))
        square, cross = self.square / self.count, self.cross / self.count
        means: tuple[Tensor | None, Tensor | None] = (None, None)
        inputs, outputs = self.inputs / self.count, self.outputs / self.count
        if centred and cross.ndim:
            square = square - inputs[:, :, None] * inputs[:, None, :]
            cross = cross - outputs[:, :, None] * inputs[:, None, :]
            means = inputs, outputs.flatten()
        elif cross.ndim:
            cross = cross - bias.to(cross).expand(layer.filters).reshape(outputs.shape)[:, :, None] * inputs[:, None, :]
        moment = shrunk(square, share)
        if not cross.ndim or not bool(moment.diagonal(dim1=1, dim2=2).sum(1).all()):
            return _PairTarget(weight, moment, *means)
        plain = precise(canonical(weight, layer).flatten(2))
        wanted = (1 - share) * cross + plain @ (moment - (1 - share) * square)
        solved = torch.linalg.solve(moment, wanted.transpose(1, 2)).transpose(1, 2)
        return _PairTarget(stored(solved.reshape(layer.canonical_shape), layer), moment, *means)


def _side_by_side(model: nn.Module, small: nn.Module, tasks: list[Task], data: Batches) -> dict[str, _LayerSums]:
    """What layers get in the small network and give in the original, summed up over the data.

    What follows after them is not computed, once the original network has shown how often each of them is called.
    """
    layers = [layer for _, layer in tasks]
    sums = {layer.name: _LayerSums(torch.Generator().manual_seed(0)) for layer in layers}
    often: dict[str, int] = {}
    with undisturbed(model), undisturbed(small):
        for batch in batches(data):
            ours = _calls(model, layers, often, batch)
            if not often and all(ours.values()):
                often = {name: len(mine) for name, mine in ours.items()}
            theirs = _calls(small, layers, often, batch)
            for layer in layers:
                for (_, wanted), (given, _) in zip(ours.pop(layer.name), theirs.pop(layer.name), strict=True):
                    sums[layer.name].add(layer, given, wanted)
    return sums


def _calls(
    model: nn.Module, layers: list[Layer], often: Mapping[str, int], batch: Example
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Inputs and outputs of layers, call by call; copies, since what follows may work in place.

    Stops where all have been called as often as `often` says, unless it is empty.
    """
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {layer.name: [] for layer in layers}

    def look(mine: list[tuple[Tensor, Tensor]], call: Seen) -> None:
        mine.append((call.given.clone(), call.output.clone()))

    def enough() -> bool:
        return bool(often) and all(len(seen[name]) >= count for name, count in often.items())

    run_until(model, batch, {name: partial(look, mine) for name, mine in seen.items()}, enough)
    return seen
