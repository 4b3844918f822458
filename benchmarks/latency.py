"""Time as a budget: what was asked for, predicted and measured, as Markdown tables.

    python benchmarks/latency.py [--only NETWORK] [--data FOLDER] [--weights FILE] [--threads 2] [--batch 32]
                                 [--latency 0.4 …] [--keep 0.8 …] [--exclude PATTERN …]

For ResNet20, resnet18, vgg16_bn and mobilenet_v2: how long measuring takes, plans for budgets in latency and for
never_slower at keeps from 0.9 to 0.2, each timed in turns with the dense network as torch builds it (medians). What
laying the dense network out with channels last, and folding its norms, would give stands above each table.
Weights of the torchvision networks are seeded and random: shapes are what is timed, and `auto` plans by weight energy
there.

FOLDER holds {train,test}.parquet of CIFAR-10. With it ResNet20 is planned and fitted by `auto` on 1,024 training images
without labels, and compared on the test images with every plan of alds, svd, svd-energy and pca that is as fast.
Nothing is chosen by looking at the test set, except in favour of the others: of each the best plan counts.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import SHARED, machine, say
from torch import nn

import rankwise as rw
from rankwise.calibration.effect_table import effect_table
from rankwise.calibration.fit import apply_fitted
from rankwise.calibration.inputs import find_inputs
from rankwise.data import splits
from rankwise.decompositions import FITTED, PLAIN
from rankwise.methods import AUTO
from rankwise.models import networks
from rankwise.planning.planner import find_plan
from rankwise.surgery.fuse import find_norms, fuse_norms
from rankwise.surgery.layout import lay_out_
from rankwise.surgery.replace import copy_model
from rankwise.timing.clock import time_networks
from rankwise.timing.tune import settle, shaped
from rankwise.training.evaluate import evaluate

KEEPS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
LATENCIES = (0.8, 0.7, 0.6, 0.5, 0.4)
OTHERS = ("alds", "svd", "svd-energy", "pca")
IMAGES = 1024


@dataclass(frozen=True)
class Network:
    spec: str
    side: int
    budget: dict[str, float]  # of the acceptance row
    limit: float


NETWORKS = {
    "resnet20": Network("resnet20", 32, {"latency": 0.7}, 0.70),
    "resnet18": Network("torchvision:resnet18", 224, {"latency": 0.6}, 0.62),
    "vgg16_bn": Network("torchvision:vgg16_bn", 224, {"latency": 0.4}, 0.42),
    "mobilenet_v2": Network("torchvision:mobilenet_v2", 224, {"params": 0.8}, 1.00),
}


class Bench:
    """One network with its times and a table to plan from."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.about = name, NETWORKS[name]
        warmup = min(2, args.repeats - 2) if args.repeats > 2 else 1
        self.timing = rw.Timing(args.batch, args.threads, args.layout, repeats=args.repeats, warmup=warmup)
        torch.manual_seed(0)
        self.model = networks.build(self.about.spec).eval()
        if name == "resnet20" and args.weights.is_file():
            networks.load_weights_(self.model, args.weights)
        self.example = torch.randn(1, 3, self.about.side, self.about.side)
        self.coverage = rw.find_layers(self.model, self.example, args.exclude)
        self.latencies, self.keeps, self.cache = args.latency, args.keep, args.cache
        self.times: dict[bool, rw.Times] = {}
        self.settings, self.inputs, self.influence = AUTO, None, {}
        if name == "resnet20" and args.data:
            self.settings = replace(self.settings, error="effect", decompositions=(*FITTED, PLAIN.name))
            self.inputs = find_inputs(self.model, None, splits.load(f"parquet:{args.data}", "fit").thin(IMAGES), None)
            self.table, self.influence = effect_table(self.model, self.coverage, self.settings, self.inputs)
        else:
            self.table = rw.build_table(self.model, self.example, exclude=args.exclude)

    def times_of(self, fuse: bool) -> rw.Times:
        if fuse not in self.times:
            start = time.perf_counter()
            given = (self.model, self.example, self.timing, self.coverage)
            self.times[fuse] = rw.measure_times(*given, cache=self.cache, fuse=fuse)
            took = time.perf_counter() - start
            say(f"Measuring took {took:.0f} s, norms {'folded' if fuse else 'kept'}.")
        return self.times[fuse]

    def plan(self, fuse: bool, never_slower: bool = False, **budget: float) -> rw.Plan | None:
        self.table.times = self.times_of(fuse)
        settings = replace(self.settings, never_slower=never_slower)
        try:
            asked = rw.Budget(**budget)
            if asked.latency is None:
                return find_plan(self.table, asked, settings, "auto", self.name)
            return settle(
                asked,
                lambda b: find_plan(self.table, b, settings, "auto", self.name),
                self.model,
                self.example,
                self.timing,
                fuse,
            )
        except rw.RankwiseError as err:
            say(f"{self.name}, {budget}: {err}\n")
            return None

    def finished(self, small: nn.Module, fuse: bool, layout: str | None) -> nn.Module:
        small = fuse_norms(small, find_norms(small, self.example)) if fuse else small
        lay_out_(small, layout)
        return small

    def measure(self, small: nn.Module) -> tuple[float, float, float]:
        """Median time of the network ÷ that of the dense one, and both spreads."""
        dense, ours = time_networks([self.model, small], self.example, self.timing, least=3.0)
        return ours.median / dense.median, dense.spread, ours.spread


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=list(NETWORKS), action="append")
    parser.add_argument("--data", help="folder with {train,test}.parquet of CIFAR-10")
    parser.add_argument("--weights", type=Path, default=SHARED / "weights" / "resnet20-cifar10.safetensors")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--layout", default="contiguous", help="of the dense network and its inputs")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--cache", help="folder for measured times; default: a fresh one, so that measuring is measured"
    )
    parser.add_argument("--exclude", nargs="*", default=(), help="layers that are left alone")
    parser.add_argument("--latency", type=float, nargs="*", default=LATENCIES)
    parser.add_argument("--keep", type=float, nargs="*", default=KEEPS)
    args = parser.parse_args()
    if args.cache is None:
        import tempfile

        args.cache = tempfile.mkdtemp()
    torch.set_num_threads(args.threads)
    say(f"batch {args.batch}, {args.layout}, medians of {args.repeats} in turns, dense = 1.00; {machine()}\n")
    accepted: list[str] = []
    for name in args.only or NETWORKS:
        bench = Bench(name, args)
        say(f"## {name}\n")
        for fuse in (*[True] * bool(args.latency), *[False] * bool(args.keep)):
            bench.times_of(fuse)
        for fuse, layout in ((False, "channels-last"), (True, None), (True, "channels-last")):
            took = bench.measure(bench.finished(copy_model(bench.model), fuse, layout))[0]
            say(
                f"The dense network{', norms folded' if fuse else ''}{', channels last' if layout else ''}: {took:.2f}."
            )
        say("")
        accepted += _tables(bench)
        if name == "resnet20" and args.data:
            _accuracy(bench, args)
    say("## Acceptance\n\n| network | budget | predicted | measured | at most | spread dense, compressed |")
    say("| --- | --- | ---: | ---: | ---: | --- |")
    say("\n".join(accepted))


def _tables(bench: Bench) -> list[str]:
    """Plans by latency (norms folded) and by params, never slower (norms kept); gives the acceptance row."""
    say("| budget | params | macs | pairs | slower pairs | predicted | measured | off |")
    say("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    asked: list[tuple[bool, dict[str, Any]]] = [(True, {"latency": v}) for v in bench.latencies]
    asked += [(False, {"params": k, "never_slower": True}) for k in bench.keeps]
    row: list[str] = []
    for fuse, budget in asked:
        plan = bench.plan(fuse, **budget)
        if plan is None:
            continue
        measured, dense, ours = bench.measure(shaped(bench.model, plan, bench.example, fuse))
        text = f"{plan.budget}{', never slower' if not fuse else ', folded'}"
        say(
            f"| {text} | {plan.keep():.3f} | {plan.keep('macs'):.3f} | {len(plan.choices)} "
            f"| {len(plan.search.latency.slower)} | {plan.keep('latency'):.3f} | {measured:.3f} "
            f"| {100 * (plan.keep('latency') / measured - 1):+.0f} % |"
        )
        for ask, told, took in plan.search.latency.rounds or ():
            say(f"| … asked for {ask:.3f} | | | | | {told:.3f} | {took:.3f} | {100 * (told / took - 1):+.0f} % |")
        if {u: v for u, v in budget.items() if u != "never_slower"} == bench.about.budget:
            row.append(
                f"| {bench.name} | {text} | {plan.keep('latency'):.3f} | {measured:.3f} | {bench.about.limit:.2f} "
                f"| ±{50 * dense:.0f} %, ±{50 * ours:.0f} % |"
            )
    say("")
    return row


def _accuracy(bench: Bench, args: argparse.Namespace) -> None:
    """auto at the acceptance budget against every plan of the other methods that is as fast, norms folded in all."""
    test = splits.load(f"parquet:{args.data}", "test")
    base = evaluate(bench.model, test).top1
    say(f"n = {len(test):,} test images, before: {base:.2f} %; all with batch norms folded and in the same layout\n")
    say("| method | asked | params | macs | measured | change in top-1 |\n| --- | --- | ---: | ---: | ---: | ---: |")
    plan = bench.plan(True, **bench.about.budget)
    assert plan is not None
    assert bench.inputs is not None
    small = bench.finished(apply_fitted(bench.model, plan, bench.inputs, bench.influence), True, plan.layout)
    measured = bench.measure(small)[0]
    limit, layout = max(measured, bench.about.limit), plan.layout
    _row("auto", plan, measured, evaluate(small, test).top1 - base)
    for method in OTHERS:
        given = {"data": bench.inputs} if method == "pca" else {}
        for keep in (0.95, *KEEPS, 0.1):
            try:
                small, plan = rw.compress(bench.model, bench.example, method=method, keep=keep, **given)
            except rw.RankwiseError:
                continue
            small = bench.finished(small, True, layout)
            measured = bench.measure(small)[0]
            change = evaluate(small, test).top1 - base if measured <= limit else None
            _row(method, plan, measured, change)
    say("")


def _row(method: str, plan: rw.Plan, measured: float, change: float | None) -> None:
    shown = "slower" if change is None else f"{change:+.2f}"
    say(f"| {method} | {plan.budget} | {plan.keep():.3f} | {plan.keep('macs'):.3f} | {measured:.3f} | {shown} |")


if __name__ == "__main__":
    main()
