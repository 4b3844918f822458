"""Compute a pair as the one layer that it stands for, while its factors are what is trained.

    y = (D E) x   in place of   y = D (E x)

is the same function with the same gradients of E and D, which pass through the product of two small matrices. On a
CPU one whole convolution is often faster than two or three narrow ones, above all where they are grouped: memory is
passed over once, and no channels between the factors have to be kept for the way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rankwise.core.layer import Layer
from rankwise.surgery.modules import dense_module, mark_of
from rankwise.surgery.pairs import layer_of, product

_LEAST = 0.15  # of the whole layer's weights; a pair with fewer is left as it is
_PASS = 35  # multiply-adds of a whole convolution in the time that one channel between depthwise parts takes


def pairs_to_multiply(model: nn.Module, form: str = "auto") -> list[nn.Sequential]:
    """Pairs that are computed as their product: all for `product`, none for `factors`.

    `auto` takes convolutions along two axes on a CPU whose parts hold at least 15 % of the whole layer's weights: about
    where the two take equally long on ResNet20 (docs/training.md). With a depthwise part it counts what both cost. A
    GPU and a linear layer like the smaller product.
    """
    pairs = [m for m in model.modules() if isinstance(m, nn.Sequential) and mark_of(m) is not None]
    if form != "auto":
        return pairs if form == "product" else []
    return [pair for pair in pairs if _pays(pair)]


def _pays(pair: nn.Sequential) -> bool:
    layer, first = layer_of(pair), next(pair.parameters())
    if first.device.type != "cpu" or layer.kind != "Conv2d":
        return False
    parts = [module for module in pair if isinstance(module, nn.Conv2d)]
    if any(part.groups == part.in_channels > 1 for part in parts):
        return _beats_depthwise(layer, parts)
    return sum(p.numel() for p in pair.parameters() if p.dim() > 1) >= _LEAST * layer.params


def _beats_depthwise(layer: Layer, parts: list[nn.Conv2d]) -> bool:
    """Whether one whole convolution takes less time than 1×1, depthwise, 1×1: by multiply-adds for an output pixel.

    A strided depthwise convolution has no fast way back in torch: it takes longer than everything else together.
    """
    if any(part.groups > 1 and max(part.stride) > 1 for part in parts):
        return True
    between = sum(part.out_channels for part in parts[:-1])
    return layer.params <= sum(part.weight.numel() for part in parts) + _PASS * between


@contextmanager
def multiplied(model: nn.Module, pairs: Sequence[nn.Sequential] | None = None) -> Iterator[None]:
    """These pairs of the model (all) run as one layer; their parameters, names and hooks are what they were."""
    chosen = pairs_to_multiply(model, "product") if pairs is None else pairs
    try:
        for pair in chosen:
            where = {"device": torch.device("meta"), "dtype": next(pair.parameters()).dtype}
            pair.forward = partial(_forward, pair, dense_module(layer_of(pair), where))  # type: ignore[method-assign]
        yield
    finally:
        for pair in chosen:
            vars(pair).pop("forward", None)


def _forward(pair: nn.Sequential, whole: nn.Module, x: Tensor) -> Any:
    with torch.autocast(x.device.type, enabled=False):  # a product of rounded factors would be rounded twice
        weight = product(pair)
    if x.dim() == weight.dim() == 4:
        weight = weight.contiguous(memory_format=torch.channels_last)
    bias = getattr(pair[-1], "bias", None)
    given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return functional_call(whole, given, (x,))
