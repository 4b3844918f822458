"""`data=` takes what people have: loaders with labels, dicts, tuples, data sets, and says what it drops."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rankwise as rw
from rankwise.data.loaders import Cleaned, clean, notes_of
from sentences import check_sentence

X = torch.randn(48, 12, generator=torch.Generator().manual_seed(0))
Y = torch.arange(48) % 5


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Masked(Plain):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x if mask is None else x * mask)


class Named(Plain):
    """As Hugging Face networks: keywords, and labels for a loss."""

    def forward(self, pixel_values: Tensor, scale: float = 1.0, labels: Tensor | None = None) -> Tensor:  # type: ignore[override]
        assert labels is None, "labels reached the network"
        return super().forward(scale * pixel_values)


def net(cls: type[Plain] = Plain) -> Plain:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cls().eval()


def loader(*tensors: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=16)


def generator() -> Iterator[Any]:
    yield from loader(X, Y)


DATA = {
    "a loader with labels": lambda: loader(X, Y),
    "a loader without": lambda: loader(X),
    "a data set": lambda: TensorDataset(X, Y),
    "a generator": generator,
    "a list of pairs": lambda: [(X[:16], Y[:16]), (X[16:], Y[16:])],
    "a tensor": lambda: X,
    "an array": lambda: X.numpy(),
    "arrays": lambda: [X.numpy()],
    "dicts by the argument's name": lambda: [{"x": X, "label": Y}],
    "one dict": lambda: {"x": X, "label": Y},
    "dicts by another name": lambda: [{"image": X, "label": Y}],
    "inputs of several parts, with labels": lambda: [((X,), Y)],
}


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("example", [None, X[:1]], ids=["no example", "example"])
def test_every_kind_gives_the_plan_of_the_bare_inputs(kind: str, example: Tensor | None) -> None:
    model, data = net(), DATA[kind]()
    small, plan = rw.compress(model, example, "pca", keep=0.6, data=data)
    wanted, bare = rw.compress(model, example, "pca", keep=0.6, data=[X[:16], X[16:]])
    torch.testing.assert_close(small(X), wanted(X), atol=1e-4, rtol=1e-4)
    labelled = kind not in ("a loader without", "a tensor", "an array", "arrays")
    assert any("labels, which are not used" in w for w in plan.warnings) == labelled
    assert not bare.warnings


def test_labels_are_dropped_where_forward_takes_more() -> None:
    cleaned = clean(loader(X, Y), net(Masked), None)
    assert [type(batch) for batch in cleaned] == [Tensor] * 3
    assert notes_of(cleaned)
    both = clean([(X, torch.ones(48, 12))], net(Masked), None)
    assert [len(batch) for batch in both] == [2]
    assert not notes_of(both)


def test_hugging_face_batches_lose_their_labels_only() -> None:
    batch = UserDict({"pixel_values": X, "labels": Y, "idx": Y})
    (found,) = clean([batch], net(Named), None)
    assert set(found) == {"pixel_values"}
    _, plan = rw.compress(net(Named), {"pixel_values": X[:1]}, keep=0.6, data=[batch])
    assert any("'pixel_values' of every batch is the input" in w for w in plan.warnings)


def test_input_picks_a_part() -> None:
    by_index = Cleaned([(Y, X)], net(), None, 1)
    by_name = Cleaned([{"a": Y, "b": X}], net(), None, "b")
    assert all(torch.equal(next(iter(c)), X) for c in (by_index, by_name))
    _, plan = rw.compress(net(), X[:1], keep=0.6, data=[(Y, X)], input=1)
    assert plan.inputs == "calibration"
    table = rw.build_table(net(), X[:1], data=[(Y, X)], input=1, decompositions=("pca",))
    assert all(m.count == 48 for m in table.moments.values())


def test_what_is_not_clear_is_asked() -> None:
    said = check_sentence(lambda: rw.compress(net(), keep=0.6, data=[{"left": X, "right": X}]))
    assert "'left': 48×12" in said
    assert "input=" in said
    assert "give one of 0, 1" in check_sentence(lambda: rw.compress(net(), keep=0.6, data=[(X, Y)], input=5))
    assert "give one of 'x'" in check_sentence(lambda: rw.compress(net(), keep=0.6, data=[{"x": X}], input="y"))
    assert "leave it out" in check_sentence(lambda: rw.compress(net(), keep=0.6, data=X, input=1))
    assert "DataLoader" in check_sentence(lambda: rw.compress(net(), keep=0.6, data=3))
