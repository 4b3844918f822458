"""A learning rate that is found on training images."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rankwise.data import splits
from rankwise.models import networks
from rankwise.training.range_test import choose, find_rate, loss_of_nothing, smooth
from rankwise.training.recipes import RECIPES, change


def test_the_rate_is_an_eighth_of_the_one_that_undoes_half_of_what_is_known() -> None:
    rates = [10.0**k for k in range(-4, 2)]
    falls = [1.0, 0.9, 0.1, 0.05, 90.0, float("nan")]
    assert choose(0.1, rates, falls, 2.0).lr == pytest.approx(rates[4] / 8, rel=0.05)
    assert choose(1e-3, rates, falls, 2.0).lr == pytest.approx(1e-2), "no more than ten times the recipe's"
    assert choose(10.0, rates, falls, 2.0).lr == pytest.approx(1.0), "and no less than a tenth of it"
    assert choose(10.0, rates, [1.0] * 6, 2.0).lr == pytest.approx(10.0 / 8, rel=0.05), "nothing broke"
    assert smooth([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])


def test_a_network_that_was_fitted_gets_no_tiny_rate() -> None:
    rates = [1e-5 * 1.2**k for k in range(60)]
    curve = [0.05 * (1 + (rate / 0.003) ** 2) for rate in rates]  # rises from the first step on
    assert 0.0005 < choose(0.003, rates, curve, 1.2).lr < 0.01


def test_the_loss_of_a_network_that_knows_nothing() -> None:
    recipe = RECIPES["distilled"]
    assert loss_of_nothing(10, recipe, taught=False) == pytest.approx(2.302585)
    assert loss_of_nothing(10, recipe, taught=True) == pytest.approx(1 + 0.2302585)


def test_the_network_is_left_alone_and_the_seed_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.training.range_test.COUNT", 6)
    fit = splits.load("digits", "fit").thin(64)
    model = networks.build("resnet20?in_channels=1&image_size=8")
    before = [p.clone() for p in model.state_dict().values()]
    recipe = replace(RECIPES["distilled"], precision="no", augment="shift", batch_size=16)
    state = torch.random.get_rng_state()
    found = find_rate(model, fit, recipe, seed=3)
    assert torch.equal(state, torch.random.get_rng_state())
    assert found == find_rate(model, fit, recipe, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert recipe.lr / 10 <= found.lr <= recipe.lr * 10


def test_a_rate_that_is_given_is_not_looked_for() -> None:
    assert RECIPES["distilled"].find_lr
    assert not change(RECIPES["distilled"], {"lr": 0.01}).find_lr
