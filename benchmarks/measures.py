"""How well each error measure predicts what is lost: plans of many methods on the pretrained CIFAR-10 ResNet20.

    python benchmarks/measures.py --data FOLDER [--weights FILE] [--images N]

FOLDER holds {train,test}.parquet of CIFAR-10. Every plan is built from the weights alone and scored on N test images;
every measure is computed for the layers as they were built, on 256 training images where it needs any, and added up (or
the largest is taken) over layers. Spearman's correlation is over all plans, and over those that lose at most 20 points.
"""

from __future__ import annotations

import numpy as np
import torch
from common import machine, resnet20, resnet20_arguments, say
from scipy.stats import spearmanr
from torch import Tensor, nn

import rankwise as rw
from rankwise.calibration.influence import Influence
from rankwise.calibration.output_metric import influences
from rankwise.core.layer import Layer, canonical
from rankwise.data import splits
from rankwise.planning.budget import Budget
from rankwise.training.evaluate import evaluate

KEEPS = (0.85, 0.75, 0.65, 0.55, 0.45, 0.35)
PLANS = {
    "svd": {},
    "svd-energy": {},
    "svd-error": {},
    "l-rank": {},
    "alds": {"error": "max"},
    "alds-error": {"groups": 4},
    "alds+": {"error": "max", "search": "minimax"},
    "auto": {"error": "energy"},
}


def main() -> None:
    parser = resnet20_arguments()
    parser.add_argument("--images", type=int, default=2_000)
    args = parser.parse_args()
    model = resnet20(args.weights)
    test = splits.load(f"parquet:{args.data}", "test").thin(args.images)
    base = evaluate(model, test).top1
    table = rw.build_table(model, torch.zeros(1, 3, 32, 32))
    layers = table.coverage.layers
    seen = influences(model, splits.load(f"parquet:{args.data}", "fit").thin(256), list(layers), 10_000)
    rows, drops = [], []
    for method, changes in PLANS.items():
        for keep in KEEPS:
            plan = rw.allocate(table, Budget(params=keep), method, **changes)
            small = rw.apply_plan(model, plan)
            drops.append(base - evaluate(small, test).top1)
            rows.append(errors(model, rw.densify(small), layers, seen))
    lost, small_losses = np.array(drops), np.array(drops) <= 20
    few = int(small_losses.sum())
    say(f"{len(drops)} plans, {few} of them lose at most 20 points; n = {len(test):,}; {machine()}\n")
    say("| measure | sum over layers | the largest | sum, ≤ 20 points lost | the largest, ≤ 20 points lost |")
    say("| --- | ---: | ---: | ---: | ---: |")
    for name in rows[0]:
        values = {how: np.array([how(row[name]) for row in rows]) for how in (np.sum, np.max)}
        found = [
            spearmanr(values[how][which], lost[which]).statistic
            for which in (np.full(len(lost), True), small_losses)
            for how in (np.sum, np.max)
        ]
        say(f"| `{name}` | " + " | ".join(f"{r:.3f}" for r in found) + " |")


def errors(
    model: nn.Module, other: nn.Module, layers: tuple[Layer, ...], seen: dict[str, Influence]
) -> dict[str, list[float]]:
    """By measure, for each layer: relative operator norm, relative and absolute energy, outputs, network's outputs."""
    found: dict[str, list[float]] = {"exact": [], "energy": [], "residual": [], "output": [], "effect": []}
    for layer in layers:
        weight, change = matrix(model, layer), matrix(model, layer) - matrix(other, layer)
        one = seen[layer.name]
        moment = one.seen.second_moment[0]
        found["exact"].append(float(torch.linalg.matrix_norm(change, 2) / torch.linalg.matrix_norm(weight, 2)))
        found["energy"].append(float(change.square().sum() / weight.square().sum()))
        found["residual"].append(float(change.square().sum()))
        found["output"].append(power(change, one.seen.covariance[0]) / power(weight, one.seen.covariance[0]))
        found["effect"].append(float(torch.trace(one.metric[0] @ change @ moment @ change.t())))
    return found


def matrix(model: nn.Module, layer: Layer) -> Tensor:
    weight: Tensor = model.get_submodule(layer.name).weight.detach()  # type: ignore[assignment,union-attr]
    return canonical(weight, layer).flatten(2)[0].double()


def power(change: Tensor, moment: Tensor) -> float:
    return float(torch.trace(change @ moment @ change.t()))


if __name__ == "__main__":
    main()
