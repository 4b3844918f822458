"""Factors in the metric of data: the errors are those of the weights that come out, and no decoder is better."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_laws import layer_of, relative
from test_output_error import samples
from torch import Tensor, nn

import rankwise as rw
from rankwise.calibration import activations
from rankwise.core.layer import Layer
from rankwise.core.option import Option
from rankwise.core.slicing import taps
from rankwise.decompositions import Target, full_rank
from rankwise.decompositions.slices import compose, factors, pair_factors, pair_weights
from rankwise.decompositions.whitened import root_of, rough_errors, share_for, shrunk
from rankwise.surgery.pairs import build_pair, merge_pair, put_factors_
from strategies import KINDS, TRANSPOSED, blocks, cases, every_option
from targets import fill, fit

Data = st.DataObject
EXAMPLES = {"Conv3d": 6, "ConvTranspose3d": 6}
FORWARD = [kind for kind in KINDS if kind not in TRANSPOSED]


def law(check: Any) -> Any:
    """A test for every kind of layer that runs `check(kind, data)` on drawn cases."""

    @pytest.mark.parametrize("kind", KINDS)
    def test(kind: str) -> None:
        @settings(max_examples=EXAMPLES.get(kind, 12))
        @given(st.data())
        def run(data: Data) -> None:
            check(kind, data)

        run()

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


def whitened(option: Option) -> Option:
    return Option(option.fold, option.slices, "whitened")


def moment_of(data: Data, layer: Layer, full: bool = False) -> Tensor:
    """Second moments (G, d, d): of many samples, or of few ones, with entries that are always 0."""
    d = activations.patch_size(layer)
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    few = not full and data.draw(st.booleans())
    n = data.draw(st.integers(1, max(1, d - 1))) if few else 3 * d + 5
    x = torch.randn(layer.groups, n, d, generator=random, dtype=torch.float64)
    x = x @ torch.randn(layer.groups, d, d, generator=random, dtype=torch.float64) / d**0.5
    x = x + data.draw(st.sampled_from([0.0, 1.0]))
    if few:
        x = x * (torch.rand(d, generator=random) < 0.8)
    moment = x.transpose(1, 2) @ x / n
    return shrunk(moment, 0.05) if full else moment


def metric_of(data: Data, layer: Layer) -> Tensor:
    """S (G, f, f), a little away from singular."""
    f = layer.group_filters
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    g = torch.randn(layer.groups, f + 2, f, generator=random, dtype=torch.float64)
    return root_of(g.transpose(1, 2) @ g)


def cost_of(delta: Tensor, module: nn.Module, layer: Layer, moment: Tensor, scale: Tensor | None) -> float:
    """E ‖S Δ x‖² in numpy, straight from the definition; every tap of a transposed convolution is an output."""
    total = 0.0
    for g, d in enumerate(blocks(delta, module)):
        s = np.eye(len(d)) if scale is None else scale[g].numpy()
        m = moment[g].numpy()
        parts = np.moveaxis(d.reshape(*d.shape[:2], -1), -1, 0) if layer.transposed else d.reshape(1, len(d), -1)
        total += sum(float(np.trace(s @ p @ m @ p.T @ s.T)) for p in parts)
    return total


def composed(left: Tensor, right: Tensor, layer: Layer, option: Option) -> Tensor:
    return compose(*pair_weights(left, right, layer, option), layer, option)


def drawn(kind: str, data: Data) -> tuple[nn.Module, Tensor, Layer, Option]:
    module, x = data.draw(cases(kind))
    layer = layer_of(module, x)
    return module, x, layer, whitened(data.draw(st.sampled_from(every_option(layer))))


@law
def test_full_rank_is_the_same_function(kind: str, data: Data) -> None:
    """Also where the last slice is narrower, where slices are correlated, and in any metric."""
    module, x, layer, option = drawn(kind, data)
    moment = moment_of(data, layer, full=True)
    metric = data.draw(st.sampled_from([None, metric_of(data, layer)]))
    found = fit(module.weight, layer, option, moment, metric)
    rank = full_rank(layer, option)
    assert found.errors.shape == (rank + 1,)
    pair = build_pair(layer, option, rank, module)
    fill(pair, layer, Option(option.fold, option.slices), rank, module)  # for the bias
    put_factors_(pair, pair_factors(*found.factors(rank), layer, option), layer)
    assert relative(pair(x), module(x)) < 1e-5
    assert found.errors[-1] <= 1e-6 * max(found.errors[0], 1e-12)
    assert relative(merge_pair(pair)(x), pair(x)) < 1e-9


@law
def test_errors_are_those_of_the_weights_that_come_out(kind: str, data: Data) -> None:
    """At every rank, for moments of full rank and singular ones; nothing kept is E ‖S W x‖², and errors fall."""
    module, _, layer, option = drawn(kind, data)
    moment = moment_of(data, layer)
    metric = data.draw(st.sampled_from([None, metric_of(data, layer)]))
    found = fit(module.weight, layer, option, moment, metric)
    weight = module.weight.detach()
    whole = cost_of(weight, module, layer, moment, metric)
    assert found.errors[0] == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert np.all(np.diff(found.errors) <= 0)
    assert found.errors[-1] >= 0
    for rank in range(1, full_rank(layer, option) + 1):
        got = composed(*found.factors(rank), layer, option)
        assert bool(torch.isfinite(got).all())
        error = cost_of(weight - got, module, layer, moment, metric)
        assert error == pytest.approx(found.errors[rank], rel=1e-5, abs=1e-6 * whole + 1e-12), (option, rank)


@law
def test_no_decoder_is_better_for_these_encoders(kind: str, data: Data) -> None:
    module, _, layer, option = drawn(kind, data)
    moment, metric = moment_of(data, layer), metric_of(data, layer)
    found = fit(module.weight, layer, option, moment, metric)
    rank = data.draw(st.integers(1, full_rank(layer, option)))
    left, right = found.factors(rank)
    weight = module.weight.detach()
    whole = cost_of(weight, module, layer, moment, metric)
    best = cost_of(weight - composed(left, right, layer, option), module, layer, moment, metric)
    random = torch.Generator().manual_seed(3)
    for size in (1e-3, 0.1, 1.0):
        step = size * torch.randn(left.shape, generator=random, dtype=left.dtype) * left.abs().mean().clamp_min(1e-3)
        for other in (left + step, left - step):
            error = cost_of(weight - composed(other, right, layer, option), module, layer, moment, metric)
            assert error >= best - 1e-7 * whole - 1e-12


@law
def test_it_is_never_worse_than_an_svd_with_its_decoder_fitted_by_nobody(kind: str, data: Data) -> None:
    """One slice, fold 0: the optimum in closed form, from the singular values of S W M^{1/2}."""
    module, _, layer, option = drawn(kind, data)
    option = whitened(every_option(layer)[0])
    assert option.slices == 1
    assume(not layer.transposed or all(k == 1 for k in layer.kernel))  # otherwise all taps share one encoder
    moment, metric = moment_of(data, layer), metric_of(data, layer)
    found = fit(module.weight, layer, option, moment, metric)
    weight = module.weight.detach()
    best = np.zeros(full_rank(layer, option) + 1)
    for g, block in enumerate(blocks(weight, module)):
        values, vectors = np.linalg.eigh(moment[g].numpy())
        root = vectors * np.sqrt(values.clip(0))
        sigma = np.linalg.svd(metric[g].numpy() @ block.reshape(len(block), -1) @ root, compute_uv=False)
        energy = np.append(np.cumsum(sigma[::-1] ** 2)[::-1], 0.0)
        best += np.append(energy, np.zeros(len(best)))[: len(best)]
    np.testing.assert_allclose(found.errors, best, rtol=1e-5, atol=1e-5 * max(best[0], 1e-12))
    plain = Option(option.fold, 1)
    for rank in range(1, full_rank(layer, option) + 1):
        other = composed(*factors(weight, layer, plain, rank), layer, plain)
        error = cost_of(weight - other, module, layer, moment, metric)
        assert found.errors[rank] <= error + 1e-5 * best[0] + 1e-12


@law
def test_with_white_inputs_and_outputs_it_is_the_svd(kind: str, data: Data) -> None:
    """Every fold and number of slices: M = 1 and S = 1 leave ‖W − Ŵ‖²_F, and slices know nothing of each other."""
    module, _, layer, option = drawn(kind, data)
    d = activations.patch_size(layer)
    moment = torch.eye(d, dtype=torch.float64).expand(layer.groups, d, d)
    found = fit(module.weight, layer, option, moment)
    table = rw.build_table(nn.Sequential(module), folds=option.fold, groups=option.slices)
    (own,) = table.options(table.coverage.layers[0])
    residual = table.curve(table.coverage.layers[0], own, "residual").values()
    np.testing.assert_allclose(found.errors, residual, rtol=1e-6, atol=1e-7 * max(residual[0], 1e-12))


@law
def test_rough_errors_are_exact_where_nothing_is_correlated(kind: str, data: Data) -> None:
    """White inputs, or one slice whose decoder owns no taps."""
    module, _, layer, option = drawn(kind, data)
    d = activations.patch_size(layer)
    alone = option.slices == 1 and taps(layer, option.fold)[0] == 1
    white = torch.eye(d, dtype=torch.float64).expand(layer.groups, d, d)
    moment, metric = moment_of(data, layer, full=True) if alone else white, metric_of(data, layer)
    wanted = fit(module.weight, layer, option, moment, metric).errors
    found = rough_errors(Target(layer, module.weight, moment=moment, metric=metric), option)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * max(wanted[0], 1e-12))


@law
def test_the_first_ranks_are_the_same_without_the_others(kind: str, data: Data) -> None:
    module, _, layer, option = drawn(kind, data)
    moment, metric = moment_of(data, layer, full=True), metric_of(data, layer)
    most = data.draw(st.integers(1, full_rank(layer, option)))
    whole, some = (fit(module.weight, layer, option, moment, metric, n) for n in (None, most))
    assert len(some.errors) == most + 1
    scale = max(whole.errors[0], 1e-12)
    np.testing.assert_allclose(some.errors, whole.errors[: most + 1], rtol=1e-6, atol=1e-6 * scale)
    for rank in {1, most}:
        one, other = (composed(*f.factors(rank), layer, option) for f in (whole, some))
        gap = cost_of(one - other, module, layer, moment, metric)
        assert gap <= 1e-6 * scale


@pytest.mark.parametrize("kind", FORWARD)
@settings(max_examples=15)
@given(data=st.data())
def test_errors_are_what_happens_when_the_pair_runs(kind: str, data: Data) -> None:
    """E ‖S (y − ŷ)‖² by running the module and the built pair on the samples that the moments were taken of."""
    module, x, layer, option = drawn(kind, data)
    seen = activations.input_moments(nn.Sequential(module), [x], [layer])[layer.name]
    metric = metric_of(data, layer)
    found = fit(module.weight, layer, option, seen.second_moment, metric)
    rank = data.draw(st.integers(1, full_rank(layer, option)))
    pair = build_pair(layer, option, rank, module)
    fill(pair, layer, Option(option.fold, option.slices), rank, module)
    put_factors_(pair, pair_factors(*found.factors(rank), layer, option), layer)
    gap = (samples(module(x), layer) - samples(pair(x), layer)).reshape(seen.count, layer.groups, -1)
    error = float(np.square(np.einsum("gij,ngj->ngi", metric.numpy(), gap)).sum() / seen.count)
    assert error == pytest.approx(found.errors[rank], rel=1e-4, abs=1e-6 * found.errors[0] + 1e-12)


# ---- what is hard ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_see_and_nothing_to_do_are_finite(kind: str) -> None:
    """Zero moments, zero weights, zero metrics, one sample: finite factors and errors."""

    @settings(max_examples=6)
    @given(cases(kind))
    def run(case: Any) -> None:
        module, _ = case
        layer = layer_of(module)
        d, f = activations.patch_size(layer), layer.group_filters
        one = torch.randn(layer.groups, d, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        moments = {"none": torch.zeros(layer.groups, d, d, dtype=torch.float64), "one": one @ one.transpose(1, 2)}
        nothing = torch.zeros(layer.groups, f, f, dtype=torch.float64)
        for weight in (module.weight.detach(), torch.zeros_like(module.weight)):
            for moment in moments.values():
                for metric in (None, nothing):
                    for option in map(whitened, every_option(layer)[:3]):
                        found = fit(weight, layer, option, moment, metric)
                        assert np.isfinite(found.errors).all()
                        for rank in (1, full_rank(layer, option)):
                            assert all(bool(torch.isfinite(t).all()) for t in found.factors(rank))
                            parts = pair_weights(*found.factors(rank), layer, option)
                            assert all(bool(torch.isfinite(p.float()).all()) for p in parts)

    run()


@pytest.mark.parametrize("size", [1e-12, 1e-4, 1e6, 1e12])
def test_units_do_not_matter(size: float) -> None:
    """Inputs, weights and metrics in other units: the same errors in those units."""
    torch.manual_seed(0)
    module = nn.Conv2d(6, 5, 3).double()
    layer = layer_of(module)
    x = torch.randn(1, 200, 54, dtype=torch.float64)
    moment = x.transpose(1, 2) @ x / 200
    metric = root_of(torch.eye(5, dtype=torch.float64)[None] + 0.3)
    for option in map(whitened, every_option(layer)):
        plain = fit(module.weight, layer, option, moment, metric).errors
        for weight, m, s in (
            (module.weight * size, moment, metric),
            (module.weight, moment * size**2, metric),
            (module.weight, moment, metric * size),
        ):
            got = fit(weight, layer, option, m, s).errors / size**2
            np.testing.assert_allclose(got, plain, rtol=1e-6, atol=1e-7 * plain[0])


def test_correlated_slices_help_each_other() -> None:
    """Channels 0–3 repeated as 4–7: two slices of rank 2 see four directions, all that there are."""
    torch.manual_seed(0)
    half = torch.randn(500, 4, dtype=torch.float64)
    x = torch.cat([half, half @ torch.randn(4, 4, dtype=torch.float64)], dim=1)
    module = nn.Linear(8, 8, bias=False).double()
    layer = layer_of(module)
    moment = (x.t() @ x / 500)[None]
    found = fit(module.weight, layer, Option("f│c", 2, "whitened"), moment)
    assert found.errors[2] < 1e-4 * found.errors[0]


def test_shrinking_keeps_the_mean_variance() -> None:
    x = torch.randn(2, 30, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moment = x.transpose(1, 2) @ x
    for share in (0.0, 0.2, 1.0):
        got = shrunk(moment, share)
        torch.testing.assert_close(got.diagonal(dim1=1, dim2=2).sum(1), moment.diagonal(dim1=1, dim2=2).sum(1))
    torch.testing.assert_close(shrunk(moment, 0.0), moment)
    mean = moment.diagonal(dim1=1, dim2=2).mean(1)
    torch.testing.assert_close(shrunk(moment, 1.0), mean[:, None, None] * torch.eye(6, dtype=torch.float64))
    assert share_for(0, 5) == 1
    assert share_for(5, 5) == 0.5
    assert share_for(10**9, 5) < 1e-8


def test_the_root_of_a_metric_is_its_root() -> None:
    x = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    metric = x.transpose(1, 2) @ x  # singular
    root = root_of(metric)
    torch.testing.assert_close(root.transpose(1, 2) @ root, shrunk(metric, 1e-3))
    assert bool(torch.isfinite(torch.linalg.inv(root)).all())
