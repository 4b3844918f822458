"""Files of older formats load, and mean what they meant."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.surgery.checkpoint import PLAN
from sentences import check_sentence


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)).eval()


def as_format_1(text: str) -> str:
    """A plan as it was written before slices had their name."""
    body = json.loads(text)
    body["format"] = 1
    for entry in body["layers"]:
        if "slices" in entry:
            entry["groups"] = entry.pop("slices")
    body["search"] |= {"warning": "calibration failed", "inputs": "imagined"}  # as they were written then
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


def test_a_plan_of_format_1_is_the_same_plan(model: nn.Module) -> None:
    _, plan = rw.compress(model, torch.zeros(1, 4, 6, 6), method="alds", keep=0.6, groups=2)
    assert {choice.slices for choice in plan.choices} == {choice.groups for choice in plan.choices} == {2}
    assert json.loads(plan.dumps())["format"] == 2
    old = rw.Plan.loads(as_format_1(plan.dumps()))
    assert old == replace(plan, search=replace(plan.search, inputs="synthetic"), warnings=("calibration failed",))


def test_a_folder_with_a_plan_of_format_1_loads(model: nn.Module, tmp_path: Path) -> None:
    """Its weights hold the hash of the plan's own text."""
    import hashlib

    from safetensors.torch import load_file, save_file

    x = torch.randn(2, 4, 6, 6)
    small, plan = rw.compress(model, x, method="alds", keep=0.6)
    rw.save(small, plan, tmp_path)
    text = as_format_1((tmp_path / PLAN).read_text())
    (tmp_path / PLAN).write_text(text)
    weights = tmp_path / "model.safetensors"
    header = json.loads(weights.read_bytes()[8 : 8 + int.from_bytes(weights.read_bytes()[:8], "little")])
    about = json.loads(header["__metadata__"]["rankwise"])
    about["plan"] = hashlib.sha256(text.encode()).hexdigest()
    save_file(load_file(weights), weights, {"rankwise": json.dumps(about)})
    torch.testing.assert_close(rw.load(tmp_path, model)(x), small(x))
    (tmp_path / PLAN).write_text(text.replace('"rank": ', '"rank": 1', 1))
    assert "do not belong together" in check_sentence(lambda: rw.load(tmp_path, model))


def test_slices_and_groups_are_one_setting(model: nn.Module) -> None:
    one = rw.compress(model, method="alds-error", keep=0.6, groups=2)[1]
    other = rw.compress(model, method="alds-error", keep=0.6, slices=2)[1]
    assert one == other
    assert "give slices= only" in check_sentence(lambda: rw.compress(model, keep=0.6, slices=2, groups=2))
    both = {"slices": 1, "groups": 1}
    body = json.loads(one.dumps())
    body["layers"][0] |= both
    assert "leave groups out" in check_sentence(lambda: rw.Plan.loads(json.dumps(body)))
