"""A learning rate from the network and its training images: a range test (Smith 2017).

A copy of the network takes a step at each of COUNT rates that grow geometrically from lr/100 to 100·lr of the recipe.
The smoothed loss first falls, and rises again where steps become too long. The rate is half of the one at which it
was lowest: there it already stops falling, and a peak rate has to hold for an epoch. It stays within a factor of ten
of the recipe's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rankwise.data.batches import Feed
from rankwise.data.splits import Split
from rankwise.surgery.multiplied import multiplied, pairs_to_multiply
from rankwise.surgery.replace import copy_model
from rankwise.training.loop import losses, make_optimizer, teacher_for, training_mode
from rankwise.training.recipes import Recipe

COUNT = 100
_SPAN, _BACK, _LIMIT = 100.0, 0.5, 10.0
_SMOOTH, _BROKEN = 0.9, 3.0  # weight of the past; times the lowest loss, where the test ends


@dataclass(frozen=True)
class FoundRate:
    """The rate that was chosen; `rates` that were tried and their smoothed `losses`."""

    lr: float
    rates: tuple[float, ...]
    losses: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return {"lr": self.lr, "rates": list(self.rates), "losses": list(self.losses)}


def find_rate(
    model: nn.Module, fit: Split, recipe: Recipe, teacher: nn.Module | None = None, seed: int = 0
) -> FoundRate:
    """Try COUNT steps on a copy; the model is left as it is. The same seed gives the same rate."""
    trial = copy_model(model)
    optimizer = make_optimizer(trial, recipe)
    device = next(trial.parameters()).device
    batch = min(recipe.batch_size, max(2, len(fit) // 2))
    feed = Feed(fit, batch, recipe.augment if recipe.augment in ("none", "shift", "cifar") else "none", seed)
    rates = [recipe.lr / _SPAN * _SPAN ** (2 * k / (COUNT - 1)) for k in range(COUNT)]
    curve: list[float] = []
    half, batches = recipe.precision == "bf16", _forever(feed)
    with (
        torch.random.fork_rng([]),
        training_mode(trial, recipe),
        multiplied(trial, pairs_to_multiply(trial, recipe.form)),
    ):
        torch.manual_seed(seed)
        for lr, (images, y) in zip(rates, batches, strict=False):
            for group in optimizer.param_groups:
                group["lr"] = lr
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                whole, _, _ = losses(trial, teacher_for(teacher, recipe), fit, images.to(device), y.to(device), 0.0)
            optimizer.zero_grad()
            whole.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            curve.append(float(whole.detach()))
            if not math.isfinite(curve[-1]) or smooth(curve)[-1] > _BROKEN * min(smooth(curve)):
                break
    return choose(recipe.lr, rates[: len(curve)], curve)


def choose(usual: float, rates: list[float], curve: list[float]) -> FoundRate:
    """Half of the rate with the lowest smoothed loss, within a factor of ten of the usual one.

    >>> choose(1.0, [0.1, 1.0, 10.0, 100.0], [4.0, 2.0, 1.0, 90.0]).lr  # not 100: it broke there
    5.0
    """
    even = [value for value in smooth(curve) if math.isfinite(value)]
    lowest = min(range(len(even)), key=lambda k: even[k]) if even else 0
    lr = min(max(_BACK * rates[lowest], usual / _LIMIT), usual * _LIMIT)
    return FoundRate(float(f"{lr:.2g}"), tuple(rates[: len(even)]), tuple(even))


def smooth(values: list[float]) -> list[float]:
    """Means that forget: entry k weighs entry k − i by 0.9^i."""
    total, weight, found = 0.0, 0.0, []
    for value in values:
        total, weight = _SMOOTH * total + value, _SMOOTH * weight + 1
        found.append(total / weight)
    return found


def _forever(feed: Feed) -> Any:
    epoch = 0
    while True:
        yield from feed.epoch(epoch)
        epoch += 1
