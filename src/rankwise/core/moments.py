"""Means and covariances, merged batch by batch without losing digits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankwise.core.linalg import precise

WIDE, BLOCKS = 512, 8  # from this many columns on, a Gram matrix is multiplied block by block


@dataclass
class Moments:
    """Count, mean (G, d) and scatter Σ (x − μ)(x − μ)ᵀ (G, d, d) of what was seen, for each of G groups."""

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    scatter: Tensor = field(default_factory=lambda: torch.zeros(0, 0, 0, dtype=torch.float64))

    def add(self, samples: Tensor) -> None:
        """Merge samples (G, n, d) in double precision."""
        self.merge_(Moments.of(precise(samples)))

    @classmethod
    def of(cls, samples: Tensor) -> Moments:
        """Of samples (G, n, d) alone, in their own precision: single is far below the noise of sampling."""
        n = samples.shape[1]
        if not n:
            return cls()
        mean = samples.mean(dim=1)
        return cls(n, mean, square(samples - mean[:, None]))

    def add_quickly(self, samples: Tensor) -> None:
        """Merge samples in their own precision, few of them in place."""
        n, d = samples.shape[1:]
        if not self.count or 2 * n >= d or samples.dtype != self.scatter.dtype:
            self.merge_(Moments.of(samples))
            return
        mean = samples.mean(dim=1)
        add_square_(self.scatter, samples - mean[:, None])
        self._shift(n, mean)

    def merge_(self, other: Moments) -> None:
        """Add another set to this one: the exact update for two sets with different means."""
        if not other.count:
            return
        if not self.count:
            self.mean, self.scatter = torch.zeros_like(other.mean), torch.zeros_like(other.scatter)
        self.scatter += other.scatter
        self._shift(other.count, other.mean)

    def _shift(self, n: int, mean: Tensor) -> None:
        """The rest of a merge with n samples of this mean, whose scatter is added already."""
        shift, total = mean - self.mean, self.count + n
        self.scatter.baddbmm_(shift[:, :, None], shift[:, None, :], alpha=self.count * n / total)
        self.mean = self.mean + shift * (n / total)
        self.count = total

    def merged(self, other: Moments) -> Moments:
        """Of both sets together."""
        if not self.count or not other.count:
            return self if self.count else other
        total = self.count + other.count
        shift = other.mean - self.mean
        between = shift[:, :, None] * shift[:, None, :] * (self.count * other.count / total)
        return Moments(
            total, self.mean + shift * (other.count / total), self.scatter + other.scatter + between.to(self.scatter)
        )

    @property
    def covariance(self) -> Tensor:
        """(G, d, d), positive semi-definite: divided by the count, so that a single sample is fine too."""
        return self.scatter / max(1, self.count)

    @property
    def second_moment(self) -> Tensor:
        """E[x xᵀ], (G, d, d): what the error of a layer without a mean correction is measured with."""
        return torch.baddbmm(self.covariance, self.mean[:, :, None], self.mean[:, None, :])


def add_square_(total: Tensor, rows: Tensor, share: float = 1.0) -> Tensor:
    """`total` + share · AᵀA of (G, n, d); few rows are added in place, since writing d × d is what takes time then."""
    if total.ndim and 2 * rows.shape[1] < rows.shape[2] and total.dtype == rows.dtype and total.device == rows.device:
        return total.baddbmm_(rows.transpose(1, 2), rows, alpha=share)
    return total.to(rows) + share * square(rows)


def square(rows: Tensor) -> Tensor:
    """AᵀA of (G, n, d); of wide ones only the blocks on and above the diagonal are multiplied."""
    d = rows.shape[-1]
    if d < WIDE or len(rows) > 1:
        return rows.transpose(1, 2) @ rows
    found = rows.new_empty(1, d, d)
    ends = [d * i // BLOCKS for i in range(BLOCKS + 1)]
    for i in range(BLOCKS):
        here = slice(ends[i], ends[i + 1])
        block = rows[0, :, here].t() @ rows[0, :, ends[i] :]
        found[0, here, ends[i] :] = block
        found[0, ends[i] :, here] = block.t()
    return found
