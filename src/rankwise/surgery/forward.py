"""Forward passes that leave no trace: run an example or a part of it, count what the layers do, put everything back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rankwise.core.layer import LINEAR_KINDS, Call
from rankwise.errors import RankwiseError, out_of_memory
from rankwise.surgery.effective import form_of, is_plain_on, sizes_with, was_tried
from rankwise.surgery.hooks import Look, Looks, Seen, watching
from rankwise.surgery.macs import counter
from rankwise.surgery.modules import is_lookup, kind_of

Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]  # what `run_example` gives to a network
Batches = Iterable[Example]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the model in eval mode without gradients; restore modes, buffers and random states after."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(module, dict(module._buffers)) for module in modes]
    values = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    fastpath = torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.backends.mha.set_fastpath_enabled(False)  # it would bypass the modules
            model.eval()
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module, mode in modes.items():
            module.training = mode
        for module, had in buffers:
            module._buffers.clear()
            module._buffers.update(had)
        for buffer, value in values:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def run_example(model: nn.Module, example: Example) -> Any:
    """model(example) for a tensor, a tuple or list of arguments, or a dict of keyword arguments."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def ready(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else value.dtype, copy=True)

    try:
        if isinstance(example, Mapping):
            return model(**{k: ready(v) for k, v in example.items()})
        args = example if isinstance(example, tuple | list) else (example,)
        return model(*map(ready, args))
    except RankwiseError:
        raise
    except Exception as err:
        if out_of_memory(err):
            raise
        first_line = (str(err).splitlines() or [""])[0]
        raise RankwiseError(
            f"the model could not run on an input of {_sizes(example)} "
            f"({type(err).__name__}: {first_line}): give an input that fits the model"
        ) from err


class _Enough(BaseException):
    """The rest of the network need not run. No `Exception`, since a network may catch those."""

    def __init__(self, run: object) -> None:
        super().__init__()
        self.run = run


def run_until(model: nn.Module, example: Example, after: Looks, enough: Callable[[], bool]) -> None:
    """Run the example with these callbacks (see `watching`), and stop behind the first one after which it is enough."""
    mine = object()  # and not the exception itself: its traceback would keep the network's tensors

    def checked(look: Look) -> Look:
        def look_and_stop(call: Seen) -> Tensor | None:
            new = look(call)
            if enough():
                raise _Enough(mine)
            return new

        return look_and_stop

    try:
        with watching(model, after={name: checked(look) for name, look in after.items()}):
            run_example(model, example)
    except _Enough as found:
        if found.run is not mine:  # a run around this one has had enough
            raise


@contextmanager
def stopping() -> Iterator[Callable[[], None]]:
    """A way out of a forward pass: whoever calls what is given is behind the `with` statement."""
    mine = object()

    def stop() -> None:
        raise _Enough(mine)

    try:
        yield stop
    except _Enough as found:
        if found.run is not mine:
            raise


def run_before(model: nn.Module, example: Example, name: str, look: Look) -> None:
    """Run the example up to a module, which is looked at before it runs; it and what follows do not run."""
    with stopping() as stop:

        def look_and_stop(call: Seen) -> None:
            look(call)
            stop()

        with watching(model, before={name: look_and_stop}):
            run_example(model, example)


def tensors_of(output: object) -> list[Tensor]:
    """Every tensor in what a network gives: itself, or inside tuples, lists and dicts."""
    if isinstance(output, Tensor):
        return [output]
    items = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [t for item in items for t in tensors_of(item)]


def _sizes(example: object) -> str:
    if isinstance(example, Tensor):
        return "x".join(map(str, example.shape))
    if isinstance(example, Mapping):
        return ", ".join(f"{k} {_sizes(v)}" for k, v in example.items())
    if isinstance(example, tuple | list):
        return ", ".join(map(_sizes, example))
    return type(example).__name__


@dataclass(frozen=True)
class Observed:
    """One forward pass: the calls of every layer, all macs by torch's counter, and layers a pair would break."""

    calls: dict[str, tuple[Call, ...]]
    macs: int
    unfit: dict[str, str]


def observe(model: nn.Module, example: Example, layers: dict[str, nn.Module]) -> Observed:
    """Run the example once and watch the layers."""
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise RankwiseError("the model has lazy layers without a size yet: run it once on an input before")
    watches = {name: _LayerWatch(module) for name, module in layers.items()}
    counted = counter()
    after = {name: watch.after for name, watch in watches.items()}
    before = {name: watch.before for name, watch in watches.items()}
    with undisturbed(model), watching(model, after, before), _noticing_reads(watches.values()), counted:
        run_example(model, example)
    for watch in watches.values():
        watch.check()
    calls = {name: _merge(watch.calls) for name, watch in watches.items()}
    unfit = {name: watch.unfit for name, watch in watches.items() if watch.unfit}
    return Observed(calls, counted.get_total_flops() // 2, unfit)


class _LayerWatch:
    """Looks at one layer while an example runs: its calls, and uses that a pair of layers could not serve."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.cls = module, type(module)
        flat = kind_of(module) in LINEAR_KINDS or is_lookup(module)
        self.dims = 0 if flat else len(module.kernel_size)  # type: ignore[arg-type]
        form = form_of(module) if was_tried(module) else None
        self.tried, self.border = form is not None, form.border if form else ()
        self.calls: list[Call] = []
        self.first: tuple[Tensor, Tensor] | None = None  # of a layer that was tried: an input, and what it gave
        self.unfit = ""
        self.running = 0

    def start(self) -> None:
        """Notice reads of the weight: only a class can do that, so the module gets another one for a while."""
        watch = self

        class Watched(self.cls):  # type: ignore[misc,name-defined]
            def __getattr__(self, name: str) -> Any:
                if name in ("weight", "bias") and not watch.running:
                    watch.unfit = f"the network reads its {name} itself instead of only calling it"
                return super().__getattr__(name)

        self.module.__class__ = Watched

    def stop(self) -> None:
        self.module.__class__ = self.cls

    def check(self) -> None:
        """Whether a layer that was tried on random numbers is the plain one on the example, too."""
        if self.first is not None and not is_plain_on(self.module, *self.first):
            self.unfit = "it gives something else than a plain layer for the example"

    def before(self, _: Seen) -> None:
        self.running += 1

    def after(self, call: Seen) -> None:
        self.running -= 1
        if len(call.args) + len(call.kwargs) > 1:
            self.unfit = "it is called with more than its input"
        before, after = (tuple(t.shape[t.ndim - self.dims :]) for t in (call.given, call.output))
        if self.tried:
            before = sizes_with(self.border, self.module, before)
            if self.first is None:  # copies, for many networks go on in place
                self.first = call.given[:1].clone(), call.output[:1].clone()
        rows = call.output.shape[: call.output.ndim - self.dims - 1]
        self.calls.append(Call(before, after, int(torch.Size(rows).numel())))


@contextmanager
def _noticing_reads(watches: Iterable[_LayerWatch]) -> Iterator[None]:
    with ExitStack() as started:
        for watch in watches:
            watch.start()
            started.callback(watch.stop)
        yield


def _merge(calls: list[Call]) -> tuple[Call, ...]:
    """Equal sizes together, in order of appearance."""
    counts: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for call in calls:
        counts[call.inputs, call.outputs] = counts.get((call.inputs, call.outputs), 0) + call.count
    return tuple(Call(i, o, n) for (i, o), n in counts.items())


def side_of(example: object) -> int | None:
    """The side of square images, or the length of a text; None lets the data decide."""
    if isinstance(example, Mapping):
        text = example.get("input_ids")
        if isinstance(text, Tensor) and "pixel_values" not in example:
            both = [t for t in (text, example.get("decoder_input_ids")) if isinstance(t, Tensor)]
            return sum(int(t.shape[-1]) for t in both)
        example = example.get("pixel_values")
    shape = example.shape if isinstance(example, Tensor) and example.dim() == 4 else (0, 1)
    return int(shape[-1]) if shape[-1] == shape[-2] else None
