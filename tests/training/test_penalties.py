"""Learning–compression: the C step is a projection, and the loop ends near what can be built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rankwise as rw
from rankwise.models import networks
from rankwise.training import penalties, steps
from rankwise.training.processes import make_engine
from rankwise.training.recipes import RECIPES, change
from rankwise.training.steps import Rounds, Run
from sentences import check_sentence

pytest.importorskip("sklearn")
pytest.importorskip("accelerate")

RECIPE = change(RECIPES["fast"], {"epochs": 6, "retrain": 1, "batch_size": 32, "mu": 0.05, "mu_growth": 1.6})


def fresh() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return networks.build("digits-cnn")


def test_the_c_step_gives_the_nearest_matrices_of_their_ranks() -> None:
    model, engine = fresh(), make_engine()
    target = penalties.SizeTarget(30_000)
    theta = penalties.c_step(model, target, engine)
    _, plan = rw.compress(model, method="l-rank", keep=30_000)
    assert set(theta) == {f"{choice.name}.weight" for choice in plan.choices}
    weights = dict(model.named_parameters())
    left = 0.0
    for choice in plan.choices:
        weight = weights[f"{choice.name}.weight"].detach().double().flatten(1)
        tail = torch.linalg.svdvals(weight)[choice.rank :].square().sum()
        apart = (weight - theta[f"{choice.name}.weight"].double().flatten(1)).square().sum()
        assert apart == pytest.approx(float(tail), rel=1e-4)
        left += float(tail)
    penalty = penalties.pull(model, target, RECIPE, engine)(2)()
    assert float(penalty.detach()) == pytest.approx(penalties.strength(RECIPE, 2) / 2 * left, rel=1e-4)
    torch.autograd.backward(penalty)
    for name, value in theta.items():  # the gradient pulls towards Θ
        expected = penalties.strength(RECIPE, 2) * (weights[name].detach() - value)
        assert torch.allclose(weights[name].grad, expected, atol=1e-6)  # type: ignore[arg-type]


def distance(model: torch.nn.Module, target: penalties.SizeTarget) -> float:
    """√(Σ ‖W − Θ‖² / Σ ‖W‖²) over the layers that would be decomposed: what compressing would cost now."""
    weights, theta = dict(model.named_parameters()), penalties.c_step(model, target, make_engine())
    apart = sum(float((weights[n].detach() - t).square().sum()) for n, t in theta.items())
    whole = sum(float(weights[n].detach().square().sum()) for n in theta)
    return (apart / whole) ** 0.5 if whole else 0.0


def test_what_fits_already_is_not_pulled() -> None:
    model = fresh()
    low = rw.densify(rw.compress(model, method="l-rank", keep=30_000)[0])
    assert distance(model, penalties.SizeTarget(30_000)) > 0.1
    assert distance(low, penalties.SizeTarget(30_000)) < 1e-3


def test_the_loop_ends_nearer_than_plain_training_and_resumes(tmp_path: Path) -> None:
    from test_steps import Stop, StopAt  # the same interruption as for plain training

    target = penalties.SizeTarget(20_000)
    run = Run("digits", RECIPE, tmp_path / "lc", limit=300)
    row = steps.train("digits-cnn", run, target=target)
    assert (row["kind"], row["target"]) == ("lc", 20_000)
    steps.train("digits-cnn", Run("digits", RECIPE, tmp_path / "plain", limit=300))
    apart = [distance(networks.build(str(tmp_path / name)), target) for name in ("lc", "plain")]
    assert apart[0] < apart[1] / 2
    with pytest.raises(Stop):
        steps.train("digits-cnn", Run("digits", RECIPE, tmp_path / "b", limit=300, watch=StopAt(3, -1)), target=target)
    steps.train("digits-cnn", Run("digits", RECIPE, tmp_path / "b", limit=300, resume=True), target=target)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("lc", "b")]
    assert files[0] == files[1]


def test_iterate_by_learning_compression(tmp_path: Path) -> None:
    rounds = Rounds(4, "l-rank", loop="lc")
    rows = steps.iterate("digits-cnn", Run("digits", RECIPE, tmp_path, limit=300), rounds)
    assert [row["kind"] for row in rows] == ["train", "lc", "retrain"]
    assert rows[2]["keep"]["params"] <= 0.8**4
    assert (tmp_path / "round-4" / "plan.json").is_file()


def test_refusals() -> None:
    assert "looks at data" in check_sentence(lambda: penalties.SizeTarget(10, "pca"))
    assert "possible are rounds, lc" in check_sentence(lambda: Rounds(1, loop="admm"))
