"""Multiply-adds by torch's flop counter, and of fused operators that it does not know.

An LSTM on the CPU is one call of oneDNN for each layer and direction, and attention one fused call; on a GPU cuDNN
computes a whole LSTM or GRU. Each multiplies every row of its inputs with its matrices, as the plain layers do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

Shape = tuple[int, ...]


def rnn_layer_flops(inputs: Shape, first: Shape, second: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """One layer in one direction: T·B rows, each with the matrices of the input and of the state."""
    return 2 * math.prod(inputs[:2]) * (math.prod(first) + math.prod(second))


def rnn_flops(inputs: Shape, weights: list[Shape], *_: Any, out_shape: Any = None, **__: Any) -> int:
    """All layers at once: every matrix meets all rows. Packed sequences come as rows already."""
    rows = math.prod(inputs[:-1])
    return 2 * rows * sum(math.prod(shape) for shape in weights if len(shape) == 2)


def attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Q·Kᵀ and the product with V, over batch and heads."""
    batch, wide = math.prod(query[:-2]), query[-1] + value[-1]
    return 2 * batch * query[-2] * key[-2] * wide


def _known() -> dict[Any, Callable[..., int]]:
    """Those of them that this torch has."""
    formulas: dict[str, Callable[..., int]] = {
        "mkldnn_rnn_layer": rnn_layer_flops,
        "_cudnn_rnn": rnn_flops,
        "_scaled_dot_product_flash_attention_for_cpu": attention_flops,
    }
    return {getattr(torch.ops.aten, name): f for name, f in formulas.items() if hasattr(torch.ops.aten, name)}


def counter() -> FlopCounterMode:
    """Counts what runs under it; `get_total_flops() // 2` are multiply-adds."""
    return FlopCounterMode(display=False, custom_mapping=_known())
