"""Jobs in this process, in a pool and on a real local Ray: every job once, order, failures, and kills of all sorts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

import slow_jobs
from rankwise.core import workers
from rankwise.core.workers import Job
from rankwise.errors import RankwiseError
from rankwise.studies import runner
from rankwise.studies.study import fill_in
from rankwise.studies.study_file import make_study
from rankwise.training import results

HERE = Path(__file__).resolve().parents[1]
PATH = os.pathsep.join([str(HERE), str(Path(workers.__file__).parents[2])])


@pytest.fixture(scope="module")
def ray_engine() -> Iterator[Any]:
    pytest.importorskip("ray")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = PATH  # workers must find the jobs
    with workers.Ray("local", 2) as engine:
        yield engine
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture(scope="module")
def pool_engine() -> Iterator[Any]:
    with workers.Pool(2) as engine:
        yield engine


def engine_of(kind: str, request: pytest.FixtureRequest) -> Any:
    return workers.Here() if kind == "here" else request.getfixturevalue(f"{kind}_engine")


def log_of(folder: Path) -> Counter[str]:
    """How often each job began to work."""
    return Counter(line.split()[0] for line in (folder / "log.txt").read_text().splitlines())


@pytest.mark.parametrize("kind", ["here", "pool", "ray"])
def test_every_job_once_in_order_and_with_its_error(kind: str, request: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    engine = engine_of(kind, request)
    jobs = [
        Job("first", slow_jobs.slow, (folder, "first", 0.0)),
        *(Job(f"job{i}", slow_jobs.slow, (folder, f"job{i}", 0.0), after="first") for i in range(8)),
        Job("bad", slow_jobs.broken, (folder,)),
        Job("after bad", slow_jobs.slow, (folder, "never", 0.0), after="bad"),
        Job("after that", slow_jobs.slow, (folder, "never", 0.0), after="after bad"),
    ]
    told: list[tuple[str, str | None]] = []
    workers.run(jobs, engine, lambda job, error: told.append((job.name, error)))
    ended = dict(told)
    assert len(told) == len(jobs) == len(ended)
    wrong = {name: error for name, error in ended.items() if error is not None}
    assert set(wrong) == {"bad", "after bad", "after that"}
    assert wrong["bad"] == f"OSError: no {tmp_path.name}"
    assert wrong["after that"].endswith(wrong["bad"])
    assert log_of(tmp_path) == Counter(["first", *(f"job{i}" for i in range(8))])
    began = (tmp_path / "log.txt").read_text().split()
    assert began[0] == "first"


@pytest.mark.parametrize("kind", ["pool", "ray"])
def test_a_killed_worker_loses_only_what_was_in_flight(kind: str, request: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    told: list[tuple[str, str | None]] = []

    def tell(job: Job, error: str | None) -> None:
        told.append((job.name, error))

    jobs = [Job(f"job{i}", slow_jobs.slow, (folder, f"job{i}", 0.02)) for i in range(12)]
    jobs.insert(4, Job("dies", slow_jobs.deadly, (folder, "dies", 1)))
    workers.run(jobs, engine_of(kind, request), tell)
    assert dict(told) == dict.fromkeys([job.name for job in jobs])
    assert len(told) == len(jobs)
    assert (tmp_path / "dies.deaths").read_text() == "x"
    assert sum(log_of(tmp_path).values()) <= len(jobs) + 2  # what the death interrupted, and nothing else


@pytest.mark.parametrize("kind", ["pool", "ray"])
def test_a_job_that_always_kills_its_worker_is_given_up(
    kind: str, request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "RETRIES", 1)
    folder = str(tmp_path)
    told: dict[str, str | None] = {}
    jobs = [Job("dies", slow_jobs.deadly, (folder, "dies", 99))]
    workers.run(jobs, engine_of(kind, request), lambda job, error: told.update({job.name: error}))
    assert {"pool": "its process died 2 times", "ray": "Ray lost it: WorkerCrashedError"}[kind] in str(told["dies"])
    assert (tmp_path / "dies.deaths").read_text() == "x" * (workers.RETRIES + 1)


@pytest.mark.parametrize("kind", ["pool", "ray"])
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_what_is_killed_goes_on(kind: str, sign: int, tmp_path: Path) -> None:
    """Ctrl-C reaches the whole group, kill -9 the first process only; then the rest is run, and nothing twice."""
    if kind == "ray":
        pytest.importorskip("ray")
    count = 60
    command = [sys.executable, str(HERE / "slow_jobs.py"), kind, str(tmp_path), str(count), "0.25"]
    environment = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 600
    while len(slow_jobs.missing(str(tmp_path), count)) > count - 3 and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    # Agents of Ray itself notice a minute later that they are alone; they do none of our work.
    family = [p for p in family if "Agent" not in p.name()]
    os.killpg(process.pid, sign) if sign == signal.SIGINT else process.kill()
    assert process.wait(300) == (130 if sign == signal.SIGINT else -sign)
    _, alive = psutil.wait_procs(family, timeout=300)
    assert not alive, "somebody outlived the first process"
    done = {path.stem for path in (tmp_path / "rows").glob("*.json")}
    assert 3 <= len(done) < count
    began = log_of(tmp_path)
    assert slow_jobs.main("here", str(tmp_path), count, 0.0) == 0
    again = log_of(tmp_path) - began
    assert set(again) == {f"job{i}" for i in range(count)} - done  # exactly the missing ones
    assert set(again.values()) == {1}
    assert not slow_jobs.missing(str(tmp_path), count)


def test_a_study_on_ray(ray_engine: Any, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    network = {"model": "digits-cnn", "data": "digits", "limit": 100, "set": {"epochs": 1, "retrain": 0, "warmup": 0}}
    grid = {"methods": ["svd", "alds"], "keeps": [0.6, 0.4], "network": [network]}
    study = fill_in(make_study(grid, "on-ray", "on-ray.toml"), [], [])
    outcome = runner.run_study(study, tmp_path, lambda count: nullcontext(ray_engine))
    assert (len(outcome.done), outcome.failed) == (4, [])
    assert len(results.read_rows(tmp_path)) == 4


def test_what_this_machine_does_not_have_is_not_waited_for(ray_engine: Any) -> None:
    with pytest.raises(RankwiseError, match="asks for 1 CPUs and 1000 GPUs"):
        workers.run([Job("large", time.sleep, (0,), gpus=1000)], ray_engine, lambda job, error: None)


def test_an_address_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def refuse(**options: Any) -> None:
        raise ConnectionError("nobody is there\nreally")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(RankwiseError, match=r"no Ray cluster at 10.0.0.1:6379 \(nobody is there\)"):
        workers.Ray("10.0.0.1:6379")
