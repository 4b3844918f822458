"""Nothing is done otherwise than was asked for without a warning in the plan, which the command line prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.__main__ import main
from rankwise.calibration import effect_table
from rankwise.cli import show
from rankwise.compression import Compression, Request
from rankwise.timing import load
from rankwise.timing.clock import Measured
from sentences import check_sentence

EXAMPLE = torch.zeros(1, 3, 10, 10)


class Normed(nn.Module):
    """Two convolutions with a batch norm, and a layer that only some inputs reach."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16) if norm else nn.Identity()
        self.second, self.rare = nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        y = self.second(self.norm(self.first(x)).relu())
        return self.rare(y) if rare else y


class NoGradient(Normed):
    """Made for use, not for training."""

    @torch.no_grad()
    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        return super().forward(x, rare)


class OneByOne(Normed):
    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        if len(x) > 1:
            raise ValueError("one at a time")
        return super().forward(x, rare)


class Calls(Normed):
    """Its batch norm is there and is not called."""

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        return self.second(self.first(x).relu())


def seeded(make: Any, *given: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = make(*given).eval()
    return model


def some_images(count: int = 12) -> Tensor:
    return torch.randn(count, 3, 10, 10, generator=torch.Generator().manual_seed(0))


def test_what_was_asked_for_needs_no_warning() -> None:
    model, x = seeded(Normed), some_images()
    asked: list[dict[str, Any]] = [
        {"exclude": "rare"},
        {"data": [{"x": x, "rare": True}]},
        {"error": "energy"},
        {"method": "alds"},
        {"method": "ft", "exclude": "rare"},
    ]
    for how in asked:
        assert rw.compress(model, EXAMPLE, keep=0.7, **how)[1].warnings == (), how


@pytest.mark.parametrize(
    ("make", "norm", "example", "reason"),
    [
        (OneByOne, True, EXAMPLE, "one at a time"),
        (NoGradient, True, EXAMPLE, "synthetic inputs could not be made"),
        (Calls, True, EXAMPLE, "no batch norm is called"),
        (OneByOne, False, EXAMPLE, "one at a time"),
        (NoGradient, False, EXAMPLE, "do not depend on its layers"),
        (Normed, True, None, "no example input was given"),
        (Normed, False, {"x": EXAMPLE}, "not a batch of images"),
    ],
)
def test_weights_alone_where_there_are_no_inputs(make: Any, norm: bool, example: Any, reason: str) -> None:
    model = seeded(make, norm)
    small, plan = rw.compress(model, example, keep=0.6)
    (warning,) = plan.warnings
    assert "no data was given" in warning
    assert reason in warning
    assert "weights alone" in warning
    assert "\n" not in warning
    assert plan.inputs is None
    wanted, same = rw.compress(model, example, keep=0.6, error="convex")
    assert plan.layers == same.layers
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), wanted.parameters(), strict=True))
    assert rw.Plan.loads(plan.dumps()) == plan


def test_errors_in_data_that_was_given_are_errors() -> None:
    assert "one at a time" in check_sentence(
        lambda: rw.compress(seeded(OneByOne), EXAMPLE, keep=0.6, data=[some_images()])
    )
    with pytest.raises(KeyError):  # our own mistakes are not taken for a network's
        Compression(seeded(Normed), EXAMPLE, watch={}.__getitem__).plan(rw.Budget(params=0.6))


@pytest.mark.parametrize(
    "how", [{}, {"method": "pca"}, {"error": "output", "decompositions": ("svd",)}], ids=["auto", "pca", "output"]
)
def test_layers_that_the_data_does_not_reach(how: dict[str, Any]) -> None:
    model, x = seeded(Normed), some_images()
    for reached in (True, False):
        _, plan = rw.compress(model, EXAMPLE, keep=0.8, data=[{"x": x, "rare": reached}], **how)
        assert plan.warnings == (() if reached else ("the calibration data does not reach rare: left whole",))
        assert reached or "rare" not in {choice.name for choice in plan.choices}


def test_layers_that_synthetic_inputs_do_not_reach() -> None:
    _, plan = rw.compress(seeded(Normed), EXAMPLE, keep=0.5)
    assert plan.inputs == "synthetic"
    assert "rare" in {choice.name for choice in plan.choices}
    assert plan.warnings == ("the synthetic inputs do not reach rare: decomposed by their weights alone",)


def test_layers_that_are_too_wide_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """`second` has 144 inputs to a filter, `first` 27."""
    monkeypatch.setattr(effect_table, "LARGEST", 100)
    model, data = seeded(Normed), [{"x": some_images(), "rare": True}]
    _, plan = rw.compress(model, EXAMPLE, keep=0.5, data=data)
    wide = [choice.name for choice in plan.choices if choice.decomposition == "svd"]
    assert "second" in wide
    (warning,) = plan.warnings
    assert f"{', '.join(wide)}: more than 100 inputs to a filter" in warning
    assert "first" not in warning


def test_a_plan_that_is_replayed_on_other_inputs(tmp_path: Path) -> None:
    model, x = seeded(Normed), some_images()
    _, plan = rw.compress(model, EXAMPLE, keep=0.6, exclude="rare", data=[x])
    again = Compression(model, EXAMPLE, Request(plan=plan), [x]).run(None)[1]
    assert again == plan
    small, other = Compression(model, EXAMPLE, Request(plan=plan)).run(None)
    assert other.layers == plan.layers
    assert other.warnings == ("the plan was made on calibration inputs, and its layers are fitted to synthetic inputs",)
    rw.save(small, other, tmp_path)
    assert rw.Plan.load(tmp_path / "plan.json") == other
    body = other.to_json()  # as they were called once
    old = rw.Plan.loads(json.dumps({**body, "search": {**body["search"], "inputs": "imagined"}, "warnings": []}))
    assert old.inputs == "synthetic"
    assert Compression(model, EXAMPLE, Request(plan=old)).run(None)[1] == old


def test_a_plan_by_pca_is_replayed_with_data() -> None:
    model, x = seeded(Normed), some_images()
    small, plan = rw.compress(model, EXAMPLE, method="pca", keep=0.7, exclude="rare", data=[x])
    again, same = Compression(model, EXAMPLE, Request(plan=plan), [x]).run(None)
    assert same == plan
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), again.parameters(), strict=True))
    assert "calibration data" in check_sentence(lambda: Compression(model, EXAMPLE, Request(plan=plan)).run(None))


# ---- in files and on the command line --------------------------------------------------------------------


def test_warnings_are_a_part_of_the_file_only_where_there_are_any() -> None:
    _, plan = rw.compress(seeded(Normed), EXAMPLE, method="alds", keep=0.7)
    assert "warnings" not in plan.to_json()
    warned = plan.warned("one", "two").warned("one")
    assert warned.warnings == ("one", "two")
    assert warned.to_json()["warnings"] == ("one", "two")
    assert rw.Plan.loads(warned.dumps()) == warned
    for bad in ("one", [1], {"one": 1}, None):
        body = json.dumps({**plan.to_json(), "warnings": bad})
        assert "warning" in check_sentence(lambda: rw.Plan.loads(body))  # noqa: B023


def test_warnings_of_old_plans_are_shown() -> None:
    _, plan = rw.compress(seeded(Normed), EXAMPLE, method="alds", keep=0.7)
    body = plan.to_json()
    old = rw.Plan.loads(json.dumps({**body, "search": {**body["search"], "warning": "as it was"}, "warnings": ["new"]}))
    assert old == plan.warned("new", "as it was")
    assert "'warning'" in check_sentence(
        lambda: rw.Plan.loads(json.dumps({**body, "search": {**body["search"], "warning": 1}}))
    )
    imagined, synthetic = (
        rw.Plan.loads(json.dumps({**body, "search": {"inputs": name}})) for name in ("imagined", "synthetic")
    )
    assert imagined == synthetic
    assert show.remarks(imagined) != show.remarks(plan) == []


FACTORY = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20))
"""


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "mine.py").write_text(FACTORY)
    return ["compress", f"{tmp_path / 'mine.py'}:net", "--keep", "0.8", "--input", "1,20"]


@pytest.mark.parametrize("dry", [True, False])
def test_warnings_are_printed(flags: list[str], dry: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    where = ["--dry-run"] if dry else ["--out", str(tmp_path / "o"), "--force"]
    assert main([*flags, *where]) == 0
    assert "warning: no data was given, and the example input is not a batch of images" in capsys.readouterr().out
    assert main([*flags, *where, "--json"]) == 0
    assert "weights alone" in json.loads(capsys.readouterr().out)["plan"]["warnings"][0]
    assert main([*flags, *where, "--method", "svd"]) == 0
    assert "warning:" not in capsys.readouterr().out


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_the_measured_time_is_told(
    flags: list[str],
    seconds: float,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Of the dense network and of the compressed one; and which flags there are if it is slower."""
    timed: list[Any] = []

    def clock(models: list[nn.Module], *_: Any) -> list[Measured]:
        timed.append(models)
        return [Measured((1.0,)), Measured((seconds,))]

    monkeypatch.setattr(load, "time_networks", clock)
    out = ["--out", str(tmp_path / "o"), "--force", "--method", "svd"]
    assert main([*flags, *out]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"time: {1000 * seconds:.2f} ms, {seconds:.2f} of the dense network's 1000.00 ms" in said
    assert ("--never-slower" in said) == ("--budget latency=0.8" in said) == (seconds > 1)
    assert main([*flags, *out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["time"] == {"dense": 1.0, "small": seconds, "ratio": seconds}
    dense, small = timed[0]
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in dense.parameters())
    # Without an input, and where nothing is written, there is nothing to time.
    for none in (["--dry-run"], [*out]):
        given = flags if none == ["--dry-run"] else flags[:-2]
        timed.clear()
        assert main([*given, *none, "--method", "svd", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["time"] is None
        assert not timed


def test_nothing_is_timed_for_a_budget_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """All slices and cores are there, as no clock had to see them."""
    monkeypatch.setattr("rankwise.compression.job.measure_times", lambda *_, **__: pytest.fail("timed"))
    model, x = seeded(Normed), some_images()
    for how in ({"data": [x]}, {"method": "alds"}):
        _, plan = rw.compress(model, EXAMPLE, keep=0.7, exclude="rare", **how)
        assert plan.settings["slices"] == "all"
        assert not plan.settings["never_slower"]
        assert plan.search.latency is None
