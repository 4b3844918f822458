"""The measure `output`: what the table says is what happens when the pair's module runs on the calibration data."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_laws import pair_of
from test_tucker import truncated
from torch import Tensor, nn

import rankwise as rw
from rankwise.calibration import activations
from rankwise.core.layer import Layer
from rankwise.core.option import Option
from rankwise.data import splits as images
from rankwise.decompositions import full_rank, tucker
from rankwise.surgery.pairs import build_pair
from sentences import check_sentence
from strategies import KINDS, TRANSPOSED, blocks, cases
from targets import fill

Data = st.DataObject
FORWARD = [kind for kind in KINDS if kind not in TRANSPOSED]
WITH_TAPS = [kind for kind in FORWARD if kind not in ("Linear", "Conv1D")]


def samples(y: Tensor, layer: Layer) -> np.ndarray:
    """Outputs as positions × filters."""
    moved = y.detach().movedim(y.ndim - layer.dims - 1, -1)
    return moved.reshape(-1, moved.shape[-1]).double().numpy()


def lost(module: nn.Module, other: nn.Module, x: Tensor, layer: Layer) -> float:
    """E ‖y − ŷ‖² / Var(y), by running both."""
    y, got = samples(module(x), layer), samples(other(x), layer)
    return float(((y - got) ** 2).sum() / ((y - y.mean(0)) ** 2).sum())


def varies(module: nn.Module, x: Tensor, layer: Layer) -> bool:
    y = samples(module(x), layer)
    return bool(((y - y.mean(0)) ** 2).sum() > 1e-6 * max(1.0, (y**2).sum()))


def envelope(raw: list[float]) -> np.ndarray:
    """The largest error from each rank on."""
    return np.maximum.accumulate(np.array(raw)[::-1])[::-1]


def measured(module: nn.Module, x: Tensor, layer: Layer, option: Option) -> list[float]:
    """The error of the built pair at every rank from 1 on."""
    ranks = range(1, full_rank(layer, option) + 1)
    return [lost(module, pair_of(module, layer, option, rank), x, layer) for rank in ranks]


def table_of(module: nn.Module, x: Tensor, *names: str, **rest: Any) -> tuple[rw.Table, Layer]:
    table = rw.build_table(nn.Sequential(module), x, data=[x], decompositions=names, error="output", **rest)
    return table, table.coverage.layers[0]


def shifted(data: Data, kind: str) -> tuple[nn.Module, Tensor, Layer]:
    """A case whose inputs have a mean, as what comes out of a ReLU has."""
    module, x = data.draw(cases(kind))
    x = x + data.draw(st.sampled_from([0.0, 0.5, 3.0]))
    assume(bool(rw.find_layers(nn.Sequential(module), x).layers))
    layer = rw.find_layers(nn.Sequential(module), x).layers[0]
    assume(varies(module, x, layer))
    return module, x, layer


# ---- the numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORWARD)
@settings(max_examples=15)
@given(data=st.data())
def test_slices_and_clusters_lose_what_the_table_says(kind: str, data: Data) -> None:
    """Every fold, any number of slices (also unequal ones) and clusters, at every rank."""
    module, x, _ = shifted(data, kind)
    table, layer = table_of(module, x, "svd", "messi", groups="any", clustering="kmeans", starts=1)
    options = table.options(layer)
    for option in data.draw(st.lists(st.sampled_from(options), min_size=1, max_size=4, unique=True)):
        curve = table.curve(layer, option, "output").values()
        wanted = envelope(measured(module, x, layer, option))
        np.testing.assert_allclose(
            curve[1:], wanted, rtol=1e-6, atol=1e-8 * max(1.0, wanted.max()), err_msg=str(option)
        )
        assert curve[-1] == 0
        assert np.all(np.diff(curve) <= 0)
        assert curve[0] >= curve[1]


@pytest.mark.parametrize("kind", WITH_TAPS)
@settings(max_examples=12)
@given(data=st.data())
def test_tucker2_loses_what_the_table_says(kind: str, data: Data) -> None:
    """The truncated HOSVD at every rank, for a few outer ranks: numpy's kernel, run by torch."""
    module, x, _ = shifted(data, kind)
    table, layer = table_of(module, x, "tucker2")
    assume(tucker.has_taps(layer))
    parts = [b.reshape(*b.shape[:2], -1) for b in blocks(module.weight, module)]
    unfoldings = [m for w in parts for m in (w.reshape(len(w), -1), w.transpose(1, 0, 2).reshape(w.shape[1], -1))]
    assume(all(np.diff(np.sort(np.linalg.svd(m, compute_uv=False))).min(initial=1) > 1e-3 for m in unfoldings))
    options = [o for o in table.options(layer) if o.decomposition == "tucker2"]
    for option in data.draw(st.lists(st.sampled_from(options), min_size=1, max_size=3, unique=True)):
        raw = []
        for s in range(1, layer.group_channels + 1):
            other = copy.deepcopy(module)
            kernel = np.concatenate([truncated(w, option.outer, s) for w in parts])
            other.weight.data = torch.from_numpy(kernel).reshape(module.weight.shape)
            raw.append(lost(module, other, x, layer))
        curve = table.curve(layer, option, "output").values()
        wanted = envelope(raw)[: len(curve) - 1]
        np.testing.assert_allclose(curve[1:], wanted, rtol=1e-6, atol=1e-8 * max(1.0, wanted.max()))


@pytest.mark.parametrize("kind", FORWARD)
@settings(max_examples=12)
@given(data=st.data())
def test_pca_is_measured_the_same_way(kind: str, data: Data) -> None:
    """Its curve is its own pair's error; by this measure nothing of rank j and one slice beats it."""
    module, x, _ = shifted(data, kind)
    table, layer = table_of(module, x, "svd", "pca", groups=1, folds=0)
    components = next(o for o in table.options(layer) if o.decomposition == "pca")
    curve = table.curve(layer, components, "output").values()
    for rank in range(1, full_rank(layer, components) + 1):
        pair = build_pair(layer, components, rank, module)
        fill(pair, layer, components, rank, module, table.moments[layer.name])
        assert lost(module, pair, x, layer) == pytest.approx(curve[rank], abs=1e-7)
    for option in table.options(layer):
        if option.decomposition == "svd":
            other = table.curve(layer, option, "output").values()
            most = min(len(curve), len(other))
            assert np.all(curve[1:most] <= other[1:most] + 1e-7)


@pytest.mark.parametrize("mean", [0.0, 2.0])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_without_overlap_is_exact(dims: int, groups: int, mean: float) -> None:
    """Stride = kernel: every output position has one tap. Also where the inputs have a mean."""
    torch.manual_seed(0)
    module = getattr(nn, f"ConvTranspose{dims}d")(6, 4, 2, stride=2, groups=groups).double()
    x = torch.randn(5, 6, *[4] * dims, dtype=torch.float64)
    x = x - x.mean(dim=[0, *range(2, 2 + dims)], keepdim=True) + mean
    names = ("svd", "messi", "tucker2")
    table, layer = table_of(module, x, *names, groups="any", starts=1)
    for option in table.options(layer):
        if option.decomposition == "tucker2":
            continue  # built better than scored; see the test of the built one
        wanted = envelope(measured(module, x, layer, option))
        np.testing.assert_allclose(table.curve(layer, option, "output").values()[1:], wanted, rtol=1e-6, atol=1e-9)
    full = [o for o in table.options(layer) if o.decomposition == "tucker2"][-1]
    assert table.curve(layer, full, "output").values()[-1] == pytest.approx(0, abs=1e-12)


def test_many_batches_are_one() -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(4, 6, 3, padding=1).double()
    x = torch.randn(9, 4, 6, 6, dtype=torch.float64) + 1
    model = nn.Sequential(module)
    rest: dict[str, Any] = {"decompositions": ("svd", "tucker2"), "error": "output", "groups": (1, 2)}
    one = rw.build_table(model, x[:1], data=[x], **rest)
    many = rw.build_table(model, x[:1], data=list(torch.split(x, 2)), **rest)
    for option in one.options(one.coverage.layers[0]):
        np.testing.assert_allclose(
            *(t.curve(t.coverage.layers[0], option, "output").values() for t in (one, many)), rtol=1e-9, atol=1e-12
        )


def test_with_white_inputs_it_is_the_energy() -> None:
    """Mean 0 and covariance 1: E ‖(W − Ŵ) x‖² = ‖W − Ŵ‖²_F, for slices and clusters alike."""
    torch.manual_seed(0)
    white = torch.linalg.qr(torch.randn(64, 8, dtype=torch.float64))[0]
    x = torch.cat([white, -white]) * 8
    table, layer = table_of(nn.Linear(8, 6).double(), x, "svd", "messi", groups="any")
    for option in table.options(layer):
        np.testing.assert_allclose(
            table.curve(layer, option, "output").values(), table.curve(layer, option, "energy").values(), atol=1e-9
        )


# ---- data that is hard -----------------------------------------------------------------------------------


def test_outputs_that_never_vary_are_not_free() -> None:
    """One sample: there is no variance to compare with, but a pair without a mean correction does lose something."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12)).double()
    x = torch.randn(1, 12, dtype=torch.float64)
    try:
        table = rw.build_table(model, x, data=[x], decompositions=("svd",), groups=1, error="output")
    except rw.RankwiseError:
        return  # a sentence is as good
    layer = table.coverage.layers[0]
    (option,) = table.options(layer)
    pair = pair_of(model[0], layer, option, 1)
    assert float((pair(x) - model[0](x)).detach().norm()) > 0.1
    assert table.curve(layer, option, "output")[1] > 0


def test_constant_channels_and_few_samples_are_fine() -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(5, 7, 3).double()
    x = torch.randn(1, 5, 4, 4, dtype=torch.float64)
    x[:, 2] = 1.5
    module.weight.data[3] = 0
    table, layer = table_of(module, x, "svd", groups="any")
    for option in table.options(layer):
        np.testing.assert_allclose(
            table.curve(layer, option, "output").values()[1:], envelope(measured(module, x, layer, option)), atol=1e-8
        )


def small_cnn() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2), nn.ReLU(), nn.Flatten()),
            nn.Linear(108, 10),
        )


def test_a_specification_can_be_read_in_several_passes() -> None:
    """A split of the data is no iterator: it can be read again when the covariances do not fit at once."""
    model = small_cnn()
    layers = rw.find_layers(model).layers
    few = images.load("digits", "train").thin(30)
    once = activations.input_moments(model, few, layers)
    often = activations.input_moments(model, few, layers, max_gb=2 * 8 * 108**2 / 2**30)
    for name, seen in once.items():
        torch.testing.assert_close(seen.scatter, often[name].scatter)


def test_a_generator_is_read_once() -> None:
    """pca and output look at the data one after the other: a generator must serve both, or be refused as one."""
    model, x = small_cnn(), torch.randn(16, 1, 8, 8)

    def stream() -> Iterator[Tensor]:
        yield from torch.split(x, 4)

    rest: dict[str, Any] = {"decompositions": ("svd", "pca"), "error": "output"}
    wanted = rw.build_table(model, x[:1], data=list(stream()), **rest)
    try:
        got = rw.build_table(model, x[:1], data=stream(), **rest)
    except rw.RankwiseError as err:
        assert "generator" in str(err)  # noqa: PT017
        return
    for layer in wanted.coverage.layers:
        for option in wanted.options(layer):
            np.testing.assert_allclose(*(t.curve(layer, option, "output").values() for t in (got, wanted)))


@pytest.mark.parametrize("method", ["auto", "messi", "tucker2", "pca"])
def test_bad_data_is_one_sentence(method: str) -> None:
    model, x = small_cnn(), torch.randn(4, 1, 8, 8)

    def run(data: Any) -> Any:
        return lambda: rw.compress(model, x[:1], method=method, error="output", keep=0.5, data=data)

    state = copy.deepcopy(model.state_dict())
    bad = x.clone()
    bad[2, 0, 3, 3] = torch.nan
    assert "empty" in check_sentence(run([]))
    assert "empty" in check_sentence(run(iter([])))
    assert "batch 2" in check_sentence(run([x, bad]))
    assert "could not run" in check_sentence(run([torch.randn(4, 3, 8, 8)]))
    assert "no calibration data" in check_sentence(run(None))
    assert "unknown data" in check_sentence(run("mnist"))
    assert not any(module._forward_hooks for module in model.modules())
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))


class Two(nn.Module):
    """A network with a convolution and a linear layer that no data reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(20, 20), nn.Linear(20, 20)
        self.conv = nn.Conv1d(6, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize(
    "names",
    [("svd",), ("messi",), ("tucker2",), ("pca",), ("svd", "pca"), ("svd", "messi", "tucker2", "pca")],
    ids="+".join,
)
def test_a_layer_that_the_data_does_not_reach_stays(names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 20)
    small, plan = rw.compress(Two(), x[:1], decompositions=names, error="output", keep=0.9, data=[x])
    assert {c.name for c in plan.choices} == {"used"}
    assert {s.name for s in plan.kept} >= {"spare", "conv"}
    assert small(x).shape == x.shape


@pytest.mark.parametrize("method", ["tucker2"])
def test_without_a_budget_it_also_works_on_data(method: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 20)
    _, plan = rw.compress(Two(), x[:1], method=method, error="output", data=[x])
    assert {c.name for c in plan.choices} <= {"used"}
