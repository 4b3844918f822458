"""Honest timing: warmed up, repeated, interleaved, synchronised, with the spread beside the median.

What is compared is timed in turns (a, b, a, b, …), so that a machine that slows down slows all of them down.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankwise.errors import RankwiseError
from rankwise.planning.times import LAYOUTS
from rankwise.surgery.forward import Example
from rankwise.surgery.hooks import Seen, watching
from rankwise.surgery.layout import in_layout, lay_out_
from rankwise.surgery.replace import copy_model

ENOUGH = 1.0  # seconds in which the least of many short runs is near what a quiet machine takes
LONG = 20.0  # seconds after which a few runs must do
Run = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """How a network is timed.

    Args:
        batch: inputs in a batch; None for as many as the example has.
        threads: None for torch's own number.
        layout: memory layout of the network and its inputs, contiguous or channels-last.
        compiled: with torch.compile.
        repeats: runs that count.
        warmup: runs before them, which do not count.
    """

    batch: int | None = None
    threads: int | None = None
    layout: str = "contiguous"
    compiled: bool = False
    repeats: int = 9
    warmup: int = 2

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("threads", 1), ("repeats", 1), ("warmup", 0)):
            value = getattr(self, name)
            optional = value is None and name in ("batch", "threads")
            if not optional and (type(value) is not int or value < least):
                raise RankwiseError(f"timing with {name}={value!r} was asked for: it is a whole number from {least} on")
        if self.layout not in LAYOUTS:
            raise RankwiseError(f"the layout {self.layout!r} is unknown: possible are {', '.join(LAYOUTS)}")
        if type(self.compiled) is not bool:
            raise RankwiseError(f"timing with compiled={self.compiled!r} was asked for: it is True or False")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "threads": self.threads or torch.get_num_threads()}


def read_timing(text: str | None) -> Timing:
    """`batch=32,threads=2,layout=channels-last` → `Timing`."""
    known = {"batch": int, "threads": int, "repeats": int, "warmup": int, "layout": str}
    values: dict[str, Any] = {}
    for part in (text or "").split(",") if text else ():
        key, _, value = part.strip().partition("=")
        whole = value.isdigit() if known.get(key) is int else bool(value)
        if key not in known or not whole:
            raise RankwiseError(
                f"the timing {part!r} is not understood: give {', '.join(f'{k}=…' for k in known)}, such as "
                f"batch=32,threads=2,layout=channels-last"
            )
        values[key] = known[key](value)
    return Timing(**values)


@dataclass(frozen=True)
class Measured:
    """Seconds of every run that counts, in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """Half of all runs lie within so much, as a fraction of the median: the distance of the quartiles."""
        low, high = np.percentile(self.seconds, (25, 75))
        return float(high - low) / self.median

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "best": self.best, "spread": self.spread, "n": len(self.seconds)}


def race(
    runs: Sequence[Run],
    timing: Timing,
    device: torch.device | None = None,
    least: float = 0.0,
    most: float = math.inf,
) -> list[Measured]:
    """Time several things in turns, each `repeats` times after `warmup` rounds that do not count.

    Rounds go on until they have taken `least` seconds, but no more than ten times as many; after `most` seconds three
    must do.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    start = time.monotonic()
    for turn in range(timing.warmup + 10 * timing.repeats):
        spent, count = time.monotonic() - start, len(seconds[0])
        if (count >= timing.repeats and spent > least) or (count >= 3 and spent > most):
            break
        for run, found in zip(runs, seconds, strict=True):
            took = once(run, device)
            if turn >= timing.warmup:
                found.append(took)
    return [Measured(tuple(found)) for found in seconds]


def once(run: Run, device: torch.device | None = None) -> float:
    """Seconds of one run, the device's own work included."""
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device | None) -> None:
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def time_networks(
    models: Sequence[nn.Module],
    example: Example | None,
    timing: Timing | None = None,
    least: float = 0.0,
    most: float = math.inf,
) -> list[Measured]:
    """What each network takes for the example, in turns; the networks themselves are left as they are.

    `least` and `most` are seconds, as for `race`.
    """
    timing = timing or Timing()
    with on_threads(timing.threads), torch.inference_mode():
        runs = [ready_to_run(model, example, timing)[1] for model in models]
        return race(runs, timing, device_of(models[0]), least, most)


def time_network(model: nn.Module, example: Example | None, timing: Timing | None = None) -> Measured:
    """What a network takes for an example input, in seconds.

    Args:
        model: the network; a copy of it is timed.
        example: an input.
        timing: batch size, threads, layout, repeats; see `Timing`.

    Returns:
        A `Measured` with `median`, `best` and `spread` of repeated runs.

    >>> import torch, rankwise as rw
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval()
    >>> x = torch.randn(1, 3, 8, 8)
    >>> rw.time_network(model, x, rw.Timing(threads=1, repeats=3)).median > 0
    True
    """
    return time_networks([model], example, timing)[0]


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def ready_to_run(model: nn.Module, example: Example | None, timing: Timing) -> tuple[nn.Module, Run]:
    """A copy of the network in the layout asked for, and a run of it on the example."""
    ready = copy_model(model).eval()
    if timing.layout == "channels-last":
        lay_out_(ready, timing.layout)
    args, kwargs = inputs_for(model, example, timing)
    call: Callable[..., object] = torch.compile(ready) if timing.compiled else ready
    return ready, lambda: call(*args, **kwargs)


def inputs_for(model: nn.Module, example: Example | None, timing: Timing) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example as arguments, in the batch and layout asked for, where the network is and in its dtype."""
    device = device_of(model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def ready(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.to(device, dtype if value.is_floating_point() else value.dtype)
        if timing.batch is not None and value.ndim:
            value = value[:1].expand(timing.batch, *value.shape[1:]).contiguous()
        return in_layout(value, timing.layout)

    if example is None:
        raise RankwiseError("time can only be measured on an input: pass an example (on the command line: --input)")
    if isinstance(example, Mapping):
        return (), {k: ready(v) for k, v in example.items()}
    return tuple(map(ready, example if isinstance(example, tuple | list) else (example,))), {}


def shapes_seen(model: nn.Module, run: Run, names: Sequence[str]) -> dict[str, list[tuple[int, ...]]]:
    """The shape of every input that each of the modules gets in a run, call by call."""
    found: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}

    def look(mine: list[tuple[int, ...]], call: Seen) -> None:
        mine.append(tuple(call.given.shape))

    with watching(model, before={name: partial(look, mine) for name, mine in found.items()}):
        run()
    return found


Split = tuple[float, dict[str, float]]  # seconds beside the layers, and those of each layer


def split_seconds(networks: Sequence[tuple[nn.Module, Run]], names: Sequence[str], timing: Timing) -> list[Split]:
    """Where the time of networks goes, in turns: beside the layers, and in each layer over all of its calls.

    The least of all runs, part by part. A layer that is never called takes none and is left out. Small networks run
    more often than `timing` says, and those that take long less often: the machine has more to do.
    """
    rounds: list[list[Split]] = [[] for _ in networks]
    start = time.monotonic()
    for turn in range(timing.warmup + 50):
        spent = time.monotonic() - start
        if turn >= timing.warmup + (timing.repeats if spent < LONG else 2) and spent > ENOUGH:
            break
        for (model, run), found in zip(networks, rounds, strict=True):
            split = split_once(model, run, names)
            if turn >= timing.warmup:
                found.append(split)
    return [
        (min(rest for rest, _ in found), {name: min(layers[name] for _, layers in found) for name in found[0][1]})
        for found in rounds
    ]


def split_once(model: nn.Module, run: Run, names: Sequence[str]) -> Split:
    """One run: seconds beside the layers, and those of each layer."""
    device = device_of(model)
    spent: dict[str, float] = {}
    started: list[float] = []

    def before(_: Seen) -> None:
        _wait(device)
        started.append(time.perf_counter())

    def after(name: str, _: Seen) -> None:
        _wait(device)
        spent[name] = spent.get(name, 0.0) + time.perf_counter() - started.pop()

    with watching(model, {name: partial(after, name) for name in names}, dict.fromkeys(names, before)):
        whole = once(run, device)
    return whole - sum(spent.values()), spent
