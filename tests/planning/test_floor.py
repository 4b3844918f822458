"""The least that a plan can reach is known from shapes alone, and it is what the search says once it has its table."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.errors import BudgetError
from rankwise.methods import settings_for, table_for
from rankwise.planning import floor
from rankwise.planning.planner import Settings, find_plan
from rankwise.pruning import filters
from sentences import check_sentence

X = torch.zeros(2, 6, 9, 9)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(6, 12, 3, stride=2, padding=1),
        nn.BatchNorm2d(12),
        nn.Conv2d(12, 8, (1, 5), padding=(0, 2), groups=2),
        nn.ConvTranspose2d(8, 6, 3, bias=False),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.Flatten(),
        nn.Linear(150, 9),
        nn.Linear(9, 2),
    ).eval()


METHODS = [
    name for name, one in rw.METHODS.items() if isinstance(one.settings, Settings) and name not in ("pca", "auto")
]
SETTINGS = [
    *((name, {}) for name in METHODS),
    ("alds", {"slices": "any"}),
    ("alds", {"slices": [2, 5], "folds": [3]}),
    ("alds+", {"rank_multiple": 4}),
    ("messi", {"slices": "all", "clustering": "consecutive"}),
    ("tucker2", {"decompositions": ("tucker2", "cp", "svd")}),
]


@pytest.mark.parametrize(("method", "changes"), SETTINGS, ids=lambda x: str(x))
def test_shapes_and_tables_say_the_same(method: str, changes: dict[str, Any]) -> None:
    """Sentence by sentence, for one unit and for two."""
    settings = settings_for(method, **changes)
    assert isinstance(settings, Settings)
    model = network()
    coverage = rw.find_layers(model, X)
    table = table_for(model, coverage, settings)
    asked = (settings.selection, settings.decompositions, settings.rank_multiple)
    for few in ({"params": 1e-4}, {"macs": 1e-4}, {"params": 1e-4, "macs": 1e-4}):
        late = check_sentence(lambda few=few: find_plan(table, rw.Budget(**few), settings, method))
        early = check_sentence(lambda few=few: floor.check_reachable(coverage, rw.Budget(**few), *asked))
        assert early == late
        if len(few) == 1:  # and what it names can be had
            keep = float(early.split("(keep ")[1].split(")")[0])
            budget = rw.Budget(**dict.fromkeys(few, keep))
            floor.check_reachable(coverage, budget, *asked)
            if settings.search != "constant":  # one keep for all layers cannot go that far
                find_plan(table, budget, settings, method)


def test_auto_is_never_smaller_than_shapes_say() -> None:
    model, data = network(), torch.randn(64, 6, 9, 9)
    said = check_sentence(lambda: rw.compress(model, X, keep=1e-3, data=data))
    least = int(said.split("the least possible is at least ")[1].split(" ")[0].replace(",", ""))
    keep = float(said.split("(keep ")[1].split(")")[0])
    _, plan = rw.compress(model, X, keep=2 * keep, data=data)
    assert plan.after.params >= least
    with contextlib.suppress(BudgetError):  # a bound: depthwise layers stay whole where effects are measured
        assert rw.compress(model, X, keep=keep, data=data)[1].after.params >= least


def test_filters_are_not_scored_for_a_budget_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_pruning")
    model = nn.Sequential(nn.Conv2d(6, 12, 3), nn.ReLU(), nn.Conv2d(12, 8, 3)).eval()

    def never(*_: Any) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(filters, "_scored", never)
    for method in ("ft", "pfp"):
        assert "least possible" in check_sentence(lambda m=method: rw.compress(model, X, method=m, keep=1e-3, data=X))
