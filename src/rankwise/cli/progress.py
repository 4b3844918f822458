"""What is going on, on standard error: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rankwise.cli.wording import printable

BEAT = 5.0  # seconds between two lines where there is no terminal
Report = Callable[[str, int, int], None]  # what, how many are done, of how many


def warn(sentence: str) -> None:
    """Loudly, and apart from what machines read."""
    print(f"rankwise: warning: {printable(sentence)}", file=sys.stderr, flush=True)


@contextmanager
def progress(title: str) -> Iterator[Report]:
    """What is going on, on standard error: a bar on a terminal, elsewhere a line every few seconds.

    Stages within a stage take its place for as long as they last.
    """
    outer = _shown[-1] if _shown else None
    shown = outer or (_Bar() if Console(stderr=True).is_terminal else _Lines())
    _shown.append(shown)
    before = shown.now
    shown.show(title, None, None)
    try:
        yield lambda name, done, total: shown.show(printable(f"{title} {name}".rstrip()), done, total)
    finally:
        _shown.pop()
        if outer is None:
            shown.stop()
        else:
            shown.show(*before)


_Now = tuple[str, int | None, int | None]  # what, how many are done, of how many


class _Bar:
    """There only while it runs."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self.bar.start()
        self.task = self.bar.add_task("", total=None)
        self.now: _Now = ("", None, None)

    def show(self, what: str, done: int | None, total: int | None) -> None:
        self.now = (what, done, total)
        self.bar.update(self.task, description=what, completed=done or 0, total=total)

    def stop(self) -> None:
        self.bar.stop()


class _Lines:
    """A line every few seconds, also while one thing takes long."""

    def __init__(self) -> None:
        self.now: _Now = ("", None, None)
        self.start, self.ended = time.monotonic(), threading.Event()
        self.thread = threading.Thread(target=self._beat, daemon=True)
        self.thread.start()

    def show(self, what: str, done: int | None, total: int | None) -> None:
        self.now = (what, done, total)

    def _beat(self) -> None:
        while not self.ended.wait(BEAT):
            what, done, total = self.now
            count = "" if done is None else f" {done}/{total}"
            print(f"{what}{count}, {time.monotonic() - self.start:.0f} s", file=sys.stderr, flush=True)

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()


_shown: list[_Bar | _Lines] = []
