"""`auto` on the pretrained CIFAR-10 ResNet20: on imagined inputs and on calibration images, full test set.

    python benchmarks/auto.py --data FOLDER [--weights FILE] [--mode imagined|calibration] [--unit params|macs]
        [--removed PERCENT ...] [--recover STEPS] [--out FOLDER]

FOLDER holds {train,test}.parquet of CIFAR-10. Calibration is on 1,024 training images without their labels. Nothing is
chosen by looking at the test set. The table of effects is made once for a mode; every budget is planned, fitted and
scored, and scored again after so many steps of recovery on the same inputs. With --out the networks are kept there, and
those that are there already are not made again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import SHARED, machine, say
from torch import nn

import rankwise as rw
from rankwise import data, networks
from rankwise.dream import imagine
from rankwise.effects import effect_table
from rankwise.evaluate import evaluate
from rankwise.job import IMAGINED
from rankwise.methods import AUTO
from rankwise.probe import batches
from rankwise.recover import recover_
from rankwise.refit import apply_fitted
from rankwise.search import find_plan

REMOVED = {"params": (15, 25, 30, 35, 40, 45, 50, 60, 70, 80), "macs": (15, 25, 35, 40, 45, 50, 55, 60)}  # %
IMAGES = 1024
EXAMPLE = torch.zeros(1, 3, 32, 32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", type=Path, default=SHARED / "weights" / "resnet20-cifar10.safetensors")
    parser.add_argument("--mode", choices=("imagined", "calibration"), action="append")
    parser.add_argument("--unit", choices=tuple(REMOVED), action="append")
    parser.add_argument("--removed", type=int, action="append", help="percent, instead of all")
    parser.add_argument("--recover", type=int, default=0, metavar="STEPS")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = networks.build("resnet20")
    networks.load_weights_(model, args.weights)
    model.eval()
    test = data.load(f"parquet:{args.data}", "test")
    base = evaluate(model, test).top1
    say(f"n = {len(test):,} test images, before: {base:.2f} %; {machine()}\n")
    say("| inputs | budget | CR-P % | CR-F % | change in top-1 | predicted effect | seconds to plan and fit |")
    say("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for mode in args.mode or ("imagined", "calibration"):
        fitted = fitter(model, mode, args.data)
        for unit, removed in [(u, r) for u in args.unit or REMOVED for r in args.removed or REMOVED[u]]:
            kept = None if args.out is None else args.out / f"{mode}-{unit}{removed}"
            if kept is not None and kept.exists():
                small, plan, seconds = rw.load(kept, model), rw.Plan.load(kept / "plan.json"), "not measured"
            else:
                small, plan, seconds = fitted(rw.Budget(**{unit: 1 - removed / 100}))
                if kept is not None:
                    rw.save(small, plan, kept)
            told = f"{unit} −{removed} % | " + " | ".join(f"{100 * (1 - plan.keep(u)):.1f}" for u in ("params", "macs"))
            effect = plan.search["objective"]
            say(f"| {mode} | {told} | {evaluate(small, test).top1 - base:+.2f} | {effect:.4f} | {seconds} |")
            if args.recover:
                start = time.perf_counter()
                recover_(small, model, inputs_for(model, mode, args.data), args.recover)
                seconds = f"{time.perf_counter() - start:.0f} for recovery alone"
                say(f"| {mode}, recovered | {told} | {evaluate(small, test).top1 - base:+.2f} | | {seconds} |")
                if kept is not None:
                    rw.save(small, plan, kept.with_name(f"{kept.name}-recovered{args.recover}"))


def inputs_for(model: nn.Module, mode: str, folder: str) -> list[Any]:
    """Imagined images, or calibration images without their labels."""
    if mode == "imagined":
        return list(imagine(model, EXAMPLE, rw.find_layers(model, EXAMPLE).macs) or [])
    return list(batches(data.load(f"parquet:{folder}", "fit").thin(IMAGES)))


def fitter(model: nn.Module, mode: str, folder: str) -> Callable[[rw.Budget], tuple[nn.Module, rw.Plan, str]]:
    """From a budget to a fitted network, its plan, and the seconds for table, plan and fit; the table is made once."""
    settings = replace(AUTO, error="effect", decompositions=("whitened", "svd"))
    least = IMAGINED if mode == "imagined" else 0.0

    @cache
    def prepared() -> tuple[list[Any], Any, Any, float]:
        start = time.perf_counter()
        inputs = inputs_for(model, mode, folder)
        table, influence = effect_table(model, rw.find_layers(model, EXAMPLE), settings, inputs, least=least)
        return inputs, table, influence, time.perf_counter() - start

    def fitted(budget: rw.Budget) -> tuple[nn.Module, rw.Plan, str]:
        inputs, table, influence, before = prepared()
        start = time.perf_counter()
        plan = find_plan(table, budget, settings, "auto", "resnet20")
        small = apply_fitted(model, plan, inputs, influence, least=least)
        return small, plan, f"{before + time.perf_counter() - start:.0f}"

    return fitted


if __name__ == "__main__":
    main()
