"""Embeddings and the heads that share their weight: what becomes of a head when its embedding becomes a pair.

    embedding   look-up of r numbers, linear layer r → d
    head        linear layer d → r, linear layer r → vocabulary, whose weight is that of the look-up

So the large matrix stays shared, as it was before, and all modules are plain ones of torch.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rankwise.core.layer import LOOKUP, Layer
from rankwise.core.option import Option
from rankwise.surgery.modules import describe, mark_of, new
from rankwise.surgery.pairs import decision_of, mark_

Swap = dict[nn.Module, nn.Module]
SAME = 1e-4  # of their size: so far two products may differ and still be one weight


def head_swaps(model: nn.Module, layer: Layer, pair: nn.Sequential) -> Swap:
    """The pairs for the heads of an embedding that becomes `pair`; none for other layers."""
    if not layer.heads:
        return {}
    _, option, rank = decision_of(mark_of(pair) or {})
    return {old: _head(old, pair, option, rank) for old in (model.get_submodule(name) for name in layer.heads)}


def _head(head: Any, pair: Any, option: Option, rank: int) -> nn.Sequential:
    weight = head.weight
    where = {"device": weight.device, "dtype": weight.dtype}
    first: Any = new(nn.Linear, weight.shape[1], rank, bias=False, **where)
    last: Any = new(nn.Linear, rank, weight.shape[0], bias=head.bias is not None, **where)
    last.weight = pair.encoder.weight
    with torch.no_grad():
        first.weight.copy_(pair.decoder.weight.t())
        if head.bias is not None:
            last.bias.copy_(head.bias)
            last.bias.requires_grad_(head.bias.requires_grad)
    first.weight.requires_grad_(weight.requires_grad)
    found = nn.Sequential(OrderedDict(encoder=first, decoder=last))
    found.train(head.training)
    mark_(found, replace(describe(head, ""), bias=head.bias is not None), option, rank)
    return found


def tied_again(model: nn.Module, swap: Swap) -> Swap:
    """Dense heads share the weight of their embedding again, unless training has moved them apart."""
    for pair, dense in swap.items():
        mark = mark_of(pair)
        if mark is None or mark["kind"] != LOOKUP:
            continue
        weight: nn.Parameter = dense.weight  # type: ignore[assignment]
        size = SAME * float(weight.detach().norm())
        for name in mark["heads"]:
            head: Any = swap.get(model.get_submodule(name))
            if head is not None and float((head.weight - weight).detach().norm()) <= size:
                head.weight = weight
    return swap
