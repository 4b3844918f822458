"""One question for every network and every kind of data: how good is it?"""

from __future__ import annotations

from torch import nn

from rankwise.data.splits import Split
from rankwise.data.text import TextSplit
from rankwise.training.evaluate import Score, evaluate
from rankwise.training.perplexity import TextScore, text_score


def score_of(model: nn.Module, split: Split | TextSplit, limit: int | None = None) -> Score | TextScore:
    """Accuracy on images, perplexity on text; on all of the split, or on `limit` samples, evenly spaced."""
    if isinstance(split, TextSplit):
        return text_score(model, split, limit)
    return evaluate(model, split, limit=limit)


def has_score(split: Split | TextSplit) -> bool:
    """Whether the data says what is right: sentences for an encoder do not."""
    return not isinstance(split, TextSplit) or split.predicts
