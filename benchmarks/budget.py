"""A new budget on a ready resnet18 table: time of every search, for each set of folds; and two large searches.

    python benchmarks/budget.py          # all
    python benchmarks/budget.py large    # only the searches of large made-up networks

CPU seconds of the large ones at commit 04fae5f: `product` 53, `sum` 18.6.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
import torch
from common import machine, resnet18, say

import rankwise as rw
from rankwise.core.measures import Curve
from rankwise.core.option import Option
from rankwise.planning.knapsack import least_sum
from rankwise.planning.menu import Menu, Offer, Point
from rankwise.planning.minimax import Solution, minimax
from rankwise.planning.walks import penalty, product

KEEPS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


LARGE = ((100, 1000), (224, 2000))  # layers, ranks


def made_up(layers: int, ranks: int, options: int, seed: int = 0) -> list[Menu]:
    """Falling spectra with noise, `options` numbers of slices for each layer, costs in multiples of different units."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(layers):
        filters, channels = (int(n) for n in rng.integers(ranks, 3 * ranks, 2))
        weight, decay, offers = 10 ** rng.uniform(-3, 0), rng.uniform(0.2, 1.2), []
        for k in (2**k for k in range(options)):
            full = ranks // k
            spectrum = np.sort(np.arange(1, full + 1) ** -decay * rng.lognormal(0, 0.3, full))[::-1]
            tail = np.append(np.cumsum(spectrum[::-1] ** 2)[::-1], 0.0)
            unit = channels + filters * k
            curve = weight * tail / tail[0]
            most = min(full, (filters * channels - 1) // unit)
            offers.append(Offer(Option("f│c", k), unit * np.arange(full + 1)[:, None], Curve(curve, curve), most))
        dense = Point((filters * channels,), 0.0, None, 0)
        found.append(Menu(rw.Layer(str(i), "Linear", channels, filters), tuple(offers), dense))
    return found


def large() -> None:
    """CPU seconds of searches through every rank, fronts included; each must stay below 1."""
    say("made-up networks: CPU seconds, median and largest of n = 9 (three keeps, 1, 2 and 4 options), largest gap")
    slowest = 0.0
    for layers, ranks in LARGE:
        for search in (minimax, penalty, product, least_sum):
            spent, gaps = [], []
            for options in (1, 2, 4):
                for keep in (0.3, 0.5, 0.7):
                    menus = made_up(layers, ranks, options)
                    room = int(keep * sum(m.dense.cost[0] for m in menus))
                    start = time.process_time()
                    solution: Solution | None = search(menus, [room])
                    spent.append(time.process_time() - start)
                    gaps.append((solution.gap if solution else None) or 0.0)
            say(
                f"  {layers} layers × {ranks} ranks  {search.__name__:9}  median {statistics.median(spent):.3f}  "
                f"largest {max(spent):.3f}" + (f"  gap {max(gaps):.1e}" if search is least_sum else "")
            )
            slowest = max(slowest, *spent)
    if slowest > 1:
        raise SystemExit(f"below the goal: a large search took {slowest:.1f} CPU seconds, and 1 is allowed")


def main() -> None:
    if sys.argv[1:] == ["large"]:
        large()
        return
    model = resnet18()
    start = time.perf_counter()
    table = rw.build_table(model, torch.zeros(1, 3, 224, 224))
    build = time.perf_counter() - start
    say(f"resnet18, table in {build:.1f} s; {machine()}")
    say(f"milliseconds for a new budget, n = {len(KEEPS)} keeps: first, then median and largest of the others")
    slowest = 0.0
    for search in ("minimax", "sum", "alternate"):
        for folds in ((0,), (3,), (0, 3), "all"):
            for error in ("max", "energy"):
                times = []
                for keep in KEEPS:
                    start = time.perf_counter()
                    rw.allocate(table, rw.Budget(params=keep), method="auto", search=search, error=error, folds=folds)
                    times.append(1000 * (time.perf_counter() - start))
                say(
                    f"  {search:9} folds {folds!s:6} {error:6}  first {times[0]:7.1f}  median "
                    f"{statistics.median(times[1:]):7.1f}  largest {max(times[1:]):7.1f}"
                )
                if search == "minimax":
                    slowest = max(slowest, *times[1:])
    for budget in (rw.Budget(macs=0.5), rw.Budget(params=0.5, macs=0.5)):
        for _ in range(2):
            start = time.perf_counter()
            rw.allocate(table, budget, method="auto", search="minimax")
            spent = 1000 * (time.perf_counter() - start)
        say(f"  minimax   folds all    energy  {budget}: {spent:.1f}")
    if slowest > 50:
        raise SystemExit(f"below the goal: a new budget with minimax took {slowest:.0f} ms, and 50 are allowed")
    large()


if __name__ == "__main__":
    main()
