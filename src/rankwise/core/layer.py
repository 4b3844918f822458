"""What a layer is, without its tensors: all that planning needs to know."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rankwise.core.border import Border

LINEAR_KINDS = ("Linear", "Conv1D")  # Conv1D is the Hugging Face linear layer with a transposed weight
LOOKUP = "Embedding"  # a linear layer of one-hot inputs: `channels` is the vocabulary, `filters` the width


@dataclass(frozen=True)
class Call:
    """One use of a layer in a forward pass: spatial sizes before and after, and how often.

    A linear layer has no spatial sizes; `count` is its number of rows. For a convolution it is the batch.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Layer:
    """A layer that can be decomposed. `calls` is None when no example input was given.

    Of an embedding, `heads` are linear layers that multiply with the same weight, (outputs, inputs) there, and
    `head_rows` how often they do.
    """

    name: str
    kind: str
    filters: int
    channels: int
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    dilation: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()
    groups: int = 1
    padding_mode: str = "zeros"
    bias: bool = True
    calls: tuple[Call, ...] | None = None
    aliases: tuple[str, ...] = ()  # other names of the same shared module
    heads: tuple[str, ...] = ()
    head_rows: int = 0
    border: Border = ()  # zeros around the input, beside the padding; `calls` are of inputs that have them
    computed: bool = False  # the weight is computed from parameters (standardised), and not one of them
    gains: int = 0  # entries of the other parameters that it is computed from

    @property
    def transposed(self) -> bool:
        return self.kind.startswith("ConvTranspose")

    @property
    def dims(self) -> int:
        """Number of kernel axes."""
        return len(self.kernel)

    @property
    def group_filters(self) -> int:
        return self.filters // self.groups

    @property
    def group_channels(self) -> int:
        return self.channels // self.groups

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight as torch stores it."""
        if self.kind in ("Conv1D", LOOKUP):
            return (self.channels, self.filters)
        if self.transposed:
            return (self.channels, self.group_filters, *self.kernel)
        return (self.filters, self.group_channels, *self.kernel)

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        return (self.groups, self.group_filters, self.group_channels, *self.kernel)

    @property
    def params(self) -> int:
        """Entries of the weight, and of gains that go with it; the bias is not touched and not counted here."""
        return math.prod(self.shape) + self.gains

    @property
    def macs(self) -> int | None:
        """Multiply-adds of the weight over all calls, as torch's flop counter counts them, halved."""
        if self.calls is None:
            return None
        if self.kind == LOOKUP:
            return self.params * self.head_rows
        sizes = [c.inputs if self.transposed else c.outputs for c in self.calls]
        return math.prod(self.shape) * sum(math.prod(s) * c.count for s, c in zip(sizes, self.calls, strict=True))


def canonical(weight: Tensor, layer: Layer) -> Tensor:
    """A view of the weight as (G, f/G, c/G, *kernel), whatever the kind of layer."""
    if layer.kind in ("Conv1D", LOOKUP):
        return weight.t().unsqueeze(0)
    if layer.transposed:
        return torch.unflatten(weight, 0, (layer.groups, layer.group_channels)).transpose(1, 2)
    return torch.unflatten(weight, 0, (layer.groups, layer.group_filters))


def stored(weight: Tensor, layer: Layer) -> Tensor:
    """The inverse of `canonical`: (G, f/G, c/G, *kernel) → the shape that torch stores."""
    if layer.kind in ("Conv1D", LOOKUP):
        return weight.squeeze(0).t()
    if layer.transposed:
        return weight.transpose(1, 2).flatten(0, 1)
    return weight.flatten(0, 1)


@dataclass(frozen=True)
class Skipped:
    """A module with parameters that is left alone, and why; `macs` where they are known."""

    name: str
    kind: str
    params: int
    reason: str
    macs: int | None = None


@dataclass(frozen=True)
class Coverage:
    """Every module of a network that has parameters: decomposable, or left alone with a reason.

    `params` counts every parameter of the network once; `macs` every multiply-add of the example's
    forward pass (None without an example). Both include what is left alone. `embeddings` are among the
    latter, unless somebody measures what tokens do (calibration/lookups.py).
    """

    layers: tuple[Layer, ...]
    skipped: tuple[Skipped, ...]
    params: int
    macs: int | None
    embeddings: tuple[Layer, ...] = ()

    def with_embeddings(self) -> Coverage:
        """With embeddings among the layers; heads that share their weights stay listed as tied to them."""
        names = {layer.name for layer in self.embeddings}
        kept = tuple(one for one in self.skipped if one.name not in names)
        return replace(self, layers=(*self.layers, *self.embeddings), skipped=kept, embeddings=())
