"""A learning rate from the network and its training images: a range test (Smith 2017).

A copy of the network takes a step at each of COUNT rates that grow geometrically from lr/100 to 100·lr of the recipe.
Where steps become too long, the smoothed loss rises to that of a network that knows nothing: whose outputs are the same
for all images. The rate is an eighth of the one at which it has come half of the way, in logarithms. The rate with the
lowest loss would not do: of a network that was fitted already the loss rises from the first step on, and yet it ends
lower after epochs at a rate that raises it at first. The rate stays within a factor of ten of the recipe's.
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
_SPAN, _BACK, _LIMIT = 100.0, 0.125, 10.0
_SMOOTH, _WORSE = 0.9, 3.0  # weight of the past; times the lowest loss


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
    nothing, taught = math.inf, teacher_for(teacher, recipe)
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
                whole, _, logits = losses(trial, taught, fit, images.to(device), y.to(device), 0.0)
            optimizer.zero_grad()
            whole.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            curve.append(float(whole.detach()))
            nothing = loss_of_nothing(logits.shape[1], recipe, taught=teacher is not None)
            even = smooth(curve)
            if not math.isfinite(curve[-1]) or even[-1] > _top(min(even), nothing):
                break
    return choose(recipe.lr, rates[: len(curve)], curve, nothing)


def loss_of_nothing(classes: int, recipe: Recipe, *, taught: bool) -> float:
    """The loss of outputs that are the same for all images: log(classes) by labels, 1 for each relative error."""
    by_labels = math.log(max(2, classes))
    return recipe.labels * by_labels + 1 + recipe.layers if taught else by_labels


def choose(usual: float, rates: list[float], curve: list[float], nothing: float) -> FoundRate:
    """An eighth of the rate at which the smoothed loss is half-way from its lowest to that of `nothing`, and stays so.

    >>> choose(1.0, [0.1, 1.0, 8.0, 80.0], [4.0, 2.0, 1.0, 900.0], 100.0).lr  # 80 is where it broke
    10.0
    """
    even = [value for value in smooth(curve) if math.isfinite(value)]
    lowest = min(range(len(even)), key=lambda k: even[k]) if even else 0
    half_way = math.sqrt(max(even[lowest], 0.0) * _top(even[lowest], nothing)) if even else 0.0
    # Before the lowest the loss may lie above: there a network still learns what it did not know.
    broken = next((k for k in range(lowest, len(even)) if even[k] > half_way), len(even))
    lr = min(max(_BACK * rates[min(broken, len(rates) - 1)], usual / _LIMIT), usual * _LIMIT)
    return FoundRate(float(f"{lr:.2g}"), tuple(rates[: len(even)]), tuple(even))


def _top(lowest: float, nothing: float) -> float:
    """Where all is lost; networks that were never trained are worse than nothing at first."""
    return max(nothing, _WORSE * lowest)


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
