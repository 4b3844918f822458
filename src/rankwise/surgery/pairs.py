"""Pairs: from a decision to the plain modules that stand in for a layer, and back.

A decomposed layer is an `nn.Sequential` of the parts that its decomposition names (`encoder`, perhaps a `core`,
`decoder`), all plain torch modules; in front of them a `pad` where the last slice is narrower, and a `border` of zeros
where the layer had more than its padding. Torch has no module for a grouped linear layer, none for groups of unequal
size (`Branches`) and none for zeros by the size of the input (`SamePad`); everything else is its own.
The pair carries `rankwise`, a dict of plain values that says what it was made from, so that it is not
decomposed again and can be turned back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.layer import LINEAR_KINDS, LOOKUP, Layer, canonical, stored
from rankwise.core.linalg import precise
from rankwise.core.option import Option
from rankwise.core.parts import Part
from rankwise.decompositions import Factors, Target, of
from rankwise.surgery.borders import border_module
from rankwise.surgery.modules import MARK, Branches, GroupedLinear, dense_module, mark_of, new, part


def build_pair(layer: Layer, option: Option, rank: int, like: nn.Module) -> nn.Sequential:
    """The modules for a decision, with uninitialised weights in the dtype, device and state of `like`."""
    old: Any = like
    where = {"device": old.weight.device, "dtype": old.weight.dtype}
    decomposition = of(option)
    *first, last = decomposition.parts(layer, option, rank)
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    border = border_module(layer)
    if border is not None:
        modules["border"] = border
    wide = int((*first, last)[0].inputs)
    if wide > layer.channels:
        # The last slice is narrower: zeros behind the last channel make it one grouped layer all the same.
        modules["pad"] = nn.ConstantPad3d([0, 0] * layer.dims + [0, wide - layer.channels], 0.0)  # type: ignore[arg-type]
    for one in first:
        if layer.kind == LOOKUP:
            modules[one.name] = new(nn.Embedding, layer.channels, rank, padding_idx=old.padding_idx, **where)
        else:
            modules[one.name] = _module(layer, one, False, where)
    modules[last.name] = _module(layer, last, layer.bias or decomposition.adds_bias, where)
    pair = nn.Sequential(modules)
    pair.train(like.training)
    pair.requires_grad_(old.weight.requires_grad)
    if layer.bias:
        _bias(pair[-1]).requires_grad_(old.bias.requires_grad)
    mark_(pair, layer, option, rank)
    return pair


def mark_(pair: nn.Sequential, layer: Layer, option: Option, rank: int) -> None:
    """Say what a pair was made from."""
    plain = {k: v for k, v in asdict(layer).items() if k not in ("name", "calls", "aliases", "head_rows")}
    setattr(pair, MARK, {**plain, **asdict(option), "rank": rank})


def decision_of(mark: dict[str, Any]) -> tuple[Layer, Option, int]:
    """What a pair was made from, out of its mark."""
    mark = dict(mark)
    rank = mark.pop("rank")
    option = Option(
        mark.pop("fold"), mark.pop("slices"), mark.pop("decomposition"), mark.pop("outer"), mark.pop("clusters")
    )
    return Layer(name="", **mark), option, rank


def _module(layer: Layer, one: Part, bias: bool, where: dict[str, Any]) -> nn.Module:
    """A layer of the same kind that acts along some kernel axes, or several side by side."""
    if one.branches:
        order = torch.tensor([c for channels, _ in one.branches for c in channels], device=where["device"])
        sizes = tuple(len(channels) for channels, _ in one.branches)
        each = [Part("", one.axes, len(channels), int(outputs)) for channels, outputs in one.branches]
        return Branches(order, sizes, [_module(layer, branch, bias, where) for branch in each], layer.dims)
    inputs, outputs, groups = int(one.inputs), int(one.outputs), int(one.groups)
    if layer.kind not in (*LINEAR_KINDS, LOOKUP):
        return part(layer, one.axes, (inputs, outputs), groups, bias=bias, **where)
    if groups > 1:
        return new(GroupedLinear, groups, inputs, outputs, **where)
    return new(nn.Linear, inputs, outputs, bias=bias, **where)


def _weight(module: Any) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _bias(module: Any) -> Tensor:
    bias = module.bias
    assert isinstance(bias, Tensor)
    return bias


def _put_(module: Any, weight: Tensor, layer: Layer) -> None:
    """Write a canonical weight (G, f/G, c/G, *kernel) into a part of a pair."""
    target = _weight(module)
    plain = weight if isinstance(module, GroupedLinear) else stored(weight, _as_layer(module, weight, layer))
    target.copy_(plain)


def _take(module: Any, layer: Layer) -> Tensor:
    """The canonical weight of a part of a pair."""
    weight = _weight(module)
    if isinstance(module, GroupedLinear):
        return weight
    if isinstance(module, nn.Embedding):
        return weight.t()[None]
    linear = isinstance(module, nn.Linear)
    outputs, inputs = (module.out_features, module.in_features) if linear else (module.out_channels, module.in_channels)
    kind, groups = type(module).__name__, 1 if linear else module.groups
    return canonical(weight, replace(layer, kind=kind, filters=outputs, channels=inputs, groups=groups))


def _as_layer(module: nn.Module, weight: Tensor, layer: Layer) -> Layer:
    groups, outputs, inputs = weight.shape[:3]
    return replace(layer, kind=type(module).__name__, filters=groups * outputs, channels=groups * inputs, groups=groups)


def fill_pair_(pair: nn.Sequential, target: Target, option: Option, rank: int) -> None:
    """Write the factors of the target, and its bias, into the pair."""
    with torch.no_grad():
        found = of(option).factors(target, option, rank)
        put_factors_(pair, found, target.layer)
        bias = target.bias if found.bias is None else found.bias
        if bias is not None:
            _bias(pair[-1]).copy_(bias)


def put_factors_(pair: nn.Sequential, factors: Factors, layer: Layer) -> None:
    """Write the weights of all parts; biases stay as they are."""
    with torch.no_grad():
        for name, weights in factors.weights.items():
            for module, weight in zip(_layers_of(pair.get_submodule(name)), weights, strict=True):
                _put_(module, weight, layer)


def _layers_of(module: nn.Module) -> Sequence[nn.Module]:
    return list(module.branches) if isinstance(module, Branches) else [module]


def layer_of(pair: nn.Sequential) -> Layer:
    """The layer that a pair stands for, with a bias where the pair has one."""
    layer, _, _ = decision_of(mark_of(pair) or {})
    return replace(layer, bias=getattr(pair[-1], "bias", None) is not None)


def product(pair: nn.Sequential, read: Callable[[Tensor], Tensor] = lambda weight: weight) -> Tensor:
    """The dense weight that a pair stands for, in the layer's own layout; gradients pass through to its parts.

    `read` comes before the product, such as `precise`.
    """
    _, option, _ = decision_of(mark_of(pair) or {})
    return of(option).compose(layer_of(pair), option, factors_of(pair, read).weights)


def factors_of(pair: nn.Sequential, read: Callable[[Tensor], Tensor] = lambda weight: weight) -> Factors:
    """The weights that `put_factors_` wrote, canonical."""
    layer = layer_of(pair)
    parts = {name: module for name, module in pair.named_children() if next(module.parameters(), None) is not None}
    return Factors({name: [read(_take(one, layer)) for one in _layers_of(module)] for name, module in parts.items()})


def merge_pair(pair: nn.Sequential) -> nn.Module:
    """The single module that a pair stands for: original kind, shape, dtype and state."""
    last: Any = pair[-1]
    layer = layer_of(pair)
    like = next(pair.parameters())
    dense = dense_module(layer, {"device": like.device, "dtype": like.dtype})
    dense.train(pair.training)
    if isinstance(pair[0], nn.Embedding):
        dense.padding_idx = pair[0].padding_idx
    with torch.no_grad():
        dense.weight.copy_(product(pair, precise))
        dense.weight.requires_grad_(any(p.requires_grad for n, p in pair.named_parameters() if n.endswith("weight")))
        if layer.bias:
            dense.bias.copy_(_bias(last))
            dense.bias.requires_grad_(_bias(last).requires_grad)
    return dense  # type: ignore[no-any-return]
