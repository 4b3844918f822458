"""Any order of compress, save, load, retrain, kill, resume, densify, export: counts, outputs, budgets, plans hold."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rankwise as rw
from rankwise.deploy.export import export, open_exported
from rankwise.errors import BudgetError
from rankwise.surgery.checkpoint import read_plan
from rankwise.training import steps
from rankwise.training.recipes import RECIPES, change

pytest.importorskip("sklearn")
pytest.importorskip("accelerate")

FACTORY = """
from torch import nn

def net(width=6, depth=1, norm=True):
    layers, channels = [], 1
    for i in range(depth):
        layers += [nn.Conv2d(channels, width, 3, padding=1), *([nn.BatchNorm2d(width)] if norm else []), nn.ReLU()]
        channels = width
    head = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * width, 24), nn.ReLU(), nn.Linear(24, 10)]
    return nn.Sequential(*layers, *head)
"""
METHODS = ("alds", "alds+", "svd", "svd-energy", "tucker2", "auto")
X = torch.linspace(-1, 1, 3 * 64).reshape(3, 1, 8, 8)


class Killed(BaseException):
    """As abrupt as a kill, but within the process."""


class KillAt:
    def __init__(self, step: int) -> None:
        self.left = step

    def step(self, *_: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def epoch(self, record: dict[str, Any]) -> None:
        pass


def outputs(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        return model.eval()(X).clone()


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def macs(model: nn.Module) -> int:
    """By torch's own counter, for one input."""
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model.eval()(X[:1])
    return counter.get_total_flops() // 2


class Story(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="rankwise-story-"))
        (self.folder / "mine.py").write_text(FACTORY)
        self.small: nn.Module | None = None
        self.plan: rw.Plan | None = None
        self.saved: tuple[Tensor, rw.Plan] | None = None
        self.runs = 0

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @initialize(width=st.integers(2, 9), depth=st.integers(1, 3), norm=st.booleans(), seed=st.integers(0, 99))
    def build(self, width: int, depth: int, norm: bool, seed: int) -> None:
        names: dict[str, Any] = {}
        exec(FACTORY, names)
        self.spec = f"{self.folder / 'mine.py'}:net?width={width}&depth={depth}&norm={norm}"
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.dense: nn.Module = names["net"](width, depth, norm).eval()
        self.shapes = [tuple(p.shape) for p in self.dense.parameters()]

    @rule(method=st.sampled_from(METHODS), keep=st.floats(0.05, 1.0), unit=st.sampled_from(("params", "macs", "both")))
    def compress(self, method: str, keep: float, unit: str) -> None:
        before = {k: v.clone() for k, v in self.dense.state_dict().items()}
        try:
            shares = {"keep": None if unit == "macs" else keep, "macs": None if unit == "params" else keep}
            self.small, self.plan = rw.compress(self.dense, X, method, **shares)
        except BudgetError:
            return  # everything else that is raised is a mistake
        assert unit == "macs" or count(self.small) <= keep * count(self.dense)
        assert unit == "params" or macs(self.small) <= keep * macs(self.dense)
        assert self.plan.before.params == count(self.dense)
        assert all(torch.equal(v, before[k]) for k, v in self.dense.state_dict().items()), "the model is left alone"

    @precondition(lambda self: self.small is not None)
    @rule()
    def save(self) -> None:
        rw.save(self.small, self.plan, self.folder / "saved")
        self.saved = (outputs(self.small), self.plan)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self) -> None:
        self.small, self.plan = rw.load(self.folder / "saved", self.dense), read_plan(self.folder / "saved")
        assert torch.equal(outputs(self.small), self.saved[0])
        assert self.plan == self.saved[1]

    @precondition(lambda self: self.saved is not None and self.saved[1].choices)
    @rule(kills=st.lists(st.integers(0, 5), max_size=2))
    def retrain(self, kills: list[int]) -> None:
        """However often it is killed, the network is that of a training that was not."""
        self.runs += 1
        whole, killed = (self.folder / f"{name}-{self.runs}" for name in ("whole", "killed"))
        base = self.spec
        recipe = change(RECIPES["fast"], {"epochs": 3, "retrain": 2, "warmup": 0, "batch_size": 32, "augment": "none"})
        run = steps.Run("digits", recipe, whole, limit=64)
        steps.retrain(self.folder / "saved", run, base)
        for step in kills:
            try:
                steps.retrain(self.folder / "saved", replace(run, out=killed, resume=True, watch=KillAt(step)), base)
            except Killed:
                assert not (killed / "model.safetensors").exists()
        steps.retrain(self.folder / "saved", replace(run, out=killed, resume=True), base)
        one, two = ((folder / "model.safetensors").read_bytes() for folder in (whole, killed))
        assert one == two
        assert {p.name for p in killed.iterdir()} == {"model.safetensors", "plan.json", "row.json"}
        self.small, self.plan = rw.load(killed, self.dense), read_plan(killed)
        assert self.plan == self.saved[1]

    @precondition(lambda self: self.small is not None)
    @rule()
    def densify(self) -> None:
        dense = rw.densify(self.small)
        assert [tuple(p.shape) for p in dense.parameters()][: len(self.shapes)] == self.shapes or self.plan.fused
        assert torch.allclose(outputs(dense), outputs(self.small), rtol=1e-3, atol=1e-4)

    @invariant()
    def counts_are_true(self) -> None:
        if self.small is None:
            return
        assert self.plan.after.params == count(self.small)
        assert rw.Plan.loads(self.plan.dumps()) == self.plan
        assert torch.isfinite(outputs(self.small)).all()


class StoryWithExport(Story):
    @precondition(lambda self: self.small is not None)
    @rule()
    def export(self) -> None:
        export(self.small.eval(), X, self.folder / "m.pt2", "exported")
        theirs = open_exported(self.folder / "m.pt2", "exported")((X,), {})[0]
        assert torch.allclose(theirs, outputs(self.small), rtol=1e-3, atol=1e-4)


QUICK = {"stateful_step_count": 6, "deadline": None, "suppress_health_check": list(HealthCheck)}


def test_a_few_stories() -> None:
    run_state_machine_as_test(Story, settings=settings(max_examples=5, **QUICK))


@pytest.mark.trust
def test_many_stories() -> None:
    run_state_machine_as_test(
        StoryWithExport, settings=settings(max_examples=40, **{**QUICK, "stateful_step_count": 12})
    )
