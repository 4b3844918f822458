"""The cost model: how long every layer of a network takes on this machine, as it is and as a pair, by rank.

Where the network's time goes is timed in the network itself: every layer between two looks at the clock, and the rest.
How much faster a pair is than its layer is timed beside it, in turns with the layer, on inputs of the same shape:

    seconds of a pair = seconds of the layer in the network · (pair ÷ layer, beside it)

Layers of the same kind, shape and input are timed once; of each a few ranks of a few options. The least of all turns
counts: whatever else runs on a machine only ever adds time. Encoders with many groups are slow nearly everywhere and
are not tried. What was measured is kept on disk (times_file.py).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.cost import Option, costs, options_for
from rankwise.coverage import find_layers
from rankwise.errors import RankwiseError
from rankwise.fuse import find_norms, fuse_norms
from rankwise.latency import (
    Run,
    Timing,
    device_of,
    in_layout,
    on_threads,
    once,
    ready_to_run,
    shapes_seen,
    split_seconds,
)
from rankwise.layer import LINEAR_KINDS, Coverage, Layer
from rankwise.modules import dense_module
from rankwise.pairs import build_pair
from rankwise.table import Progress
from rankwise.times import Samples, Times
from rankwise.times_file import Store, machine, place

SLICES = (1, 2, 4)
SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.125, 0.06)  # of the rank at which a pair has as many macs as the layer
ROUNDS = (4, 12)  # turns at least, and at most
SECONDS = 100.0  # to spend on one network
SHORT = 0.020  # seconds: inputs are cut into smaller batches until a layer takes about that, …
FEWEST = 8  # … but not below so many
HOPELESS = 1.3  # an option so much slower than the layer at half of its macs is not looked at further

Cell = tuple[Option, int]  # an option at a rank
Shape = tuple[int, ...]


def measure_times(
    model: nn.Module,
    example: Any,
    timing: Timing | None = None,
    coverage: Coverage | None = None,
    progress: Progress | None = None,
    cache: str | Path | None = None,
    seconds: float = SECONDS,
    fuse: bool = False,
) -> Times:
    """Times of the network, its layers and their pairs, for budgets in latency. Takes about `seconds` at most.

    With `fuse` the time beside the layers is that of the network with its batch norms folded away, which is where
    `compress(..., fuse=True)` ends; budgets are fractions of the network as it is all the same.
    `cache` is the folder to keep measurements in: $RANKWISE_CACHE or ~/.cache/rankwise, unless another is given.
    """
    timing = timing or Timing()
    if timing.compiled:
        raise RankwiseError("layers are timed eagerly, and timing with compiled=True was asked for: leave it out")
    coverage = coverage or find_layers(model, example)
    with on_threads(timing.threads), torch.inference_mode():
        store = Store(place(cache, torch.get_num_threads()))
        before = len(store.known)
        models = [model, fuse_norms(model, find_norms(model, example))] if fuse else [model]
        wholes, shapes = _networks(store, models, example, timing, coverage)
        found = _layers(store, model, shapes, timing, coverage, progress, seconds)
        if len(store.known) > before:
            store.save()
    layers, how = wholes[0]["layers"], {**timing.to_json(), "fuse": fuse, "machine": machine()}
    fused = min(whole["fixed"] for whole in wholes) if fuse else None
    return Times(wholes[0]["fixed"], layers, _pairs(found, layers), how, fused)


def _networks(
    store: Store, models: list[nn.Module], example: Any, timing: Timing, coverage: Coverage
) -> tuple[list[dict[str, Any]], dict[str, list[Shape]]]:
    """For each network {"fixed": seconds beside the layers, "layers": by name}; and the shapes of layers' inputs."""
    names = [layer.name for layer in coverage.layers]
    ready = [ready_to_run(model, example, timing) for model in models]
    shapes = shapes_seen(*ready[0], names)
    how = f"{sorted(shapes.items())}|{_dtype(models[0])}|{device_of(models[0])}|{timing.layout}"
    keys = ["network|" + hashlib.sha256(f"{model!r}|{how}".encode()).hexdigest() for model in models]
    if any(key not in store.known for key in keys):
        for key, (fixed, layers) in zip(keys, split_seconds(ready, names, timing), strict=True):
            store.known[key] = {"fixed": fixed, "layers": layers}
    return [store.known[key] for key in keys], shapes


def _layers(
    store: Store,
    model: nn.Module,
    shapes: Mapping[str, list[Shape]],
    timing: Timing,
    coverage: Coverage,
    progress: Progress | None,
    seconds: float,
) -> dict[str, list[dict[str, Any]]]:
    """What `layer_times` says of every call of every layer; equal ones are timed once."""
    where = {"device": device_of(model), "dtype": _dtype(model)}

    def key(layer: Layer, shape: Shape) -> str:
        plain = replace(layer, name="", calls=None, aliases=())
        return f"{astuple(plain)}|{shape}|{where['device']}|{where['dtype']}|{timing.layout}"

    wanted = {key(layer, shape): (layer, shape) for layer in coverage.layers for shape in shapes[layer.name]}
    missing = [k for k in wanted if k not in store.known]
    end = time.monotonic() + seconds
    for done, k in enumerate(missing):
        layer, shape = wanted[k]
        if progress:
            progress(layer.name, done, len(missing))
        share = (end - time.monotonic()) / (len(missing) - done)
        store.known[k] = layer_times(layer, shape, where, timing, max(0.2, share))
    if progress:
        progress("", len(missing), len(missing))
    return {la.name: [store.known[key(la, shape)] for shape in shapes[la.name]] for la in coverage.layers}


def _pairs(
    found: Mapping[str, list[dict[str, Any]]], seconds: Mapping[str, float]
) -> dict[tuple[str, str, int], Samples]:
    """Sums over the calls of each layer, scaled to what the layer takes in the network.

    Calls of other sizes may know other ranks; those that all have count.
    """
    pairs = {}
    for name, calls in found.items():
        dense = sum(call["dense"] for call in calls)
        for option in calls[0]["pairs"] if calls else ():
            tables = [dict(call["pairs"].get(option, [])) for call in calls]
            ranks = sorted(r for r in tables[0] if all(r in t for t in tables))
            if ranks:
                fold, _, slices = option.rpartition("/")
                scaled = tuple(seconds[name] * sum(t[r] for t in tables) / dense for r in ranks)
                pairs[name, fold, int(slices)] = (tuple(ranks), scaled)
    return pairs


def layer_times(layer: Layer, shape: Shape, where: dict[str, Any], timing: Timing, seconds: float) -> dict[str, Any]:
    """{"dense": seconds, "pairs": {"fold/slices": [[rank, seconds], …]}} for one layer beside the network."""
    end = time.monotonic() + seconds
    with torch.inference_mode():
        dense = _module(dense_module(layer, where), timing)
        x = _short(dense, shape, where, timing)
        runs: dict[Cell | None, Run] = {None: _call(dense, x)}
        best: dict[Cell | None, float] = {None: math.inf}
        _try(runs, best, None, x.device)
        for option, ranks in _candidates(layer):
            middle = min(ranks, key=lambda r: abs(r - ranks[0] / 2))
            for rank in sorted(ranks, key=lambda r: (r != middle, -r)):
                if time.monotonic() > end - seconds / 2:
                    break  # half of the time is for turns of what was tried
                pair = _module(build_pair(layer, option, rank, dense), timing)
                runs[option, rank] = _call(pair, x)
                _try(runs, best, (option, rank), x.device)
                if rank == middle and best[option, rank] > HOPELESS * best[None]:
                    break
        for turn in range(ROUNDS[1]):
            if turn >= ROUNDS[0] and time.monotonic() > end:
                break
            for which in runs:
                _try(runs, best, which, x.device, warm=True)
    pairs: dict[str, list[list[float]]] = {}
    cells = [(which, took) for which, took in best.items() if which is not None]
    for (option, rank), took in sorted(cells, key=lambda cell: cell[0][1]):
        pairs.setdefault(f"{option.fold}/{option.groups}", []).append([rank, took])
    return {"dense": best[None], "pairs": pairs}


def _try(
    runs: dict[Cell | None, Run],
    best: dict[Cell | None, float],
    which: Cell | None,
    device: torch.device,
    warm: bool = False,
) -> None:
    """One run that counts, after one that does not if it is the first."""
    if not warm:
        runs[which]()
    best[which] = min(best.get(which, math.inf), once(runs[which], device))


def _short(dense: nn.Module, shape: Shape, where: dict[str, Any], timing: Timing) -> Tensor:
    """A random input; of large batches only a part, so that no run is long enough to be interrupted."""
    while True:
        x = in_layout(torch.randn(shape, dtype=where["dtype"], device=where["device"]), timing.layout)
        dense(x)
        if shape[0] // 2 < FEWEST or min(once(_call(dense, x), x.device) for _ in range(2)) <= SHORT:
            return x
        shape = (shape[0] // 2, *shape[1:])


def _candidates(layer: Layer) -> list[tuple[Option, list[int]]]:
    """Options worth timing, the most promising first, and ranks of each, falling."""
    slices = [k for k in SLICES if layer.group_channels % k == 0] if layer.kind not in LINEAR_KINDS else [1]
    found = []
    for option in sorted(options_for(layer, "all", slices), key=lambda o: o.groups):
        params, macs = costs(layer, option)
        limits = [int(params.searchsorted(layer.params)) - 1]
        limits += [int(macs.searchsorted(layer.macs)) - 1] if macs is not None and layer.macs else []
        most = max(limits)
        if most >= 1:
            found.append((option, _ranks(most)))
    return found


def _ranks(most: int) -> list[int]:
    """From the largest rank down; round numbers, which hardware likes, where there is a choice."""
    if most <= 8:
        return list(range(most, 0, -1))
    near = {round(most * share / 8) * 8 if most * share > 12 else round(most * share) for share in SHARES}
    return sorted({most, 1, *(r for r in near if 1 <= r <= most)}, reverse=True)


def _module(module: nn.Module, timing: Timing) -> nn.Module:
    """With weights that are numbers: what lies in memory by chance may be slow to compute with."""
    for tensor in module.parameters():
        tensor.data.normal_(std=0.02)
    module.eval()
    return module.to(memory_format=torch.channels_last) if timing.layout == "channels-last" else module  # type: ignore[call-overload]


def _call(module: nn.Module, x: Tensor) -> Run:
    return lambda: module(x)


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
