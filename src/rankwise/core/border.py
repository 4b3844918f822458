"""Zeros around the input of a convolution that are not its own padding: more on one side, or more for some sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Sizes = Sequence[int]
# Zeros before and after, axis by axis: (2, 1, 0, 0) is two rows above and one below. Or as many as TensorFlow puts.
Border = tuple[int, ...] | str
SAME = "same"  # the output has ⌈size / stride⌉ positions; the odd zero comes after


def margins(border: Border, sizes: Sizes, kernel: Sizes, stride: Sizes, dilation: Sizes) -> list[tuple[int, int]]:
    """Zeros before and after along each axis, for an input of these sizes.

    >>> margins(SAME, (224, 7), (3, 3), (2, 2), (1, 1))
    [(0, 1), (1, 1)]
    """
    if not isinstance(border, str):
        return list(zip(border[::2], border[1::2], strict=True)) or [(0, 0)] * len(sizes)
    found = []
    for size, k, s, d in zip(sizes, kernel, stride, dilation, strict=True):
        wide = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        found.append((wide // 2, wide - wide // 2))
    return found


def with_zeros(x: Tensor, sides: Sequence[tuple[int, int]]) -> Tensor:
    """The input with so many zeros before and after, axis by axis; the last axes of `x` are meant."""
    flat = [side for both in reversed(sides) for side in both]
    return torch.constant_pad_nd(x, flat, 0.0) if any(flat) else x
