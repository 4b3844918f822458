"""l-rank: every layer minimises residual energy + λ · cost on its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rankwise as rw
from rankwise.decompositions import Selection
from rankwise.planning.menu import menus
from rankwise.planning.walks import at_price


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(6, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 16, 3, stride=2), nn.Flatten(), nn.Linear(144, 10)
    )
    for layer in net:
        if isinstance(layer, nn.Conv2d | nn.Linear):  # spectra that fall, as trained ones do
            layer.weight.data *= torch.linspace(2, 0.1, layer.weight.shape[0]).view(-1, *[1] * (layer.weight.dim() - 1))
    return net.eval()


def table(seed: int = 0) -> rw.Table:
    return rw.build_table(network(seed), torch.zeros(1, 6, 8, 8), folds=(0,), groups=1)


@pytest.mark.parametrize("unit", ["params", "macs"])
def test_at_price_zero_nothing_is_lost(unit: str) -> None:
    offered = menus(table(), (unit,), "residual", Selection((0,), 1))
    assert [p.error for p in at_price(offered, 0.0)] == [0.0] * len(offered)


@given(seed=st.integers(0, 20), prices=st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=2).map(sorted))
def test_ranks_never_rise_with_the_price(seed: int, prices: list[float]) -> None:
    offered = menus(table(seed), ("params",), "residual", Selection((0,), 1))
    cheap, dear = (at_price(offered, price) for price in prices)
    for before, after in zip(cheap, dear, strict=True):
        assert after.cost <= before.cost
        assert before.option is None or after.rank <= before.rank


@given(seed=st.integers(0, 20), keep=st.floats(0.15, 0.95))
def test_the_plan_is_what_its_price_says(seed: int, keep: float) -> None:
    """A hair above the reported λ every layer chooses exactly the plan; at λ itself the next step would be taken."""
    spectra = table(seed)
    plan = rw.allocate(spectra, rw.Budget(params=keep), method="l-rank")
    assert plan.keep() <= keep
    offered = menus(spectra, ("params",), "residual", Selection((0,), 1))
    chosen = {m.layer.name: p for m, p in zip(offered, at_price(offered, plan.search.price * (1 + 1e-9)), strict=True)}
    found = {c.name: c.rank for c in plan.choices}
    assert {name: p.rank for name, p in chosen.items() if p.option} == found


def test_each_layer_by_hand() -> None:
    """Against the definition, straight from an SVD: argmin over ranks of λ·r(f + cκ²) + Σ_{i>r} σᵢ²."""
    model, price = network(), 0.004
    offered = menus(table(), ("params",), "residual", Selection((0,), 1))
    for menu, point in zip(offered, at_price(offered, price), strict=True):
        matrix = model.get_submodule(menu.layer.name).weight.detach().double().flatten(1)
        sigma = torch.linalg.svdvals(matrix)
        ranks = range(1, menu.offers[0].most + 1)
        value = {r: price * r * sum(matrix.shape) + float((sigma[r:] ** 2).sum()) for r in ranks}
        value[0] = price * matrix.numel()  # 0 stands for the layer as it is
        assert point.rank == min(value, key=lambda r: value[r])


def test_two_budgets_hold_together() -> None:
    plan = rw.allocate(table(), rw.Budget(params=0.5, macs=0.4), method="l-rank")
    assert plan.keep("params") <= 0.5
    assert plan.keep("macs") <= 0.4
