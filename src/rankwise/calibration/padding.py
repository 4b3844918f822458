"""Batches of text as people have them are padded; padding is no data and must not enter any statistic.

A padded batch is cut into batches without padding, each of sequences of one length. A network with an attention mask
gives every token what it gives without the padding, so nothing but the padding is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rankwise.surgery.forward import Example

MASK = "attention_mask"


def without_padding(batch: Example) -> Iterator[Example]:
    """The batch itself, or several batches if its attention mask (B×T) leaves positions out at the ends of rows."""
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or bool(mask.bool().all()):
        yield batch
        return
    assert isinstance(batch, Mapping)
    counts = mask.bool().sum(1)
    first = mask.bool().int().argmax(1)
    last = mask.shape[1] - mask.bool().flip(1).int().argmax(1)
    if bool(((last - first) != counts).any()):  # a mask with holes is no padding
        yield batch
        return
    for start, length in sorted({(int(a), int(n)) for a, n in zip(first, counts, strict=True) if n}):
        rows = torch.nonzero((first == start) & (counts == length)).flatten()
        yield {key: _cut(value, mask, rows, start, length) for key, value in batch.items()}


def _cut(value: Any, mask: Tensor, rows: Tensor, start: int, length: int) -> Any:
    """The rows, and of what runs along the sequence the positions that count."""
    if not isinstance(value, Tensor) or not value.ndim or len(value) != len(mask):
        return value
    chosen = value[rows.to(value.device)]
    along = value.shape[:2] == mask.shape
    return chosen[:, start : start + length] if along else chosen
