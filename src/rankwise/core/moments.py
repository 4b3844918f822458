"""Means and covariances, merged batch by batch without losing digits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankwise.core.linalg import precise


@dataclass
class Moments:
    """Count, mean (G, d) and scatter Σ (x − μ)(x − μ)ᵀ (G, d, d) of what was seen, for each of G groups."""

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    scatter: Tensor = field(default_factory=lambda: torch.zeros(0, 0, 0, dtype=torch.float64))

    def add(self, samples: Tensor) -> None:
        """Merge samples (G, n, d): the exact update for two sets with different means."""
        groups, n, d = samples.shape
        if not n:
            return
        samples = precise(samples)
        mean = samples.mean(dim=1)
        centred = samples - mean[:, None]
        scatter = centred.transpose(1, 2) @ centred
        if not self.count:
            self.mean, self.scatter = scatter.new_zeros(groups, d), torch.zeros_like(scatter)
        shift = mean - self.mean
        total = self.count + n
        self.scatter += scatter + shift[:, :, None] * shift[:, None, :] * (self.count * n / total)
        self.mean = self.mean + shift * (n / total)
        self.count = total

    @property
    def covariance(self) -> Tensor:
        """(G, d, d), positive semi-definite: divided by the count, so that a single sample is fine too."""
        return self.scatter / max(1, self.count)

    @property
    def second_moment(self) -> Tensor:
        """E[x xᵀ], (G, d, d): what the error of a layer without a mean correction is measured with."""
        return self.covariance + self.mean[:, :, None] * self.mean[:, None, :]
