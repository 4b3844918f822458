"""Scores against counting by hand."""

from __future__ import annotations

import json
import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rankwise.data.images import held
from rankwise.data.splits import Split
from rankwise.errors import RankwiseError
from rankwise.training.evaluate import Score, evaluate


def table(logits: Tensor, labels: list[int], classes: int | None = None) -> tuple[nn.Module, Split]:
    """A network that answers image i with row i of `logits`, and the data for it: image i is one pixel, i."""
    images = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1)
    names = tuple(map(str, range(classes or logits.shape[1])))
    return Lookup(logits), Split("made up", "test", names, torch.tensor(labels), held(images), white=1)


class Lookup(nn.Module):
    def __init__(self, logits: Tensor, wrap: Callable[[Tensor], Any] = lambda out: out) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.inner = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(logits.shape[1]))
        self.wrap = wrap
        self.modes: list[bool] = []
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Any:
        self.modes += [m.training for m in self.modules()] + [torch.is_grad_enabled()]
        self.dtypes.add(x.dtype)
        return self.wrap(self.logits[x.flatten().long()])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 50), st.integers(0, 10**6))
def test_scores_equal_counting_by_hand(n: int, classes: int, batch_size: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=make)
    labels = torch.randint(classes, (n,), generator=make).tolist()
    score = evaluate(*table(logits, labels), batch_size=batch_size)
    order = logits.argsort(1, descending=True).tolist()
    assert score.n == n
    assert score.top1 == 100 * sum(y == row[0] for y, row in zip(labels, order, strict=True)) / n
    if classes < 6:
        assert score.top5 is None
    else:
        assert score.top5 == 100 * sum(y in row[:5] for y, row in zip(labels, order, strict=True)) / n
    by_hand = -sum(float(row.log_softmax(0)[y]) for y, row in zip(labels, logits, strict=True)) / n
    assert score.loss == pytest.approx(by_hand, rel=1e-5, abs=1e-6)


def test_every_module_keeps_its_mode_even_after_an_error() -> None:
    model, split = table(torch.eye(10), list(range(10)))
    model.train()
    model.inner[1].eval()
    before = [module.training for module in model.modules()]
    evaluate(model, split)
    assert [module.training for module in model.modules()] == before
    assert not any(model.modes)  # all in eval mode, and no gradients
    model.wrap = lambda out: 1 / 0
    with pytest.raises(RankwiseError, match="ZeroDivisionError"):
        evaluate(model, split)
    assert [module.training for module in model.modules()] == before


def test_a_network_of_nan_is_never_right() -> None:
    score = evaluate(*table(torch.full((8, 8), math.nan), list(range(8))))
    assert (score.top1, score.top5) == (0.0, 0.0)
    assert math.isnan(score.loss)


def test_a_network_that_says_nothing_scores_like_guessing() -> None:
    score = evaluate(*table(torch.zeros(10, 10), list(range(10))))
    assert (score.top1, score.top5) == (10.0, 50.0)


def test_limit_is_spread_over_the_data() -> None:
    logits = torch.zeros(20, 6)
    logits[:, 0] = 1
    score = evaluate(*table(logits, [0] * 10 + [1] * 10), limit=4)
    assert (score.n, score.top1) == (4, 50.0)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda out: {"out": out, "aux": out * 0},
        lambda out: {"logits": out},
        lambda out: namedtuple("Output", ["loss", "logits"])(None, out),
    ],
)
def test_outputs_that_are_not_plain_tensors(wrap: Callable[[Tensor], Any]) -> None:
    model, split = table(torch.eye(10), list(range(10)))
    model.wrap = wrap
    assert evaluate(model, split).top1 == 100.0


def test_batches_take_the_precision_of_the_network() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        model, split = table(torch.eye(10), list(range(10)))
        assert evaluate(model.to(dtype), split).top1 == 100.0
        assert model.dtypes == {dtype}


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (lambda out: out[:, :5], "5 classes apart, and made up has labels up to 9"),
        (lambda out: out[:, :, None], r"shape \(10, 10, 1\)"),
        (lambda out: "cat", "type str"),
    ],
)
def test_what_cannot_be_scored(wrap: Callable[[Tensor], Any], says: str) -> None:
    model, split = table(torch.eye(10), list(range(10)))
    model.wrap = wrap
    with pytest.raises(RankwiseError, match=says):
        evaluate(model, split)


def test_more_outputs_than_classes_are_fine() -> None:
    assert evaluate(*table(torch.eye(10), list(range(5)) * 2, classes=5)).top5 is None


def test_json() -> None:
    score = Score(3, 50.0, None, 0.25)
    assert json.loads(json.dumps(score.to_json())) == {"n": 3, "top1": 50.0, "top5": None, "loss": 0.25}


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(2, 6), st.integers(0, 10**6))
def test_segmentation_equals_counting_by_hand(n: int, classes: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, 4, 5, generator=make)
    masks = torch.randint(classes, (n, 1, 4, 5), generator=make).to(torch.uint8)
    masks[torch.rand(masks.shape, generator=make) < 0.2] = 255
    masks[0, 0, 0, 0] = 0
    images = torch.arange(n, dtype=torch.uint8).view(-1, 1, 1, 1)
    names = tuple(map(str, range(classes)))
    split = Split("made up", "test", names, torch.zeros(n).long(), held(images), white=1, masks=held(masks))
    score = evaluate(Lookup(logits), split)
    said, truth = logits.argmax(1).flatten().tolist(), masks.flatten().tolist()
    counted = [(a, b) for a, b in zip(said, truth, strict=True) if b != 255]
    overlaps = []
    for c in range(classes):
        either = sum(c in pair for pair in counted)
        if either:
            overlaps.append(sum(pair == (c, c) for pair in counted) / either)
    assert score.top1 == pytest.approx(100 * sum(a == b for a, b in counted) / len(counted))
    assert score.miou == pytest.approx(100 * sum(overlaps) / len(overlaps), rel=1e-5)
    assert score.main == score.miou
    assert (score.n, score.top5) == (n, None)
    assert "miou" in score.to_json()


def test_top1_and_top5_are_torchmetrics_where_nothing_is_equal() -> None:
    logits = torch.randn(200, 20, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(200) % 20
    score = evaluate(*table(logits, labels.tolist()))  # first: it knows how to import torchmetrics
    accuracy = pytest.importorskip("torchmetrics.functional.classification").multiclass_accuracy
    for ours, k in ((score.top1, 1), (score.top5, 5)):
        assert ours == pytest.approx(100 * float(accuracy(logits, labels, 20, top_k=k, average="micro")))
