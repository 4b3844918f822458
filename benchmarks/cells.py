"""What scheduling costs: a study of 10,000 cells that do next to nothing, on a local Ray.

    python benchmarks/cells.py [--cells 10000] [--engine ray|pool]

Every cell sleeps for some milliseconds and writes its row as real cells do. Overhead of a cell is the time that a
worker had for it, minus the time that it worked: workers · (all seconds) ÷ cells − (seconds inside cells) ÷ cells.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import psutil
from common import machine, say

from rankwise.core import files, workers
from rankwise.core.workers import Job
from rankwise.studies.cell import row_path
from rankwise.studies.study import Cell
from rankwise.studies.study_file import make_study
from rankwise.training.results import write_row


def fake(cell: Cell, out: str, seconds: float) -> None:
    start = time.perf_counter()
    time.sleep(seconds)
    row = {"format": 1, "status": "done", "cell": cell.name, "repeat": cell.repeat, "asked": cell.asked}
    write_row(row_path(cell, out), {**row, "seconds": time.perf_counter() - start})


def memory(driver: psutil.Process) -> tuple[float, float]:
    """MB of this process, and of the largest process that works for it."""
    workers = [p for p in driver.children(recursive=True) if p.name().startswith(("ray::", "python"))]
    sizes = [0.0]
    for process in workers:
        try:
            sizes.append(process.memory_info().rss / 2**20)
        except psutil.NoSuchProcess:
            continue
    return driver.memory_info().rss / 2**20, max(sizes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--engine", choices=("ray", "pool"), default="ray")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", type=float, default=0.002, help="seconds that a cell sleeps")
    args = parser.parse_args()
    grid = {"methods": ["alds", "svd"], "keeps": [0.8, 0.6, 0.4, 0.3, 0.2], "repeats": args.cells // 10}
    study = make_study({**grid, "network": [{"model": "resnet20", "data": "digits"}]}, "fake", "fake.toml")
    start = time.perf_counter()
    cells = study.cells()
    jobs = [Job(cell.name, fake, ()) for cell in cells]
    say(f"{len(jobs):,} cells listed and named in {time.perf_counter() - start:.1f} s; {machine()}")
    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        make = workers.Ray("local", args.workers) if args.engine == "ray" else workers.Pool(args.workers)
        with make as engine:
            warm = [Job(f"warm{i}", time.sleep, (0.5,)) for i in range(2 * args.workers)]
            workers.run(warm, engine, lambda job, error: None)
            say(f"{args.engine} started with {args.workers} workers in {time.perf_counter() - start:.1f} s")
            jobs = [Job(cell.name, fake, (cell, out, args.work)) for cell in cells]
            measure(jobs, cells, out, engine, args.workers)


def measure(jobs: list[Job], cells: list[Cell], out: str, engine: workers.Workers, workers: int) -> None:
    driver, done, wrong = psutil.Process(), 0, 0

    def told(job: Job, error: str | None) -> None:
        nonlocal done, wrong
        done, wrong = done + 1, wrong + (error is not None)
        if done % (len(jobs) // 5) == 0 or done == 500:
            mine, largest = memory(driver)
            spent = time.perf_counter() - start
            say(f"{done:,} cells after {spent:.1f} s: driver {mine:.0f} MB, worker {largest:.0f} MB")

    start = time.perf_counter()
    workers.run(jobs, engine, told)
    seconds = time.perf_counter() - start
    rows = [files.parse(row_path(cell, out).read_bytes(), cell.name) for cell in cells]
    worked = sum(row["seconds"] for row in rows) / len(rows)
    overhead = workers * seconds / len(rows) - worked
    clock = 1000 * seconds / len(rows)
    say(
        f"n = {len(rows):,} rows, {wrong} wrong, {seconds:.1f} s: {clock:.2f} ms for a cell on the clock, "
        f"{1000 * worked:.2f} ms of work, overhead {1000 * overhead:.2f} ms of a worker's time"
    )


if __name__ == "__main__":
    main()
