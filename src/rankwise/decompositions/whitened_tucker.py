"""Tucker-2 in the metric of data: 1×1, a core with the layer's own kernel, 1×1 (the same three parts as tucker.py).

Encoders are those of the pair whose decoder owns all taps (whiten.py): features z, one of each at every tap. Least
squares gives the outputs from the features of s encoders; of that map the r strongest directions of the outputs stay,
in their own metric SᵀS (reduced-rank regression):

    X = S E[y zᵀ] L⁻ᵀ,   E[z zᵀ] = L Lᵀ,   U the leading r left singular vectors of X,   core Uᵀ X L⁻¹,   then S⁻¹ U

Scored with the directions of all features: Uᵀ X has the errors of all (r, s) in its entries, since features of s are a
part of those of s + 1. Built with those of its own s, and then in turns: encoders for the directions that stay,
directions for these encoders, as long as the error falls. So what is built is never worse than what was scored.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rankwise.core.fold import all_folds, fold_for
from rankwise.core.layer import Layer
from rankwise.core.linalg import Array
from rankwise.core.option import Option, full_outer
from rankwise.decompositions.tucker import has_taps
from rankwise.decompositions.whitened import Fitted, encoders, features, parts

NAME = "whitened-tucker2"
STEPS = 10
SETTLED = 1e-4  # a step that gains less than this share of what is explained is the last


def is_possible(layer: Layer) -> bool:
    """Of a transposed convolution every tap is an output of its own, and there would be nothing between."""
    return has_taps(layer) and not layer.transposed and min(layer.group_filters, layer.group_channels) > 1


def family(layer: Layer) -> Option:
    """The option without its outer rank: what all the options of a layer have in common."""
    return Option(fold_for(0, layer.dims), 1, NAME)


def start(layer: Layer) -> Option:
    """The pair whose encoders these are: the fold with all kernel axes on the left."""
    return Option(all_folds(layer.dims)[-1], 1, "whitened")


def curves(fitted: Fitted, layer: Layer, metric: Tensor) -> Array:
    """E ‖S (W − Ŵ) x‖² by both ranks, for a fit of `start`: row r − 1 is outer rank r, entry s is rank s."""
    ranks = fitted.encoder.shape[2]
    kept = np.zeros((layer.group_filters, ranks + 1))
    for root, cross, scale in zip(fitted.roots, fitted.cross, metric, strict=True):
        explained = _explained(root, cross, scale)
        turned = explained @ _directions(explained)[0]
        energy = turned.square().reshape(ranks, -1, layer.group_filters).sum(1).t()
        kept[:, 1:] += energy.cumsum(0).cumsum(1).numpy()
    return np.minimum.accumulate(np.maximum(0.0, fitted.errors[0] - kept), axis=1)[: full_outer(layer)]


def factors(
    weight: Tensor, layer: Layer, option: Option, rank: int, moment: Tensor, metric: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """U (G, f/G, r), core (G, r, s, *kernel), V (G, c/G, s), as `tucker.factors` gives them."""
    found = [_in_turns(*part, option.outer, rank) for part in parts(weight, layer, start(layer), moment, metric)]
    left, core, right = (torch.stack(p) for p in zip(*found, strict=True))
    return left, torch.unflatten(core, -1, layer.kernel), right


def _in_turns(
    slices: Tensor, rows: Tensor, blocks: Tensor, scale: Tensor | None, outer: int, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    if scale is None or not bool(scale.any()):
        scale = torch.eye(len(rows), dtype=rows.dtype)
    towards, before, best = scale, 0.0, None
    for _ in range(STEPS):
        encoder = encoders(slices, towards, blocks)[:, :rank]
        root, cross = features(rows, encoder, blocks)
        explained = _explained(root, cross, scale)
        directions, strengths = _directions(explained)
        directions, now = directions[:, :outer], float(strengths[:outer].sum())
        if best is not None and now <= before:
            break
        core = torch.linalg.solve_triangular(root.t(), explained @ directions, upper=True).t()
        best = directions, core.reshape(outer, rank, -1), encoder[0]
        if now - before <= SETTLED * now:
            break
        towards, before = directions.t() @ scale, now
    assert best is not None, "the first step is always taken"
    directions, core, first = best
    return _balanced(torch.linalg.solve(scale, directions), core, first.t())


def _explained(root: Tensor, cross: Tensor, scale: Tensor) -> Tensor:
    """Xᵀ, features by outputs: the squares of its entries are what each feature adds to what those before explain."""
    found: Tensor = torch.linalg.solve_triangular(root, (scale @ cross).t(), upper=False)
    return found


def _directions(explained: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal directions of the outputs, as columns, and what is explained along them; strongest first."""
    values, vectors = torch.linalg.eigh(explained.t() @ explained)
    return vectors.flip(1), values.flip(0)


def _balanced(left: Tensor, core: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same product with the core's channels as large as those before and behind it, on both sides."""

    def share(one: Tensor, other: Tensor) -> Tensor:
        ratio = (one.norm(dim=0) / other.norm(dim=0)).sqrt()
        return torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)

    for _ in range(5):  # one side moves the other
        outer = share(left, core.flatten(1).t())
        left, core = left / outer, core * outer[:, None, None]
        inner = share(right, core.transpose(1, 2).flatten(0, 1))
        core, right = core * inner[:, None], right / inner
    return left, core, right
