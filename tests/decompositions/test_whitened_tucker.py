"""Tucker-2 in the metric of data: errors of all ranks are kept by what is built, and `auto` takes it where it pays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_laws import layer_of, relative
from test_whitened import cost_of, metric_of, moment_of
from torch import Tensor, nn

import rankwise as rw
from rankwise.calibration import effect_table
from rankwise.calibration.inputs import CALIBRATION, Inputs
from rankwise.core.layer import Layer
from rankwise.core.option import Option
from rankwise.decompositions import check_option, full_rank, tucker, whitened_tucker
from rankwise.decompositions.tucker import full_outer
from rankwise.planning.planner import Settings
from rankwise.surgery.pairs import build_pair, merge_pair, put_factors_
from sentences import check_sentence
from strategies import cases
from targets import cored_factors, fill, fit

Data = st.DataObject


def drawn(kind: str, data: Data) -> tuple[nn.Module, Tensor, Layer]:
    module, x = data.draw(cases(kind).filter(lambda case: whitened_tucker.is_possible(layer_of(*case))))
    return module, x, layer_of(module, x)


def weight_of(parts: tuple[Tensor, Tensor, Tensor], layer: Layer) -> Tensor:
    weights = tucker.cored_factors(*parts, layer).weights
    return tucker.DECOMPOSITION.compose(layer, tucker.DECOMPOSITION.family(layer), weights)


@pytest.mark.parametrize("kind", ["Conv1d", "Conv2d"])
def test_what_is_built_is_never_worse_than_what_was_scored(kind: str) -> None:
    """At all ranks, also for singular moments; and with all outer ranks it is the pair that it starts from."""

    @settings(max_examples=25)
    @given(st.data())
    def check(data: Data) -> None:
        module, _, layer = drawn(kind, data)
        moment, metric = moment_of(data, layer), metric_of(data, layer)
        fitted = fit(module.weight, layer, whitened_tucker.start(layer), moment, metric)
        scored = whitened_tucker.curves(fitted, layer, metric)
        weight = module.weight.detach().double()
        whole = cost_of(weight, module, layer, moment, metric)
        assert len(scored) == full_outer(layer)
        assert np.all(np.diff(scored, axis=1) <= 0)
        assert np.all(np.diff(scored, axis=0) <= 1e-9 * whole)
        np.testing.assert_allclose(scored[:, 0], whole, rtol=1e-9)
        if full_outer(layer) == layer.group_filters:
            np.testing.assert_allclose(scored[-1], fitted.errors, rtol=1e-6, atol=1e-6 * whole + 1e-12)
        outer = data.draw(st.integers(1, full_outer(layer)))
        option = Option(whitened_tucker.DECOMPOSITION.family(layer).fold, 1, whitened_tucker.DECOMPOSITION.name, outer)
        rank = data.draw(st.integers(1, full_rank(layer, option)))
        parts = cored_factors(module.weight, layer, option, rank, moment, metric)
        error = cost_of(weight - weight_of(parts, layer), module, layer, moment, metric)
        assert error <= scored[outer - 1, min(rank, scored.shape[1] - 1)] * (1 + 1e-5) + 1e-6 * whole + 1e-12

    check()


@pytest.mark.parametrize("kind", ["Conv1d", "Conv2d", "Conv3d"])
def test_full_ranks_are_the_same_function(kind: str) -> None:
    @settings(max_examples=10)
    @given(st.data())
    def check(data: Data) -> None:
        module, x, layer = drawn(kind, data)
        moment, metric = moment_of(data, layer, full=True), data.draw(st.sampled_from([None, metric_of(data, layer)]))
        option = Option(
            whitened_tucker.DECOMPOSITION.family(layer).fold, 1, whitened_tucker.DECOMPOSITION.name, full_outer(layer)
        )
        rank = full_rank(layer, option)
        pair = build_pair(layer, option, rank, module)
        fill(pair, layer, option, rank, module)  # for the bias
        put_factors_(
            pair, tucker.cored_factors(*cored_factors(module.weight, layer, option, rank, moment, metric), layer), layer
        )
        assert [name for name, _ in pair.named_children()] == ["encoder", "core", "decoder"]
        assert relative(pair(x), module(x)) < 1e-4
        assert relative(merge_pair(pair)(x), pair(x)) < 1e-4

    check()


def test_in_turns_gains_and_halves_are_balanced() -> None:
    """Few directions of the outputs need other encoders than all of them."""
    torch.manual_seed(0)
    module = nn.Conv2d(12, 10, 3, bias=False)
    layer = layer_of(module, torch.randn(1, 12, 8, 8))
    x = torch.randn(500, 108, dtype=torch.float64) @ torch.randn(108, 108, dtype=torch.float64)
    moment = (x.t() @ x)[None] / 500
    metric = torch.eye(10, dtype=torch.float64)[None]
    scored = whitened_tucker.curves(
        fit(module.weight, layer, whitened_tucker.start(layer), moment, metric), layer, metric
    )
    option = Option("f│chw", 1, whitened_tucker.DECOMPOSITION.name, 2)
    left, core, right = cored_factors(module.weight, layer, option, 3, moment, metric)
    weight = module.weight.detach().double()
    built = cost_of(weight - weight_of((left, core, right), layer), module, layer, moment, metric)
    assert built < 0.99 * scored[1, 3]
    assert left.norm(dim=1) == pytest.approx(core.flatten(2).norm(dim=2).numpy(), rel=0.1)
    assert right.norm(dim=1) == pytest.approx(core.transpose(1, 2).flatten(2).norm(dim=2).numpy(), rel=0.1)


def narrow(channels: int, outer: int, inner: int) -> nn.Conv2d:
    """A convolution whose weight has exactly these two ranks."""
    module = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    left, right = torch.randn(channels, outer), torch.randn(channels, inner)
    core = torch.randn(outer, inner, 3, 3)
    with torch.no_grad():
        module.weight.copy_(torch.einsum("fi,ijhw,cj->fchw", left, core, right) / 30)
    return module


@pytest.fixture(scope="module")
def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.ReLU(),
        narrow(24, 6, 6),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        narrow(24, 5, 7),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 10),
    ).eval()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(64, 3, 12, 12, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("budget", [{"keep": 0.15}, {"macs": 0.14}, {"keep": 0.17, "macs": 0.16}], ids=str)
@pytest.mark.parametrize("with_data", [True, False])
def test_auto_takes_it_where_it_pays(
    network: nn.Sequential, images: Tensor, budget: dict[str, float], with_data: bool, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"data": [images]} if with_data else {}
    small, plan = rw.compress(network, images[:1], **budget, **given)
    assert whitened_tucker.DECOMPOSITION.name in {c.decomposition for c in plan.choices}
    assert sum(p.numel() for p in small.parameters()) == plan.after.params
    assert plan.keep("params") <= budget.get("keep", 1)
    assert plan.keep("macs") <= budget.get("macs", 1)
    with torch.no_grad():
        wanted, got = network(images), small(images)
    without, _ = rw.compress(network, images[:1], **budget, **given, folds=[0, 1, 2, 3])
    with torch.no_grad():
        assert float((got - wanted).square().sum()) < float((without(images) - wanted).square().sum())
        rw.save(small, plan, tmp_path / "out")
        torch.testing.assert_close(rw.load(tmp_path / "out", network)(images), got)
        torch.testing.assert_close(rw.densify(small)(images), got, rtol=1e-3, atol=1e-4)


def test_a_plan_can_be_built_again_from_the_same_data(network: nn.Sequential, images: Tensor, tmp_path: Path) -> None:
    from rankwise.compression import Compression, Request

    small, plan = rw.compress(network, images[:1], keep=0.15, data=[images])
    plan.save(tmp_path / "plan.json")
    again = rw.Plan.load(tmp_path / "plan.json")
    assert again == plan
    other, same = Compression(network, images[:1], Request(plan=again), [images]).run(None)
    assert same == again
    with torch.no_grad():
        torch.testing.assert_close(other(images), small(images))
    with pytest.raises(rw.RankwiseError, match="calibration data"):
        rw.apply_plan(network, again)


def test_folds_and_slices_are_not_its_business(network: nn.Sequential, images: Tensor) -> None:
    """Whoever names folds or slices gets those."""
    asked: list[dict[str, Any]] = [{"folds": "all", "groups": [1, 2]}, {"folds": [0, 3]}]
    for changes in asked:
        _, plan = rw.compress(network, images[:1], keep=0.5, data=[images], **changes)
        assert {c.decomposition for c in plan.choices} <= {"whitened", "svd"}


def test_a_table_with_cores_can_be_saved(network: nn.Sequential, images: Tensor, tmp_path: Path) -> None:
    wanted = Settings(error="effect", decompositions=("whitened", whitened_tucker.DECOMPOSITION.name, "svd"))
    table, _ = effect_table.effect_table(
        network, rw.find_layers(network, images[:1]), wanted, Inputs([images], CALIBRATION)
    )
    table.save(tmp_path / "table.safetensors")
    again = rw.Table.load(tmp_path / "table.safetensors", network)
    rest: dict[str, Any] = {"error": "effect", "decompositions": wanted.decompositions}
    one, other = (rw.allocate(t, rw.Budget(params=0.15), **rest) for t in (table, again))
    assert one == other
    assert whitened_tucker.DECOMPOSITION.name in {c.decomposition for c in one.choices}


def test_many_filters_give_few_outer_ranks(monkeypatch: pytest.MonkeyPatch, images: Tensor) -> None:
    from rankwise.planning import menu

    monkeypatch.setattr(whitened_tucker, "OUTERS", 4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 24, 3), narrow(24, 12, 12), nn.Flatten(), nn.LazyLinear(4))
    model(images)
    wanted = Settings(error="effect", decompositions=(whitened_tucker.DECOMPOSITION.name,))
    table, _ = effect_table.effect_table(
        model, rw.find_layers(model, images[:1]), wanted, Inputs([images], CALIBRATION)
    )
    found = menu.menus(table, ("params",), "effect", decompositions=(whitened_tucker.DECOMPOSITION.name,))
    assert {offer.option.outer for offer in found[1].offers} == {6, 12, 18, 24}


@pytest.mark.parametrize(
    "module",
    [nn.ConvTranspose2d(8, 8, 3), nn.Conv2d(8, 8, 1), nn.Linear(8, 8)],
    ids=["transposed", "1×1", "linear"],
)
def test_layers_without_anything_between(module: nn.Module) -> None:
    x = torch.randn(1, 8) if isinstance(module, nn.Linear) else torch.randn(1, 8, 5, 5)
    assert not whitened_tucker.is_possible(layer_of(module, x))


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.ConvTranspose2d(8, 8, 3), (1, 8, 5, 5)), (nn.Conv2d(8, 8, 1), (1, 8, 5, 5)), (nn.Linear(8, 8), (1, 8))],
    ids=["transposed", "1×1", "linear"],
)
def test_a_plan_that_asks_for_it_there_is_refused(module: nn.Module, shape: tuple[int, ...]) -> None:
    layer = layer_of(module, torch.randn(shape))
    option = Option(whitened_tucker.DECOMPOSITION.family(layer).fold, 1, whitened_tucker.DECOMPOSITION.name, 2)
    assert "needs a kernel" in check_sentence(lambda: check_option(layer, option, "layer '0' of the plan"))


@pytest.mark.parametrize(
    "changed", [{"outer": 0}, {"outer": 999}, {"outer": "2"}, {"rank": 999}, {"groups": 2}], ids=str
)
def test_a_plan_with_bad_ranks_is_refused(
    network: nn.Sequential, images: Tensor, changed: dict[str, Any], tmp_path: Path
) -> None:
    _, plan = rw.compress(network, images[:1], keep=0.15, data=[images])
    data = json.loads(plan.dumps())
    next(entry for entry in data["layers"] if entry.get("outer")).update(changed)
    (tmp_path / "plan.json").write_text(json.dumps(data))
    said = check_sentence(lambda: rw.apply_plan(network, rw.Plan.load(tmp_path / "plan.json")))
    assert "calibration data" not in said, "the plan itself is refused"
