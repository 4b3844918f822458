"""Jobs that take a moment and write down that they ran, for tests that kill processes.

python tests/slow_jobs.py here|pool|ray FOLDER COUNT SECONDS
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from rankwise.core import files, workers


def slow(folder: str, name: str, seconds: float) -> None:
    """As a cell: nothing if the result is there, otherwise work, then the result whole or not at all."""
    path = Path(folder) / "rows" / f"{name}.json"
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with (Path(folder) / "log.txt").open("a") as log:
        log.write(f"{name} {os.getpid()}\n")
    time.sleep(seconds)
    files.write_whole(path, b"{}")


def deadly(folder: str, name: str, times: int) -> None:
    """Kills its own process, the first so many times."""
    with (Path(folder) / f"{name}.deaths").open("a+") as deaths:
        deaths.seek(0)
        if len(deaths.read()) < times:
            deaths.write("x")
            deaths.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    slow(folder, name, 0.0)


def broken(folder: str) -> None:
    raise OSError(f"no {Path(folder).name}")


def missing(folder: str, count: int) -> list[str]:
    return [f"job{i}" for i in range(count) if not (Path(folder) / "rows" / f"job{i}.json").exists()]


def main(engine: str, folder: str, count: int, seconds: float) -> int:
    jobs = [workers.Job(name, slow, (folder, name, seconds)) for name in missing(folder, count)]
    make = {"here": workers.Here, "pool": lambda: workers.Pool(2), "ray": lambda: workers.Ray("local", 2)}[engine]
    try:
        with make() as place:  # type: ignore[operator]
            workers.run(jobs, place, lambda job, error: None)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
