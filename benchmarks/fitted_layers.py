"""Is a fitted layer ever worse than the SVD of its weight, on images that it was not fitted to? Layer by layer.

    python benchmarks/fitted_layers.py NETWORK --networks DIR --data FOLDER [--images N] [--share S]

NETWORK is resnet50 or lite0, as in imagenet.py. A layer is decomposed at the rank that leaves it S of its parameters
(0.6), once by the SVD of its weight and once in the metric of N calibration images (256), with the shrinkage that was
chosen by their halves. What both do to the outputs is measured with the statistics of N other images.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from common import machine, say
from torch import Tensor

from imagenet import BATCH, NETWORKS, read, scaled
from rankwise.calibration.activations import patch_size
from rankwise.calibration.effect_table import fittable
from rankwise.calibration.inputs import CALIBRATION, Inputs
from rankwise.calibration.output_metric import influences
from rankwise.calibration.shrinkage import choose_shares_, evidence_of, target_of_both
from rankwise.core.fold import all_folds
from rankwise.core.layer import Coverage, Layer, canonical
from rankwise.core.linalg import precise
from rankwise.core.option import Option
from rankwise.decompositions import DECOMPOSITIONS, PLAIN, Target
from rankwise.models import networks
from rankwise.planning.table import module_weights
from rankwise.surgery.coverage import find_layers

WIDEST = 2400  # inputs to a filter


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("network", choices=tuple(NETWORKS))
    parser.add_argument("--networks", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--share", type=float, default=0.6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec, weights, mean, deviation = NETWORKS[args.network]
    model = networks.build(spec if spec.startswith("timm:") else str(args.networks / spec))
    networks.load_weights_(model, args.networks / weights)
    model.eval()
    scale = torch.tensor(mean).view(3, 1, 1), torch.tensor(deviation).view(3, 1, 1)
    seen, _ = read(args.data / "train.parquet")
    seen = seen[torch.randperm(len(seen), generator=torch.Generator().manual_seed(0))]
    parts = [scaled(part, scale).split(BATCH) for part in seen[: 2 * args.images].split(args.images)]
    coverage = find_layers(model, parts[0][0][:1])
    say(f"{args.images} images, {args.images} others to measure on; {machine()}\n")
    say("| layer | d × f | rank | SVD | fitted | fitted ÷ SVD |")
    say("| --- | ---: | ---: | ---: | ---: | ---: |")
    ratios = []
    for layer, rank, plain, fitted in rows(model, coverage, parts, args.share):
        ratios.append(fitted / plain)
        size = f"{patch_size(layer)} × {layer.group_filters}"
        say(f"| {layer.name} | {size} | {rank} | {plain:.5f} | {fitted:.5f} | {fitted / plain:.3f} |")
    found = torch.tensor(ratios)
    say(f"\nfitted ÷ SVD: median {float(found.median()):.3f}, largest {float(found.max()):.3f}, {len(found)} layers")


def rows(
    model: torch.nn.Module, coverage: Coverage, parts: list[tuple[Tensor, ...]], share: float
) -> Iterator[tuple[Layer, int, float, float]]:
    """A layer, its rank, and what is lost on the second part by the SVD and by a fit to the first."""
    weights, layers = module_weights(model, coverage), fittable(coverage)
    both = [influences(model, Inputs(list(part), CALIBRATION), layers, WIDEST) for part in parts]
    for layer in layers:
        here, there = (found[layer.name] for found in both)
        if not here.whole or layer.transposed:
            continue
        option = Option(all_folds(layer.dims)[0], 1, "whitened")
        rank = int(PLAIN.costs(layer, option)[0].searchsorted(share * layer.params)) - 1
        if rank < 1:
            continue
        choose_shares_(layer, weights[layer.name], here, 0.0)
        target = target_of_both(layer, weights[layer.name], here)
        test = evidence_of(there, there.both)
        targets = {"svd": Target(layer, weights[layer.name]), "whitened": target}
        plain, fitted = (change(one, how, rank, test.test_moment, test.test_metric) for how, one in targets.items())
        yield layer, rank, plain, fitted


def change(target: Target, how: str, rank: int, moment: Tensor, metric: Tensor | None) -> float:
    """tr(G' (W − Ŵ) M' (W − Ŵ)ᵀ)."""
    layer, option = target.layer, Option(all_folds(target.layer.dims)[0], 1, how)
    made = DECOMPOSITIONS[how].approximation(target, option, rank)
    gap = (precise(canonical(target.weight.detach(), layer)) - precise(canonical(made, layer))).flatten(2)
    outputs = gap if metric is None else precise(metric) @ gap
    return float((outputs * (gap @ precise(moment))).sum())


if __name__ == "__main__":
    main()
