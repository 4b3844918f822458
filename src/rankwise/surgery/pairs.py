"""Pairs: from a decision to the plain modules that stand in for a layer, and back.

A decomposed layer is an `nn.Sequential` of an `encoder` and a `decoder`, both plain torch modules:

    svd, pca, whitened   encoder (one grouped layer), decoder; a `pad` in front where the last slice is narrower
    messi      encoder (`Branches`: gathers the channels of each cluster), decoder
    tucker2, whitened-tucker2   encoder (1×1), core (the layer's own kernel), decoder (1×1)

Torch has no module for a grouped linear layer and none for groups of unequal size; everything else is its own.
The pair carries `rankwise`, a dict of plain values that says what it was made from, so that it is not
decomposed again and can be turned back.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.fold import kernel_sides
from rankwise.core.layer import LINEAR_KINDS, Layer, canonical, stored
from rankwise.core.option import Option, slice_ranks, widths
from rankwise.decompositions import pca, tucker
from rankwise.decompositions.slices import compose, factors, pair_weights
from rankwise.surgery.modules import MARK, Branches, GroupedLinear, dense_module, mark_of, new, part

Parts = OrderedDict[str, nn.Module]


def build_pair(layer: Layer, option: Option, rank: int, like: nn.Module) -> nn.Sequential:
    """The modules for a decision, with uninitialised weights in the dtype, device and state of `like`."""
    old: Any = like
    where = {"device": old.weight.device, "dtype": old.weight.dtype}
    bias = layer.bias or option.decomposition == "pca"  # principal components need one for the mean
    make = _tucker_parts if option.cored else _cluster_parts if option.decomposition == "messi" else _slice_parts
    pair = nn.Sequential(make(layer, option, rank, bias, where))
    pair.train(like.training)
    pair.requires_grad_(old.weight.requires_grad)
    if layer.bias:
        _bias(pair.decoder).requires_grad_(old.bias.requires_grad)
    plain = {k: v for k, v in asdict(layer).items() if k not in ("name", "calls", "aliases")}
    chosen = {"slices" if k == "groups" else k: v for k, v in asdict(option).items()}
    setattr(pair, MARK, {**plain, **chosen, "rank": rank})
    return pair


def decision_of(mark: dict[str, Any]) -> tuple[Layer, Option, int]:
    """What a pair was made from, out of its mark."""
    mark = dict(mark)
    rank = mark.pop("rank")
    option = Option(
        mark.pop("fold"), mark.pop("slices"), mark.pop("decomposition"), mark.pop("outer"), mark.pop("clusters")
    )
    return Layer(name="", **mark), option, rank


def _slice_parts(layer: Layer, option: Option, rank: int, bias: bool, where: dict[str, Any]) -> Parts:
    left, right = kernel_sides(option.fold)
    slices = layer.groups * option.groups
    wide, middle = slices * max(widths(layer, option)), slices * rank
    parts: Parts = OrderedDict()
    if wide > layer.channels:
        # The last slice is narrower: zeros behind the last channel make it one grouped layer all the same.
        parts["pad"] = nn.ConstantPad3d([0, 0] * layer.dims + [0, wide - layer.channels], 0.0)  # type: ignore[arg-type]
    if layer.kind in LINEAR_KINDS and slices > 1:
        parts["encoder"] = new(GroupedLinear, slices, wide, middle, **where)
    else:
        parts["encoder"] = _along(layer, right, wide, middle, slices, False, where)
    parts["decoder"] = _along(layer, left, middle, layer.filters, layer.groups, bias, where)
    return parts


def _cluster_parts(layer: Layer, option: Option, rank: int, bias: bool, where: dict[str, Any]) -> Parts:
    left, right = kernel_sides(option.fold)
    sizes = widths(layer, option)
    ranks = [min(rank, full) for full in slice_ranks(layer, option)]
    branches = [_along(layer, right, s, r, 1, False, where) for s, r in zip(sizes, ranks, strict=True)]
    order = torch.tensor([c for cluster in option.clusters for c in cluster], device=where["device"])
    encoder = Branches(order, sizes, branches, layer.dims)
    return OrderedDict(encoder=encoder, decoder=_along(layer, left, sum(ranks), layer.filters, 1, bias, where))


def _tucker_parts(layer: Layer, option: Option, rank: int, bias: bool, where: dict[str, Any]) -> Parts:
    g, axes = layer.groups, tuple(range(layer.dims))
    return OrderedDict(
        encoder=_along(layer, (), layer.channels, g * rank, g, False, where),
        core=_along(layer, axes, g * rank, g * option.outer, g, False, where),
        decoder=_along(layer, (), g * option.outer, layer.filters, g, bias, where),
    )


def _along(
    layer: Layer, axes: tuple[int, ...], inputs: int, outputs: int, groups: int, bias: bool, where: dict[str, Any]
) -> nn.Module:
    """A layer of the same kind that acts along some kernel axes."""
    if layer.kind in LINEAR_KINDS:
        return new(nn.Linear, inputs, outputs, bias=bias, **where)
    return part(layer, axes, (inputs, outputs), groups, bias=bias, **where)


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


def _take(module: Any, layer: Layer, groups: int) -> Tensor:
    """The canonical weight of a part of a pair, in float64."""
    weight = _weight(module).detach().to("cpu", torch.float64)
    if isinstance(module, GroupedLinear):
        return weight
    linear = isinstance(module, nn.Linear)
    outputs, inputs = (module.out_features, module.in_features) if linear else (module.out_channels, module.in_channels)
    kind = type(module).__name__
    return canonical(weight, replace(layer, kind=kind, filters=outputs, channels=inputs, groups=groups))


def _as_layer(module: nn.Module, weight: Tensor, layer: Layer) -> Layer:
    groups, outputs, inputs = weight.shape[:3]
    return replace(layer, kind=type(module).__name__, filters=groups * outputs, channels=groups * inputs, groups=groups)


def fill_pair_(
    pair: nn.Sequential, layer: Layer, option: Option, rank: int, old: Any, moments: Any | None = None
) -> None:
    """Write the factors of the old module's weight, and its bias, into the pair.

    `moments` has the mean (1, f) and covariance (1, f, f) of the layer's outputs, for the decomposition `pca`.
    """
    bias = old.bias
    with torch.no_grad():
        if option.cored:
            put_core_(pair, *tucker.factors(old.weight, layer, option.outer, rank), layer)
        else:
            if option.decomposition == "pca":
                assert moments is not None, "surgery has refused a pca choice without moments"
                left, right, bias = pca.factors(old.weight, bias, layer, moments.mean[0], moments.covariance[0], rank)
            else:
                left, right = factors(old.weight, layer, option, rank)
            encoder, decoder = pair_weights(left, right, layer, option)
            if isinstance(pair.encoder, Branches):
                _fill_branches_(pair.encoder, encoder, layer, option, rank)
                _put_(pair.decoder, decoder[:, :, _used(layer, option, rank)], layer)
            else:
                put_weights_(pair, encoder, decoder, layer)
        if bias is not None:
            _bias(pair.decoder).copy_(bias)


def put_weights_(pair: nn.Sequential, encoder: Tensor, decoder: Tensor, layer: Layer) -> None:
    """Write what `decompose.pair_weights` gives into a pair of slices."""
    with torch.no_grad():
        _put_(pair.encoder, encoder, layer)
        _put_(pair.decoder, decoder, layer)


def put_core_(pair: nn.Sequential, left: Tensor, core: Tensor, right: Tensor, layer: Layer) -> None:
    """Write what `tucker.factors` gives into three parts."""
    shape = (1,) * layer.dims
    with torch.no_grad():
        _put_(pair.encoder, right.transpose(1, 2).reshape(layer.groups, right.shape[2], -1, *shape), layer)
        _put_(pair.core, core, layer)
        _put_(pair.decoder, left.reshape(layer.groups, -1, left.shape[2], *shape), layer)


def _fill_branches_(encoder: Branches, weight: Tensor, layer: Layer, option: Option, rank: int) -> None:
    """Each branch has only the channels of its cluster, and no more rank than that cluster can use."""
    for i, (branch, size, full) in enumerate(
        zip(encoder.branches, widths(layer, option), slice_ranks(layer, option), strict=True)
    ):
        _put_(branch, weight[i : i + 1, : min(rank, full), :size], layer)


def _used(layer: Layer, option: Option, rank: int) -> Tensor:
    """Which of the k·j channels between encoder and decoder there really are."""
    full = torch.tensor(slice_ranks(layer, option))
    return (torch.arange(rank) < full[:, None]).flatten()


def merge_pair(pair: nn.Sequential) -> nn.Module:
    """The single module that a pair stands for: original kind, shape, dtype and state."""
    layer, option, rank = decision_of(mark_of(pair) or {})
    layer = replace(layer, bias=getattr(pair.decoder, "bias", None) is not None)
    decoder = _take(pair.decoder, layer, layer.groups)
    if option.cored:
        first, core = (_take(p, layer, layer.groups) for p in (pair.encoder, pair.core))
        weight = stored(tucker.compose(decoder.flatten(2), core, first.flatten(2).transpose(1, 2)), layer)
    elif isinstance(pair.encoder, Branches):
        weight = _merge_branches(pair.encoder, decoder, layer, option, rank)
    else:
        weight = compose(_take(pair.encoder, layer, layer.groups * option.groups), decoder, layer, option)
    like = next(pair.parameters())
    dense = dense_module(layer, {"device": like.device, "dtype": like.dtype})
    dense.train(pair.training)
    with torch.no_grad():
        dense.weight.copy_(weight)
        dense.weight.requires_grad_(any(p.requires_grad for n, p in pair.named_parameters() if n.endswith("weight")))
        if layer.bias:
            dense.bias.copy_(_bias(pair.decoder))
            dense.bias.requires_grad_(_bias(pair.decoder).requires_grad)
    return dense  # type: ignore[no-any-return]


def _merge_branches(encoder: Branches, decoder: Tensor, layer: Layer, option: Option, rank: int) -> Tensor:
    parts = [_take(branch, layer, 1) for branch in encoder.branches]
    whole = decoder.new_zeros(option.groups, rank, max(widths(layer, option)), *parts[0].shape[3:])
    for i, p in enumerate(parts):
        whole[i, : p.shape[1], : p.shape[2]] = p[0]
    wide = decoder.new_zeros(1, layer.filters, option.groups * rank, *decoder.shape[3:])
    wide[:, :, _used(layer, option, rank)] = decoder
    return compose(whole, wide, layer, option)
