"""Fitting a compressed network to the original one, layer by layer, on calibration data without labels.

*In closed form* every pair is the best one in the metric of data (whitened.py), for what the original network gives it.

*In order* the compressed network runs beside the original, and the pair of a layer becomes the best one for what it
really gets and what the original layer gave:

    min_Ŵ E ‖S (y − Ŵ x̂)‖² = ‖S (W* − Ŵ) M̂^{1/2}‖² + const,   W* = E[y x̂ᵀ] M̂⁻¹,   M̂ = E[x̂ x̂ᵀ]

So a layer makes up for the errors before it as far as it can. All layers are fitted in one pass (lockstep.py). W* of one
half of the inputs is tried on the other: W + τ (W* − W) with the best τ there is what is fitted to, so few inputs change
little. Where there is a bias, or a batch norm behind the layer, it takes up the mean of what is left, E[y] − Ŵ E[x̂], at
no cost: then x̂ and y above are without their means. That, too, is drawn back by what one half says of the other.

Of both networks the one that is closer to the original on inputs that neither of them saw is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.calibration.activations import patches_at, pooled_patches, spots_of
from rankwise.calibration.inputs import Inputs, Portion
from rankwise.calibration.lockstep import Gate, Track, tracks, wait_at
from rankwise.calibration.output_metric import Influence, Shares, change_of
from rankwise.calibration.shrinkage import choose_shares_, drawn, target_of_both
from rankwise.core.layer import Coverage, Layer, canonical, stored
from rankwise.core.linalg import precise
from rankwise.core.moments import Moments, square
from rankwise.decompositions import METRIC, Target, of
from rankwise.planning.plan import Choice, Plan
from rankwise.surgery.forward import run_example, undisturbed
from rankwise.surgery.hooks import Seen, watching
from rankwise.surgery.pairs import build_pair, fill_pair_, merge_pair, put_factors_
from rankwise.surgery.replace import copy_model, match_layers, replace_layers_, swap_modules_, target_of

HELD = 1 << 30  # bytes of activations that passes may hold at a layer
PIECE = 1 << 22  # entries of images that run at once
LIVE = 6  # tensors like a layer's input that a pass of both networks holds there, about
ROWS, LEAST = 32, 32  # patches for each dimension over all inputs, and of each input at least
Task = tuple[Choice, Layer]


@dataclass(frozen=True, eq=False)
class Fit:
    """A compressed network, and how much its outputs change on the inputs that are held out for such questions.

    `in_order` is whether layers were fitted to what the compressed network gives them; `closed` is the change without.
    """

    network: nn.Module
    change: float | None = None
    in_order: bool = False
    closed: float | None = None


def apply_fitted(
    model: nn.Module,
    plan: Plan,
    inputs: Inputs,
    influence: Mapping[str, Influence],
    moments: Mapping[str, Moments] | None = None,
    in_order: bool = True,
    coverage: Coverage | None = None,
) -> Fit:
    """A copy of the model that follows the plan, with what is fitted to inputs fitted.

    Unless `in_order`, nothing is run, and layers do not make up for each other. `coverage` is that of the model, if it
    is known.
    """
    later = {choice.name for choice in plan.choices if of(choice.option).needs == METRIC}
    layers = match_layers(model, plan, coverage)
    tasks = [(choice, layer) for choice, layer in layers if choice.name in later]
    start = copy_model(model)
    replace_layers_(start, plan, fill=True, moments=moments, later=later, layers=layers)  # the others stay for now
    closed = copy_model(start)
    for choice, layer in tasks:
        one = influence.get(layer.name)
        if one is not None and one.shares is None and one.whole and one.seen.count:  # of a plan that was read
            choose_shares_(layer, _weights(model, layer)[0], one, inputs.least)
        _fit_closed_(closed, model, choice, layer, one)
    if not in_order or not tasks:
        return Fit(closed)
    ordered = start
    _fit_in_order_(ordered, model, tasks, inputs, influence, closed)
    if not len(inputs.check):
        return Fit(ordered, None, True)
    variance = next(iter(influence.values())).variance
    changes = [change_of(model, small, inputs.check, variance) for small in (closed, ordered)]
    if changes[1] <= changes[0]:
        return Fit(ordered, changes[1], True, changes[0])
    return Fit(closed, changes[0], False, changes[0])


@dataclass(frozen=True, eq=False)
class _Means:
    """Of what a pair gets (G, d) and of what it should give (f,), by halves, where a bias makes up for a gap."""

    inputs: tuple[Tensor, Tensor]
    outputs: tuple[Tensor, Tensor]

    def gap(self, weight: Tensor, layer: Layer) -> Tensor:
        """E[y] − Ŵ E[x̂], as far as one half says what the other does."""
        one, other = (y - _through(weight, layer, x) for x, y in zip(self.inputs, self.outputs, strict=True))
        power = float((one.square().sum() + other.square().sum()) / 2)
        share = min(1.0, max(0.0, float((one * other).sum()) / power)) if power > 0 else 0.0
        return share * (one + other) / 2


def _fit_closed_(small: nn.Module, model: nn.Module, choice: Choice, layer: Layer, one: Influence | None) -> None:
    """From what the original network gives the layer; from its weights where no input reached it."""
    if one is None or not one.whole or not one.seen.count:
        old = small.get_submodule(layer.name)
        pair = build_pair(layer, choice.option, choice.rank, old)
        fill_pair_(pair, target_of(old, layer), choice.option, choice.rank)
        swap_modules_(small, {old: pair})
        return
    weight, bias = _weights(model, layer)
    means = None
    if one.centred:
        inputs = [precise((half.seen if half.seen.count else one.seen).mean) for half in one.halves]
        outputs = [_through(weight, layer, mean) + precise(bias) for mean in inputs]
        means = _Means((inputs[0], inputs[1]), (outputs[0], outputs[1]))
    pair = _put_(small, choice, layer, target_of_both(layer, weight, one))
    _make_up_(small, model, pair, layer, one, means)


def _put_(small: nn.Module, choice: Choice, layer: Layer, target: Target) -> Any:
    """Put the pair in place of the layer, or behind its gate, fitted; its bias is that of the layer."""
    there = small.get_submodule(layer.name)
    old: Any = there.inner if isinstance(there, Gate) else there
    pair: Any = build_pair(layer, choice.option, choice.rank, old)
    put_factors_(pair, of(choice.option).factors(target, choice.option, choice.rank), layer)
    if layer.bias:
        pair[-1].bias.data.copy_(old.bias)
    if isinstance(there, Gate):
        there.inner = pair
    else:
        swap_modules_(small, {old: pair})
    return pair


def _make_up_(
    small: nn.Module, model: nn.Module, pair: Any, layer: Layer, one: Influence, means: _Means | None
) -> None:
    """The bias, or the running mean of the batch norm behind, takes up the mean of what is left."""
    if means is None:
        return
    merged: Any = merge_pair(pair)
    gap = means.gap(merged.weight, layer)
    with torch.no_grad():
        if layer.bias:
            pair[-1].bias.copy_(gap)
        else:
            mean = _running_mean(model, one.norm)
            _running_mean(small, one.norm).copy_(mean - gap.to(mean))


def _running_mean(network: nn.Module, norm: str) -> Tensor:
    module: Any = network.get_submodule(norm)
    mean: Tensor = module.running_mean
    return mean


def _weights(model: nn.Module, layer: Layer) -> tuple[Tensor, Tensor]:
    """Weight and bias; no bias is none that adds anything."""
    module: Any = model.get_submodule(layer.name)
    return module.weight.detach(), torch.zeros(()) if module.bias is None else module.bias.detach()


def _through(weight: Tensor, layer: Layer, inputs: Tensor) -> Tensor:
    """What a layer without its bias makes of one patch (G, d): (f,)."""
    rows = precise(canonical(weight.detach(), layer).flatten(2))
    return (rows @ inputs[:, :, None]).flatten()


# ---- in order


def _fit_in_order_(
    small: nn.Module,
    model: nn.Module,
    tasks: list[Task],
    inputs: Inputs,
    influence: Mapping[str, Influence],
    closed: nn.Module,
) -> None:
    """All layers in one pass over the inputs; those that are not reached, or called twice, as they are in `closed`."""
    order = _order(model, tasks, inputs)
    for choice, layer in tasks:
        if layer.name not in order:
            swap_modules_(small, {small.get_submodule(layer.name): copy_model(closed.get_submodule(layer.name))})
    ordered = sorted((task for task in tasks if task[1].name in order), key=lambda task: order[task[1].name])
    for _, layer in ordered:
        old = small.get_submodule(layer.name)
        swap_modules_(small, {old: Gate(layer.name, old)})
    looks = {layer.name: partial(_wait_behind, layer.name) for _, layer in ordered}
    means: dict[str, Tensor] = {}
    with undisturbed(model), undisturbed(small), watching(model, looks), tracks() as running:
        crowd = _Crowd(model, small, inputs, running)
        for choice, layer in ordered:
            one = influence[layer.name]
            sums = crowd.gather(layer)
            if sums is None:
                gate: Any = small.get_submodule(layer.name)
                gate.inner = copy_model(closed.get_submodule(layer.name))
                continue
            weight, bias = _weights(model, layer)
            target, gaps = _wanted(sums, weight, bias, layer, one)
            pair = _put_(small, choice, layer, target)
            _make_up_(small, model, pair, layer, one, gaps)
            if one.norm and gaps is not None:
                means[one.norm] = _running_mean(small, one.norm).clone()
    for norm, mean in means.items():  # buffers were put back as they had been before
        _running_mean(small, norm).copy_(mean)
    for _, layer in ordered:
        gate = small.get_submodule(layer.name)
        swap_modules_(small, {gate: gate.inner})


def _wait_behind(name: str, call: Seen) -> None:
    wait_at(name, call.output)


def _order(model: nn.Module, tasks: list[Task], inputs: Inputs) -> dict[str, int]:
    """Layers in the order in which they run; those that run once only."""
    calls: dict[str, int] = {}

    def look(name: str, _: Seen) -> None:
        calls[name] = calls.get(name, 0) + 1

    with undisturbed(model), watching(model, {layer.name: partial(look, layer.name) for _, layer in tasks}):
        for batch in inputs.fitted.first(1):
            run_example(model, batch)
    return {name: i for i, name in enumerate(calls) if calls[name] == 1}


class _Crowd:
    """Passes of both networks, side by side: as many as may be held at a layer."""

    def __init__(self, model: nn.Module, small: nn.Module, inputs: Inputs, running: list[Track]) -> None:
        self.model, self.small, self.running = model, small, running
        halves = [[(half, piece) for piece in part.pieces(PIECE)] for half, part in enumerate(inputs.halves)]
        # In turns, so that both halves have joined at any time.
        self.waiting = [piece for both in zip_longest(*halves) for piece in both if piece is not None]
        self.count = sum(len(p) for p in inputs.halves)
        self.pairs: list[tuple[int, Track, Track]] = []  # half, passes of both networks
        self.random = torch.Generator().manual_seed(0)

    def gather(self, layer: Layer) -> _LayerSums | None:
        """What the layer gets in the small network and gives in the original."""
        sums = _LayerSums()
        held = 0.0
        for entry in list(self.pairs):
            held += self._add(sums, layer, entry, held)
        while self.waiting and held < HELD:
            half, piece = self.waiting.pop(0)
            ours, theirs = (Track(partial(_run, net, piece)) for net in (self.model, self.small))
            self.running += [ours, theirs]
            entry = (half, ours, theirs)
            self.pairs.append(entry)
            held += self._add(sums, layer, entry, held)
        return sums if sums.seen else None

    def _add(self, sums: _LayerSums, layer: Layer, entry: tuple[int, Track, Track], held: float) -> float:
        """Let both passes come to the layer, and add what they have; the bytes that they hold there."""
        half, ours, theirs = entry
        if held > HELD:
            for track in (ours, theirs):
                track.drop()
        wanted, given = ours.resume(layer.name), theirs.resume(layer.name)
        if ours.ended or theirs.ended:
            self.pairs.remove(entry)
        if wanted is None or given is None:
            return 0.0
        wanted_rows = max(LEAST, -(-ROWS * _dims(layer) // max(1, self.count)))
        sums.add(layer, half, given, wanted, spots_of(layer, given, wanted, wanted_rows, self.random))
        return float(LIVE * given.numel() * given.element_size())


def _dims(layer: Layer) -> int:
    return layer.group_channels * (1 if layer.transposed else torch.Size(layer.kernel).numel())


def _run(network: nn.Module, piece: Portion) -> None:
    run_example(network, piece.together())


@dataclass
class _LayerSums:
    """Of one layer, by halves: moments of what it gets in the small network, beside what the original one gives.

    Rows are (x̂, y) at single positions, and their means over all positions of an input: where the network averages
    over positions it is the latter that count (`Half.alike`).
    """

    single: tuple[_Sums, _Sums] = field(default_factory=lambda: (_Sums(), _Sums()))
    pooled: tuple[_Sums, _Sums] = field(default_factory=lambda: (_Sums(), _Sums()))

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


@dataclass
class _Sums:
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
        square, cross, inputs, outputs = (
            precise(s) / self.count for s in (self.square, self.cross, self.inputs, self.outputs)
        )
        if centred:
            square = square - inputs[:, :, None] * inputs[:, None, :]
            cross = cross - outputs[:, :, None] * inputs[:, None, :]
        elif offset is not None:
            cross = cross - offset[:, :, None] * inputs[:, None, :]
        return _Blend(square, cross, inputs, outputs)


def _wanted(
    sums: _LayerSums, weight: Tensor, bias: Tensor, layer: Layer, one: Influence
) -> tuple[Target, _Means | None]:
    """What the pair of a layer is fitted to, by what was summed up, and the means that its bias makes up for."""
    both = one.both
    plain = precise(canonical(weight, layer).flatten(2))
    offset = None if layer.transposed else precise(bias).expand(layer.filters).reshape(layer.groups, -1)
    halves = [sums.blended(half, both.alike, both.places, one.centred, offset) for half in (0, 1)]
    full = target_of_both(layer, weight, one)
    shares = one.shares or Shares(0.1, 1e-3)
    if layer.transposed:
        return replace(full, moment=drawn((halves[0].square + halves[1].square) / 2, shares.moment)), None
    means = None
    if one.centred:
        means = _Means((halves[0].inputs, halves[1].inputs), (halves[0].outputs.flatten(), halves[1].outputs.flatten()))
    square, cross = (halves[0].square + halves[1].square) / 2, (halves[0].cross + halves[1].cross) / 2
    if bool((square.diagonal(dim1=1, dim2=2).sum(1) > 0).all()):
        halved = shares.halved()
        solved = [_solved(h.square, h.cross, plain, halved.moment) for h in halves]
        share = _useful(plain, solved, halves, full.metric)
        plain = plain + share * (_solved(square, cross, plain, shares.moment) - plain)
    return replace(full, weight=stored(plain.reshape(layer.canonical_shape), layer)), means


def _solved(moment: Tensor, cross: Tensor, plain: Tensor, share: float) -> Tensor:
    """W* (G, f/G, d), drawn towards W as the moment is towards the identity."""
    whole = drawn(moment, max(share, 1e-4))
    wanted = (1 - share) * cross + plain @ (whole - (1 - share) * moment)
    return torch.linalg.solve(whole, wanted.transpose(1, 2)).transpose(1, 2)


def _useful(plain: Tensor, solved: list[Tensor], halves: list[_Blend], metric: Tensor | None) -> float:
    """How far to go from W to W*: what is best for one half if W* is that of the other, both ways together.

    W* of both halves has half the noise of either: for a noise q relative to what is gained, 1 / (1 + q) becomes
    1 / (1 + q / 2).
    """
    curve = slope = 0.0
    for fitted, tested in ((0, 1), (1, 0)):
        step = solved[fitted] - plain
        weighed = step if metric is None else metric.mT @ (metric @ step)
        curve += float((weighed * (step @ halves[tested].square)).sum())
        slope += float((weighed * (halves[tested].cross - plain @ halves[tested].square)).sum())
    share = min(1.0, max(0.0, slope / curve)) if curve > 0 else 0.0
    return 2 * share / (1 + share)
