"""tucker2: both channel modes at once, its two ranks under one budget, and the ranks that VBMF finds without one."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_laws import TINY, layer_of, macs_of, numel, pair_of, relative
from torch import Tensor, nn

import rankwise as rw
from rankwise.core import vbmf
from rankwise.core.layer import Layer
from rankwise.core.option import Cost, Option
from rankwise.decompositions import cost_at, costs, full_rank, tucker
from rankwise.decompositions.tucker import full_outer, signal_ranks
from rankwise.planning.findings import Findings
from rankwise.surgery.pairs import merge_pair
from sentences import check_sentence
from strategies import KINDS, blocks, cases

Data = st.DataObject
WITH_TAPS = [kind for kind in KINDS if kind.startswith("Conv") and kind != "Conv1D"]


def option_of(layer: Layer, outer: int) -> Option:
    return replace(tucker.DECOMPOSITION.family(layer), outer=outer)


def every_rank(layer: Layer) -> list[tuple[int, int]]:
    """All (outer, rank) that can be built."""
    return [
        (r, s)
        for r in range(1, full_outer(layer) + 1)
        for s in range(1, min(layer.group_channels, r * math.prod(layer.kernel)) + 1)
    ]


def three_axes(module: nn.Module) -> list[np.ndarray]:
    """The weight of each group as (filters, channels, taps), by numpy."""
    return [b.reshape(*b.shape[:2], -1) for b in blocks(module.weight, module)]


def truncated(w: np.ndarray, r: int, s: int) -> np.ndarray:
    """The truncated HOSVD straight from its definition: singular vectors of both unfoldings."""
    f, c, _ = w.shape
    u = np.linalg.svd(w.reshape(f, -1))[0][:, :r]
    v = np.linalg.svd(w.transpose(1, 0, 2).reshape(c, -1))[0][:, :s]
    return np.einsum("fa,ia,cb,jb,ijt->fct", u, u, v, v, w)


def clear(w: np.ndarray, r: int, s: int) -> bool:
    """Whether both cuts fall between different singular values; where they do not, other bases are as good."""

    def gap(matrix: np.ndarray, rank: int) -> bool:
        values = np.append(np.linalg.svd(matrix, compute_uv=False), np.zeros(len(matrix)))
        return rank >= len(matrix) or bool(values[rank - 1] - values[rank] > 1e-5 * max(values[0], 1e-12))

    f, c, _ = w.shape
    return gap(w.reshape(f, -1), r) and gap(w.transpose(1, 0, 2).reshape(c, -1), s)


def plan_for(layer: Layer, option: Option, rank: int) -> rw.Plan:
    nothing = Cost(1, None)
    choice = rw.Choice(
        *(layer.name, layer.kind, layer.shape, option.fold, option.slices, rank, {}, nothing, nothing),
        *(option.decomposition, option.outer, option.clusters),
    )
    return rw.Plan("", "", rw.Budget(params=1.0), nothing, nothing, (choice,))


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(3, 10, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(10, 12, 3, stride=2, groups=2)),
            *(nn.ReLU(), nn.ConvTranspose2d(12, 6, 2, stride=2), nn.Conv2d(6, 8, 1), nn.Flatten(), nn.Linear(288, 10)),
        ).to(dtype)


def inputs(n: int = 3) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# ---- one layer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(data=st.data())
def test_full_ranks_are_the_same_function(kind: str, data: Data) -> None:
    module, x = data.draw(cases(kind))
    layer = layer_of(module)
    option = option_of(layer, full_outer(layer))
    pair = pair_of(module, layer, option, full_rank(layer, option))
    assert [name for name, _ in pair.named_children()] == ["encoder", "core", "decoder"]
    wanted = module(x)
    assert pair(x).shape == wanted.shape
    assert relative(pair(x), wanted) < TINY


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(data=st.data())
def test_curves_are_the_truncated_hosvd_by_numpy(kind: str, data: Data) -> None:
    """At every (r, s) ‖W − Ŵ‖² of projections that numpy makes from the two unfoldings."""
    module, _ = data.draw(cases(kind))
    layer = layer_of(module)
    found = tucker.curves(module.weight, layer)
    parts = three_axes(module)
    total = sum(float((w**2).sum()) for w in parts)
    assert found["residual"].shape == (full_outer(layer), layer.group_channels + 1)
    for r in range(1, full_outer(layer) + 1):
        assert found["residual"][r - 1, 0] == pytest.approx(total)
        for s in range(1, layer.group_channels + 1):
            if all(clear(w, r, s) for w in parts):
                lost = sum(float(((w - truncated(w, r, s)) ** 2).sum()) for w in parts)
                assert found["residual"][r - 1, s] == pytest.approx(lost, abs=1e-8 * max(1, total)), (r, s)
    np.testing.assert_allclose(found["energy"] * total, found["residual"], atol=1e-12 * max(1, total))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(data=st.data())
def test_curves_fall_in_both_ranks_to_nothing(kind: str, data: Data) -> None:
    module, _ = data.draw(cases(kind))
    layer = layer_of(module)
    for curve in tucker.curves(module.weight, layer).values():
        scale = max(1.0, float(curve.max()))
        assert np.all(np.diff(curve, axis=1) <= 0), "a curve by rank never rises, not even by rounding"
        assert np.all(np.diff(curve, axis=0) <= 1e-12 * scale)
        assert abs(curve[-1, -1]) <= 1e-12 * scale
        assert np.all(curve >= 0)


@pytest.mark.parametrize("kind", WITH_TAPS)
@settings(max_examples=12)
@given(data=st.data())
def test_what_is_built_is_never_worse_than_what_was_scored(kind: str, data: Data) -> None:
    module, x = data.draw(cases(kind))
    layer = layer_of(module)
    scored = tucker.curves(module.weight, layer)["residual"]
    ranks = every_rank(layer)
    total = float(module.weight.detach().square().sum())
    for r, s in data.draw(st.lists(st.sampled_from(ranks), min_size=1, max_size=4, unique=True)):
        pair = pair_of(module, layer, option_of(layer, r), s)
        dense = merge_pair(pair)
        lost = float((module.weight - dense.weight).detach().square().sum())
        assert lost <= scored[r - 1, s] + 1e-9 * max(1, total), (r, s)
        assert relative(dense(x), pair(x)) < TINY


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(data=st.data())
def test_counted_params_and_macs_are_those_of_torch(kind: str, data: Data) -> None:
    module, x = data.draw(cases(kind))
    layer = layer_of(module, x)
    bias = 0 if module.bias is None else module.bias.numel()
    for r, s in data.draw(st.lists(st.sampled_from(every_rank(layer)), min_size=1, max_size=5, unique=True)):
        option = option_of(layer, r)
        pair = pair_of(module, layer, option, s)
        assert cost_at(layer, option, s) == Cost(numel(pair) - bias, macs_of(pair, x)), (r, s)
    params, macs = costs(layer, option)
    assert len(params) == full_rank(layer, option) + 1
    assert macs is not None
    assert np.all(np.diff(params) > 0)
    assert np.all(np.diff(macs) > 0)


def test_hooi_gains_where_the_modes_are_entangled() -> None:
    """Not only never worse: alternating does find something better than the truncated HOSVD."""
    torch.manual_seed(0)
    module = nn.Conv2d(8, 8, 3, bias=False).double()
    layer = layer_of(module)
    dense = merge_pair(pair_of(module, layer, option_of(layer, 3), 3))
    lost = float((module.weight - dense.weight).detach().square().sum())
    assert lost < tucker.curves(module.weight, layer)["residual"][2, 3] - 1e-3


@pytest.mark.parametrize("groups", [1, 2])
def test_a_planted_kernel_is_found_exactly(groups: int) -> None:
    """A kernel of multilinear rank (2, 3) in every group has no error at (2, 3) and some at (1, 3) and (2, 2)."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    module = nn.Conv2d(6 * groups, 5 * groups, 3, groups=groups, bias=False).double()
    parts = [torch.einsum("fi,ijt,cj->fct", draw(5, 2), draw(2, 3, 9), draw(6, 3)) for _ in range(groups)]
    module.weight.data = torch.cat(parts).reshape(module.weight.shape)
    layer = layer_of(module)
    energy = tucker.curves(module.weight, layer)["energy"]
    assert energy[1, 3] < 1e-12
    assert min(energy[0, 3], energy[1, 2]) > 1e-3
    x = torch.randn(2, 6 * groups, 5, 5, dtype=torch.float64)
    assert relative(pair_of(module, layer, option_of(layer, 2), 3)(x), module(x)) < TINY


def test_a_zero_weight_has_no_error() -> None:
    module = nn.Conv2d(4, 4, 3).double()
    nn.init.zeros_(module.weight)
    layer = layer_of(module)
    assert not tucker.curves(module.weight, layer)["energy"].any()
    x = torch.randn(1, 4, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(pair_of(module, layer, option_of(layer, 1), 1)(x), module(x))


# ---- the search ------------------------------------------------------------------------------------------


def brute_points(module: nn.Module, unit: str, x: Tensor) -> list[tuple[int, float]]:
    """(cost, relative energy) of a layer as it is, and of every (r, s), by numpy and torch alone."""
    layer = layer_of(module, x)
    bias = 0 if module.bias is None else module.bias.numel()

    def size(m: nn.Module) -> int:
        return numel(m) - bias if unit == "params" else macs_of(m, x)

    parts = three_axes(module)
    total = sum(float((w**2).sum()) for w in parts)
    found = [(size(module), 0.0)]
    for r, s in every_rank(layer):
        cost = size(pair_of(module, layer, option_of(layer, r), s))
        if cost < size(module):
            found.append((cost, sum(float(((w - truncated(w, r, s)) ** 2).sum()) for w in parts) / total))
    return found


@pytest.mark.parametrize("unit", ["params", "macs"])
@pytest.mark.parametrize("keep", [0.35, 0.6, 0.85])
def test_the_search_over_both_ranks_is_brute_force(keep: float, unit: str) -> None:
    torch.manual_seed(4)
    first, second = nn.Conv2d(5, 6, 3, stride=2, bias=False).double(), nn.Conv2d(6, 4, (3, 2), bias=False).double()
    model = nn.Sequential(first, nn.ReLU(), second)
    x = torch.randn(1, 5, 9, 9, dtype=torch.float64)
    middle = first(x)
    points = [brute_points(first, unit, x), brute_points(second, unit, middle)]
    whole = sum(p[0][0] for p in points)
    budget = rw.Budget(**{unit: keep})
    limit = budget.limit(unit, whole)
    fitting = [(a[1], b[1]) for a, b in product(*points) if a[0] + b[0] <= limit]
    table = rw.build_table(model, x, decompositions=("tucker2",))
    for search, best in (("minimax", min(map(max, fitting))), ("sum", min(map(sum, fitting)))):
        plan = rw.allocate(table, budget, method="tucker2", search=search)
        assert getattr(plan.after, unit) <= limit
        assert plan.search.objective == pytest.approx(best, abs=1e-9)
        assert {c.decomposition for c in plan.choices} == {"tucker2"}
        small = rw.apply_plan(model, plan)
        assert plan.after == Cost(numel(small), macs_of(small, x))


@pytest.mark.parametrize("search", ["minimax", "sum", "penalty", "product", "constant", "alternate"])
@pytest.mark.parametrize("budget", [{"keep": 0.6}, {"macs": 0.6}, {"keep": 0.7, "macs": 0.7}])
def test_every_search_keeps_its_budget(search: str, budget: dict[str, float]) -> None:
    model, x = network(), inputs()
    small, plan = rw.compress(model, x, method="tucker2", search=search, **budget)
    assert plan.choices
    assert plan.after == Cost(numel(small), macs_of(small, x))
    assert plan.keep() <= budget.get("keep", 2)
    assert plan.keep("macs") <= budget.get("macs", 2)


def test_layers_without_taps_fall_back_to_svd() -> None:
    model, x = network(), inputs()
    table = rw.build_table(model, x, decompositions=("tucker2",))
    kinds = {la.name: {o.decomposition for o in table.options(la)} for la in table.coverage.layers}
    assert kinds == {"0": {"tucker2"}, "2": {"tucker2"}, "4": {"tucker2"}, "5": {"svd"}, "7": {"svd"}}
    linear = nn.Sequential(nn.Linear(12, 12).double())
    _, plan = rw.compress(linear, method="tucker2", keep=0.5)
    _, same = rw.compress(linear, method="svd-energy", keep=0.5)
    assert [(c.decomposition, c.rank) for c in plan.choices] == [(c.decomposition, c.rank) for c in same.choices]
    assert plan.choices[0].decomposition == "svd"


def test_one_shape_of_each_kind_through_the_whole_job(tmp_path: Path) -> None:
    """Save and load, JSON and densify: everything gives the same outputs."""
    model, x = network(), inputs()
    small, plan = rw.compress(model, x[:1], method="tucker2", keep=0.3)
    chosen = {c.name: c for c in plan.choices}
    assert {c.decomposition for c in plan.choices} == {"svd", "tucker2"}
    for c in plan.choices:
        if c.decomposition == "tucker2":
            assert set(c.error) >= {"energy"}
            kernel = (model.get_submodule(c.name).weight - rw.densify(small).get_submodule(c.name).weight).detach()
            scale = float(model.get_submodule(c.name).weight.detach().square().sum())
            assert float(kernel.square().sum()) / scale <= chosen[c.name].error["energy"] + 1e-9
    assert rw.Plan.loads(plan.dumps()) == plan
    rw.save(small, plan, tmp_path / "o")
    again = rw.load(tmp_path / "o", model)
    assert torch.equal(again(x), small(x))
    assert rw.Plan.load(tmp_path / "o" / "plan.json") == plan
    dense = rw.densify(small)
    assert [p.shape for p in dense.parameters()] == [p.shape for p in model.parameters()]
    assert relative(dense(x), small(x)) < TINY
    assert relative(copy.deepcopy(small)(x), small(x)) == 0
    assert torch.equal(rw.apply_plan(model, plan)(x), small(x))


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    model, x = network(), inputs()
    table = rw.build_table(model, x, decompositions=("svd", "tucker2"))
    table.save(tmp_path / "t.safetensors")
    again = rw.Table.load(tmp_path / "t.safetensors", model)
    for layer in table.coverage.layers:
        assert again.options(layer) == table.options(layer)
        for option in table.options(layer):
            np.testing.assert_array_equal(
                again.curve(layer, option, "energy").values(), table.curve(layer, option, "energy").values()
            )
    for method in ("tucker2", "auto"):
        assert rw.allocate(again, rw.Budget(params=0.5), method) == rw.allocate(table, rw.Budget(params=0.5), method)


def test_a_table_for_tucker2_says_that_it_has_no_slices() -> None:
    """Convolutions have no svd in it: to leave them whole with a false reason would be silent."""
    table = rw.build_table(network(), inputs(), decompositions=("tucker2",))
    check_sentence(lambda: rw.allocate(table, rw.Budget(params=0.6), method="auto"))


# ---- plans from strangers --------------------------------------------------------------------------------


FORGED: list[dict[str, Any]] = [
    {"outer": 0},
    {"outer": -1},
    {"outer": 99},
    {"outer": 1.5},
    {"outer": "2"},
    {"outer": True},
    {"outer": None},
    {"rank": 0},
    {"rank": 99},
    {"outer": 1, "rank": 7},  # the core of one filter direction and three taps has three channel directions
    {"groups": 2},
    {"fold": "fw│c"},
    {"clusters": [[0, 1, 2, 3, 4, 5, 6, 7]]},
    {"decomposition": "svd"},
    {"decomposition": "svd", "outer": 0, "clusters": [[0, 1, 2, 3], [4, 5, 6, 7]]},
    {"decomposition": "pca"},
    {"decomposition": "tucker3"},
    {"decomposition": 2},
    {"decomposition": "messi", "outer": 0},
    {"decomposition": "messi", "clusters": [[0, 1, 2, 3, 4, 5, 6, 7]]},
]


@pytest.mark.parametrize("forged", FORGED, ids=str)
def test_a_forged_plan_is_refused_and_changes_nothing(forged: dict[str, Any]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(8, 6, 3), nn.Conv1d(6, 6, 3)).double()
    layer = rw.find_layers(model).layers[0]
    plan = plan_for(layer, option_of(layer, 2), 2)
    assert isinstance(rw.apply_plan(model, plan), nn.Module)
    body = json.loads(plan.dumps())
    body["layers"][0].update(forged)
    before = {name: id(module) for name, module in model.named_modules()}
    weights = copy.deepcopy(model.state_dict())
    message = check_sentence(lambda: rw.apply_plan_(model, rw.Plan.loads(json.dumps(body))))
    assert "'0'" in message
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert all(torch.equal(a, b) for a, b in zip(weights.values(), model.state_dict().values(), strict=True))


# ---- without a budget ------------------------------------------------------------------------------------


def noisy(rows: int, columns: int, rank: int, noise: float, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    signal = random.standard_normal((rows, rank)) @ random.standard_normal((rank, columns))
    return signal + noise * random.standard_normal((rows, columns))


def rank_of(matrix: np.ndarray) -> int:
    return vbmf.signal_rank(np.linalg.svd(matrix, compute_uv=False), *matrix.shape)


@pytest.mark.parametrize("shape", [(20, 50), (64, 64), (32, 288), (100, 30), (40, 41)])
@pytest.mark.parametrize("rank", [1, 3, 6])
@pytest.mark.parametrize("noise", [1e-9, 1e-3, 0.1, 0.5])
def test_vbmf_finds_a_planted_rank(shape: tuple[int, int], rank: int, noise: float) -> None:
    for seed in range(3):
        assert rank_of(noisy(*shape, rank, noise, seed)) == rank


@pytest.mark.parametrize("shape", [(20, 50), (64, 64), (32, 288), (100, 30), (1, 9), (2, 2)])
def test_vbmf_finds_no_signal_in_noise(shape: tuple[int, int]) -> None:
    assert [rank_of(noisy(*shape, 0, 1.0, seed)) for seed in range(5)] == [0] * 5


@settings(max_examples=20)
@given(
    st.integers(1, 24),
    st.integers(1, 60),
    st.integers(0, 5),
    st.floats(1e-4, 2),
    st.floats(-60, 60),
    st.integers(0, 2**16),
)
def test_vbmf_knows_no_scale_and_no_direction(
    rows: int, columns: int, rank: int, noise: float, power: float, seed: int
) -> None:
    matrix = noisy(rows, columns, rank, noise, seed)
    found = rank_of(matrix)
    assert 0 <= found <= min(rows, columns)
    assert rank_of(matrix.T) == found
    values = np.linalg.svd(matrix, compute_uv=False)
    assert vbmf.signal_rank(values[::-1] * 10**power, rows, columns) == found


def free_energy(noise: float, values: np.ndarray, rows: int, columns: int) -> float:
    """The objective of Nakajima et al. (2013), one singular value at a time."""
    short, long = min(rows, columns), max(rows, columns)
    alpha = short / long
    tau = 2.5129 * math.sqrt(alpha)
    edge = (1 + tau) * (1 + alpha / tau)
    energy = 0.0
    for value in values:
        x = value**2 / (long * noise)
        if x > edge:
            t = ((x - 1 - alpha) + math.sqrt((x - 1 - alpha) ** 2 - 4 * alpha)) / 2
            energy += x - t + math.log((t + 1) / x) + alpha * math.log(t / alpha + 1)
        else:
            energy += x - math.log(x)
    return energy


@settings(max_examples=8)
@given(
    st.sampled_from([(12, 40), (40, 12), (20, 20), (5, 90)]),
    st.integers(0, 4),
    st.floats(0.01, 2),
    st.integers(0, 2**16),
)
def test_the_noise_of_vbmf_has_the_least_free_energy(
    shape: tuple[int, int], rank: int, noise: float, seed: int
) -> None:
    """Against a fine grid over eight decades, refined by scipy."""
    scipy = pytest.importorskip("scipy.optimize")
    values = np.linalg.svd(noisy(*shape, rank, noise, seed), compute_uv=False)
    short, long = min(shape), max(shape)
    tau = 2.5129 * math.sqrt(short / long)
    found = vbmf._noise(np.square(values), short, long, (1 + tau) * (1 + short / long / tau))

    def objective(log_noise: float) -> float:
        return free_energy(math.exp(log_noise), values, *shape)

    top = math.log(float(np.square(values).sum()) / (short * long))
    grid = np.linspace(top - 18, top, 1201)
    best = grid[int(np.argmin([objective(g) for g in grid]))]
    refined = scipy.minimize_scalar(objective, bounds=(best - 0.02, best + 0.02), method="bounded")
    assert objective(math.log(found)) <= min(float(refined.fun), objective(best)) + 1e-6


def test_ranks_without_a_budget_are_the_planted_ones() -> None:
    """A kernel of ranks (2, 3) under a little noise, and a linear layer of rank 4."""
    random = np.random.default_rng(5)
    model = nn.Sequential(nn.Conv2d(24, 20, 3, bias=False), nn.Flatten(), nn.Linear(20, 30, bias=False)).double()
    u, core, v = random.standard_normal((20, 2)), random.standard_normal((2, 3, 9)), random.standard_normal((24, 3))
    kernel = np.einsum("fi,ijt,cj->fct", u, core, v) + 0.05 * random.standard_normal((20, 24, 9))
    model[0].weight.data = torch.from_numpy(kernel).reshape(20, 24, 3, 3)
    model[2].weight.data = torch.from_numpy(noisy(30, 20, 4, 0.05, 6))
    assert signal_ranks(model[0].weight, layer_of(model[0])) == (2, 3)
    x = torch.randn(1, 24, 3, 3, dtype=torch.float64)
    small, plan = rw.compress(model, x, method="tucker2")
    assert [(c.name, c.decomposition, c.outer, c.rank) for c in plan.choices] == [
        ("0", "tucker2", 2, 3),
        ("2", "svd", 0, 4),
    ]
    assert plan.after == Cost(numel(small), macs_of(small, x))
    assert plan.search == Findings(ranks="vbmf")
    assert rw.Plan.loads(plan.dumps()) == plan
    assert relative(small(x), model(x)) < 0.2
    table = rw.build_table(model, x, decompositions=("tucker2",))
    assert rw.allocate(table, None, method="tucker2") == replace(plan, model="", weights="")


def test_noise_and_small_layers_without_a_budget() -> None:
    """Nothing but noise keeps one direction; a layer whose factors would not be smaller stays whole."""
    model, x = network(), inputs()
    small, plan = rw.compress(model, x, method="tucker2")
    assert plan.after == Cost(numel(small), macs_of(small, x))
    assert plan.after.params < plan.before.params
    single = nn.Sequential(nn.Conv2d(1, 1, 3).double())
    same, nothing = rw.compress(single, method="tucker2")
    assert not nothing.choices
    assert nothing.after == nothing.before
    assert torch.equal(same[0].weight, single[0].weight)


@pytest.mark.parametrize("method", sorted(set(rw.METHODS) - {"tucker2"}))
def test_every_other_method_needs_a_budget(method: str) -> None:
    model, x = network(), inputs()
    assert "params" in check_sentence(lambda: rw.compress(model, x, method=method, data=[x]))
    table = rw.build_table(model, x)
    wanted = "no graph" if method in ("ft", "pfp") else "Budget"
    assert wanted in check_sentence(lambda: rw.allocate(table, None, method=method))


def test_without_a_budget_weights_are_needed(tmp_path: Path) -> None:
    model, x = network(), inputs()
    table = rw.build_table(model, x, decompositions=("tucker2",))
    table.save(tmp_path / "t.safetensors")
    assert "Table.load(path, model)" in check_sentence(
        lambda: rw.allocate(rw.Table.load(tmp_path / "t.safetensors"), None, method="tucker2")
    )
    again = rw.Table.load(tmp_path / "t.safetensors", model)
    assert rw.allocate(again, None, method="tucker2") == rw.allocate(table, None, method="tucker2")
    check_sentence(lambda: rw.compress(model, x, method="tucker2", decompositions=("svd", "tucker2")))
    assert "bound" in check_sentence(lambda: rw.compress(model, x, method="tucker2", error="bound"))
    assert "bound" in check_sentence(lambda: rw.compress(model, x, method="tucker2", error="bound", keep=0.5))
