"""Time of `pfp` on ResNet20 with 256 calibration images, in forward-backward passes over the same images.

    python benchmarks/pruning.py

One thread. Random images and weights: the work does not depend on them. Both are measured in turns, in one
run, and the median of each is taken.
"""

from __future__ import annotations

import statistics
import time

import torch
from common import machine, say
from torch.nn import functional as F

import rankwise as rw
from rankwise.models import networks
from rankwise.pruning.channels import find_channels
from rankwise.pruning.sensitivity import sensitivities

IMAGES, BATCH, ROUNDS, GOAL = 256, 128, 3, 10


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = networks.build("resnet20").eval()
    batches = list(torch.randn(IMAGES, 3, 32, 32).split(BATCH))
    example = batches[0][:1]

    def passes() -> None:
        for batch in batches:
            model.zero_grad()
            F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long)).backward()

    def look() -> None:
        channels = find_channels(model, example, rw.find_layers(model, example))
        sensitivities(model, batches, channels, channels.free)

    def whole() -> None:
        rw.compress(model, example, method="pfp", keep=0.6, data=batches)

    times: dict[str, list[float]] = {"pass": [], "look": [], "whole": []}
    rw.compress(model, example, method="pfp", keep=0.6, data=[example])  # imports torch-pruning
    for _ in range(ROUNDS):
        for name, run in (("pass", passes), ("look", look), ("whole", whole)):
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    one, looked, all_of_it = (statistics.median(times[name]) for name in ("pass", "look", "whole"))
    say(f"resnet20, {IMAGES} images, n = {ROUNDS} rounds; {machine()}")
    say(f"  a forward-backward pass {one:.2f} s")
    say(f"  graph, trials and sensitivities {looked:.2f} s: {looked / one:.1f} passes")
    say(f"  pfp from model to smaller model {all_of_it:.2f} s: {all_of_it / one:.1f} passes")
    if all_of_it > GOAL * one:
        raise SystemExit(f"below the goal: pfp took {all_of_it / one:.1f} passes, and {GOAL} are allowed")


if __name__ == "__main__":
    main()
