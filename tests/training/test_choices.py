"""What a retraining says before it begins."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import rankwise as rw
from rankwise.training.choices import describe
from rankwise.training.recipes import RECIPES


def test_it_names_what_was_chosen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1))
    small, _ = rw.compress(model, torch.randn(1, 8, 8, 8), method="svd", keep=0.6)
    recipe = replace(RECIPES["distilled"], lr=0.002, precision="bf16", augment="cifar")
    said = describe(small, recipe, tested=True)
    for part in ("distilled", "epochs 15", "soap", "rate 0.002 by a range test", "batch statistics", "cifar", "bf16"):
        assert part in said
    assert "2 of 2 pairs" in said
    assert "range test" not in describe(small, recipe, tested=False)
    assert "0 of 2 pairs" in describe(small, replace(recipe, form="factors"), tested=False)
