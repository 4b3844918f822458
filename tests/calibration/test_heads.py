"""Statistics taken the short way are those of the long way: heads of sparse pulls, inputs that layers share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.calibration import output_metric
from rankwise.calibration.influence import Influence
from rankwise.calibration.inputs import CALIBRATION, Inputs
from rankwise.calibration.objective import draw, pull_of_probabilities
from rankwise.core.moments import Moments, add_square_, square
from rankwise.decompositions import held_out
from rankwise.decompositions.whitened import root_of, shrunk

V, D = 50, 16


class Gated(nn.Module):
    """Two layers read one tensor, as queries and keys do; the head's outputs may be touched before they are given."""

    def __init__(self, tied: bool, touched: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.gate, self.up, self.down = nn.Linear(D, 24), nn.Linear(D, 24), nn.Linear(24, D)
        self.touched = touched
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        given = self.embed(input_ids)
        hidden = given.cumsum(1) / 3
        logits = self.head(given + self.down(torch.sigmoid(self.gate(hidden)) * self.up(hidden)))
        return logits * 1.0 if self.touched else logits  # type: ignore[no-any-return]


def found(tied: bool, touched: bool, **changes: Any) -> dict[str, Influence]:
    torch.manual_seed(0)
    model = Gated(tied, touched).eval()
    data = [{"input_ids": torch.randint(V, (8, 12), generator=torch.Generator().manual_seed(i))} for i in range(4)]
    layers = [*(coverage := rw.find_layers(model, data[0])).layers, *coverage.embeddings]
    return output_metric.influences(model, Inputs(data, CALIBRATION), layers, 5_000, **changes)


def numbers(one: Influence) -> list[Tensor]:
    tokens: Any = one.tokens
    uses = [] if tokens is None else [t for half in tokens.uses for use in half for t in (use.rows, use.columns)]
    return [t for half in one.halves for t in (half.metric, half.seen.mean, half.seen.scatter)] + uses


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_through_a_sparse_head_are_those_through_all_of_it(tied: bool) -> None:
    short, long = found(tied, touched=False), found(tied, touched=True)
    assert set(short) == set(long)
    for name, one in short.items():
        if name == "head":  # untied, its outputs are those of the network only if nobody touches them
            assert (one.is_output, long[name].is_output) == (True, False)
            continue
        assert any(bool(t.any()) for t in numbers(one)), name
        for ours, theirs in zip(numbers(one), numbers(long[name]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_layers_that_read_one_tensor_have_equal_moments_which_are_summed_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    summed: list[Tensor] = []
    of = Moments.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(Moments, "of", classmethod(lambda cls, rows: summed.append(rows) or of(cls, rows)))
    one = found(tied=True, touched=False)
    for half in (0, 1):
        ours, theirs = (one[name].halves[half].seen for name in ("gate", "up"))
        assert ours is not theirs
        torch.testing.assert_close(ours.scatter, theirs.scatter)
    widths = [rows.shape[-1] for rows in summed]
    assert widths.count(D) == widths.count(24) > 0  # gate and up together once, as often as down


def test_a_pull_in_its_short_form_is_the_pull() -> None:
    logits = torch.randn(3, 5, V, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(V, 7)
    short = draw(logits, torch.Generator().manual_seed(1))
    dense = pull_of_probabilities(logits, torch.Generator().manual_seed(1))
    torch.testing.assert_close(short.dense(), dense)
    torch.testing.assert_close(short.behind(weight), dense @ weight)
    torch.testing.assert_close(short.squares(), dense.square().sum((0, 1)))


@pytest.mark.parametrize("rows", [3, 40])
def test_few_rows_and_many_give_the_same_sums(rows: int) -> None:
    samples = torch.randn(2, 2 * rows, 20, dtype=torch.float64)
    whole, parts = Moments.of(samples), Moments()
    total = torch.zeros(())
    for some in samples.split(rows, dim=1):
        parts.add_quickly(some)
        total = add_square_(total, some, 0.5)
    torch.testing.assert_close(parts.scatter, whole.scatter)
    torch.testing.assert_close(parts.mean, whole.mean)
    torch.testing.assert_close(total, 0.5 * square(samples))


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_errors_do_not_depend_on_which_root_of_a_metric_is_taken(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    outputs, inputs = shape
    weight = torch.randn(shape, dtype=torch.float64)

    def moment(size: int) -> Tensor:
        return square(torch.randn(1, 40, size, dtype=torch.float64))

    fit, test, metric, other = (moment(n) for n in (inputs, inputs, outputs, outputs))
    symmetric = root_of(metric, 0.1)[0]
    triangular = torch.linalg.cholesky(shrunk(metric, 0.1)[0], upper=True)
    one, two = (
        held_out.whole_slice_errors(weight, fit[0], root, test[0], other[0]) for root in (symmetric, triangular)
    )
    assert one == pytest.approx(two, rel=1e-9)
    assert one[0] == pytest.approx(float((other[0] * (weight @ test[0] @ weight.t())).sum()))
