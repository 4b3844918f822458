"""pca: principal components of a layer's outputs, with the mean carried by the bias."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rankwise as rw
from rankwise.__main__ import main
from rankwise.core.layer import Layer
from rankwise.core.option import Cost
from rankwise.decompositions.pca import DECOMPOSITION
from rankwise.planning.plan import Choice
from strategies import KINDS, Case, cases


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 16, 3, stride=2, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 2, stride=2, bias=False),
        nn.Flatten(),
        nn.Linear(8 * 64, 20),
    ).eval()


def inputs(n: int = 24) -> Tensor:
    return torch.randn(n, 3, 11, 11, generator=torch.Generator().manual_seed(1))


def by_hand(model: nn.Module, x: Tensor, rank: int) -> tuple[nn.Module, Layer]:
    """The one layer of a model at a rank, without any search."""
    table = rw.build_table(model, x, folds=(0,), groups=1, data=[x])
    layer = table.coverage.layers[0]
    nothing = Cost(0, None)
    choice = Choice(
        layer.name, layer.kind, layer.shape, DECOMPOSITION.option(layer).fold, 1, rank, {}, nothing, nothing, "pca"
    )
    plan = rw.Plan("", "pca", rw.Budget(params=1.0), nothing, nothing, (choice,))
    return rw.apply_plan(model, plan, table.moments), layer


def channels_last(y: Tensor, layer: Layer) -> np.ndarray:
    """Outputs as samples × filters."""
    moved = y.detach().movedim(y.ndim - layer.dims - 1, -1)
    return moved.reshape(-1, moved.shape[-1]).double().numpy()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(data=st.data())
def test_full_rank_is_the_same_function(kind: str, data: st.DataObject) -> None:
    case: Case = data.draw(cases(kind))
    model = nn.Sequential(case[0])
    layers = rw.find_layers(model, case[1]).layers
    if layers:
        small, _ = by_hand(model, case[1], layers[0].group_filters)
        torch.testing.assert_close(small(case[1]), model(case[1]), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(data=st.data())
def test_the_reconstruction_is_the_projection_around_the_mean(kind: str, data: st.DataObject) -> None:
    """ŷ = U Uᵀ (y − μ) + μ, by numpy from the outputs alone, for each group; and the error is what the table says."""
    module, x = data.draw(cases(kind))
    model = nn.Sequential(module)
    layers = rw.find_layers(model, x).layers
    if not layers:
        return
    rank = data.draw(st.integers(1, layers[0].group_filters))
    small, layer = by_hand(model, x, rank)
    y, got = channels_last(model(x), layer), channels_last(small(x), layer)
    mean, wide = y.mean(0), layer.group_filters
    expected, unique = np.empty_like(y), True
    for g in range(layer.groups):
        part = slice(g * wide, (g + 1) * wide)
        values, vectors = np.linalg.eigh(np.cov(y[:, part].T, bias=True).reshape(wide, wide))
        lead = vectors[:, ::-1][:, :rank]
        expected[:, part] = (y[:, part] - mean[part]) @ lead @ lead.T + mean[part]
        # equal eigenvalues on both sides of the cut: another basis is as good
        unique &= rank == wide or values[::-1][rank - 1] - values[::-1][rank] > 1e-6 * max(values.max(), 1e-12)
    if unique:
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    table = rw.build_table(model, x, folds=(0,), groups=1, data=[x])
    spread = ((y - mean) ** 2).sum()
    if spread > 1e-9:
        lost = ((got - y) ** 2).sum() / spread
        assert lost == pytest.approx(table.curve(layer, DECOMPOSITION.option(layer), "output")[rank], abs=1e-7)


def test_with_white_inputs_it_is_svd() -> None:
    """Inputs with covariance exactly 1 and mean 0: the outputs' components are the weight's singular vectors."""
    torch.manual_seed(0)
    white = torch.linalg.qr(torch.randn(64, 8, dtype=torch.float64) - 0.0)[0]
    x = torch.cat([white, -white]) * 8  # mean 0, covariance 64·2/128 = 1
    model = nn.Sequential(nn.Linear(8, 6, bias=False).double())
    for rank in range(1, 6):
        small, _ = by_hand(model, x, rank)
        left, sigma, right = torch.linalg.svd(model[0].weight.detach(), full_matrices=False)
        best = left[:, :rank] * sigma[:rank] @ right[:rank]
        torch.testing.assert_close(rw.densify(small)[0].weight.detach(), best, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(small(torch.zeros(1, 8).double()), torch.zeros(1, 6).double(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("budget", [{"keep": 0.6}, {"macs": 0.5}, {"keep": 0.7, "macs": 0.6}])
def test_the_whole_job(budget: dict[str, Any], tmp_path: Path) -> None:
    model, x = network(), inputs()
    small, plan = rw.compress(model, x[:1], method="pca", data=[x], **budget)
    assert plan.choices
    assert {c.decomposition for c in plan.choices} == {"pca"}
    assert sum(p.numel() for p in small.parameters()) == plan.after.params
    for unit, limit in (("params", budget.get("keep")), ("macs", budget.get("macs"))):
        assert limit is None or plan.keep(unit) <= limit
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        small(x[:1])
    assert counter.get_total_flops() // 2 == plan.after.macs
    rw.save(small, plan, tmp_path)
    again = rw.load(tmp_path, model)
    assert torch.equal(again(x), small(x))
    assert rw.Plan.load(tmp_path / "plan.json") == plan
    torch.testing.assert_close(rw.densify(small)(x), small(x), rtol=1e-3, atol=1e-4)


def test_a_layer_without_bias_pays_for_the_mean() -> None:
    model, x = network(), inputs()
    small, plan = rw.compress(model, x[:1], method="pca", macs=0.25, data=[x])
    chosen = {c.name: c for c in plan.choices}
    for name, choice in chosen.items():
        pair, bias = small.get_submodule(name), small.get_submodule(name).decoder.bias
        uncounted = bias.numel() if model.get_submodule(name).bias is not None else 0  # was there before
        assert sum(p.numel() for p in pair.parameters()) == choice.after.params + uncounted
    assert "0" in chosen


def test_few_samples_and_constant_channels() -> None:
    """Fewer samples than filters, and a channel that never varies: still exact on what was seen."""
    model = nn.Sequential(nn.Linear(6, 10).double())
    model[0].weight.data[3] = 0
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    small, _ = by_hand(model, x, 4)  # four samples around their mean span three directions
    torch.testing.assert_close(small(x), model(x), rtol=1e-8, atol=1e-8)


def test_without_data_one_sentence() -> None:
    model, x = network(), inputs()
    with pytest.raises(rw.RankwiseError, match="no calibration data"):
        rw.compress(model, x[:1], method="pca", keep=0.5)
    with pytest.raises(rw.RankwiseError, match="data="):
        rw.allocate(rw.build_table(model, x[:1]), rw.Budget(params=0.5), method="pca")
    _, plan = rw.compress(model, x[:1], method="pca", keep=0.5, data=[x])
    with pytest.raises(rw.RankwiseError, match="calibration data"):
        rw.apply_plan(model, plan)
    with pytest.raises(rw.RankwiseError, match="no calibration data"):
        rw.compress(model, x[:1], method="alds", error="output", keep=0.5)
    with pytest.raises(rw.RankwiseError, match="has no error by 'bound'"):
        rw.compress(model, x[:1], method="pca", error="bound", keep=0.5, data=[x])


def test_decompositions_compete_on_one_measure() -> None:
    """Weight energy is known for both: the search may choose among folds, slices and components for each layer."""
    model, x = network(), inputs()
    table = rw.build_table(model, x[:1], data=[x])
    both = rw.allocate(table, rw.Budget(params=0.5), decompositions=("svd", "pca"))
    alone = rw.allocate(table, rw.Budget(params=0.5))
    assert both.search.objective <= alone.search.objective + 1e-12
    assert {c.decomposition for c in alone.choices} == {"svd"}


def test_a_layer_that_the_data_does_not_reach_stays() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(20, 20), nn.Linear(20, 20)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    _, plan = rw.compress(Two(), torch.randn(1, 20), method="pca", keep=0.9, data=[torch.randn(50, 20)])
    assert {c.name for c in plan.choices} == {"used"}


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--method", "pca", "--data", "digits", "--calibrate", "64", "--json", "--out", str(tmp_path / "o")]
    assert main(["compress", "digits-cnn", "--random-weights", "--keep", "0.5", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["after"]["params"] <= 0.5 * found["plan"]["before"]["params"]
    assert main(["compress", "digits-cnn", "--random-weights", "--keep", "0.5", "--method", "pca", "--dry-run"]) == 2
    assert "--data" in capsys.readouterr().err
