"""What a disk may hold after a crash: every file operation is recorded, and every state that may follow is built.

The model is that of a weak file system. An operation that was issued may be on the disk or not, in any combination,
until a flush orders it: fsync of a file orders what was written to that file, fsync of a folder orders the names in it.
A write may be there in parts (PIECES of it, in any combination, zeros in between). A rename is there or not there.
So a prefix of the operations, a reordering of them and a torn write are all subsets, and are all built.
"""

from __future__ import annotations

import builtins
import hashlib
import itertools
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PIECES = 8  # parts of one write that reach the disk one by one
ROOT = 0

Op = tuple[Any, ...]


@dataclass
class Disk:
    """Files by number; folders by number, each a map from names to numbers."""

    files: dict[int, bytes] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})

    def copy(self) -> Disk:
        return Disk(dict(self.files), {number: dict(names) for number, names in self.folders.items()})

    def tree(self, number: int = ROOT, path: str = "") -> Iterator[tuple[str, bytes | None]]:
        for name, inner in sorted(self.folders[number].items()):
            if inner in self.folders:
                yield f"{path}{name}", None
                yield from self.tree(inner, f"{path}{name}/")
            else:
                yield f"{path}{name}", self.files.get(inner, b"")


class Recorder:
    """Records what happens below `root`, as operations on numbered files and folders."""

    def __init__(self, root: Path) -> None:
        self.root = os.path.realpath(root)
        self.ops: list[Op] = []
        self.now = Disk()
        self.open: dict[int, tuple[int, str]] = {}
        self.count = 0
        self._scan(Path(self.root), ROOT)
        self.first = self.now.copy()

    def _scan(self, folder: Path, number: int) -> None:
        for path in sorted(folder.iterdir()):
            self.count += 1
            self.now.folders[number][path.name] = self.count
            if path.is_dir():
                here = self.count
                self.now.folders[here] = {}
                self._scan(path, here)
            else:
                self.now.files[self.count] = path.read_bytes()

    def mark(self, label: Any) -> None:
        """From here on, whatever happens, this must have happened."""
        self.ops.append(("mark", label))

    def _full(self, path: Any, dir_fd: int | None) -> str | None:
        if isinstance(path, int):
            return None
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        text = os.path.abspath(text)
        text = os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))
        return text if text == self.root or text.startswith(self.root + os.sep) else None

    def _find(self, text: str) -> tuple[int, str]:
        """The number of the folder and the name in it."""
        parts = os.path.relpath(text, self.root).split(os.sep)
        at = ROOT
        for part in parts[:-1]:
            at = self.now.folders[at][part]
        return at, parts[-1]

    def _number(self, text: str) -> int | None:
        if text == self.root:
            return ROOT
        folder, name = self._find(text)
        return self.now.folders[folder].get(name)

    def do(self, op: Op) -> None:
        self.ops.append(op)
        apply(self.now, op)

    def created(self, text: str) -> int:
        number = self._number(text)
        if number is None:
            self.count += 1
            number = self.count
            self.do(("create", *self._find(text), number))
        return number

    def catch_up(self, text: str) -> None:
        """What another library wrote into a file without our seeing it, before it is flushed or renamed."""
        if not os.path.isfile(text):
            return
        number = self.created(text)
        content = _read(text)
        if self.now.files.get(number, b"") != content:
            self.do(("truncate", number, 0))
            self._writes(number, 0, content)

    def _writes(self, number: int, offset: int, data: bytes) -> None:
        step = max(1, -(-len(data) // PIECES))
        for at in range(0, len(data), step):
            self.do(("write", number, offset + at, bytes(data[at : at + step])))


def _read(text: str) -> bytes:
    with builtins.open(text, "rb") as file:
        return file.read()


def apply(disk: Disk, op: Op) -> None:
    kind = op[0]
    if kind == "write":
        _, number, offset, data = op
        old = disk.files.get(number, b"").ljust(offset, b"\0")
        disk.files[number] = old[:offset] + data + old[offset + len(data) :]
    elif kind == "truncate":
        _, number, size = op
        disk.files[number] = disk.files.get(number, b"")[:size].ljust(size, b"\0")
    elif kind == "create":
        _, folder, name, number = op
        disk.folders.setdefault(folder, {})[name] = number
        disk.files.setdefault(number, b"")
    elif kind == "mkdir":
        _, folder, name, number = op
        disk.folders.setdefault(folder, {})[name] = number
        disk.folders.setdefault(number, {})
    elif kind == "rename":
        _, source, old_name, target, name, number = op
        disk.folders.setdefault(target, {})[name] = number
        if number not in disk.folders:
            disk.files.setdefault(number, b"")
        if disk.folders.setdefault(source, {}).get(old_name) == number:
            del disk.folders[source][old_name]
    elif kind == "unlink":
        _, folder, name, number = op
        if disk.folders.setdefault(folder, {}).get(name) == number:
            del disk.folders[folder][name]


def _touches(op: Op) -> set[int]:
    """The files and folders whose flush puts this operation on the disk."""
    kind = op[0]
    if kind in ("write", "truncate"):
        return {op[1]}
    if kind == "rename":
        return {op[1], op[3]}
    return {op[1]} if kind in ("create", "mkdir", "unlink") else set()


@contextmanager
def recording(root: Path) -> Iterator[Recorder]:
    """Patch the calls of the operating system that change files; only what lies below `root` is written down."""
    note = Recorder(root)
    real = {name: getattr(os, name) for name in PATCHED}
    for name in PATCHED:
        setattr(os, name, PATCHED[name](note, real[name]))
    try:
        yield note
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def _open(note: Recorder, real: Callable[..., int]) -> Callable[..., int]:
    def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        text = note._full(path, dir_fd)
        file = real(path, flags, mode, dir_fd=dir_fd)
        if text is not None:
            number = note.created(text) if flags & os.O_CREAT else note._number(text)
            if number is None and os.path.isfile(text):
                note.catch_up(text)
                number = note._number(text)
            if number is not None:
                note.open[file] = (number, text)
        return file

    return call


def _write(note: Recorder, real: Callable[..., int]) -> Callable[..., int]:
    def call(file: int, data: Any) -> int:
        at = os.lseek(file, 0, os.SEEK_CUR) if file in note.open else 0
        done = real(file, data)
        if file in note.open:
            note._writes(note.open[file][0], at, bytes(data[:done]))
        return done

    return call


def _ftruncate(note: Recorder, real: Callable[..., None]) -> Callable[..., None]:
    def call(file: int, size: int) -> None:
        real(file, size)
        if file in note.open and len(note.now.files[note.open[file][0]]) != size:
            note.do(("truncate", note.open[file][0], size))

    return call


def _fsync(note: Recorder, real: Callable[..., None]) -> Callable[..., None]:
    def call(file: int) -> None:
        if file in note.open:
            number, text = note.open[file]
            if not stat.S_ISDIR(os.fstat(file).st_mode):
                note.catch_up(text)
            note.ops.append(("fsync", number))  # the real one is not needed: nothing crashes here

        else:
            real(file)

    return call


def _close(note: Recorder, real: Callable[..., None]) -> Callable[..., None]:
    def call(file: int) -> None:
        note.open.pop(file, None)
        real(file)

    return call


def _rename(note: Recorder, real: Callable[..., None]) -> Callable[..., None]:
    def call(source: Any, target: Any, **more: Any) -> None:
        old, new = note._full(source, None), note._full(target, None)
        if old is not None:
            note.catch_up(old)
        real(source, target, **more)
        if old is not None and new is not None:
            number = note._number(old)
            note.do(("rename", *note._find(old), *note._find(new), number))

    return call


def _unlink(note: Recorder, real: Callable[..., None]) -> Callable[..., None]:
    def call(path: Any, *, dir_fd: int | None = None) -> None:
        text = note._full(path, dir_fd)
        real(path, dir_fd=dir_fd)
        if text is not None and (number := note._number(text)) is not None:
            note.do(("unlink", *note._find(text), number))

    return call


def _mkdir(note: Recorder, real: Callable[..., None]) -> Callable[..., None]:
    def call(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        text = note._full(path, dir_fd)
        real(path, mode, dir_fd=dir_fd)
        if text is not None:
            note.count += 1
            note.do(("mkdir", *note._find(text), note.count))

    return call


PATCHED: dict[str, Callable[[Recorder, Any], Any]] = {
    "open": _open,
    "write": _write,
    "ftruncate": _ftruncate,
    "fsync": _fsync,
    "close": _close,
    "replace": _rename,
    "rename": _rename,
    "unlink": _unlink,
    "remove": _unlink,
    "rmdir": _unlink,
    "mkdir": _mkdir,
}


@dataclass(frozen=True)
class State:
    """A disk after a crash, the labels that had been marked by then, and the number of operations issued."""

    disk: Disk
    marks: tuple[Any, ...]
    at: int

    def lay_out(self, folder: Path, before: dict[str, bytes | None]) -> dict[str, bytes | None]:
        """Make `folder` hold this state; `before` is what it holds. Gives what it holds now."""
        now = dict(self.disk.tree())
        for name in sorted(before, reverse=True):
            if name not in now or (now[name] is None) != (before[name] is None):
                path = folder / name
                path.rmdir() if before[name] is None else path.unlink()
        for name, content in now.items():
            if content is None:
                (folder / name).mkdir(exist_ok=True)
            elif before.get(name, ...) != content:
                (folder / name).write_bytes(content)
        return now


def states(note: Recorder, most: int = 1 << 12, seed: int = 0, stride: int = 1) -> Iterator[State]:
    """Every distinct state after every operation. Where there are more than `most` after one, a sample of them."""
    draw, seen = random.Random(seed), set()
    marks: list[Any] = []
    for at in range(len(note.ops) + 1):
        if at and note.ops[at - 1][0] == "mark":
            marks.append(note.ops[at - 1][1])
        if at % stride and at != len(note.ops):
            continue
        fixed, free = _settled(note.ops[:at])
        for chosen in _subsets(free, most, draw):
            disk = note.first.copy()
            for i in sorted({*fixed, *chosen}):
                apply(disk, note.ops[i])
            key = (_digest(disk), tuple(marks))
            if key not in seen:
                seen.add(key)
                yield State(disk, tuple(marks), at)


def _settled(ops: list[Op]) -> tuple[list[int], list[int]]:
    """Operations that are on the disk for sure, and those that may be."""
    fixed, free, flushed = [], [], set()
    for i in reversed(range(len(ops))):
        if ops[i][0] == "fsync":
            flushed.add(ops[i][1])
        elif ops[i][0] != "mark":
            (fixed if _touches(ops[i]) & flushed else free).append(i)
    return fixed, free[::-1]


def _subsets(free: list[int], most: int, draw: random.Random) -> Iterator[tuple[int, ...]]:
    if 1 << len(free) <= most:
        yield from itertools.chain.from_iterable(itertools.combinations(free, n) for n in range(len(free) + 1))
        return
    for n in range(len(free) + 1):
        yield tuple(free[:n])  # every prefix, and everything but one
        yield tuple(free[:n] + free[n + 1 :])
    for _ in range(most - 2 * len(free)):
        share = draw.random()
        yield tuple(i for i in free if draw.random() < share)


def _digest(disk: Disk) -> bytes:
    found = hashlib.sha256()
    for name, content in disk.tree():
        found.update(f"{name} {-1 if content is None else len(content)} ".encode())
        found.update(content or b"")
    return found.digest()
