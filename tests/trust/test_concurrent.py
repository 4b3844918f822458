"""Two processes on one folder: no torn file, no lost row, and a refusal where two cannot both be right."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import rankwise as rw
from rankwise.core import disk
from rankwise.planning.plan import Plan
from rankwise.studies import cell as cells
from rankwise.studies import runner, workers
from rankwise.studies.study import fill_in
from rankwise.studies.study_file import make_study
from rankwise.surgery.checkpoint import read_plan
from rankwise.timing.cache import Store
from rankwise.training import results
from trust import writers

pytest.importorskip("sklearn")
pytest.importorskip("accelerate")
FORK = multiprocessing.get_context("fork")


def together(work: Any, *given: tuple[Any, ...], within: float = 600) -> list[int | None]:
    """Exit statuses of processes that run `work` at the same time."""
    crowd = [FORK.Process(target=work, args=arguments) for arguments in given]
    for process in crowd:
        process.start()
    for process in crowd:
        process.join(within)
    return [process.exitcode for process in crowd]


def save_often(folder: str, i: int, times: int) -> None:
    for _ in range(times):
        rw.save(*writers.compressed(i), folder)


def test_two_that_save_and_one_that_loads(tmp_path: Path) -> None:
    """Every load gives one of the two networks whole, with its own plan."""
    known = {}
    for i in (1, 2):
        rw.save(*writers.compressed(i), tmp_path / str(i))
        plan = read_plan(tmp_path / str(i)).dumps()
        known[plan] = writers.tensors(rw.load(tmp_path / str(i), writers.small_net()))
    out = tmp_path / "out"
    rw.save(*writers.compressed(1), out)
    crowd = [FORK.Process(target=save_often, args=(str(out), i, 40)) for i in (1, 2)]
    for process in crowd:
        process.start()
    loads = 0
    while any(process.is_alive() for process in crowd):
        assert writers.tensors(rw.load(out, writers.small_net())) in known.values()
        loads += 1
    assert [process.exitcode for process in crowd] == [0, 0]
    assert loads > 3
    assert known[read_plan(out).dumps()] == writers.tensors(rw.load(out, writers.small_net()))
    assert sorted(p.name for p in out.iterdir()) == ["model.safetensors", "plan.json"]


def write_often(path: str, letter: str, times: int) -> None:
    for i in range(times):
        disk.write_whole(Path(path), (letter * (50_000 + 1000 * i)).encode())


def test_no_torn_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a")
    crowd = [FORK.Process(target=write_often, args=(str(path), letter, 40)) for letter in "abc"]
    for process in crowd:
        process.start()
    while any(process.is_alive() for process in crowd):
        assert len(set(path.read_bytes())) == 1
    assert [process.exitcode for process in crowd] == [0, 0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_writer_that_dies_blocks_nobody(tmp_path: Path) -> None:
    def dies(path: str) -> None:
        file = disk._open_alone(disk.part_of(Path(path)))
        os.write(file, b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    assert together(dies, (str(tmp_path / "file"),)) == [-signal.SIGKILL]
    disk.write_whole(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def measure(folder: str, i: int) -> None:
    store = Store(Path(folder) / "times.json")
    time.sleep(0.2)  # both have read it before either writes
    for k in range(5):
        store.known[f"network {i} {k}"] = json.loads(writers_times(folder))
        store.save()


def writers_times(folder: str) -> str:
    return (Path(folder) / "one.json").read_text()


def test_measured_times_of_all_processes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    writers._times(tmp_path / "made", 0)
    one = next(iter(Store(tmp_path / "made" / "times.json").known.values()))
    (tmp_path / "one.json").write_text(json.dumps(one))
    assert together(measure, *[(str(tmp_path), i) for i in range(4)]) == [0] * 4
    assert len(Store(tmp_path / "times.json").known) == 20


def train(folder: str, barrier: Any, said: Any) -> None:
    barrier.wait(600)
    try:
        writers.steps.train("digits-cnn", writers._run(Path(folder), True))
    except rw.RankwiseError as err:
        said.put(str(err))
        sys.exit(2)


def test_two_trainings_in_one_folder(tmp_path: Path) -> None:
    """One does the work. The other is refused, or finds it done."""
    barrier, said = FORK.Barrier(2), FORK.Queue()
    statuses = together(train, *[(str(tmp_path), barrier, said)] * 2)
    assert sorted(statuses) in ([0, 0], [0, 2])
    if 2 in statuses:
        assert "another process is working in" in said.get(timeout=60)
    row = json.loads((tmp_path / "out" / "row.json").read_text())
    assert row["status"] == "done"
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"model.safetensors", "row.json"}


def test_a_second_training_is_refused_while_the_first_is_at_work(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with disk.only_user(tmp_path / "out"), pytest.raises(rw.RankwiseError, match="another process is working in"):
        writers.steps.train("digits-cnn", writers._run(tmp_path, True))
    writers.steps.train("digits-cnn", writers._run(tmp_path, True))


def make(limit: int = 48) -> Any:
    short = {"epochs": 1, "retrain": 0, "warmup": 0}
    network = {"model": "digits-cnn", "data": "digits", "limit": limit, "set": short}
    grid = {"methods": ["svd", "alds"], "keeps": [0.6, 0.4], "network": [network]}
    return fill_in(make_study(grid, "two", "two.toml"), [], [])


def run_here(folder: str) -> None:
    outcome = runner.run_study(make(), folder, lambda count: workers.Here())
    sys.exit(1 if outcome.failed else 0)


def test_two_processes_on_one_study(tmp_path: Path) -> None:
    assert together(run_here, (str(tmp_path),), (str(tmp_path),)) == [0, 0]
    rows = results.read_rows(tmp_path)
    assert {row["cell"] for row in rows} == {cell.name for cell in make().cells()}
    for row in rows:
        Plan.load(tmp_path / row["plan"])
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".part", ".work", ".lock")]


def hungry(cell: Any, out: str) -> None:
    """As the kernel does with a process that takes too much memory."""
    if cell.entry.label == "alds":
        os.kill(os.getpid(), signal.SIGKILL)
    cells.run_cell(cell, out)


def reachable(patch: pytest.MonkeyPatch, work: Any) -> None:
    """Workers in other processes import this file, and run `work` for every cell."""
    here = Path(__file__).parents[1]
    source = str(Path(runner.__file__).parents[2])
    patch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here / "trust"), source]))
    patch.setattr(runner, "run_cell", work)
    patch.setattr(workers, "RETRIES", 1)
    patch.syspath_prepend(str(here / "trust"))
    patch.setattr(work, "__module__", "test_concurrent")


def slow(cell: Any, out: str) -> None:
    """Long enough for a node to disappear meanwhile; the file says that it has begun."""
    (Path(out) / f"{os.getpid()}.begun").touch()
    time.sleep(4)
    cells.run_cell(cell, out)


@pytest.mark.trust
def test_a_node_that_disappears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes on this machine work on a study, and one is killed in the middle: the other does every cell."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    reachable(monkeypatch, slow)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        out, removed = tmp_path / "out", []

        def remove() -> None:
            while len(list(out.glob("*.begun"))) < 2:  # both are at work
                time.sleep(0.05)
            cluster.remove_node(nodes[0], allow_graceful=False)
            removed.append(len(list(out.glob("rows/*.json"))))

        killer = threading.Thread(target=remove, daemon=True)
        killer.start()
        outcome = runner.run_study(make(), out, lambda count: workers.Ray(cluster.address))
        killer.join(300)
    finally:
        cluster.shutdown()
    assert removed
    assert removed[0] < len(make().cells()), "the node was killed in the middle"
    assert outcome.failed == []
    rows = {row["cell"]: row["status"] for row in results.read_rows(out)}
    assert rows == {cell.name: "done" for cell in make().cells()}


MEMORY = """
import os, sys, time
import ray
from rankwise.studies import workers
workers.RETRIES = 1
low = {"memory_usage_threshold": 0.001, "memory_monitor_refresh_ms": 200, "task_oom_retry_delay_base_ms": 100}
init = ray.init
ray.init = lambda **given: init(**given, _system_config=low)
with workers.Ray("local", 1) as engine:
    workers.run([workers.StudyJob("a", time.sleep, (600,))], engine, lambda job, error: print("ENDED", error))
"""


@pytest.mark.trust
def test_a_task_that_ray_ends_for_lack_of_memory(tmp_path: Path) -> None:
    """It is tried again so often as one whose process died, and no more: Ray itself would never stop."""
    pytest.importorskip("ray")
    source = str(Path(runner.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_task_oom_retries", None)
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, cwd=tmp_path)
    assert "ENDED Ray lost it: OutOfMemoryError" in done.stdout, done.stderr[-2000:]


@pytest.mark.trust
@pytest.mark.parametrize("kind", ["pool", "ray"])
def test_a_killed_worker_leaves_every_row_or_a_row_that_says_why(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker of some cells is killed whenever they run: their rows say so, and the others are done."""
    if kind == "ray":
        pytest.importorskip("ray")
    reachable(monkeypatch, hungry)
    place = (lambda count: workers.Pool(1)) if kind == "pool" else (lambda count: workers.Ray("local", 1))
    outcome = runner.run_study(make(), tmp_path, place)
    rows = {row["cell"]: row for row in results.read_rows(tmp_path)}
    assert set(rows) == {cell.name for cell in make().cells()}
    for row in rows.values():
        assert row["status"] == ("failed" if row["label"] == "alds" else "done"), row.get("error")
    assert all("died" in r["error"] or "Ray lost it" in r["error"] for r in rows.values() if r["status"] == "failed")
    assert len(outcome.failed) == 2
    monkeypatch.undo()
    again = runner.run_study(make(), tmp_path, lambda count: workers.Here(), again=True)
    assert (len(again.before), len(again.done), again.failed) == (2, 2, [])
