"""Pairs multiplied out again where one layer is faster than two: the same function, with more params."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from rankwise.planning.times import MARGIN
from rankwise.surgery.forward import Example
from rankwise.surgery.layout import in_layout, lay_out_, other_layout
from rankwise.surgery.modules import mark_of
from rankwise.surgery.pairs import merge_pair
from rankwise.surgery.replace import copy_model, swap_modules_
from rankwise.timing.clock import Timing, device_of, on_threads, race, ready_to_run, shapes_seen


def merge_slow(model: nn.Module, example: Example, timing: Timing | None = None) -> tuple[nn.Module, list[str]]:
    """A copy of the model without the pairs that take longer than the one layer they stand for, and their names."""
    timing = timing or Timing()
    names = [name for name, module in model.named_modules() if mark_of(module) is not None]
    with on_threads(timing.threads), torch.inference_mode():
        ready, run = ready_to_run(model, example, timing)
        shapes = shapes_seen(ready, run, names)
        slow = [name for name in names if _slower(ready.get_submodule(name), shapes[name], timing)]
    return merge_named(model, slow), slow


def merge_named(model: nn.Module, names: Iterable[str]) -> nn.Module:
    merged = copy_model(model)
    pairs = [merged.get_submodule(name) for name in names]
    swap_modules_(merged, {pair: merge_pair(pair) for pair in pairs if isinstance(pair, nn.Sequential)})
    return merged


def _slower(pair: nn.Module, shapes: list[tuple[int, ...]], timing: Timing) -> bool:
    """Whether the pair takes longer than its layer, over all calls, by more than measurements are off."""
    assert isinstance(pair, nn.Sequential), "mark_of has looked"
    dense = merge_pair(pair)
    layout = timing.layout if other_layout(pair) else "channels-last"
    lay_out_(dense, layout)
    like, device = next(pair.parameters()), device_of(pair)
    apart = joined = 0.0
    for shape in shapes:
        x = in_layout(torch.randn(shape, dtype=like.dtype, device=device), layout)
        one, two = race([partial(dense, x), partial(pair, x)], timing, device)
        joined, apart = joined + one.best, apart + two.best
    return joined < MARGIN * apart
