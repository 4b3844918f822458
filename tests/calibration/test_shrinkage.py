"""Held-out errors and the shrinkage they choose: what is stated is what new inputs say, and fitting never loses."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_laws import layer_of
from torch import Tensor, nn

import rankwise as rw
from rankwise.calibration.inputs import CALIBRATION, FEWEST, Inputs, samples_in
from rankwise.calibration.output_metric import influences
from rankwise.calibration.shrinkage import choose_shares_, target_for, target_of_both
from rankwise.core.layer import Layer, canonical
from rankwise.core.option import Option
from rankwise.decompositions import Sample, Target, of
from rankwise.decompositions.held_out import leading, plain_errors, trailing
from rankwise.decompositions.whitened import measured_errors, root_of, shrunk
from rankwise.decompositions.whitened_tucker import sample_errors


def spd(size: int, seed: int, groups: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(groups, 3 * size, size, generator=random, dtype=torch.float64)
    return rows.mT @ rows / (3 * size)


def samples_for(layer: Layer) -> tuple[Sample, Sample]:
    """Two sets of inputs that differ."""
    f, d, groups = layer.group_filters, layer.group_channels * int(np.prod(layer.kernel or (1,))), layer.groups
    one, other = (spd(d, seed, groups) for seed in (1, 2))
    metrics = [spd(f, seed, groups) for seed in (3, 4)]
    return (
        Sample(shrunk(one, 0.1), root_of(metrics[0], 0.2), other, metrics[1]),
        Sample(shrunk(other, 0.1), root_of(metrics[1], 0.2), one, metrics[0]),
    )


def lost_on(sample: Sample, gap: Tensor, layer: Layer) -> float:
    """tr(G' Δ M' Δᵀ), straight from the definition."""
    rows = canonical(gap, layer).flatten(2).double()
    assert sample.test_metric is not None
    return float(torch.einsum("gef,gfa,gab,geb->", sample.test_metric, rows, sample.test_moment, rows))


LAYERS = [
    (nn.Linear(10, 7), "f│c", 1),
    (nn.Linear(6, 11), "f│c", 1),
    (nn.Linear(12, 8), "f│c", 3),
    (nn.Conv2d(6, 5, 3), "f│chw", 1),
    (nn.Conv2d(6, 5, 3), "f│chw", 6),
    (nn.Conv2d(6, 5, 3), "fh│cw", 2),
    (nn.Conv2d(4, 8, 3), "fhw│c", 1),
    (nn.Conv2d(8, 8, 3, groups=2), "fw│ch", 2),
]


@pytest.mark.parametrize(("module", "fold", "slices"), LAYERS, ids=lambda value: str(value)[:30])
def test_held_out_errors_are_those_of_the_factors_on_the_other_inputs(
    module: nn.Module, fold: str, slices: int
) -> None:
    """Every rank: factors are built on one set of inputs and measured with the moments of the other, by definition."""
    layer = layer_of(module)
    option = Option(fold, slices, "whitened")
    weight = module.weight.detach()
    samples = samples_for(layer)
    target = Target(layer, weight, moment=samples[0].moment, metric=samples[0].metric, samples=samples)
    most = of(option).full_rank(layer, option)
    wanted = np.zeros(most + 1)
    for sample in samples:
        fitting = Target(layer, weight, moment=sample.moment, metric=sample.metric)
        wanted[0] += lost_on(sample, weight, layer) / 2
        for rank in range(1, most + 1):
            got = of(option).approximation(fitting, option, rank)
            wanted[rank] += lost_on(sample, weight.double() - got, layer) / 2
    wanted = np.minimum.accumulate(wanted)
    np.testing.assert_allclose(measured_errors(target, option, most), wanted, rtol=1e-4, atol=1e-6 * wanted[0])


def test_held_out_errors_of_a_core_are_those_of_its_factors() -> None:
    """At the first step of the fit, before directions and encoders are found in turns."""
    module = nn.Conv2d(6, 8, 3)
    layer, weight = layer_of(module), module.weight.detach()
    sample = samples_for(layer)[0]
    target = Target(layer, weight, moment=sample.moment, metric=sample.metric)
    found = sample_errors(target, sample)
    assert found.shape == (9, 7)
    assert found[0] == pytest.approx(lost_on(sample, weight, layer))
    full = of(Option("f│chw", 1, "whitened-tucker2", outer=8))
    gap = weight.double() - full.approximation(target, Option("f│chw", 1, "whitened-tucker2", outer=8), 6)
    assert found[8, 6] == pytest.approx(lost_on(sample, gap, layer), rel=1e-3, abs=1e-5 * float(found[0, 0]))
    assert found[8, 6] < found[4, 3] < found[0, 0]


def test_plain_errors_are_those_of_the_svd() -> None:
    for module in (nn.Linear(10, 7), nn.Linear(6, 11), nn.Conv2d(6, 5, 3)):
        layer, weight = layer_of(module), module.weight.detach()
        sample = samples_for(layer)[0]
        found = plain_errors(weight, layer, sample.test_moment, sample.test_metric)
        option = Option("f│c" if not layer.dims else "f│chw", 1)
        for rank in range(1, len(found)):
            got = of(option).approximation(Target(layer, weight), option, rank)
            wanted = lost_on(sample, weight.double() - got, layer)
            assert found[rank] == pytest.approx(wanted, rel=1e-5, abs=1e-8 * float(found[0]))


def test_blocks_are_summed_from_both_ends() -> None:
    products = spd(6, 0)[0]
    assert leading(products)[4] == pytest.approx(float(products[:4, :4].sum()))
    assert trailing(products)[4] == pytest.approx(float(products[4:, 4:].sum()))
    assert leading(products)[0] == trailing(products)[6] == 0


# ---- few samples in many dimensions -----------------------------------------------------------------------


class Wide(nn.Module):
    """A wide layer with a spectrum that falls, as trained ones have, and outputs that mix what it gives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 20)
        with torch.no_grad():
            left, values, right = torch.linalg.svd(self.first.weight)
            self.first.weight.copy_(left @ torch.diag(torch.arange(1.0, width + 1) ** -0.7) @ right * values[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def images(count: int, width: int, seed: int) -> Tensor:
    """Inputs whose variance falls slowly from direction to direction."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=random) * torch.arange(1.0, width + 1) ** -0.3


@pytest.mark.parametrize("count", [16, 48, 200])
@pytest.mark.parametrize("seed", range(3))
def test_fitted_layers_are_never_worse_than_their_svd_on_new_inputs(count: int, seed: int) -> None:
    width = 128
    torch.manual_seed(seed)
    model = Wide(width)
    inputs = Inputs([images(count, width, seed)], CALIBRATION)
    layer = rw.find_layers(model, torch.zeros(1, width)).layers[0]
    one = influences(model, inputs, [layer], 10_000)[layer.name]
    target = target_for(layer, model.first.weight, one, 0.0)
    new = images(4000, width, 1000 + seed)
    changes: dict[str, list[float]] = {"whitened": [], "svd": []}
    for name, found in changes.items():
        for rank in (8, 24, 48):
            other = copy.deepcopy(model)
            weight = of(Option("f│c", 1, name)).approximation(target, Option("f│c", 1, name), rank)
            other.first.weight.data.copy_(weight)
            with torch.no_grad():
                found.append(float((other(new) - model(new)).square().sum(1).mean()))
    for fitted, plain in zip(changes["whitened"], changes["svd"], strict=True):
        assert fitted <= 1.15 * plain
    if count == 200:
        assert sum(changes["whitened"]) < 0.9 * sum(changes["svd"]), "with enough inputs it gains"


def test_few_inputs_shrink_more_than_many() -> None:
    torch.manual_seed(0)
    model = Wide(96)
    layer = rw.find_layers(model, torch.zeros(1, 96)).layers[0]
    shares = []
    for count in (16, 2000):
        inputs = Inputs([images(count, 96, 5)], CALIBRATION)
        one = influences(model, inputs, [layer], 10_000)[layer.name]
        choose_shares_(layer, model.first.weight, one, 0.0)
        assert one.shares is not None
        shares.append(one.shares.moment)
        assert target_of_both(layer, model.first.weight, one).moment is not None
    assert shares[0] > shares[1]
    assert one.shares.halved().doubled().moment == pytest.approx(one.shares.moment)


# ---- parts of the inputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, FEWEST - 1, FEWEST, 64, 500])
def test_every_sample_has_one_part(count: int) -> None:
    rows = torch.arange(float(count))[:, None]
    inputs = Inputs(list(rows.split(7)), CALIBRATION)
    parts = [*inputs.halves, inputs.check, inputs.last]
    found = torch.cat([batch for part in parts for batch in part])
    assert sorted(found[:, 0].tolist()) == rows[:, 0].tolist()
    assert abs(len(inputs.halves[0]) - len(inputs.halves[1])) <= 1
    assert (len(inputs.check) > 0) == (count >= FEWEST)
    assert len(inputs.check) == len(inputs.last)
    assert len(inputs.fitted) == len(inputs.halves[0]) + len(inputs.halves[1])


def test_dicts_and_tuples_are_dealt_out_by_rows() -> None:
    batch = {"x": torch.arange(24).reshape(24, 1), "mask": torch.arange(24).reshape(24, 1) + 100}
    inputs = Inputs([batch, batch], CALIBRATION)
    for part in (*inputs.halves, inputs.check, inputs.last):
        for some in part:
            assert isinstance(some, dict)
            assert torch.equal(some["x"] + 100, some["mask"])
    assert samples_in((torch.zeros(3, 2), torch.zeros(4))) == 1, "rows that do not belong together"
    assert samples_in(batch) == 24


def test_the_plan_states_what_was_measured_on_inputs_that_nothing_saw() -> None:
    torch.manual_seed(0)
    model = Wide(64)
    data = images(600, 64, 3)
    small, plan = rw.compress(model, data[:1], keep=0.6, data=[data])
    found = plan.search
    assert found.measured is not None
    assert found.expected is not None
    new = images(4000, 64, 77)
    with torch.no_grad():
        real = float((small(new) - model(new)).square().sum(1).mean() / model(new).var(0, unbiased=False).sum())
    assert 0.6 < found.measured / real < 1.6
    assert 0.5 < found.objective / real < 2

    assert replace(plan, search=found) == plan
