"""How images lie in memory: channel by channel, or all channels of a pixel side by side.

The numbers are the same. Convolutions on CPUs are often much faster with channels last, and a network whose weights lie
so computes so, whatever its inputs look like.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def lay_out_(model: nn.Module, layout: str | None) -> None:
    """Bring the weights of 2-D convolutions into a layout, in place; None leaves them as they are."""
    formats = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}
    if layout is not None:
        model.to(memory_format=formats[layout])  # type: ignore[call-overload]


def in_layout(value: Tensor, layout: str) -> Tensor:
    if layout == "channels-last" and value.ndim == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def other_layout(model: nn.Module) -> str | None:
    """The layout worth trying: channels-last, if there are 2-D convolutions and any of them lies otherwise."""
    images = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)]
    lies_so = all(w.is_contiguous(memory_format=torch.channels_last) for w in images)
    return None if lies_so else "channels-last"
