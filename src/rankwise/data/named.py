"""Data by its name, for a network: images as they are, text as the network's own tokenizer cuts it."""

from __future__ import annotations

from torch import nn

from rankwise.data import splits
from rankwise.data.splits import Split
from rankwise.data.text import TextSplit, is_text, load_text
from rankwise.data.tokens import reader_of


def load_for(model: nn.Module, spec: str, split: str, size: int | None = None) -> Split | TextSplit:
    """The split `split` of the data `spec` names; `size` is the side of images, or the tokens of a window."""
    if is_text(spec):
        return load_text(spec, split, reader_of(model), size)
    return splits.load(spec, split, size=size)
