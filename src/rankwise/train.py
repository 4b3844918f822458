"""Train a network in place."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, isfinite

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR

from rankwise.data import Split
from rankwise.errors import RankwiseError
from rankwise.evaluate import class_logits, like, mode

Progress = Callable[[int, int, float], None]  # epochs done, epochs in all, mean loss of the last one


def fit_(
    model: nn.Module,
    split: Split,
    *,
    epochs: int,
    lr: float = 0.1,
    batch_size: int = 64,
    weight_decay: float = 5e-4,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[float]:
    """Cross-entropy by SGD with Nesterov momentum 0.9; the rate rises to `lr` and falls again (one cycle).

    Returns the mean loss of each epoch. The same seed gives the same weights on the same machine; torch's
    global random state is left alone. Afterwards every module is in the mode it was in.
    """
    _check(split, epochs, lr, batch_size)
    if not epochs:
        return []
    steps = epochs * ceil(len(split) / batch_size)
    optimiser = SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=weight_decay)
    schedule = OneCycleLR(optimiser, max_lr=lr, total_steps=max(steps, 4), cycle_momentum=False)
    losses: list[float] = []
    with torch.random.fork_rng(range(torch.cuda.device_count())), mode(model, training=True):
        torch.manual_seed(seed)  # for dropout and the like
        for epoch in range(epochs):
            order = seed * 100_003 + epoch  # a different order in each epoch, and for each seed
            losses.append(_epoch_(model, split, optimiser, schedule, batch_size, order))
            if not isfinite(losses[-1]):
                raise RankwiseError(
                    f"the loss became {losses[-1]} in epoch {epoch + 1}: train with a learning rate below {lr:g}"
                )
            if progress is not None:
                progress(epoch + 1, epochs, losses[-1])
    return losses


def _epoch_(model: nn.Module, split: Split, optimiser: SGD, schedule: OneCycleLR, batch_size: int, order: int) -> float:
    """One pass over the data; returns the mean loss of its images."""
    total, seen = 0.0, 0
    for x, y in split.batches(batch_size, shuffle_seed=order):
        if len(y) < 2 <= batch_size:
            continue  # batch norm cannot take the statistics of a single image
        logits = class_logits(model(like(model, x)), split)
        loss = F.cross_entropy(logits.float(), y.to(logits.device))
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
        total += loss.item() * len(y)
        seen += len(y)
    return total / seen


def _check(split: Split, epochs: int, lr: float, batch_size: int) -> None:
    if epochs < 0:
        raise RankwiseError(f"{epochs} epochs were asked for: ask for 0 or more")
    if batch_size < 1:
        raise RankwiseError(f"batch size {batch_size} was given: give 1 or more")
    if not lr > 0:
        raise RankwiseError(f"learning rate {lr} was given: give a number above 0")
    if len(split) < 2:
        raise RankwiseError(f"{split.name} has {len(split)} images in {split.split}: training needs at least 2")
