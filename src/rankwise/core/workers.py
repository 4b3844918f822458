"""Running many independent jobs: in this process, in a pool of processes, or as Ray tasks. One loop for all three.

A job writes its result itself, whole or not at all, and does nothing if the result is there. So whatever is killed
loses only what was in flight, and running everything again does exactly what is missing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from rankwise.errors import RankwiseError, need

RETRIES = 3  # how often a job is tried again after its process died


@dataclass(frozen=True)
class Job:
    """`work(*given)` in some process, once the job called `after` has ended well. `work` is a function of a module."""

    name: str
    work: Callable[..., None]
    given: tuple[Any, ...]
    after: str | None = None
    cpus: float = 1
    gpus: float = 0


Told = Callable[[Job, str | None], None]  # a job that ended, and what went wrong


class Workers(Protocol):
    """Where jobs run. `window` is how many may wait or run at a time: more would only fill the memory."""

    window: int

    def start(self, job: Job) -> Any: ...

    def wait(self, handles: list[Any]) -> list[tuple[Any, str | None]]:
        """At least one handle that has ended, each with None or what went wrong."""
        ...


def run(jobs: Iterable[Job], engine: Workers, told: Told) -> None:
    """Run every job once; those that come after a failed one are not run, and fail with its error."""
    ready: deque[Job] = deque()
    later: dict[str, list[Job]] = {}
    for job in jobs:
        ready.append(job) if job.after is None else later.setdefault(job.after, []).append(job)
    running: dict[Any, Job] = {}
    while ready or running:
        while ready and len(running) < engine.window:
            job = ready.popleft()
            running[engine.start(job)] = job
        for handle, error in engine.wait(list(running)):
            job = running.pop(handle)
            told(job, error)
            if error is None:
                ready.extend(later.pop(job.name, ()))
            else:
                _give_up(job, error, later, told)
    assert not later, "every job comes after one of the jobs"


def _give_up(job: Job, error: str, later: dict[str, list[Job]], told: Told) -> None:
    for other in later.pop(job.name, ()):
        told(other, f"{job.name} failed before it: {error}")
        _give_up(other, error, later, told)


def attempt(work: Callable[..., None], given: tuple[Any, ...]) -> str | None:
    """None, or what went wrong as one sentence: exceptions of other packages may not survive the way back."""
    try:
        work(*given)
    except Exception as err:
        return str(err) if isinstance(err, RankwiseError) else f"{type(err).__name__}: {err}"
    return None


class Here:
    """One job after the other, in this process."""

    window = 1

    def start(self, job: Job) -> tuple[str, str | None]:
        return job.name, attempt(job.work, job.given)

    def wait(self, handles: list[Any]) -> list[tuple[Any, str | None]]:
        return [(handle, handle[1]) for handle in handles]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        pass


class Pool:
    """Processes of this machine. If one dies, the jobs that were under way are tried again in a new pool."""

    def __init__(self, workers: int, threads: int = 1) -> None:
        self.workers, self.threads = workers, threads
        self.window = 2 * workers
        self.others = set(multiprocessing.active_children())
        self.pool = self._pool()
        self.futures: dict[int, Future[str | None]] = {}
        self.jobs: dict[int, tuple[Job, int]] = {}  # and how often its process died
        self.count = 0

    def _pool(self) -> ProcessPoolExecutor:
        # Not forked: torch has threads, and a fork of a process with threads may hang.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.workers, context, _begin, (self.threads, context.Value("i", 0)))

    def start(self, job: Job) -> int:
        self.count += 1
        self.jobs[self.count] = (job, 0)
        self._submit(self.count)
        return self.count

    def _submit(self, handle: int) -> None:
        job, _ = self.jobs[handle]
        try:
            self.futures[handle] = self.pool.submit(attempt, job.work, job.given)
        except BrokenProcessPool as err:  # `wait` sees it with the others
            self.futures[handle] = Future()
            self.futures[handle].set_exception(err)

    def wait(self, handles: list[Any]) -> list[tuple[Any, str | None]]:
        wait(self.futures.values(), return_when=FIRST_COMPLETED)
        ended = [handle for handle, future in self.futures.items() if future.done()]
        good = [h for h in ended if not isinstance(self.futures[h].exception(), BrokenProcessPool)]
        found: list[tuple[Any, str | None]] = []
        for handle in good:
            error = self.futures[handle].exception()
            found.append((handle, f"{type(error).__name__}: {error}" if error else self.futures[handle].result()))
            del self.futures[handle], self.jobs[handle]
        return found + (self._again() if len(good) < len(ended) else [])

    def _again(self) -> list[tuple[Any, str | None]]:
        """Start anew with the jobs of a pool whose process died; which job it was is not known."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.pool = self._pool()
        lost: list[tuple[Any, str | None]] = []
        for handle, (job, deaths) in list(self.jobs.items()):
            self.jobs[handle] = (job, deaths + 1)
            if deaths < RETRIES:
                self._submit(handle)
            else:
                del self.futures[handle], self.jobs[handle]
                lost.append((handle, f"its process died {deaths + 1} times"))
        return lost

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            for process in set(multiprocessing.active_children()) - self.others:
                process.kill()  # what is running is done again next time
        self.pool.shutdown(wait=True, cancel_futures=True)


def _begin(threads: int, count: Any) -> None:
    """In every process of the pool: Ctrl-C is for the parent, none outlives it, and GPUs are shared out in turn."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        with count.get_lock():
            number, count.value = count.value, count.value + 1
        torch.cuda.set_device(number % torch.cuda.device_count())
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process of the pool has a parent"
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: Any) -> None:
    parent.join()
    os._exit(1)


class Ray:
    """Ray tasks with the CPUs and GPUs that jobs ask for; Ray finds them a place, and tries again if a worker is lost.

    `address` is that of a running cluster, `local` for one on this machine that ends with us, or `auto` for the
    running one if there is any and a local one otherwise. All machines of a cluster see the results folder.
    """

    def __init__(self, address: str = "auto", workers: int | None = None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # A task that Ray ends because memory runs low would be tried again for ever.
        os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))
        self.ray = need("ray", extra="ray", purpose="running on Ray")
        options: dict[str, Any] = {"log_to_driver": False, "ignore_reinit_error": True, "logging_level": "ERROR"}
        here = {"num_cpus": workers, "include_dashboard": False}
        try:
            self.ray.init(address=address, **options, **(here if address == "local" else {}))
        except ConnectionError as err:
            if address != "auto":
                why = str(err).splitlines()[0]
                raise RankwiseError(f"there is no Ray cluster at {address} ({why}): start one, or give auto") from None
            self.ray.init(**options, **here, address="local")
            address = "local"
        self.local = address == "local"
        self.has = self.ray.cluster_resources()
        self.window = max(64, 4 * int(self.has.get("CPU", 1)))
        self.task = self.ray.remote(_task)

    def start(self, job: Job) -> Any:
        cpus, gpus = self.has.get("CPU", 0), self.has.get("GPU", 0)
        if self.local and (job.cpus > cpus or job.gpus > gpus):  # a cluster may grow, and Ray waits for that
            raise RankwiseError(
                f"a job asks for {job.cpus:g} CPUs and {job.gpus:g} GPUs, and Ray has {cpus:g} and {gpus:g} here: "
                f"give the address of a cluster, or lower cpus and gpus of the study"
            )
        fits = self.task.options(num_cpus=job.cpus, num_gpus=job.gpus, max_retries=RETRIES)
        return fits.remote(job.work, job.given, job.cpus)

    def wait(self, handles: list[Any]) -> list[tuple[Any, str | None]]:
        ended, _ = self.ray.wait(handles, num_returns=1)
        rest = [handle for handle in handles if handle not in ended]
        more, _ = self.ray.wait(rest, num_returns=len(rest), timeout=0) if rest else ([], [])
        return [(handle, self._result(handle)) for handle in [*ended, *more]]

    def _result(self, handle: Any) -> str | None:
        try:
            error: str | None = self.ray.get(handle)
        except self.ray.exceptions.RayError as err:
            return f"Ray lost it: {type(err).__name__}: {(str(err).splitlines() or [''])[0]}"
        return error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        self.ray.shutdown()


def _task(work: Callable[..., None], given: tuple[Any, ...], cpus: float) -> str | None:
    torch.set_num_threads(max(1, int(cpus)))
    return attempt(work, given)
