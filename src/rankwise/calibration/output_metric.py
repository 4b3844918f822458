"""How much the network's outputs move when a layer's weight changes, and what the layer sees.

A change ΔW of a layer's weight moves the outputs of one input by Σ_p J_p ΔW x_p to first order, summed over the
positions p where the layer is applied. For v drawn from N(0, I) and g_p the gradient of v · output at the layer's
outputs,

    E ‖Δ out‖² = E ⟨ΔW, Γ⟩²,   Γ = Σ_p g_p x_pᵀ,

one matrix for each input. Its second moments are taken as a product of two factors (Kronecker-factored curvature):

    E ‖Δ out‖² ≈ tr(metric · ΔW · moment · ΔWᵀ),   moment = E[ΓᵀΓ],   metric = E[ΓΓᵀ] / E ‖Γ‖²

So errors that are alike at neighbouring positions, and add up where the network averages, count as often as they do;
taken as independent, they would be understated many times in front of a global pooling. The change of the network's
outputs is a sum over layers, in one unit, and can be searched exactly. Labels are never needed, and a network that is
sure of itself (softmax near 0 and 1) does not hide its sensitivity, as gradients of a loss would. Of a layer whose
outputs are those of the network J is the identity, so nothing is drawn.

One input gives little more than one sample of Γ. The moments of single positions, of which there are many more samples,
are kept beside those of Γ: they are what the latter are drawn towards (shrinkage.py). Statistics of the two halves of
the inputs are kept apart (inputs.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.calibration.activations import (
    by_channel,
    check_finite,
    check_some,
    moments_by_channel,
    patch_size,
    patches,
    patches_at,
    spots_of,
)
from rankwise.calibration.answers import Spread, add_answers, variance_of
from rankwise.calibration.heads import HeadCall, Heads, is_copy
from rankwise.calibration.influence import Half, Influence
from rankwise.calibration.inputs import CALIBRATION, Inputs, Portion
from rankwise.calibration.lookups import Lookups
from rankwise.calibration.objective import Pull, by_token, draw, logits_in, pull_of_probabilities
from rankwise.core.layer import LINEAR_KINDS, LOOKUP, Layer
from rankwise.core.memory import give_back
from rankwise.core.moments import Moments, add_square_, square
from rankwise.errors import RankwiseError
from rankwise.surgery.forward import Batches, Example, run_before, run_example, tensors_of, undisturbed
from rankwise.surgery.fuse import followers
from rankwise.surgery.hooks import Seen, watching

ROWS = 16  # patches for each dimension, over all inputs; neighbours say nearly the same
LEAST = 16  # patches of each input at least
PULLED = 1 << 19  # entries of images that gradients are taken of at once: 3 of 3×224×224, 0.8 GB in a ResNet50
PLACES = 3136  # positions of each input at most that Γ is summed over
UNFOLDED = 1 << 24  # entries of patches at a time
GRADIENTS, TOKENS = 256, 8192  # inputs, or tokens of them, that gradients are taken of
INPUTS, PATCHES = 64, 1 << 24  # inputs, or entries of patches, that Γ of a layer is taken of, in each half
DRAWS = 1
TRIMMED = 8  # batches after which free memory goes back to the system
MOST_OUTPUTS = 8192  # of a layer with a metric of its own: one of a vocabulary would not fit into memory


def influences(
    model: nn.Module,
    inputs: Inputs | Batches,
    layers: list[Layer],
    largest: int,
    seed: int = 0,
    means: bool = True,
) -> dict[str, Influence]:
    """For every layer its influence, relative to the variance of the network's outputs.

    Covariances of patches with more than `largest` entries are not collected. Without `means` those of the data are not
    to be trusted, and nothing makes up for the mean of an error. Of embeddings other things are counted (lookups.py).
    """
    inputs = inputs if isinstance(inputs, Inputs) else Inputs(list(inputs), CALIBRATION)
    lookups = Lookups([la for la in layers if la.kind == LOOKUP])
    layers = [la for la in layers if la.kind != LOOKUP]
    found = {la.name: Influence((Half(), Half()), patch_size(la) <= largest) for la in layers}
    count = len(inputs.halves[0]) + len(inputs.halves[1])
    walk = Walk(model, layers, found, count, torch.Generator().manual_seed(seed), lookups)
    with undisturbed(model), ExitStack() as hung:
        for number, half in enumerate(inputs.halves):
            for piece in _pieces(half):
                batch, walk.piece = piece.together(), piece
                if not walk.batch:
                    if means:
                        _find_means(model, batch, layers, found)
                    looks = {la.name: partial(walk.look, la) for la in layers}
                    hung.enter_context(watching(model, walk.heads.looks()))
                    hung.enter_context(watching(model, {**looks, **walk.lookups.looks()}))
                walk.add_answers(walk.run(batch, number))
                if walk.batch % TRIMMED == 0:
                    give_back()
    check_some(walk.batch)
    variance = walk.lookups.variance = walk.unit()
    for layer in layers:
        one = found[layer.name]
        one.variance, one.nats = variance, bool(walk.predictions[0])
        for mine in one.halves:
            mine.divided(variance * max(1, mine.gammas))
            mine.seen = moments_by_channel(layer, mine.seen)
            mine.moment = by_channel(layer, mine.moment, 1, 2) if mine.moment.ndim else mine.moment
    return {**found, **lookups.influences(model)}


def _pieces(half: Portion) -> Iterator[Portion]:
    """Small ones of images as long as gradients are taken, since those of all layers are held."""
    first, others = half.parted(GRADIENTS // 2 if half.of_images else len(half))
    yield from first.pieces(PULLED, INPUTS)
    yield from others.pieces()


class Walk:
    """Runs batches through the network and adds up what the layers see, and the gradients at their outputs."""

    def __init__(
        self,
        model: nn.Module,
        layers: list[Layer],
        found: dict[str, Influence],
        count: int,
        random: torch.Generator,
        lookups: Lookups,
    ) -> None:
        self.model, self.layers, self.found, self.count, self.random = model, layers, found, count, random
        self.lookups = lookups
        self.answers: dict[int, Spread] = {}
        self.predictions = [0, 0]  # inputs, and positions with probabilities of a vocabulary
        self.forward: Callable[[Example], Any] = partial(run_example, model)
        self.sources: list[Tensor] = []  # what else gradients are wanted of, and those of the last batch
        self.pulled: list[Tensor | None] = []
        self.heads = Heads(model)
        self.head: str | None = None  # gives the logits: where no gradients are taken it need not run
        self.alone = False  # an output for every token: positions are taken one by one
        self.batch = self.half = 0
        self.piece = Portion([], [])
        self.drawn, self.tokens = [0, 0], [0, 0]  # that gradients were taken of, by halves
        self.calls: dict[str, list[tuple[Tensor, Tensor]]] = {}  # inputs and outputs
        self.same: tuple[Tensor | None, object, Moments] = (None, None, Moments())  # the last input, and its moments

    def look(self, layer: Layer, call: Seen) -> Tensor | None:
        self.see(layer, call)
        if not torch.is_grad_enabled():
            return None
        output: Tensor = call.output
        kept = output if output.requires_grad else output.detach().requires_grad_()
        self.calls.setdefault(layer.name, []).append((call.given.detach(), kept))
        # What follows may work in place; logits are large, and nobody does so there.
        return None if layer.name in self.heads.names else kept.clone()

    def see(self, layer: Layer, call: Seen) -> None:
        """Add what a layer gets. What layers get one after the other (q, k, v; gate, up) is summed up once."""
        one, given = self.found[layer.name], call.given
        seen = one.halves[self.half].seen
        mine = (given._version, one.whole and layer.kind in LINEAR_KINDS)
        if self.same[0] is given and self.same[1] == mine and mine[1]:
            seen.merge_(self.same[2])
            return
        rows = self.rows(layer, given.detach(), None if call.output is None else call.output.detach())
        self.check_finite(rows, layer.name)
        rows = rows if one.whole else rows.reshape(len(rows), -1, 1)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        if 2 * rows.shape[1] < rows.shape[2]:
            seen.add_quickly(rows)
            return
        sums = Moments.of(rows)
        seen.merge_(sums)
        self.same = (given, mine, sums)

    def check_finite(self, rows: Tensor, name: str) -> None:
        """Refuse NaN and infinity, with the number of the batch that they come from."""
        bad = ~torch.isfinite(rows).all(dim=2).all(dim=0)
        if bool(bad.any()):
            each = max(1, len(bad) // max(1, len(self.piece)))
            check_finite(rows, 1 + self.piece.source_of(int(bad.nonzero()[0]) // each), name)

    def rows(self, layer: Layer, given: Tensor, output: Tensor | None) -> Tensor:
        """Some of the patches (G, n, d), at places drawn for the batch."""
        wanted = max(LEAST, math.ceil(ROWS * patch_size(layer) / max(1, self.count)))
        place = given if output is None else output  # that of a linear layer is that of its input
        return patches_at(layer, given, spots_of(layer, given, place, wanted, self.random))

    def run(self, batch: Example, half: int) -> list[Tensor]:
        """The network's outputs. Gradients are taken of the first inputs only."""
        self.start(self.piece, half)
        if self.head is not None and not self.wants_gradients(half):
            run_before(self.model, batch, self.head, self.look_at_head)
            self.count_samples(half, len(self.piece))
            return []
        with torch.set_grad_enabled(self.wants_gradients(half)):
            answer = [t for t in tensors_of(self.forward(batch)) if t.is_floating_point()]
            self.count_predictions(answer)
            self.alone = by_token(batch, answer)
            inputs = next((len(t) for t in answer if t.ndim), 1)
            if torch.is_grad_enabled():
                self.drawn[half] += inputs
                self.tokens[half] += answer[0][..., 0].numel() if self.alone else 0
                self._add_metrics(answer, inputs)
        self.count_samples(half, inputs)
        return answer

    def start(self, piece: Portion, half: int) -> None:
        """Before a batch of this half."""
        self.piece, self.batch, self.half = piece, self.batch + 1, half
        self.calls.clear()
        self.same = (None, None, Moments())
        self.lookups.start(half)
        self.heads.start()

    def look_at_head(self, call: Seen) -> None:
        """What a head gets, before it runs."""
        layer = next((la for la in self.layers if la.name == self.head), None)
        if layer is not None:
            self.see(layer, call)
        elif self.head in self.lookups.uses:
            self.lookups.look(self.head, call)

    def wants_gradients(self, half: int) -> bool:
        return 2 * self.drawn[half] < GRADIENTS and 2 * self.tokens[half] < TOKENS

    def count_samples(self, half: int, inputs: int) -> None:
        for layer in self.layers:
            self.found[layer.name].halves[half].samples += inputs
            self.found[layer.name].by_token = self.alone

    def _add_metrics(self, answer: list[Tensor], inputs: int) -> None:
        reached = [(layer, call) for layer in self.layers for call in self.calls.get(layer.name, [])]
        logits = logits_in(self.model, answer)
        head = self.heads.of(logits)
        self.head = None if head is None else head.name
        tracked = [t for t in (answer if logits is None else [logits]) if t.requires_grad]
        if not tracked or not (reached or self.lookups.outs or self.sources):
            raise RankwiseError(
                "the network's outputs do not depend on its layers, so their influence is unknown: leave data= out"
            )
        for layer in self.layers:
            mine = self.found[layer.name]
            calls = self.calls.get(layer.name, [])
            mine.is_output = layer.group_filters > MOST_OUTPUTS or (
                len(calls) == len(answer) == 1 and is_copy(answer[0], calls[0][1])
            )
        others = self.lookups.outs
        outs = [call[1] for _, call in reached] + others + self.sources
        for draws in range(DRAWS, 0, -1):
            found = self._gradients(tracked, outs, logits, head, draws > 1)
            self.lookups.add(found[len(reached) : len(reached) + len(others)], inputs)
            self.pulled = [g if isinstance(g, Tensor) else None for g in found[len(reached) + len(others) :]]
            self.add_gradients(found[: len(reached)], inputs)

    def add_gradients(self, found: Sequence[Tensor | Pull | None], inputs: int) -> None:
        """Those at the outputs of the layers that were called, in order."""
        reached = [(layer, call) for layer in self.layers for call in self.calls.get(layer.name, [])]
        gradients: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for (layer, (given, _)), gradient in zip(reached, found, strict=True):
            if gradient is not None:
                dense = gradient.dense() if isinstance(gradient, Pull) else gradient
                gradients.setdefault(layer.name, []).append((given, dense))
        for layer in self.layers:
            if layer.name in gradients:
                self._add_metric(layer, gradients.pop(layer.name), inputs)

    def _gradients(
        self, tracked: list[Tensor], outs: list[Tensor], logits: Tensor | None, head: HeadCall | None, again: bool
    ) -> list[Tensor | Pull | None]:
        """Those of v · output at `outs`; at the logits themselves it is v."""
        if head is None:
            pulls = [self._pull(t, logits) for t in tracked]
            return list(torch.autograd.grad(tracked, outs, pulls, retain_graph=again, allow_unused=True))
        pull = draw(head.output, self.random)
        before = [out for out in outs if out is not head.output]
        behind = pull.behind(head.weight).to(head.given)
        found: Iterator[Tensor | None] = iter(())
        if before:
            found = iter(torch.autograd.grad(head.given, before, behind, retain_graph=again, allow_unused=True))
        return [pull if out is head.output else next(found) for out in outs]

    def _pull(self, output: Tensor, logits: Tensor | None) -> Tensor:
        """v, by which an output is multiplied before gradients are taken."""
        if logits is not None:
            return pull_of_probabilities(output, self.random)
        return torch.randn(output.shape, generator=self.random).to(output)

    def count_predictions(self, answer: list[Tensor]) -> None:
        logits = logits_in(self.model, answer)
        if logits is not None:
            self.predictions = [self.predictions[0] + len(logits), self.predictions[1] + logits[..., 0].numel()]

    def add_answers(self, answer: list[Tensor]) -> None:
        if not self.predictions[0]:
            add_answers(self.answers, answer)

    def unit(self) -> float:
        """What changes are relative to: the variance of the outputs; or so that they are nats for each position."""
        inputs, positions = self.predictions
        return 2 * positions / inputs if inputs else variance_of(self.answers)

    def _enough(self, layer: Layer, calls: list[tuple[Tensor, Tensor]]) -> float:
        """So many inputs of a half are enough: a layer with many positions says much in each of them."""
        entries = sum(gradient[0].numel() for _, gradient in calls) // layer.filters * patch_size(layer)
        return max(INPUTS, PATCHES / max(1, entries))

    def _add_metric(self, layer: Layer, calls: list[tuple[Tensor, Tensor]], inputs: int) -> None:
        """Γ of each input, over all calls of the layer."""
        one = self.found[layer.name]
        half = one.halves[self.half]
        if half.gammas >= self._enough(layer, calls):
            return
        half.gammas += inputs
        pairs = [_by_input(layer, given, gradient, inputs, self.random) for given, gradient in calls]
        half.places = sum(share * g.shape[2] for _, g, share in pairs)
        if one.is_output:
            if self.predictions[0] or layer.group_filters > MOST_OUTPUTS:
                half.levels += sum(float(g.square().mean()) for _, g, _ in pairs) * inputs / len(pairs)
            return
        single = 0.0
        for _, gradient, share in pairs:
            flat = gradient.flatten(1, 2)
            half.metric = add_square_(half.metric, flat, share)
            single += share * float(flat.square().sum())
        if layer.transposed or not one.whole or self.alone:
            return
        given = pairs[0][0] if len(pairs) == 1 else torch.cat([pair[0] for pair in pairs], dim=2)
        gradient = torch.cat([share * g for _, g, share in pairs], dim=2)  # each stands for `share` positions
        half.pulls = half.pulls[0] + float(gradient.sum(2).square().sum()), half.pulls[1] + single
        mean = given.mean(dim=(1, 2), keepdim=True) if one.centred else None
        step = max(1, UNFOLDED // max(1, given[:, 0].numel() + gradient[:, 0].numel()))
        for i in range(0, given.shape[1], step):
            moment, outer = _gammas(given[:, i : i + step], gradient[:, i : i + step], mean)
            half.moment = half.moment.to(moment) + moment
            half.outer = half.outer.to(outer) + outer


def _by_input(
    layer: Layer, given: Tensor, gradient: Tensor, inputs: int, random: torch.Generator
) -> tuple[Tensor, Tensor, float]:
    """Patches (G, inputs, positions, d) and gradients (G, inputs, positions, f/G); of many positions some, for all.

    The number is how many positions each of them stands for.
    """
    spots = spots_of(layer, given, gradient, PLACES, random)
    rows = gradient.movedim(gradient.ndim - layer.dims - 1, -1)
    rows = rows.reshape(len(rows), -1, rows.shape[-1]) if rows.ndim > 2 else rows[:, None]
    share = 1.0
    if layer.transposed or len(spots) == rows.shape[1]:
        seen = patches(layer, given, gradient)
    else:
        share, rows = rows.shape[1] / max(1, len(spots)), rows[:, spots.to(rows.device)]
        seen = patches_at(layer, given, spots)
    rows = rows.flatten(0, 1)
    if rows.dtype != torch.float64:
        rows, seen = rows.float(), seen.float()
    rows = torch.unflatten(rows, 1, (layer.groups, -1)).transpose(0, 1)
    many = inputs if rows.shape[1] % inputs == 0 and seen.shape[1] % inputs == 0 else 1
    return seen.reshape(len(seen), many, -1, seen.shape[-1]), rows.reshape(len(rows), many, -1, rows.shape[-1]), share


def _gammas(given: Tensor, gradient: Tensor, mean: Tensor | None) -> tuple[Tensor, Tensor]:
    """Σ ΓᵀΓ (G, d, d) and Σ ΓΓᵀ (G, f, f) over inputs, by way of Γ or of Gram matrices; Γ = Σ_p g_p (x_p − mean)ᵀ."""
    places, d, f = given.shape[2], given.shape[3], gradient.shape[3]
    if places * f * d + f * d * (f + d) <= places**2 * (f + d) + places * (f * f + d * d):
        gamma = gradient.transpose(2, 3) @ given  # (G, n, f, d)
        if mean is not None:
            gamma -= gradient.sum(2)[..., None] * mean
        rows, columns = gamma.flatten(1, 2), gamma.transpose(2, 3).flatten(1, 2)
        return square(rows), square(columns)
    given = given if mean is None else given - mean
    alike, pull = given @ given.transpose(2, 3), gradient @ gradient.transpose(2, 3)  # (G, n, p, p)
    moment = given.flatten(1, 2).transpose(1, 2) @ (pull @ given).flatten(1, 2)
    outer = gradient.flatten(1, 2).transpose(1, 2) @ (alike @ gradient).flatten(1, 2)
    return moment, outer


def _find_means(model: nn.Module, batch: Example, layers: list[Layer], found: dict[str, Influence]) -> None:
    norms = {name: norm for norm, name in followers(model, batch).items()}
    for layer in layers:
        one = found[layer.name]
        one.norm = "" if layer.bias else norms.get(layer.name, "")
        one.centred = bool(one.norm) or (layer.bias and not layer.transposed)
