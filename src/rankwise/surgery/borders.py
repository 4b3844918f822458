"""Zeros around an input as modules: in front of a pair, and inside the one layer that a pair stands for."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rankwise.core.border import SAME, margins, with_zeros
from rankwise.core.layer import Layer

_ZEROS: dict[int, type[Any]] = {1: nn.ConstantPad1d, 2: nn.ConstantPad2d, 3: nn.ConstantPad3d}


class SamePad(nn.Module):
    """As many zeros as TensorFlow puts around an input, so that a convolution gives ⌈size / stride⌉ positions.

    Torch has no module for it where the stride is not 1: how many there are depends on the size of the input.
    """

    def __init__(self, kernel_size: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.dilation = tuple(kernel_size), tuple(stride), tuple(dilation)

    def forward(self, x: Tensor) -> Tensor:
        sizes = x.shape[-len(self.kernel_size) :]
        return with_zeros(x, margins(SAME, sizes, self.kernel_size, self.stride, self.dilation))

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, dilation={self.dilation}"


def border_module(layer: Layer) -> nn.Module | None:
    """The zeros around the input of a layer; None where it has none beside its padding."""
    if not layer.border:
        return None
    if isinstance(layer.border, str):
        return SamePad(layer.kernel, layer.stride, layer.dilation)
    flat = [side for both in reversed(margins(layer.border, layer.kernel, (), (), ())) for side in both]
    zeros: nn.Module = _ZEROS[layer.dims](tuple(flat), 0.0)
    return zeros


class _Bordered(nn.Module):
    """A convolution with zeros around its input: one module with the names of the plain one."""

    border: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(self.border(x))
        return out


class BorderedConv1d(_Bordered, nn.Conv1d):
    pass


class BorderedConv2d(_Bordered, nn.Conv2d):
    pass


class BorderedConv3d(_Bordered, nn.Conv3d):
    pass


BORDERED: dict[str, type[Any]] = {"Conv1d": BorderedConv1d, "Conv2d": BorderedConv2d, "Conv3d": BorderedConv3d}
