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

from rankwise.surgery.modules import dense_module, mark_of
from rankwise.surgery.pairs import layer_of, product

_LEAST = 0.15  # of the whole layer's weights; a pair with fewer is left as it is


def pairs_to_multiply(model: nn.Module, form: str = "auto") -> list[nn.Sequential]:
    """Pairs that are computed as their product: all for `product`, none for `factors`.

    `auto` takes convolutions along two axes on a CPU whose parts hold at least 15 % of the whole layer's weights: about
    where the two take equally long on ResNet20 (docs/training.md). A GPU and a linear layer like the smaller product.
    """
    pairs = [m for m in model.modules() if isinstance(m, nn.Sequential) and mark_of(m) is not None]
    if form != "auto":
        return pairs if form == "product" else []
    return [pair for pair in pairs if _pays(pair)]


def _pays(pair: nn.Sequential) -> bool:
    layer, first = layer_of(pair), next(pair.parameters())
    held = sum(p.numel() for p in pair.parameters() if p.dim() > 1)
    return first.device.type == "cpu" and layer.kind == "Conv2d" and held >= _LEAST * layer.params


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
