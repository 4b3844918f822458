"""Recipes: the tables of the supplement, strict changes, and a learning rate that depends on the step alone."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.models import networks
from rankwise.training.recipes import RECIPES, Recipe, change, get_recipe, rate, read_changes
from sentences import check_sentence

PAPER = {  # network: optimizer, epochs, warm-up, batch, lr, momentum, Nesterov, weight decay
    "vgg16": ("sgd", 300, 10, 256, 0.05, 0.9, False, 5e-4),
    "resnet20": ("sgd", 182, 5, 128, 0.1, 0.9, False, 1e-4),
    "densenet22": ("sgd", 300, 10, 64, 0.1, 0.9, True, 1e-4),
    "wrn16-8": ("sgd", 200, 5, 128, 0.1, 0.9, True, 5e-4),
    "resnet18": ("sgd", 90, 5, 256, 0.1, 0.9, False, 1e-4),
    "alexnet": ("sgd", 90, 5, 256, 0.1, 0.9, False, 1e-4),
    "mobilenet_v2": ("rmsprop", 300, 0, 768, 0.045, 0.9, False, 4e-5),
    "deeplabv3_resnet50": ("sgd", 45, 0, 32, 0.02, 0.9, False, 1e-4),
}
RATES = {  # network: rate at the start of some epochs, from the decay rules as printed
    "vgg16": {10: 0.05, 29: 0.05, 30: 0.025, 60: 0.0125, 299: 0.05 * 0.5**9},
    "resnet20": {5: 0.1, 90: 0.1, 91: 0.01, 135: 0.01, 136: 0.001, 181: 0.001},
    "densenet22": {10: 0.1, 149: 0.1, 150: 0.01, 225: 0.001},
    "wrn16-8": {5: 0.1, 60: 0.02, 120: 0.004, 199: 0.1 * 0.2**3},
    "resnet18": {5: 0.1, 30: 0.01, 60: 0.001, 80: 0.0001},
    "alexnet": {29: 0.1, 30: 0.01, 60: 0.001, 89: 0.0001},
    "mobilenet_v2": {0: 0.045, 1: 0.045 * 0.98, 100: 0.045 * 0.98**100},
    "deeplabv3_resnet50": {0: 0.02, 9: 0.02 * 0.8**0.9, 36: 0.02 * 0.2**0.9},
}


@pytest.mark.parametrize("network", PAPER)
def test_the_supplement(network: str) -> None:
    r = get_recipe(f"paper:{network}")
    found = (r.optimizer, r.epochs, r.warmup, r.batch_size, r.lr, r.momentum, r.nesterov, r.weight_decay)
    assert found == PAPER[network]
    assert (r.alpha, r.starts) == (0.8, 15)
    for epoch, expected in RATES[network].items():
        assert rate(r, epoch * 7, 7) == pytest.approx(expected, rel=1e-12)
    assert networks.default_input(network if r.augment == "cifar" else f"torchvision:{network}") is not None


def test_mobilenet_retrains_at_its_lower_rate() -> None:
    r = get_recipe("paper:mobilenet_v2")
    assert rate(r, 100, 10, retraining=True) == pytest.approx(1e-4 * 0.98**10)
    assert rate(get_recipe("paper:vgg16"), 100, 10, retraining=True) == rate(get_recipe("paper:vgg16"), 100, 10)


@pytest.mark.parametrize("name", RECIPES)
@given(steps=st.integers(1, 50))
def test_warmup_rises_evenly_and_no_rate_is_negative(name: str, steps: int) -> None:
    r = RECIPES[name]
    rates = [rate(r, step, steps) for step in range(min(r.epochs, 30) * steps)]
    assert all(0 <= x <= r.lr * (1 + 1e-12) for x in rates)
    warm = [x for step, x in enumerate(rates) if step + 1 < r.warmup * steps]
    assert all(a < b for a, b in pairwise(warm))
    if len(warm) > 1:
        assert warm[1] == pytest.approx(2 * warm[0])  # linear from 0


@pytest.mark.parametrize("name", ["fast", "gentle", "taught", "distilled", "paper:deeplabv3_resnet50"])
def test_ours_and_the_polynomial_end_at_zero(name: str) -> None:
    r = RECIPES[name]
    rates = [rate(r, step, 100) for step in range(r.epochs * 100)]
    assert max(rates) == pytest.approx(r.lr, rel=1e-3)
    assert rates[-1] < r.lr / 1000 if r.schedule == "cycle" else rates[-1] < r.lr / 100


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda r: r.name)
def test_recipes_survive_json(recipe: Recipe) -> None:
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


def test_every_field_can_be_changed_from_text() -> None:
    for recipe in RECIPES.values():
        values = {key: value for key, value in recipe.to_json().items() if key != "name"}
        texts = [f"{k}={','.join(map(str, v)) if isinstance(v, list) else v}" for k, v in values.items()]
        assert change(RECIPES["fast"], read_changes(texts)) == replace(recipe, name="fast")
    changed = change(RECIPES["fast"], read_changes(["epochs=3", "retrain=2", "lr=5e-2", "nesterov=False"]))
    assert (changed.epochs, changed.retrain, changed.lr, changed.nesterov) == (3, 2, 0.05, False)


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        (["epoch=3"], "no 'epoch': it has epochs"),
        (["name=x"], "no 'name'"),
        (["epochs"], "--set epochs=3"),
        (["epochs=3", "epochs=4"], "twice"),
        (["epochs=3.5"], "whole number"),
        (["epochs=-1"], "epochs=-1"),
        (["batch_size=0"], "batch_size=0"),
        (["lr=0"], "above 0"),
        (["lr=nan"], "a number"),
        (["retrain_lr=-1"], "above 0"),
        (["momentum=1"], "below, 1"),
        (["momentum=0"], "nesterov"),
        (["schedule=warm"], "possible are constant"),
        (["optimizer=lion"], "possible are sgd"),
        (["augment=all"], "possible are auto"),
        (["precision=int8"], "possible are no"),
        (["nesterov=maybe"], "true or false"),
        (["milestones=3;4"], "list of whole numbers"),
        (["alpha=1"], "between 0 and 1"),
        (["epochs=2", "retrain=3"], "up to 2"),
    ],
)
def test_refusals(pairs: list[str], says: str) -> None:
    assert says in check_sentence(lambda: change(RECIPES["fast"], read_changes(pairs)))


def test_epochs_take_warmup_and_retraining_along() -> None:
    assert change(RECIPES["paper:resnet20"], {"epochs": 90}).warmup == 5  # an absolute number in the paper
    short = change(RECIPES["fast"], read_changes(["epochs=3"]))
    assert (short.retrain, short.warmup) == (3, pytest.approx(0.6))
    assert change(RECIPES["fast"], {"epochs": 3, "warmup": 2.0}).warmup == 2.0


def test_unknown_recipes() -> None:
    assert "paper:resnet20" in check_sentence(lambda: get_recipe("slow"))
    assert "no 'speed'" in check_sentence(lambda: Recipe.from_json({"speed": 1}))
    assert "needs 'epochs'" in check_sentence(lambda: Recipe.from_json({"name": "x"}))
    assert "epochs=True" in check_sentence(lambda: change(RECIPES["fast"], {"epochs": True}))
