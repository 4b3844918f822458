"""`auto` on the pretrained CIFAR-10 ResNet20: on imagined inputs and on calibration images, full test set.

    python benchmarks/auto.py --data FOLDER [--weights FILE] [--mode imagined|calibration] [--unit params|macs]

FOLDER holds {train,test}.parquet of CIFAR-10. Calibration is on 1,024 training images without their labels. Nothing is
chosen by looking at the test set. The table of effects is made once for a mode; every budget is planned, fitted and
scored.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from common import SHARED, machine, say

import rankwise as rw
from rankwise import data, networks
from rankwise.dream import imagine
from rankwise.effects import effect_table
from rankwise.evaluate import evaluate
from rankwise.job import IMAGINED
from rankwise.methods import AUTO
from rankwise.probe import batches
from rankwise.refit import apply_fitted
from rankwise.search import find_plan

REMOVED = {"params": (15, 25, 30, 35, 40, 45, 50, 60, 70, 80), "macs": (15, 25, 35, 40, 45, 50, 55, 60)}  # %
IMAGES = 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", type=Path, default=SHARED / "weights" / "resnet20-cifar10.safetensors")
    parser.add_argument("--mode", choices=("imagined", "calibration"), action="append")
    parser.add_argument("--unit", choices=tuple(REMOVED), action="append")
    args = parser.parse_args()
    model = networks.build("resnet20")
    networks.load_weights_(model, args.weights)
    model.eval()
    test = data.load(f"parquet:{args.data}", "test")
    base = evaluate(model, test).top1
    say(f"n = {len(test):,} test images, before: {base:.2f} %; {machine()}\n")
    say("| inputs | budget | CR-P % | CR-F % | change in top-1 | predicted effect | seconds to plan and fit |")
    say("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    example = torch.zeros(1, 3, 32, 32)
    coverage = rw.find_layers(model, example)
    settings = replace(AUTO, error="effect", decompositions=("whitened", "svd"))
    for mode in args.mode or ("imagined", "calibration"):
        start = time.perf_counter()
        if mode == "imagined":
            inputs, least = imagine(model, example, coverage.macs), IMAGINED
        else:
            inputs, least = list(batches(data.load(f"parquet:{args.data}", "fit").thin(IMAGES))), 0.0
        table, influence = effect_table(model, coverage, settings, inputs or [], least=least)
        prepared = time.perf_counter() - start
        for unit, removed in [(u, r) for u in args.unit or REMOVED for r in REMOVED[u]]:
            start = time.perf_counter()
            plan = find_plan(table, rw.Budget(**{unit: 1 - removed / 100}), settings, "auto", "resnet20")
            small = apply_fitted(model, plan, inputs or [], influence, least=least)
            seconds = prepared + time.perf_counter() - start
            cut = [100 * (1 - plan.keep(u)) for u in ("params", "macs")]
            change = evaluate(small, test).top1 - base
            effect = plan.search["objective"]
            say(
                f"| {mode} | {unit} −{removed} % | {cut[0]:.1f} | {cut[1]:.1f} | {change:+.2f} | {effect:.4f} "
                f"| {seconds:.0f} |"
            )


if __name__ == "__main__":
    main()
