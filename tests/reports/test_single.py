"""The report of one compression embeds the plan and what was measured; whatever is missing is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.__main__ import main
from rankwise.models import networks
from rankwise.reports import single

SCORES = {
    "before": {"n": 355, "top1": 97.0, "top5": None, "loss": 0.1},
    "after": {"n": 355, "top1": 95.5, "top5": None, "loss": 0.2},
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return networks.build("digits-cnn").eval()


@pytest.fixture(scope="module")
def plan(model: nn.Module) -> rw.Plan:
    return rw.compress(model, torch.zeros(1, 1, 8, 8), keep=0.4, error="energy", name="digits-cnn")[1]


def content_of(path: Path) -> dict[str, Any]:
    text = path.read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    content: dict[str, Any] = json.loads(found[1])
    return content


def test_embeds_the_plan_and_true_spectra(tmp_path: Path, model: nn.Module, plan: rw.Plan) -> None:
    found = {"plan": json.loads(plan.dumps()), "scores": SCORES}
    said = single.write_report(tmp_path / "report.html", found, model)
    content = content_of(tmp_path / "report.html")
    assert said["bytes"] == (tmp_path / "report.html").stat().st_size
    assert rw.Plan.loads(json.dumps(content["plan"])) == plan
    conv = model.get_submodule("conv2").weight.detach().double()
    for fold, matrix in (("f│chw", conv.flatten(1)), ("fhw│c", conv.permute(0, 2, 3, 1).flatten(0, 2))):
        sigma = torch.linalg.svdvals(matrix)
        shown = content["spectra"]["conv2"][fold]
        assert shown["n"] == len(sigma)
        wanted = (sigma / sigma[0])[[i - 1 for i in shown["at"]]]
        assert torch.allclose(torch.tensor(shown["s"], dtype=torch.float64), wanted, atol=1e-3)
    assert set(content["spectra"]) == {e.name for e in plan.layers if e.kind in ("Conv2d", "Linear")}


def test_large_layers_are_left_out(
    tmp_path: Path, model: nn.Module, plan: rw.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single, "WORK", 2e6)
    some = single.layer_spectra(model, plan)
    assert 0 < sum(map(len, some.values())) < 12
    chosen = {c.name: c.fold for c in plan.choices}
    assert all(chosen.get(name, "f│chw") in folds or "f│c" in folds for name, folds in some.items())
    monkeypatch.setattr(single, "WORK", 0)
    single.write_report(tmp_path / "report.html", {"plan": json.loads(plan.dumps())}, model)
    assert content_of(tmp_path / "report.html")["spectra"] is None


def test_predictions_stand_beside_measurements(plan: rw.Plan) -> None:
    expected = {"drop": 1.0, "low": 0.5, "high": 2.5, "turned": 3.0, "n": 100}
    (one,) = single.comparisons(plan, {"expected": expected, "scores": SCORES})
    assert (one["predicted"], one["low"], one["high"], one["measured"]) == (-1.0, -2.5, -0.5, -1.5)
    assert single.comparisons(plan, {}) == [], "exact counts are not predictions"
    body = json.loads(plan.dumps())
    body["settings"]["error"] = "effect"
    body["search"] |= {"objective": 0.01, "inputs": "synthetic", "latency": {"before": 2.0, "after": 1.0, "keep": 0.5}}
    body["search"]["measured"] = {"measured": 0.02, "inputs": "held-out inputs"}
    effect, time = single.comparisons(rw.Plan.loads(json.dumps(body)), {"time": {"ratio": 0.6}})
    assert (effect["predicted"], effect["measured"], effect["on"]) == (0.01, 0.02, "held-out inputs")
    assert (time["predicted"], time["measured"]) == (0.5, 0.6)


def test_compress_writes_it_unless_told_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    net = tmp_path / "net.safetensors"
    from safetensors.torch import save_file

    save_file(networks.build("digits-cnn").state_dict(), net)
    base = ["compress", "digits-cnn", "--weights", str(net), "--keep", "0.5", "--method", "svd", "--json"]
    assert main([*base, "--data", "digits", "--out", str(tmp_path / "a")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["report"] == str(tmp_path / "a" / "report.html")
    content = content_of(tmp_path / "a" / "report.html")
    assert content["scores"] == said["scores"]
    assert content["time"] == said["time"]
    assert content["bytes"]["after"] == (tmp_path / "a" / "model.safetensors").stat().st_size
    assert content["about"]["data"] == "digits"
    assert content["about"]["weights"] == str(net)
    assert main([*base, "--no-report", "--out", str(tmp_path / "b")]) == 0
    assert json.loads(capsys.readouterr().out)["report"] is None
    assert not (tmp_path / "b" / "report.html").exists()


def test_without_the_extra_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    from rankwise.cli import report

    monkeypatch.setattr(report, "find_spec", lambda name: None)
    save_file(networks.build("digits-cnn").state_dict(), tmp_path / "net.safetensors")
    base = ["compress", "digits-cnn", "--weights", str(tmp_path / "net.safetensors"), "--keep", "0.5"]
    assert main([*base, "--method", "svd", "--out", str(tmp_path / "a")]) == 0
    assert "rankwise[report]" in capsys.readouterr().out
    assert (tmp_path / "a" / "plan.json").exists()
