"""What a plan of `auto` will cost in accuracy, before the network is fitted.

Two quick looks at the inputs of a split enclose what fitting gives:

    first order   the outputs of the original network plus noise as large as the plan predicts (its objective): the sum
                  of what every layer does alone, so errors that feed on each other are not seen
    closed form   all pairs at once from what the table knows, without the passes in which layers make up for each
                  other (calibration/fit.py)

The second one is what to expect, on the careful side. The inputs must be new to the network: it is far surer of those
that it was trained on.

Counting who was right before and after on a few thousand inputs is too noisy for losses of a point or less: only few
answers change, and some of them for the better. So labels are used for one number only, the temperature T at which
p = softmax(logits / T) of the original network fits them best (Guo et al. 2017), and an answer that changes from a to b
costs p(a) − p(b): the expected loss of accuracy, if the original network's probabilities are then right.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.calibration.answers import Spread, add_answers, variance_of
from rankwise.calibration.fit import apply_fitted
from rankwise.compression import Observations
from rankwise.data.augment import IGNORED
from rankwise.data.splits import Split
from rankwise.errors import RankwiseError
from rankwise.planning.plan import Plan
from rankwise.surgery.forward import run_example, tensors_of
from rankwise.training.evaluate import class_logits, mode

DRAWS = 8
PIXELS = 100  # of each segmented image, drawn at random


@dataclass(frozen=True)
class Forecast:
    """Points of top-1 (of pixels for segmentation) that will be lost; `turned` percent of the answers will change.

    From `low`, the first-order loss, to `high`, the one in closed form, both widened by what chance leaves open
    (95 %): `n` inputs were looked at, and the loss will be measured on the inputs of the whole split.
    """

    drop: float
    low: float
    high: float
    turned: float
    n: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def can_forecast(plan: Plan, seen: Observations) -> bool:
    known = None not in (plan.search.objective, plan.search.variance) and plan.search.unit is None
    return plan.settings.get("error") == "effect" and seen.inputs is not None and known


def forecast(
    model: nn.Module, plan: Plan, seen: Observations, split: Split, most: int = 2_000, seed: int = 0
) -> Forecast:
    """For a plan and what was seen for it (`Compression.seen`), on up to `most` inputs of a split."""
    if not can_forecast(plan, seen) or seen.inputs is None:
        raise RankwiseError(
            f"a plan by {plan.method!r} with the measure {plan.settings.get('error')!r} does not say what becomes of "
            f"the network's outputs: forecasts are for method='auto' with data, or with batch norm and an example"
        )
    trial = apply_fitted(model, plan, seen.inputs, seen.influence, seen.moments, in_order=False).network
    whole, split = len(split), split.thin(most)
    random = torch.Generator().manual_seed(seed)
    before, labels, variance = _answers(model, split, torch.Generator().manual_seed(seed))
    after, _, _ = _answers(trial, split, torch.Generator().manual_seed(seed))
    power = (plan.search.objective or 0.0) * (plan.search.variance or 0.0) / variance
    size = math.sqrt(max(0.0, power * float(before.var(dim=0, unbiased=False).sum())) / before.shape[1])
    chances = (before / temperature(before, labels)).softmax(1)
    noisy = [before + size * torch.randn(before.shape, generator=random) for _ in range(DRAWS)]
    first = sum(float(_lost(chances, before, answers).mean()) for answers in noisy) / DRAWS
    lost = _lost(chances, before, after)
    drop = float(lost.mean())
    turned = float((before.argmax(1) != after.argmax(1)).double().mean())
    chance = float(lost.var(unbiased=False)) / len(split) + max(turned, 1 / whole) / whole
    low, high = (end + sign * 1.96 * math.sqrt(chance) for end, sign in ((min(first, drop), -1), (max(first, drop), 1)))
    return Forecast(100 * drop, 100 * low, 100 * high, 100 * turned, len(split))


def temperature(logits: Tensor, labels: Tensor) -> float:
    """T ≥ 0.1 with the least mean cross-entropy of softmax(logits / T); at most 100.

    The cross-entropy is convex in 1/T, so thirds can be cut off until T is known to a thousandth.
    """
    low, high = 0.01, 10.0
    while high - low > 1e-3 * low:
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if float(F.cross_entropy(logits * left, labels)) <= float(F.cross_entropy(logits * right, labels)):
            high = right
        else:
            low = left
    return 2 / (low + high)


def _lost(chances: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """For each input, how much less likely the new answer is right than the old one."""
    old, new = (chances.gather(1, answers.argmax(1, keepdim=True))[:, 0] for answers in (before, after))
    return old - new


def _answers(model: nn.Module, split: Split, random: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """Logits N×C and labels N, of some pixels for segmentation, and the variance of all outputs."""
    seen: dict[int, Spread] = {}
    logits, labels = [], []
    with mode(model, training=False), torch.inference_mode():
        for x, y in split.batches(8 if split.masks is not None else 256):
            output = run_example(model, x)
            add_answers(seen, [t for t in tensors_of(output) if t.is_floating_point()])
            found = class_logits(output, split).double().cpu()
            if found.ndim > 2:
                found, y = found.movedim(1, -1).flatten(0, 2), y.flatten()
                chosen = torch.randint(len(y), (PIXELS * len(x),), generator=random)
                chosen = chosen[y[chosen] != IGNORED]
                found, y = found[chosen], y[chosen]
            logits.append(found)
            labels.append(y)
    return torch.cat(logits), torch.cat(labels), variance_of(seen)
