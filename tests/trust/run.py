"""`make trust`: crash states, failing operations, fuzzing and the long tests, as one table.

    python tests/trust/run.py [--inputs 1000000] [--only KIND …] [--names NAME …] [--thin 1] [--cores 2] [--out FILE]

Jobs run in two processes at a time; beside them the long tests, which wait for other processes most of the time.
Seconds are those of the processor, so that the table means the same on a busy machine. With --thin N about one N-th of
the crash states and of the failing operations is tried. With --lines FILE the lines of the table are kept there as they
come: what was stopped goes on, and parts are joined into one table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]
KINDS = ["fuzz", "crash", "fault", "tests", "supply"]
HEAD = ("writer or reader", "states", "failures", "inputs", "seconds", "violations")
# Writers whose states take milliseconds to open: states after one operation at most, and how often the work goes on.
EXPENSIVE = {"study": (128, 2000), "iterate": (256, 400), "demo": (256, 0), "folder for transformers": (32, 0)}
EXPENSIVE |= {"compress, block by block": (128, 60)}
HOUR = 3600  # seconds by the clock: no job takes as long on a busy machine, and none may hang for ever
RUNNING: set[int] = set()
STOPPED = threading.Event()  # by Ctrl-C or a signal: whatever runs is killed
Line = dict[str, Any]


@dataclass(frozen=True)
class Done:
    """A process that has ended; `seconds` of the processor, its own children included."""

    status: int
    out: str
    err: str
    seconds: float


def ran(command: list[str], cwd: Path | None = None, limit: float = HOUR) -> Done:
    """In a process group of its own, which is killed after `limit` seconds."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=cwd, env=environment(), start_new_session=True)
        RUNNING.add(process.pid)
        if STOPPED.is_set():
            end(process.pid)
        alarm = threading.Timer(limit, end, (process.pid,))
        alarm.start()
        _, status, used = os.wait4(process.pid, 0)
        alarm.cancel()
        RUNNING.discard(process.pid)
        end(process.pid)  # what it left behind
        process.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Done(process.returncode, texts[0], texts[1], used.ru_utime + used.ru_stime)


def end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def environment() -> dict[str, str]:
    source = str(HERE.parents[1] / "src")
    path = [source, str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}


def group(kind: str, names: str, thin: int) -> list[Line]:
    """Jobs in a process of their own; names are separated by |."""
    done = ran([sys.executable, str(Path(__file__)), "--job", kind, names, "--thin", str(thin)])
    found = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    if len(found) < len(names.split("|")):
        wrong = f"the job ended with status {done.status}: {done.err[-500:]}"
        found.append({"name": names, "seconds": 0.0, "violations": [wrong]})
    return [{**line, "name": f"{kind}: {line['name']}"} for line in found]


def fuzz(name: str, inputs: int) -> list[Line]:
    with tempfile.TemporaryDirectory() as folder:
        done = ran([sys.executable, str(HERE / "fuzz.py"), name, "--runs", str(inputs)], Path(folder))
    wrong = [line[:600] for line in done.out.splitlines() if line.startswith("VIOLATION")]
    count = re.search(r"^TRIED (\d+)", done.out, re.M)
    if count is None or (done.status and not wrong):
        wrong.append(f"it ended with status {done.status}: {done.out[-300:]}{done.err[-300:]}")
    return [
        {
            "name": f"fuzz: {name}",
            "inputs": int(count[1]) if count else 0,
            "seconds": done.seconds,
            "violations": wrong,
        }
    ]


def long_tests() -> list[Line]:
    """The tests that are marked for it: extremes, odd layers, killed workers, lost nodes, state machine."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "trust", str(HERE)]
    done = ran(command, HERE.parents[1])
    wrong = re.findall(r"^FAILED .*$|^ERROR .*$", done.out, re.M)
    if done.status and not wrong:
        wrong = [f"pytest ended with status {done.status}: {done.out[-500:]}{done.err[-300:]}"]
    passed = re.search(r"(\d+) passed", done.out)
    count = int(passed[1]) if passed else 0
    name = f"tests marked trust: {count} passed"
    return [{"name": name, "inputs": count, "seconds": done.seconds, "violations": wrong}]


def supply() -> list[Line]:
    """The pins beside what the package index says of them; what could not be asked is part of the name."""
    done = ran([sys.executable, str(HERE / "audit.py")])
    found = (
        json.loads(done.out) if done.out.startswith("{") else {"asked": 0, "unknown": [], "wrong": [done.err[-300:]]}
    )
    name = "; ".join(["supply: pinned dependencies", *(f"not known: {text}" for text in found["unknown"])])
    return [{"name": name, "inputs": found["asked"], "seconds": done.seconds, "violations": found["wrong"]}]


def job(kind: str, names: str, thin: int) -> None:
    """In the child: lines of the table as JSON."""
    import torch

    torch.set_num_threads(1)
    for name in names.split("|"):
        print(json.dumps(asdict(crash(name, thin) if kind == "crash" else fault(name, thin))), flush=True)


def crash(name: str, thin: int) -> Any:
    from trust import blocks, writers
    from trust import enumerate as crashes

    writer = next(w for w in (*writers.WRITERS, blocks.WRITER) if w.name == name)
    most, every = EXPENSIVE.get(name, (512, 60))
    return crashes.explore(writer, max(32, most // thin), every=every * thin)


def fault(name: str, thin: int) -> Any:
    from trust import blocks, faults

    command = next(c for c in (*faults.COMMANDS, blocks.COMMAND) if c.name == name)
    with faults.shortened():
        return faults.explore(command, replace(faults.ALL, stride=thin, allocations=faults.ALL.allocations // thin))


def jobs(only: list[str], inputs: int, thin: int, wanted: Callable[[str], bool]) -> Iterator[Callable[[], list[Line]]]:
    """Long jobs first; short ones share a process, because importing torch takes longer than they do."""
    import fuzz as targets

    from trust import blocks, faults, writers

    names = [w.name for w in (*writers.WRITERS, blocks.WRITER) if wanted(f"crash: {w.name}")]
    if "tests" in only and wanted("tests marked trust"):
        yield long_tests
    if "crash" in only:
        yield from (partial(group, "crash", name, thin) for name in names if name in EXPENSIVE)
        quick = [name for name in names if name not in EXPENSIVE]
        yield from [partial(group, "crash", "|".join(quick), thin)] if quick else []
    if "fault" in only:
        commands = [c.name for c in (blocks.COMMAND, *faults.COMMANDS) if wanted(f"fault: {c.name}")]
        yield from (partial(group, "fault", name, thin) for name in commands)
    if "fuzz" in only:
        yield from (partial(fuzz, name, inputs) for name in targets.TARGETS if wanted(f"fuzz: {name}"))
    if "supply" in only and wanted("supply: pinned dependencies"):
        yield supply


class Lines:
    """The lines of the table; in a file, too, where one is given."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        kept = path.read_text().splitlines() if path is not None and path.exists() else []
        self.found: list[Line] = list({line["name"]: line for line in map(json.loads, kept)}.values())

    def add(self, line: Line) -> None:
        line = {**line, "commit": commit()}
        self.found = [other for other in self.found if other["name"] != line["name"]] + [line]
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def missing(self, name: str) -> bool:
        """Whether there is no good line of that name; some say more behind it: how many tests, what is not known."""
        good = [line["name"] for line in self.found if not line["violations"]]
        return not any(text == name or text.startswith((f"{name}: ", f"{name}; ")) for text in good)


@cache
def commit() -> str:
    done = ran(["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"], HERE)
    return done.out.strip() or "unknown"


def shown(found: list[Line]) -> str:
    body = []
    for line in sorted(found, key=lambda line: line["name"].split(":")[0]):
        numbers = [line.get(key) or 0 for key in ("states", "failures", "inputs")]
        cells = [f"{n:,}" if n else "" for n in numbers]
        body.append((line["name"], *cells, f"{line['seconds']:.0f}", str(len(line["violations"]))))
    sums = [f"{sum(line.get(key) or 0 for line in found):,}" for key in ("states", "failures", "inputs")]
    wrong = sum(len(line["violations"]) for line in found)
    body.append(("all", *sums, f"{sum(line['seconds'] for line in found):,.0f}", str(wrong)))
    rows = [HEAD, ("---", *["---:"] * 5), *body]
    commits = ", ".join(sorted({line.get("commit", "") for line in found}))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + f"\n\ncommit {commits}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10**6)
    parser.add_argument("--thin", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--lines", type=Path)
    parser.add_argument("--names", nargs="*", metavar="NAME", help="such as 'fuzz: plan'")
    parser.add_argument("--job", nargs=2, metavar=("KIND", "NAME"))
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.job:
        job(*given.job, given.thin)
        return 0
    start = time.perf_counter()
    lines = Lines(given.lines)

    def wanted(name: str) -> bool:
        return lines.missing(name) and (given.names is None or name in given.names)

    def tell(work: Callable[[], list[Line]]) -> None:
        for line in work():
            if STOPPED.is_set():
                return  # it was killed, and found nothing
            lines.add(line)
            print(f"{line['name']}: {line['seconds']:.0f} s, {len(line['violations'])} violations", file=sys.stderr)
            for text in line["violations"][:5]:
                print(f"    {text}", file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ThreadPoolExecutor(given.cores) as pool, ThreadPoolExecutor(1) as beside:
        try:
            asked = list(jobs(given.only, given.inputs, given.thin, wanted))
            for future in [(beside if work is long_tests else pool).submit(tell, work) for work in asked]:
                future.result()
        except KeyboardInterrupt:
            STOPPED.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(RUNNING):
                end(process)
            return 130
    table = f"{shown(lines.found)}, {(time.perf_counter() - start) / 60:.0f} minutes by the clock"
    print(table)
    if given.out:
        given.out.write_text(table + "\n")
    return 1 if any(line["violations"] for line in lines.found) else 0


if __name__ == "__main__":
    sys.exit(main())
