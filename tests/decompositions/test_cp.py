"""`cp`: the laws that hold for every decomposition, and what is its own."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_laws import TINY, layer_of, macs_of, numel, pair_of, relative
from torch import Tensor, nn

import rankwise as rw
from rankwise.__main__ import main
from rankwise.core.layer import Layer
from rankwise.core.option import Option
from rankwise.decompositions import Selection, Target, cost_at, cp, full_rank
from rankwise.surgery.pairs import merge_pair
from strategies import CONVS, TRANSPOSED, blocks, cases

Data = st.DataObject
CP = cp.DECOMPOSITION


def drawn(kind: str, data: Data) -> tuple[nn.Module, Tensor, Layer, Option]:
    module, x = data.draw(cases(kind))
    layer = layer_of(module, x)
    assume(math.prod(layer.kernel) > 1)
    return module, x, layer, CP.option(layer)


def curves(module: nn.Module, layer: Layer) -> dict[str, np.ndarray]:
    return CP.score(Target(layer, module.weight), Selection()).given[CP.option(layer)]


def curve(module: nn.Module, layer: Layer, measure: str = "residual") -> np.ndarray:
    return curves(module, layer)[measure]


def lost(module: nn.Module, pair: nn.Sequential) -> float:
    """‖W − Ŵ‖²_F by numpy."""
    before, after = blocks(module.weight, module), blocks(merge_pair(pair).weight, module)
    return float(sum(np.square(a - b).sum() for a, b in zip(before, after, strict=True)))


@pytest.mark.parametrize("kind", [*CONVS, *TRANSPOSED])
@settings(max_examples=6)
@given(data=st.data())
def test_full_rank_is_the_same_function(kind: str, data: Data) -> None:
    module, x, layer, option = drawn(kind, data)
    pair = pair_of(module, layer, option, full_rank(layer, option))
    assert relative(pair(x), module(x)) < 1e-6
    assert relative(merge_pair(pair)(x), module(x)) < 1e-6


@pytest.mark.parametrize("kind", [*CONVS, *TRANSPOSED])
@settings(max_examples=6)
@given(data=st.data())
def test_what_is_built_is_never_worse_than_what_was_scored(kind: str, data: Data) -> None:
    """At every rank, of the grid or between; and the merged layer computes what the parts compute."""
    module, x, layer, option = drawn(kind, data)
    scored = curve(module, layer)
    rank = data.draw(st.integers(1, len(scored) - 1))
    pair = pair_of(module, layer, option, rank)
    assert lost(module, pair) <= scored[rank] * (1 + 1e-6) + 1e-9 * scored[0] + TINY
    assert relative(pair(x), merge_pair(pair)(x)) < 1e-6


@pytest.mark.parametrize("kind", [*CONVS, *TRANSPOSED])
@settings(max_examples=6)
@given(data=st.data())
def test_curves_fall_from_everything_to_nothing(kind: str, data: Data) -> None:
    module, _, layer, option = drawn(kind, data)
    scored = curves(module, layer)
    residual, energy = scored["residual"], scored["energy"]
    assert len(residual) == full_rank(layer, option) + 1
    assert (np.diff(residual) <= 1e-9 * residual[0]).all()
    assert residual[0] == pytest.approx(float(module.weight.square().sum()), rel=1e-9, abs=TINY)
    assert energy[-1] == residual[-1] == 0
    assert energy * residual[0] == pytest.approx(residual, abs=TINY)


@pytest.mark.parametrize("kind", [*CONVS, *TRANSPOSED])
@settings(max_examples=6)
@given(data=st.data())
def test_counted_params_and_macs_are_those_of_torch(kind: str, data: Data) -> None:
    module, x, layer, option = drawn(kind, data)
    rank = data.draw(st.integers(1, full_rank(layer, option)))
    pair = pair_of(module, layer, option, rank)
    cost = cost_at(layer, option, rank)
    bias = layer.filters if layer.bias else 0
    assert cost.params == numel(pair) - bias
    assert cost.macs == macs_of(pair, x)


@pytest.mark.parametrize("shape", [(6, 5, 3), (6, 5, 3, 3), (5, 4, 2, 3, 2)])
def test_a_sum_of_few_products_is_found(shape: tuple[int, ...]) -> None:
    """Four components that are neither orthogonal nor aligned: the closed form misses them, alternation does not."""
    random = torch.Generator().manual_seed(0)
    w = cp._product([torch.randn(n, 4, generator=random, dtype=torch.float64) for n in shape])
    total = float(w.square().sum())
    assert cp._closed_form(w)[4] > 3e-2 * total
    assert cp._error(w, cp._alternate(w, cp._start(w, 4))) < 1e-2 * total


def test_the_closed_form_is_the_energy_of_what_is_left_out() -> None:
    w = torch.randn(5, 4, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scored = cp._closed_form(w)
    for rank in range(1, len(scored)):
        assert cp._error(w, cp._start(w, rank)) == pytest.approx(float(scored[rank]), abs=1e-9)


def test_alternation_never_raises_the_error() -> None:
    w = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for rank in (1, 5, 17, 40):
        modes = cp._start(w, rank)
        errors = [cp._error(w, modes)]
        for _ in range(20):
            modes = cp._round(w, cp._even(modes))
            errors.append(cp._error(w, modes))
        assert (np.diff(errors) <= 1e-9 * errors[0]).all()
        assert rank == 1 or errors[-1] < 0.9 * errors[0]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 10, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(10, 12, 3, stride=2, groups=2)),
        *(nn.ReLU(), nn.ConvTranspose2d(12, 6, 2, stride=2), nn.Conv2d(6, 8, 1), nn.Flatten(), nn.Linear(288, 10)),
    ).eval()


def inputs(n: int = 3) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("budget", [{"keep": 0.5}, {"macs": 0.6}, {"keep": 0.6, "macs": 0.8}])
def test_the_whole_job(budget: dict[str, float], tmp_path: Path) -> None:
    """Budgets, folders, the way back and export, as for every other method."""
    model, x = network(), inputs()
    small, plan = rw.compress(model, x, method="cp", **budget)
    assert {c.decomposition for c in plan.choices} >= {"cp"}
    assert numel(small) == plan.after.params
    for unit, share in {"params": budget.get("keep"), "macs": budget.get("macs")}.items():
        assert share is None or plan.keep(unit) <= share
    rw.save(small, plan, tmp_path)
    again = rw.load(tmp_path, model)
    assert torch.equal(again(x), small(x))
    assert rw.Plan.load(tmp_path / "plan.json") == plan
    torch.testing.assert_close(rw.densify(small)(x), small(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.export.export(small, (x,)).module()(x), small(x))
    assert torch.equal(rw.apply_plan(model, plan)(x), small(x))


def test_plain_modules_in_the_order_of_the_paper() -> None:
    model = nn.Sequential(nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Conv1d(1, 1, 1)).eval()[:2]
    small, plan = rw.compress(model, torch.zeros(1, 8, 9, 9), method="cp", keep=0.5)
    rank = plan.choices[0].rank
    parts = list(small[0])
    assert [type(p) for p in parts] == [nn.Conv2d] * 4
    assert [p.kernel_size for p in parts] == [(1, 1), (3, 1), (1, 3), (1, 1)]
    assert [p.stride for p in parts] == [(1, 1), (2, 1), (1, 2), (1, 1)]
    assert [p.groups for p in parts] == [1, rank, rank, 1]
    assert [p.bias is None for p in parts] == [True, True, True, False]


@pytest.fixture(scope="module")
def fifth() -> rw.Plan:
    """The plan that keeps a fifth of `network`."""
    return rw.compress(network(), inputs(), method="cp", keep=0.2)[1]


def test_layers_without_taps_get_an_svd(fifth: rw.Plan) -> None:
    plan = fifth
    found = {choice.name: choice.decomposition for choice in plan.choices}
    assert found["7"] == "svd"
    assert found["2"] == found["4"] == "cp"


def test_it_competes_with_other_decompositions() -> None:
    """More options are never worse by what is searched, and a kernel that is a sum of products gets `cp`."""
    model = network()
    made = cp._product([torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (10, 3, 3, 3)])
    model[0].weight.data = made
    one = rw.compress(model, inputs(), keep=0.5, error="energy")[1]
    both = rw.compress(model, inputs(), keep=0.5, error="energy", decompositions=("svd", "cp"))[1]
    assert sum(c.error["energy"] for c in both.choices) <= sum(c.error["energy"] for c in one.choices) + 1e-9
    assert {c.name: c.decomposition for c in both.choices}["0"] == "cp"


def test_the_measure_output_is_that_of_the_built_layers() -> None:
    """Relative to the variance of the outputs, on the calibration data itself."""
    model, x = network(), inputs(16)
    data = [x]
    table = rw.build_table(model, x[:1], data=data, decompositions=("cp",), error="output")
    layer = table.coverage.layers[0]
    option = CP.option(layer)
    known = table.curve(layer, option, "output").values()
    wanted = model[0](x)
    for rank in CP.grid(layer, option):
        pair = pair_of(model[0], layer, option, rank)
        gap = (pair(x) - wanted).square().sum(1).mean()
        assert float(gap) / float(wanted.var(dim=(0, 2, 3), unbiased=False).sum()) <= known[rank] * 1.001 + 1e-6


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    model = network()
    table = rw.build_table(model, inputs(1), decompositions=("svd", "cp"))
    table.save(tmp_path / "table")
    again = rw.Table.load(tmp_path / "table", model)
    budget = rw.Budget(params=0.5)
    how = {"error": "energy", "decompositions": ("svd", "cp")}
    assert rw.allocate(table, budget, **how) == rw.allocate(again, budget, **how)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, file = tmp_path / "out", tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3))\n"
    )
    flags = ["--random-weights", "--method", "cp", "--keep", "0.6", "--input", "1,3,8,8"]
    assert main(["compress", f"{file}:net", *flags, "--out", str(out)]) == 0
    assert "cp" in capsys.readouterr().out
    assert {c.decomposition for c in rw.Plan.load(out / "plan.json").choices} >= {"cp"}


@pytest.mark.parametrize("changes", [{"slices": 2}, {"outer": 1}, {"fold": "fhw│c"}, {"rank": 0}, {"rank": 10**6}])
def test_a_decision_that_does_not_fit_is_refused(changes: dict[str, object], fifth: rw.Plan) -> None:
    from dataclasses import replace

    model, plan = network(), fifth
    forged = tuple(replace(e, **changes) if e.name == "2" else e for e in plan.layers)  # type: ignore[arg-type]
    with pytest.raises(rw.RankwiseError, match="layer '2' of the plan"):
        rw.apply_plan(model, replace(plan, layers=forged))


def test_a_layer_of_zeros_and_an_odd_one() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, (1, 3)), nn.Conv2d(4, 6, 3)).eval()
    model[0].weight.data.zero_()
    small, plan = rw.compress(model, torch.zeros(1, 4, 6, 6), method="cp", keep=0.6)
    assert bool(torch.isfinite(small(torch.randn(1, 4, 6, 6))).all())
    assert numel(small) == plan.after.params
