"""Training: it learns, it repeats itself, and it leaves the rest alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rankwise.data import splits
from rankwise.errors import RankwiseError
from rankwise.models.networks import build
from rankwise.training.evaluate import evaluate
from rankwise.training.loop import Hooks, fit_, train_, training
from rankwise.training.processes import make_engine
from rankwise.training.recipes import Recipe

pytest.importorskip("sklearn")


def fresh(spec: str = "digits-cnn") -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(spec)


@pytest.fixture(scope="module")
def train() -> splits.Split:
    return splits.load("digits", "train")


def test_digits_are_learned(train: splits.Split) -> None:
    model = fresh()
    untrained = evaluate(model, splits.load("digits"))
    losses = fit_(model, train, epochs=8)
    assert len(losses) == 8
    assert losses[-1] < 0.1 < losses[0]
    assert untrained.top1 < 50
    assert evaluate(model, splits.load("digits")).top1 >= 97


def test_the_seed_decides(train: splits.Split) -> None:
    split = train.thin(200)
    base = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 10))
    results = []
    for seed in (5, 5, 6):
        model = copy.deepcopy(base)
        torch.rand(seed)  # the state of the global generator plays no part
        results.append((fit_(model, split, epochs=2, seed=seed), model[2].weight.detach().clone()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][1], results[2][1])


def test_global_random_state_and_modes_are_left_alone(train: splits.Split) -> None:
    model = fresh()
    model.eval()
    model.bn2.train()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    fit_(model, train.thin(50), epochs=1)
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in model.modules()] == modes


def test_progress_sees_every_epoch(train: splits.Split) -> None:
    seen: list[tuple[int, int, float]] = []
    losses = fit_(fresh(), train.thin(70), epochs=3, progress=lambda *now: seen.append(now))
    assert seen == [(i + 1, 3, loss) for i, loss in enumerate(losses)]


def test_no_epochs_change_nothing(train: splits.Split) -> None:
    model, same = fresh(), fresh()
    assert fit_(model, train, epochs=0) == []
    for (name, value), other in zip(model.state_dict().items(), same.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize(("images", "batch_size"), [(2, 64), (65, 64), (3, 1), (3, 2)])
def test_small_and_uneven_data(train: splits.Split, images: int, batch_size: int) -> None:
    # 65 images leave a last batch of one, of which batch norm cannot take statistics over 1×1 pixels
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(1, 10, 1), nn.Flatten())
    if batch_size > 1:
        model.insert(2, nn.BatchNorm2d(10))
    assert len(fit_(model, train.thin(images), epochs=1, batch_size=batch_size)) == 1


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"epochs": -1}, "-1 epochs"),
        ({"epochs": 1, "lr": 0.0}, "learning rate 0.0"),
        ({"epochs": 1, "batch_size": 0}, "batch size 0"),
        ({"epochs": 3, "lr": 1e12}, "learning rate below"),
    ],
)
def test_refusals(train: splits.Split, how: dict[str, float], says: str) -> None:
    with pytest.raises(RankwiseError, match=says):
        fit_(fresh("digits-cnn"), train.thin(128), **how)
    with pytest.raises(RankwiseError, match="at least 2"):
        fit_(fresh(), train.thin(1), epochs=1)


def test_classes_have_to_fit(train: splits.Split) -> None:
    with pytest.raises(RankwiseError, match="classes apart"):
        fit_(fresh("digits-cnn?num_classes=4"), train, epochs=1)


@pytest.mark.parametrize("norms", ["batch", "running"])
def test_running_norms_keep_their_statistics_and_learn_their_scales(train: splits.Split, norms: str) -> None:
    model = build("resnet20?in_channels=1&image_size=8")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recipe = Recipe("short", 1, 32, 0.01, augment="none", retrain=1, norms=norms)
    train_(model, train.thin(64), training(recipe), make_engine(), Hooks())
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    kept = {name for name in before if name.endswith(("running_mean", "running_var"))}
    assert kept.isdisjoint(changed) if norms == "running" else kept <= changed
    assert {"bn1.weight", "bn1.bias"} <= changed
    assert all(module.training for module in model.modules()), "modes are as before"
