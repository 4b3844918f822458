"""Training throughput against a bare hand-written loop, and the share of augmentation, in one run.

    python benchmarks/training.py --data FOLDER [--threads 2] [--network resnet20]

FOLDER holds {train,test}.parquet of CIFAR-10. The three loops take turns, so that whatever else the machine does hits
all alike; medians are compared. The bare loop has no augmentation, no shuffling by seed, no records: its images
are floats that were normalised before the clock started.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from common import machine, say
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.data import splits
from rankwise.data.batches import Feed
from rankwise.models import networks
from rankwise.training.loop import Hooks, train_, training
from rankwise.training.processes import make_engine
from rankwise.training.recipes import RECIPES, change

BATCH, STEPS, TURNS = 128, 12, 5


def bare(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """What one writes by hand."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for images, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--network", default="resnet20")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    split = splits.load(f"parquet:{args.data}", "test").thin(BATCH * STEPS)  # only its pixels' shape matters here
    x, y = split.normalise(split.pixels(torch.arange(len(split)))), split.labels
    last = x.contiguous(memory_format=torch.channels_last)
    recipe = change(RECIPES["paper:resnet20"], {"epochs": 1, "warmup": 0.0, "batch_size": BATCH})
    engine = make_engine()

    def ours() -> None:
        train_(networks.build(args.network), split, training(recipe), engine, Hooks())

    loops = {
        "bare loop": lambda: bare(networks.build(args.network), x, y),
        "bare loop, channels last": lambda: bare(
            networks.build(args.network).to(memory_format=torch.channels_last), last, y
        ),
        "rankwise, augmented": ours,
    }
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(TURNS + 1):
        for name, loop in loops.items():
            start = time.perf_counter()
            loop()
            if turn:  # the first turn warms up
                seconds[name].append((time.perf_counter() - start) / STEPS)
    feed = Feed(split, BATCH, "cifar")
    views = []
    for _ in range(TURNS):
        start = time.perf_counter()
        for images, _ in feed.epoch(0):
            split.normalise(images)
        views.append((time.perf_counter() - start) / STEPS)
    say(f"{args.network}, batches of {BATCH}, {STEPS} steps, median of {TURNS} turns; {machine()}\n")
    say("| loop | ms for a step | images/s |\n| --- | ---: | ---: |")
    for name, times in seconds.items():
        say(f"| {name} | {1000 * median(times):.1f} | {BATCH / median(times):.0f} |")
    mine = median(seconds["rankwise, augmented"])
    for name in list(loops)[:2]:
        say(f"\nrankwise takes {100 * (mine / median(seconds[name]) - 1):+.1f} % of time against the {name}")
    share = 100 * median(views) / mine
    say(f"\naugmenting and normalising a batch takes {1000 * median(views):.2f} ms: {share:.1f} % of a step")


if __name__ == "__main__":
    main()
