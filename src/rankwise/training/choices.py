"""What a retraining chose for a network, its data and this machine, in one sentence."""

from __future__ import annotations

from torch import nn

from rankwise.surgery.modules import mark_of
from rankwise.surgery.multiplied import pairs_to_multiply
from rankwise.training.recipes import Recipe


def describe(small: nn.Module, recipe: Recipe, *, tested: bool) -> str:
    """`tested` says that the rate comes from a range test. The augmentation and the precision are settled already."""
    pairs = [m for m in small.modules() if isinstance(m, nn.Sequential) and mark_of(m) is not None]
    rate = f"rate {recipe.lr if recipe.retrain_lr is None else recipe.retrain_lr:g}"
    return ", ".join(
        (
            f"recipe {recipe.name}: epochs {recipe.retrain}",
            recipe.optimizer,
            f"{rate} by a range test on training images" if tested else rate,
            f"weight decay {recipe.weight_decay:g}",
            f"batch norms by {recipe.norms} statistics",
            f"augmentation {recipe.augment}",
            "float32" if recipe.precision == "no" else recipe.precision,
            f"{len(pairs_to_multiply(small, recipe.form))} of {len(pairs)} pairs as their product",
        )
    )
