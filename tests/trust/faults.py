"""The n-th operation fails, for n = 1, 2, … until the command has no n-th operation: for every command that writes.

Operations of the disk fail one by one, and so do torch's (each of which allocates): the first one of every line of our
code that leads to one. What must hold: one sentence, exit status not 0, what was there is there, no temporary file here
or in the folder that the system has for them, and the next run goes on.
"""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import made_rows
import rankwise
from rankwise.__main__ import main
from rankwise.cli import demo as demos
from rankwise.cli import progress
from rankwise.deploy import export as exports
from rankwise.deploy.export import open_exported
from rankwise.models import networks
from rankwise.training import results
from trust import writers
from trust.enumerate import SHARED_MEMORY, Found, contents

CALLS = ("open", "write", "ftruncate", "fsync", "replace", "rename", "mkdir", "unlink", "remove", "rmdir")
ERRORS: dict[str, Callable[[], BaseException]] = {
    "ENOSPC": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "EIO": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "EACCES": lambda: PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
    "MemoryError": MemoryError,
}


@dataclass
class Fault:
    """Call number `nth` below `root` fails; with `lasting` every later one, too."""

    root: Path
    nth: int
    error: Callable[[], BaseException]
    lasting: bool = False
    count: int = 0
    where: str = ""

    def hit(self, name: str, given: Any, dir_fd: int | None) -> None:
        if not self._ours(given, dir_fd):
            return
        self.count += 1
        later = self.lasting and self.count > self.nth and name not in ("unlink", "remove", "rmdir")  # a full disk can
        if self.count == self.nth or later:
            self.where = self.where or f"{name} of {given!r}"
            raise self.error()

    def _ours(self, given: Any, dir_fd: int | None) -> bool:
        try:
            if isinstance(given, int):
                text = os.readlink(f"/proc/self/fd/{given}")
            elif dir_fd is not None:
                text = os.readlink(f"/proc/self/fd/{dir_fd}")
            else:
                text = os.path.abspath(os.fsdecode(given))
        except (OSError, TypeError):
            return False
        return text.startswith(str(self.root))


@contextmanager
def failing(fault: Fault) -> Iterator[Fault]:
    real = {name: getattr(os, name) for name in CALLS}

    def wrap(name: str) -> Callable[..., Any]:
        def call(given: Any, *more: Any, **named: Any) -> Any:
            fault.hit(name, given, named.get("dir_fd"))
            return real[name](given, *more, **named)

        return call

    for name in CALLS:
        setattr(os, name, wrap(name))
    try:
        yield fault
    finally:
        for name, function in real.items():
            setattr(os, name, function)


SOURCE = str(Path(rankwise.__file__).parent)
Place = tuple[str, int]  # file and line


class Allocation(TorchDispatchMode):
    """Operation number `nth` of torch finds no memory, in torch's own words.

    Without a number none fails, and `first` has the number of the first operation of every line of our code.
    """

    def __init__(self, nth: int | None = None) -> None:
        super().__init__()
        self.nth, self.count, self.where = nth, 0, ""
        self.first: dict[Place, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.nth is None:
            self.first.setdefault(_our_line(), self.count)
        if self.count == self.nth:
            self.where = str(func)
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried"
            )
        return func(*args, **(kwargs or {}))


def _our_line() -> Place:
    """The innermost line of the package that is being executed."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(SOURCE):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


@dataclass(frozen=True)
class Command:
    """`first` is run while something fails, `again` afterwards. `read(folder)` gives what a user has."""

    name: str
    prepare: Callable[[Path], None]
    first: Callable[[Path], list[str]]
    again: Callable[[Path], list[str]]
    read: Callable[[Path], object]
    opaque: bool = False  # another library writes, so real limits on file sizes are tried as well


def run(arguments: list[str]) -> tuple[int, str]:
    """Exit status and what was said on stderr."""
    said = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said):
        status = main(arguments)
    return status, said.getvalue()


Known = tuple[Path, Path, object, object]  # what was prepared, where to try, what is read before and after


@dataclass(frozen=True)
class Search:
    """Which failures are tried.

    `once`: every call fails with each of these errors; `lasting`: a call and all later ones fail; `allocations`: at so
    many lines of our code, evenly spread, torch finds no memory. With a `stride` a sample of the calls is tried.
    """

    once: tuple[str, ...] = tuple(ERRORS)
    lasting: tuple[str, ...] = ("ENOSPC",)
    allocations: int = 0
    stride: int = 1
    enough: int = 1 << 30  # violations


def explore(command: Command, search: Search) -> Found:
    found, start = Found(command.name), time.process_time()
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as name, temporary_files(Path(name) / TEMPORARY):
        top = Path(name).resolve()
        ready = top / "ready"
        ready.mkdir()
        command.prepare(ready)
        old = command.read(ready)
        whole = _copy(ready, top / "whole")
        status, said = run(command.first(whole))
        assert status == 0, said
        new = command.read(whole)
        assert old != new, "the command changes something, or the test could not fail"
        known = (ready, top / "at", old, new)
        with programs_remembered():
            for error in search.once:
                _every(command, search, error, False, known, found)
            for error in search.lasting:
                _every(command, search, error, True, known, found)
        _allocations(command, search.allocations, known, found)
        if command.opaque:
            _limited(command, known, found)
    found.seconds = time.process_time() - start
    return found


TEMPORARY = "tmp"
INDUCTOR = "torchinductor_"  # torch's own store of what it has compiled


@contextmanager
def temporary_files(folder: Path) -> Iterator[None]:
    """Whoever asks the system for a temporary file gets it in `folder`, where what is left can be seen."""
    folder.mkdir()
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _every(command: Command, search: Search, name: str, lasting: bool, known: Known, found: Found) -> None:
    nth = 1
    while len(found.violations) < search.enough:
        fault = Fault(known[1] / "disk", nth, ERRORS[name], lasting)
        _copy(known[0], fault.root)
        label = f"{name} {'from' if lasting else 'at'} call {nth}"
        with failing(fault):
            status, said = _guarded(command.first(fault.root), found, label)
        if not fault.where:
            return
        found.failures += 1
        _judge(command, fault.root, known, found, f"{label} ({fault.where})", status, said, tidy=not lasting)
        nth += search.stride


@contextmanager
def programs_remembered() -> Iterator[None]:
    """What is exported is computed once, since only the disk fails; there is one network to each command."""
    before, known = dict(exports.CONTENTS), dict[tuple[str, bool], bytes]()

    def remembered(to: str) -> Callable[..., bytes]:
        def content(*given: Any) -> bytes:
            key = (to, given[-1])
            if key not in known:
                known[key] = bytes(before[to](*given))
            return known[key]

        return content

    exports.CONTENTS.update({to: remembered(to) for to in before})
    try:
        yield
    finally:
        exports.CONTENTS.update(before)


def _allocations(command: Command, wanted: int, known: Known, found: Found) -> None:
    """The first operation of torch that each line of our code leads to; of many lines an even choice."""
    if not wanted:
        return
    counter = Allocation()
    with counter:
        run(command.first(_copy(known[0], known[1] / "disk")))
    numbers = sorted(counter.first.values())
    for i in range(min(wanted, len(numbers))):
        fault = Allocation(numbers[i * len(numbers) // min(wanted, len(numbers))])
        root = _copy(known[0], known[1] / "disk")
        label = f"no memory at operation {fault.nth} of torch"
        with fault:
            status, said = _guarded(command.first(root), found, label)
        if fault.where:
            found.failures += 1
            _judge(command, root, known, found, f"{label} ({fault.where})", status, said, tidy=True)


def _limited(command: Command, known: Known, found: Found) -> None:
    """Files may not grow beyond a size: a write of any library fails for real."""
    for size in (0, 3000):
        root = _copy(known[0], known[1] / "disk")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            status, said = _guarded(command.first(root), found, f"files up to {size} bytes")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        found.failures += 1
        _judge(command, root, known, found, f"files up to {size} bytes", status, said, tidy=True)


def _guarded(arguments: list[str], found: Found, label: str) -> tuple[int, str]:
    try:
        return run(arguments)
    except BaseException as err:
        frames = [f for f in traceback.extract_tb(err.__traceback__) if "rankwise" in f.filename][-3:]
        places = ", ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames)
        found.violations.append(f"{label}: a traceback, {type(err).__name__}: {err} ({places})")
        return 1, "rankwise: (a traceback)\n"


def _judge(
    command: Command, root: Path, known: Known, found: Found, label: str, status: int, said: str, tidy: bool
) -> None:
    _, _, old, new = known
    wrong = found.violations.append
    if status and not (said.startswith("rankwise: ") and said.count("\n") == 1) and not _rows_say_why(root):
        wrong(f"{label}: status {status} and not one sentence: {said[-200:]!r}")
    left = [name for name in contents(root) if ".part" in name or name.endswith(".lock")]
    left += [path.name for path in (known[1].parent / TEMPORARY).iterdir() if not path.name.startswith(INDUCTOR)]
    if tidy and left:
        wrong(f"{label}: {left} left behind")
    try:
        now = command.read(root)
    except Exception as err:
        wrong(f"{label}: what was there cannot be read any more: {err}")
    else:
        if now not in (old, new) or (status == 0 and now != new):
            wrong(f"{label}: neither the old nor the new is there")
    status, said = _guarded(command.again(root), found, f"after {label}")
    if status or command.read(root) != new:
        wrong(f"{label}: the next run does not go on: {said[-200:]!r}")
    left = [name for name in contents(root) if ".part" in name or name.endswith((".lock", ".work"))]
    if left:
        wrong(f"{label}: {left} left behind after the next run")


def _rows_say_why(root: Path) -> bool:
    """A study says what failed in the rows of its cells."""
    rows = [results.files.parse(p.read_bytes(), "row") for p in root.glob("out/rows/*.json")]
    return any(row["status"] == "failed" and row["error"] for row in rows)


def _copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


# ---- the commands ----------------------------------------------------------------------------------------

SHORT = ["--limit", "48", "--set", "epochs=2", "--set", "retrain=1", "--set", "warmup=0", "--set", "batch_size=32"]


def _weights(folder: Path) -> None:
    writers.over_trained(folder, 0)
    (folder / "out").rename(folder / "trained")


def _old_network(folder: Path) -> None:
    _weights(folder)
    writers.rw.save(*writers.digits(2), folder / "out")


def _outcome(folder: Path) -> object:
    """The sizes of a folder's network and its plan; None where there is no network yet."""
    if not (folder / "out").is_dir() or not any((folder / "out").glob("*.safetensors")):
        return None
    if not (folder / "out" / "model.safetensors").exists():
        return None  # begun, and not trained
    return writers.tensors(networks.build(str(folder / "out")))


def _compress(folder: Path) -> list[str]:
    weights = str(folder / "trained" / "model.safetensors")
    how = ["--keep", "0.4", "--method", "svd", "--input", "1,1,8,8", "--weights"]
    over = ["--force"] if knows("compress", "--force") else []
    return ["compress", "digits-cnn", *how, weights, "--out", str(folder / "out"), *over]


@cache
def knows(command: str, flag: str) -> bool:
    said = io.StringIO()
    with redirect_stdout(said):
        main([command, "--help"])
    return flag in said.getvalue()


def _language(folder: Path) -> None:
    writers.language(-1)[0].save_pretrained(folder / "net")


def _compress_language(*more: str) -> Callable[[Path], list[str]]:
    how = ["--method", "svd", "--keep", "0.7", *more]
    return lambda folder: ["compress", f"hf:{folder / 'net'}", *how, "--out", str(folder / "out")]


def _language_outcome(folder: Path) -> object:
    if not (folder / "out").is_dir() or not any((folder / "out").iterdir()):
        return None
    weights, plan = writers.read_language(folder)
    waiting = folder / "out" / "config.json.part"  # whole, where its name could not be given
    config = (waiting if waiting.exists() else folder / "out" / "config.json").read_text()
    return weights, plain(plan, folder), plain(config, folder)


def plain(text: str, folder: Path) -> str:
    """Without the place of the network, which the plan names, and without last digits: torch rounds otherwise while its
    operations are counted."""
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.9g}", text.replace(str(folder), ""))


def _train(folder: Path) -> list[str]:
    return ["train", "digits-cnn", "--data", "digits", *SHORT, "--out", str(folder / "out")]


def _retrain(folder: Path) -> list[str]:
    return ["retrain", str(folder / "small"), "--data", "digits", *SHORT, "--out", str(folder / "out")]


def _iterate(folder: Path) -> list[str]:
    start = ["--weights", str(folder / "trained" / "model.safetensors"), "--rounds", "2", "--method", "svd"]
    return ["iterate", "digits-cnn", "--data", "digits", *start, *SHORT, "--out", str(folder / "out")]


def _rounds(folder: Path) -> object:
    path = folder / "out" / "round-2"
    row = path / "row.json"
    done = row.exists() and results.files.parse(row.read_bytes(), "row")["status"] == "done"  # a failure is a row, too
    return writers.tensors(networks.build(str(path))) if done else None


def resumed(first: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
    return lambda folder: [*first(folder), "--resume"]


STUDY = """
methods = ["svd"]
keeps = [0.5]
retrain = [0.5]
[[network]]
model = "digits-cnn"
data = "digits"
limit = 48
weights = "<digits-cnn>"
set = { epochs = 2, retrain = 1, warmup = 0 }
"""


def _study(folder: Path) -> list[str]:
    given = ["--weights", f"digits-cnn={folder / 'trained' / 'model.safetensors'}", "--workers", "1"]
    return ["run", str(folder / "s.toml"), *given, "--out", str(folder / "out")]


def _prepare_study(folder: Path) -> None:
    _weights(folder)
    (folder / "s.toml").write_text(STUDY)


def _done_cells(folder: Path) -> object:
    rows = results.read_rows(folder / "out") if (folder / "out" / "rows").is_dir() else []
    for row in rows:
        if row["status"] == "done":
            writers.rw.Plan.load(folder / "out" / row["plan"])
    return sorted(row["cell"] for row in rows if row["status"] == "done")


def _prepare_report(folder: Path) -> None:
    for i in (0, 1):
        made_rows.write(folder / f"rows-{i}", [made_rows.row(top1=80.0 + i)])
    status, said = run(["report", str(folder / "rows-0"), "-o", str(folder / "r.html"), "--png", str(folder / "png")])
    assert status == 0, said


def _report(folder: Path) -> list[str]:
    return ["report", str(folder / "rows-1"), "-o", str(folder / "r.html"), "--png", str(folder / "png")]


def _page(folder: Path) -> bytes:
    assert all(p.read_bytes().endswith(b"IEND\xaeB`\x82") for p in (folder / "png").glob("*.png"))
    return (folder / "r.html").read_bytes().replace(str(folder).encode(), b"")


def _prepare_small(folder: Path) -> None:
    writers.rw.save(*writers.digits(1), folder / "small")


def _export(to: str, *more: str) -> Callable[[Path], list[str]]:
    return lambda folder: ["export", str(folder / "small"), "--to", to, "--input", "1,1,8,8", *more]


def _program(to: str, name: str) -> Callable[[Path], object]:
    """Opening a program takes long, so the outputs of one are remembered."""
    import torch

    known: dict[bytes, object] = {}

    def read(folder: Path) -> object:
        path = folder / "small" / name
        if not path.exists():
            return None
        content = path.read_bytes()
        if content not in known:
            known[content] = [t.tolist() for t in open_exported(path, to)((torch.ones(2, 1, 8, 8),), {})]
        return known[content]

    return read


def _demo(folder: Path) -> list[str]:
    return ["demo", "--out", str(folder / "out")]


def _timed() -> Any:
    """The module of the command line that times networks, and for how long."""
    for name in ("rankwise.cli.outcome", "rankwise.cli.compress"):
        with suppress(ModuleNotFoundError):
            module = import_module(name)
            if hasattr(module, "SECONDS"):
                return module
    raise AssertionError("nobody times networks")


def _few(digits: Any, count: int = 400) -> Any:
    return type(digits)(**{key: v[:count] if hasattr(v, "shape") else v for key, v in digits.items()})


@contextmanager
def shortened() -> Iterator[None]:
    """The demo trains for a minute and `compress` takes times for seconds; what they write is the same for less."""
    import sklearn.datasets

    names = ("METHODS", "KEEPS", "RETRAINED", "REPEATS", "EPOCHS", "RETRAIN", "CALIBRATE")
    before = {name: getattr(demos, name) for name in names}
    for name, value in zip(before, (("svd",), (0.5,), (), 1, 1, 1, 8), strict=True):
        setattr(demos, name, value)
    load = sklearn.datasets.load_digits
    sklearn.datasets.load_digits = cache(lambda: _few(load()))  # reading and scoring all is half of a short training
    demos.SHOWN, shown = ("svd", 0.5), demos.SHOWN
    timed = _timed()
    seconds, timed.SECONDS = timed.SECONDS, (0.0, 0.0)
    beat, progress.BEAT = progress.BEAT, 1e6  # on a busy machine there would be lines beside the sentence
    try:
        yield
    finally:
        demos.SHOWN, timed.SECONDS, progress.BEAT = shown, seconds, beat
        sklearn.datasets.load_digits = load
        for name, value in before.items():
            setattr(demos, name, value)


def _demo_page(folder: Path) -> object:
    return (folder / "out" / "report.html").exists()


COMPRESS = Command("compress", _old_network, _compress, _compress, _outcome)
LANGUAGE = Command(
    "compress, for transformers", _language, _compress_language(), _compress_language("--force"), _language_outcome
)
TRAIN = Command("train", lambda folder: None, _train, resumed(_train), _outcome)
RETRAIN = Command("retrain", _prepare_small, _retrain, resumed(_retrain), _outcome)
ITERATE = Command("iterate", _weights, _iterate, resumed(_iterate), _rounds)
RUN = Command("run", _prepare_study, _study, lambda f: [*_study(f), "--retry-failed"], _done_cells)
REPORT = Command("report", _prepare_report, _report, _report, _page)
ONNX = Command(
    "export onnx", _prepare_small, _export("onnx"), _export("onnx", "--force"), _program("onnx", "model.onnx"), True
)
EXPORTED = replace(ONNX, name="export exported", first=_export("exported"), again=_export("exported", "--force"))
EXPORTED = replace(EXPORTED, read=_program("exported", "model.pt2"))
DEMO = Command("demo", lambda folder: None, _demo, _demo, _demo_page)
ALL = Search(allocations=1 << 30)
COMMANDS = (COMPRESS, LANGUAGE, TRAIN, RETRAIN, ITERATE, RUN, REPORT, ONNX, EXPORTED, DEMO)
