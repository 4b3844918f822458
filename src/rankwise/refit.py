"""Fitting a compressed network to the original one, layer by layer, on calibration data without labels.

In the order in which the layers run: the compressed network so far is run beside the original, and the pair of a layer
becomes the best one, in the metric of data (whiten.py), for what it really gets and what the original layer gave:

    min_Ŵ E ‖S (y − Ŵ x̂)‖² = ‖S (W* − Ŵ) M̂^{1/2}‖² + const,   W* = E[y x̂ᵀ] M̂⁻¹,   M̂ = E[x̂ x̂ᵀ]

So a layer makes up for the errors before it as far as it can. W* is drawn towards W where there are few samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.decompose import pair_weights
from rankwise.forward import run_example, undisturbed
from rankwise.influence import Influence, some_patches
from rankwise.layer import Layer, canonical, stored
from rankwise.pairs import put_weights_
from rankwise.plan import Choice, Plan
from rankwise.probe import batches
from rankwise.surgery import copy_model, match_layers, replace_layers_
from rankwise.whiten import fit, root_of, share_for, shrunk

NAME = "whitened"


def apply_fitted(
    model: nn.Module,
    plan: Plan,
    data: Iterable[Any],
    influence: Mapping[str, Influence],
    moments: Mapping[str, Any] | None = None,
    least: float = 0.0,
    seed: int = 0,
) -> nn.Module:
    """A copy of the model that follows the plan, its `whitened` choices fitted on the data one after the other.

    `least` is how far moments are drawn towards the identity at least.
    """
    later = {choice.name for choice in plan.choices if choice.decomposition == NAME}
    choices = [(c, layer) for c, layer in match_layers(model, plan) if c.name in later]
    small = copy_model(model)
    replace_layers_(small, plan, fill=True, moments=moments, later=later)
    for choice, layer in _in_order(model, choices, data):
        weight, moment = _target(model, small, layer, data, least, seed)
        metric = influence[layer.name].metric if layer.name in influence else None
        found = fit(weight, layer, choice.option, moment, None if metric is None else root_of(metric))
        pair = small.get_submodule(layer.name)
        assert isinstance(pair, nn.Sequential)
        put_weights_(pair, *pair_weights(*found.factors(choice.rank), layer, choice.option), layer)
    return small


def _in_order(model: nn.Module, choices: list[tuple[Choice, Layer]], data: Iterable[Any]) -> list[tuple[Choice, Layer]]:
    """As the layers run for the first time; those that the data does not reach are left as they are."""
    order: list[str] = []
    handles = [
        model.get_submodule(la.name).register_forward_hook(lambda *_, name=la.name: order.append(name))
        for _, la in choices
    ]
    try:
        with undisturbed(model):
            run_example(model, next(iter(batches(data))))
    finally:
        for handle in handles:
            handle.remove()
    place = {name: i for i, name in reversed(list(enumerate(order)))}
    return sorted([c for c in choices if c[1].name in place], key=lambda c: place[c[1].name])


def _target(
    model: nn.Module, small: nn.Module, layer: Layer, data: Iterable[Any], least: float, seed: int
) -> tuple[Tensor, Tensor]:
    """W* in the layer's own layout, and M̂ (G, d, d), from the two networks side by side."""
    random = torch.Generator().manual_seed(seed)
    weight: Any = model.get_submodule(layer.name)
    square, cross, count = torch.zeros(()), torch.zeros(()), 0
    with undisturbed(model), undisturbed(small), _calls(model, layer) as ours, _calls(small, layer) as theirs:
        for batch in batches(data):
            ours.clear()
            theirs.clear()
            run_example(model, batch)
            run_example(small, batch)
            for (_, wanted), (given, _) in zip(ours, theirs, strict=True):
                rows, there = some_patches(layer, given, wanted, random)
                rows, there = rows.to("cpu", torch.float64), there.to("cpu", torch.float64)
                square = square + rows.transpose(1, 2) @ rows
                count += rows.shape[1]
                if there.shape[1]:
                    there = there if weight.bias is None else there - weight.bias.to("cpu", torch.float64)
                    outputs = torch.unflatten(there, 1, (layer.groups, -1)).transpose(0, 1)
                    cross = cross + (outputs.transpose(1, 2) @ rows).to("cpu", torch.float64)
    share = max(least, share_for(count, square.shape[-1]))
    moment = shrunk(square / count, share)
    if not cross.ndim or not bool(moment.diagonal(dim1=1, dim2=2).sum(1).all()):
        return weight.weight.detach(), moment
    plain = canonical(weight.weight.detach(), layer).flatten(2).to("cpu", torch.float64)
    ridge = moment - (1 - share) * square / count
    wanted = (1 - share) * cross / count + plain @ ridge
    solved = torch.linalg.solve(moment, wanted.transpose(1, 2)).transpose(1, 2)
    return stored(solved.reshape(layer.canonical_shape), layer), moment


@contextmanager
def _calls(model: nn.Module, layer: Layer) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inputs and outputs of a layer, call by call; copies, since what follows may work in place."""
    seen: list[tuple[Tensor, Tensor]] = []

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        given = args[0] if args else next(iter(kwargs.values()))
        seen.append((given.clone(), output.clone()))

    handle = model.get_submodule(layer.name).register_forward_hook(hook, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()
