"""Limits of memory: what they leave, and that work which is certain to exceed them is refused before it begins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.calibration import effect_table
from rankwise.compression import job
from rankwise.core import memory
from rankwise.errors import RankwiseError


def test_what_a_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_left", lambda: iter([5_000_000, 3_000_000]))
    assert memory.room() == 3_000_000
    memory.check_room(3e6, "these")
    with pytest.raises(RankwiseError, match=r"these take at least 4 MB, and the limit .* leaves 3 MB"):
        memory.check_room(4e6, "these")
    assert effect_table.memory_for_statistics() == 1_500_000
    monkeypatch.setattr(memory, "_left", lambda: iter([]))
    assert memory.room() is None
    assert effect_table.memory_for_statistics() == effect_table.MEMORY


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_and_those_above_it(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top, file = (tmp_path / "memory", "memory.limit_in_bytes") if version == 1 else (tmp_path, "memory.max")
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / file).write_text("123\n")
    (top / "a" / "b" / file).write_text("max\n" if version == 2 else "456\n")
    (tmp_path / "self").write_text("0::/a/b\n" if version == 2 else "3:cpu,cpuacct:/a\n7:memory:/a/b\n")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "self")
    assert sorted(memory._groups()) == ([123] if version == 2 else [123, 456])


def test_a_layer_that_does_not_fit_is_named_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2000), nn.ReLU(), nn.Linear(2000, 3))
    monkeypatch.setattr(memory, "_left", lambda: iter([300_000]))
    monkeypatch.setattr(job, "make_basis", lambda *given: pytest.fail("the work has begun"))
    data = [torch.randn(8, 4) for _ in range(4)]
    with pytest.raises(RankwiseError, match="layer '2' take at least 64 MB"):
        rw.compress(net, torch.zeros(1, 4), keep=0.7, data=data)
    with pytest.raises(RankwiseError, match="a copy of the network"):
        rw.compress(nn.Sequential(nn.Linear(300, 300)), torch.zeros(1, 300), keep=0.7, method="svd")
    monkeypatch.undo()
    assert rw.compress(net, torch.zeros(1, 4), keep=0.7, method="svd")[1].keep() <= 0.7


LIMITED = """
import json, resource, sys
import torch
torch.set_num_threads(1)
from rankwise.core import memory
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
print(json.dumps(memory.room()))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say")
def test_a_real_limit() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    assert 32 << 20 < json.loads(done.stdout) <= 64 << 20
