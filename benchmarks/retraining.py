"""Retraining: images for a CPU second of the loop as it was and as it is, in one run.

    python benchmarks/retraining.py --data FOLDER --weights FILE --before OLD/src [--keep 0.25] [--steps 6] [--turns 5]

FOLDER holds {train,test}.parquet of CIFAR-10, FILE the weights of ResNet20, OLD a checkout of commit 04fae5f. Its loop
runs in a process of its own (retraining_before.py), which also makes the network: all loops train copies of the same
one. They take turns on one thread, and CPU seconds are compared (medians), so that whatever else the machine does hits
all alike.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from common import SHARED, machine, resnet20, say
from torch import nn

import rankwise as rw
from rankwise.data import splits
from rankwise.data.splits import Split
from rankwise.models import networks
from rankwise.surgery.replace import copy_model
from rankwise.training.loop import Hooks, retraining, train_
from rankwise.training.precision import fastest
from rankwise.training.processes import make_engine
from rankwise.training.recipes import RECIPES, change
from rankwise.training.teacher import ready

BATCH = 128
BEFORE = Path(__file__).with_name("retraining_before.py")
Loop = Callable[[], float]  # CPU seconds for a step


def loops_now(small: nn.Module, teacher: nn.Module, split: Split, steps: int) -> dict[str, Loop]:
    """One epoch over the split by the loop of today, each on a copy of the same network; recipe first in the name."""

    def loop(recipe: str, taught: bool, **changes: object) -> Loop:
        found = change(RECIPES[recipe], {"epochs": 1, "batch_size": BATCH, "augment": "cifar", "lr": 1e-3, **changes})
        quick = ready(teacher, torch.zeros(1, 3, 32, 32), found.layers) if taught else None

        def run() -> float:
            network, start = copy_model(small), time.process_time()
            train_(network, split, retraining(found), make_engine(found.precision), Hooks(teacher=quick))
            return (time.process_time() - start) / steps

        return run

    half = fastest()
    return {
        "taught, float32": loop("taught", True),
        f"taught, precision={half}": loop("taught", True, precision=half),
        f"taught, precision={half}, layers=0": loop("taught", True, precision=half, layers=0.0),
        f"distilled, precision={half}": loop("distilled", True, precision=half),
        "gentle, float32": loop("gentle", False),
        f"gentle, precision={half}": loop("gentle", False, precision=half),
    }


def loops_before(worker: subprocess.Popen[str]) -> dict[str, Loop]:
    """The same by the process that runs the other commit."""

    def loop(recipe: str) -> Loop:
        def run() -> float:
            assert worker.stdin is not None
            worker.stdin.write(f"{recipe}\n")
            worker.stdin.flush()
            return float(_line(worker))

        return run

    return {f"{recipe}, before": loop(recipe) for recipe in ("taught", "gentle")}


def _line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise SystemExit("the process of the other commit ended: its error is above")
    return line.strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", type=Path, default=SHARED / "weights" / "resnet20-cifar10.safetensors")
    parser.add_argument("--before", type=Path, required=True, metavar="OLD/src")
    parser.add_argument("--keep", type=float, default=0.25)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        given = [args.data, args.weights, folder, args.keep, args.steps]
        worker = subprocess.Popen(
            [sys.executable, str(BEFORE), *map(str, given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(args.before), "OMP_NUM_THREADS": "1"},
        )
        _line(worker)  # its network is there
        teacher = resnet20(args.weights)
        small = rw.load(folder, networks.build("resnet20"))
        split = splits.load(f"parquet:{args.data}", "fit").thin(BATCH * args.steps)
        loops = loops_before(worker) | loops_now(small, teacher, split, args.steps)
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for turn in range(args.turns + 1):
            for name, loop in loops.items():
                took = loop()
                if turn:  # the first turn warms up
                    seconds[name].append(took)
        worker.kill()
        worker.wait()
    say(f"ResNet20 at keep {args.keep}, batches of {BATCH}, {args.steps} steps, median of {args.turns}; {machine()}\n")
    say("| recipe | CPU ms for a step | images for a CPU second | times as many |\n| --- | ---: | ---: | ---: |")
    first = {name: median(times) for name, times in seconds.items() if name.endswith(", before")}
    for name, times in sorted(seconds.items(), key=lambda item: item[0].startswith("gentle")):
        old = first["gentle, before" if name.startswith("gentle") else "taught, before"]
        took = median(times)
        say(f"| {name} | {1000 * took:.0f} | {BATCH / took:.0f} | {old / took:.2f} |")


if __name__ == "__main__":
    main()
