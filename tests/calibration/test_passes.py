"""Statistics within a limit of memory, what is kept of them, and how many inputs are enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.__main__ import main
from rankwise.calibration import effect_table, in_order, output_metric
from rankwise.calibration.effect_table import each_influence, needed, passes
from rankwise.calibration.inputs import CALIBRATION, Inputs
from rankwise.calibration.output_metric import influences
from rankwise.cli.flags import read_inputs
from rankwise.core import linalg
from rankwise.methods import FEWEST, MOST, affordable
from sentences import check_sentence


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(432, 7),
    ).eval()


def images(count: int = 48) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_what_a_layer_needs_is_what_its_statistics_take() -> None:
    model, x = network(), images()
    layers = list(rw.find_layers(model, x[:1]).layers)
    found = influences(model, Inputs([x], CALIBRATION), layers, 5_000)
    for layer in layers:
        halves = found[layer.name].halves
        tensors = [t for half in halves for t in (half.seen.scatter, half.moment, half.metric, half.outer)]
        assert sum(4 * t.numel() for t in tensors) <= needed(layer) + 64
        if not found[layer.name].is_output:
            assert sum(4 * t.numel() for t in tensors) > 0.9 * needed(layer)


def test_passes_keep_their_limit_and_every_layer_is_in_one() -> None:
    layers = list(rw.find_layers(network(), images()[:1]).layers)
    for limit in (0.0, 1.1 * max(map(needed, layers)), 1e9):
        groups = passes(layers, limit)
        assert [layer for group in groups for layer in group] == layers
        assert all(len(group) == 1 or sum(map(needed, group)) <= limit for group in groups)
    assert len(passes(layers, 0.0)) == len(layers)
    assert len(passes(layers, 1e9)) == 1


def test_of_a_layer_that_was_measured_only_what_a_fit_needs_is_kept() -> None:
    model, x = network(), images()
    coverage = rw.find_layers(model, x[:1])
    found = dict(each_influence(model, Inputs([x], CALIBRATION), coverage, 0))
    for layer, one in found.items():
        assert one.settled is not None
        assert one.count > 0
        assert one.settled[0].shape == (layer.groups, *one.means[0].shape[1:], one.means[0].shape[1])
        assert all(not half.seen.scatter.numel() and half.moment.ndim == 0 for half in one.halves)


def test_a_small_limit_gives_as_good_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are drawn anew in each pass, so it is not the same one."""
    model, x = network(), images(96)
    changes = []
    for limit in (effect_table.MEMORY, 0.0):
        monkeypatch.setattr(effect_table, "MEMORY", limit)
        _, plan = rw.compress(model, x[:1], keep=0.5, data=[x])
        assert plan.keep("params") <= 0.5
        changes.append(plan.search.measured or 0.0)
    assert 0 < changes[1] < 1.5 * changes[0]


def test_few_inputs_are_called_few() -> None:
    """A wide layer and a dozen inputs: it fits them much better than others. With many, nobody complains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 200)).eval()
    draw = torch.Generator().manual_seed(0)
    few, many = (torch.randn(n, 200, generator=draw) for n in (40, 4000))
    said = {}
    for name, x in (("few", few), ("many", many)):
        _, plan = rw.compress(model, x[:1], keep=0.6, data=list(x.split(200)))
        assert plan.search.fitted is not None
        assert rw.Plan.loads(plan.dumps()).search.fitted == plan.search.fitted
        said[name] = [w for w in plan.warnings if "calibration inputs are few" in w]
    assert len(said["few"]) == 1
    assert not said["many"]


def test_networks_of_tokens_are_not_planned_by_their_weights_without_a_word() -> None:
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    tokens = torch.zeros(1, 5, dtype=torch.long)
    _, plan = rw.compress(model, tokens, keep=0.8)
    assert plan.inputs is None
    assert any("mostly ruined" in warning for warning in plan.warnings)
    _, plan = rw.compress(model, tokens, keep=0.8, data=[torch.randint(50, (32, 5))])
    assert not any("ruined" in warning for warning in plan.warnings)
    wide = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    assert any("mostly ruined" in warning for warning in rw.compress(wide, keep=0.95)[1].warnings)  # no example


def test_as_many_inputs_as_the_time_allows() -> None:
    x = images(4)
    assert affordable(x, 4 * 10**6) == MOST
    assert affordable(x, 4 * 4 * 10**9) == 1000
    assert affordable(x, 4 * 10**12) == affordable(None, None) == FEWEST
    assert read_inputs("auto") is None
    assert read_inputs("64") == 64
    for wrong in ("0", "many", "1.5"):
        assert "1 or more" in check_sentence(lambda wrong=wrong: read_inputs(wrong))


def test_calibrate_without_a_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    asked: list[Any] = []
    monkeypatch.setattr("rankwise.methods.affordable", lambda *given: asked.append(given) or 64)
    flags = ["compress", "digits-cnn", "--random-weights", "--keep", "0.5", "--data", "digits", "--dry-run", "--json"]
    assert main([*flags, "--calibrate", "--seed", "1"]) == 0
    assert len(asked) == 1
    capsys.readouterr()


def test_portions_are_parted_without_losing_a_sample() -> None:
    whole = Inputs([images(7), images(20)], CALIBRATION).halves[0]
    for count in (0, 3, len(whole), 99):
        first, others = whole.parted(count)
        assert len(first) == min(count, len(whole))
        assert len(first) + len(others) == len(whole)
        joined = [row for part in (first, others) for batch in part for row in batch]
        assert torch.equal(torch.stack(joined), torch.cat(list(whole)))  # type: ignore[arg-type]
    sizes = [len(piece) for piece in whole.pieces(samples=4)]
    assert sum(sizes) == len(whole)
    assert max(sizes) == 4


def test_gradients_are_taken_in_small_pieces_and_of_no_more_images_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_metric, "GRADIENTS", 12)
    monkeypatch.setattr(output_metric, "INPUTS", 4)
    sizes: list[tuple[int, bool]] = []
    model, x = network(), images()
    model.register_forward_pre_hook(lambda _, args: sizes.append((len(args[0]), torch.is_grad_enabled())))
    influences(model, Inputs([x], CALIBRATION), list(rw.find_layers(model, x[:1]).layers), 5_000)
    assert [size for size, pulled in sizes if pulled] == [4, 2, 4, 2], "of each half six images, at most four at once"
    assert max(size for size, pulled in sizes if not pulled) > 4


@pytest.mark.parametrize("wide", [1, 10**6])
def test_wide_layers_are_fitted_in_single_precision(wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From so many inputs to a filter on; the network is nearly the same."""
    x = images(96)
    nets = []
    for limit in (wide, 10**6):
        monkeypatch.setattr(linalg, "WIDE", limit)
        nets.append(rw.compress(network(), x[:1], keep=0.6, data=[x])[0])
    with torch.no_grad():
        one, other = (net(x) for net in nets)
    assert torch.allclose(one, other, atol=0.02 * float(other.std()))


def test_passes_that_find_no_room_begin_again_where_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Early layers, whose activations are large, see some inputs; those behind the pooling see all of them."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 24, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *(nn.Linear(24, 24) for _ in range(6)), nn.Linear(24, 6)),
    ).eval()
    x = images(96)
    seen: dict[str, list[int]] = {}
    add = in_order.LayerStatistics.add

    def count(self: Any, layer: Any, half: int, given: Tensor, wanted: Tensor, spots: Tensor) -> None:
        seen.setdefault(layer.name, [0, 0])[half] += len(given)
        add(self, layer, half, given, wanted, spots)

    monkeypatch.setattr(in_order.LayerStatistics, "add", count)
    monkeypatch.setattr(in_order, "PIECE", 8 * 3 * 64)  # eight images
    monkeypatch.setattr(in_order, "HELD", 2 * 4 * (4 + 24) * 64 * 20)  # some twenty, where there are 24 channels
    small, _ = rw.compress(model, x[:1], keep=0.35, data=[x], exclude="12")
    assert {"2", "11"} <= set(seen), "both are fitted in order"
    halves = [len(half) for half in Inputs([x], CALIBRATION).halves]
    assert sum(seen["2"]) < sum(halves) / 2
    assert min(seen["2"]) > 0
    assert seen["11"] == halves
    with torch.no_grad():
        assert float((small(x) - model(x)).square().mean()) < float(model(x).var())
