"""Modules: from a torch module to a `Layer`, and from a decision to a pair of plain modules.

A decomposed layer is an `nn.Sequential` of an `encoder` and a `decoder` (and a `pad` in front when the
last slice is narrower). Both are plain torch modules; a grouped linear layer is the one thing torch has
no module for. The pair carries `rankwise`, a dict of plain values that says what it was made from, so
that it is not decomposed again and can be turned back.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from rankwise import pca
from rankwise.cost import Option, slice_width
from rankwise.decompose import compose, factors, pair_weights
from rankwise.errors import need
from rankwise.fold import kernel_sides
from rankwise.layer import LINEAR_KINDS, Layer, canonical, stored

CONVS: dict[str, type[nn.Module]] = {
    cls.__name__: cls
    for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
}
PLAIN: dict[str, type[nn.Module]] = {"Linear": nn.Linear, **CONVS}
MARK = "rankwise"


class GroupedLinear(nn.Module):
    """k linear layers side by side, each on its own slice of the features: (…, k·s) → (…, k·j).

    `weight` has shape (k, j, s).
    """

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.groups, self.in_features, self.out_features = groups, in_features, out_features
        shape = (groups, out_features // groups, in_features // groups)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        # bmm and not einsum, which multiplies entry by entry where s = 1 and then is missing from torch's flop counter
        rows = x.reshape(math.prod(x.shape[:-1]), self.groups, self.in_features // self.groups)
        out = torch.bmm(rows.transpose(0, 1), self.weight.transpose(1, 2))
        return out.transpose(0, 1).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"groups={self.groups}, in_features={self.in_features}, out_features={self.out_features}"


def _new(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """A module without initialised weights: building a pair must not draw from anybody's random state."""
    return skip_init(cls, *args, **kwargs)  # type: ignore[no-any-return,no-untyped-call]


def kind_of(module: nn.Module) -> str | None:
    """The kind of a module that can be decomposed: its forward must be the one torch gives that class."""
    cls = type(module)
    if cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils":
        return "Conv1D"
    for kind, known in PLAIN.items():
        if isinstance(module, known):
            plain = all(getattr(cls, f, None) is getattr(known, f, None) for f in ("forward", "_conv_forward"))
            return kind if plain else None
    return None


def describe(module: nn.Module, name: str) -> Layer:
    """What planning needs to know of a module for which `kind_of` gives a kind."""
    kind = kind_of(module)
    m: Any = module
    bias = m.bias is not None
    if kind == "Conv1D":
        return Layer(name, kind, filters=m.weight.shape[1], channels=m.weight.shape[0], bias=bias)
    if kind == "Linear":
        return Layer(name, kind, filters=m.out_features, channels=m.in_features, bias=bias)
    assert kind is not None, f"{name} cannot be described"
    return Layer(
        name,
        kind,
        filters=m.out_channels,
        channels=m.in_channels,
        kernel=tuple(m.kernel_size),
        stride=tuple(m.stride),
        padding=m.padding if isinstance(m.padding, str) else tuple(m.padding),
        dilation=tuple(m.dilation),
        output_padding=tuple(m.output_padding),
        groups=m.groups,
        padding_mode=m.padding_mode,
        bias=bias,
    )


def mark_of(module: nn.Module) -> dict[str, Any] | None:
    """What a pair was made from, or None for any other module."""
    mark = getattr(module, MARK, None)
    return mark if isinstance(module, nn.Sequential) and isinstance(mark, dict) else None


def _part(layer: Layer, axes: tuple[int, ...], channels: tuple[int, int], groups: int, **rest: Any) -> nn.Module:
    """A convolution of the layer's kind that acts along `axes` only and is pointwise along the others."""

    def along(values: tuple[int, ...], idle: int) -> tuple[int, ...]:
        return tuple(v if a in axes else idle for a, v in enumerate(values))

    kernel, stride = along(layer.kernel, 1), along(layer.stride, 1)
    shift = along(layer.output_padding, 0)
    string = isinstance(layer.padding, str)
    padding = layer.padding if isinstance(layer.padding, str) else along(layer.padding, 0)
    pointwise = {*kernel, *stride} <= {1} and (string or not any((*padding, *shift)))
    args: dict[str, Any] = {
        "kernel_size": kernel,
        "stride": stride,
        "padding": (0,) * layer.dims if pointwise else padding,
        "dilation": along(layer.dilation, 1),
        "groups": groups,
        "padding_mode": "zeros" if pointwise else layer.padding_mode,
    }
    # Upsampling by nothing is an ordinary 1×1 convolution, which every runtime knows better.
    kind = f"Conv{layer.dims}d" if pointwise else layer.kind
    if kind.startswith("ConvTranspose"):
        args["output_padding"] = shift
    return _new(CONVS[kind], *channels, **args, **rest)


def build_pair(layer: Layer, option: Option, rank: int, like: nn.Module) -> nn.Sequential:
    """The pair for a decision, with uninitialised weights in the dtype, device and state of `like`."""
    left, right = kernel_sides(option.fold)
    width = slice_width(layer.group_channels, option.groups)
    slices = layer.groups * option.groups
    wide, middle = slices * width, slices * rank
    bias = layer.bias or option.decomposition == "pca"  # principal components need one for the mean
    old: Any = like
    where = {"device": old.weight.device, "dtype": old.weight.dtype}
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if wide > layer.channels:
        # The last slice is narrower: zeros behind the last channel make it one grouped layer all the same.
        parts["pad"] = nn.ConstantPad3d([0, 0] * layer.dims + [0, wide - layer.channels], 0.0)  # type: ignore[arg-type]
    if layer.kind in LINEAR_KINDS:
        if slices > 1:
            parts["encoder"] = _new(GroupedLinear, slices, wide, middle, **where)
        else:
            parts["encoder"] = _new(nn.Linear, wide, middle, bias=False, **where)
        parts["decoder"] = _new(nn.Linear, middle, layer.filters, bias=bias, **where)
    else:
        parts["encoder"] = _part(layer, right, (wide, middle), slices, bias=False, **where)
        parts["decoder"] = _part(layer, left, (middle, layer.filters), layer.groups, bias=bias, **where)
    pair = nn.Sequential(parts)
    pair.train(like.training)
    _part_weight(pair, "encoder").requires_grad_(old.weight.requires_grad)
    _part_weight(pair, "decoder").requires_grad_(old.weight.requires_grad)
    if bias:
        _bias(pair.decoder).requires_grad_((old.bias if layer.bias else old.weight).requires_grad)
    plain = {k: v for k, v in asdict(layer).items() if k not in ("name", "calls", "aliases")}
    setattr(
        pair,
        MARK,
        {**plain, "fold": option.fold, "slices": option.groups, "decomposition": option.decomposition, "rank": rank},
    )
    return pair


def _part_weight(pair: nn.Sequential, part: str) -> Tensor:
    weight = getattr(pair, part).weight
    assert isinstance(weight, Tensor)
    return weight


def _bias(module: Any) -> Tensor:
    bias = module.bias
    assert isinstance(bias, Tensor)
    return bias


def _sublayers(layer: Layer, option: Option, rank: int, pair: nn.Sequential) -> tuple[Layer, Layer]:
    """Encoder and decoder as layers of their own: it is what `canonical` and `stored` need."""
    slices = layer.groups * option.groups
    wide = slices * slice_width(layer.group_channels, option.groups)
    kinds = [type(getattr(pair, part)).__name__ for part in ("encoder", "decoder")]
    first = replace(layer, kind=kinds[0], channels=wide, filters=slices * rank, groups=slices)
    second = replace(layer, kind=kinds[1], channels=slices * rank)
    return first, second


def fill_pair_(
    pair: nn.Sequential, layer: Layer, option: Option, rank: int, old: Any, moments: Any | None = None
) -> None:
    """Write the factors of the old module's weight, and its bias, into the pair.

    `moments` has the mean (1, f) and covariance (1, f, f) of the layer's outputs, for the decomposition `pca`.
    """
    bias = old.bias
    if option.decomposition == "pca":
        assert moments is not None, "surgery has refused a pca choice without moments"
        left, right, bias = pca.factors(old.weight, bias, layer, moments.mean[0], moments.covariance[0], rank)
    else:
        left, right = factors(old.weight, layer, option, rank)
    encoder, decoder = pair_weights(left, right, layer, option)
    first, second = _sublayers(layer, option, rank, pair)
    with torch.no_grad():
        if isinstance(pair.encoder, GroupedLinear):
            pair.encoder.weight.copy_(encoder)
        else:
            _part_weight(pair, "encoder").copy_(stored(encoder, first))
        _part_weight(pair, "decoder").copy_(stored(decoder, second))
        if bias is not None:
            _bias(pair.decoder).copy_(bias)


def merge_pair(pair: nn.Sequential) -> nn.Module:
    """The single module that a pair stands for: original kind, shape, dtype and state."""
    mark = dict(mark_of(pair) or {})
    option, rank = Option(mark.pop("fold"), mark.pop("slices"), mark.pop("decomposition")), mark.pop("rank")
    layer = replace(Layer(name="", **mark), bias=getattr(pair.decoder, "bias", None) is not None)
    encoder, decoder = _part_weight(pair, "encoder"), _part_weight(pair, "decoder")
    first, second = _sublayers(layer, option, rank, pair)
    first_weight = encoder if isinstance(pair.encoder, GroupedLinear) else canonical(encoder, first)
    e, d = (t.detach().to("cpu", torch.float64) for t in (first_weight, canonical(decoder, second)))
    weight = compose(e, d, layer, option)
    dense = _dense(layer, {"device": encoder.device, "dtype": encoder.dtype})
    dense.train(pair.training)
    with torch.no_grad():
        dense.weight.copy_(weight)
        dense.weight.requires_grad_(encoder.requires_grad or decoder.requires_grad)
        if layer.bias:
            dense.bias.copy_(_bias(pair.decoder))
            dense.bias.requires_grad_(_bias(pair.decoder).requires_grad)
    return dense  # type: ignore[no-any-return]


def _dense(layer: Layer, where: dict[str, Any]) -> Any:
    if layer.kind == "Conv1D":
        cls = need("transformers.pytorch_utils", extra="hf", purpose="a Hugging Face Conv1D layer").Conv1D
        with torch.device("meta"):  # it has no device argument, and must not draw random numbers either
            dense = cls(layer.filters, layer.channels).to(dtype=where["dtype"])
        return dense.to_empty(device=where["device"])
    if layer.kind == "Linear":
        return _new(nn.Linear, layer.channels, layer.filters, bias=layer.bias, **where)
    args: dict[str, Any] = {
        "kernel_size": layer.kernel,
        "stride": layer.stride,
        "padding": layer.padding,
        "dilation": layer.dilation,
        "groups": layer.groups,
        "padding_mode": layer.padding_mode,
        "bias": layer.bias,
    }
    if layer.transposed:
        args["output_padding"] = layer.output_padding
    return _new(CONVS[layer.kind], layer.channels, layer.filters, **args, **where)
