"""Two processes on one folder: no torn file, no lost row, and a refusal where two cannot both be right."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import rankwise as rw
from rankwise.__main__ import main
from rankwise.cli.flags import reserved
from rankwise.core import disk, workers
from rankwise.planning.plan import Plan
from rankwise.studies import cell as cells
from rankwise.studies import runner
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


def test_a_second_compression_into_the_same_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the network of one could lie beside the report of the other."""
    out = tmp_path / "new" / "out"
    command = ["compress", "digits-cnn", "--random-weights", "--method", "svd", "--keep", "0.5", "--out", str(out)]
    command += ["--no-report"]
    out.mkdir(parents=True)
    with disk.only_user(out):
        assert main(command) == 2
        assert main(["demo", "--out", str(out)]) == 2
    assert capsys.readouterr().err.count("another process is working in") == 2
    assert not list(out.iterdir())
    out.rmdir()
    assert main([*command[:-4], "0.001", *command[-3:]]) == 2  # no such budget
    assert out.parent.is_dir()
    assert not out.exists(), "what was made for nothing is gone"
    assert main(command) == 0
    assert main(command) == 2
    assert "exists and is not empty" in capsys.readouterr().err


def test_what_another_process_has_written_meanwhile_stays(tmp_path: Path) -> None:
    """It was not there when the flags were looked at."""
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(rw.RankwiseError, match="not empty"), reserved(tmp_path, force=False):
        pytest.fail("it went on")
    with reserved(tmp_path, force=True):
        pass
    assert (tmp_path / "plan.json").read_text() == "{}"


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


def starving(cell: Any, out: str) -> None:
    """Memory runs out for real: the system gives the process a megabyte more than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    if cell.entry.label == "alds":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), before[1]))
    try:
        cells.run_cell(cell, out)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def waiting(cell: Any, out: str) -> None:
    """Goes on when a node has disappeared. The file says that it has begun."""
    (Path(out) / f"{os.getpid()}.begun").touch()
    until(lambda: (Path(out) / "gone").exists())
    cells.run_cell(cell, out)


def until(true: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)


LIMIT = 600  # seconds: far more than any of these takes on a busy machine
CHILD = "import sys, test_concurrent; getattr(test_concurrent, sys.argv[1])(*sys.argv[2:])"


def bounded(name: str, *given: str, seconds: float = LIMIT) -> str:
    """What a function of this file prints, in a process that is killed with all of its children when its time is over.

    Whatever Ray does on a machine without a free core, the test ends. What is printed goes to a file: a pipe stays open
    as long as any child lives.
    """
    here = Path(__file__).parents[1]
    places = [str(here), str(here / "trust"), str(Path(runner.__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_task_oom_retries", None)
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-c", CHILD, name, *given]
        child = subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)
        try:
            status: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        said.seek(0)
        text = said.read().decode(errors="replace")
    assert status is not None, f"{name} did not end within {seconds:g} s: {text[-2000:]}"
    assert status == 0, f"{name} ended with status {status}: {text[-2000:]}"
    return text


def hangs(folder: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(folder) / "pid").write_text(str(child.pid))
    time.sleep(600)


def test_what_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="hangs did not end within 10 s"):
        bounded("hangs", str(tmp_path), seconds=10)
    if (tmp_path / "pid").exists():  # it came so far
        about = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
        until(lambda: not about.exists() or ") Z " in about.read_text())
        assert not about.exists() or ") Z " in about.read_text(), "its child lives"


def lose_a_node(out: str) -> None:
    """Two nodes on this machine work on a study, and one is killed when both are at work."""
    from ray.cluster_utils import Cluster

    runner.run_cell, workers.RETRIES = waiting, 1
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]

    def remove() -> None:
        until(lambda: len(list(Path(out).glob("*.begun"))) == 2)
        print("begun on", len(list(Path(out).glob("*.begun"))), flush=True)
        cluster.remove_node(nodes[0], allow_graceful=False)
        (Path(out) / "gone").touch()

    threading.Thread(target=remove, daemon=True).start()
    outcome = runner.run_study(make(), out, lambda count: workers.Ray(cluster.address))
    print("failed", outcome.failed, flush=True)
    cluster.shutdown()


@pytest.mark.trust
def test_a_node_that_disappears(tmp_path: Path) -> None:
    """The other node does every cell."""
    pytest.importorskip("ray")
    said = bounded("lose_a_node", str(tmp_path))
    assert "begun on 2" in said, said[-2000:]
    assert "failed []" in said, said[-2000:]
    rows = {row["cell"]: row["status"] for row in results.read_rows(tmp_path)}
    assert rows == {cell.name: "done" for cell in make().cells()}


def run_out_of_memory() -> None:
    import ray

    workers.RETRIES = 1
    low = {"memory_usage_threshold": 0.001, "memory_monitor_refresh_ms": 200, "task_oom_retry_delay_base_ms": 100}
    init = ray.init
    ray.init = lambda **given: init(**given, _system_config=low)
    with workers.Ray("local", 1) as engine:
        workers.run([workers.Job("a", time.sleep, (600,))], engine, lambda job, error: print("ENDED", error))


@pytest.mark.trust
def test_a_task_that_ray_ends_for_lack_of_memory() -> None:
    """It is tried again so often as one whose process died, and no more: Ray itself would never stop."""
    pytest.importorskip("ray")
    assert "ENDED Ray lost it: OutOfMemoryError" in bounded("run_out_of_memory")


def lose_workers(kind: str, out: str) -> None:
    runner.run_cell, workers.RETRIES = hungry, 1
    place = (lambda count: workers.Pool(1)) if kind == "pool" else (lambda count: workers.Ray("local", 1))
    print("failed", len(runner.run_study(make(), out, place).failed))


def run_starving(out: str) -> None:
    runner.run_cell, workers.RETRIES = starving, 1
    print("failed", len(runner.run_study(make(4096), out, lambda count: workers.Pool(1)).failed))


def test_cells_without_memory_say_so_and_the_others_are_done(tmp_path: Path) -> None:
    assert "failed 2" in bounded("run_starving", str(tmp_path))
    rows = {row["cell"]: row for row in results.read_rows(tmp_path)}
    assert set(rows) == {cell.name for cell in make(4096).cells()}
    for row in rows.values():
        assert row["status"] == ("failed" if row["label"] == "alds" else "done"), row.get("error")
    for error in [row["error"] for row in rows.values() if row["status"] == "failed"]:
        assert "memory" in error or "died" in error, error


@pytest.mark.trust
@pytest.mark.parametrize("kind", ["pool", "ray"])
def test_a_killed_worker_leaves_every_row_or_a_row_that_says_why(kind: str, tmp_path: Path) -> None:
    """The worker of some cells is killed whenever they run: their rows say so, and the others are done."""
    if kind == "ray":
        pytest.importorskip("ray")
    assert "failed 2" in bounded("lose_workers", kind, str(tmp_path))
    rows = {row["cell"]: row for row in results.read_rows(tmp_path)}
    assert set(rows) == {cell.name for cell in make().cells()}
    for row in rows.values():
        assert row["status"] == ("failed" if row["label"] == "alds" else "done"), row.get("error")
    assert all("died" in r["error"] or "Ray lost it" in r["error"] for r in rows.values() if r["status"] == "failed")
    again = runner.run_study(make(), tmp_path, lambda count: workers.Here(), again=True)
    assert (len(again.before), len(again.done), again.failed) == (2, 2, [])
