"""Statistics of a network block by block: the same ones as `output_metric` collects, with one block in memory.

1. Forward: what each block gets, for all inputs, is put aside.
2. At the end gradients of v · output (objective.py) at what the last block gives.
3. Backward: each block runs once more with gradients, from what was put aside to what came back from the next block.

That is the gradient of the whole network, so an effect is what it is there: nothing is approximated but what is
approximated anyway. `Walk` adds up what layers get and their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from rankwise.calibration.blocks import Blocks
from rankwise.calibration.effect_table import largest_for, memory_for_statistics, passes
from rankwise.calibration.influence import Half, Influence
from rankwise.calibration.inputs import Inputs, Portion
from rankwise.calibration.lookups import Lookups
from rankwise.calibration.output_metric import Walk
from rankwise.calibration.shelf import Shelf
from rankwise.core.layer import LOOKUP, Layer
from rankwise.errors import RankwiseError
from rankwise.planning.table import Progress
from rankwise.surgery.forward import Example, undisturbed
from rankwise.surgery.hooks import Look, watching

CHECK, LAST = 2, 3  # parts of the inputs behind both halves


@dataclass(frozen=True, eq=False)
class SweepRun:
    """Inputs that run together, and which part they are of (inputs.py)."""

    piece: Portion
    part: int

    @property
    def batch(self) -> Example:
        return self.piece.together()


class Sweeps:
    """All inputs of a network, and what has been found out about it so far, on a shelf."""

    def __init__(self, parts: Blocks, inputs: Inputs, shelf: Shelf, seed: int = 0) -> None:
        self.parts, self.inputs, self.shelf, self.seed = parts, inputs, shelf, seed
        portions = (*inputs.halves, inputs.check, inputs.last)
        self.runs = [SweepRun(piece, part) for part, portion in enumerate(portions) for piece in portion.pieces()]
        self.halves = [i for i, run in enumerate(self.runs) if run.part < CHECK]
        self.count = sum(map(len, inputs.halves))
        self.unit = 0.0  # effects are divided by it: twice the positions of an input, for nats

    @cached_property
    @torch.no_grad()
    def shapes(self) -> list[torch.Size]:
        """Of what every block gets and gives, by run."""
        return [self.parts.first(run.batch).shape for run in self.runs]

    def given(self, number: int) -> list[Tensor]:
        """What a block gets, by run; behind the last one what it gives."""
        return self.shelf.get_list(f"given-{number}", self.shapes)

    def pulls(self, number: int) -> list[Tensor]:
        """Gradients at what a block gets, by run of both halves; nothing where none is wanted."""
        return self.shelf.get_list(f"pull-{number}", [self.shapes[i] for i in self.halves], gaps=True)

    @torch.no_grad()
    def forward(self, progress: Progress | None = None) -> None:
        """Put aside what every block gets, and what the last one gives."""
        if "given-0" not in self.shelf:
            self.shelf.put_list("given-0", [self.parts.first(run.batch) for run in self.runs])
        for number in range(len(self.parts)):
            if progress:
                progress(f"forward, block {number}", number, len(self.parts))
            if f"given-{number + 1}" in self.shelf:
                continue
            block, given = self.parts.block(number), self.given(number)
            found = [self.parts.run(number, block, r.batch, x) for r, x in zip(self.runs, given, strict=True)]
            self.shelf.put_list(f"given-{number + 1}", found)

    def behind(self, layers: Sequence[Layer]) -> dict[str, Influence]:
        """Of layers behind the blocks; and gradients at what the last block gives. Embeddings wait for `before`."""
        outer = self.parts.outer
        self.lookups = Lookups([la for la in layers if la.kind == LOOKUP])
        mine = [la for la in layers if la.kind != LOOKUP]
        found = _empty(mine, largest_for(self.inputs))
        walk = Walk(outer, mine, found, self.count, self._random(0), self.lookups)
        given = self.given(len(self.parts))
        pulls: list[Tensor] = []
        looks: dict[str, Look] = {la.name: partial(walk.look, la) for la in mine}
        looks |= self.lookups.looks()
        with undisturbed(outer), watching(outer, walk.heads.looks()), watching(outer, looks):
            for i in self.halves:
                hidden = given[i].clone().requires_grad_()
                walk.piece, walk.sources, walk.pulled, walk.head = self.runs[i].piece, [hidden], [], None
                walk.forward = partial(self.parts.last, hidden=hidden)
                walk.add_answers(walk.run(self.runs[i].batch, self.runs[i].part))
                back = walk.pulled[0] if walk.pulled else None
                pulls.append(torch.zeros(0) if back is None else back)
        if not walk.predictions[0]:
            raise RankwiseError("the network does not end in its vocabulary: take it whole, --no-blocks")
        self.unit = walk.unit()
        if f"pull-{len(self.parts)}" not in self.shelf:
            self.shelf.put_list(f"pull-{len(self.parts)}", pulls)
        self._finish(found)
        return {la.name: found[la.name] for la in mine if all(h.gammas for h in found[la.name].halves)}

    def block(self, number: int, layers: list[Layer]) -> Iterator[tuple[Layer, Influence]]:
        """Of the layers of a block, from the last block to the first; gradients at what it gets are put aside."""
        block, prefix = self.parts.block(number), self.parts.prefix(number)
        given, pulls = self.given(number), self.pulls(number + 1)
        largest = largest_for(self.inputs)
        for turn, group in enumerate(passes(layers, memory_for_statistics(), largest) or [[]]):
            found = _empty(group, largest)
            walk = Walk(block, group, found, self.count, self._random(1 + number), Lookups([]))
            walk.alone = True
            looks = {la.name.removeprefix(prefix): partial(walk.look, la) for la in group}
            with watching(block, looks):
                back = [
                    self._walk(walk, number, block, i, given[i], p) for i, p in zip(self.halves, pulls, strict=True)
                ]
            if not turn:
                self.shelf.put_list(f"pull-{number}", back)
            self._finish(found)
            for layer in group:
                yield layer, found.pop(layer.name)

    def _walk(self, walk: Walk, number: int, block: nn.Module, i: int, given: Tensor, pull: Tensor) -> Tensor:
        """One run of a block; the gradient at what it gets, or nothing where none is wanted."""
        run = self.runs[i]
        walk.start(run.piece, run.part)
        with torch.set_grad_enabled(bool(pull.numel())):
            hidden = given.clone().requires_grad_(bool(pull.numel()))
            output = self.parts.run(number, block, run.batch, hidden)
            walk.count_samples(run.part, len(run.piece))
            if not pull.numel():
                return torch.zeros(0)
            outs = [call[1] for layer in walk.layers for call in walk.calls.get(layer.name, [])]
            *found, back = torch.autograd.grad(output, [*outs, hidden], pull, allow_unused=True)
            walk.add_gradients(found, len(run.piece))
        return back

    def before(self) -> dict[str, Influence]:
        """Of embeddings, once gradients have come back to what the first block gets."""
        outer, pulls = self.parts.outer, self.pulls(0)
        with undisturbed(outer), watching(outer, self.lookups.looks()):
            for i, pull in zip(self.halves, pulls, strict=True):
                self.lookups.start(self.runs[i].part)
                if not pull.numel():
                    continue
                with torch.enable_grad():
                    hidden = self.parts.first(self.runs[i].batch)
                    outs = self.lookups.outs
                    found = torch.autograd.grad(hidden, outs, pull, allow_unused=True) if outs else ()
                self.lookups.add(found, len(self.runs[i].piece))
        self.lookups.variance = self.unit
        return self.lookups.influences(outer)

    def _random(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + 1009 * stream)

    def _finish(self, found: dict[str, Influence]) -> None:
        for one in found.values():
            one.variance, one.nats = self.unit, True
            for half in one.halves:
                half.divided(self.unit * max(1, half.gammas))


def _empty(layers: Sequence[Layer], largest: int) -> dict[str, Influence]:
    """Before anything is seen. What a layer's bias can make up for is not lost."""
    return {
        la.name: Influence((Half(), Half()), la.channels <= largest, centred=la.bias, by_token=True) for la in layers
    }
