"""Filter pruning: `ft` and `pfp`. Whole channels go, through the whole network, until the budget is met.

Each group of channels gets a score for every channel and keeps the best ones. How many is decided by one
number for all groups: the share that goes (`constant`), or the error that is allowed (`sampling`, `minimax`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import cast

import torch
from torch import Tensor, nn

from rankwise.calibration.activations import Data
from rankwise.core.layer import Coverage, Skipped, canonical
from rankwise.core.linalg import check_finite, precise
from rankwise.core.option import Cost
from rankwise.errors import BudgetError, RankwiseError
from rankwise.planning.budget import Budget
from rankwise.planning.findings import CutGroup, Findings, WholeGroup
from rankwise.planning.plan import Plan, Pruned, listed
from rankwise.planning.units import UNITS
from rankwise.pruning.channels import UNSEEN, Channels, Group, cost, entries, find_channels, readers
from rankwise.pruning.sensitivity import sensitivities
from rankwise.pruning.trials import random_copy, why_not
from rankwise.surgery.forward import Example

SCORES = ("norm", "sensitivity")
SEARCHES = ("constant", "sampling", "minimax")
NOT_CUT = "the budget leaves it whole"
COMPUTED = "its weight is computed from all of its channels: with fewer it would be another one"


@dataclass(frozen=True)
class Filters:
    """How filters are chosen: the score of a channel, and the search that splits the budget between groups.

    `norm`: ℓ1 norm of the filters that make the channel; `sensitivity`: its largest share in what readers
    compute, which needs data. `constant`: the same share goes everywhere. `sampling`: as many as the guarantee
    of random sampling asks for at one error for all groups. `minimax`: the largest sum of sensitivities that
    go, which bounds the error on the data, is as small as possible.
    """

    score: str
    search: str

    def __post_init__(self) -> None:
        for name, known in (("score", SCORES), ("search", SEARCHES)):
            if getattr(self, name) not in known:
                raise RankwiseError(f"unknown {name} {getattr(self, name)!r}: possible are {', '.join(known)}")
        if self.score == "norm" and self.search != "constant":
            raise RankwiseError(
                f"search={self.search!r} needs an error for each number of channels, which score='norm' does not have: "
                f"use score='sensitivity', or search='constant'"
            )

    @property
    def needs_data(self) -> bool:
        return self.score == "sensitivity"


def plan_filters(
    model: nn.Module,
    example: Example | None,
    coverage: Coverage,
    settings: Filters,
    budget: Budget,
    data: Data | None = None,
) -> Plan:
    """The plan of a filter pruning method; never above the budget, and an error if nothing fits it.

    Who asks for it names the method and the model in it.
    """
    if settings.needs_data and data is None:
        raise RankwiseError(
            f"the score {settings.score!r} looks at what flows through the layers, and no calibration data was given: "
            f"pass data= (on the command line: --data)"
        )
    limits = budget.limits(coverage)
    counted = tuple(Cost.__dataclass_fields__)
    for unit in set(budget.units) - set(counted):
        raise RankwiseError(
            f"the budget is in {unit}, and methods that remove filters count {', '.join(counted)}: "
            f"give it in one of these, or use a method that decomposes layers"
        )
    probe = random_copy(model)
    channels = find_channels(model, example, coverage, probe)
    assert example is not None, "it is needed to find channels"
    if channels.free and not _fits(channels, channels.free, [1] * len(channels.free), limits):
        raise _cannot_be_met(channels, channels.free, limits)  # before anything is looked at
    groups, scores, unseen = _scored(model, data, channels, settings)
    if not groups:
        first = next((f"{g.names('out')[0]}: {g.reason}" for g in channels.fixed), "it has no layers")
        raise RankwiseError(f"no filter of the model can be removed ({first}): use a method that decomposes layers")
    kept, found_by = _SEARCHES[settings.search](channels, groups, scores, limits)
    stay = [sorted(s.argsort(descending=True, stable=True)[:n].tolist()) for s, n in zip(scores, kept, strict=True)]
    found, after = entries(channels, groups, stay), cost(channels, groups, kept)
    why = why_not(probe, example, found, readers(groups, stay), after.macs or 0)
    if why is not None:
        raise RankwiseError(
            f"the pruned network would not compute the same ({why}): exclude layers, or use another method"
        )
    return Plan(
        model="",
        method="",
        budget=budget,
        before=channels.whole,
        after=after,
        layers=_all_layers(model, coverage, channels, unseen, found),
        settings=asdict(settings),
        search=_findings(found_by, channels, groups, kept, unseen),
        warnings=_warnings(channels, unseen),
    )


def _warnings(channels: Channels, unseen: dict[Group, str]) -> tuple[str, ...]:
    names = [name for group in unseen for name in _makers(channels, group)]
    return (f"the calibration data does not reach those who read {listed(names)}: left whole",) if names else ()


def _findings(
    found: Findings, channels: Channels, groups: Sequence[Group], kept: Sequence[int], unseen: dict[Group, str]
) -> Findings:
    """Also what became of every group: how many of its channels are kept, or why it stays whole."""
    held = [(g, g.reason or unseen[g]) for g in channels.groups if g.reason or g in unseen]
    cut = zip(groups, kept, strict=True)
    return replace(
        found,
        groups=tuple(CutGroup(_makers(channels, g), g.size, n) for g, n in cut),
        whole=tuple(WholeGroup(_makers(channels, g), g.size, why) for g, why in held),
    )


def _makers(channels: Channels, group: Group) -> tuple[str, ...]:
    layers = {part.name for part in channels.parts if part.layer is not None}
    return tuple(name for name in group.names("out") if name in layers)


def _scored(
    model: nn.Module, data: Data | None, channels: Channels, settings: Filters
) -> tuple[list[Group], list[Tensor], dict[Group, str]]:
    """Groups that can be pruned, the score of each of their channels, and groups that the data does not reach."""
    if not settings.needs_data or data is None:
        return list(channels.free), [norms(model, channels, g) for g in channels.free], {}
    found = sensitivities(model, data, channels, channels.free)
    both = list(zip(channels.free, found, strict=True))
    unseen = {g: "the calibration data does not reach those who read it" for g, s in both if s is None}
    return [g for g, s in both if s is not None], [s for _, s in both if s is not None], unseen


def norms(model: nn.Module, channels: Channels, group: Group) -> Tensor:
    """Σ |w| over the filters that make each channel: of every layer whose outputs are added into it."""
    layers = {part.name: part.layer for part in channels.parts if part.layer is not None}
    total = torch.zeros(group.size, dtype=torch.float64)
    for member in group.members:
        layer = layers.get(member.name)
        if member.side == "out" and layer is not None:
            weight = cast(Tensor, model.get_submodule(member.name).weight).detach()
            check_finite(weight, member.name)
            size = canonical(precise(weight), layer).flatten(0, 1).flatten(1).abs().sum(1)
            total += size[torch.tensor(member.indices)].sum(1)
    return total


def _fits(channels: Channels, groups: Sequence[Group], kept: Sequence[int], limits: dict[str, int]) -> bool:
    after = cost(channels, groups, kept)
    return all(getattr(after, unit) <= limit for unit, limit in limits.items())


def _constant(
    channels: Channels, groups: Sequence[Group], scores: Sequence[Tensor], limits: dict[str, int]
) -> tuple[list[int], Findings]:
    """The smallest share that meets the budget when it goes from every group, rounded down, one channel staying.

    Shares between two neighbours of the list remove the same channels, so that the bisection is exact.
    """
    shares = sorted({Fraction(i, size) for size in {g.size for g in groups} for i in range(size)})

    def kept(share: Fraction) -> list[int]:
        return [max(1, g.size - math.floor(share * g.size)) for g in groups]

    best = _first(len(shares), lambda i: _fits(channels, groups, kept(shares[i]), limits))
    if best is None:
        raise _cannot_be_met(channels, groups, limits)
    return kept(shares[best]), Findings(objective=float(shares[best]))


def _minimax(
    channels: Channels, groups: Sequence[Group], scores: Sequence[Tensor], limits: dict[str, int]
) -> tuple[list[int], Findings]:
    """The least largest error bound; entry n of a group's curve is the sum of all sensitivities but the n largest.

    Every group keeps as few channels as its error allows at a level; levels are the values of the curves,
    and the size of the network falls with the level, so that the bisection is exact.
    """
    curves = [error_curve(s) for s in scores]
    nothing = torch.tensor([-1.0], dtype=torch.float64)  # below every error: nothing goes, if the budget allows it
    levels = torch.unique(torch.cat([nothing, *(c[1:] for c in curves)]))

    def kept(level: float) -> list[int]:
        return [min(g.size, max(1, int((c > level).sum()))) for g, c in zip(groups, curves, strict=True)]

    best = _first(len(levels), lambda i: _fits(channels, groups, kept(float(levels[i])), limits))
    if best is None:
        raise _cannot_be_met(channels, groups, limits)
    return kept(float(levels[best])), Findings(objective=max(0.0, float(levels[best])))


def _sampling(
    channels: Channels, groups: Sequence[Group], scores: Sequence[Tensor], limits: dict[str, int]
) -> tuple[list[int], Findings]:
    """As many channels as m = ⌈d · S⌉ draws from s / S are expected to find, for the largest d that fits.

    One error ε for all groups asks for m = ⌈(6 + 2ε) S K log(4η/δ) / ε²⌉ draws in a group whose sensitivities add
    up to S, so that d, the draws for each unit of sensitivity, stands for ε whatever the constants are.
    """

    def kept(power: float) -> list[int]:
        return [distinct(s, math.ceil(2.0**power * float(s.sum()))) for s in scores]

    low, high = -40.0, 60.0  # from one draw to all channels that have a sensitivity
    for whole in ([g.size for g in groups], kept(high)):
        if _fits(channels, groups, whole, limits):
            return whole, Findings(objective=0.0)
    if not _fits(channels, groups, kept(low), limits):
        raise _cannot_be_met(channels, groups, limits)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _fits(channels, groups, kept(middle), limits) else (low, middle)
    left = [float(error_curve(s)[n]) for s, n in zip(scores, kept(low), strict=True)]
    return kept(low), Findings(objective=max(left), draws=2.0**low)


def distinct(scores: Tensor, draws: int) -> int:
    """How many different channels so many draws with probability s / S are expected to find, at least one.

    >>> distinct(torch.ones(4), 1), distinct(torch.ones(4), 4), distinct(torch.ones(4), 1000)
    (1, 2, 4)
    """
    total = float(scores.sum())
    if not total:
        return 1
    missed = (float(draws) * torch.log1p(-scores.double() / total)).exp()
    return max(1, math.floor(float((1 - missed).sum())))


_SEARCHES = {"constant": _constant, "sampling": _sampling, "minimax": _minimax}


def error_curve(scores: Tensor) -> Tensor:
    """Entry n is what removing all but the n most sensitive channels may change, 0 at the end: length n + 1."""
    rising = scores.double().sort().values
    return torch.cat([rising.new_zeros(1), rising.cumsum(0)]).flip(0)


def _first(n: int, good: Callable[[int], bool]) -> int | None:
    """The first of n that is good, where all behind a good one are good; None if there is none."""
    if not n or not good(n - 1):
        return None
    low, high = 0, n - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle + 1, high)
    return high


def _cannot_be_met(channels: Channels, groups: Sequence[Group], limits: dict[str, int]) -> BudgetError:
    least = cost(channels, groups, [1] * len(groups))
    parts = []
    for unit, limit in limits.items():
        count, whole = getattr(least, unit), getattr(channels.whole, unit)
        asked, keep = UNITS[unit].amount(limit), UNITS[unit].keep_for(count, whole)  # a budget of this keep can be met
        possible = UNITS[unit].show(count)
        parts.append(f"at most {asked} are asked for and the least possible is {possible} (keep {keep:.4f})")
    return BudgetError(
        f"the budget cannot be met: {'; '.join(parts)}; one channel of each group must stay, and what cannot be "
        f"pruned too: raise the budget, or exclude fewer layers"
    )


def _all_layers(
    model: nn.Module, coverage: Coverage, channels: Channels, unseen: dict[Group, str], found: list[Pruned]
) -> tuple[Pruned | Skipped, ...]:
    """Every module with parameters in the order of the network: narrowed, or left whole with the reason."""
    thin = {entry.name: entry for entry in found}
    skipped = {s.name: s for s in coverage.skipped}
    layers = {part.name: part for part in channels.parts if part.layer is not None}
    computed = {layer.name: layer for layer in coverage.layers if layer.computed}
    why: dict[str, str] = {}
    for group in channels.groups:
        for name in group.names("out"):
            why.setdefault(name, group.reason or unseen.get(group, NOT_CUT))
    out: list[Pruned | Skipped] = []
    for name, _ in model.named_modules():
        if name in thin:
            out.append(thin[name])
        elif name in layers:
            part = layers[name]
            whole = part.cost(part.outputs, part.inputs)
            out.append(Skipped(name, part.kind, whole.params, why.get(name, UNSEEN), whole.macs))
        elif name in skipped:
            out.append(skipped[name])
        elif name in computed:
            layer = computed[name]
            out.append(Skipped(name, layer.kind, layer.params, COMPUTED, layer.macs))
    return tuple(out)
