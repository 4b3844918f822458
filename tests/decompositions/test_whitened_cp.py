"""1×1, depthwise, 1×1 in the metric of data: the search follows its own gradient, and curves say what is built."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_laws import layer_of, relative
from test_whitened import cost_of, metric_of, moment_of
from torch import Tensor, nn

import rankwise as rw
from rankwise.core.layer import Layer
from rankwise.decompositions import DECOMPOSITIONS, Sample, Selection, Target, check_option, whitened_cp
from rankwise.decompositions.whitened_cp import Problem, _Search, between, fit, strongest
from rankwise.surgery.pairs import build_pair, factors_of, put_factors_
from sentences import check_sentence
from strategies import cases
from targets import fill

Data = st.DataObject
CP = whitened_cp.DECOMPOSITION


def drawn(kind: str, data: Data) -> tuple[nn.Module, Tensor, Layer]:
    module, x = data.draw(cases(kind).filter(lambda case: whitened_cp.is_possible(layer_of(*case))))
    return module, x, layer_of(module, x)


def problem(filters: int = 6, channels: int = 5, taps: int = 9, seed: int = 0) -> Problem:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    size = channels * taps
    rows, root = normal(3 * size, size), normal(filters, filters)
    return Problem(normal(filters, size), rows.t() @ rows / len(rows), root @ root.t() / filters, taps)


def loss_of(one: Problem, weight: Tensor) -> float:
    gap = one.scaled - (weight if one.root is None else one.root @ weight)
    return float((gap * (gap @ one.moment)).sum())


@pytest.mark.parametrize("kind", ["Conv1d", "Conv2d", "Conv3d"])
def test_full_rank_is_the_same_function(kind: str) -> None:
    @settings(max_examples=10)
    @given(st.data())
    def check(data: Data) -> None:
        module, x, layer = drawn(kind, data)
        option = CP.option(layer)
        rank = CP.full_rank(layer, option)
        pair = build_pair(layer, option, rank, module)
        fill(pair, layer, option, rank, module)
        with torch.no_grad():
            assert relative(pair(x), module(x)) < 1e-4

    check()


def test_the_gradient_is_that_of_the_best_decoder() -> None:
    """By finite differences of the loss, whose decoder is fitted anew at each point."""
    search = _Search(problem(), strongest(problem(), 7))
    loss = search()
    for parameter in (search.encoder, search.kernel):
        slope = parameter.grad
        assert slope is not None
        step = 1e-6 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        expected = float((slope * step).sum())
        with torch.no_grad():
            parameter += step
        assert search() - loss == pytest.approx(expected, rel=1e-3)
        with torch.no_grad():
            parameter -= step
        search()


@pytest.mark.parametrize("rank", [1, 5, 12, 20])
def test_more_steps_are_never_worse_and_far_better_than_the_start(rank: int) -> None:
    one = problem()
    losses = [loss_of(one, fit(one, rank, steps, 1e12).weight) for steps in (1, 10, 60)]
    assert losses[0] >= losses[1] * (1 - 1e-9) >= losses[2] * (1 - 1e-6)
    assert losses[2] < 0.99 * losses[0]


def test_a_kernel_that_is_such_a_sum_is_found_again() -> None:
    random = torch.Generator().manual_seed(3)
    a, b, k = (torch.randn(*shape, generator=random, dtype=torch.float64) for shape in ((8, 4), (4, 6), (4, 9)))
    whole = problem(8, 6)
    one = Problem(a @ (b[:, :, None] * k[:, None]).flatten(1), whole.moment, whole.root, 9)
    assert loss_of(one, fit(one, 4, 200, 1e12).weight) < 1e-4 * loss_of(one, torch.zeros_like(one.weight))


def test_a_curve_is_measured_where_nothing_was_fitted() -> None:
    """At the ranks of the grid it is the error of the fit on one sample, measured by hand on the other."""
    conv = nn.Conv2d(6, 8, 3, padding=1)
    layer = layer_of(conv, torch.zeros(1, 6, 5, 5))
    one, other = (problem(8, 6, seed=seed) for seed in (1, 2))
    assert one.root is not None
    assert other.root is not None
    square = other.root.t() @ other.root
    sample = Sample(one.moment[None], one.root[None], other.moment[None], square[None])
    target = Target(layer, conv.weight, moment=one.moment[None], metric=one.root[None], samples=(sample,))
    option = CP.option(layer)
    curve = CP.score(target, Selection()).given[option]["effect"]
    assert len(curve) == CP.full_rank(layer, option) + 1
    assert np.all(np.diff(curve) <= 0)
    grid = CP.grid(layer, option)
    weight = conv.weight.detach().double().flatten(1)
    fitted = Problem(weight, one.moment, one.root, 9)
    lost = []
    for rank in grid:
        gap = weight - fit(fitted, rank, whitened_cp.SCORED, whitened_cp.WORK[0]).weight
        lost.append(float(torch.einsum("fa,fg,gb,ab->", gap, square, gap, other.moment)))
    np.testing.assert_allclose(curve[grid], np.minimum.accumulate(lost), rtol=1e-6)


def test_between_the_ranks_of_the_grid_logarithms_are_interpolated() -> None:
    curve = between(np.array([16.0, 4.0, 1.0]), [2, 4], 6)
    np.testing.assert_allclose(curve, [16, 8, 4, 2, 1, 1, 1])
    assert between(np.array([1.0, 0.0]), [2], 2)[-1] == 0


@pytest.mark.parametrize("kind", ["Conv1d", "Conv2d"])
def test_what_is_built_has_the_counted_size_and_the_error_of_its_factors(kind: str) -> None:
    """Grouped, strided, dilated; the module's outputs are those of the composed weight."""

    @settings(max_examples=15)
    @given(st.data())
    def check(data: Data) -> None:
        module, _, layer = drawn(kind, data)
        moment, metric = moment_of(data, layer, full=True), metric_of(data, layer)
        option = CP.option(layer)
        rank = data.draw(st.integers(1, CP.full_rank(layer, option)))
        target = Target(layer, module.weight, moment=moment, metric=metric)
        factors = CP.factors(target, option, rank)
        pair = build_pair(layer, option, rank, module)
        put_factors_(pair, factors, layer)
        weights = sum(p.numel() for name, p in pair.named_parameters() if name.endswith("weight"))
        assert weights == layer.groups * rank * (layer.group_channels + math.prod(layer.kernel) + layer.group_filters)
        weight = CP.compose(layer, option, factors.weights)
        whole = cost_of(module.weight.detach().double(), module, layer, moment, metric)
        lost = cost_of(module.weight.detach().double() - weight, module, layer, moment, metric)
        assert lost <= whole * (1 + 1e-6)

    check()


def test_auto_takes_it_where_it_is_better_and_reloads_it(tmp_path: object) -> None:
    """A network whose kernels are such sums: nearly nothing is lost at half of its size."""
    torch.manual_seed(0)
    convs = [nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)]
    for conv in convs:
        a, b, k = torch.randn(16, 24), torch.randn(24, 16), torch.randn(24, 9)
        conv.weight.data = (a @ (b[:, :, None] * k[:, None]).flatten(1)).view_as(conv.weight) / 40
    model = nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    data = torch.randn(64, 16, 8, 8)
    small, plan = rw.compress(model, data[:1], keep=0.5, data=[data])
    assert {choice.decomposition for choice in plan.choices} == {CP.name}
    assert plan.search.measured is not None
    assert plan.search.measured < 0.03
    rw.save(small, plan, str(tmp_path) + "/out")
    with torch.no_grad():
        assert torch.equal(rw.load(str(tmp_path) + "/out", model)(data), small(data))


def test_it_needs_a_kernel() -> None:
    layer = layer_of(nn.Linear(8, 8), torch.zeros(1, 8))
    assert CP.score(Target(layer, torch.zeros(8, 8), moment=torch.eye(8)[None]), Selection()).given == {}
    check_sentence(lambda: check_option(layer, CP.option(layer), "layer 'x'"))
    assert CP.name in DECOMPOSITIONS


def test_a_search_goes_on_from_factors_that_are_near() -> None:
    """Begun with what was built before, a few steps are never behind it, and ahead of as many from nothing."""
    random = torch.Generator().manual_seed(4)
    module = nn.Conv2d(12, 16, 3, padding=1).double()
    layer = layer_of(module, torch.zeros(1, 12, 8, 8, dtype=torch.float64))
    rows = torch.randn(400, 108, generator=random, dtype=torch.float64)
    target = Target(layer, module.weight, moment=(rows.t() @ rows / 400)[None])
    option = CP.option(layer)
    built = CP.factors(target, option, 20)
    pair = build_pair(layer, option, 20, module)
    put_factors_(pair, built, layer)
    read = factors_of(pair)
    for name, weights in built.weights.items():
        assert torch.allclose(read.weights[name][0], weights[0])

    def lost(found: Tensor) -> float:
        gap = (module.weight - found).detach().flatten(1)
        return float((gap @ target.moment[0] * gap).sum()) if target.moment is not None else 0.0

    again = CP.factors(replace(target, start=read), option, 20)
    [one] = whitened_cp._problems(target)
    fresh = fit(one, 20, whitened_cp.SCORED, whitened_cp.WORK[0]).weight.reshape(module.weight.shape)
    before, after = (lost(CP.compose(layer, option, f.weights)) for f in (built, again))
    assert after <= before * 1.0001
    assert after < lost(fresh)
