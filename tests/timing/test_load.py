"""Timings that were taken on a busy machine say so, and plans that are made from them. Loads and clocks are made up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.__main__ import main
from rankwise.cli import show
from rankwise.planning.times import Conditions, Times
from rankwise.timing import cost_model, load, tune
from rankwise.timing.clock import Measured, Timing
from rankwise.timing.cost_model import measure_times
from rankwise.timing.load import conditions

EXAMPLE = torch.randn(1, 8, 6, 6)
QUICK = Timing(repeats=1, warmup=0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)).eval()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A machine of four cores with a load, whose runs differ by a factor every other time."""

    def use(average: float | None = 0.5, factor: float = 1.0) -> None:
        runs = iter(range(10**9))

        def split(model: nn.Module, _: Any, names: Any) -> Any:
            """Pairs take a tenth of the layer, so that they are chosen."""
            slow = factor if next(runs) % 2 else 1.0
            pairs = {name: isinstance(model.get_submodule(name), nn.Sequential) for name in names}
            return 1e-3 * slow, {name: slow * (1e-4 if pair else 1e-3) for name, pair in pairs.items()}

        monkeypatch.setattr(load, "load_average", lambda: average)
        monkeypatch.setattr(load, "cores", lambda: 4)
        monkeypatch.setattr(cost_model, "split_once", split)
        monkeypatch.setattr(
            cost_model, "split_seconds", lambda given, names, _: [(1.0, dict.fromkeys(names, 1.0)) for _ in given]
        )
        monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path / "cache"))

    return use


def planned(**changes: Any) -> rw.Plan:
    asked = {"keep": 0.7, "never_slower": True, "error": "energy", "timing": QUICK, **changes}
    return rw.compress(network(), EXAMPLE, **asked)[1]


@pytest.mark.parametrize(
    ("seen", "busy"),
    [
        (Conditions(3.9, 4, 0.1), False),
        (Conditions(5.1, 4, 0.1), True),
        (Conditions(0.0, 4, 0.21), True),
        (Conditions(None, 4, 0.1), False),
        (Conditions(None, 4, 0.9), True),
    ],
)
def test_busy_is_more_to_run_than_cores_or_runs_that_differ(seen: Conditions, busy: bool) -> None:
    assert seen.busy == busy
    assert seen.to_json()["busy"] is busy
    assert ("load" in seen.to_json()) == ("load" in seen.sentence) == (seen.load is not None)


def test_conditions_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= load.cores() <= (os.cpu_count() or 1)
    monkeypatch.setattr(load, "cores", lambda: 2)
    monkeypatch.setattr(load, "load_average", lambda: 7.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    found = conditions([Measured((1.0, 1.0)), Measured((1.0, 2.0))])
    assert found == Conditions(4.0, 2, Measured((1.0, 2.0)).spread)  # three threads of our own have no core
    assert conditions([Measured(())]).spread == 0.0


def test_a_system_that_does_not_say_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0), raising=False)
    assert load.load_average() == 1.5
    monkeypatch.delattr(os, "getloadavg")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert load.load_average() is None
    assert load.cores() == (os.cpu_count() or 1)


@pytest.mark.parametrize(("average", "factor"), [(9.0, 1.0), (0.5, 1.5), (9.0, 1.5), (None, 1.5)])
def test_a_plan_from_times_of_a_busy_machine_says_so(machine: Any, average: float | None, factor: float) -> None:
    machine(average, factor)
    plan = planned()
    assert plan.choices
    (warning,) = plan.warnings
    assert "layers were timed while the machine was busy" in warning
    assert ("a load of 9.0 on 4 cores" in warning) == (average == 9.0)
    assert ("equal runs 0 % apart" in warning) == (factor == 1.0)
    assert "RANKWISE_CACHE" in warning
    assert "\n" not in warning
    how = plan.search.latency.timing
    assert how["busy"] is True
    assert (how.get("load"), how["cores"]) == (average, 4)
    assert (how["spread"] > 0.2) == (factor > 1)
    assert rw.Plan.loads(plan.dumps()) == plan
    # What was measured stays what it was, however quiet the machine is now.
    found = measure_times(network(), EXAMPLE, QUICK)
    machine(0.0, 1.0)
    assert measure_times(network(), EXAMPLE, QUICK).timing == found.timing
    assert found.warnings == [warning]


@pytest.mark.parametrize("average", [0.5, 4.0, None])
def test_a_quiet_machine_is_not_spoken_of(machine: Any, average: float | None) -> None:
    machine(average)
    plan = planned()
    assert plan.choices
    assert plan.warnings == ()
    assert plan.search.latency.timing["busy"] is False
    assert Times(0.0, {}, {}).warnings == []


def test_every_plan_from_such_times_says_so_and_no_other(machine: Any) -> None:
    machine(9.0)
    table = rw.build_table(network(), EXAMPLE)
    assert not rw.allocate(table, rw.Budget(params=0.7)).warnings
    table.times = measure_times(network(), EXAMPLE, QUICK)
    for budget, never_slower in ((rw.Budget(params=0.7), True), (rw.Budget(latency=0.7), False)):
        assert rw.allocate(table, budget, never_slower=never_slower).warnings == tuple(table.times.warnings)
    assert not planned(never_slower=False).warnings  # nothing is timed for it


@pytest.mark.parametrize("spread", [False, True])
def test_a_plan_that_was_timed_on_a_busy_machine_says_so(
    spread: bool, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()

    def clock(*_: Any) -> list[Measured]:
        return [Measured((1.0, 1.0)), Measured((0.2, 0.4) if spread else (0.3, 0.3))]

    monkeypatch.setattr(tune, "time_networks", clock)
    plan = planned(keep=None, never_slower=None, latency=0.5)
    assert [w for w in plan.warnings if "the planned network was timed while" in w] == list(plan.warnings)
    assert bool(plan.warnings) == spread


@pytest.mark.parametrize(("average", "seconds"), [(0.0, (0.5, 0.5)), (9.0, (0.5, 0.5)), (0.0, (0.5, 0.9))])
def test_the_command_line_says_so(
    average: float,
    seconds: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(load, "load_average", lambda: average)
    monkeypatch.setattr(load, "cores", lambda: 4)
    monkeypatch.setattr(load, "time_networks", lambda *_: [Measured((1.0, 1.0)), Measured(seconds)])
    asked = [
        "compress",
        "digits-cnn",
        "--random-weights",
        "--force",
        "--keep",
        "0.7",
        "--method",
        "svd",
        "--out",
        str(tmp_path / "o"),
    ]
    busy = average > 5 or seconds[0] != seconds[1]
    assert main(asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("the machine was busy" in said) == ("rankwise bench" in said) == busy
    assert main([*asked, "--json"]) == 0
    time = json.loads(capsys.readouterr().out)["time"]
    assert set(time) == {"dense", "small", "ratio"} | ({"load", "cores", "spread", "busy"} if busy else set())
    assert ("busy" in show.measured_time(time)) == busy
