"""How many directions of a matrix are signal: variational Bayesian matrix factorisation.

Empirical VBMF has a global solution in closed form (Nakajima et al. 2013, "Global analytic solution of
fully-observed variational Bayesian matrix factorization", JMLR 14): given the noise variance σ², a singular
value γ of an L×M matrix (L ≤ M) is kept if γ² > M σ² (1 + τ)(1 + α/τ), with α = L/M and τ ≈ 2.5129 √α. The
noise variance is the minimum of a function of one variable, the free energy below.
"""

from __future__ import annotations

import math

import numpy as np

from rankwise.core.linalg import Array

TAU = 2.5129
POINTS = 400  # a grid in log σ², refined around its best point


def signal_rank(values: Array, rows: int, columns: int) -> int:
    """The rank that empirical VBMF keeps, from all singular values of a matrix; possibly 0."""
    short, long = min(rows, columns), max(rows, columns)
    squares = np.sort(np.square(values))[::-1][:short]
    if not squares.size or squares[0] <= 0:
        return 0
    alpha = short / long
    tau = TAU * math.sqrt(alpha)
    edge = (1 + tau) * (1 + alpha / tau)
    noise = _noise(squares, short, long, edge)
    return int((squares > long * noise * edge).sum())


def _noise(squares: Array, short: int, long: int, edge: float) -> float:
    """The σ² with the least free energy, between the bounds that the closed form gives."""
    alpha = short / long
    first = max(0, min(math.ceil(short / (1 + alpha)) - 1, short) - 1)  # at most so many directions are signal
    upper = float(squares.sum()) / (short * long)
    rest = squares[min(first + 1, short - 1) :]
    lower = max(float(rest[0]) / (long * edge), float(rest.mean()) / long, upper * 1e-12)
    low, high = math.log(min(lower, upper)), math.log(upper)
    for _ in range(4):
        grid = np.linspace(low, high, POINTS)
        energies = [_free_energy(math.exp(g), squares, short, long, edge) for g in grid]
        best = int(np.argmin(energies))
        low, high = grid[max(0, best - 1)], grid[min(POINTS - 1, best + 1)]
    return math.exp(float(grid[best]))


def _free_energy(noise: float, squares: Array, short: int, long: int, edge: float) -> float:
    alpha = short / long
    x = np.maximum(squares / (long * noise), 1e-300)
    signal, rest = x[x > edge], x[x <= edge]
    shift = signal - (1 + alpha)
    tau = (shift + np.sqrt(np.maximum(0.0, shift**2 - 4 * alpha))) / 2
    energy = np.sum(rest - np.log(rest)) + np.sum(signal - tau) + np.sum(np.log((tau + 1) / signal))
    return float(energy + alpha * np.sum(np.log(tau / alpha + 1)))
