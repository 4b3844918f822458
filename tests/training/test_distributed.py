"""Two processes on one CPU (gloo): the same plan, the same weights, one writer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rankwise.training import steps
from rankwise.training.recipes import RECIPES, change
from rankwise.training.steps import Run

pytest.importorskip("sklearn")
pytest.importorskip("accelerate")

# No batch norm: its statistics belong to one process. Without it, two halves of a batch give the gradient of the whole.
PLAIN = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.ReLU(), nn.Flatten(),
                         nn.Linear(24 * 16, 10))
"""
SETTINGS = {"epochs": 3, "retrain": 2, "warmup": 1, "batch_size": 32, "augment": "none", "lr": 0.05}
WORKER = """
import hashlib, json, os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from rankwise.core import disk, files as whole_files
from rankwise.models import networks
from rankwise.training import loop, steps
from rankwise.training.recipes import RECIPES, change
from rankwise.training.steps import Rounds, Run

factory, out, settings, method = sys.argv[1:]
rank = int(os.environ["RANK"])
heard = {"writes": [], "plans": [], "weights": [], "gradients": []}

wrote = whole_files.write_together
def write_together(files):
    heard["writes"] += [str(path) for path in files]
    wrote(files)
disk.write_together = whole_files.write_together = write_together

followed = steps._retrain
def retrain(small, plan, *rest):
    heard["plans"].append(plan.dumps())
    row = followed(small, plan, *rest)
    parts = [value.numpy().tobytes() for value in small.state_dict().values()]
    heard["weights"].append(hashlib.sha256(b"".join(parts)).hexdigest())
    return row
steps._retrain = retrain

class Step(torch.optim.SGD):
    def step(self, closure=None):
        grads = b"".join(p.grad.contiguous().numpy().tobytes() for g in self.param_groups for p in g["params"])
        heard["gradients"].append(hashlib.sha256(grads).hexdigest())
        return super().step(closure)
loop.SGD = Step

run = Run("digits", change(RECIPES["fast"], json.loads(settings)), Path(out), limit=250)
rows = steps.iterate(factory, run, Rounds(2, method)) if method else [steps.train(factory, run)]
heard["rows"] = rows
Path(out + f"-heard-{rank}.json").write_text(json.dumps(heard))
"""


def together(*arguments: str) -> None:
    """Run the worker in two processes that find each other on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", WORKER, *arguments]
        processes.append(subprocess.Popen(command, env={**os.environ, **place}, stderr=subprocess.PIPE, text=True))
    try:
        for process in processes:
            _, errors = process.communicate(timeout=900)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("factory") / "mine.py"
    path.write_text(PLAIN)
    return f"{path}:net"


def heard(out: Path) -> list[dict[str, list[str]]]:
    return [json.loads(Path(f"{out}-heard-{rank}.json").read_text()) for rank in (0, 1)]


def test_gradients_are_those_of_the_whole_batch(factory: str, tmp_path: Path) -> None:
    together(factory, str(tmp_path / "two"), json.dumps(SETTINGS), "")
    first, second = heard(tmp_path / "two")
    assert len(first["gradients"]) == 3 * 8
    assert first["gradients"] == second["gradients"]
    assert first["writes"]
    assert second["writes"] == []
    one = steps.train(factory, Run("digits", change(RECIPES["fast"], SETTINGS), tmp_path / "one", limit=250))
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, value in ours.items():
        assert torch.allclose(value, theirs[name], atol=1e-4), name
    both = json.loads((tmp_path / "two" / "row.json").read_text())
    assert both["processes"] == 2
    for record, same in zip(both["history"], one["history"], strict=True):
        assert record["loss"] == pytest.approx(same["loss"], rel=1e-3)
        assert record["stop"]["n"] == same["stop"]["n"]


def test_both_follow_the_plan_of_the_first(tmp_path: Path) -> None:
    out = tmp_path / "rounds"
    # pca looks at data, which only the first process does
    together("digits-cnn", str(out), json.dumps({**SETTINGS, "retrain": 1}), "pca")
    first, second = heard(out)
    assert len(first["plans"]) == 2
    assert first["plans"] == second["plans"]
    assert first["weights"] == second["weights"]
    assert first["gradients"] == second["gradients"]
    assert second["writes"] == []
    assert (out / "round-2" / "plan.json").read_text() == first["plans"][1]
    assert _without_times(first["rows"]) == _without_times(second["rows"])


def _without_times(rows: object) -> object:
    if isinstance(rows, dict):
        return {k: _without_times(v) for k, v in rows.items() if k != "seconds"}
    return [_without_times(row) for row in rows] if isinstance(rows, list) else rows
