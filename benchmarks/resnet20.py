"""Every method on the pretrained CIFAR-10 ResNet20, compress only, full test set.

    python benchmarks/resnet20.py --data FOLDER --weights FILE [--only METHOD]

FOLDER holds {train,test}.parquet of CIFAR-10. Nothing is chosen by looking at the test set: every row is
a method of the registry with settings that its name says. Calibration is on training images.
"""

from __future__ import annotations

import time

import torch
from common import machine, resnet20, resnet20_arguments, say

import rankwise as rw
from rankwise.data import splits
from rankwise.pruning.filters import Filters
from rankwise.training.evaluate import evaluate

BUDGETS = (("params", 15), ("params", 25), ("params", 40), ("params", 60), ("macs", 25), ("macs", 50))  # % removed
CALIBRATION = 256  # training images
ROWS = (
    ("svd", "svd", {}),
    ("svd-energy", "svd-energy", {}),
    ("svd-error", "svd-error", {}),
    ("l-rank", "l-rank", {}),
    ("pca, 256 training images", "pca", {}),
    ("ft", "ft", {}),
    ("ft, shortcuts left alone", "ft", {"exclude": "conv1"}),
    ("pfp, 256 training images", "pfp", {}),
    ("pfp, 256 training images, shortcuts left alone", "pfp", {"exclude": "conv1"}),
    ("pfp, minimax, 256 training images", "pfp", {"search": "minimax"}),
    ("tucker2", "tucker2", {}),
    ("cp", "cp", {}),
    ("messi, k = 3", "messi", {}),
    ("messi, k = 3, `kmeans`", "messi", {"clustering": "kmeans"}),
    ("messi, k = 3, `projective-robust`", "messi", {"clustering": "projective-robust"}),
    ("alds-simple, k = 3", "alds-simple", {}),
    ("alds-simple, k = 5", "alds-simple", {"slices": 5}),
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
    ('auto with `error="energy"` (Σ `energy`, four folds, weights alone)', "auto", {"error": "energy"}),
)


def main() -> None:
    parser = resnet20_arguments()
    parser.add_argument(
        "--only", action="append", choices=sorted(rw.METHODS), help="rows of this method; may be repeated"
    )
    args = parser.parse_args()
    model = resnet20(args.weights)
    test = splits.load(f"parquet:{args.data}", "test")
    base = evaluate(model, test).top1
    example = torch.zeros(1, 3, 32, 32)
    table = rw.build_table(model, example, slices="all")
    fixed = {k: rw.build_table(model, example, folds=(0,), slices=k) for k in (3, 5)}
    images = splits.load(f"parquet:{args.data}", "train").thin(CALIBRATION)
    start = time.perf_counter()
    seen = rw.build_table(model, example, folds=(0,), slices=1, data=images)
    looked = time.perf_counter() - start
    say(f"n = {len(test):,} test images, before: {base:.2f} %; {machine()}; statistics for pca took {looked:.1f} s\n")
    names = {"params": "CR-P", "macs": "CR-F"}
    head = " | ".join(f"{names[unit]} {r} %" for unit, r in BUDGETS)
    say(f"| method | {head} | seconds to plan and build |\n| --- |{' ---: |' * (len(BUDGETS) + 1)}")
    for title, method, changes in ROWS:
        if args.only and method not in args.only:
            continue
        settings = rw.METHODS[method].settings
        k = changes.get("slices", getattr(settings, "slices", 1))
        cells, seconds = [], []
        source = seen if method == "pca" else fixed.get(k, table)
        for unit, removed in BUDGETS:
            start = time.perf_counter()
            budget = rw.Budget(**{unit: 1 - removed / 100})
            if isinstance(settings, Filters) or settings.decompositions[0] in ("messi", "tucker2", "cp"):
                # Everything is part of the time: graph, trials and scores, clusters, both modes, alternation.
                small, plan = rw.compress(model, example, method, budget.params, budget.macs, data=images, **changes)
            else:
                plan = rw.allocate(source, budget, method=method, model="resnet20", **changes)
                small = rw.apply_plan(model, plan, source.moments)
            seconds.append(time.perf_counter() - start)
            change = evaluate(small, test).top1 - base
            cut = [f"{100 * (1 - plan.keep(u)):.1f}" for u in names]
            cells.append(f"{change:+.2f} ({' / '.join(cut)})")
        say(f"| {title} | {' | '.join(cells)} | {min(seconds):.2f}–{max(seconds):.2f} |")


if __name__ == "__main__":
    main()
