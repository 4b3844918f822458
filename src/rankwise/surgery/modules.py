"""Modules: from a torch module to a `Layer` and back, and the parts that factors are made of."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from rankwise.core.layer import LOOKUP, Layer
from rankwise.errors import need
from rankwise.surgery.borders import BORDERED, border_module
from rankwise.surgery.effective import CONVS, PLAIN_FORM, base_of, form_of

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


class Branches(nn.Module):
    """Layers side by side, each on its own channels, their outputs joined: grouped, with groups of any size.

    `order` lists the channels of the first branch, then those of the second, and so on.
    """

    order: Tensor

    def __init__(self, order: Tensor, sizes: tuple[int, ...], branches: list[nn.Module], dims: int) -> None:
        super().__init__()
        self.register_buffer("order", order)
        self.sizes, self.axis = list(sizes), -1 - dims
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        slices = torch.split(x.index_select(self.axis, self.order), self.sizes, dim=self.axis)
        return torch.cat([branch(s) for branch, s in zip(self.branches, slices, strict=True)], dim=self.axis)

    def extra_repr(self) -> str:
        return f"sizes={self.sizes}"


def new(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """A module without initialised weights: building a pair must not draw from anybody's random state."""
    return skip_init(cls, *args, **kwargs)  # type: ignore[no-any-return,no-untyped-call]


def kind_of(module: nn.Module) -> str | None:
    """The kind of a module that can be decomposed: its forward is that of a plain layer, or was tried to be."""
    cls = type(module)
    if cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils":
        return "Conv1D"
    return None if form_of(module) is None else base_of(module)


def is_lookup(module: nn.Module | None) -> bool:
    """Whether it is an embedding that does nothing but look up rows of its weight."""
    return type(module) is nn.Embedding and module.max_norm is None


def describe(module: nn.Module, name: str) -> Layer:
    """What planning needs to know of a module for which `kind_of` gives a kind, or of an embedding."""
    kind = kind_of(module)
    m: Any = module
    if is_lookup(module):
        return Layer(name, LOOKUP, filters=m.embedding_dim, channels=m.num_embeddings, bias=False)
    bias = m.bias is not None
    if kind == "Conv1D":
        return Layer(name, kind, filters=m.weight.shape[1], channels=m.weight.shape[0], bias=bias)
    assert kind is not None, f"{name} cannot be described"
    form = form_of(module) or PLAIN_FORM
    more: dict[str, Any] = {"bias": bias, "computed": form.computed, "gains": _gains(module) if form.computed else 0}
    if kind == "Linear":
        return Layer(name, kind, filters=m.out_features, channels=m.in_features, **more)
    padding = m.padding if form is PLAIN_FORM else form.padding
    return Layer(
        name,
        kind,
        filters=m.out_channels,
        channels=m.in_channels,
        kernel=tuple(m.kernel_size),
        stride=tuple(m.stride),
        padding=padding if isinstance(padding, str) else tuple(padding),
        dilation=tuple(m.dilation),
        output_padding=tuple(m.output_padding),
        groups=m.groups,
        padding_mode=m.padding_mode if form is PLAIN_FORM else "zeros",
        border=form.border,
        **more,
    )


def _gains(module: nn.Module) -> int:
    """Entries of parameters that a weight is computed from, beside the one that has its name."""
    return sum(p.numel() for name, p in module._parameters.items() if name not in ("weight", "bias") and p is not None)


def mark_of(module: nn.Module) -> dict[str, Any] | None:
    """What a pair was made from, or None for any other module."""
    mark = getattr(module, MARK, None)
    return mark if isinstance(module, nn.Sequential) and isinstance(mark, dict) else None


def part(layer: Layer, axes: tuple[int, ...], channels: tuple[int, int], groups: int, **rest: Any) -> nn.Module:
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
    return new(CONVS[kind], *channels, **args, **rest)


def dense_module(layer: Layer, where: dict[str, Any]) -> Any:
    """The module that `describe` would describe as this layer, with uninitialised weights."""
    if layer.kind == "Conv1D":
        cls = need("transformers.pytorch_utils", extra="hf", purpose="a Hugging Face Conv1D layer").Conv1D
        with torch.device("meta"):  # it has no device argument, and must not draw random numbers either
            dense = cls(layer.filters, layer.channels).to(dtype=where["dtype"])
        return dense.to_empty(device=where["device"])
    if layer.kind == "Linear":
        return new(nn.Linear, layer.channels, layer.filters, bias=layer.bias, **where)
    if layer.kind == LOOKUP:
        return new(nn.Embedding, layer.channels, layer.filters, **where)
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
    border = border_module(layer)
    if border is None:
        return new(CONVS[layer.kind], layer.channels, layer.filters, **args, **where)
    dense = new(BORDERED[layer.kind], layer.channels, layer.filters, **args, **where)
    dense.border = border
    return dense


_BUILT_WITH: dict[type[nn.Module], str] = {
    nn.Linear: "in_features out_features bias",
    nn.Embedding: "num_embeddings embedding_dim padding_idx",
    nn.modules.conv._ConvNd: "in_channels out_channels kernel_size stride padding dilation groups bias padding_mode",
    nn.modules.batchnorm._NormBase: "num_features eps momentum affine track_running_stats",  # and instance norms
    nn.PReLU: "num_parameters",
    nn.modules.padding._ConstantPadNd: "padding value",
}


def recipe(module: nn.Module) -> Any:
    """How to build a module with nothing but torch: [class, arguments], or {name: recipe} for the parts of a pair."""
    if mark_of(module) is not None:
        return {name: recipe(child) for name, child in module.named_children()}
    names = next((names for cls, names in _BUILT_WITH.items() if isinstance(module, cls)), "")
    kinds = [c.__name__ for c in type(module).__mro__ if names and c.__module__.startswith("torch.nn")]
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        names += " output_padding"
    values = {name: getattr(module, name) for name in names.split()}
    if "bias" in values:
        values["bias"] = values["bias"] is not None
    form = form_of(module)
    if form is not None and form is not PLAIN_FORM:
        if form.border or form.computed:  # no class of torch does what it does
            return [type(module).__name__, values]
        values |= {"padding": form.padding, "padding_mode": "zeros"} if "padding" in values else {}
    return [kinds[0] if kinds else type(module).__name__, values]
