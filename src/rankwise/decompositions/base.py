"""What a decomposition is: the protocol that every file in this package follows.

    options   what a layer can become                                 which folds, slices, clusters, outer ranks
    parts     the layers that stand in for it at a rank, as shapes    costs follow from these, and so do modules
    score     the error curves of all options
    factors   the weights of the parts at a rank
    compose   the dense weight that those weights stand for

Nothing outside this package asks for a decomposition by its name: it asks the registry (`of(option)`), and then the
decomposition. A new one is a file with a `DECOMPOSITION` and a line in the registry.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankwise.core.fold import all_folds
from rankwise.core.layer import Layer, canonical, stored
from rankwise.core.linalg import Array, Ints, precise
from rankwise.core.moments import Moments
from rankwise.core.option import Option
from rankwise.core.parts import Part, cost_of
from rankwise.core.slicing import Folds, Slices
from rankwise.errors import RankwiseError

# What a decomposition looks at beside the weight.
NOTHING = ""
OUTPUTS = "outputs"  # moments of what the layer gives
METRIC = "metric"  # moments of what it gets, and a metric of what it gives: it is fitted to both
TOKENS = "tokens"  # how often tokens are looked up, and what errors there and in tied heads do


@dataclass(frozen=True, eq=False)
class Sample:
    """Moments and metrics of two sets of inputs: factors are fitted to one and measured on the other.

    `moment` (G, d, d) and the root S in `metric` are what is fitted to, drawn towards the identity; `test_moment` and
    the square SᵀS in `test_metric` what the result is measured with. No metric is the identity.
    """

    moment: Tensor
    metric: Tensor | None
    test_moment: Tensor
    test_metric: Tensor | None


@dataclass(frozen=True, eq=False)
class Target:
    """A layer with its numbers: what is to be approximated, and what calibration data says about it."""

    layer: Layer
    weight: Tensor
    bias: Tensor | None = None
    inputs: Moments | None = None  # of the patches it sees, for the measure `output`
    outputs: Moments | None = None  # of what it gives
    moment: Tensor | None = None  # (G, d, d) of the patches, as errors are measured with
    metric: Tensor | None = None  # S (G, f/G, f/G): an error δ of the outputs costs ‖S δ‖²
    samples: tuple[Sample, ...] = ()  # on which errors are measured; without any, on `moment` and `metric` themselves
    tokens: object = None  # of an embedding: what its uses say (embedding.py)
    start: Factors | None = None  # of the same option and rank, for a search to begin with

    def measured(self) -> tuple[Sample, ...]:
        """The samples; what was fitted to itself where there are none."""
        if self.samples or self.moment is None:
            return self.samples
        square = None if self.metric is None else self.metric.mT @ self.metric
        return (Sample(self.moment, self.metric, self.moment, square),)


@dataclass(frozen=True)
class Selection:
    """Which options are asked for. `clustering`, `seed` and `starts` are for decompositions that search for theirs."""

    folds: Folds = "all"
    slices: Slices = "all"
    clustering: str = ""
    seed: int = 0
    starts: int = 5


@dataclass(frozen=True, eq=False)
class Scores:
    """What is known of a layer's options.

    `spectra` have shape (G, k, r + 1), and the measures follow from them and from ‖W‖₂, in `norms` by fold. `given` are
    curves by measure: entry j is the error at rank j. Where a decomposition has two ranks the option has no outer rank,
    and row r − 1 of its curves is outer rank r.
    """

    spectra: dict[Option, Array] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    given: dict[Option, dict[str, Array]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Factors:
    """Weights of the parts by name, canonical (G, f/G, c/G, *kernel), one for each branch; and the last part's bias."""

    weights: Mapping[str, Sequence[Tensor]]
    bias: Tensor | None = None


@dataclass(frozen=True)
class Alone:
    """The settings of the method that is this decomposition alone: measure, search, and slices to begin with."""

    error: str
    search: str
    slices: Slices = 1


class Decomposition(ABC):
    """One way to decompose a layer; `name` is how options, plans and `decompositions=` speak of it."""

    name: str
    about: str
    needs: str = NOTHING
    adds_bias: bool = False  # it has a bias also where the layer has none
    timed_as: str | None = "pair"  # options of one kind, fold, slices and outer rank take the same time; None: unknown
    alone: Alone | None = None  # as a method of its own name

    # What a layer can become

    @abstractmethod
    def full_rank(self, layer: Layer, option: Option) -> int:
        """The largest rank worth having: there, with `outer` full as well, the parts are the same function."""

    @abstractmethod
    def parts(self, layer: Layer, option: Option, rank: Any) -> tuple[Part, ...]:
        """The layers that stand in for `layer`, in order; `rank` is a number, or an array of them."""

    def outers(self, layer: Layer) -> int:
        """The largest outer rank; 0 where there is one rank only."""
        return 0

    def candidates(self, layer: Layer, selection: Selection) -> list[Option]:
        """Options that shapes alone allow: at rank 1 none that `score` gives is cheaper than the cheapest of these."""
        return [Option(all_folds(layer.dims)[0], 1, self.name, outer=min(1, self.outers(layer)))]

    def wanted(self, layer: Layer, there: list[Option], selection: Selection) -> list[Option]:
        """Of the options that a table has for a layer, those of this decomposition that are asked for."""
        return [option for option in there if option.decomposition == self.name]

    def check(self, layer: Layer, option: Option, where: str) -> None:
        """Refuse an option that cannot be built for the layer; `where` begins the sentence."""
        check_fold(layer, option, where)
        if (option.fold, option.slices) != (first := (all_folds(layer.dims)[0], 1)):
            raise RankwiseError(
                f"{where} has the decomposition {option.decomposition!r} with {option.fold}, {option.slices}: "
                f"it takes {first[0]}, {first[1]}"
            )
        most = self.outers(layer)
        if most and not 1 <= option.outer <= most:
            raise RankwiseError(f"{where} has outer rank {option.outer}: possible are 1 to {most}")
        check_extras(option, where, outer=bool(most))

    # What it loses

    @abstractmethod
    def score(self, target: Target, selection: Selection) -> Scores:
        """The options of a layer and their error curves; empty where there is nothing to offer."""

    def output_errors(self, target: Target, options: Iterable[Option]) -> dict[Option, Array]:
        """E ‖(W − Ŵ) x‖² by rank over calibration data (`target.inputs`), for options that `score` gave.

        By building every rank; decompositions that know a shorter way take it.
        """
        assert target.inputs is not None, "the measure output was asked for with calibration data"
        moment = patch_moment(target.layer, target.inputs.second_moment)
        dense = precise(canonical(target.weight, target.layer).flatten(2))
        found = {}
        for option in options:
            lost = np.zeros(self.full_rank(target.layer, option) + 1)
            lost[0] = float(torch.einsum("gfa,gab,gfb->", dense, moment, dense))
            for rank in range(1, len(lost)):
                gap = dense - canonical(self.approximation(target, option, rank), target.layer).flatten(2)
                lost[rank] = float(torch.einsum("gfa,gab,gfb->", gap, moment, gap))
            found[option] = falling(lost)
        return found

    def unbudgeted(self, target: Target) -> tuple[Option, int] | None:
        """An option and its rank without any budget, where the weight itself tells; None: a budget is needed."""
        return None

    @property
    def needs_budget(self) -> bool:
        return type(self).unbudgeted is Decomposition.unbudgeted

    # What it builds

    @abstractmethod
    def factors(self, target: Target, option: Option, rank: int) -> Factors:
        """The weights of the parts. Decompositions that are fitted do with the weight alone where nothing was seen."""

    def compose(self, layer: Layer, option: Option, weights: Mapping[str, Sequence[Tensor]]) -> Tensor:
        """The dense weight that the parts stand for, in the layer's own layout: `factors` backwards."""
        return stored(chain([weights[name][0] for name in weights])[:, :, : layer.group_channels], layer)

    def approximation(self, target: Target, option: Option, rank: int) -> Tensor:
        """Ŵ at a rank, in the layer's own layout, in float64."""
        return self.compose(target.layer, option, self.factors(target, option, rank).weights)

    def costs(self, layer: Layer, option: Option) -> tuple[Ints, Ints | None]:
        """Params and macs by rank, from 0 to the full rank; entry j is what rank j costs."""
        ranks = np.arange(self.full_rank(layer, option) + 1)
        params, macs = cost_of(layer, self.parts(layer, option, ranks))
        bias = layer.filters if self.adds_bias and not layer.bias else 0
        return params + bias + 0 * ranks, None if macs is None else macs + 0 * ranks


def check_fold(layer: Layer, option: Option, where: str) -> None:
    folds = all_folds(layer.dims)
    if option.fold not in folds:
        raise RankwiseError(f"{where} has the unknown fold {option.fold!r}: possible are {', '.join(folds)}")


def check_extras(option: Option, where: str, outer: bool = False, clusters: bool = False) -> None:
    """Refuse what an option has and its decomposition does not."""
    if option.outer and not outer:
        raise RankwiseError(f"{where} has an outer rank, which {option.decomposition!r} does not have: leave it out")
    if option.clusters and not clusters:
        raise RankwiseError(f"{where} has clusters, which {option.decomposition!r} does not have: leave them out")


def chain(weights: Sequence[Tensor]) -> Tensor:
    """Canonical weights of layers in a row, each (G, out, in, *kernel) → the one weight that they multiply out to.

    Every kernel axis longer than 1 belongs to one of them. Groups of neighbours nest: one of the two numbers of groups
    divides the other.
    """
    whole = weights[0]
    for weight in weights[1:]:
        many, kernel = whole.shape[0], _joined(whole.shape[3:], weight.shape[3:])
        few = weight.shape[0]
        if many >= few:  # several groups below flow into each group above
            below = whole.reshape(few, many // few, whole.shape[1], -1)
            above = torch.unflatten(weight, 2, (many // few, -1)).movedim(2, 1)
        else:  # each group below is shared out among several above
            below = whole.reshape(many, few // many, whole.shape[1] * many // few, -1)
            above = weight.reshape(many, few // many, *weight.shape[1:])
        # (groups, shares, out, middle, *kernel) × (groups, shares, middle, in·kernel)
        taps = math.prod(above.shape[4:])
        rows = above.flatten(4).movedim(3, 4) if above.ndim > 4 else above[..., None, :]
        product = rows.reshape(*above.shape[:2], -1, above.shape[3]) @ below
        product = product.reshape(*above.shape[:3], taps, whole.shape[2], -1).movedim(3, 4)
        product = product.transpose(1, 2).flatten(2, 3) if many >= few else product.flatten(1, 2)
        whole = _interleaved(product, above.shape[4:], whole.shape[3:], kernel)
    return whole


def _joined(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a * b for a, b in zip(one, other, strict=True))


def _interleaved(product: Tensor, above: Sequence[int], below: Sequence[int], kernel: tuple[int, ...]) -> Tensor:
    """(G, out, in, taps above, taps below) → (G, out, in, *kernel), axis by axis."""
    dims = len(kernel)
    spread = product.reshape(*product.shape[:3], *above, *below)
    order = [0, 1, 2, *(axis for a in range(dims) for axis in (3 + a, 3 + dims + a))]
    return spread.permute(order).reshape(*product.shape[:3], *kernel)


def patch_moment(layer: Layer, moment: Tensor) -> Tensor:
    """(G, d, d) over patches in the order c, taps; of a transposed convolution each tap sees the same positions."""
    if not layer.transposed:
        return moment
    same = torch.eye(math.prod(layer.kernel), dtype=moment.dtype, device=moment.device)
    return torch.stack([torch.kron(m, same) for m in moment])


def falling(lost: Array) -> Array:
    """A curve that never rises: the largest value from each rank on."""
    return np.maximum.accumulate(np.maximum(lost, 0.0)[..., ::-1], axis=-1)[..., ::-1]


def without_outer(option: Option) -> Option:
    return replace(option, outer=0) if option.outer else option


def relative(lost: Array, whole: float) -> Array:
    """Relative to `whole`; a layer that gives nothing loses nothing."""
    return lost / whole if whole > 0 else np.zeros_like(lost)
