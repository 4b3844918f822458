"""Forward passes that walk side by side: all wait at a layer until every one of them has come there.

So a layer can be changed by what all inputs give it, in a single pass over them, whatever the network does between its
layers: nothing is traced. What is held is what the passes hold at the present depth. A pass is a thread, and only one
of them runs at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rankwise.core.memory import give_back

_HERE = threading.local()


class _Dropped(BaseException):
    """The rest of a pass is not needed. No `Exception`, since a network may catch those."""


class Track:
    """One pass that can be halted: `run` calls `wait_at` wherever it may have to wait."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run, self.stop = run, ""
        self.seen: Tensor | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._dropped = False
        self.ended = False
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        self._go.acquire()
        _HERE.track = self
        try:
            if not self._dropped:
                with torch.no_grad():
                    self._run()
        except _Dropped:
            pass
        except BaseException as err:
            self._error = err
        self.ended, self.seen = True, None
        self._run = lambda: None  # lets go of the inputs
        self._back.release()

    def resume(self, stop: str) -> Tensor | None:
        """Run on until the layer of this name, and give what is seen there; None if the pass does not come there."""
        if self.ended:
            return None
        self.stop, self.seen = stop, None
        self._go.release()
        self._back.acquire()
        give_back()
        if self._error is not None:
            raise self._error
        return self.seen

    def wait(self, seen: Tensor) -> None:
        self.seen = seen
        self._back.release()
        self._go.acquire()
        if self._dropped:
            raise _Dropped

    def drop(self) -> None:
        """End the pass where it is."""
        if not self.ended:
            self._dropped = True
            self._go.release()
            self._back.acquire()
        self._thread.join()


def wait_at(name: str, seen: Tensor) -> None:
    """Called inside a pass: wait here if this is where it is to stop."""
    track: Track | None = getattr(_HERE, "track", None)
    if track is not None and track.stop == name:
        track.wait(seen)


class Gate(nn.Module):
    """Stands before a layer of a network: passes wait here, and then go through whatever is behind it by then.

    `final` is what takes its place in the end; `inner` may be another module for the same function, if that is faster.
    """

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.name, self.inner = name, inner
        self._final = [inner]  # in a list, so that the network has it once

    @property
    def final(self) -> nn.Module:
        return self._final[0]

    def become(self, final: nn.Module, inner: nn.Module | None = None) -> None:
        self._final, self.inner = [final], final if inner is None else inner

    def forward(self, given: Tensor) -> Any:
        wait_at(self.name, given)
        return self.inner(given)


class Alive(TorchDispatchMode):
    """Counts the bytes of what was computed inside and is still there: a network that waits at a layer holds more than
    the layer's input, since every function that is running keeps its arguments.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        known = (*model.parameters(), *model.buffers())
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._made: dict[int, tuple[Any, int]] = {}  # a weak reference and its bytes, by address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        return found

    @property
    def bytes(self) -> int:
        self._made = {at: one for at, one in self._made.items() if not one[0].expired()}
        return sum(size for _, size in self._made.values())


@contextmanager
def tracks() -> Iterator[list[Track]]:
    """A list of passes, all of which are ended afterwards, whatever happens."""
    found: list[Track] = []
    try:
        yield found
    finally:
        for track in found:
            track.drop()
