"""What layers of a compressed network get, beside what the original network gives: for fitting in order (fit.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor, nn

from rankwise.calibration.activations import by_channel, patch_size, patches_at, pooled_patches, spots_of
from rankwise.calibration.influence import Influence
from rankwise.calibration.inputs import Inputs, Portion
from rankwise.calibration.lockstep import Track
from rankwise.calibration.shrinkage import target_of_both
from rankwise.core.layer import Layer, canonical, stored
from rankwise.core.linalg import precise, working
from rankwise.core.moments import square
from rankwise.decompositions import Target
from rankwise.decompositions.whitened import shrunk
from rankwise.surgery.forward import run_example

HELD = 1 << 29  # bytes of activations that passes may hold at a layer
PIECE = 1 << 22  # entries of images that run at once
ROWS, LEAST = 16, 16  # patches for each dimension over all inputs, and of each input at least


@dataclass(frozen=True, eq=False)
class Means:
    """Of what a pair gets (G, d) and of what it should give (f,), by halves, where a bias makes up for a gap."""

    inputs: tuple[Tensor, Tensor]
    outputs: tuple[Tensor, Tensor]

    def gap(self, weight: Tensor, layer: Layer) -> Tensor:
        """E[y] − Ŵ E[x̂], as far as one half says what the other does."""
        one, other = (y - through(weight, layer, x) for x, y in zip(self.inputs, self.outputs, strict=True))
        power = float((one.square().sum() + other.square().sum()) / 2)
        share = min(1.0, max(0.0, float((one * other).sum()) / power)) if power > 0 else 0.0
        return share * (one + other) / 2


def through(weight: Tensor, layer: Layer, inputs: Tensor) -> Tensor:
    """What a layer without its bias makes of one patch (G, d): (f,)."""
    rows = precise(canonical(weight.detach(), layer).flatten(2))
    return (rows @ inputs[:, :, None]).flatten()


@dataclass(eq=False)
class _Companions:
    """One piece of the inputs on its way through both networks."""

    half: int
    piece: Portion
    ours: Track
    theirs: Track


class Crowd:
    """Passes of both networks, side by side: as many as may be held at a layer; the others wait, or begin again.

    `holds` are bytes that a pass of one sample holds behind each layer.
    """

    def __init__(
        self, model: nn.Module, small: nn.Module, inputs: Inputs, running: list[Track], holds: Mapping[str, float]
    ) -> None:
        self.model, self.small, self.running, self.holds = model, small, running, holds
        halves = [[(half, piece) for piece in part.pieces(PIECE)] for half, part in enumerate(inputs.halves)]
        # In turns, so that both halves have joined at any time.
        self.waiting = deque(piece for both in zip_longest(*halves) for piece in both if piece is not None)
        self.count = sum(len(p) for p in inputs.halves)
        self.passes: list[_Companions] = []
        self.random = torch.Generator().manual_seed(0)

    def gather(self, layer: Layer) -> LayerStatistics | None:
        """What the layer gets in the small network and gives in the original."""
        sums = LayerStatistics()
        held = 0.0
        for one in list(self.passes):
            held += self._add(sums, layer, one) if held < HELD or self._needed(one) else self._send_back(one)
        while self.waiting and held < HELD:
            half, piece = self.waiting.popleft()
            ours, theirs = (Track(partial(_run, net, piece)) for net in (self.model, self.small))
            one = _Companions(half, piece, ours, theirs)
            self.running += [one.ours, one.theirs]
            self.passes.append(one)
            held += self._add(sums, layer, one)
        return sums if sums.seen else None

    def _needed(self, one: _Companions) -> bool:
        """Whether it is the only one of its half."""
        return sum(other.half == one.half for other in self.passes) == 1

    def _send_back(self, one: _Companions) -> float:
        """There is no room for it here: it begins again at a layer where there is."""
        for track in (one.ours, one.theirs):
            track.drop()
        self.passes.remove(one)
        self.waiting.append((one.half, one.piece))
        return 0.0

    def _add(self, sums: LayerStatistics, layer: Layer, one: _Companions) -> float:
        """Let both passes come to the layer, and add what they have; the bytes that they hold there."""
        wanted, given = one.ours.resume(layer.name), one.theirs.resume(layer.name)
        if one.ours.ended or one.theirs.ended:
            self.passes.remove(one)
        if wanted is None or given is None:
            return 0.0
        wanted_rows = max(LEAST, -(-ROWS * patch_size(layer) // max(1, self.count)))
        sums.add(layer, one.half, given, wanted, spots_of(layer, given, wanted, wanted_rows, self.random))
        return 2 * self.holds[layer.name] * len(one.piece)


def _run(network: nn.Module, piece: Portion) -> None:
    run_example(network, piece.together())


@dataclass
class LayerStatistics:
    """Of one layer, by halves: moments of what it gets in the small network, beside what the original one gives.

    Rows are (x̂, y) at single positions, and their means over all positions of an input: where the network averages
    over positions it is the latter that count (`Influence.alike`).
    """

    single: tuple[_PairSums, _PairSums] = field(default_factory=lambda: (_PairSums(), _PairSums()))
    pooled: tuple[_PairSums, _PairSums] = field(default_factory=lambda: (_PairSums(), _PairSums()))

    @property
    def seen(self) -> bool:
        return all(sums.count for sums in self.single)

    def add(self, layer: Layer, half: int, given: Tensor, wanted: Tensor, spots: Tensor) -> None:
        """Of inputs in the small network, and outputs of the original, at the same places."""
        rows = patches_at(layer, given, spots)
        if layer.transposed:
            self.single[half].add(rows, None)
            return
        last = wanted.movedim(wanted.ndim - layer.dims - 1, -1)
        whole = last.reshape(len(rows[0]) // len(spots), -1, last.shape[-1])
        self.single[half].add(rows, _grouped(layer, whole[:, spots.to(last.device)].flatten(0, 1)))
        if whole.shape[1] > 1:
            self.pooled[half].add(pooled_patches(layer, given), _grouped(layer, whole.mean(1)))

    def blended(self, half: int, alike: float, places: float, centred: bool, offset: Tensor | None) -> _Blend:
        """Moments as the network weighs them: positions one by one, and their means as far as gradients are alike."""
        single = self.single[half].centred(centred, offset)
        if not self.pooled[half].count or not alike > 0:
            return single
        pooled = self.pooled[half].centred(centred, offset)
        weight = alike * places
        return _Blend(
            (1 - alike) * single.square + weight * pooled.square,
            (1 - alike) * single.cross + weight * pooled.cross,
            pooled.inputs,
            pooled.outputs,
        )


def _grouped(layer: Layer, rows: Tensor) -> Tensor:
    """(n, f) → (G, n, f/G)."""
    return torch.unflatten(rows, 1, (layer.groups, -1)).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class _Blend:
    """E[x̂ x̂ᵀ] (G, d, d), E[y x̂ᵀ] (G, f/G, d), and the means (G, d) and (G, f/G)."""

    square: Tensor
    cross: Tensor
    inputs: Tensor
    outputs: Tensor

    def by_channel(self, layer: Layer) -> _Blend:
        """In the order of weights."""
        square, cross = by_channel(layer, self.square, 1, 2), by_channel(layer, self.cross, 2)
        return _Blend(square, cross, by_channel(layer, self.inputs, 1), self.outputs)


@dataclass
class _PairSums:
    """Σ x̂ x̂ᵀ, Σ y x̂ᵀ, Σ x̂ and Σ y over rows, for each group."""

    count: int = 0
    square: Tensor = field(default_factory=lambda: torch.zeros(()))
    cross: Tensor = field(default_factory=lambda: torch.zeros(()))
    inputs: Tensor = field(default_factory=lambda: torch.zeros(()))
    outputs: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, rows: Tensor, outputs: Tensor | None) -> None:
        rows = rows if rows.dtype == torch.float64 else rows.float()
        self.count += rows.shape[1]
        self.square = self.square.to(rows) + square(rows)
        self.inputs = self.inputs.to(rows) + rows.sum(1)
        if outputs is not None:
            outputs = outputs.to(rows)
            self.cross = self.cross.to(rows) + outputs.transpose(1, 2) @ rows
            self.outputs = self.outputs.to(rows) + outputs.sum(1)

    def centred(self, centred: bool, offset: Tensor | None) -> _Blend:
        """Without means, or without the bias `offset` that stays as it is."""
        square = working(self.square) / self.count
        cross, inputs, outputs = (s.to(square) / self.count for s in (self.cross, self.inputs, self.outputs))
        if centred:
            square = square - inputs[:, :, None] * inputs[:, None, :]
            cross = cross - outputs[:, :, None] * inputs[:, None, :]
        elif offset is not None:
            cross = cross - offset[:, :, None].to(cross) * inputs[:, None, :]
        return _Blend(square, cross, inputs, outputs)


def wanted_target(
    sums: LayerStatistics, weight: Tensor, bias: Tensor, layer: Layer, one: Influence
) -> tuple[Target, Means | None]:
    """What the pair of a layer is fitted to, by what was summed up, and the means that its bias makes up for."""
    plain = precise(canonical(weight, layer).flatten(2))
    offset = None if layer.transposed else precise(bias).expand(layer.filters).reshape(layer.groups, -1)
    blends = (sums.blended(half, one.alike, one.places, one.centred, offset) for half in (0, 1))
    halves = [blend.by_channel(layer) for blend in blends]
    full = target_of_both(layer, weight, one)
    shares = one.shares
    assert shares is not None, "shares are chosen before anything is fitted"
    if layer.transposed:
        return replace(full, moment=shrunk((halves[0].square + halves[1].square) / 2, shares.moment)), None
    means = None
    if one.centred:
        (x, y), (x2, y2) = ((precise(half.inputs), precise(half.outputs).flatten()) for half in halves)
        means = Means((x, x2), (y, y2))
    square, cross = (halves[0].square + halves[1].square) / 2, (halves[0].cross + halves[1].cross) / 2
    if bool((square.diagonal(dim1=1, dim2=2).sum(1) > 0).all()):
        halved, plain = shares.halved(), plain.to(square)
        solved = [_solved(h.square, h.cross, plain, halved.moment) for h in halves]
        share = _useful(plain, solved, halves, full.metric)
        plain = plain + share * (_solved(square, cross, plain, shares.moment) - plain)
    return replace(full, weight=stored(plain.reshape(layer.canonical_shape), layer)), means


def _solved(moment: Tensor, cross: Tensor, plain: Tensor, share: float) -> Tensor:
    """W* (G, f/G, d), drawn towards W as the moment is towards the identity."""
    whole = shrunk(moment, max(share, 1e-4))
    wanted = (1 - share) * cross + plain @ (whole - (1 - share) * moment)
    # No Cholesky factor: without its mean a moment of single numbers may be a little indefinite.
    solved: Tensor = torch.linalg.solve(whole, wanted.transpose(1, 2)).transpose(1, 2)
    return solved


def _useful(plain: Tensor, solved: list[Tensor], halves: list[_Blend], metric: Tensor | None) -> float:
    """How far to go from W to W*: what is best for one half if W* is that of the other, both ways together.

    W* of both halves has half the noise of either: for a noise q relative to what is gained, 1 / (1 + q) becomes
    1 / (1 + q / 2).
    """
    curve = slope = 0.0
    metric = None if metric is None else metric.to(plain)
    for fitted, tested in ((0, 1), (1, 0)):
        step = solved[fitted] - plain
        weighed = step if metric is None else metric.mT @ (metric @ step)
        curve += float((weighed * (step @ halves[tested].square)).sum())
        slope += float((weighed * (halves[tested].cross - plain @ halves[tested].square)).sum())
    share = min(1.0, max(0.0, slope / curve)) if curve > 0 else 0.0
    return 2 * share / (1 + share)
