"""Probes: moments of what flows through layers, and the model left as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rankwise as rw
from rankwise.calibration import activations
from rankwise.calibration.activations import (
    Moments,
    input_moments,
    output_moments,
    patches,
    patches_at,
    pooled_patches,
)
from rankwise.core.layer import canonical
from strategies import CONVS, LINEAR, Case, cases


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    offset=st.sampled_from([0.0, 1e6]),
    seed=st.integers(0, 99),
)
def test_batches_add_up_to_the_whole(sizes: list[int], offset: float, seed: int) -> None:
    """Batch by batch or at once, also far from zero, where a sum of squares would lose every digit."""
    samples = offset + torch.randn(2, sum(sizes), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    moments = Moments()
    for part in torch.split(samples, sizes, dim=1):
        moments.add(part)
    for group in range(2):
        x = samples[group].numpy()
        assert moments.count == len(x)
        np.testing.assert_allclose(moments.mean[group], x.mean(0), rtol=1e-12)
        np.testing.assert_allclose(moments.covariance[group], np.cov(x.T, bias=True), atol=1e-8)
    squares = (samples.transpose(1, 2) @ samples) / samples.shape[1]
    torch.testing.assert_close(moments.second_moment, squares, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("kind", [*LINEAR, *CONVS])
@settings(max_examples=40)
@given(data=st.data())
def test_outputs_are_the_layer_applied_to_its_inputs(kind: str, data: st.DataObject) -> None:
    """μ_y = W μ_x + b and Σ_y = W Σ_x Wᵀ: only true if patches are cut exactly as the layer cuts them."""
    case: Case = data.draw(cases(kind))
    module, x = case
    model = nn.Sequential(module)
    layers = rw.find_layers(model, x).layers
    if not layers:
        return
    layer = layers[0]
    seen = input_moments(model, [x], layers)[layer.name]
    given_out = output_moments(model, [x], layers)[layer.name]
    matrices = canonical(module.weight.detach(), layer).flatten(2)
    mean = torch.einsum("gfd,gd->gf", matrices, seen.mean).flatten()
    mean = mean + (module.bias.detach() if module.bias is not None else 0)
    assert seen.count == given_out.count
    torch.testing.assert_close(given_out.mean[0], mean, rtol=1e-9, atol=1e-9)
    blocks = matrices @ seen.covariance @ matrices.transpose(1, 2)
    wide = layer.group_filters
    for g, block in enumerate(blocks):
        part = slice(g * wide, (g + 1) * wide)
        torch.testing.assert_close(given_out.covariance[0][part, part], block, rtol=1e-9, atol=1e-9)


def test_data_comes_in_many_shapes() -> None:
    model, x = small(), torch.randn(6, 3, 4, 4)
    layers = rw.find_layers(model, x).layers
    whole = output_moments(model, x, layers)
    for data in ([x[:2], x[2:]], iter([x[:1], x[1:]]), [(x,)], [{"input": x}]):
        again = output_moments(model, data, layers)
        torch.testing.assert_close(again["0"].covariance, whole["0"].covariance)

    class Split:
        """Any object with batches(): the labels are not looked at."""

        def batches(self, size: int) -> Any:
            yield from ((part, None) for part in torch.split(x, 4))

    torch.testing.assert_close(output_moments(model, Split(), layers)["4"].mean, whole["4"].mean)


def test_passes_split_the_memory_and_change_nothing() -> None:
    model, x = small(), torch.randn(6, 3, 4, 4)
    layers = rw.find_layers(model, x).layers
    tight = 2 * 8 * 27**2 / 2**30  # one covariance of the patches at a time, and the linear layer is larger
    with pytest.raises(rw.RankwiseError, match="layer '4' alone"):
        input_moments(model, [x], layers, max_gb=tight)
    enough = 2 * 8 * 64**2 / 2**30
    split = input_moments(model, [x], layers, max_gb=enough)
    whole = input_moments(model, [x], layers)
    for name in whole:
        assert torch.equal(split[name].covariance, whole[name].covariance)
    with pytest.raises(rw.RankwiseError, match="2 passes"):
        input_moments(model, iter([x]), layers, max_gb=enough)


def test_the_model_is_left_as_it_was() -> None:
    model, x = small().train(), torch.randn(6, 3, 4, 4)
    layers = rw.find_layers(model, x).layers
    state = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    output_moments(model, [x], layers)
    for bad in ([torch.zeros(1, 5, 4, 4)], [torch.full((1, 3, 4, 4), torch.nan)], []):
        with pytest.raises(rw.RankwiseError) as caught:
            output_moments(model, bad, layers)
        assert "\n" not in str(caught.value)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())


def test_bad_batches_are_named() -> None:
    model, x = small(), torch.randn(2, 3, 4, 4)
    layers = rw.find_layers(model, x).layers
    nan: Tensor = torch.full((2, 3, 4, 4), torch.nan)
    with pytest.raises(rw.RankwiseError, match="batch 2 gives NaN or infinite values at layer '0'"):
        output_moments(model, [x, nan], layers)
    with pytest.raises(rw.RankwiseError, match="empty"):
        output_moments(model, [], layers)


@pytest.mark.parametrize("kind", CONVS)
@settings(max_examples=40)
@given(data=st.data())
def test_some_patches_are_those_of_all(kind: str, data: st.DataObject) -> None:
    """Few places are cut out one by one, many are gathered, and their mean is taken axis by axis: the same rows."""
    case: Case = data.draw(cases(kind))
    module, x = case
    layers = rw.find_layers(nn.Sequential(module), x).layers
    if not layers:
        return
    layer = layers[0]
    output = module(x).detach()
    whole = patches(layer, x, output)
    inputs = 1 if x.ndim == layer.dims + 1 else len(x)
    by_place = whole.reshape(layer.groups, inputs, -1, whole.shape[-1])
    total = by_place.shape[2]
    count = data.draw(st.integers(1, total))
    spots = torch.randperm(total, generator=torch.Generator().manual_seed(count))[:count].sort()[0]
    for few in (0, 10**6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(activations, "FEW", few)
            some = patches_at(layer, x, spots)
        assert torch.equal(some, by_place[:, :, spots].flatten(1, 2))
    if not layer.transposed:
        torch.testing.assert_close(pooled_patches(layer, x), by_place.mean(2))
