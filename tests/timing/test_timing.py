"""Time as a budget: the model of times, the searches that spend it, and what is kept of measurements. No clocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rankwise as rw
from rankwise.__main__ import main
from rankwise.core.option import Option
from rankwise.decompositions import PLAIN, costs
from rankwise.planning.times import MARGIN, NANO, Times, rising
from rankwise.timing import cache, cost_model
from rankwise.timing.candidates import kinds
from rankwise.timing.clock import Measured, Timing, race, read_timing, split_seconds, time_networks
from rankwise.timing.cost_model import measure_times
from rankwise.timing.merge import merge_named, merge_slow
from rankwise.timing.rank_multiple import multiple_of
from sentences import check_sentence

EXAMPLE = torch.randn(2, 4, 9, 9)
QUICK = Timing(repeats=1, warmup=0)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(4, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, stride=2, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 8),
    ).eval()


def invented(table: rw.Table, seed: int, slow: float = 1.0) -> Times:
    """Times that nobody measured: random, rising with the rank, some folds missing; `slow` scales all pairs."""
    rng = np.random.default_rng(seed)
    layers = {la.name: float(rng.uniform(1, 9)) / NANO * 1000 for la in table.coverage.layers}
    pairs: dict[tuple[str, str, int], Any] = {}
    for layer in table.coverage.layers:
        missing: set[str] = set()
        for option in table.options(layer):
            most = len(costs(layer, option)[0]) - 1
            ranks = sorted({1, most, *rng.integers(1, most + 1, 2).tolist()})
            if rng.random() >= 0.8:
                missing.add(option.fold)
            else:
                seconds = np.sort(rng.uniform(0.1, 1.5, len(ranks))) * layers[layer.name] * slow
                pairs[layer.name, option.fold, option.slices] = (tuple(ranks), tuple(seconds.tolist()))
        pairs = {key: value for key, value in pairs.items() if key[0] != layer.name or key[1] not in missing}
    return Times(float(rng.uniform(1, 9)) / NANO * 1000, layers, pairs)


def table_with_times(seed: int, slow: float = 1.0) -> rw.Table:
    table = rw.build_table(network(seed), EXAMPLE, groups=[1, 2])
    table.times = invented(table, seed, slow)
    return table


def seconds_of(table: rw.Table, plan: rw.Plan) -> float:
    """What a plan takes, summed up here from the layers and not by the search."""
    assert table.times is not None
    whole = table.times.beside
    chosen = {c.name: c for c in plan.choices}
    for layer in table.coverage.layers:
        c = chosen.get(layer.name)
        if c is None:
            whole += table.times.layers[layer.name]
        else:
            ranks, seconds = table.times.pairs[layer.name, c.fold, c.groups]
            rank = c.rank if c.rank <= 8 else 8 * -(-c.rank // 8)
            rank = min(rank, ranks[-1]) if c.rank <= ranks[-1] else rank
            whole += float(np.interp(rank, ranks, rising(np.array(seconds)))) * max(1.0, rank / ranks[-1])
    return whole


# ---- times -----------------------------------------------------------------------------------------------


@given(values=st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_rising_is_the_nearest_rising_sequence(values: list[int]) -> None:
    given_, found = np.array(values, dtype=float), rising(np.array(values, dtype=float))
    assert len(found) == len(values)
    assert (np.diff(found) >= 0).all()
    assert found.sum() == pytest.approx(given_.sum())
    if (np.diff(given_) >= 0).all():
        assert (found == given_).all()
    # no other rising sequence of averages of runs is nearer
    for constant in (given_.mean(), given_.min(), given_.max()):
        assert ((found - given_) ** 2).sum() <= ((constant - given_) ** 2).sum() + 1e-9


def test_times_between_and_beyond_the_measured_ranks() -> None:
    layer = rw.Layer("a", "Linear", 16, 16)
    times = Times(0.0, {"a": 10e-9}, {("a", "f│c", 1): ((2, 4), (2e-9, 6e-9))})
    by_rank = times.by_rank(layer, Option("f│c", 1))
    assert by_rank is not None
    assert by_rank[[1, 2, 3, 4, 8, 9, 16]].tolist() == [2, 2, 4, 6, 12, 24, 24]
    assert (times.by_rank(layer, Option("f│c", 1, "whitened")) == by_rank).all()
    assert times.by_rank(layer, Option("f│c", 1, "tucker2", outer=1)) is None
    assert times.by_rank(rw.Layer("a", "Conv1d", 16, 16, (3,)), Option("fw│c", 1)) is None
    assert (times.total, times.fixed, times.dense("b")) == (10, 0, 0)


def test_times_between_and_beyond_the_measured_slices() -> None:
    layer = rw.Layer("a", "Linear", 64, 64)
    pairs = {("a", "f│c", 2): ((1, 16), (4e-9, 64e-9)), ("a", "f│c", 8): ((1, 4), (16e-9, 64e-9))}
    times = Times(0.0, {"a": 1.0}, pairs)

    def at(slices: int, rank: int) -> int:
        found = times.by_rank(layer, Option("f│c", slices))
        assert found is not None
        assert (np.diff(found) >= 0).all()
        return int(found[rank])

    # 16 channels between the factors: 32 ns with 2 slices of rank 8, 32 with 8 of rank 2; 4 slices are half the way.
    assert (at(2, 8), at(8, 2), at(4, 4)) == (32, 32, pytest.approx(32, abs=1))
    assert at(4, 1) == 8  # rank 2 of 2 slices takes 8 ns, and so would rank ½ of 8
    assert at(16, 1) == 2 * at(8, 2)  # nobody knows: as if time grew with the slices
    assert at(1, 16) == 2 * at(2, 8)
    assert at(5, 4) > at(4, 5)  # 65 channels of 64: padded first


@pytest.mark.parametrize("outers", [(2, 8), (1, 4, 16)])
def test_times_between_and_beyond_the_measured_cores(outers: tuple[int, ...]) -> None:
    """Bilinear in both ranks where the truth is: 3 + 2 s + 5 r + s r nanoseconds."""
    layer = rw.Layer("a", "Conv2d", 32, 32, (3, 3))

    def truth(outer: int, rank: int) -> int:
        return 3 + 2 * rank + 5 * outer + rank * outer

    ranks = (1, 8, 32)
    others = {("a", "core", o): (ranks, tuple(truth(o, s) * 1e-9 for s in ranks)) for o in outers}
    times = Times(0.0, {"a": 1.0}, {}, others=others)
    for outer in range(1, 33):
        for name in ("tucker2", "whitened-tucker2"):
            found = times.by_rank(layer, Option("f│chw", 1, name, outer))
            assert found is not None
            assert (np.diff(found) >= 0).all()
            for rank in (1, 3, 8, 16, 24):
                if rank < len(found):
                    assert found[rank] >= truth(outer, rank)  # never too fast
                    if outers[0] <= outer <= min(8, outers[-1]):
                        assert found[rank] == pytest.approx(truth(outer, rank), abs=1)


# ---- searches --------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 200),
    keep=st.floats(0.3, 1.0),
    others=st.sampled_from([{}, {"params": 0.8}, {"macs": 0.8}, {"params": 0.9, "macs": 0.7}]),
    search=st.sampled_from(["sum", "minimax", "constant", "alternate", "penalty", "product"]),
)
def test_a_budget_in_latency_holds(seed: int, keep: float, others: dict[str, float], search: str) -> None:
    table = table_with_times(seed)
    assert table.times is not None
    try:
        plan = rw.allocate(table, rw.Budget(latency=keep, **others), search=search)
    except rw.RankwiseError as err:
        assert "cannot be met" in str(err)  # noqa: PT017
        return
    assert seconds_of(table, plan) <= keep * table.times.total / NANO + 1e-12
    assert plan.keep("latency") <= keep + 1e-9
    assert plan.search.latency.after == pytest.approx(seconds_of(table, plan), abs=2e-8)
    for unit, share in others.items():
        assert plan.keep(unit) <= share


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 500), share=st.floats(0, 1), units=st.sampled_from([("latency",), ("latency", "params")]))
def test_the_least_sum_of_errors_is_that_of_all_plans_that_fit(seed: int, share: float, units: tuple[str, ...]) -> None:
    table = table_with_times(seed)
    times = table.times
    assert times is not None
    limit = 0.4 + 0.6 * share
    every: list[list[tuple[int, int, float]]] = []
    for layer in table.coverage.layers:
        points = [(times.dense(layer.name), layer.params, 0.0)]
        for option in table.options(layer):
            by_rank = times.by_rank(layer, option)
            errors = table.curve(layer, option, "energy").values()
            params = costs(layer, option)[0]
            for rank in range(1, len(errors)) if by_rank is not None else ():
                fast = by_rank[rank] < MARGIN * times.dense(layer.name)
                if fast and ("params" not in units or params[rank] < layer.params):
                    points.append((int(by_rank[rank]), int(params[rank]), float(errors[rank])))
        every.append(points)
    sums = np.zeros((1, 3))
    for points in every:
        sums = (sums[:, None] + np.array(points)[None]).reshape(-1, 3)
    budget = rw.Budget(**dict.fromkeys(units, limit))
    most = budget.limits(table.coverage, times)
    beside = table.coverage.params - sum(la.params for la in table.coverage.layers)
    fits = sums[:, 0] + times.fixed <= most["latency"]
    if "params" in units:
        fits &= sums[:, 1] + beside <= most["params"]
    best = sums[fits, 2].min() if fits.any() else None
    try:
        found = rw.allocate(table, budget, error="energy").search.objective
    except rw.RankwiseError:
        found = None
    assert (found is None) == (best is None)
    assert found is None or found == pytest.approx(best, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 200), keep=st.floats(0.3, 0.95), slow=st.sampled_from([0.3, 1.0, 3.0]))
def test_never_slower_unless_the_budget_needs_it(seed: int, keep: float, slow: float) -> None:
    table = table_with_times(seed, slow)
    try:
        plan = rw.allocate(table, rw.Budget(params=keep), never_slower=True)
    except rw.RankwiseError as err:
        assert "cannot be met" in str(err)  # noqa: PT017
        return
    found = plan.search.latency
    if found is None:  # nobody knows how long an option takes that the budget needs
        assert table.times is not None
        measured = {key[:2] for key in table.times.pairs}
        unknown = [c.name for c in plan.choices if (c.name, c.fold) not in measured]
        assert unknown
        assert all(name in plan.warnings[0].rpartition(" in ")[2] for name in unknown)
        return
    slower = {name for name, (dense, pair) in found.layers.items() if pair > dense}
    assert set(found.slower) == slower
    unsure = {name for name, (dense, pair) in found.layers.items() if not pair < MARGIN * dense}
    assert bool(plan.warnings) == bool(unsure)
    assert all(name in plan.warnings[0].rpartition(" in ")[2] for name in unsure)
    if not slower:
        assert seconds_of(table, plan) <= table.times.total / NANO  # type: ignore[union-attr]
    # With the slower layers left whole there would be no plan at all: none of them is there without need.
    if slower:
        rules = rw.Budget(params=keep)
        from rankwise.planning.menu import Rules, menus

        faster = menus(table, ("params",), "energy", rules=Rules(never_slower=True))
        least = sum(min([m.dense.cost[0], *(o.cost(1)[0] for o in m.offers)]) for m in faster)
        beside = table.coverage.params - sum(la.params for la in table.coverage.layers)
        assert least + beside > rules.limits(table.coverage)["params"]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 500))
def test_the_least_that_is_stated_can_be_asked_for(seed: int) -> None:
    table = table_with_times(seed)
    said = check_sentence(lambda: rw.allocate(table, rw.Budget(latency=1e-6)))
    keep = float(said.split("(keep ")[1].split(")")[0])
    assert rw.allocate(table, rw.Budget(latency=keep)).keep("latency") <= keep
    check_sentence(lambda: rw.allocate(table, rw.Budget(latency=keep - 4e-4)))


def test_folded_norms_leave_more_time_to_the_layers() -> None:
    table = table_with_times(3)
    assert table.times is not None
    times = table.times
    whole = rw.allocate(table, rw.Budget(latency=0.7))
    table.times = Times(0.0, times.layers, times.pairs, whole=times.total / NANO)
    fused = rw.allocate(table, rw.Budget(latency=0.7))
    assert fused.search.objective <= whole.search.objective
    assert fused.keep("latency") <= 0.7
    assert table.times.total == times.total


@pytest.mark.parametrize("search", ["sum", "minimax", "constant", "alternate"])
@pytest.mark.parametrize("error", ["energy", "exact"])
def test_ranks_are_multiples(search: str, error: str) -> None:
    table = rw.build_table(network(), EXAMPLE)
    plan = rw.allocate(table, rw.Budget(params=0.8), search=search, error=error, rank_multiple=4)
    assert plan.choices
    for choice in plan.choices:
        assert choice.groups * choice.rank % 4 == 0
        assert choice.error[error] == pytest.approx(
            table.curve(_layer(table, choice.name), choice.option, error)[choice.rank]
        )
    assert plan.keep() <= 0.8


@given(step=st.sampled_from([1, 2, 4, 8, 16, 32]), slope=st.floats(0.05, 2.0))
def test_the_best_multiple_is_the_block_in_which_channels_are_computed(step: int, slope: float) -> None:
    assert multiple_of({r: 1.0 + slope * -(-r // step) * step for r in range(33, 65)}) >= step
    assert multiple_of({r: float(-(-r // step)) for r in range(1, 65)}) == step


def test_ranks_are_multiples_of_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(runs: list[Any], *_: Any, **__: Any) -> list[Measured]:
        return [Measured((1.0 + at // 4,)) for at in range(len(runs))]  # ranks 1 to 4, 5 to 8, … take the same time

    monkeypatch.setattr("rankwise.timing.rank_multiple.race", steps)
    asked = {"keep": 0.8, "error": "energy", "rank_multiple": "measured", "timing": QUICK}
    plan = rw.compress(network(), EXAMPLE, **asked)[1]
    assert plan.settings["rank_multiple"] == 4
    assert all(c.groups * c.rank % plan.settings["rank_multiple"] == 0 for c in plan.choices)


def _layer(table: rw.Table, name: str) -> rw.Layer:
    return next(la for la in table.coverage.layers if la.name == name)


# ---- measuring -------------------------------------------------------------------------------------------


def test_measured_times_cover_the_network_and_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    first = measure_times(model, EXAMPLE, QUICK, cache=tmp_path, seconds=1.0, fuse=True)
    assert set(first.layers) == {"0", "3", "6"}
    assert {key[0] for key in first.pairs} == {"0", "3", "6"}
    assert all(s > 0 for _, seconds in first.pairs.values() for s in seconds)
    assert first.whole is not None
    assert first.layout in (None, "channels-last")
    assert first.timing["threads"] == torch.get_num_threads()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    monkeypatch.setattr(cost_model, "_measure", lambda *_: pytest.fail("measured again"))
    again = measure_times(model, EXAMPLE, QUICK, cache=tmp_path, fuse=True)
    assert vars(again) == vars(first)


OLD = {"whole": 1.0, "layout": None, "beside": 0.1, "layers": {"0": 0.9}, "pairs": {"0": {"f│chw/1": [[1, 0.2]]}}}


@pytest.mark.parametrize(
    "damage",
    ["{", "[]", '{"format": 9, "cells": {}}', json.dumps({"format": cache.FORMAT, "cells": {"x": 3, "y": OLD}})],
)
def test_a_damaged_cache_is_measured_again(damage: str, tmp_path: Path) -> None:
    measure_times(network(), EXAMPLE, QUICK, cache=tmp_path, seconds=0.5)
    (file,) = tmp_path.iterdir()
    file.write_text(damage)
    assert measure_times(network(), EXAMPLE, QUICK, cache=tmp_path, seconds=0.5).layers
    assert json.loads(file.read_text())["format"] == cache.FORMAT


def test_times_of_an_old_format_are_measured_again(tmp_path: Path) -> None:
    """They know fewer options. Even under the name of the file and of the measurement they are not believed."""
    first = measure_times(network(), EXAMPLE, QUICK, cache=tmp_path, seconds=0.5)
    (file,) = tmp_path.iterdir()
    (key,) = json.loads(file.read_text())["cells"]
    file.write_text(json.dumps({"format": 2, "machine": cache.machine(), "cells": {key: OLD}}))
    again = measure_times(network(), EXAMPLE, QUICK, cache=tmp_path, seconds=0.5)
    assert set(again.layers) == set(first.layers) == {"0", "3", "6"}
    others = set(kinds()) - {PLAIN.timed_as}
    assert {(name, kind) for name, kind, _ in again.others} == {(name, kind) for name in "03" for kind in others}
    cells = json.loads(file.read_text())["cells"]
    assert list(cells) == [key]
    for bad in ({"forms": {"0": {"pair/f│chw/x/0": [[1, 0.2]]}}}, {"conditions": {"cores": 2}}, {"conditions": None}):
        file.write_text(json.dumps({"format": cache.FORMAT, "cells": {key: {**cells[key], **bad}}}))
        assert not cache.Store(file).known
    file.write_text(json.dumps({"format": cache.FORMAT, "cells": cells}))
    assert list(cache.Store(file).known) == [key]


def test_pairs_are_timed_in_the_network_and_scaled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A clock that says 2 s of a layer and 1 s for each rank of its pair; in the network the layer takes 6 s."""
    seen: list[nn.Module] = []

    def clock(model: nn.Module, run: Any, names: Any) -> Any:
        run()
        seen.append(model)
        spent = {}
        for name in names:
            module = model.get_submodule(name)
            pair = isinstance(module, nn.Sequential)
            spent[name] = float(module[-1].weight.shape[1]) if pair else 2.0
        return 1.0, spent

    def splits(networks: Any, names: Any, timing: Any) -> Any:
        return [(5.0, dict.fromkeys(names, 6.0)) for _ in networks]

    monkeypatch.setattr(cost_model, "split_once", clock)
    monkeypatch.setattr(cost_model, "split_seconds", splits)
    monkeypatch.setattr(cost_model, "HOPELESS", 99.0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, stride=2)).eval()
    times = measure_times(model, torch.randn(1, 8, 6, 6), QUICK, cache=tmp_path)
    assert len(seen) > 8
    assert not any(isinstance(m, nn.Sequential) for m in seen[-1].children())  # the network is as it was
    for name in ("0", "2"):
        for slices in (1, 2, 4):
            ranks, seconds = times.pairs[name, "f│chw", slices]
            assert len(ranks) > 1
            assert seconds == pytest.approx([6.0 * slices * r / 2.0 for r in ranks])
    assert (times.beside, times.layers["0"], times.layout) == (5.0, 6.0, None)  # no faster with channels last


@pytest.mark.parametrize("faster", [False, True])
def test_the_faster_layout_is_taken_and_kept(faster: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def splits(networks: Any, names: Any, timing: Any) -> Any:
        last = [next(n.parameters()).is_contiguous(memory_format=torch.channels_last) for n, _ in networks]
        assert sorted(last) == [False, True]
        return [(1.0 if lies == faster else 2.0, dict.fromkeys(names, 1.0)) for lies in last]

    monkeypatch.setattr(cost_model, "split_seconds", splits)
    monkeypatch.setattr("rankwise.timing.cache.place", lambda *_: tmp_path / "times.json")
    monkeypatch.setattr(cost_model, "place", lambda *_: tmp_path / "times.json")
    model = network()
    small, plan = rw.compress(model, EXAMPLE, keep=0.9, never_slower=True, error="energy", timing=QUICK)
    assert plan.layout == ("channels-last" if faster else None)
    rw.save(small, plan, tmp_path / "o")
    again = rw.load(tmp_path / "o", model)
    for one in (small, again):
        assert one[0].weight.is_contiguous(memory_format=torch.channels_last) == faster
    assert torch.equal(again(EXAMPLE), small(EXAMPLE))
    assert torch.allclose(again(EXAMPLE), rw.apply_plan(model, plan)(EXAMPLE), atol=1e-5)
    assert rw.Plan.loads(plan.dumps()) == plan
    assert model[0].weight.is_contiguous()


@pytest.mark.parametrize("fuse", [False, True])
def test_how_the_networks_compare_is_measured_without_clocks(
    fuse: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Layers and what is beside them say how time is shared; two networks in turns say how much there is."""

    def splits(networks: Any, names: Any, timing: Any) -> Any:
        return [(1.0 / (1 + i), dict.fromkeys(names, 2.0 / (1 + i))) for i, _ in enumerate(networks)]

    def turns(networks: Any, *_: Any) -> list[Measured]:
        assert len(networks) == 2
        return [Measured((8.0,)), Measured((6.0,))]

    monkeypatch.setattr(cost_model, "split_seconds", splits)
    monkeypatch.setattr(cost_model, "time_networks", turns)
    times = measure_times(network(), EXAMPLE, QUICK, cache=tmp_path, seconds=0.5, fuse=fuse)
    parts = times.fixed + sum(times.dense(name) for name in times.layers)
    assert times.layout == "channels-last"
    assert parts / times.total == pytest.approx(0.75)
    assert times.beside * 2 == pytest.approx(next(iter(times.layers.values())))


def test_a_layer_that_is_called_twice_counts_twice(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.idle = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x)[:2])

    times = measure_times(Twice(), torch.randn(4, 16), QUICK, cache=tmp_path)
    assert set(times.layers) == {"layer"}
    assert times.dense("idle") == 0
    small, plan = rw.compress(Twice(), torch.randn(4, 16), keep=0.9, never_slower=True, timing=QUICK)
    assert plan.search.latency is not None
    assert isinstance(small.idle, nn.Sequential) or isinstance(small.layer, nn.Sequential)


def test_turns_and_what_counts() -> None:
    order: list[str] = []
    found = race([lambda: order.append("a"), lambda: order.append("b")], Timing(repeats=3, warmup=2))
    assert order == ["a", "b"] * 5
    assert [len(m.seconds) for m in found] == [3, 3]
    assert Measured((3.0, 1.0, 2.0, 4.0)).median == 2.5
    assert Measured((3.0, 1.0, 2.0)).best == 1.0
    model = network()
    ((beside, layers),) = split_seconds([(model, lambda: model(EXAMPLE))], ["0", "6"], QUICK)
    assert set(layers) == {"0", "6"}
    assert min(beside, *layers.values()) > 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_timing_leaves_a_network_as_it_was(layout: str) -> None:
    model = network().train()
    strides = [p.stride() for p in model.parameters()]
    threads = torch.get_num_threads()
    time_networks([model], EXAMPLE, Timing(batch=3, threads=1, layout=layout, repeats=1))
    assert [p.stride() for p in model.parameters()] == strides
    assert all(m.training for m in model.modules())
    assert model[1].num_batches_tracked == 0
    assert torch.get_num_threads() == threads


# ---- merging ---------------------------------------------------------------------------------------------


def test_merged_pairs_are_the_same_function_and_cost_what_the_layer_did() -> None:
    model = network().double()
    small, plan = rw.compress(model, EXAMPLE, keep=0.6, error="energy")
    choice = plan.choices[0]
    merged = merge_named(small, [choice.name])
    assert not isinstance(merged.get_submodule(choice.name), nn.Sequential)
    assert torch.allclose(merged(EXAMPLE.double()), small(EXAMPLE.double()))
    now, before, after = rw.find_layers(merged, EXAMPLE), choice.before, choice.after
    assert now.params == plan.after.params + before.params - after.params
    assert None not in (plan.after.macs, before.macs, after.macs)
    assert now.macs == plan.after.macs + before.macs - after.macs  # type: ignore[operator]


def test_only_slower_pairs_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    small, plan = rw.compress(network(), EXAMPLE, keep=0.6, error="energy")
    from rankwise.timing import merge

    monkeypatch.setattr(merge, "race", lambda *_: [Measured((1.0,)), Measured((2.0,))])
    assert sorted(merge_slow(small, EXAMPLE)[1]) == sorted(c.name for c in plan.choices)
    monkeypatch.setattr(merge, "race", lambda *_: [Measured((1.0,)), Measured((1.02,))])
    assert merge_slow(small, EXAMPLE)[1] == []


def settled(factors: list[float], monkeypatch: pytest.MonkeyPatch) -> tuple[rw.Plan, list[rw.Plan], rw.Budget]:
    """A plan for half of what can go, where networks take `factors` times as long as predicted, round by round."""
    from rankwise.timing import tune as settling

    table = table_with_times(3)
    least = float(check_sentence(lambda: rw.allocate(table, rw.Budget(latency=1e-6))).split("(keep ")[1].split(")")[0])
    budget = rw.Budget(latency=(least + 1) / 2)
    made: list[rw.Plan] = []
    measured = iter([*factors, *[factors[-1]] * 9])

    def clock(*_: Any) -> list[Measured]:
        return [Measured((1.0,)), Measured((made[-1].keep("latency") * next(measured),))]

    def make(b: rw.Budget) -> rw.Plan:
        made.append(rw.allocate(table, b))
        return made[-1]

    monkeypatch.setattr(settling, "time_networks", clock)
    return settling.settle(budget, make, network(3), EXAMPLE, QUICK), made, budget


def test_a_plan_that_is_too_slow_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, made, budget = settled([1.3], monkeypatch)
    assert budget.latency is not None
    assert len(made) > 1
    assert plan.budget == budget
    assert plan.search.latency.measured <= budget.latency
    assert not plan.warnings
    assert made[0].search.objective <= plan.search.objective
    # Nothing is fast enough: the fastest there is, and it says so.
    plan, made, budget = settled([9.0], monkeypatch)
    assert plan.search.latency.measured > 1 > (budget.latency or 1)
    assert plan.search.latency.measured == pytest.approx(9 * min(p.keep("latency") for p in made))
    (warning,) = plan.warnings
    assert f"{plan.search.latency.measured:.3f} of the dense network's time" in warning
    assert "nothing faster was found" in warning


def test_a_plan_that_is_faster_than_need_be_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, made, budget = settled([0.7], monkeypatch)
    assert len(made) > 1
    assert plan.search.objective <= made[0].search.objective
    assert 0.7 * made[0].keep("latency") < plan.search.latency.measured <= (budget.latency or 0)


# ---- the whole job, and refusals -------------------------------------------------------------------------


def test_compress_for_a_latency() -> None:
    model = network()
    small, plan = rw.compress(model, EXAMPLE, latency=0.99, timing=QUICK, error="energy")
    assert plan.keep("latency") <= 1.0
    assert plan.budget.to_json() == {"latency": 0.99}
    assert plan.fused == {"1": "0"}
    assert rw.Plan.loads(plan.dumps()) == plan
    assert plan.after.params == sum(p.numel() for p in small.parameters())


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    common = ["compress", "digits-cnn", "--random-weights", "--force", "--error", "energy", "--json"]
    common += ["--out", str(tmp_path / "o")]
    svd = ["--method", "svd-energy"]
    for flags, measured in (([], False), (["--never-slower"], True), (["--no-never-slower"], False), (svd, False)):
        assert main([*common, "--keep", "0.6", *flags, "--timing", "batch=2,repeats=1"]) == 0
        plan = json.loads(capsys.readouterr().out)["plan"]
        assert ("latency" in plan["search"]) == measured
        assert plan["settings"]["never_slower"] == measured
    assert plan["budget"] == {"params": 0.6}


def test_refusals() -> None:
    model, table = network(), rw.build_table(network(), EXAMPLE)
    check = check_sentence
    assert "latency" in check(lambda: rw.Budget(latency=1.5))
    assert "latency" in check(lambda: rw.Budget(latency=0.0))
    assert "measure_times" in check(lambda: rw.allocate(table, rw.Budget(latency=0.5)))
    assert "measure_times" in check(lambda: rw.allocate(table, rw.Budget(params=0.5), never_slower=True))
    assert "example" in check(lambda: rw.compress(model, latency=0.5))
    assert "remove filters" in check(lambda: rw.compress(model, EXAMPLE, method="ft", latency=0.5))
    assert "compiled" in check(lambda: measure_times(model, EXAMPLE, Timing(compiled=True)))
    assert "layout" in check(lambda: Timing(layout="rows"))
    assert "batch" in check(lambda: Timing(batch=0))
    assert "batch=32" in check(lambda: read_timing("speed=3"))
    assert "batch=32" in check(lambda: read_timing("batch=x"))
    assert "rank_multiple" in check(lambda: rw.allocate(table, rw.Budget(params=0.5), rank_multiple=0))
    assert "never_slower" in check(lambda: rw.allocate(table, rw.Budget(params=0.5), never_slower=3))
    assert "latency" in check(lambda: rw.allocate(table, rw.Budget(params=0.5)).keep("latency"))
    assert read_timing("batch=3, threads=2,layout=channels-last") == Timing(3, 2, "channels-last")
