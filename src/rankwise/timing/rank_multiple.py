"""The multiple to which ranks are best rounded on this machine, since hardware computes channels in blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from rankwise.core.fold import all_folds
from rankwise.core.layer import Coverage, Layer
from rankwise.core.option import Option
from rankwise.decompositions import full_rank
from rankwise.errors import RankwiseError
from rankwise.planning.times import MARGIN
from rankwise.surgery.coverage import find_layers
from rankwise.surgery.forward import Example
from rankwise.surgery.layout import in_layout, lay_out_
from rankwise.surgery.pairs import build_pair
from rankwise.timing.clock import Run, Timing, device_of, on_threads, race, ready_to_run, shapes_seen

MULTIPLES = (32, 16, 8, 4, 2)
WIDTH = 32  # ranks in a row that are timed: every multiple is among them


def best_multiple(
    model: nn.Module, example: Example | None, timing: Timing | None = None, coverage: Coverage | None = None
) -> int:
    """The largest of 32, 16, 8, 4, 2 to which ranks can be rounded up at no cost in time, or 1.

    Pairs of the layer with the most multiply-adds are timed in turns, for 32 ranks in a row.
    """
    timing = timing or Timing()
    layers = (coverage or find_layers(model, example)).layers
    if not layers:
        raise RankwiseError("the model has no layer that can be decomposed: rankwise inspect says why")
    layer = max(layers, key=lambda la: la.macs or 0)
    option = Option(all_folds(layer.dims)[0], 1)
    last = min(full_rank(layer, option), 2 * WIDTH)
    ranks = range(max(1, last - WIDTH + 1), last + 1)
    with on_threads(timing.threads), torch.inference_mode():
        ready, run = ready_to_run(model, example, timing)
        shape = shapes_seen(ready, run, [layer.name])[layer.name][0]
        old = ready.get_submodule(layer.name)
        runs = [_run(layer, option, rank, old, shape, timing) for rank in ranks]
        found = race(runs, timing, device_of(ready), least=3.0)
    return multiple_of({rank: one.best for rank, one in zip(ranks, found, strict=True)})


def multiple_of(seconds: Mapping[int, float]) -> int:
    """From seconds by rank: rounding up is free if that takes no longer on average than measurements are off.

    >>> multiple_of({r: -(-r // 8) for r in range(1, 65)})
    8
    """
    for multiple in MULTIPLES:
        pairs = [(r, math.ceil(r / multiple) * multiple) for r in seconds]
        ratios = [seconds[up] / seconds[r] for r, up in pairs if up in seconds]
        if ratios and sum(ratios) / len(ratios) <= 1 / MARGIN:
            return multiple
    return 1


def _run(layer: Layer, option: Option, rank: int, old: nn.Module, shape: tuple[int, ...], timing: Timing) -> Run:
    pair = build_pair(layer, option, rank, old)
    for tensor in pair.parameters():
        tensor.data.normal_(std=0.02)
    like = next(pair.parameters())
    lay_out_(pair, timing.layout)
    x = in_layout(torch.randn(shape, dtype=like.dtype, device=like.device), timing.layout)
    return partial(pair, x)
