"""messi: clusters of input channels near a common subspace, built as a gather and factors of unequal size."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_laws import TINY, layer_of, macs_of, numel, pair_of, relative
from torch import Tensor, nn

import rankwise as rw
from rankwise.core.fold import all_folds, fold_for
from rankwise.core.layer import Layer
from rankwise.core.measures import MEASURES
from rankwise.core.option import Cost, Option
from rankwise.decompositions import Selection, clusters, cost_at, full_rank
from rankwise.decompositions.clusters import CLUSTERINGS, consecutive
from rankwise.decompositions.slices import slice_ranks
from rankwise.surgery.modules import Branches
from rankwise.surgery.pairs import merge_pair
from sentences import check_sentence
from strategies import KINDS, blocks, cases

Data = st.DataObject
Partition = tuple[tuple[int, ...], ...]


def partitions(channels: int) -> st.SearchStrategy[Partition]:
    """Any partition of the channels, in any order."""

    def cut(drawn: tuple[list[int], set[int]]) -> Partition:
        order, places = drawn
        edges = [0, *sorted(places), channels]
        return tuple(tuple(order[a:b]) for a, b in pairwise(edges))

    places = st.sets(st.integers(1, channels - 1)) if channels > 1 else st.just(set())
    return st.tuples(st.permutations(range(channels)), places).map(cut)


def option_of(layer: Layer, found: Partition, fold: str | int = 0) -> Option:
    return Option(fold_for(fold, layer.dims), len(found), "messi", clusters=found)


def draw_case(data: Data, kind: str) -> tuple[nn.Module, Tensor, Layer]:
    module, x = data.draw(cases(kind))
    layer = layer_of(module, x)
    assume(layer.groups == 1)
    return module, x, layer


def matrices(module: nn.Module, found: Partition, fold: str) -> list[np.ndarray]:
    """The folded matrix of every cluster, by numpy from the definition."""
    (block,) = blocks(module.weight, module)
    letters = "dhw"[3 - (block.ndim - 2) :]
    left, right = (side[1:] for side in fold.split("│"))
    order = [0, *(2 + letters.index(a) for a in left), 1, *(2 + letters.index(a) for a in right)]
    rows = block.shape[0] * int(np.prod([block.shape[2 + letters.index(a)] for a in left]))
    return [block[:, list(cluster)].transpose(order).reshape(rows, -1) for cluster in found]


def objective(module: nn.Module, found: Partition, dimension: int) -> float:
    """Σ of squared distances of the columns from the best subspace of their cluster, by numpy's svd."""
    fold = "f│c" + "dhw"[3 - (module.weight.ndim - 2) :] if module.weight.ndim > 2 else "f│c"
    tails = [np.linalg.svd(m, compute_uv=False)[dimension:] for m in matrices(module, found, fold)]
    return float(sum((t**2).sum() for t in tails))


def columns_of(module: nn.Module) -> Tensor:
    (block,) = blocks(module.weight, module)
    return torch.from_numpy(np.ascontiguousarray(block.reshape(*block.shape[:2], -1)))


def planted(
    filters: int, sizes: tuple[int, ...], dimension: int, seed: int, taps: int = 1, outliers: int = 0
) -> tuple[nn.Module, set[frozenset[int]], list[int]]:
    """A layer whose channels lie in as many random subspaces as there are sizes, shuffled; and who belongs together.

    Outliers are channels of large norm in no subspace.
    """
    random = np.random.default_rng(seed)
    bases = [np.linalg.qr(random.standard_normal((filters, dimension)))[0] for _ in sizes]
    whose = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    weight = np.stack([bases[i] @ random.standard_normal((dimension, taps)) for i in whose], axis=1)
    far = sorted(random.choice(len(whose), outliers, replace=False).tolist())
    for channel in far:
        weight[:, channel] = 10 * random.standard_normal((filters, taps))
    if taps == 1:
        module: nn.Module = nn.Linear(len(whose), filters, bias=False).double()
    else:
        module = nn.Conv1d(len(whose), filters, taps, bias=False).double()
    module.weight.data = torch.from_numpy(weight).reshape(module.weight.shape)
    inside = [c for c in range(len(whose)) if c not in far]
    return module, {frozenset(c for c in inside if whose[c] == i) for i in range(len(sizes))}, far


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(3, 14, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(14, 12, 3, stride=2, padding=1)),
            *(nn.ReLU(), nn.Conv2d(12, 12, 3, groups=2), nn.ConvTranspose2d(12, 10, 2, stride=2)),
            *(nn.Flatten(), nn.Linear(160, 10)),
        ).to(dtype)


def inputs(n: int = 3) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# ---- one layer, any clusters -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(data=st.data())
def test_full_rank_is_the_same_function_for_any_clusters(kind: str, data: Data) -> None:
    module, x, layer = draw_case(data, kind)
    found = data.draw(partitions(layer.channels))
    option = option_of(layer, found, data.draw(st.sampled_from(all_folds(layer.dims))))
    wanted = module(x)
    got = pair_of(module, layer, option, full_rank(layer, option))(x)
    assert got.shape == wanted.shape
    assert relative(got, wanted) < TINY


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(data=st.data())
def test_pairs_are_the_truncated_clusters_and_cost_what_torch_counts(kind: str, data: Data) -> None:
    """At any rank: the merged weight by numpy's svd of each cluster, params and macs as torch counts them."""
    module, x, layer = draw_case(data, kind)
    found = data.draw(partitions(layer.channels))
    option = option_of(layer, found, data.draw(st.sampled_from(all_folds(layer.dims))))
    rank = data.draw(st.integers(1, full_rank(layer, option)))
    pair = pair_of(module, layer, option, rank)
    dense = merge_pair(pair)
    assert dense.extra_repr() == module.extra_repr()
    assert relative(dense(x), pair(x)) < TINY
    parts = matrices(module, found, option.fold)
    for mine, got in zip(parts, matrices(dense, found, option.fold), strict=True):
        left, sigma, right = np.linalg.svd(mine, full_matrices=False)
        lost = float((sigma[rank:] ** 2).sum())
        assert float(((mine - got) ** 2).sum()) == pytest.approx(lost, abs=1e-8 * max(1, (sigma**2).sum()))
        if rank >= len(sigma) or sigma[rank - 1] - sigma[rank] > 1e-4 * max(sigma[0], 1e-12):
            np.testing.assert_allclose(got, left[:, :rank] * sigma[:rank] @ right[:rank], atol=1e-6)
    bias = 0 if module.bias is None else module.bias.numel()
    assert cost_at(layer, option, rank) == Cost(numel(pair) - bias, macs_of(pair, x))
    # a narrow cluster has no more rank than it can use
    used = [min(rank, min(m.shape)) for m in parts]
    assert slice_ranks(layer, option) == tuple(min(m.shape) for m in parts)
    assert isinstance(pair.encoder, Branches)
    assert [len(b.weight) if layer.dims == 0 else b.out_channels for b in pair.encoder.branches] == used


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(data=st.data())
def test_merging_works_for_any_weights_in_the_pair(kind: str, data: Data) -> None:
    module, x, layer = draw_case(data, kind)
    option = option_of(layer, data.draw(partitions(layer.channels)))
    pair = pair_of(module, layer, option, data.draw(st.integers(1, full_rank(layer, option))))
    generator = torch.Generator().manual_seed(1)
    for p in pair.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    assert relative(merge_pair(pair)(x), pair(x)) < TINY


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(data=st.data())
def test_errors_are_what_they_say(kind: str, data: Data) -> None:
    """Every measure of the table against numpy, for clusters that the table found itself."""
    module, _, layer = draw_case(data, kind)
    k = data.draw(st.integers(1, layer.channels))
    clustering = data.draw(st.sampled_from(CLUSTERINGS))
    table = rw.build_table(nn.Sequential(module), decompositions=("messi",), groups=k, clustering=clustering, starts=2)
    (layer,) = table.coverage.layers
    norm = np.linalg.norm(np.hstack(matrices(module, (tuple(range(layer.channels)),), fold_for(0, layer.dims))), 2)
    options = table.options(layer)
    assert options
    for option in options:
        assert sorted(c for cluster in option.clusters for c in cluster) == list(range(layer.channels))
        assert all(option.clusters)
        assert len(option.clusters) == option.slices
        rank = data.draw(st.integers(1, full_rank(layer, option)))
        parts = matrices(module, option.clusters, option.fold)
        sigma = [np.append(np.linalg.svd(m, compute_uv=False), np.zeros(rank + 1)) for m in parts]
        whole = sum(float((s**2).sum()) for s in sigma)
        error = {m: table.curve(layer, option, m)[rank] for m in MEASURES}
        if whole:
            assert error["energy"] == pytest.approx(sum((s[rank:] ** 2).sum() for s in sigma) / whole, abs=1e-9)
            assert error["max"] == pytest.approx(max(s[rank] for s in sigma) / norm, abs=1e-6)
        dense = merge_pair(pair_of(module, layer, option, rank))
        rest = matrices(module, option.clusters, option.fold), matrices(dense, option.clusters, option.fold)
        realised = np.linalg.norm(np.hstack(rest[0]) - np.hstack(rest[1]), 2) / norm if norm else 0.0
        assert error["exact"] == pytest.approx(realised, abs=1e-6)
        assert error["max"] - 1e-6 <= realised <= error["rss"] + 1e-6
        for measure in MEASURES:
            curve = table.curve(layer, option, measure).values()
            assert len(curve) == full_rank(layer, option) + 1
            assert curve[-1] == 0
            assert np.all(np.diff(curve) <= 1e-12)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(data=st.data())
def test_consecutive_clusters_are_slices(kind: str, data: Data) -> None:
    """Where k divides the channels: the same function, errors and params as svd with k slices."""
    module, x, layer = draw_case(data, kind)
    k = data.draw(st.sampled_from([k for k in range(1, layer.channels + 1) if layer.channels % k == 0]))
    (option,) = clusters.options(module.weight, layer, k, Selection(clustering="consecutive"))
    plain = Option(option.fold, k)
    model = nn.Sequential(module)
    table = rw.build_table(
        model, x, decompositions=("svd", "messi"), groups=k, folds=option.fold, clustering="consecutive"
    )
    (layer,) = table.coverage.layers
    for measure in MEASURES:
        np.testing.assert_allclose(
            table.curve(layer, option, measure).values(), table.curve(layer, plain, measure).values(), atol=1e-7
        )
    rank = data.draw(st.integers(1, full_rank(layer, option)))
    assert cost_at(layer, option, rank) == cost_at(layer, plain, rank)
    one, other = pair_of(module, layer, option, rank), pair_of(module, layer, plain, rank)
    assert relative(one(x), other(x)) < 1e-6


@given(st.integers(1, 40), st.data())
def test_consecutive_is_a_partition_in_order(channels: int, data: Data) -> None:
    k = data.draw(st.integers(1, channels))
    found = consecutive(channels, k)
    assert len(found) == k
    assert [c for cluster in found for c in cluster] == list(range(channels))
    assert all(1 <= len(cluster) <= -(-channels // k) for cluster in found)


# ---- the clusterings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clustering", CLUSTERINGS)
@settings(max_examples=12)
@given(data=st.data())
def test_clusterings_are_partitions_and_deterministic(clustering: str, data: Data) -> None:
    """Any k, also 1, as many as channels and more than channels; equal, zero and random weights."""
    module, _, layer = draw_case(data, data.draw(st.sampled_from(KINDS)))
    k, seed = data.draw(st.integers(1, layer.channels + 3)), data.draw(st.integers(0, 9))
    before = torch.get_rng_state()
    selection = Selection(clustering=clustering, seed=seed, starts=3)
    found = clusters.options(module.weight, layer, k, selection)
    assert torch.equal(torch.get_rng_state(), before), "nobody's random numbers are drawn"
    assert found == clusters.options(
        module.weight.clone(), layer, k, Selection(clustering=clustering, seed=seed, starts=3)
    )
    assert len(set(found)) == len(found) >= 1
    for option in found:
        assert option.slices == len(option.clusters) == min(k, layer.channels)
        assert sorted(c for cluster in option.clusters for c in cluster) == list(range(layer.channels))
        assert all(option.clusters)


@settings(max_examples=25)
@given(st.integers(2, 14), st.integers(2, 9), st.sampled_from([1, 3]), st.integers(0, 2**16), st.data())
def test_projective_is_never_worse_than_consecutive(c: int, f: int, taps: int, seed: int, data: Data) -> None:
    """By its own objective, Σ of squared distances from subspaces of dimension j, with numpy's svd."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Conv1d(c, f, taps).double()
    module.weight.data = torch.randn(module.weight.shape, generator=generator, dtype=torch.float64)
    k, j = data.draw(st.integers(1, c)), data.draw(st.integers(1, f))
    near = consecutive(c, k)
    found = clusters._search(columns_of(module), near, k, clusters._subspaces(j, False), 1, 0, 3)
    assert objective(module, found, j) <= objective(module, near, j) + 1e-9
    if k < c:
        centres = clusters._search(columns_of(module), near, k, clusters._means, 1, 0, 3)

        def spread(chosen: Partition) -> float:
            points = columns_of(module).transpose(0, 1).flatten(1).numpy()
            return float(sum(((points[list(m)] - points[list(m)].mean(0)) ** 2).sum() for m in chosen))

        assert spread(centres) <= spread(near) + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_projective_is_never_worse_than_consecutive_for_many_filters(seed: int) -> None:
    """Beyond 256 rows subspaces come from orthogonal iteration; channels here have a slowly falling spectrum."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Linear(24, 300, bias=False).double()
    module.weight.data = torch.randn(module.weight.shape, generator=generator, dtype=torch.float64)
    layer = layer_of(module)
    near = consecutive(24, 3)
    found = [option.clusters for option in clusters.options(module.weight, layer, 3, Selection(starts=3))]
    for j in clusters._dimensions(layer, near):
        assert min(objective(module, c, j) for c in found) <= objective(module, near, j) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["means", "subspaces"])
@settings(max_examples=20)
@given(st.integers(2, 16), st.integers(2, 8), st.integers(0, 2**16), st.data())
def test_the_objective_never_rises_on_the_way(name: str, c: int, f: int, seed: int, data: Data) -> None:
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(f, c, data.draw(st.sampled_from([1, 4])), generator=generator, dtype=torch.float64)
    k = data.draw(st.integers(1, c))
    fit = clusters._means if name == "means" else clusters._subspaces(data.draw(st.integers(1, f)), False)
    seen: list[float] = []

    def watched(columns: Tensor, assigned: Tensor, k: int, state: Any) -> Any:
        cost, state = fit(columns, assigned, k, state)
        seen.append(float(cost.gather(0, assigned[None]).sum()))
        return cost, state

    start = (torch.arange(c) % k)[torch.randperm(c, generator=generator)]
    best, _ = clusters._improve(columns, start, k, watched)
    assert all(b <= a + 1e-9 for a, b in pairwise(seen)), seen
    assert best == min(seen)


@pytest.mark.parametrize(("taps", "dimension", "starts"), [(1, 2, 20), (3, 3, 5)])
@pytest.mark.parametrize("sizes", [(10, 10, 10), (16, 9, 5), (12, 12)], ids=str)
@pytest.mark.parametrize("clustering", ["projective", "projective-robust"])
def test_planted_subspaces_are_found(
    clustering: str, sizes: tuple[int, ...], taps: int, dimension: int, starts: int
) -> None:
    """Shuffled channels of k random subspaces: rank = dimension is enough for projective, not for consecutive.

    With fewer columns for each dimension local optima are many, and no number of starts is sure to find it.
    """
    for seed in range(2):
        module, wanted, _ = planted(18, sizes, dimension, seed, taps)
        layer = layer_of(module)
        options = clusters.options(module.weight, layer, len(sizes), Selection(clustering=clustering, starts=starts))
        assert wanted in [{frozenset(members) for members in o.clusters} for o in options]
        whole = float(module.weight.detach().square().sum())
        assert min(objective(module, o.clusters, dimension) for o in options) < 1e-9 * whole
        (near,) = clusters.options(module.weight, layer, len(sizes), Selection(clustering="consecutive"))
        assert objective(module, near.clusters, dimension) > 0.05 * whole


def test_the_robust_variant_survives_outliers() -> None:
    """A few channels of ten times the norm bend squared distances more than plain ones."""
    worse: list[int] = []
    for seed in range(8):
        module, wanted, far = planted(16, (14, 14), 2, seed, outliers=3)
        found = {}
        for robust in (False, True):
            near = consecutive(28, 2)
            parts = clusters._search(columns_of(module), near, 2, clusters._subspaces(2, robust), 2, seed, 10)
            one, other = wanted
            inside = [set(p) - set(far) for p in parts]
            found[robust] = min(
                len(inside[0] ^ one) + len(inside[1] ^ other), len(inside[0] ^ other) + len(inside[1] ^ one)
            )
        worse.append(found[False] - found[True])
    assert sum(worse) > 0, worse
    assert sum(w > 0 for w in worse) > sum(w < 0 for w in worse), worse


def test_more_starts_are_never_worse_and_seeds_matter() -> None:
    module, _, _ = planted(18, (10, 10, 10), 3, 0)
    near = consecutive(30, 3)

    def best(starts: int, seed: int = 0) -> float:
        fit = clusters._subspaces(3, False)
        return objective(module, clusters._search(columns_of(module), near, 3, fit, 1, seed, starts), 3)

    values = [best(starts) for starts in (1, 2, 4, 8)]
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0]
    torch.manual_seed(0)
    noise = nn.Linear(30, 18).double()
    layer = layer_of(noise)
    found = {clusters.options(noise.weight, layer, 3, Selection(seed=seed, starts=2))[0] for seed in range(4)}
    assert len(found) > 1


def test_edges() -> None:
    """Zero weights, one channel, as many clusters as channels, duplicates: a partition every time."""
    zero = nn.Conv2d(6, 4, 3)
    nn.init.zeros_(zero.weight)
    one = nn.Linear(1, 5)
    same = nn.Linear(9, 4)
    nn.init.ones_(same.weight)
    for module in (zero, one, same):
        layer = layer_of(module)
        for clustering in CLUSTERINGS:
            for k in (1, 2, layer.channels, layer.channels + 5):
                for option in clusters.options(module.weight, layer, k, Selection(clustering=clustering)):
                    members = sorted(c for cluster in option.clusters for c in cluster)
                    assert members == list(range(layer.channels))
                    assert all(option.clusters)
                    assert len(option.clusters) == min(k, layer.channels)
    small, plan = rw.compress(nn.Sequential(zero), method="messi", keep=0.7)
    assert plan.choices[0].error["energy"] == 0
    x = torch.randn(1, 6, 5, 5)
    torch.testing.assert_close(small(x), zero(x))


# ---- the whole job ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clustering", "budget"),
    [
        *((clustering, {"keep": 0.6}) for clustering in CLUSTERINGS),
        ("projective", {"macs": 0.6}),
        ("projective", {"keep": 0.7, "macs": 0.7}),
    ],
    ids=str,
)
def test_the_method(budget: dict[str, float], clustering: str, tmp_path: Path) -> None:
    model, x = network(), inputs()
    small, plan = rw.compress(model, x, method="messi", clustering=clustering, **budget)
    assert plan.after == Cost(numel(small), macs_of(small, x))
    assert plan.keep() <= budget.get("keep", 2)
    assert plan.keep("macs") <= budget.get("macs", 2)
    kinds = {c.name: (c.decomposition, c.groups) for c in plan.choices}
    assert kinds["2"] == kinds["7"] == ("messi", 3)
    assert kinds.get("4", ("svd", 3)) == ("svd", 3), "a convolution with groups of its own has slices"
    assert rw.Plan.loads(plan.dumps()) == plan
    rw.save(small, plan, tmp_path / "o")
    again = rw.load(tmp_path / "o", model)
    assert torch.equal(again(x), small(x))
    dense = rw.densify(small)
    assert [p.shape for p in dense.parameters()] == [p.shape for p in model.parameters()]
    assert relative(dense(x), small(x)) < TINY
    assert torch.equal(rw.compress(model, x, method="messi", clustering=clustering, **budget)[0](x), small(x))


def test_a_network_of_grouped_convolutions_only() -> None:
    """Nothing can be clustered: slices everywhere, as the documentation of the table says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 16, 3, groups=2), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=2))
    _, plan = rw.compress(model, torch.randn(1, 16, 9, 9), method="messi", keep=0.6)
    assert {c.decomposition for c in plan.choices} == {"svd"}


def test_groups_and_clustering_narrow_what_a_table_has() -> None:
    """A plan's settings say what was searched, so a table must give that or refuse."""
    model, x = network(), inputs()
    table = rw.build_table(model, x, decompositions=("messi",), groups=(2, 3))
    for k in (2, 3):
        plan = rw.allocate(table, rw.Budget(params=0.6), method="messi", groups=k)
        assert {c.groups for c in plan.choices if c.decomposition == "messi"} == {k}
    check_sentence(lambda: rw.allocate(table, rw.Budget(params=0.6), method="messi", groups=5))


def test_a_table_does_not_pretend_another_clustering() -> None:
    model, x = network(), inputs()
    table = rw.build_table(model, x, decompositions=("messi",), groups=3, clustering="consecutive")
    other = rw.build_table(model, x, decompositions=("messi",), groups=3, clustering="kmeans")
    wanted = rw.allocate(other, rw.Budget(params=0.6), method="messi", clustering="kmeans")
    try:
        found = rw.allocate(table, rw.Budget(params=0.6), method="messi", clustering="kmeans")
    except rw.RankwiseError:
        return
    assert found.choices == wanted.choices, "the plan says kmeans, and its clusters are consecutive"


def test_unknown_settings_are_one_sentence() -> None:
    model, x = network(), inputs()
    assert "projective-robust" in check_sentence(lambda: rw.compress(model, x, method="messi", clustering="em", keep=1))
    for changes in ({"starts": 0}, {"seed": -1}, {"groups": 0}, {"groups": "three"}, {"decompositions": ("mess",)}):
        check_sentence(lambda changes=changes: rw.compress(model, x, method="messi", keep=0.5, **changes))


FORGED: list[dict[str, Any]] = [
    {"clusters": []},
    {"clusters": [[0, 1, 2], [3, 4]]},
    {"clusters": [[0, 1, 2], [3, 4, 4]]},
    {"clusters": [[0, 1, 2], [2, 3, 4, 5]]},
    {"clusters": [[0, 1, 2], [3, 4, 6]]},
    {"clusters": [[0, 1, 2], [3, 4, -1]]},
    {"clusters": [[0, 1, 2, 3, 4, 5], []]},
    {"clusters": [[0, 1], [2, 3], [4, 5]]},
    {"clusters": [[0, 1, 2, 3, 4, 5]]},
    {"clusters": [[0, 1, 2], [3, 4, 5.0]]},
    {"clusters": [[0, 1, 2], [3, 4, "5"]]},
    {"clusters": [[0, True, 2], [3, 4, 5]]},
    {"clusters": [[0, 1, 2], None]},
    {"clusters": [0, 1, 2, 3, 4, 5]},
    {"clusters": {"0": [0, 1, 2]}},
    {"clusters": None},
    {"groups": 3},
    {"groups": 0},
    {"outer": 1},
    {"rank": 0},
    {"rank": 9},
    {"fold": "fz│c"},
    {"decomposition": "svd"},
    {"decomposition": "pca"},
    {"decomposition": "tucker2"},
]


@pytest.mark.parametrize("forged", FORGED, ids=str)
def test_a_forged_plan_is_refused_and_changes_nothing(forged: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv1d(6, 8, 3), nn.Conv1d(8, 6, 3, groups=2)).double()
    nothing = Cost(1, None)
    choice = rw.Choice(
        *("0", "Conv1d", (8, 6, 3), "f│cw", 2, 2, {}, nothing, nothing, "messi", 0, ((0, 5, 2), (3, 1, 4)))
    )
    plan = rw.Plan("", "", rw.Budget(params=1.0), nothing, nothing, (choice,))
    assert isinstance(rw.apply_plan(model, plan), nn.Module)
    body = json.loads(plan.dumps())
    body["layers"][0].update(forged)
    before = {name: id(module) for name, module in model.named_modules()}
    assert "'0'" in check_sentence(lambda: rw.apply_plan_(model, rw.Plan.loads(json.dumps(body))))
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_clusters_of_a_grouped_convolution_are_refused() -> None:
    model = nn.Sequential(nn.Conv1d(6, 8, 3, groups=2))
    nothing = Cost(1, None)
    for members in (((0, 1, 2), (3, 4, 5)), ((0, 1), (2,))):
        choice = rw.Choice("0", "Conv1d", (8, 3, 3), "f│cw", 2, 1, {}, nothing, nothing, "messi", 0, members)
        plan = rw.Plan("", "", rw.Budget(params=1.0), nothing, nothing, (choice,))
        check_sentence(lambda plan=plan: rw.apply_plan(model, plan))


# ---- what people do with modules -------------------------------------------------------------------------


@pytest.fixture
def small() -> nn.Module:
    return rw.compress(network(), inputs(1), method="messi", keep=0.5)[0]


def test_copies_and_state_dicts(small: nn.Module) -> None:
    x = inputs()
    assert any(isinstance(m, Branches) for m in small.modules())
    assert torch.equal(copy.deepcopy(small)(x), small(x))
    other = copy.deepcopy(small)
    for p in other.parameters():
        nn.init.zeros_(p)
    assert not torch.equal(other(x), small(x))
    other.load_state_dict(small.state_dict())
    assert torch.equal(other(x), small(x))
    assert "sizes=" in repr(small)


def test_gradients_dtypes_and_single_samples(small: nn.Module) -> None:
    small(inputs()).sum().backward()
    pairs = [m for m in small.modules() if isinstance(m, Branches)]
    assert all(p.grad is not None and bool(p.grad.any()) for m in pairs for p in m.parameters())
    half = copy.deepcopy(small).float()
    torch.testing.assert_close(half(inputs().float()).double(), small(inputs()), rtol=1e-3, atol=1e-4)
    conv = next(m for name, m in small.named_modules() if name == "2")
    x = torch.randn(14, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(conv(x), conv(x[None])[0])


def test_it_can_be_exported(small: nn.Module) -> None:
    x = inputs(1)
    exported = torch.export.export(small.eval(), (x,))
    torch.testing.assert_close(exported.module()(x), small(x))
