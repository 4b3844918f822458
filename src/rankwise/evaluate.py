"""How often a network is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.data import Split
from rankwise.errors import RankwiseError
from rankwise.forward import run_example


@dataclass(frozen=True)
class Score:
    """`n` images; `top1` and `top5` in percent, `loss` the mean cross-entropy in nats.

    `top5` is None with fewer than six classes, where it would say nothing.
    """

    n: int
    top1: float
    top5: float | None
    loss: float

    def to_json(self) -> dict[str, int | float | None]:
        return asdict(self)


def evaluate(model: nn.Module, split: Split, batch_size: int = 256, limit: int | None = None) -> Score:
    """Score `model` on all images of `split`, or on `limit` of them, evenly spaced.

    Runs in eval mode, on the model's device and in its precision; afterwards every module is in the mode
    it was in.
    """
    if limit is not None:
        split = split.thin(limit)
    n = len(split)
    if not n:
        raise RankwiseError(f"{split.name} has no images in {split.split}: choose another split")
    ranks, losses, outputs = [], [], 0
    with mode(model, training=False), torch.inference_mode():
        for x, y in split.batches(batch_size):
            logits = class_logits(run_example(model, x), split).float()
            y = y.to(logits.device)
            ranks.append(_rank(logits, y).cpu())
            losses.append(F.cross_entropy(logits, y, reduction="none").double().cpu())
            outputs = logits.shape[1]
    rank = torch.cat(ranks)
    top5 = 100 * int((rank < 5).sum()) / n if min(outputs, len(split.classes)) > 5 else None
    return Score(n, 100 * int((rank < 1).sum()) / n, top5, float(torch.cat(losses).mean()))


def class_logits(output: Any, split: Split) -> Tensor:
    """N×classes out of what a network returns: a tensor, or `out` or `logits` of a dict or an object."""
    for key in ("logits", "out"):
        if isinstance(output, Mapping) and key in output:
            output = output[key]
        elif isinstance(getattr(output, key, None), Tensor) and not isinstance(output, Tensor):
            output = getattr(output, key)
    if not isinstance(output, Tensor) or output.dim() != 2:
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"type {type(output).__name__}"
        raise RankwiseError(f"the network's output has {got}: a classifier of shape images × classes is needed")
    needed = int(split.labels.max()) + 1
    if output.shape[1] < needed:
        raise RankwiseError(
            f"the network tells {output.shape[1]} classes apart, and {split.name} has labels up to "
            f"{needed - 1}: use data and a network that belong together"
        )
    return output


def like(model: nn.Module, x: Tensor) -> Tensor:
    """`x` on the device and in the precision of the model's first floating-point parameter."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return x.to(parameter.device, parameter.dtype)
    return x


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """The whole model in train or eval mode, and afterwards every module as it was."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, flag in before.items():
            module.training = flag


def _rank(logits: Tensor, y: Tensor) -> Tensor:
    """How many classes come before the right one, int64, N; after all of them where a logit is NaN.

    Among equal logits the lower class comes first, so that a network that says nothing is not always right.
    """
    mine = logits.gather(1, y[:, None])
    number = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > mine) | ((logits == mine) & (number < y[:, None]))
    return before.sum(1).masked_fill(logits.isnan().any(1), logits.shape[1])
