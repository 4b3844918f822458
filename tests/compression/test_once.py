"""What no budget changes is done once for a job."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.compression import Compression, Request, job
from rankwise.surgery import coverage, replace


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 10)).eval()


@pytest.mark.parametrize("method", ["auto", "alds", "pca", "cp", "ft"])
def test_layers_are_found_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def counted(*args: Any, **kwargs: Any) -> rw.Coverage:
        found.append(1)
        return coverage.find_layers(*args, **kwargs)

    for module in (job, replace):
        monkeypatch.setattr(module, "find_layers", counted)
    x = torch.randn(8, 3, 6, 6)
    rw.compress(network(), x[:1], method=method, keep=0.6, data=[x])
    assert len(found) == 1


def test_a_table_serves_many_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def tables(settings: Any, make: Any) -> Any:
        made.append(settings)
        return make()

    work = Compression(network(), torch.zeros(1, 3, 6, 6), Request("alds"), tables=tables)
    keeps = [work.plan(rw.Budget(params=share)).keep() for share in (0.4, 0.6, 0.8)]
    assert keeps == sorted(keeps)
    assert len(made) == 1
