"""`auto` on the pretrained CIFAR-10 ResNet20: on synthetic inputs and on calibration images, full test set.

    python benchmarks/auto.py --data FOLDER [--weights FILE] [--mode synthetic|calibration] [--unit params|macs]
        [--removed PERCENT ...] [--recover STEPS] [--out FOLDER]

FOLDER holds {train,test}.parquet of CIFAR-10. Calibration is on 1,024 training images without their labels. Nothing is
chosen by looking at the test set. The table of effects is made once for a mode; every budget is planned, fitted and
scored, and scored again after so many steps of recovery on the same inputs. With --out the networks are kept there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import machine, resnet20, resnet20_arguments, say
from torch import nn

import rankwise as rw
from rankwise.calibration.activations import batches
from rankwise.calibration.distill import Effort, recover_
from rankwise.compression import Compression, Request
from rankwise.data import splits
from rankwise.training.evaluate import evaluate

REMOVED = {"params": (15, 25, 30, 35, 40, 45, 50, 60, 70, 80), "macs": (15, 25, 35, 40, 45, 50, 55, 60)}  # %
IMAGES = 1024
EXAMPLE = torch.zeros(1, 3, 32, 32)


def main() -> None:
    parser = resnet20_arguments()
    parser.add_argument("--mode", choices=("synthetic", "calibration"), action="append")
    parser.add_argument("--unit", choices=tuple(REMOVED), action="append")
    parser.add_argument("--removed", type=int, action="append", help="percent, instead of all")
    parser.add_argument("--recover", type=int, default=0, metavar="STEPS")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = resnet20(args.weights)
    test = splits.load(f"parquet:{args.data}", "test")
    base = evaluate(model, test).top1
    say(f"n = {len(test):,} test images, before: {base:.2f} %; {machine()}\n")
    say("| inputs | budget | CR-P % | CR-F % | change in top-1 | predicted effect | seconds to plan and fit |")
    say("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for mode in args.mode or ("synthetic", "calibration"):
        fitted = fitter(model, mode, args.data)
        for unit, removed in [(u, r) for u in args.unit or REMOVED for r in args.removed or REMOVED[u]]:
            kept = None if args.out is None else args.out / f"{mode}-{unit}{removed}"
            small, plan, inputs, seconds = fitted(rw.Budget(**{unit: 1 - removed / 100}))
            if kept is not None:
                rw.save(small, plan, kept)
            told = f"{unit} −{removed} % | " + " | ".join(f"{100 * (1 - plan.keep(u)):.1f}" for u in ("params", "macs"))
            effect = plan.search.objective
            say(f"| {mode} | {told} | {evaluate(small, test).top1 - base:+.2f} | {effect:.4f} | {seconds} |")
            if args.recover:
                start = time.perf_counter()
                recover_(small, model, inputs, Effort(args.recover))
                seconds = f"{time.perf_counter() - start:.0f} for recovery alone"
                say(f"| {mode}, recovered | {told} | {evaluate(small, test).top1 - base:+.2f} | | {seconds} |")
                if kept is not None:
                    rw.save(small, plan, kept.with_name(f"{kept.name}-recovered{args.recover}"))


def fitter(
    model: nn.Module, mode: str, folder: str
) -> Callable[[rw.Budget], tuple[nn.Module, rw.Plan, list[Any], str]]:
    """From a budget to a fitted network, its plan, its inputs, and the seconds for all; the table is made once."""
    images = list(batches(splits.load(f"parquet:{folder}", "fit").thin(IMAGES))) if mode == "calibration" else None
    start = time.perf_counter()
    job = Compression(model, EXAMPLE, Request(name="resnet20"), images)
    inputs = job.basis(None).seen.inputs
    assert inputs is not None, "resnet20 has batch norms"
    before = time.perf_counter() - start

    def fitted(budget: rw.Budget) -> tuple[nn.Module, rw.Plan, list[Any], str]:
        start = time.perf_counter()
        small, plan = job.build(job.plan(budget))
        return small, plan, inputs.batches, f"{before + time.perf_counter() - start:.0f}"

    return fitted


if __name__ == "__main__":
    main()
