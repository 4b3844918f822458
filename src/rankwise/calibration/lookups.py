"""What inputs say of embeddings and of the heads that share their weight: statistics of tokens, beside those of layers.

By halves, as for layers (inputs.py): how often each token is looked up, and Σ_p g_p g_pᵀ of the gradients behind the
embedding; of a head the second moments of what it gets, and Σ_p g² of each of its outputs. The latter is the diagonal
of its metric: all of it would be vocabulary × vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from rankwise.calibration.influence import Half, Influence
from rankwise.calibration.objective import Pull
from rankwise.core.layer import Layer
from rankwise.core.linalg import precise
from rankwise.core.moments import Moments, square
from rankwise.decompositions.embedding import Halves, Use, ready
from rankwise.surgery.hooks import Look, Seen


@dataclass
class _Tally:
    """Of an embedding `rows` are counts of tokens (V,) and `columns` of gradients; of a head it is the other way."""

    rows: Tensor = field(default_factory=lambda: torch.zeros(()))
    columns: Tensor = field(default_factory=lambda: torch.zeros(()))
    inputs: int = 0  # that gradients were taken of
    seen: int = 0  # positions


class Lookups:
    """Collects them for some embeddings while a network runs: `look` at calls, then `add` what gradients say."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers, self.half, self.variance = list(layers), 0, 0.0
        self.uses = {name: (_Tally(), _Tally()) for layer in layers for name in (layer.name, *layer.heads)}
        self._lookups = {layer.name for layer in layers}
        self._calls: list[tuple[str, Tensor]] = []

    def looks(self) -> dict[str, Look]:
        return {name: partial(self.look, name) for name in self.uses}

    def start(self, half: int) -> None:
        """Before a batch of this half."""
        self.half = half
        self._calls.clear()

    def look(self, name: str, call: Seen) -> Tensor | None:
        side = self.uses[name][self.half]
        if name in self._lookups:
            size = len(call.module.weight)  # type: ignore[arg-type]
            side.rows = side.rows + torch.bincount(call.given.detach().flatten(), minlength=size)
            side.seen += call.given.numel()
        else:
            rows = call.given.detach().flatten(0, -2).float()
            side.columns = side.columns + square(rows[None])[0]
            side.seen += len(rows)
        if not torch.is_grad_enabled():
            return None
        output: Tensor = call.output
        kept = output if output.requires_grad else output.detach().requires_grad_()
        self._calls.append((name, kept))
        return kept.clone() if name in self._lookups else None  # logits are large, and nobody works on them in place

    @property
    def outs(self) -> list[Tensor]:
        """What gradients are to be taken of."""
        return [kept for _, kept in self._calls]

    def add(self, gradients: Sequence[Tensor | Pull | None], inputs: int) -> None:
        for (name, _), gradient in zip(self._calls, gradients, strict=True):
            side = self.uses[name][self.half]
            if gradient is None:
                continue
            if isinstance(gradient, Pull):
                side.rows = side.rows + gradient.squares()
            elif name in self._lookups:
                side.columns = side.columns + square(gradient.flatten(0, -2).float()[None])[0]
            else:
                side.rows = side.rows + torch.linalg.vector_norm(gradient.flatten(0, -2).float(), dim=0).square()
            side.inputs += inputs

    def influences(self, model: nn.Module) -> dict[str, Influence]:
        """What was found, by embedding; nothing is known of those that some half did not come to."""
        found = {}
        for layer in self.layers:
            weight = ready(cast(Tensor, model.get_submodule(layer.name).weight))
            first, second = (self._uses(layer, half, weight) for half in (0, 1))
            halves = [Half(seen=Moments(side.seen), samples=side.inputs) for side in self.uses[layer.name]]
            found[layer.name] = Influence((halves[0], halves[1]), variance=self.variance)
            if first is not None and second is not None and self.variance > 0:
                found[layer.name].tokens = Halves((first, second), weight.t() @ weight)
        return found

    def _uses(self, layer: Layer, half: int, weight: Tensor) -> list[Use] | None:
        found = []
        for name in (layer.name, *layer.heads):
            side = self.uses[name][half]
            if not side.seen or not side.inputs:
                return None
            rows, columns = precise(side.rows).to(weight), precise(side.columns).to(weight)
            used = rows > 0
            some = weight[used]
            square = some.t() @ (rows[used, None] * some)
            found.append(Use(square / side.seen, columns / (side.inputs * self.variance)))
        return found
