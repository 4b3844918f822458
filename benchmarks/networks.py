"""Every method on five torchvision networks with random weights: it runs, fits the budget, and reloads.

    python benchmarks/networks.py [--network NAME …] [--method NAME …]

For each it is checked that the parameters are those of the plan and within the budget, that outputs have the old
shapes, that the folder read back gives the same outputs to the last digit, and that every module with parameters is in
the plan, decomposed or with a reason. Slices are 1, 2, 3 and 4, where a method chooses: this is no test of quality.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import machine, say
from torch import Tensor, nn

import rankwise as rw
from rankwise.models import networks
from rankwise.surgery.forward import tensors_of

INPUTS = {
    "resnet18": (1, 3, 64, 64),
    "mobilenet_v2": (1, 3, 64, 64),
    "deeplabv3_resnet50": (2, 3, 65, 65),
    "alexnet": (1, 3, 64, 64),
    "vgg16_bn": (1, 3, 32, 32),
}
KEEP = 0.6
CHOOSING = ("auto", "alds", "alds+")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", choices=tuple(INPUTS), action="append")
    parser.add_argument("--method", choices=tuple(rw.METHODS), action="append")
    args = parser.parse_args()
    say(f"keep {KEEP}; {machine()}\n")
    say("| network | method | keep params | keep macs | seconds |")
    say("| --- | --- | ---: | ---: | ---: |")
    for name in args.network or INPUTS:
        torch.manual_seed(0)
        model = networks.build(f"torchvision:{name}").eval()
        example = torch.randn(INPUTS[name])
        images = [torch.randn(4, *INPUTS[name][1:])]
        for method in args.method or rw.METHODS:
            start = time.perf_counter()
            changes: dict[str, Any] = {"groups": [1, 2, 3, 4]} if method in CHOOSING else {}
            small, plan = rw.compress(model, example, method, keep=KEEP, data=images, **changes)
            check(model, small, plan, example)
            seconds = time.perf_counter() - start
            say(f"| {name} | {method} | {plan.keep():.4f} | {plan.keep('macs'):.4f} | {seconds:.0f} |")


def check(model: nn.Module, small: nn.Module, plan: rw.Plan, example: Tensor) -> None:
    if not sum(p.numel() for p in small.parameters()) == plan.after.params <= KEEP * plan.before.params:
        raise SystemExit(f"{plan.method}: {plan.after.params} parameters are not what was asked for")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        rw.save(small, plan, Path(folder) / "small")
        again = rw.load(Path(folder) / "small", model)
        before, after, read = (tensors_of(network(example)) for network in (model, small, again))
    if [t.shape for t in before] != [t.shape for t in after]:
        raise SystemExit(f"{plan.method}: outputs have other shapes")
    if not all(torch.equal(a, b) for a, b in zip(after, read, strict=True)):
        raise SystemExit(f"{plan.method}: the folder gives other outputs")
    coverage = rw.find_layers(model, example)
    missing = {e.name for e in (*coverage.layers, *coverage.skipped)} - {e.name for e in plan.layers}
    if missing:
        raise SystemExit(f"{plan.method}: {sorted(missing)[0]} is not in the plan")


if __name__ == "__main__":
    main()
