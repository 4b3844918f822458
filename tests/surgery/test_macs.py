"""Multiply-adds of fused operators are those of the plain layers that compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.surgery.coverage import ATTENTION, OTHER_KIND, RECURRENT
from rankwise.surgery.macs import rnn_flops

T, B, I, H = 5, 3, 16, 24


class First(nn.Module):
    """A recurrent network, and a linear layer on its outputs."""

    def __init__(self, recurrent: nn.Module, wide: int) -> None:
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(wide, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0])


def matrices(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.ndim == 2)


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("rest", [{}, {"num_layers": 2}, {"bidirectional": True}, {"batch_first": True}], ids=str)
def test_every_row_meets_every_matrix(cls: type[nn.Module], rest: dict[str, Any]) -> None:
    recurrent = cls(I, H, **rest)
    wide = H * (2 if rest.get("bidirectional") else 1)
    coverage = rw.find_layers(First(recurrent, wide), torch.randn(T, B, I))
    assert coverage.macs == T * B * (matrices(recurrent) + 4 * wide)
    (skipped,) = coverage.skipped
    assert (skipped.name, skipped.kind, skipped.reason) == ("recurrent", cls.__name__, RECURRENT)
    assert skipped.params == sum(p.numel() for p in recurrent.parameters())


@pytest.mark.parametrize("rest", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_a_whole_network_at_once_counts_the_same(rest: dict[str, Any]) -> None:
    """As cuDNN computes it: the formula alone, since there is no GPU here."""
    lstm = nn.LSTM(I, H, **rest)
    shapes = [tuple(p.shape) for p in lstm.parameters()]
    assert rnn_flops((T, B, I), shapes) == 2 * T * B * matrices(lstm)
    assert rnn_flops((T * B, I), shapes) == 2 * T * B * matrices(lstm)  # packed


class Attending(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attention, self.head, self.weights = nn.MultiheadAttention(I, 4), nn.Linear(I, 4), weights

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=self.weights)[0])


@pytest.mark.parametrize("weights", [True, False])
def test_attention_is_counted_fused_or_not(weights: bool) -> None:
    coverage = rw.find_layers(Attending(weights), torch.randn(T, B, I))
    projections, scores = 4 * T * B * I * I, 2 * B * T * T * I
    assert coverage.macs == projections + scores + T * B * I * 4
    assert ATTENTION in {s.reason for s in coverage.skipped if s.name == "attention"}


def test_they_are_no_other_kind_so_that_compress_lists_them(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    from rankwise.__main__ import main

    assert OTHER_KIND not in (ATTENTION, RECURRENT)
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.lstm, self.head = nn.LSTM(16, 24), nn.Linear(24, 40)\n"
        "    def forward(self, x):\n        return self.head(self.lstm(x)[0])\n"
    )
    flags = ["--input", "5,3,16", "--keep", "0.95", "--method", "svd", "--dry-run"]
    assert main(["compress", f"{tmp_path / 'mine.py'}:Net", *flags]) == 0
    out = capsys.readouterr().out
    assert f"left whole: {RECURRENT} (LSTM; " in out
    assert "80." in out.split("(LSTM; ")[1][:5] or "of the params): lstm" in out


def test_the_rest_of_such_a_network_is_decomposed() -> None:
    model, x = First(nn.LSTM(I, H), H).eval(), torch.randn(T, B, I)
    model.head = nn.Linear(H, 64)
    small, plan = rw.compress(model, x, method="svd", macs=0.9)
    assert [c.name for c in plan.choices] == ["head"]
    assert rw.find_layers(rw.densify(small), x).macs == plan.before.macs
    assert small(x).shape == model(x).shape
