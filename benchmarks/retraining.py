"""Retraining with a teacher: images a second of the loop as it was and as it is, in one run.

    python benchmarks/retraining.py --data FOLDER --weights FILE [--keep 0.25] [--steps 6] [--turns 3]

FOLDER holds {train,test}.parquet of CIFAR-10, FILE the weights of ResNet20. The loops take turns on one thread, and CPU
seconds are compared (medians), so that whatever else the machine does hits all alike. `as it was` computes pairs by
their factors in float32, with a teacher in torch's own layout; each row after it changes one thing more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from common import SHARED, machine, say
from torch import nn

import rankwise as rw
from rankwise.data import splits
from rankwise.data.splits import Split
from rankwise.models import networks
from rankwise.surgery.replace import copy_model
from rankwise.training.loop import Hooks, retraining, train_
from rankwise.training.precision import fastest
from rankwise.training.processes import make_engine
from rankwise.training.recipes import RECIPES, Recipe, change
from rankwise.training.teacher import ready

BATCH = 128
Loop = tuple[str, Callable[[], None]]


def loops(small: nn.Module, teacher: nn.Module, split: Split) -> list[Loop]:
    """One epoch over the split, each on a copy of the same network."""
    old = change(RECIPES["taught"], {"epochs": 1, "batch_size": BATCH, "form": "factors", "augment": "cifar"})
    example = torch.zeros(1, 3, 32, 32)

    def run(recipe: Recipe, taught_by: nn.Module) -> None:
        engine = make_engine(recipe.precision)
        train_(copy_model(small), split, retraining(recipe), engine, Hooks(teacher=taught_by))

    half, product = replace(old, precision=fastest()), replace(old, precision=fastest(), form="product")
    last = replace(product, layers=0.0)
    quick, folded = ready(teacher, example, 1.0), ready(teacher, example, 0.0)
    return [
        ("as it was", lambda: run(old, teacher)),
        (f"precision {half.precision}, teacher with channels innermost", lambda: run(half, quick)),
        ("and pairs as their product", lambda: run(product, quick)),
        ("and no layers as targets, teacher with folded norms (`distilled`)", lambda: run(last, folded)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", type=Path, default=SHARED / "weights" / "resnet20-cifar10.safetensors")
    parser.add_argument("--keep", type=float, default=0.25)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    split = splits.load(f"parquet:{args.data}", "fit").thin(BATCH * args.steps)
    teacher = networks.build("resnet20")
    networks.load_weights_(teacher, args.weights)
    teacher.eval()
    small, _ = rw.compress(teacher, torch.zeros(1, 3, 32, 32), keep=args.keep, error="energy")
    seconds: dict[str, list[float]] = {}
    for turn in range(args.turns + 1):
        for name, loop in loops(small, teacher, split):
            start = time.process_time()
            loop()
            if turn:  # the first turn warms up
                seconds.setdefault(name, []).append((time.process_time() - start) / args.steps)
    say(f"ResNet20 at keep {args.keep}, batches of {BATCH}, {args.steps} steps, median of {args.turns}; {machine()}\n")
    say("| loop | CPU ms for a step | images for a CPU second | times as many |\n| --- | ---: | ---: | ---: |")
    first = median(seconds["as it was"])
    for name, times in seconds.items():
        took = median(times)
        say(f"| {name} | {1000 * took:.0f} | {BATCH / took:.0f} | {first / took:.2f} |")


if __name__ == "__main__":
    main()
