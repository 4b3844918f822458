"""Every data-free method on the pretrained CIFAR-10 ResNet20, compress only, full test set.

    python benchmarks/resnet20.py --data FOLDER --weights FILE > docs/results-resnet20.md

FOLDER holds {train,test}.parquet of CIFAR-10. Nothing is chosen by looking at the test set: every row is
a method of the registry with settings that its name says.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from common import SHARED, machine, say

import rankwise as rw
from rankwise import data, networks
from rankwise.evaluate import evaluate

REMOVED = (15, 25, 40, 60)  # CR-P in percent
ROWS = (
    ("svd", "svd", {}),
    ("svd-energy", "svd-energy", {}),
    ("svd-error", "svd-error", {}),
    ("alds-simple, k = 3", "alds-simple", {}),
    ("alds-simple, k = 5", "alds-simple", {"groups": 5}),
    ("alds-error, k = 3", "alds-error", {}),
    ("alds-error, k = 3, `max`", "alds-error", {"error": "max"}),
    ("alds (Theorem 1: `bound`)", "alds", {}),
    ("alds, `rss`", "alds", {"error": "rss"}),
    ("alds, `exact`", "alds", {"error": "exact"}),
    ("alds, `max` (as the authors' program)", "alds", {"error": "max"}),
    ("alds, `max`, minimax", "alds", {"error": "max", "search": "minimax"}),
    ("alds+ (`bound`)", "alds+", {}),
    ("alds+, `max`", "alds+", {"error": "max"}),
    ("alds+, `max`, minimax", "alds+", {"error": "max", "search": "minimax"}),
    ("auto (Σ `energy`, four folds)", "auto", {}),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", type=Path, default=SHARED / "weights" / "resnet20-cifar10.safetensors")
    args = parser.parse_args()
    model = networks.build("resnet20")
    networks.load_weights_(model, args.weights)
    model.eval()
    test = data.load(f"parquet:{args.data}", "test")
    base = evaluate(model, test).top1
    example = torch.zeros(1, 3, 32, 32)
    table = rw.build_table(model, example, groups="all")
    fixed = {k: rw.build_table(model, example, folds=(0,), groups=k) for k in (3, 5)}
    say(f"n = {len(test):,} test images, before: {base:.2f} %; {machine()}\n")
    head = " | ".join(f"CR-P {r} %: change, CR-F" for r in REMOVED)
    say(f"| method | {head} | seconds to plan and build |\n| --- |{' ---: |' * (len(REMOVED) + 1)}")
    for title, method, changes in ROWS:
        k = changes.get("groups", rw.METHODS[method].settings.groups)
        cells, seconds = [], []
        for removed in REMOVED:
            start = time.perf_counter()
            budget = rw.Budget(params=1 - removed / 100)
            plan = rw.allocate(fixed.get(k, table), budget, method=method, model="resnet20", **changes)
            small = rw.apply_plan(model, plan)
            seconds.append(time.perf_counter() - start)
            change = evaluate(small, test).top1 - base
            cells.append(f"{change:+.2f}, {100 * (1 - plan.keep('macs')):.1f} %")
        say(f"| {title} | {' | '.join(cells)} | {min(seconds):.2f}–{max(seconds):.2f} |")


if __name__ == "__main__":
    main()
