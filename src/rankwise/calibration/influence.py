"""What the inputs say of a layer, as values: moments of what it sees and of its gradients, in two halves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rankwise.core.moments import Moments

COMPACT = 512  # from this size on, matrices that are kept are single


@dataclass(frozen=True)
class Shares:
    """How far moments of Γ are drawn towards those of single positions, and then both factors towards the identity."""

    moment: float
    metric: float
    calm: float = 0.0

    def doubled(self) -> Shares:
        """For twice as many inputs: s = d / (d + n) becomes d / (d + 2 n)."""
        return Shares(*(share / (2 - share) for share in (self.moment, self.metric, self.calm)))

    def halved(self) -> Shares:
        return Shares(*(2 * share / (1 + share) for share in (self.moment, self.metric, self.calm)))


@dataclass
class Half:
    """What one half of the inputs says of a layer.

    `seen` are moments of its patches, `metric` Σ_p g_p g_pᵀ (G, f/G, f/G), mean over inputs: positions one by one.
    `moment` (G, d, d) and `outer` (G, f/G, f/G) are E[ΓᵀΓ] and E[ΓΓᵀ]. `samples` and `gammas` are the inputs that were
    seen, and those that Γ was taken of; `places` is how often the layer is applied to an input.
    """

    seen: Moments = field(default_factory=Moments)
    metric: Tensor = field(default_factory=lambda: torch.zeros(()))
    moment: Tensor = field(default_factory=lambda: torch.zeros(()))
    outer: Tensor = field(default_factory=lambda: torch.zeros(()))
    samples: int = 0
    gammas: int = 0
    places: float = 1.0
    pulls: tuple[float, float] = (0.0, 0.0)  # Σ over inputs of ‖Σ_p g_p‖² and of Σ_p ‖g_p‖²
    levels: float = 0.0  # Σ over inputs of the mean of g², where outputs are taken as alike; 0: it is 1

    @property
    def level(self) -> float:
        """What an error of one of the outputs counts, where all of them are taken as alike."""
        return self.levels / max(1, self.gammas) if self.levels else 1.0

    def divided(self, by: float) -> None:
        self.metric, self.moment, self.outer = self.metric / by, self.moment / by, self.outer / by


@dataclass
class Influence:
    """What the inputs say of a layer, in two halves; `seen` is of both together.

    Moments are relative to the `variance` of the network's outputs, which is the same for all layers. Where a patch has
    too many entries for a covariance, `seen` is of single entries and `whole` is False. `centred` is whether the mean
    of an error can be made up for, so that only what varies is lost: by the layer's bias, or without one by the running
    mean of the batch norm `norm` that follows. Outputs of a transposed convolution differ in how many inputs they see:
    one bias would not do. `is_output` is whether the layer's outputs are those of the network, or too many for a
    metric: an error counts alike in all of them.

    Once the layer's options are measured only what it is fitted with is needed: `settled`, moments and metric of both
    halves together, drawn towards the identity.
    """

    halves: tuple[Half, Half]
    whole: bool = True
    variance: float = 0.0
    centred: bool = False
    norm: str = ""
    is_output: bool = False
    by_token: bool = False  # the network answers to every token, so positions are taken one by one
    nats: bool = False  # the network ends in a vocabulary: effects are divergences of probabilities (objective.py)
    tokens: object = None  # of an embedding, what its uses say (lookups.py); nothing else is known of it
    shares: Shares | None = None  # of both halves together, once they are chosen (shrinkage.py)
    settled: tuple[Tensor, Tensor | None] | None = None

    @property
    def seen(self) -> Moments:
        return self.halves[0].seen.merged(self.halves[1].seen)

    @property
    def count(self) -> int:
        """Patches that were seen; 0 where no input reaches the layer."""
        return sum(half.seen.count for half in self.halves)

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Of the patches that each half saw, (G, d); those of the other where one saw none."""
        first, second = (half.seen for half in self.halves)
        return (first if first.count else second).mean, (second if second.count else first).mean

    @property
    def samples(self) -> int:
        return sum(half.samples for half in self.halves)

    @property
    def places(self) -> float:
        """How often the layer is applied to an input."""
        return self.halves[0].places

    @property
    def alike(self) -> float:
        """How far gradients at different positions of an input agree: mean of g_p · g_q relative to that of ‖g_p‖²."""
        whole, single = (sum(half.pulls[i] for half in self.halves) for i in (0, 1))
        if not single > 0 or not self.places > 1:
            return 0.0
        return min(1.0, max(0.0, (whole / single - 1) / (self.places - 1)))

    def settle_(self, moment: Tensor, metric: Tensor | None) -> None:
        """Keep what the layer is fitted with, large matrices in single precision, and let go of the halves' moments."""
        self.settled = _compact(moment), None if metric is None else _compact(metric)
        for half in self.halves:
            half.seen = replace(half.seen, scatter=half.seen.scatter.new_zeros(0, 0, 0))
            half.metric = half.moment = half.outer = torch.zeros(())

    @property
    def both(self) -> Half:
        """The halves together."""
        parts = [half for half in self.halves if half.gammas]
        total = max(1, sum(half.gammas for half in parts))
        sums: list[Tensor] = [
            sum((getattr(half, name) * (half.gammas / total) for half in parts), start=torch.zeros(()))
            for name in ("metric", "moment", "outer")
        ]
        metric, moment, outer = sums
        levels = sum(half.levels for half in parts)
        return Half(self.seen, metric, moment, outer, self.samples, total, self.places, levels=levels)


def _compact(matrices: Tensor) -> Tensor:
    return matrices.float() if matrices.shape[-1] >= COMPACT else matrices
