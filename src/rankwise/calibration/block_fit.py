"""The compressed network of a plan, block by block, from factors of all ranks that lie on a shelf.

Factors in closed form are nested: those of a rank are the first of those of the largest rank. So they are computed once
while a block's statistics are in memory, and a plan only cuts them. Then blocks are gone through in order: of each pair
the encoder stays, and the decoder becomes the best one for what the compressed network gives it,

    D* = (E[y ẑᵀ] + λ D) (E[ẑ ẑᵀ] + λ)⁻¹,   ẑ what the encoder makes of the compressed network's activations,

as far as one half of the inputs says that this helps on the other. A block keeps the new decoders if its outputs are
then closer to the original's on inputs that are held out.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.calibration.block_sweeps import CHECK, LAST, Sweeps
from rankwise.calibration.blocks import Blocks
from rankwise.calibration.objective import divergence, logits_in
from rankwise.calibration.shelf import Shelf
from rankwise.core.layer import LOOKUP, Layer
from rankwise.core.linalg import precise
from rankwise.decompositions import Factors
from rankwise.decompositions.whitened import share_for
from rankwise.planning.plan import Choice
from rankwise.planning.table import Progress
from rankwise.surgery.forward import stopping, tensors_of
from rankwise.surgery.hooks import Seen, watching
from rankwise.surgery.lookups import head_swaps
from rankwise.surgery.pairs import build_pair, factors_of, put_factors_
from rankwise.surgery.replace import copy_model, swap_modules_

Task = tuple[Choice, Layer]
TOKENS = 8192  # positions that decoders are fitted to
SHOWN = 2  # batches of fitted inputs that the change is measured on, beside those that are new


@dataclass(frozen=True)
class Changes:
    """Of the outputs, in the unit of effects: on inputs held out for decisions, on new ones, and on fitted ones."""

    check: float | None
    last: float | None
    fitted: float | None


class Builder:
    """Goes through the blocks once. What is built is put on `shelf`; factors by layer are on that of the sweeps."""

    def __init__(self, model: nn.Module, tasks: list[Task], sweeps: Sweeps, shelf: Shelf) -> None:
        self.model, self.tasks, self.sweeps, self.shelf = model, tasks, sweeps, shelf
        self.small = copy_model(model, shared=True)

    def run(self, progress: Progress | None = None) -> tuple[nn.Module, Changes]:
        parts, inside = self.sweeps.parts, self.sweeps.parts.name + "."
        for choice, layer in self.tasks:
            if not layer.name.startswith(inside):
                self._replace(self.small, choice, layer, layer.name)
        ours = Blocks(self.small)
        if "ours-0" not in self.shelf:
            with torch.no_grad():
                self.shelf.put_list("ours-0", [ours.first(run.batch) for run in self.sweeps.runs])
        for number in range(len(parts)):
            if progress:
                progress(f"building, block {number}", number, len(parts))
            self._block(ours, number)
        return self.small, self._changes(ours)

    def _replace(self, root: nn.Module, choice: Choice, layer: Layer, name: str) -> Any:
        """Put the pair of a choice in place, with its factors in closed form."""
        old: Any = root.get_submodule(name)
        pair: Any = build_pair(layer, choice.option, choice.rank, old)
        kept = factors_for(self.sweeps.shelf, pair, layer, choice.rank)
        encoder, decoder = kept["encoder"], kept["decoder"]
        put_factors_(pair, Factors({"encoder": [encoder], "decoder": [decoder]}), layer)
        if layer.bias:
            with torch.no_grad():
                pair[-1].bias.copy_(old.bias)
                if "mean" in kept:  # the bias takes up the mean of what is lost
                    mean = precise(kept["mean"])
                    exact = _dense(old, layer) @ mean
                    pair[-1].bias += (exact - precise(decoder[0]) @ (precise(encoder[0]) @ mean)).to(old.bias)
        heads = head_swaps(root, layer, pair) if layer.kind == LOOKUP else {}
        swap_modules_(root, {old: pair, **heads})
        return pair

    @torch.no_grad()
    def _block(self, ours: Blocks, number: int) -> None:
        prefix = ours.prefix(number)
        mine = [task for task in self.tasks if task[1].name.startswith(prefix)]
        done = f"pairs-{number}"
        if done not in self.shelf or f"ours-{number + 1}" not in self.shelf:
            block = ours.block(number)
            for choice, layer in mine:
                self._replace(block, choice, layer, layer.name.removeprefix(prefix))
            fitted = _DecoderFit(self.sweeps, ours, number, self._ours(number))
            fitted.in_order_(block, [layer for _, layer in mine])
            dtype = {layer.name: self.model.get_submodule(layer.name).weight.dtype for _, layer in mine}
            rounded = {
                f"{layer.name}.{key}": value.to(dtype[layer.name])
                for _, layer in mine
                for key, value in block.get_submodule(layer.name.removeprefix(prefix)).state_dict().items()
            }
            block.load_state_dict({key.removeprefix(prefix): value for key, value in rounded.items()}, strict=False)
            found = [fitted.run(block, i) for i in range(len(self.sweeps.runs))]
            self.shelf.put(done, rounded)
            self.shelf.put_list(f"ours-{number + 1}", found)
        old = {layer.name: self.small.get_submodule(layer.name) for _, layer in mine}
        pairs = {la.name: build_pair(la, choice.option, choice.rank, old[la.name]) for choice, la in mine}
        kept = self.shelf.get(
            done, {f"{name}.{key}": t.shape for name, pair in pairs.items() for key, t in pair.state_dict().items()}
        )
        for layer_name, pair in pairs.items():
            for name, _ in list(pair.named_parameters()):
                where, _, last = name.rpartition(".")
                value = nn.Parameter(kept[f"{layer_name}.{name}"], requires_grad=False)
                setattr(pair.get_submodule(where), last, value)
            swap_modules_(self.small, {old[layer_name]: pair})

    def _ours(self, number: int) -> list[Tensor]:
        """What a block of the compressed network gets, by run."""
        return self.shelf.get_list(f"ours-{number}", self.sweeps.shapes)

    @torch.no_grad()
    def _changes(self, ours: Blocks) -> Changes:
        size = len(ours)
        wanted, given = self.sweeps.given(size), self._ours(size)
        runs = self.sweeps.runs

        def change(which: list[int]) -> float | None:
            lost, count = 0.0, 0
            for i in which:
                theirs = _logits(self.sweeps.parts, runs[i].batch, wanted[i])
                lost += 2 * divergence(theirs, _logits(ours, runs[i].batch, given[i]))
                count += len(runs[i].piece)
            return lost / count / self.sweeps.unit if count else None

        by_part = [[i for i, run in enumerate(runs) if run.part == part] for part in (CHECK, LAST)]
        return Changes(change(by_part[0]), change(by_part[1]), change(self.sweeps.halves[:SHOWN]))


def factors_for(shelf: Shelf, pair: nn.Sequential, layer: Layer, rank: int) -> dict[str, Tensor]:
    """The first of the factors that lie on a shelf, as a pair of that rank has them; and the mean of inputs, if any."""
    name = f"factors-{layer.name}"
    found = shelf.read(name)
    shapes = {part: tuple(weights[0].shape) for part, weights in factors_of(pair).weights.items()}
    if not set(shapes) <= set(found) <= {*shapes, "mean"}:
        raise shelf.damaged(name, "it holds other tensors than this job writes")
    for part, shape in shapes.items():
        if found[part].dim() == len(shape):
            axis = 1 if part == "encoder" else 2
            found[part] = found[part].narrow(axis, 0, min(rank, found[part].shape[axis]))
    shapes |= {"mean": (layer.channels,)} if "mean" in found else {}
    if any(found[part].shape != shape for part, shape in shapes.items()):
        raise shelf.damaged(name, "it holds factors of another layer")
    return found


def _logits(parts: Blocks, batch: Any, hidden: Tensor) -> Tensor:
    answer = [t for t in tensors_of(parts.last(batch, hidden)) if t.is_floating_point()]
    found = logits_in(parts.model, answer)
    return answer[0] if found is None else found


def _dense(module: Any, layer: Layer) -> Tensor:
    """(outputs, inputs)."""
    return precise(module.weight.t() if layer.kind == "Conv1D" else module.weight)


@dataclass
class _CodeSums:
    """Of one half: Σ ẑ ẑᵀ and Σ y ẑᵀ."""

    square: Tensor = field(default_factory=lambda: torch.zeros(()))
    cross: Tensor = field(default_factory=lambda: torch.zeros(()))
    count: int = 0

    def add(self, codes: Tensor, wanted: Tensor) -> None:
        self.square, self.cross = self.square + codes.t() @ codes, self.cross + wanted.t() @ codes
        self.count += len(codes)

    def __add__(self, other: _CodeSums) -> _CodeSums:
        return _CodeSums(self.square + other.square, self.cross + other.cross, self.count + other.count)


class _DecoderFit:
    """Decoders of one block, one after the other, for what the compressed network gives it."""

    def __init__(self, sweeps: Sweeps, ours: Blocks, number: int, given: list[Tensor]) -> None:
        self.sweeps, self.ours, self.number, self.given = sweeps, ours, number, given
        self.theirs, self.wanted = sweeps.given(number), sweeps.given(number + 1)
        self.fitted: list[int] = []
        seen = [0, 0]
        for i in sweeps.halves:
            part = sweeps.runs[i].part
            if 2 * seen[part] < TOKENS:
                self.fitted.append(i)
                seen[part] += given[i][..., 0].numel()

    def run(self, block: nn.Module, i: int) -> Tensor:
        return self.ours.run(self.number, block, self.sweeps.runs[i].batch, self.given[i])

    def in_order_(self, block: nn.Module, layers: Sequence[Layer]) -> None:
        prefix = self.ours.prefix(self.number)
        names = [layer.name.removeprefix(prefix) for layer in layers if layer.kind != LOOKUP]
        if not names or not all(any(self.sweeps.runs[i].part == half for i in self.fitted) for half in (0, 1)):
            return
        before, lost = copy.deepcopy(block.state_dict()), self._lost(block)
        outputs, order = self._outputs(names)
        for name in order:
            self._decoder_(block, name, outputs.pop(name))
        if lost is not None and not self._lost(block) <= lost:  # type: ignore[operator]
            block.load_state_dict(before)

    def _lost(self, block: nn.Module) -> float | None:
        """‖block(x̂) − what the original gives‖² on inputs that are held out for this question."""
        held = [i for i, run in enumerate(self.sweeps.runs) if run.part == CHECK]
        if not held:
            return None
        return sum(float((self.run(block, i) - self.wanted[i]).double().square().sum()) for i in held)

    def _outputs(self, names: list[str]) -> tuple[dict[str, list[Tensor]], list[str]]:
        """What the original layers give, for each fitted run; and names in the order of their calls."""
        dense, parts = self.sweeps.parts.block(self.number), self.sweeps.parts
        found: dict[str, list[Tensor]] = {}

        def look(name: str, call: Seen) -> None:
            found.setdefault(name, []).append(call.output.flatten(0, -2))

        with watching(dense, {name: partial(look, name) for name in names}):
            for i in self.fitted:
                parts.run(self.number, dense, self.sweeps.runs[i].batch, self.theirs[i])
        once = {name: rows for name, rows in found.items() if len(rows) == len(self.fitted)}
        return once, list(once)

    def _codes(self, block: nn.Module, pair: nn.Module, i: int) -> Tensor:
        """What the encoder of a pair gives; the rest of the block does not run."""
        found: list[Tensor] = []
        with stopping() as stop:

            def look(call: Seen) -> None:
                found.append(call.output.flatten(0, -2))
                stop()

            with watching(pair, {"encoder": look}):
                self.run(block, i)
        return found[0]

    def _decoder_(self, block: nn.Module, name: str, wanted: list[Tensor]) -> None:
        pair: Any = block.get_submodule(name)
        halves = (_CodeSums(), _CodeSums())
        for i, rows in zip(self.fitted, wanted, strict=True):
            found = self._codes(block, pair, i)
            if pair.decoder.bias is not None:
                found = torch.cat([found, torch.ones(len(found), 1)], dim=1)
            halves[self.sweeps.runs[i].part].add(found, rows)
        plain = precise(pair.decoder.weight)
        if pair.decoder.bias is not None:
            plain = torch.cat([plain, precise(pair.decoder.bias)[:, None]], dim=1)
        new = _blended(plain, halves)
        rank = pair.decoder.weight.shape[1]
        pair.decoder.weight.copy_(new[:, :rank])
        if pair.decoder.bias is not None:
            pair.decoder.bias.copy_(new[:, rank])


def _blended(plain: Tensor, halves: tuple[_CodeSums, _CodeSums]) -> Tensor:
    """D + τ (D* − D) with the τ that is best for one half if D* is that of the other, both ways together."""
    curve = slope = 0.0
    for fitted, tested in (halves, halves[::-1]):
        step = _solved(plain, fitted) - plain
        square, cross = precise(tested.square), precise(tested.cross)
        curve += float((step * (step @ square)).sum())
        slope += float((step * (cross - plain @ square)).sum())
    share = min(1.0, max(0.0, slope / curve)) if curve > 0 else 0.0
    return plain + 2 * share / (1 + share) * (_solved(plain, halves[0] + halves[1]) - plain)


def _solved(plain: Tensor, sums: _CodeSums) -> Tensor:
    square, cross = precise(sums.square), precise(sums.cross)
    ridge = share_for(sums.count, len(square)) * float(square.diagonal().mean()) + 1e-12
    whole = square + ridge * torch.eye(len(square)).to(square)
    found: Tensor = torch.linalg.solve(whole, (cross + ridge * plain).t()).t()
    return found
