"""How well a network predicts tokens: the mean loss over a text, and its perplexity."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.data.text import TextSplit
from rankwise.errors import RankwiseError
from rankwise.surgery.forward import run_example
from rankwise.training.evaluate import mode

ENTRIES = 1 << 26  # of logits at a time


@dataclass(frozen=True)
class TextScore:
    """`n` windows with so many predicted `tokens`; `loss` in nats for each of them, `perplexity` = exp(loss).

    Standard errors are over windows: tokens of one window are not independent. That of the perplexity follows to first
    order. None with a single window.
    """

    n: int
    tokens: int
    loss: float
    loss_error: float | None
    perplexity: float
    perplexity_error: float | None
    length: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def main(self) -> float:
        """What a limit is about; lower is better."""
        return self.perplexity


def text_score(model: nn.Module, split: TextSplit, limit: int | None = None) -> TextScore:
    """The loss of all windows of `split`, or of `limit` of them, evenly spaced; in eval mode, put back afterwards."""
    split = split if limit is None else split.thin(limit)
    if not split.predicts:
        raise RankwiseError(
            f"{type(model).__name__} gives no probabilities of tokens, so there is no perplexity: score it with "
            "your own metric (--metric FILE.py:FUNCTION with --max-drop, or rankwise.smallest)"
        )
    sums, counts = [], []
    vocabulary = int(getattr(getattr(model, "config", None), "vocab_size", 0) or 1)
    with mode(model, training=False), torch.inference_mode():
        for inputs, targets in split.batches(max(1, ENTRIES // (vocabulary * split.length))):
            losses = _losses(_logits(run_example(model, inputs), targets), targets)
            sums.append(losses.sum(1))
            counts.append((targets != -100).sum(1))
    return _summary(torch.cat(sums), torch.cat(counts), split.length)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats for each token (B×T, float64), 0 where there is no target."""
    wanted = targets.to(logits.device).flatten()
    found = F.cross_entropy(logits.flatten(0, 1).float(), wanted, reduction="none", ignore_index=-100)
    return found.double().reshape(targets.shape).cpu()


def _logits(output: Any, targets: Tensor) -> Tensor:
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor) or found.ndim != 3 or found.shape[:2] != targets.shape:
        raise RankwiseError(
            "the network gives no probabilities of the next token: open it with its head, such as "
            "hf:FOLDER?class=AutoModelForCausalLM"
        )
    return found


def _summary(sums: Tensor, counts: Tensor, length: int) -> TextScore:
    """The mean over all tokens; its variance is that of a ratio of two sums over windows."""
    n, tokens = len(sums), int(counts.sum())
    loss = float(sums.sum()) / tokens
    error = None
    if n > 1:
        off = sums - loss * counts
        error = math.sqrt(float(off.square().sum()) / (n - 1) * n) / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf
    spread = None if error is None or not math.isfinite(perplexity) else perplexity * error
    return TextScore(n, tokens, loss, error, perplexity, spread, length)
