"""What a plan will lose, and the smallest network within a limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_commands import refused, run
from torch import nn

import rankwise as rw
from rankwise.compression import Compression, Observations
from rankwise.data import splits as images
from rankwise.errors import BudgetError, RankwiseError
from rankwise.models import networks
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Plan
from rankwise.training.evaluate import evaluate
from rankwise.training.forecast import Forecast, can_forecast, forecast, temperature
from rankwise.training.limits import ROUNDS, STEP, Trial, smallest
from rankwise.training.loop import fit_

EXAMPLE = torch.zeros(1, 1, 8, 8)


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(0)
    model = networks.build("digits-cnn")
    fit_(model, images.load("digits", "fit"), epochs=5)
    return model.eval()


@pytest.fixture(scope="module")
def weights(trained: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "digits.pth"
    torch.save(trained.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def job(trained: nn.Module) -> Compression:
    return Compression(trained, EXAMPLE, data=images.load("digits", "fit").thin(256))


def expect(job: Compression, plan: Plan) -> Forecast:
    return forecast(job.model, plan, job.seen(plan), images.load("digits", "test"))


def test_a_smaller_network_is_expected_to_lose_more(job: Compression) -> None:
    test = images.load("digits", "test")
    found = [expect(job, job.plan(Budget(params=keep))) for keep in (0.6, 0.3, 0.1, 0.05)]
    assert all(f.low < f.drop < f.high and f.n == len(test) for f in found)
    assert [f.drop for f in found] == sorted(f.drop for f in found)
    assert found[-1].drop > found[0].drop + 0.1


@pytest.mark.parametrize("keep", [0.6, 0.3, 0.15, 0.1])
def test_what_is_measured_lies_in_the_interval(job: Compression, keep: float) -> None:
    test = images.load("digits", "test")
    plan = job.plan(Budget(params=keep))
    expected = expect(job, plan)
    small, _ = job.build(plan)
    assert expected.low <= evaluate(job.model, test).top1 - evaluate(small, test).top1 <= expected.high


@pytest.mark.parametrize("wanted", [0.3, 1.0, 2.5, 10.0])
def test_the_temperature_is_found(wanted: float) -> None:
    """Labels drawn from softmax(logits / T) give back T, up to what chance leaves open."""
    random = torch.Generator().manual_seed(0)
    logits = 4 * wanted * torch.randn(20_000, 6, generator=random, dtype=torch.float64)
    labels = torch.multinomial((logits / wanted).softmax(1), 1, generator=random)[:, 0]
    assert temperature(logits, labels) == pytest.approx(wanted, rel=0.05)
    assert temperature(7 * logits, labels) == pytest.approx(7 * temperature(logits, labels), rel=0.01)


def test_a_forecast_leaves_no_trace(trained: nn.Module, job: Compression) -> None:
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    plan = job.plan(Budget(params=0.3))
    assert expect(job, plan) == expect(job, plan)
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    built = job.build(plan)[1]
    assert replace(built, search=replace(built.search, expected=plan.search.expected)) == plan


def test_synthetic_inputs_are_put_on_the_scale_of_real_ones() -> None:
    """The effect is relative to the variance of outputs; that of synthetic inputs is another one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2)),
        *(nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)),
    )
    fit_(model, images.load("digits", "fit"), epochs=4)
    model.eval()
    test = images.load("digits", "test")
    job = Compression(model, EXAMPLE)
    plan = job.plan(Budget(params=0.4))
    assert plan.search.inputs == "synthetic"
    other = replace(plan.search, variance=4 * plan.search.variance, objective=plan.search.objective / 4)
    known = replace(plan, search=other)
    assert expect(job, plan) == expect(job, known)
    small, _ = job.build(plan)
    expected = expect(job, plan)
    assert expected.low <= evaluate(model, test).top1 - evaluate(small, test).top1 <= expected.high


def test_other_plans_have_no_forecast(trained: nn.Module) -> None:
    _, plan = rw.compress(trained, torch.zeros(1, 1, 8, 8), method="svd", keep=0.5)
    assert not can_forecast(plan, Observations())
    with pytest.raises(RankwiseError, match="'svd'"):
        forecast(trained, plan, Observations(), images.load("digits", "test"))


def test_a_forecast_is_json() -> None:
    assert json.loads(json.dumps(Forecast(1.0, 0.5, 2.0, 3.0, 10).to_json()))["drop"] == 1.0


# ---- the smallest network within a limit ------------------------------------------------------------------


class Sized(nn.Module):
    """Stands for a network of which so much is left."""

    def __init__(self, keep: float) -> None:
        super().__init__()
        self.keep = keep


def maker(plan: Plan, least: float, made: list[float]) -> Callable[[Budget], tuple[nn.Module, Plan]]:
    def make(budget: Budget) -> tuple[nn.Module, Plan]:
        asked = float(budget.params or 0)
        if asked < least:
            raise BudgetError("too small")
        made.append(asked)
        return Sized(asked), plan

    return make


@pytest.fixture(scope="module")
def whole_plan(trained: nn.Module) -> Plan:
    """A plan that claims to leave everything, so that sizes are those that were asked for."""
    return rw.compress(trained, method="svd", keep=1.0)[1]


@pytest.mark.parametrize("least", [0.0, 0.3])
@pytest.mark.parametrize("threshold", [0.05, 0.123, 0.5, 0.77, 0.97])
def test_bisection_finds_the_threshold(whole_plan: Plan, threshold: float, least: float) -> None:
    made: list[float] = []
    told: list[Trial] = []

    def score(small: Any) -> float:
        return 90.0 if small.keep >= threshold else 80.0

    small, _, trials = smallest(maker(whole_plan, least, made), score, 90.5, 1.0, tell=told.append)
    wanted = max(threshold, least)
    assert wanted <= small.keep <= wanted + STEP  # type: ignore[operator]
    assert trials == told
    assert len(trials) <= ROUNDS
    assert small.keep in made
    assert len(made) == len(set(made))  # nothing is built twice
    assert min(t.asked for t in trials if t.within) == small.keep


def test_nothing_within_the_limit_is_an_error_and_no_network(whole_plan: Plan) -> None:
    with pytest.raises(RankwiseError, match=r"loses 10\.00"):
        smallest(maker(whole_plan, 0.0, []), lambda small: 80.0, 90.0, 1.0)
    with pytest.raises(RankwiseError, match="none fits"):
        smallest(maker(whole_plan, 2.0, []), lambda small: 90.0, 90.0, 1.0)


@pytest.mark.parametrize("limit", [-1.0, float("inf"), float("nan")])
def test_limits_are_numbers(whole_plan: Plan, limit: float) -> None:
    with pytest.raises(RankwiseError, match="how much of the metric"):
        smallest(maker(whole_plan, 0.0, []), lambda small: 90.0, 90.0, limit)


def test_units_are_known(whole_plan: Plan) -> None:
    with pytest.raises(RankwiseError, match="the unit seconds"):
        smallest(maker(whole_plan, 0.0, []), lambda small: 90.0, 90.0, 1.0, unit="seconds")


# ---- command line -----------------------------------------------------------------------------------------


def test_a_dry_run_tells_what_to_expect(capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path) -> None:
    flags = ["compress", "digits-cnn", "--weights", weights, "--keep", 0.3, "--data", "digits", "--dry-run"]
    status, out, _ = run(capsys, *flags, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["scores"] is None
    assert found["expected"]["low"] < found["expected"]["drop"] < found["expected"]["high"]
    status, out, _ = run(capsys, *flags)
    assert status == 0
    assert "expected on test" in " ".join(out.split())


@pytest.mark.parametrize("unit", ["params", "macs"])
def test_max_drop_writes_a_network_that_it_measured(
    capsys: pytest.CaptureFixture[str], weights: Path, trained: nn.Module, tmp_path: Path, unit: str
) -> None:
    out = tmp_path / "small"
    flags = ["--method", "svd-energy", "--max-drop", 2.0, "--unit", unit, "--data", "digits", "--out", out, "--json"]
    status, text, _ = run(capsys, "compress", "digits-cnn", "--weights", weights, *flags)
    found = json.loads(text)
    assert status == 0
    within = [t for t in found["trials"] if t["within"]]
    plan = rw.Plan.load(out / "plan.json")
    assert plan.keep(unit) == pytest.approx(min(t["keep"] for t in within))
    val = images.load("digits", "val")
    measured = evaluate(trained, val).top1 - evaluate(rw.load(out, trained), val).top1
    assert measured <= 2.0
    assert measured == pytest.approx(min(within, key=lambda t: t["keep"])["drop"])


def test_max_drop_needs_data_and_no_budget(capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path) -> None:
    common = ["compress", "digits-cnn", "--weights", weights, "--max-drop", 1.0, "--out", tmp_path / "o"]
    assert "--data" in refused(capsys, *common)
    assert "--max-drop" in refused(capsys, *common, "--keep", 0.5, "--data", "digits")
    assert not (tmp_path / "o").exists()
