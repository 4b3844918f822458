"""Recovery on texts: what differs from images (distill.py).

Texts are not varied: a mirrored sentence is none. A step takes some sequences of a batch, about TOKENS tokens. Where
the network ends in a vocabulary the loss is the divergence of its probabilities from the original's, in nats for each
position. Only factors are trained: they are what was approximated, and norms and biases that a few thousand tokens
would pull along stay. A few thousand tokens are soon known by heart, so every so many steps the network is measured on
texts that it does not learn from, the best state is kept, and when it has not got better for a while that is the end.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.calibration.inputs import Portion, samples_in
from rankwise.calibration.objective import logits_in
from rankwise.surgery.forward import Example, tensors_of
from rankwise.surgery.modules import mark_of

TOKENS = 1024
EVERY = 20  # steps between two looks
PATIENCE = 5  # looks without a better state


def some_texts(batch: Example, random: torch.Generator) -> Example:
    """Some sequences of a batch, drawn at random."""
    count = samples_in(batch)
    first = max(tensors_of(batch), key=Tensor.numel)
    wanted = max(1, TOKENS * count // max(1, first.numel()))
    if count <= wanted:
        return batch
    rows = torch.randperm(count, generator=random)[:wanted]
    return Portion([batch], [(0, rows)]).together()


def factors_of(small: nn.Module) -> list[nn.Parameter]:
    """The weights of all pairs; a shared one once."""
    pairs = [module for module in small.modules() if mark_of(module) is not None]
    found = {p: None for pair in pairs for n, p in pair.named_parameters() if n.endswith("weight")}
    return [p for p in found if p.is_floating_point()]


def divergence_loss(model: nn.Module, wanted: list[Tensor], given: list[Tensor]) -> Tensor | None:
    """Mean over positions of KL(p ‖ p̂); None where the network does not end in a vocabulary."""
    logits = logits_in(model, wanted)
    if logits is None:
        return None
    here = next(b for a, b in zip(wanted, given, strict=True) if a is logits)
    target, found = (t.float().flatten(0, -2).log_softmax(-1) for t in (logits, here))
    return F.kl_div(found, target.to(found.device), reduction="batchmean", log_target=True)


@dataclass
class Best:
    """The best state of a network so far, by a measure of which less is better."""

    network: nn.Module
    measure: Callable[[], float]
    lowest: float = math.inf
    state: dict[str, Tensor] = field(default_factory=dict)
    misses: int = 0

    def look(self) -> bool:
        """Measure, and say whether it is worth going on."""
        now = self.measure()
        if now < self.lowest:
            self.lowest, self.state, self.misses = now, copy.deepcopy(self.network.state_dict()), 0
        else:
            self.misses += 1
        return self.misses < PATIENCE

    def restore(self) -> None:
        if self.state:
            self.network.load_state_dict(self.state)
