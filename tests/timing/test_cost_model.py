"""What was timed says what everything else takes: predictions beside a clock whose truth is known. No real clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.core.option import Option
from rankwise.core.parts import Part
from rankwise.core.slicing import divisors
from rankwise.decompositions import DECOMPOSITIONS, PLAIN, Decomposition, Factors, Scores, Selection, Target, costs, of
from rankwise.planning.times import MARGIN, Times
from rankwise.surgery.pairs import build_pair
from rankwise.timing import cost_model
from rankwise.timing.candidates import candidates, kinds, some_slices
from rankwise.timing.clock import Timing
from rankwise.timing.cost_model import measure_times

EXAMPLE = torch.randn(1, 24, 6, 6)
QUICK = Timing(repeats=1, warmup=0)
BESIDE = 1e-4
Rate = Callable[[nn.Module, int], float]  # of a layer in what stands in for one, which has so many parts


class Still(nn.Module):
    """Layers of all kinds whose outputs are as large as their inputs, so that macs are weights times positions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(24, 48, 3, padding=1), nn.Conv2d(48, 64, 3, padding=1)
        self.three, self.four = nn.Conv2d(64, 64, 3, padding=1, groups=2), nn.Conv2d(64, 30, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.four(self.three(self.two(self.one(x))))
        return out


def by_groups(module: nn.Module, _: int) -> float:
    """Groups are slow, as they are on most machines: the more the slower."""
    return float(1.0 + 0.25 * np.log2(getattr(module, "groups", 1)))


def truth(module: nn.Module, rate: Rate) -> float:
    """Seconds: some for each part, and some for each multiply-add."""
    parts = list(module) if isinstance(module, nn.Sequential) else [module]
    seconds = 0.0
    for part in parts:
        weight = getattr(part, "weight", None)
        seconds += 2e-6 + (0 if weight is None else weight.numel() * 36 * 1e-9 * rate(part, len(parts)))
    return seconds


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Still().eval()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Times]]:
    """Measures a network with a clock that tells the truth, whatever this machine does."""

    def use(rate: Rate, model: nn.Module, seconds: float = 60.0) -> Times:
        def split(network: nn.Module, names: Any) -> Any:
            return BESIDE, {name: truth(network.get_submodule(name), rate) for name in names}

        monkeypatch.setattr(cost_model, "split_once", lambda network, _, names: split(network, names))
        monkeypatch.setattr(
            cost_model, "split_seconds", lambda networks, names, _: [split(one, names) for one, _ in networks]
        )
        monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path / str(len(list(tmp_path.iterdir())))))
        return measure_times(model, EXAMPLE, QUICK, seconds=seconds)

    return use


def real(layer: rw.Layer, option: Option, rank: int, model: nn.Module, rate: Rate) -> float:
    return truth(build_pair(layer, option, rank, model.get_submodule(layer.name)), rate)


def ranks_of(layer: rw.Layer, option: Option) -> list[int]:
    """Ranks with fewer macs than the layer that are no part of a larger block of channels."""
    macs = costs(layer, option)[1]
    assert macs is not None
    most = int(macs.searchsorted(layer.macs)) - 1
    return [r for r in range(1, most + 1) if r <= 8 or r % 8 == 0]


# ---- predictions -----------------------------------------------------------------------------------------


def test_all_slices_are_predicted(model: nn.Module, timed: Callable[..., Times]) -> None:
    times, seen = timed(by_groups, model), 0
    for layer in rw.find_layers(model, EXAMPLE).layers:
        for option in PLAIN.options(layer, Selection()):
            found = times.by_rank(layer, option)
            assert found is not None, (layer.name, option)
            assert (np.diff(found) >= 0).all()
            looked_at = {
                key[2]: len(value[0]) for key, value in times.pairs.items() if key[:2] == (layer.name, option.fold)
            }
            near = [
                max(k for k in looked_at if k <= option.slices),
                *sorted(k for k in looked_at if k >= option.slices)[:1],
            ]
            hopeless = len(near) < 2 or min(looked_at[k] for k in near) == 1
            for rank in ranks_of(layer, option):
                exact = 1e9 * real(layer, option, rank, model, by_groups)
                assert found[rank] >= 0.8 * exact, (layer.name, option, rank)
                if exact < 1.1 * times.dense(layer.name) and not hopeless:
                    assert found[rank] <= 1.2 * exact, (layer.name, option, rank)
                    seen += (layer.name, option.fold, option.slices) not in times.pairs
    assert seen > 100  # 3, 6, 12 slices and others that nobody timed


def test_padded_slices_are_not_taken_to_be_free(model: nn.Module, timed: Callable[..., Times]) -> None:
    times = timed(by_groups, model)
    layer = rw.find_layers(model, EXAMPLE).layers[1]
    for option in PLAIN.options(layer, Selection(slices="any")):
        found = times.by_rank(layer, option)
        assert found is not None
        assert (np.diff(found) >= 0).all()
        if layer.channels % option.slices:
            for rank in ranks_of(layer, option)[:8]:
                assert found[rank] >= 0.95e9 * real(layer, option, rank, model, by_groups)


@pytest.mark.parametrize("name", ["tucker2", "whitened-tucker2"])
def test_all_cores_are_predicted(name: str, model: nn.Module, timed: Callable[..., Times]) -> None:
    times, seen = timed(by_groups, model), 0
    *spatial, pointwise = rw.find_layers(model, EXAMPLE).layers
    for layer in spatial:
        for outer in range(1, DECOMPOSITIONS[name].outers(layer) + 1):
            option = Option("f│chw", 1, name, outer)
            found = times.by_rank(layer, option)
            assert found is not None
            assert (np.diff(found) >= 0).all()
            for rank in ranks_of(layer, option) if outer <= 8 or outer % 8 == 0 else ():
                exact = 1e9 * real(layer, option, rank, model, by_groups)
                assert found[rank] >= 0.99 * exact
                if 9 * outer >= layer.group_channels:  # below that, some ranks are more than full
                    assert found[rank] == pytest.approx(exact, rel=0.2), (layer.name, outer, rank)
                seen += ((layer.name, "core", outer)) not in times.others
    assert seen > 100
    assert times.by_rank(pointwise, Option("f│chw", 1, "tucker2", 3)) is None  # there is no core without taps


class Chain(Decomposition):
    """1×1, k×1 and 1×k for each channel on its own, 1×1: what a CP decomposition would be."""

    name = "chain"
    about = "of a test"
    timed_as = "chain"

    def full_rank(self, layer: rw.Layer, option: Option) -> int:
        return layer.filters * 3

    def parts(self, layer: rw.Layer, option: Option, rank: Any) -> tuple[Part, ...]:
        return (
            Part("first", (), layer.channels, rank),
            Part("high", (0,), rank, rank, rank),
            Part("wide", (1,), rank, rank, rank),
            Part("last", (), rank, layer.filters),
        )

    def wanted(self, layer: rw.Layer, there: list[Option], selection: Selection) -> list[Option]:
        return super().wanted(layer, there, selection) if layer.groups == 1 and layer.kernel == (3, 3) else []

    def score(self, target: Target, selection: Selection) -> Scores:
        return Scores()

    def factors(self, target: Target, option: Option, rank: int) -> Factors:
        return Factors({})


def test_a_decomposition_of_other_parts_is_timed_too(
    model: nn.Module, timed: Callable[..., Times], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = kinds()
    monkeypatch.setitem(DECOMPOSITIONS, "chain", Chain())
    assert set(kinds()) - set(before) == {"chain"}

    def even(module: nn.Module, parts: int) -> float:
        return 1.0

    times = timed(even, model)
    assert {name for name, kind, _ in times.others if kind == "chain"} == {"one", "two"}
    for layer in rw.find_layers(model, EXAMPLE).layers[:2]:
        option = Option("f│chw", 1, "chain")
        found = times.by_rank(layer, option)
        assert found is not None
        assert (np.diff(found) >= 0).all()
        for rank in ranks_of(layer, option):
            assert found[rank] == pytest.approx(1e9 * real(layer, option, rank, model, even), rel=0.2)


def test_measurements_of_fewer_decompositions_are_not_taken_for_all(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure_times(model, EXAMPLE, QUICK, cache=tmp_path, seconds=0.1)
    monkeypatch.setitem(DECOMPOSITIONS, "chain", Chain())
    again = measure_times(model, EXAMPLE, QUICK, cache=tmp_path, seconds=0.5)
    assert "chain" in {kind for _, kind, _ in again.others}


def test_every_kind_is_timed_however_short_the_time_is(model: nn.Module, tmp_path: Path) -> None:
    """On a busy machine as well: what has no times could not be chosen."""
    times = measure_times(model, EXAMPLE, QUICK, cache=tmp_path, seconds=1e-6)
    for layer in rw.find_layers(model, EXAMPLE).layers:
        wanted = {of(option).timed_as for option, _ in candidates(layer)}
        found = {kind for name, kind, _ in times.others if name == layer.name}
        found |= {PLAIN.timed_as for name, _, _ in times.pairs if name == layer.name}
        assert found == wanted
        assert len(candidates(layer)) > len(wanted) > 0, "some are not timed, or the test could not fail"


@pytest.mark.parametrize("channels", [1, 2, 3, 7, 12, 24, 30, 36, 48, 64, 96, 97, 210])
def test_slices_that_are_timed_are_never_far_from_others(channels: int) -> None:
    found = some_slices(channels)
    assert found[0] == 1
    assert found[-1] == channels
    assert set(found) <= set(divisors(channels))
    assert all(b >= 2 * a for a, b in pairwise(found))
    for k in divisors(channels):
        assert any(a <= k < 2 * a for a in found)


def test_few_enough_are_timed(model: nn.Module) -> None:
    """Each is a network that is run three times, and all of them have 100 seconds."""
    for layer in rw.find_layers(model, EXAMPLE).layers:
        found = candidates(layer)
        assert sum(len(ranks) for _, ranks in found) <= 120
        assert [option.slices for option, _ in found] == sorted(option.slices for option, _ in found)
        assert all(ranks == sorted(set(ranks), reverse=True) and ranks[-1] == 1 for _, ranks in found)


def test_out_of_time_the_rest_is_taken_to_be_slow(model: nn.Module, timed: Callable[..., Times]) -> None:
    """One look at each kind, and no more: whatever is not known is not faster than it would be."""
    least = timed(by_groups, model, seconds=1e-9)
    full = timed(by_groups, model)
    assert {ranks for ranks, _ in least.pairs.values()} != {ranks for ranks, _ in full.pairs.values()}
    slices_1 = Times(full.beside, full.layers, {key: value for key, value in full.pairs.items() if key[2] == 1})
    layers = rw.find_layers(model, EXAMPLE).layers
    for layer in layers:
        for option in PLAIN.options(layer, Selection()):
            assert slices_1.by_rank(layer, option) is not None
            for found in (slices_1.by_rank(layer, option), least.by_rank(layer, option)):
                for rank in ranks_of(layer, option) if found is not None else ():
                    assert found[rank] >= 0.95e9 * real(layer, option, rank, model, by_groups)
    nothing = Times(full.beside, full.layers, {})
    assert all(nothing.by_rank(la, o) is None for la in layers for o in PLAIN.options(la, Selection()))


# ---- choices ---------------------------------------------------------------------------------------------


def many_slices(fast: bool) -> Rate:
    """Pairs whose encoder has 8 groups or more are ten times faster than the layer, or slower; others otherwise."""

    def rate(module: nn.Module, parts: int) -> float:
        if parts == 1:
            return 1.0
        return 0.1 if (getattr(module, "groups", 1) >= 8) == fast or getattr(module, "groups", 1) == 1 else 30.0

    return rate


def cores(fast: bool) -> Rate:
    return lambda _, parts: 1.0 if parts == 1 else 0.1 if (parts == 3) == fast else 30.0


def planned(model: nn.Module, keep: float = 0.6, **changes: Any) -> rw.Plan:
    return rw.compress(model, EXAMPLE, keep=keep, never_slower=True, error="energy", timing=QUICK, **changes)[1]


@pytest.mark.parametrize("fast", [True, False])
def test_many_slices_are_chosen_where_they_are_fast(fast: bool, model: nn.Module, timed: Callable[..., Times]) -> None:
    timed(many_slices(fast), model)
    plan = planned(model, exclude=("four",), slices=[6, 8, 12])
    asked = {c.slices for c in plan.choices}
    assert plan.choices
    assert bool(plan.warnings) == bool(plan.search.latency.slower)
    if fast:
        assert min(asked) >= 8
        assert not plan.warnings
    else:
        assert plan.warnings or max(asked) < 8
    with_all = planned(model)
    assert with_all.settings["slices"] == "all"
    assert not with_all.warnings
    if not fast:
        assert all(c.slices < 8 for c in with_all.choices)


@pytest.mark.parametrize("fast", [True, False])
def test_cores_are_chosen_where_they_are_fast(fast: bool, model: nn.Module, timed: Callable[..., Times]) -> None:
    timed(cores(fast), model)
    plan = planned(model, exclude=("four",), decompositions=("svd", "tucker2"))
    assert plan.choices
    assert not plan.warnings
    assert {c.decomposition for c in plan.choices} == {"tucker2" if fast else "svd"}
    layers = plan.search.latency.layers
    assert all(pair < MARGIN * dense for dense, pair in layers.values())


@pytest.mark.parametrize("fast", [True, False])
def test_auto_has_cores_for_never_slower(fast: bool, model: nn.Module, timed: Callable[..., Times]) -> None:
    timed(cores(fast), model)
    images = torch.randn(32, 24, 6, 6, generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"data": [images], "timing": QUICK, "never_slower": True, "exclude": ("four",)}
    plan = rw.compress(model, EXAMPLE, keep=0.6, **how)[1]
    assert plan.choices
    assert plan.settings["slices"] == "all"
    cored = {"whitened-tucker2", "whitened-cp"}  # three parts each
    assert bool(cored & {c.decomposition for c in plan.choices}) == fast


@pytest.mark.parametrize("keep", [0.8, 0.6, 0.4])
def test_a_latency_is_kept_by_prediction_and_nearly_in_truth(
    keep: float, model: nn.Module, timed: Callable[..., Times]
) -> None:
    times = timed(by_groups, model)
    table = rw.build_table(model, EXAMPLE, decompositions=("svd", "tucker2"))
    table.times = times
    plan = rw.allocate(table, rw.Budget(latency=keep), decompositions=("svd", "tucker2"))
    assert plan.choices
    assert plan.keep("latency") <= keep
    by_name = {la.name: la for la in table.coverage.layers}
    took = BESIDE + sum(
        truth(model.get_submodule(n), by_groups) for n in by_name if n not in {c.name for c in plan.choices}
    )
    took += sum(real(by_name[c.name], c.option, c.rank, model, by_groups) for c in plan.choices)
    assert took <= 1.05 * keep * times.total / 1e9
