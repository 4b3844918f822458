"""The smallest network within a loss of any metric: few evaluations, and only networks that were measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from sentences import check_sentence

X = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 6)).eval()


def truth() -> Tensor:
    with torch.no_grad():
        return network()(X)


class Metrics:
    """Four kinds, and every network that they were asked about."""

    def __init__(self) -> None:
        self.seen: list[tuple[nn.Module, float]] = []
        self.truth = truth()

    def _kept(self, net: nn.Module, value: Any) -> Any:
        self.seen.append((net, float(value)))
        return value

    def top1(self, net: nn.Module) -> float:
        return self._kept(net, 100 * float((net(X).argmax(1) == self.truth.argmax(1)).double().mean()))

    def correlation(self, net: nn.Module) -> Tensor:
        both = torch.stack([net(X).flatten(), self.truth.flatten()])
        return self._kept(net, torch.corrcoef(both)[0, 1])

    def perplexity(self, net: nn.Module) -> float:
        return self._kept(net, float(nn.functional.cross_entropy(net(X), self.truth.softmax(1)).exp()))

    def loss(self, net: nn.Module) -> float:
        return self._kept(net, float((net(X) - self.truth).square().mean()))


CASES = [("top1", 40.0, True), ("correlation", 0.05, True), ("perplexity", 0.05, False), ("loss", 0.01, False)]


@pytest.mark.parametrize(("name", "drop", "higher"), CASES)
@pytest.mark.parametrize("unit", ["params", "macs"])
def test_within_the_loss_measured_and_no_smaller_trial_was(name: str, drop: float, higher: bool, unit: str) -> None:
    metrics = Metrics()
    small, plan = rw.smallest(
        network(), X[:1], getattr(metrics, name), drop, unit, higher_is_better=higher, method="svd-energy"
    )
    assert len(metrics.seen) <= 12
    (whole, *_), values = [value for _, value in metrics.seen], {id(net): value for net, value in metrics.seen}
    lost = (whole - values[id(small)]) * (1 if higher else -1)
    assert lost <= drop
    assert 0 < plan.keep(unit) < 1
    sizes = {id(net): sum(p.numel() for p in net.parameters()) for net, _ in metrics.seen}
    within = [s for net, v in metrics.seen if (whole - v) * (1 if higher else -1) <= drop for s in [sizes[id(net)]]]
    assert sizes[id(small)] == min(within)


def test_options_reach_the_job() -> None:
    metrics = Metrics()
    _, plan = rw.smallest(network(), X[:1], metrics.top1, 60.0, method="svd", exclude=["0"], name="mine")
    assert plan.method == "svd"
    assert plan.model == "mine"
    assert "0" not in {c.name for c in plan.choices}


def test_the_model_keeps_its_mode() -> None:
    model = network().train()
    rw.smallest(model, X[:1], Metrics().top1, 60.0, method="svd-energy")
    assert model.training


def test_what_cannot_be_is_one_sentence() -> None:
    model, metrics = network(), Metrics()

    def find(metric: Any = metrics.top1, **rest: Any) -> Any:
        return rw.smallest(model, X[:1], metric, **{"method": "svd", **rest})

    assert "one number" in check_sentence(lambda: find(lambda net: net(X)))
    assert "finite" in check_sentence(lambda: find(lambda net: float("nan")))
    assert "unit" in check_sentence(lambda: find(unit="grams"))
    assert "from 0 on" in check_sentence(lambda: find(max_drop=-1.0))
    assert "drop one" in check_sentence(lambda: find(latency=0.5))
    worse = iter(range(100, 0, -1))
    assert "no smaller network" in check_sentence(lambda: find(lambda net: next(worse), max_drop=0.5))
    assert "unknown setting" in check_sentence(lambda: find(colour=3))


def test_a_metric_that_is_nan_for_a_small_network_rules_it_out() -> None:
    def metric(net: nn.Module) -> float:
        size = sum(p.numel() for p in net.parameters())
        return float("nan") if size < 2000 else 1.0

    small, _ = rw.smallest(network(), X[:1], metric, 0.5, method="svd-energy")
    assert sum(p.numel() for p in small.parameters()) >= 2000
