"""Files that a stranger may give us, as functions from bytes: each refuses with one sentence or reads a sound value.

    python tests/trust/fuzz.py NAME --runs 1000000 [--seed 0]

With atheris the inputs follow the coverage of our readers; without it they are mutations of the corpus. Either way half
of the mutations know the structure (JSON, TOML, the header of a safetensors file), so that they get past the parsers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
LARGEST = 4096  # bytes of an input
SLOW = 5.0  # seconds; no input of this size may take as long

Mutate = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True)
class Target:
    """`run` raises nothing for any input. `structured` is a mutation that keeps the form of the file."""

    name: str
    run: Callable[[bytes], None]
    structured: Mutate


class Executed(BaseException):
    """An input made us run, load or connect to something."""


FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
)
FORBIDDEN += ("exec", "compile", "import", "ctypes.dlopen")
_watching = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event in FORBIDDEN:
        raise Executed(f"{event} {arguments!r:.200}")
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        raise Executed(f"open for writing: {arguments[0]!r:.200}")


@cache
def watch_for_executions() -> None:
    sys.addaudithook(_audit)


@cache
def scratch() -> Path:
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    holder = tempfile.TemporaryDirectory(dir=place, prefix="rankwise-fuzz-")
    _holders.append(holder)
    return Path(holder.name)


_holders: list[Any] = []


def put(name: str, data: bytes) -> Path:
    """The input as a file; that we write it is no crime."""
    global _watching
    before, _watching = _watching, False
    path = scratch() / name
    path.write_bytes(data)
    _watching = before
    return path


# ---- mutations -------------------------------------------------------------------------------------------

DEEP: Any = []
for _ in range(60):
    DEEP = [DEEP]
HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 10**9, -(10**9), 2**31, 2**63, 2**64, 10**29, 10**40, 0.0, -0.0, 0.5, 1e-300, 1e300,
    5e-324, "", "a", "x" * 300, "../../x", "/etc/passwd", "__class__", "__dict__", "con", "nul\0", "a\nb", "\u202eevil",
    "ﬀ", "e\u0301", "‮", "\ud800", "{}", "%s%n", "<script>alert(1)</script>", "$(id)", "f│chw", "svd", "params", [], {},
    [[]], [0], [-1], [10**9] * 3, {"": 0}, {"__class__": 1}, DEEP, [1, 2, 3, 4, 5, 6, 7, 8], "1e5", "NaN", "0x10",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value[:20]):
            found += places(inner, (*path, i))
    return found


def change_json(draw: random.Random, value: Any) -> Any:
    """One place of a JSON value: another value, away, twice, renamed, or what stands elsewhere."""
    where = places(value)
    path = draw.choice(where)
    if not path:
        return draw.choice(HOSTILE) if draw.random() < 0.05 else change_json(draw, value) if len(where) > 1 else []
    holder = value
    for step in path[:-1]:
        holder = holder[step]
    last, kind = path[-1], draw.random()
    if kind < 0.5:
        holder[last] = draw.choice(HOSTILE)
    elif kind < 0.6:
        del holder[last]
    elif kind < 0.7 and isinstance(holder, dict):
        holder[str(draw.choice(HOSTILE))] = holder[last]
    elif kind < 0.8 and isinstance(holder, list):
        holder.insert(draw.randrange(len(holder) + 1), json.loads(json.dumps(holder[last])))
    elif kind < 0.9 and isinstance(holder[last], int | float) and not isinstance(holder[last], bool):
        holder[last] = holder[last] * draw.choice([-1, 0, 2, 0.5, 1e9]) + draw.choice([-1, 0, 1])
    else:
        other: Any = value
        for step in draw.choice(where):
            other = other[step]
        holder[last] = json.loads(json.dumps(other))
    return value


def mutate_json(draw: random.Random, data: bytes) -> bytes:
    try:
        value = json.loads(data)
        for _ in range(draw.choice([1, 1, 2, 4])):
            value = change_json(draw, value)
        return json.dumps(value, ensure_ascii=draw.random() < 0.5).encode(errors="surrogatepass")
    except (ValueError, RecursionError, TypeError, OverflowError, LookupError):
        return mutate_bytes(draw, data)


def mutate_bytes(draw: random.Random, data: bytes) -> bytes:
    content = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at, kind = draw.randrange(len(content) + 1), draw.randrange(5)
        if kind == 0 and content:
            content[at % len(content)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del content[at : at + draw.randrange(1, 16)]
        elif kind == 2:
            content[at:at] = draw.randbytes(draw.randrange(1, 8))
        elif kind == 3:
            content[at:at] = content[at : at + draw.randrange(1, 40)]
        else:
            content[at:at] = draw.choice([b"\0", b"\xff", b'"', b"{", b"[" * 50, b"9" * 50, b"\\ud800", b"1e999", b"]"])
    return bytes(content)


def mutate_safetensors(draw: random.Random, data: bytes) -> bytes:
    """The header as JSON, or the JSON that our own metadata hold as text; its length fits again, mostly."""
    try:
        (size,) = struct.unpack("<Q", data[:8])
        header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
        inner = header.get("__metadata__") or {}
        key = draw.choice([*inner] or [""])
        if key in inner and draw.random() < 0.7:
            inner[key] = mutate_json(draw, inner[key].encode()).decode(errors="replace")
        else:
            header = change_json(draw, header)
        text = json.dumps(header).encode()
    except (ValueError, AttributeError, struct.error, LookupError, RecursionError, TypeError, OverflowError):
        return mutate_bytes(draw, data)
    length = len(text) if draw.random() < 0.9 else draw.choice([0, 1, 2**31, 2**63, len(text) + 1, 10**8])
    return struct.pack("<Q", length) + text + rest


WORDS = [
    b"nan", b"inf", b"-1", b"1e400", b"9" * 5000, b"[[", b"{", b'"""', b"'", b"1979-05-27", b"true", b"= =",
    b"[" * 200, b"0x" + b"f" * 400, b"[[network]]\n", b"keeps = {first = 0.9, last = 0.1, count = 1000000000}\n",
    b"keeps = {alpha = 0.9, count = 10000000000}\n", b"repeats = 1000000000000\n", b'methods = ["../../x"]\n', b"\0",
    b'model = "__class__"\n', b'weights = "/etc/passwd"\n', b"seed = 99999999999999999999999\n", b'data = "\\ud800"\n',
]  # fmt: skip


def mutate_toml(draw: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    at, kind = draw.randrange(len(lines)), draw.randrange(4)
    if kind == 0:
        lines.insert(at, draw.choice(lines))
    elif kind == 1 and b"=" in lines[at]:
        key, _, value = lines[at].partition(b"=")
        lines[at] = key + b"= " + draw.choice(WORDS) if draw.random() < 0.5 else draw.choice(WORDS) + b" =" + value
    elif kind == 2:
        del lines[at]
    else:
        lines.insert(at, draw.choice(WORDS))
    return b"\n".join(lines)


# ---- targets ---------------------------------------------------------------------------------------------


def plan(data: bytes) -> None:
    from rankwise.planning.plan import Plan

    made = Plan.loads(data)
    assert Plan.loads(made.dumps()) == made, "what is read is written back"
    made.keep()


def table_file(data: bytes) -> None:
    from rankwise.planning import table_file as reader

    reader.read(put("t.table", data))


def table_header(data: bytes) -> None:
    """A header whose checksum fits: made by somebody who knows how."""
    from rankwise.core import files
    from rankwise.planning import table_file as reader

    header = files.parse(data, "header")
    header["checksum"] = reader._checksum(header, tensors_of_table())
    reader.read_header(header, tensors_of_table(), "the table")


@cache
def tensors_of_table() -> dict[str, Any]:
    from safetensors.numpy import load

    return dict(load((CORPUS / "table-file" / "real.bin").read_bytes()))


def weights(data: bytes) -> None:
    from rankwise.models import networks
    from rankwise.surgery import checkpoint

    path = put("model.safetensors", data)
    refused(lambda: networks._trained_network(path))
    tensors, header = checkpoint._read(path)
    checkpoint._load_state_(pair(), tensors, header, path)


@cache
def pair() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def network_weights(data: bytes) -> None:
    from rankwise.models.weights import load_weights_

    load_weights_(pair(), put("w.safetensors", data))


def training_state(data: bytes) -> None:
    from rankwise.training import resume

    state = resume.loads(data, "the state")
    resume.check_job(state, {"kind": "train"}, "the state")


def study(data: bytes) -> None:
    from rankwise.studies.study_file import read_study

    read_study(put("s.toml", data))


def row(data: bytes) -> None:
    from rankwise.reports import curves
    from rankwise.reports.tables import tables
    from rankwise.training import results

    path = put("row.json", data)
    found = results._read_row(path)
    if found is not None:
        curves.panels([found])
        tables([found], (1.0,), False)


def published(data: bytes) -> None:
    from rankwise.reports import published as tables

    tables.points_of([tables.read_table(data, "the table")])


def measured_times(data: bytes) -> None:
    from rankwise.timing.cache import Store

    for value in Store(put("times.json", data)).known.values():
        from rankwise.timing import cost_model

        cost_model._samples(value["forms"])


def refused(call: Callable[[], Any]) -> None:
    from rankwise.errors import RankwiseError

    try:
        call()
    except RankwiseError as err:
        check_sentence(err)


def check_sentence(err: Exception) -> None:
    text = str(err)
    assert text.strip(), "a refusal says something"
    assert len(text) < 3 * LARGEST, f"a sentence of {len(text)} characters"


TARGETS = {
    target.name: target
    for target in (
        Target("plan", plan, mutate_json),
        Target("table-file", table_file, mutate_safetensors),
        Target("table-header", table_header, mutate_json),
        Target("weights", weights, mutate_safetensors),
        Target("network-weights", network_weights, mutate_safetensors),
        Target("training-state", training_state, mutate_safetensors),
        Target("study", study, mutate_toml),
        Target("row", row, mutate_json),
        Target("published", published, mutate_json),
        Target("measured-times", measured_times, mutate_json),
    )
}


def corpus(name: str) -> list[bytes]:
    found = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    assert found, f"there is no corpus for {name}"
    return found


def try_one(target: Target, data: bytes) -> None:
    """One input: a value, or one sentence; everything else is raised."""
    global _watching
    _watching = True
    start = time.perf_counter()
    try:
        refused(lambda: target.run(data))
    finally:
        _watching = False
    assert time.perf_counter() - start < SLOW, "an input that takes too long"


def warm(target: Target) -> None:
    """Imports happen before anybody watches: json looks for the encoding of bytes, too."""
    for encoding in ("utf-8-sig", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "utf-16", "utf-32"):
        "a".encode(encoding).decode(encoding)
    draw = random.Random(0)
    for data in [*corpus(target.name), *(mutated(target, draw) for _ in range(300))]:
        with suppress(Exception):  # it comes again, watched
            target.run(data)
    watch_for_executions()


def mutated(target: Target, draw: random.Random, data: bytes | None = None) -> bytes:
    data = draw.choice(corpus_of(target.name)) if data is None else data
    return (target.structured if draw.random() < 0.5 else mutate_bytes)(draw, data)


@cache
def corpus_of(name: str) -> tuple[bytes, ...]:
    return tuple(corpus(name))


@dataclass
class Tried:
    inputs: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


def tell(target: Target, data: bytes, err: BaseException) -> str:
    import traceback

    last = traceback.extract_tb(err.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return f"{target.name}: {type(err).__name__}: {err!s:.200} ({where}) for {data[:400]!r}"


def mutations(target: Target, runs: int, seed: int = 0, seconds: float = 1e9) -> Tried:
    """Without atheris: mutations of the corpus, chains of up to three."""
    found, draw, start = Tried(), random.Random(f"{target.name} {seed}"), time.perf_counter()
    warm(target)
    while found.inputs < runs and time.perf_counter() - start < seconds:
        data = mutated(target, draw)
        for _ in range(draw.randrange(3)):
            data = mutated(target, draw, data)
        found.inputs += 1
        try:
            try_one(target, data)
        except (Exception, Executed) as err:
            found.violations.append(tell(target, data, err))
            if len(found.violations) >= 20:
                break
    found.seconds = time.perf_counter() - start
    return found


def covered(target: Target, runs: int, seed: int, seconds: float) -> None:
    """With atheris; it ends the process."""
    import atheris

    with atheris.instrument_imports(include=["rankwise"]):
        import rankwise.models.networks
        import rankwise.reports.curves
        import rankwise.reports.published
        import rankwise.studies.study_file
        import rankwise.timing.cost_model  # noqa: F401
    warm(target)
    start, count = time.perf_counter(), [0]

    def one(data: bytes) -> None:
        count[0] += 1
        try:
            try_one(target, data)
        except (Exception, Executed) as err:
            print("VIOLATION", tell(target, data, err), flush=True)
            raise

    def mutate(data: bytes, largest: int, number: int) -> bytes:
        draw = random.Random(number)
        if draw.random() < 0.5:
            return bytes(atheris.Mutate(data, largest))
        return target.structured(draw, data)[:largest]

    with tempfile.TemporaryDirectory() as work:
        for i, data in enumerate(corpus(target.name)):
            (Path(work) / str(i)).write_bytes(data)
        limits = [f"-runs={runs}", f"-seed={seed + 1}", f"-max_len={LARGEST}", f"-max_total_time={int(seconds)}"]
        limits += ["-rss_limit_mb=4096", "-timeout=20", "-verbosity=0", "-print_final_stats=1"]
        import atexit

        atexit.register(lambda: print(f"TRIED {count[0]} {time.perf_counter() - start:.1f}", flush=True))
        atheris.Setup([sys.argv[0], *limits, work], one, custom_mutator=mutate)
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TARGETS)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--plain", action="store_true", help="without atheris")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    target = TARGETS[given.name]
    try:
        import atheris  # noqa: F401
    except ImportError:
        given.plain = True
    if not given.plain:
        covered(target, given.runs, given.seed, given.seconds)
        return
    found = mutations(target, given.runs, given.seed, given.seconds)
    for text in found.violations:
        print("VIOLATION", text)
    print(f"TRIED {found.inputs} {found.seconds:.1f}")
    sys.exit(1 if found.violations else 0)


if __name__ == "__main__":
    main()
