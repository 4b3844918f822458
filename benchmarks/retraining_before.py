"""The loop of another commit, for benchmarks/retraining.py: it runs with that commit's source and this file only.

    PYTHONPATH=OLD/src python benchmarks/retraining_before.py FOLDER WEIGHTS OUT KEEP STEPS

Names are those of commit 04fae5f, whose package had no rooms. It compresses ResNet20 by weight energy, saves it in OUT,
and then, for every line on its input (the name of a recipe), trains a copy for one epoch of so many steps and prints
the CPU seconds that a step took. The recipe `taught` has a teacher, others have none.
"""

from __future__ import annotations

import sys
import time
from copy import deepcopy
from pathlib import Path

import torch

import rankwise as rw
from rankwise import data, networks
from rankwise.engine import make_engine
from rankwise.recipes import RECIPES, change
from rankwise.train import Hooks, retraining, train_

BATCH = 128


def main() -> None:
    folder, weights, out, keep, steps = sys.argv[1:]
    torch.set_num_threads(1)
    teacher = networks.build("resnet20")
    networks.load_weights_(teacher, Path(weights))
    small, plan = rw.compress(teacher.eval(), torch.zeros(1, 3, 32, 32), keep=float(keep), error="energy")
    rw.save(small, plan, out)
    split = data.load(f"parquet:{folder}", "fit").thin(BATCH * int(steps))
    print("ready", flush=True)
    for line in sys.stdin:
        recipe = change(RECIPES[line.strip()], {"epochs": 1, "batch_size": BATCH, "augment": "cifar"})
        start = time.process_time()
        hooks = Hooks(teacher=teacher if recipe.name == "taught" else None)
        train_(deepcopy(small), split, retraining(recipe), make_engine(recipe.precision), hooks)
        print((time.process_time() - start) / int(steps), flush=True)


if __name__ == "__main__":
    main()
