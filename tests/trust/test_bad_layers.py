"""A layer of odd values stops no job without its name, and what comes out is finite where what went in is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import rankwise as rw

BAD = {
    "nan": lambda w: w.fill_(float("nan")),
    "one nan": lambda w: w.view(-1)[:1].fill_(float("nan")),
    "inf": lambda w: w.view(-1)[-1:].fill_(float("inf")),
    "zero": lambda w: w.zero_(),
    "one value": lambda w: w.fill_(0.25),
    "rank 1": lambda w: w.copy_(torch.ones_like(w) * torch.arange(1.0, len(w) + 1).view(-1, *[1] * (w.dim() - 1))),
    "1e-300": lambda w: w.mul_(1e-300),
    "1e300": lambda w: w.mul_(1e300),
    "1e-320": lambda w: w.mul_(1e-320),
}
METHODS = list(rw.METHODS)
EXAMPLE = torch.linspace(-1, 1, 2 * 3 * 6 * 6, dtype=torch.float64).reshape(2, 3, 6, 6)


def network(kind: str) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 10)
        ).double()
    with torch.no_grad():
        BAD[kind](made[3].weight)
    return made.eval()


def sampled() -> list[tuple[str, str]]:
    """Every kind with every method in `make trust`; with three of them, in turns, always."""
    return [
        pytest.param(kind, method, marks=[] if (i + j) % 5 == 0 else pytest.mark.trust)  # type: ignore[misc]
        for i, kind in enumerate(BAD)
        for j, method in enumerate(METHODS)
    ]


@pytest.mark.parametrize(("kind", "method"), sampled())
def test_a_bad_layer(kind: str, method: str) -> None:
    model = network(kind)
    try:
        small, plan = rw.compress(model, EXAMPLE, method=method, keep=0.6, data=[EXAMPLE])
    except rw.RankwiseError as err:
        said = str(err)
    else:
        check_outcome(kind, small, plan)
        return
    assert "\n" not in said
    assert any(name in said for name in ("'3'", "layer 3", " 3 ", " 3:", " 3,")), f"which layer? {said}"


def check_outcome(kind: str, small: nn.Module, plan: rw.Plan) -> None:
    assert plan.after.params <= 0.6 * plan.before.params
    for name, value in small.state_dict().items():
        if not name.startswith("3"):
            assert torch.isfinite(value).all(), f"{name} is not finite, and only layer 3 was bad"
    if kind not in ("nan", "one nan", "inf"):
        assert all(torch.isfinite(v).all() for v in small.state_dict().values())


SCRIPT = """
import resource, sys
from rankwise.__main__ import main
from rankwise.cli import progress
import torch, numpy
progress.BEAT = 1e6  # on a busy machine a line of progress would stand before the sentence
torch.set_num_threads(1)
torch.linalg.eigh(torch.eye(3))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]), -1))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    "megabytes", [8, pytest.param(40, marks=pytest.mark.trust), pytest.param(90, marks=pytest.mark.trust)]
)
def test_too_little_memory_is_one_sentence(megabytes: int, tmp_path: Path) -> None:
    """A limit of the system: the command says so, and the folder is as it was."""
    command = ["compress", "torchvision:resnet18", "--random-weights", "--keep", "0.5", "--method", "svd"]
    if "--random-weights" not in help_of("compress"):
        command.remove("--random-weights")
    command = [*command, "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(megabytes << 20), *command],
        capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode in (1, 2), done.stderr[-2000:]
    assert done.stderr.startswith("rankwise: "), done.stderr[-2000:]
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def help_of(command: str) -> str:
    import inspect

    from rankwise.cli import compress

    return inspect.getsource(compress)
