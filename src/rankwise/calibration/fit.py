"""Fitting a compressed network to the original one, layer by layer, on calibration data without labels.

*In closed form* every pair is the best one in the metric of data (whitened.py), for what the original network gives it.

*In order* the compressed network runs beside the original, and the pair of a layer becomes the best one for what it
really gets and what the original layer gave:

    min_Ŵ E ‖S (y − Ŵ x̂)‖² = ‖S (W* − Ŵ) M̂^{1/2}‖² + const,   W* = E[y x̂ᵀ] M̂⁻¹,   M̂ = E[x̂ x̂ᵀ]

So a layer makes up for the errors before it as far as it can. All layers are fitted in one pass (lockstep.py). W* of
one half of the inputs is tried on the other: W + τ (W* − W) with the best τ there is what is fitted to, so few inputs
change little. Where there is a bias, or a batch norm behind the layer, it takes up the mean of what is left,
E[y] − Ŵ E[x̂], at no cost: then x̂ and y above are without their means. That, too, is drawn back by what one half says
of the other.

Of both networks the one that is closer to the original on inputs that neither of them saw is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.calibration.answers import changes_of
from rankwise.calibration.in_order import Crowd, Means, through, wanted_target
from rankwise.calibration.influence import Influence
from rankwise.calibration.inputs import Inputs
from rankwise.calibration.lockstep import Alive, Gate, tracks, wait_at
from rankwise.calibration.shrinkage import settle_, target_of_both
from rankwise.core.layer import LOOKUP, Coverage, Layer
from rankwise.core.linalg import precise
from rankwise.core.moments import Moments
from rankwise.decompositions import METRIC, TOKENS, Target, of
from rankwise.planning.plan import Choice, Plan
from rankwise.surgery.effective import weight_of
from rankwise.surgery.forward import run_example, undisturbed
from rankwise.surgery.hooks import Seen, watching
from rankwise.surgery.lookups import head_swaps
from rankwise.surgery.pairs import build_pair, factors_of, fill_pair_, merge_pair, put_factors_
from rankwise.surgery.replace import copy_model, match_layers, replace_layers_, swap_modules_, target_of

Task = tuple[Choice, Layer]
LITTLE = 0.2  # of the stated change: fewer pairs make up for nothing (beside an embedding, on two networks of text)


@dataclass(frozen=True, eq=False)
class Fit:
    """A compressed network, and how much its outputs change on the inputs that are held out for such questions.

    `in_order` is whether layers were fitted to what the compressed network gives them; `closed` is the change without.
    """

    network: nn.Module
    change: float | None = None
    in_order: bool = False
    closed: float | None = None


@dataclass(frozen=True, eq=False)
class Closed:
    """A network whose pairs are all in closed form. In `start` the layers of `tasks` are still whole.

    `share` of the stated change is that of `tasks`. `change` is that of the outputs on inputs that are held out, if it
    is known.
    """

    network: nn.Module
    start: nn.Module
    tasks: list[Task]
    share: float = 1.0
    change: float | None = None


def apply_fitted(
    model: nn.Module,
    plan: Plan,
    inputs: Inputs,
    influence: Mapping[str, Influence],
    moments: Mapping[str, Moments] | None = None,
    in_order: bool = True,
    coverage: Coverage | None = None,
) -> Fit:
    """A copy of the model that follows the plan, with what is fitted to inputs fitted.

    Unless `in_order`, nothing is run, and layers do not make up for each other. `coverage` is that of the model, if it
    is known.
    """
    closed = fit_closed(model, plan, inputs, influence, moments, coverage)
    return fit_in_order(model, closed, inputs, influence) if in_order else Fit(closed.network)


def fit_closed(
    model: nn.Module,
    plan: Plan,
    inputs: Inputs,
    influence: Mapping[str, Influence],
    moments: Mapping[str, Moments] | None = None,
    coverage: Coverage | None = None,
) -> Closed:
    """Every pair for what the original network gives it; nothing is run."""
    needs = {choice.name: of(choice.option).needs for choice in plan.choices}
    later = {name for name, what in needs.items() if what in (METRIC, TOKENS)}
    layers = match_layers(model, plan, coverage)
    tasks = [(choice, layer) for choice, layer in layers if needs[choice.name] == METRIC]
    start = copy_model(model)
    replace_layers_(start, plan, fill=True, moments=moments, later=later, layers=layers)  # the others stay for now
    for choice, layer in layers:
        if needs[choice.name] == TOKENS:
            _put_lookup_(start, choice, layer, influence.get(layer.name))
    closed = copy_model(start)
    for choice, layer in tasks:
        one = influence.get(layer.name)
        if one is not None:  # of a plan that was read it has not been done
            settle_(layer, _weights(model, layer)[0], one, inputs.least)
        _fit_closed_(closed, model, choice, layer, one)
    return Closed(closed, start, tasks, _share(plan, tasks))


def _share(plan: Plan, tasks: list[Task]) -> float:
    effects = {choice.name: choice.error.get("effect", 0.0) for choice in plan.choices}
    whole = sum(effects.values())
    return sum(effects[choice.name] for choice, _ in tasks) / whole if whole > 0 else 1.0


def fit_in_order(model: nn.Module, closed: Closed, inputs: Inputs, influence: Mapping[str, Influence]) -> Fit:
    """The better of two on inputs that neither of them saw: `closed`, and layers that make up for those before them."""
    if not closed.tasks or closed.share < LITTLE:
        return Fit(closed.network, closed.change, closed=closed.change)
    ordered = copy_model(closed.start)
    _fit_in_order_(ordered, model, closed.tasks, inputs, influence, closed.network)
    if not len(inputs.check):
        return Fit(ordered, None, True)
    variance = next(iter(influence.values())).variance
    networks = [ordered] if closed.change is not None else [ordered, closed.network]
    change, *others = changes_of(model, networks, inputs.check, variance)
    before = others[0] if closed.change is None else closed.change
    if change <= before:
        return Fit(ordered, change, True, before)
    return Fit(closed.network, before, False, before)


def part_of(model: nn.Module, closed: Closed, layers: Iterable[Layer], influence: Mapping[str, Influence]) -> nn.Module:
    """The model with the pairs of some layers, and nothing else changed. Weights are shared with both."""
    found = copy_model(model, shared=True)
    for layer in layers:
        pair: Any = closed.network.get_submodule(layer.name)
        old = found.get_submodule(layer.name)
        heads = head_swaps(found, layer, pair) if layer.kind == LOOKUP else {}
        swap_modules_(found, {old: pair, **heads})
        norm = influence[layer.name].norm if layer.name in influence else ""
        if norm:
            _running_mean(found, norm).copy_(_running_mean(closed.network, norm))
    return found


def _put_lookup_(small: nn.Module, choice: Choice, layer: Layer, one: Influence | None) -> None:
    """The pair of an embedding, and those of its heads."""
    old: Any = small.get_submodule(layer.name)
    pair = build_pair(layer, choice.option, choice.rank, old)
    fill_pair_(pair, Target(layer, old.weight, tokens=one and one.tokens), choice.option, choice.rank)
    swap_modules_(small, {old: pair, **head_swaps(small, layer, pair)})


def _fit_closed_(small: nn.Module, model: nn.Module, choice: Choice, layer: Layer, one: Influence | None) -> None:
    """From what the original network gives the layer; from its weights where no input reached it."""
    if one is None or not one.whole or not one.count:
        old = small.get_submodule(layer.name)
        pair = build_pair(layer, choice.option, choice.rank, old)
        fill_pair_(pair, target_of(old, layer), choice.option, choice.rank)
        swap_modules_(small, {old: pair})
        return
    weight, bias = _weights(model, layer)
    means = None
    if one.centred:
        inputs = [precise(mean) for mean in one.means]
        outputs = [through(weight, layer, mean) + precise(bias) for mean in inputs]
        means = Means((inputs[0], inputs[1]), (outputs[0], outputs[1]))
    old = small.get_submodule(layer.name)
    pair = _fitted(old, choice, target_of_both(layer, weight, one))
    swap_modules_(small, {old: pair})
    _make_up_(small, model, pair, layer, one, means)


def _fitted(old: Any, choice: Choice, target: Target) -> Any:
    """The pair for a layer; its bias is that of the layer."""
    layer = target.layer
    pair: Any = build_pair(layer, choice.option, choice.rank, old)
    put_factors_(pair, of(choice.option).factors(target, choice.option, choice.rank), layer)
    if layer.bias:
        pair[-1].bias.data.copy_(old.bias)
    return pair


def _make_up_(small: nn.Module, model: nn.Module, pair: Any, layer: Layer, one: Influence, means: Means | None) -> None:
    """The bias, or the running mean of the batch norm behind, takes up the mean of what is left."""
    if means is None:
        return
    merged: Any = merge_pair(pair)
    gap = means.gap(merged.weight, layer)
    with torch.no_grad():
        if layer.bias:
            pair[-1].bias.copy_(gap)
        else:
            mean = _running_mean(model, one.norm)
            _running_mean(small, one.norm).copy_(mean - gap.to(mean))


def _running_mean(network: nn.Module, norm: str) -> Tensor:
    module: Any = network.get_submodule(norm)
    mean: Tensor = module.running_mean
    return mean


def _weights(model: nn.Module, layer: Layer) -> tuple[Tensor, Tensor]:
    """Weight and bias; no bias is none that adds anything."""
    module: Any = model.get_submodule(layer.name)
    return weight_of(module).detach(), torch.zeros(()) if module.bias is None else module.bias.detach()


# ---- in order


def _fit_in_order_(
    small: nn.Module,
    model: nn.Module,
    tasks: list[Task],
    inputs: Inputs,
    influence: Mapping[str, Influence],
    closed: nn.Module,
) -> None:
    """All layers in one pass over the inputs; those that are not reached, or called twice, as they are in `closed`."""
    holds = _order(model, tasks, inputs)
    order = {name: i for i, name in enumerate(holds)}
    for _, layer in tasks:
        if layer.name not in order:
            swap_modules_(small, {small.get_submodule(layer.name): copy_model(closed.get_submodule(layer.name))})
    ordered = sorted((task for task in tasks if task[1].name in order), key=lambda task: order[task[1].name])
    gates = {layer.name: Gate(layer.name, small.get_submodule(layer.name)) for _, layer in ordered}
    swap_modules_(small, {gate.inner: gate for gate in gates.values()})
    looks = {layer.name: partial(_wait_behind, layer.name) for _, layer in ordered}
    means: dict[str, Tensor] = {}
    with undisturbed(model), undisturbed(small), watching(model, looks), tracks() as running:
        crowd = Crowd(model, small, inputs, running, holds)
        for choice, layer in ordered:
            one, gate = influence[layer.name], gates[layer.name]
            sums = crowd.gather(layer)
            near: Any = closed.get_submodule(layer.name)
            if sums is None:
                gate.become(copy_model(near))
                continue
            weight, bias = _weights(model, layer)
            target, gaps = wanted_target(sums, weight, bias, layer, one)
            pair = _fitted(gate.inner, choice, replace(target, start=factors_of(near, precise)))
            _make_up_(small, model, pair, layer, one, gaps)
            gate.become(pair, merge_pair(pair) if math.prod(layer.kernel) > 1 else pair)
            if one.norm and gaps is not None:
                means[one.norm] = _running_mean(small, one.norm).clone()
    for norm, mean in means.items():  # buffers were put back as they had been before
        _running_mean(small, norm).copy_(mean)
    swap_modules_(small, {gate: gate.final for gate in gates.values()})


def _wait_behind(name: str, call: Seen) -> None:
    wait_at(name, call.output)


def _order(model: nn.Module, tasks: list[Task], inputs: Inputs) -> dict[str, float]:
    """Layers that run once only, in the order in which they run; and what a pass of one sample holds, in bytes."""
    calls: dict[str, list[int]] = {}

    def look(name: str, _: Seen) -> None:
        calls.setdefault(name, []).append(alive.bytes)

    first = inputs.fitted.first(1)
    with undisturbed(model), watching(model, {layer.name: partial(look, layer.name) for _, layer in tasks}):
        for batch in first:
            with torch.no_grad(), Alive(model) as alive:
                run_example(model, batch)
    return {name: held[0] / max(1, len(first)) for name, held in calls.items() if len(held) == 1}
