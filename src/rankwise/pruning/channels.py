"""Channels: what can be taken out of a network together, and what must stay, with the reason.

A channel is made in one place and read in others: removing it removes a filter of every layer that makes
it (several, where they are added), its entry in batch norms, its slice of depthwise convolutions, and the
inputs for it of every layer that reads it. Channels that live in the same places form a group.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rankwise.core.layer import Coverage
from rankwise.core.option import Cost
from rankwise.errors import RankwiseError
from rankwise.planning.plan import Pruned
from rankwise.pruning.graph import Links, Place, follow
from rankwise.pruning.trials import random_copy, why_not
from rankwise.surgery.coverage import DEPTHWISE, HOOKS, OTHER_KIND, tied_to
from rankwise.surgery.forward import Example, observe
from rankwise.surgery.narrow import Prunable, part_of

UNSEEN = "the example's forward pass does not show where its filters go"
ONE = "it has one channel only"


@dataclass(frozen=True)
class Member:
    """One side ("out" or "in") of a module: for every channel of the group, its indices there.

    A layer behind a flatten has several indices for a channel; behind a concatenation they start elsewhere.
    Modules with every channel on its own (batch norm, depthwise) are listed once, as "out".
    """

    name: str
    side: str
    indices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Group:
    """Channels that live in the same places; `reason` says why they must stay, and is empty if they need not."""

    size: int
    members: tuple[Member, ...]
    reason: str = ""

    def names(self, side: str) -> tuple[str, ...]:
        return tuple(m.name for m in self.members if m.side == side)


@dataclass(frozen=True)
class Channels:
    """All groups of a network, the modules they touch in the network's order, and what the whole network costs."""

    groups: tuple[Group, ...]
    parts: tuple[Prunable, ...]
    whole: Cost

    @property
    def free(self) -> tuple[Group, ...]:
        return tuple(g for g in self.groups if not g.reason)

    @property
    def fixed(self) -> tuple[Group, ...]:
        return tuple(g for g in self.groups if g.reason)


def cost(channels: Channels, groups: Sequence[Group], kept: Sequence[int]) -> Cost:
    """Exact params and macs of the network when so many channels of each group are left."""
    gone: dict[tuple[str, str], int] = {}
    for group, n in zip(groups, kept, strict=True):
        for member in group.members:
            key = (member.name, member.side)
            gone[key] = gone.get(key, 0) + (group.size - n) * len(member.indices[0])
    touched = {name for name, _ in gone}
    params, macs = channels.whole.params, channels.whole.macs or 0
    for part in channels.parts:
        if part.name in touched:
            before, after = part.cost(part.outputs, part.inputs), part.cost(*_left(part, gone))
            params += after.params - before.params
            macs += (after.macs or 0) - (before.macs or 0)
    return Cost(params, macs)


def _left(part: Prunable, gone: dict[tuple[str, str], int]) -> tuple[int, int]:
    out, into = gone.get((part.name, "out"), 0), gone.get((part.name, "in"), 0)
    return part.outputs - out, part.inputs - (out if part.own else into)


def entries(channels: Channels, groups: Sequence[Group], kept: Sequence[Sequence[int]]) -> list[Pruned]:
    """What every touched module keeps, when these channels of each group are left."""
    gone: dict[tuple[str, str], set[int]] = {}
    for group, stay in zip(groups, kept, strict=True):
        out = set(range(group.size)) - set(stay)
        for member in group.members:
            places = gone.setdefault((member.name, member.side), set())
            places.update(i for c in out for i in member.indices[c])
    found = []
    for part in channels.parts:
        out, into = gone.get((part.name, "out"), set()), gone.get((part.name, "in"), set())
        if not out and not into:
            continue
        filters = _rest(part.outputs, out)
        inputs = filters if part.depthwise else _rest(part.inputs, into)
        left = part.cost(part.outputs - len(out), part.inputs - len(out if part.own else into))
        found.append(Pruned(part.name, part.kind, part.shape, filters, inputs, _whole(part), left))
    return found


def _rest(wide: int, gone: set[int]) -> tuple[int, ...] | None:
    return tuple(i for i in range(wide) if i not in gone) if gone else None


def _whole(part: Prunable) -> Cost:
    return part.cost(part.outputs, part.inputs)


def readers(groups: Sequence[Group], kept: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """The inputs that are gone, for every layer that reads some of the channels."""
    gone: dict[str, list[int]] = {}
    for group, stay in zip(groups, kept, strict=True):
        away = sorted(set(range(group.size)) - set(stay))
        for member in group.members:
            if member.side == "in" and away:
                gone.setdefault(member.name, []).extend(i for c in away for i in member.indices[c])
    return gone


def find_channels(
    model: nn.Module, example: Example | None, coverage: Coverage, probe: nn.Module | None = None
) -> Channels:
    """Every output of every linear and convolution layer, in a group that can be pruned or must stay.

    The graph is torch-pruning's, and every group is tried: it counts as free only if the network without
    some of its channels gives what the network gives when no layer reads them. `probe` is what
    `trials.random_copy` gives for the model, if that exists already.
    """
    if example is None:
        raise RankwiseError(
            "filters are removed through the graph of the network, which needs an example input: pass one "
            "(on the command line: --input 1,3,224,224)"
        )
    parts = {name: part for name, m in model.named_modules() if (part := part_of(m, name)) is not None}
    layers = {name: model.get_submodule(name) for name, part in parts.items() if part.layer is not None}
    observed = observe(model, example, layers)
    for name in layers:
        layer = parts[name].layer
        assert layer is not None, "only layers are observed"
        parts[name] = replace(parts[name], layer=replace(layer, calls=observed.calls[name]))
    probe = random_copy(model) if probe is None else probe
    links = follow(probe, example)
    blocked = {**_blocked(model, coverage, parts), **observed.unfit}
    groups = _groups(links, parts, blocked)
    seen = {(m.name, i) for g in groups for m in g.members if m.side == "out" for c in m.indices for i in c}
    for name in layers:  # what the graph does not show must stay
        rest = [(i,) for i in range(parts[name].outputs) if (name, i) not in seen]
        if rest:
            lost = blocked.get(name, UNSEEN)
            groups.append(Group(len(rest), (Member(name, "out", tuple(rest)),), lost))
    channels = Channels(tuple(groups), tuple(parts.values()), Cost(coverage.params, observed.macs))
    return _tried(channels, probe, example)


def _blocked(model: nn.Module, coverage: Coverage, parts: dict[str, Prunable]) -> dict[str, str]:
    """Modules that must not change, and why."""
    fine = (DEPTHWISE, HOOKS, OTHER_KIND)
    found = {s.name: s.reason for s in coverage.skipped if s.reason not in fine}
    for name, part in parts.items():
        if part.layer is None:
            tied = tied_to(model, name)
            if tied is not None:
                found.setdefault(name, f"its weight is tied to {tied or 'the model itself'}")
        elif part.layer.groups > 1 and not part.depthwise:
            reason = f"grouped: each of its {part.layer.groups} groups would have to keep equally many"
            found.setdefault(name, reason)
    return found


def _groups(links: Links, parts: dict[str, Prunable], blocked: dict[str, str]) -> list[Group]:
    """Channels with the same places and the same reason to stay, in the order of the network."""
    order = {name: i for i, name in enumerate(parts)}
    reasons = links.reason()
    alike: dict[Any, list[dict[tuple[str, str], list[int]]]] = {}
    for root, places in links.channels().items():
        sides: dict[tuple[str, str], list[int]] = {}
        for name, side, i in sorted(places, key=lambda p: (order[p[0]], p[1], p[2])):
            sides.setdefault((name, side), []).append(i)
        reason = _reason(root, list(sides), reasons, blocked)
        key = (tuple((side, len(i)) for side, i in sides.items()), reason)
        alike.setdefault(key, []).append(sides)
    groups = []
    for (places_, reason), rows in alike.items():
        first = next(side for side, _ in places_ if side[1] == "out")
        rows.sort(key=lambda sides: sides[first])
        members = tuple(Member(n, s, tuple(tuple(r[n, s]) for r in rows)) for (n, s), _ in places_)
        groups.append(Group(len(rows), members, reason))
    return sorted(groups, key=lambda g: (order[g.names("out")[0]], g.members[0].indices))


def _reason(root: Place, sides: list[tuple[str, str]], reasons: dict[Place, str], blocked: dict[str, str]) -> str:
    if root in reasons:
        return reasons[root]
    held = [name for name, _ in sides if name in blocked]
    if not held:
        return ""
    return blocked[held[0]] if sides[0] == (held[0], "out") else f"it meets {held[0]!r}: {blocked[held[0]]}"


def _tried(channels: Channels, probe: nn.Module, example: Example) -> Channels:
    """The same groups with a reason to stay for each that does not pass its trial."""
    draw = random.Random(0)
    reasons: dict[Group, str] = {g: ONE for g in channels.free if g.size == 1}

    def passes(groups: list[Group]) -> str | None:
        for _ in range(2):
            # Random numbers of channels: equal ones would hide that a network splits its channels in the middle.
            kept = [sorted(draw.sample(range(g.size), draw.randint(1, g.size - 1))) for g in groups]
            after = cost(channels, groups, [len(k) for k in kept]).macs or 0
            why = why_not(probe, example, entries(channels, groups, kept), readers(groups, kept), after)
            if why is not None:
                return why
        return None

    def sound(groups: list[Group], base: list[Group]) -> list[Group]:
        """Those of the groups that pass together with `base`, found by halving."""
        why = passes([*base, *groups]) if groups else None
        if why is None:
            return groups
        if len(groups) == 1:
            reasons[groups[0]] = why
            return []
        half = len(groups) // 2
        left = sound(groups[:half], base)
        return left + sound(groups[half:], [*base, *left])

    sound([g for g in channels.free if g not in reasons], [])
    return replace(channels, groups=tuple(replace(g, reason=reasons.get(g, g.reason)) for g in channels.groups))
