"""`whitened-tucker2`: the three parts of tucker2 (1×1, a core with the layer's own kernel, 1×1) in the metric of data.

Encoders are those of the pair whose decoder owns all taps (whitened.py): features z, one of each at every tap. Least
squares gives the outputs from the features of s encoders; of that map the r strongest directions of the outputs stay,
in their own metric SᵀS (reduced-rank regression):

    X = S E[y zᵀ] L⁻ᵀ,   E[z zᵀ] = L Lᵀ,   U the leading r left singular vectors of X,   core Uᵀ X L⁻¹,   then S⁻¹ U

Scored with the directions of all features: Uᵀ X has the errors of all (r, s) in its entries, since features of s are a
part of those of s + 1. Built with those of its own s, and then in turns: encoders for the directions that stay,
directions for these encoders, as long as the error falls. So what is built is never worse than what was scored.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rankwise.core.fold import all_folds
from rankwise.core.layer import Layer
from rankwise.core.linalg import Array, array, eigenvectors
from rankwise.core.option import Option
from rankwise.decompositions import held_out, tucker, whitened
from rankwise.decompositions.base import METRIC, Factors, Sample, Scores, Selection, Target
from rankwise.decompositions.whitened import Fitted, encoders, features, groups_of
from rankwise.errors import RankwiseError

STEPS = 10
SETTLED = 1e-4  # a step that gains less than this share of what is explained is the last
OUTERS = 64  # outer ranks to choose from at most


class WhitenedTucker(tucker.Cored):
    """Only where there is a kernel: of a transposed convolution every tap is an output of its own."""

    name = "whitened-tucker2"
    about = "the same three parts as tucker2, in the metric of calibration data"
    needs = METRIC

    def candidates(self, layer: Layer, selection: Selection) -> list[Option]:
        return super().candidates(layer, selection) if is_possible(layer) else []

    def wanted(self, layer: Layer, there: list[Option], selection: Selection) -> list[Option]:
        """A core is neither a fold nor a slice: it is offered where neither is asked for."""
        if selection.folds != "all" or selection.slices != "all":
            return []
        every = -(-layer.group_filters // OUTERS)
        return [option for option in super().wanted(layer, there, selection) if option.outer % every == 0]

    def check(self, layer: Layer, option: Option, where: str) -> None:
        super().check(layer, option, where)
        if layer.transposed or not tucker.has_taps(layer):
            raise RankwiseError(
                f"{where} has the decomposition {self.name!r}, which needs a kernel and no transposed convolution: "
                f"take {whitened.DECOMPOSITION.name!r} or {tucker.DECOMPOSITION.name!r} there"
            )

    def score(self, target: Target, selection: Selection) -> Scores:
        layer = target.layer
        if not is_possible(layer) or whitened.is_wide(layer) or selection.folds != "all" or selection.slices != "all":
            return Scores()
        found = [sample_errors(target, sample) for sample in target.measured()]
        errors = np.minimum.accumulate(np.maximum(0.0, np.mean(found, axis=0)), axis=1)
        return Scores(given={self.family(layer): {"effect": errors[1 : tucker.full_outer(layer) + 1]}})

    def factors(self, target: Target, option: Option, rank: int) -> Factors:
        if target.moment is None:
            return tucker.DECOMPOSITION.factors(target, option, rank)
        return tucker.cored_factors(*factors(target, option, rank), target.layer)


DECOMPOSITION = WhitenedTucker()


def is_possible(layer: Layer) -> bool:
    return tucker.has_taps(layer) and not layer.transposed and min(layer.group_filters, layer.group_channels) > 1


def start(layer: Layer) -> Option:
    """The pair whose encoders these are: the fold with all kernel axes on the left."""
    return Option(all_folds(layer.dims)[-1], 1, whitened.DECOMPOSITION.name)


def curves(fitted: Fitted, layer: Layer, metric: Tensor) -> Array:
    """E ‖S (W − Ŵ) x‖² by both ranks, for a fit of `start`: row r − 1 is outer rank r, entry s is rank s."""
    ranks = fitted.encoder.shape[2]
    kept = np.zeros((layer.group_filters, ranks + 1))
    for root, cross, scale in zip(fitted.roots, fitted.cross, metric, strict=True):
        explained = _explained(root, cross, scale)
        turned = explained @ _directions(explained)[0]
        energy = turned.square().reshape(ranks, -1, layer.group_filters).sum(1).t()
        kept[:, 1:] += array(energy.cumsum(0).cumsum(1))
    return np.minimum.accumulate(np.maximum(0.0, fitted.errors[0] - kept), axis=1)[: tucker.full_outer(layer)]


def sample_errors(target: Target, sample: Sample) -> Array:
    """The same on inputs that nothing was fitted to; row r is outer rank r, from 0 on."""
    layer, lost = target.layer, np.zeros((1, 1))
    fitting = replace(target, moment=sample.moment, metric=sample.metric)
    testing = replace(target, moment=sample.test_moment, metric=sample.test_metric)
    option = start(layer)
    for fitted, tested in zip(groups_of(fitting, option), groups_of(testing, option), strict=True):
        matrices, rows, blocks, scale = fitted
        scale = torch.eye(len(rows), dtype=rows.dtype, device=rows.device) if scale is None else scale
        encoder = encoders(matrices, scale, blocks)
        root, cross = features(rows, encoder, blocks)
        explained = _explained(root, cross, scale)
        directions = _directions(explained)[0]
        whole = held_out.total(rows, tested[2], tested[3])
        test = whitened.products(rows, encoder, tested[2])
        back = torch.linalg.solve(scale, directions)
        turned = explained @ directions
        lost = lost + held_out.core_errors(whole, root, turned, back, test, tested[3], encoder.shape[1])
    return lost


def factors(target: Target, option: Option, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """U (G, f/G, r), core (G, r, s, *kernel), V (G, c/G, s), as `tucker.factors` gives them."""
    found = [_in_turns(group, option.outer, rank) for group in groups_of(target, start(target.layer))]
    left, core, right = (torch.stack(p) for p in zip(*found, strict=True))
    return left, torch.unflatten(core, -1, target.layer.kernel), right


def _in_turns(
    group: tuple[Tensor, Tensor, Tensor, Tensor | None], outer: int, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    slices, rows, blocks, scale = group
    if scale is None or not bool(scale.any()):
        scale = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
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
    values, vectors = eigenvectors(explained.t() @ explained)
    return vectors, values


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
