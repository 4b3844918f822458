"""`make trust`: crash states, failing operations, fuzzing and the long tests, as one table.

    python tests/trust/run.py [--minutes 30] [--inputs 1000000] [--thin 1] [--out FILE]

Jobs run on two cores. Fuzzing gets the time that is left, shared out evenly; the table says how many inputs were tried.
With --thin N, for a busy machine, about one N-th of the crash states and of the failing operations is tried.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]
# Of commands that take seconds, every so-many-th operation fails; exports and the demo are tried with a full disk only.
STRIDES = {"iterate": 2, "run": 3, "demo": 5, "export onnx": 1, "export exported": 1}
FULL_DISK = ("demo", "export onnx", "export exported")
KINDS = ["crash", "fault", "tests", "fuzz"]
HEAD = ("writer or reader", "states", "failures", "inputs", "seconds", "violations")


def child(kind: str, group: str, minutes: float, thin: int) -> list[dict[str, Any]]:
    """Jobs in a process of their own; names of a group are separated by |."""
    command = [sys.executable, str(Path(__file__)), "--job", kind, group, "--thin", str(thin)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * minutes, env=environment())
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(found) < len(group.split("|")):
        wrong = f"the job ended with status {done.returncode}: {done.stderr[-500:]}"
        found.append({"name": group, "seconds": 0.0, "violations": [wrong]})
    return [{**line, "name": f"{kind}: {line['name']}"} for line in found]


def environment() -> dict[str, str]:
    source = str(HERE.parents[1] / "src")
    path = [source, str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}


def fuzz(name: str, inputs: int, seconds: float) -> dict[str, Any]:
    """With atheris where it is installed; it counts its inputs itself."""
    start = time.perf_counter()
    options = ["--runs", str(inputs), "--seconds", str(max(5, int(seconds)))]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "fuzz.py"), name, *options]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=folder, env=environment())
    said = done.stdout + done.stderr
    wrong = [line[:600] for line in said.splitlines() if line.startswith("VIOLATION") or "ERROR: libFuzzer" in line]
    counts = re.findall(r"(?:number_of_executed_units: |TRIED )(\d+)", said)
    if not counts:
        wrong.append(f"it ended with status {done.returncode}: {said[-300:]}")
    tried = max(map(int, counts), default=0)
    spent = time.perf_counter() - start
    return {"name": f"fuzz: {name}", "inputs": tried, "seconds": spent, "violations": wrong}


def long_tests() -> dict[str, Any]:
    """The tests that are marked for it: extremes, odd layers, killed workers, state machine."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "trust", str(HERE)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1], env=environment())
    wrong = re.findall(r"^FAILED .*$|^ERROR .*$", done.stdout, re.M)
    if done.returncode and not wrong:
        wrong = [f"pytest ended with status {done.returncode}: {done.stdout[-500:]}{done.stderr[-300:]}"]
    passed = re.search(r"(\d+) passed", done.stdout)
    count = int(passed[1]) if passed else 0
    spent = time.perf_counter() - start
    return {"name": f"tests marked trust: {count} passed", "inputs": count, "seconds": spent, "violations": wrong}


def job(kind: str, group: str, thin: int) -> None:
    """In the child: lines of the table as JSON."""
    import torch

    torch.set_num_threads(1)
    for name in group.split("|"):
        print(json.dumps(asdict(crash(name, thin) if kind == "crash" else fault(name, thin))), flush=True)


def crash(name: str, thin: int) -> Any:
    from trust import enumerate as crashes
    from trust import writers

    writer = next(w for w in writers.WRITERS if w.name == name)
    return crashes.explore(writer, max(32, 512 // thin), every={"study": 2000}.get(name, 60) * thin)


def fault(name: str, thin: int) -> Any:
    from trust import faults

    command = next(c for c in faults.COMMANDS if c.name == name)
    once = ("ENOSPC",) if name in FULL_DISK else tuple(faults.ERRORS)
    with faults.shortened():
        return faults.explore(command, once, () if name in FULL_DISK else ("ENOSPC",), STRIDES.get(name, 1) * thin)


def groups() -> Iterator[tuple[str, str]]:
    """Long jobs first; short ones share a process, because importing torch takes longer than they do."""
    from trust import faults, writers

    yield "crash", "study"
    for command in sorted(faults.COMMANDS, key=lambda c: c.name not in STRIDES):
        yield "fault", command.name
    yield "crash", "|".join(writer.name for writer in writers.WRITERS if writer.name != "study")


def shown(found: list[dict[str, Any]]) -> str:
    body = []
    for line in found:
        numbers = [line.get(key) or 0 for key in ("states", "failures", "inputs")]
        cells = [f"{n:,}" if n else "" for n in numbers]
        body.append((line["name"], *cells, f"{line['seconds']:.0f}", str(len(line["violations"]))))
    sums = [f"{sum(line.get(key) or 0 for line in found):,}" for key in ("states", "failures", "inputs")]
    wrong = sum(len(line["violations"]) for line in found)
    body.append(("all", *sums, f"{sum(line['seconds'] for line in found):.0f}", str(wrong)))
    rows = [HEAD, ("---", *["---:"] * 5), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--inputs", type=int, default=10**6)
    parser.add_argument("--thin", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", nargs=2, metavar=("KIND", "NAME"))
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS)
    given = parser.parse_args()
    if given.job:
        job(*given.job, given.thin)
        return 0
    import fuzz as targets

    end = time.perf_counter() + 60 * given.minutes
    found: list[dict[str, Any]] = []

    def tell(lines: list[dict[str, Any]]) -> None:
        found.extend(lines)
        for line in lines:
            print(f"{line['name']}: {line['seconds']:.0f} s, {len(line['violations'])} violations", file=sys.stderr)
            for text in line["violations"][:5]:
                print(f"    {text}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(given.cores) as pool:
        wanted = [pair for pair in groups() if pair[0] in given.only]
        jobs = [pool.submit(lambda p: tell(child(*p, given.minutes, given.thin)), pair) for pair in wanted]
        jobs += [pool.submit(lambda: tell([long_tests()]))] if "tests" in given.only else []
        for future in jobs:
            future.result()
        share = given.cores * (end - time.perf_counter() - 20) / len(targets.TARGETS)
        names = list(targets.TARGETS) if "fuzz" in given.only else []
        for future in [pool.submit(lambda n: tell([fuzz(n, given.inputs, share)]), name) for name in names]:
            future.result()
    table = shown(found)
    print(table)
    if given.out:
        given.out.write_text(table + "\n")
    return 1 if any(line["violations"] for line in found) else 0


if __name__ == "__main__":
    sys.exit(main())
