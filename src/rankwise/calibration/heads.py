"""The linear layer that gives a network's logits, and gradients behind it without a product with all of the vocabulary.

Of v only TOP entries at a position are not zero (objective.py), so vᵀW is a sum of TOP rows of W instead of 32,000.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.calibration.objective import vocabulary
from rankwise.surgery.hooks import Look, Seen


@dataclass(frozen=True, eq=False)
class HeadCall:
    """What a head got, with its history, and what it gave."""

    name: str
    given: Tensor
    output: Tensor
    weight: Tensor
    version: int

    @property
    def untouched(self) -> bool:
        return self.output._version == self.version and self.given.requires_grad


class Heads:
    """Watches linear layers with as many outputs as the network has tokens. They are looked at before all others."""

    def __init__(self, model: nn.Module) -> None:
        size = vocabulary(model)
        modules = model.named_modules() if size else ()
        self.names = [name for name, m in modules if isinstance(m, nn.Linear) and m.out_features == size]
        self.calls: list[HeadCall] = []

    def looks(self) -> dict[str, Look]:
        return {name: partial(self._look, name) for name in self.names}

    def _look(self, name: str, call: Seen) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        module: Any = call.module
        output: Tensor = call.output
        kept = output if output.requires_grad else output.detach().requires_grad_()
        self.calls.append(HeadCall(name, call.given, kept, module.weight.detach(), kept._version))
        return None if kept is output else kept

    def start(self) -> None:
        """Before a batch."""
        self.calls.clear()

    def of(self, logits: Tensor | None) -> HeadCall | None:
        """The call that gave the logits, if it is the only one and nothing was done to them since."""
        found = [call for call in self.calls if call.output is logits and call.untouched]
        return found[0] if len(self.calls) == len(found) == 1 else None


def is_copy(answer: Tensor, kept: Tensor) -> bool:
    """Whether the network gives what the layer gave, untouched: itself, or the copy that a hook put in its place."""
    if answer is kept:
        return True
    made = answer.grad_fn
    while made is not None and type(made).__name__ in _SAME:
        if type(made).__name__ == "CloneBackward0":
            source = made.next_functions[0][0]
            return source is kept.grad_fn or getattr(source, "variable", None) is kept
        made = made.next_functions[0][0]
    return False


_SAME = ("CloneBackward0", "ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "AliasBackward0")
