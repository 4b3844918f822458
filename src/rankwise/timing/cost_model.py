"""The cost model: how long every layer of a network takes on this machine, as it is and decomposed, by rank.

Everything is timed inside the network, where caches hold what they will hold: all layers are replaced by pairs (or
cores, …) at once, each by one of its options at one rank, the network runs with a clock around every layer, and so one
run tells of as many pairs as there are layers. About a hundred such networks tell enough (candidates.py) to say what
all other options take (planning/times.py):

    seconds of a pair = seconds of the layer · (pair ÷ layer, both on a batch that may be smaller)

The least of all runs counts: whatever else runs on a machine only ever adds time. What was measured is kept on disk
(cache.py), with the conditions under which it was measured (load.py).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from rankwise.core.layer import Coverage, Layer
from rankwise.core.option import Option
from rankwise.decompositions import PLAIN, of
from rankwise.errors import RankwiseError
from rankwise.planning.table import Progress
from rankwise.planning.times import MARGIN, Samples, Times
from rankwise.surgery.coverage import find_layers
from rankwise.surgery.forward import Example
from rankwise.surgery.fuse import find_norms, fuse_norms
from rankwise.surgery.layout import lay_out_, other_layout
from rankwise.surgery.pairs import build_pair
from rankwise.surgery.replace import copy_model, swap_modules_
from rankwise.timing.cache import Store, machine, place
from rankwise.timing.candidates import candidates, kinds
from rankwise.timing.clock import (
    Measured,
    Run,
    Timing,
    device_of,
    inputs_for,
    on_threads,
    once,
    ready_to_run,
    split_once,
    split_seconds,
    time_networks,
)
from rankwise.timing.load import conditions

SECONDS = 100.0  # to spend on the pairs of one network
TRIAL = 20  # part of that time to compare the network as it is with the one that will be decomposed
RUNS = 350  # of the network: batches are cut until so many fit into that time, …
FEWEST = 16  # … but not below so many inputs: larger tensors are slower than their size says
SLOW = 1.0  # seconds: of a network that takes longer one run counts, not two
PASSES = 3  # over all pairs, as long as there is time
COUNT = 2  # runs of a network that count, after one that does not
OFTEN = 8  # networks of pairs between two runs of the network as it is
HOPELESS = 1.2  # an option so much slower than the layer at half of its macs is not looked at further

Cell = tuple[Option, int]  # an option at a rank


class MeasureOptions(TypedDict, total=False):
    """What `measure_times` takes beside the network and how to time it."""

    cache: str | Path | None  # the folder that keeps measurements
    seconds: float | None  # to spend on pairs, about
    fuse: bool  # time the network with its batch norms folded


def measure_times(
    model: nn.Module,
    example: Example | None,
    timing: Timing | None = None,
    coverage: Coverage | None = None,
    progress: Progress | None = None,
    **options: Unpack[MeasureOptions],
) -> Times:
    """Times of the network, its layers and their pairs, for budgets in latency.

    Layers and pairs are timed in the network as it will be. With `fuse=True` its batch norms are folded. Where channels
    last are faster, its weights have that layout (`Times.layout`). Budgets are fractions of the network as it is.

    Args:
        model: the network.
        example: an input.
        timing: batch size, threads, layout; see `Timing`.
        coverage: what `find_layers` gave, if that is known.
        progress: called with a name, how many are done, and how many there are.
        options: `cache=` the folder to keep measurements in ($RANKWISE_CACHE or ~/.cache/rankwise unless given);
            `seconds=` to spend on pairs, about; `fuse=`. See `MeasureOptions`.

    Returns:
        `Times`, for `table.times`.

    >>> import tempfile, torch, rankwise as rw
    >>> from torch import nn
    >>> model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(8, 64)
    >>> table = rw.build_table(model, x, slices=1)
    >>> table.times = rw.measure_times(model, x, rw.Timing(threads=1), cache=tempfile.mkdtemp(), seconds=0.2)
    >>> table.times.total > 0
    True
    """
    unknown = sorted(set(options) - set(MeasureOptions.__annotations__))
    if unknown:
        known = ", ".join(f"{name}=" for name in MeasureOptions.__annotations__)
        raise RankwiseError(
            f"unknown keyword {unknown[0]!r}: measure_times takes timing=, coverage=, progress=, {known}"
        )
    cache, seconds, fuse = options.get("cache"), options.get("seconds") or SECONDS, options.get("fuse", False)
    timing = timing or Timing()
    if timing.compiled:
        raise RankwiseError("layers are timed eagerly, and timing with compiled=True was asked for: leave it out")
    coverage = coverage or find_layers(model, example)
    with on_threads(timing.threads), torch.inference_mode():
        store = Store(place(cache, torch.get_num_threads()))
        key = _key(model, example, timing, coverage, fuse)
        if key not in store.known:
            store.known[key] = _measure(model, example, timing, coverage, progress, seconds, fuse)
            store.save()
    found = store.known[key]
    how = {**timing.to_json(), "fuse": fuse, "machine": machine(), **found["conditions"]}
    pairs, others = _samples(found["forms"])
    return Times(found["beside"], found["layers"], pairs, how, found["whole"], found["layout"], others)


def _samples(
    forms: Mapping[str, Mapping[str, list[list[float]]]],
) -> tuple[dict[tuple[str, str, int], Samples], dict[tuple[str, str, int], Samples]]:
    """Pairs by (layer, fold, slices), and others by (layer, what they are timed as, outer rank)."""
    pairs, others = dict[tuple[str, str, int], Samples](), dict[tuple[str, str, int], Samples]()
    for name, options in forms.items():
        for form, rows in options.items():
            timed_as, fold, slices, outer = form.split("/")
            samples = tuple(int(rank) for rank, _ in rows), tuple(float(took) for _, took in rows)
            if timed_as == PLAIN.timed_as:
                pairs[name, fold, int(slices)] = samples
            else:
                others[name, timed_as, int(outer)] = samples
    return pairs, others


def _form(option: Option) -> str:
    """What an option is timed as, in a file."""
    return f"{of(option).timed_as}/{option.fold}/{option.slices}/{option.outer}"


def _key(model: nn.Module, example: Example | None, timing: Timing, coverage: Coverage, fuse: bool) -> str:
    args, kwargs = inputs_for(model, example, timing)
    shapes = [tuple(getattr(value, "shape", ())) for value in (*args, *kwargs.values())]
    lies = other_layout(model)
    where = (device_of(model), timing.layout, lies, _dtype(model))
    parts = (repr(model), shapes, *where, coverage.layers, fuse, kinds())
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()


def _measure(
    model: nn.Module,
    example: Example | None,
    timing: Timing,
    coverage: Coverage,
    progress: Progress | None,
    seconds: float,
    fuse: bool,
) -> dict[str, Any]:
    """{"whole": seconds of the network as it is, "layout", "beside" and "layers" of it as it will be,
    "forms": those of what may stand in for each layer, as `_form` calls it, by rank, and "conditions"}.
    """
    if progress:
        progress("the network", 0, 1)
    names = [layer.name for layer in coverage.layers]
    layouts: list[str | None] = [None]
    if timing.layout == "contiguous" and (other := other_layout(model)) is not None:
        layouts.append(other)
    plain = fuse_norms(model, find_norms(model, example)) if fuse else model
    ready = [ready_to_run(_laid_out(plain, layout), example, timing) for layout in layouts]
    ready += [ready_to_run(model, example, timing)] if fuse else []
    splits = split_seconds(ready, names, timing)
    totals = [rest + sum(layers.values()) for rest, layers in splits]
    best = 1 if len(layouts) > 1 and totals[1] < MARGIN * totals[0] else 0
    network = _laid_out(plain, layouts[best])
    whole = totals[-1] if fuse else totals[0]
    scale = 1.0
    if network is not model:
        # Clocks take time themselves, and the least of some runs is not their median: how the two networks compare is
        # measured without.
        as_it_is, as_it_will_be = time_networks([model, network], example, timing, seconds / TRIAL)
        scale = whole * as_it_will_be.median / as_it_is.median / totals[best]
    beside, layers = splits[best][0] * scale, {name: took * scale for name, took in splits[best][1].items()}
    called = [layer for layer in coverage.layers if layer.name in layers]
    layout = layouts[best] or ("channels-last" if timing.layout == "channels-last" else None)
    rig = _Rig(*_short(network, example, timing, seconds), called, layout)
    rig.explore(seconds, progress)
    forms: dict[str, dict[str, list[list[float]]]] = {}
    for (name, cell), took in sorted(rig.best.items(), key=lambda one: one[0][1][1] if one[0][1] else 0):
        if cell is not None:
            scaled = layers[name] * took / rig.best[name, None]
            forms.setdefault(name, {}).setdefault(_form(cell[0]), []).append([cell[1], scaled])
    seen = conditions([Measured(tuple(rig.whole))]).to_json()
    found = {"whole": whole, "layout": layouts[best], "beside": beside, "layers": layers}
    return {**found, "forms": forms, "conditions": seen}


def _laid_out(model: nn.Module, layout: str | None) -> nn.Module:
    if layout is None:
        return model
    network = copy_model(model)
    lay_out_(network, layout)
    return network


def _short(network: nn.Module, example: Example | None, timing: Timing, seconds: float) -> tuple[nn.Module, Run]:
    """A copy of the network, and a run of it on a batch that is small enough to be run often."""
    args, kwargs = inputs_for(network, example, timing)
    batch = min((len(v) for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.ndim), default=1)
    while True:
        ready, run = ready_to_run(network, example, replace(timing, batch=batch))
        run()
        if batch // 2 < FEWEST or min(once(run, device_of(ready)) for _ in range(2)) <= seconds / RUNS:
            return ready, run
        batch //= 2


class _Rig:
    """A network whose layers are swapped for pairs and back, with a clock around every layer."""

    def __init__(self, network: nn.Module, run: Run, layers: list[Layer], layout: str | None) -> None:
        self.network, self.run, self.layers, self.layout = network, run, layers, layout
        self.best: dict[tuple[str, Cell | None], float] = {}  # least seconds of a layer, as a pair or (None) as it is
        self.whole: list[float] = []  # seconds of the network as it is, run by run

    def explore(self, seconds: float, progress: Progress | None) -> None:
        """Every option of every layer at half of its macs, and those that are not hopeless at other ranks too.

        One of every kind is timed however short the time is: a kind without times could not be chosen.
        """
        start = time.monotonic()
        every = {layer.name: candidates(layer) for layer in self.layers}
        first = {
            name: [(option, min(ranks, key=lambda r: abs(r - ranks[0] / 2))) for option, ranks in options]
            for name, options in every.items()
        }
        self.once_over(first, start + seconds / 2, progress, least=len(kinds()))
        cells: dict[str, list[Cell]] = {}
        for name, options in every.items():
            for (option, ranks), middle in zip(options, first[name], strict=True):
                if self.best.get((name, middle), math.inf) <= HOPELESS * self.best[name, None]:
                    cells.setdefault(name, []).extend((option, rank) for rank in ranks)
        for turn in range(PASSES):
            if turn and time.monotonic() > start + seconds:
                break
            self.once_over(cells, start + seconds * (1 if turn else 1.5), progress)

    def once_over(self, cells: Mapping[str, list[Cell]], end: float, progress: Progress | None, least: int = 0) -> None:
        """Networks in which every layer is in its first cell, its second, …; and often the network as it is."""
        count = max(map(len, cells.values()), default=0)
        for at in range(count):
            if at % OFTEN == 0:
                self.turn({})
            if at >= least and time.monotonic() > end:
                break
            if progress:
                progress("", at, count)
            self.turn({name: given[at] for name, given in cells.items() if at < len(given)})

    def turn(self, cells: Mapping[str, Cell]) -> None:
        """Time the network with these layers in these cells; without any, all layers as they are."""
        swap: dict[nn.Module, nn.Module] = {}
        for layer in self.layers:
            if layer.name in cells:
                old = self.network.get_submodule(layer.name)
                swap[old] = _pair(layer, *cells[layer.name], old, self.layout)
        swap_modules_(self.network, swap)
        names = [layer.name for layer in self.layers if layer.name in cells or not cells]
        try:
            for turn in range(1 + COUNT):
                rest, spent = split_once(self.network, self.run, names)
                if turn and not cells:
                    self.whole.append(rest + sum(spent.values()))
                for name, took in spent.items() if turn else ():
                    key = (name, cells.get(name))
                    self.best[key] = min(self.best.get(key, math.inf), took)
                if turn and rest + sum(spent.values()) > SLOW:
                    break
        finally:
            swap_modules_(self.network, {new: old for old, new in swap.items()})


def _pair(layer: Layer, option: Option, rank: int, old: nn.Module, layout: str | None) -> nn.Module:
    """With weights of such a size that numbers stay what they are: tiny ones may be slow to compute with."""
    pair = build_pair(layer, option, rank, old)
    for tensor in pair.parameters():
        tensor.data.normal_(std=(tensor[0].numel() or 1) ** -0.5)
    lay_out_(pair, layout)
    return pair


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
