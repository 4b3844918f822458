"""The laws of docs/math.md for every kind of layer, fold and number of slices, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rankwise as rw
from rankwise.core.fold import all_folds
from rankwise.core.layer import Layer
from rankwise.core.measures import MEASURES
from rankwise.core.option import Cost, Option
from rankwise.decompositions import full_rank
from rankwise.decompositions import spectra as blocks_of
from rankwise.decompositions.slices import factors
from rankwise.decompositions.spectra import spectra
from rankwise.surgery.pairs import build_pair, merge_pair
from strategies import DATA_FREE, KINDS, Case, blocks, cases, every_option, operator_norm, slices
from targets import fill, options_for, unit_cost

EXAMPLES = {"Conv3d": 15, "ConvTranspose3d": 15}
TINY = 1e-9
Data = st.DataObject


def law(check: Callable[[nn.Module, Tensor, Any], None]) -> Callable[[str], None]:
    """A test for every kind of layer that runs `check(module, input, data)` on drawn cases."""

    @pytest.mark.parametrize("kind", KINDS)
    def test(kind: str) -> None:
        @seed(crc32(f"{check.__name__} {kind}".encode()))
        @settings(max_examples=EXAMPLES.get(kind, 40))
        @given(cases(kind), st.data())
        def run(case: Case, data: Data) -> None:
            check(*case, data)

        run()

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


def layer_of(module: nn.Module, x: Tensor | None = None) -> Layer:
    return rw.find_layers(nn.Sequential(module), x).layers[0]


def pair_of(module: nn.Module, layer: Layer, option: Option, rank: int) -> nn.Sequential:
    pair = build_pair(layer, option, rank, module)
    fill(pair, layer, option, rank, module)
    return pair


def macs_of(module: nn.Module, x: Tensor) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops() // 2


def numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def relative(got: Tensor, wanted: Tensor) -> float:
    """‖got − wanted‖ / ‖wanted‖; weights and inputs are of order 1, so outputs far below that count as zero."""
    return float((got - wanted).detach().norm() / wanted.detach().norm().clamp_min(1e-3))


def plan_of(layer: Layer, option: Option, rank: int) -> rw.Plan:
    """A plan written by hand: nothing of the search is involved."""
    cost = Cost(1, None)
    choice = rw.Choice(layer.name, layer.kind, layer.shape, option.fold, option.slices, rank, {}, cost, cost)
    return rw.Plan("", "", rw.Budget(params=1.0), cost, cost, (choice,))


@law
def test_full_rank_is_the_same_function(module: nn.Module, x: Tensor, data: Data) -> None:
    layer = layer_of(module)
    wanted = module(x)
    for option in every_option(layer):
        got = pair_of(module, layer, option, full_rank(layer, option))(x)
        assert got.shape == wanted.shape, option
        assert relative(got, wanted) < TINY, option


@law
def test_pair_is_the_layer_with_the_merged_weight_at_every_rank(module: nn.Module, x: Tensor, data: Data) -> None:
    layer = layer_of(module)
    for option in every_option(layer):
        rank = data.draw(st.integers(1, full_rank(layer, option)))
        pair = pair_of(module, layer, option, rank)
        dense = merge_pair(pair)
        assert type(dense) is type(module)
        assert dense.extra_repr() == module.extra_repr()
        assert {k: v for k, v in vars(dense).items() if k[0] != "_"} == {
            k: v for k, v in vars(module).items() if k[0] != "_"
        }
        assert [(n, p.shape) for n, p in dense.named_parameters()] == [
            (n, p.shape) for n, p in module.named_parameters()
        ]
        assert relative(dense(x), pair(x)) < TINY, option


@law
def test_merging_works_for_any_weights_in_the_pair(module: nn.Module, x: Tensor, data: Data) -> None:
    """It must hold after training too, when the factors are no longer those of an SVD."""
    layer = layer_of(module)
    for option in every_option(layer):
        pair = pair_of(module, layer, option, 1)
        generator = torch.Generator().manual_seed(1)
        for p in pair.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        assert relative(merge_pair(pair)(x), pair(x)) < TINY, option


@law
def test_errors_are_what_they_say(module: nn.Module, x: Tensor, data: Data) -> None:
    """Realised by a built pair, folded by numpy: max ≤ exact = realised ≤ rss ≤ bound; energy is Frobenius."""
    model = nn.Sequential(module)
    option = data.draw(st.sampled_from(every_option(layer_of(module))))
    table = rw.build_table(model, folds=option.fold, groups=option.slices)
    (layer,) = table.coverage.layers
    assert table.options(layer) == [option]
    rank = data.draw(st.integers(1, full_rank(layer, option)))
    small = rw.apply_plan(model, plan_of(layer, option, rank))
    rest = module.weight - rw.densify(small)[0].weight
    norm = operator_norm(module.weight, module, option)
    realised = operator_norm(rest, module, option) / norm if norm else 0.0
    error = {m: table.curve(layer, option, m)[rank] for m in MEASURES}
    assert error["exact"] == pytest.approx(realised, abs=1e-6)
    assert error["max"] <= realised + 1e-6
    assert realised <= error["rss"] + 1e-6
    assert error["rss"] <= error["bound"] * (1 + 1e-12)
    assert error["bound"] == pytest.approx(math.sqrt(option.slices) * error["max"])
    energy = float((rest.square().sum() / module.weight.square().sum()).detach()) if norm else 0.0
    assert error["energy"] == pytest.approx(energy, abs=1e-9)
    if option.slices == 1:
        assert [error[m] for m in ("bound", "rss", "max")] == pytest.approx([error["exact"]] * 3, abs=1e-6)


@law
def test_every_curve_falls_from_the_zero_matrix_to_nothing(module: nn.Module, x: Tensor, data: Data) -> None:
    table = rw.build_table(nn.Sequential(module), groups="any")
    (layer,) = table.coverage.layers
    for option in table.options(layer):
        for measure in MEASURES:
            curve = table.curve(layer, option, measure).values()
            assert len(curve) == full_rank(layer, option) + 1
            assert curve[-1] == 0
            assert np.all(np.diff(curve) <= 1e-12), (option, measure)
            if measure in ("exact", "energy") and module.weight.any():
                assert curve[0] == pytest.approx(1)


@law
def test_counted_params_and_macs_are_those_of_torch(module: nn.Module, x: Tensor, data: Data) -> None:
    layer = layer_of(module, x)
    bias = 0 if module.bias is None else module.bias.numel()
    assert layer.params == numel(module) - bias
    assert layer.macs == macs_of(module, x)
    for option in every_option(layer):
        unit = unit_cost(layer, option)
        for rank in {1, full_rank(layer, option)}:
            pair = build_pair(layer, option, rank, module)
            assert rank * unit.params == numel(pair) - bias, option
            assert rank * unit.macs == macs_of(pair, x), option


@law
def test_offered_options_are_each_matrix_once_with_the_fewest_macs(module: nn.Module, x: Tensor, data: Data) -> None:
    layer = layer_of(module, x)
    offered = options_for(layer, "all", "any")
    assert len(offered) == len(set(offered))

    def matrix(option: Option) -> tuple[int, str]:
        axes = zip("dhw"[3 - layer.dims :], layer.kernel, strict=True)
        left = option.fold.split("│")[0]
        return option.slices, "".join(a for a, k in axes if k > 1 and a in left)

    best = {}
    for option in every_option(layer):
        macs = unit_cost(layer, option).macs
        if option.slices == 1:
            best[matrix(option)[1]] = min(macs, best.get(matrix(option)[1], macs))
    assert sorted(map(matrix, offered)) == sorted({matrix(o) for o in every_option(layer)})
    for option in offered:
        if option.slices == 1:
            assert unit_cost(layer, option).macs == best[matrix(option)[1]]


@law
def test_spectra_are_the_singular_values_of_the_slices(module: nn.Module, x: Tensor, data: Data) -> None:
    layer = layer_of(module)
    ks = sorted({option.slices for option in every_option(layer)})
    together = {fold: spectra(module.weight, layer, fold, ks) for fold in all_folds(layer.dims)}
    for option in every_option(layer):
        got = together[option.fold][option.slices]
        alone = spectra(module.weight, layer, option.fold, [option.slices])[option.slices]
        np.testing.assert_allclose(got, alone, atol=1e-6 * max(1e-12, got.max()), rtol=0)
        assert got.shape == (layer.groups, option.slices, full_rank(layer, option) + 1)
        for g, block in enumerate(blocks(module.weight, module)):
            matrices = slices(block, option)
            assert len(matrices) == option.slices
            for i, matrix in enumerate(matrices):
                wanted = torch.linalg.svdvals(torch.from_numpy(matrix)).numpy()
                tail = np.zeros(got.shape[-1] - len(wanted))
                np.testing.assert_allclose(got[g, i], [*wanted, *tail], atol=1e-6 * max(1e-12, wanted[0]), rtol=0)


@law
def test_factors_are_the_best_of_their_rank(module: nn.Module, x: Tensor, data: Data) -> None:
    """Eckart and Young: what rank j misses is the first singular value that it drops."""
    layer = layer_of(module)
    for option in every_option(layer):
        left, right = factors(module.weight, layer, option)
        assert left.shape[:2] == right.shape[:2] == (layer.groups, option.slices)
        assert left.shape[3] == right.shape[2] == full_rank(layer, option)
        for g, block in enumerate(blocks(module.weight, module)):
            for i, matrix in enumerate(slices(block, option)):
                u, v = left[g, i].numpy(), right[g, i, :, : matrix.shape[1]].numpy()
                sigma = np.append(np.linalg.svd(matrix, compute_uv=False), np.zeros(u.shape[1]))
                top = max(1e-12, sigma[0])
                np.testing.assert_allclose(u @ v, matrix, atol=1e-9 * top)
                solid = sigma[: u.shape[1]] > 1e-5 * top
                np.testing.assert_allclose(u[:, solid].T @ u[:, solid], np.eye(solid.sum()), atol=1e-6)
                for j in range(u.shape[1] + 1):
                    missed = np.linalg.norm(matrix - u[:, :j] @ v[:j], 2)
                    assert missed == pytest.approx(sigma[j], abs=1e-6 * top)


@law
def test_factors_have_canonical_signs(module: nn.Module, x: Tensor, data: Data) -> None:
    """The largest entry of a left vector is positive, so turning the weight round turns only the right ones."""
    layer = layer_of(module)
    for option in every_option(layer):
        left, right = factors(module.weight, layer, option)
        assert torch.all(left.amax(dim=2) >= -left.amin(dim=2))
        again = factors(module.weight.clone(), layer, option)
        assert torch.equal(left, again[0])
        assert torch.equal(right, again[1])
        other = factors(-module.weight, layer, option)
        torch.testing.assert_close(other[0] @ other[1], -(left @ right), rtol=0, atol=1e-9)


@law
def test_first_ranks_of_a_larger_pair_are_the_smaller_pair(module: nn.Module, x: Tensor, data: Data) -> None:
    layer = layer_of(module)
    for option in every_option(layer):
        most = full_rank(layer, option)
        whole, part = factors(module.weight, layer, option), factors(module.weight, layer, option, (most + 1) // 2)
        assert torch.equal(whole[0][..., : (most + 1) // 2], part[0])
        assert torch.equal(whole[1][..., : (most + 1) // 2, :], part[1])


@law
def test_compress_keeps_its_word(module: nn.Module, x: Tensor, data: Data) -> None:
    """End to end: within the budget, counts as torch counts, the way back gives the same outputs."""
    keep, method = data.draw(st.floats(0.3, 1)), data.draw(st.sampled_from(DATA_FREE))
    model = nn.Sequential(module, nn.ReLU())
    try:
        small, plan = rw.compress(model, x, method=method, keep=keep, error="exact")
    except rw.RankwiseError as err:
        assert "the least possible is" in str(err)  # noqa: PT017
        return
    assert plan.after.params == numel(small) <= keep * numel(model)
    assert plan.after.macs == macs_of(small, x)
    assert plan.before == Cost(numel(model), macs_of(model, x))
    dense = rw.densify(small)
    assert [p.shape for p in dense.parameters()] == [p.shape for p in model.parameters()]
    assert relative(dense(x), small(x)) < TINY
    for choice in plan.choices:
        rest = module.weight - dense[0].weight
        norm = operator_norm(module.weight, module, choice.option)
        realised = operator_norm(rest, module, choice.option) / norm if norm else 0.0
        assert choice.error["exact"] == pytest.approx(realised, abs=1e-6)


def test_blocks_and_other_drivers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight too large to be copied whole, and a matrix for which eigh does not converge, by their own ways."""
    torch.manual_seed(0)
    module = nn.Conv2d(6, 5, 3, dtype=torch.float64)
    layer = layer_of(module)

    def everything() -> list[Tensor]:
        found = []
        for option in every_option(layer):
            found += [torch.from_numpy(spectra(module.weight, layer, option.fold, [option.slices])[option.slices])]
            found += [torch.matmul(*factors(module.weight, layer, option, 2))]
        return found

    def diverge(*args: Any) -> Any:
        raise torch.linalg.LinAlgError("did not converge")

    wanted = everything()
    monkeypatch.setattr(blocks_of, "BLOCK", 7)
    torch.testing.assert_close(everything(), wanted, rtol=0, atol=1e-7)
    monkeypatch.setattr(torch.linalg, "eigh", diverge)
    monkeypatch.setattr(torch.linalg, "eigvalsh", diverge)
    torch.testing.assert_close(everything(), wanted, rtol=0, atol=1e-7)


def test_memory_layout_changes_nothing() -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(6, 5, 3, dtype=torch.float64)
    layer = layer_of(module)
    other = nn.Conv2d(6, 5, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    other.load_state_dict(module.state_dict())
    assert not other.weight.is_contiguous()
    x = torch.randn(2, 6, 7, 7, dtype=torch.float64)
    for option in every_option(layer):
        pair = pair_of(other, layer, option, min(3, full_rank(layer, option)))
        wanted = pair_of(module, layer, option, min(3, full_rank(layer, option)))
        torch.testing.assert_close(pair(x.to(memory_format=torch.channels_last)), wanted(x), rtol=0, atol=TINY)
        assert relative(merge_pair(pair)(x), wanted(x)) < TINY
