"""The same job for a network that is larger than memory: one block at a time, with everything that takes long on disk.

Statistics, effects and the search are those of the whole network (calibration/block_sweeps.py). Factors are cut from
those of the largest rank, and decoders are fitted in order, block by block (calibration/block_fit.py). Whatever is
finished lies in a folder beside the result, so a job that was killed and is started again goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.calibration.activations import Data
from rankwise.calibration.block_fit import Builder, Changes
from rankwise.calibration.block_sweeps import Sweeps
from rankwise.calibration.blocks import Blocks
from rankwise.calibration.effect_table import fittable, largest_for
from rankwise.calibration.influence import Half, Influence
from rankwise.calibration.inputs import Inputs, find_inputs
from rankwise.calibration.judge import with_change
from rankwise.calibration.shelf import Shelf
from rankwise.compression.basis import Basis, Observations, Watch
from rankwise.compression.block_layers import MakeWorkers, Measuring, SeenLayer, add_table
from rankwise.compression.job import Compression
from rankwise.compression.request import Request
from rankwise.core.layer import LOOKUP, Coverage, Layer
from rankwise.core.moments import Moments
from rankwise.core.workers import Workers
from rankwise.decompositions import FITTED, LOOKUPS, PLAIN
from rankwise.errors import RankwiseError
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Plan
from rankwise.planning.planner import Settings
from rankwise.planning.table import Progress, Table
from rankwise.surgery.forward import Example, tensors_of
from rankwise.surgery.pretrained_folder import is_pretrained
from rankwise.surgery.replace import match_layers
from rankwise.version import __version__

SLICES = 1  # of a layer: nested factors are those of one slice


class BlockCompression(Compression):
    """A `Compression` that runs a network block by block. `folder` is where it puts aside what is done.

    `workers` measure the layers of a block at the same time (block_layers.py); without them this process does.
    `auto` only, with data, for budgets in params and macs, without recovery.
    """

    copies = False

    def __init__(
        self,
        model: nn.Module,
        example: Example | None,
        request: Request,
        data: Data | str | None,
        watch: Watch | None,
        folder: Path,
        workers: MakeWorkers | None = None,
    ) -> None:
        changes = {**request.changes, "slices": SLICES}
        super().__init__(model, example, replace(request, changes=changes), data, watch)
        self.folder, self.workers = folder, workers
        self._basis: Basis | None = None
        self._changes = Changes(None, None, None)
        _check(request, data)

    @cached_property
    def inputs(self) -> Inputs:
        ground = self.ground
        found = find_inputs(self.model, self.example, ground.data, self.coverage.macs, self.seed)
        if not all(map(len, found.halves)):
            raise RankwiseError("there is one calibration input only: give more of them (--calibrate N, --data)")
        return found

    @property
    def seed(self) -> int:
        return int(self.request.changes.get("seed") or 0)

    @cached_property
    def sweeps(self) -> Sweeps:
        return Sweeps(Blocks(self.model), self.inputs, Shelf(self.folder / self._identity()), self.seed)

    def _identity(self) -> str:
        """Of all that what is put aside depends on: another job finds nothing."""
        digest = hashlib.sha256(self.weights.encode())
        for batch in self.inputs.batches:
            for tensor in tensors_of(batch):
                digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        names = [layer.name for layer in self.coverage.with_embeddings().layers]
        digest.update(json.dumps([__version__, self.seed, names]).encode())
        return digest.hexdigest()[:16]

    def basis(self, budget: Budget | None) -> Basis:
        if budget is not None and budget.timed:
            raise RankwiseError("a latency was asked for, and networks are not timed block by block: give --keep")
        if self._basis is None:
            settings = self.settings
            assert isinstance(settings, Settings), "auto decomposes"
            wanted = replace(settings, error="effect", decompositions=(*FITTED, PLAIN.name, *LOOKUPS))
            with self.ground.stage("layers") as report, nullcontext() if not self.workers else self.workers() as engine:
                maker = _TableMaker(self.model, self.coverage.with_embeddings(), wanted, self.sweeps, engine)
                table, influence = maker.make(self.weights, report)
            self._basis = Basis(table, wanted, None, Observations({}, self.inputs, influence))
        return self._basis

    def _agreed(self, budget: Budget | None) -> Plan:
        return self._planned(budget)  # the network never runs as a whole

    def _build(self, plan: Plan) -> tuple[nn.Module, Plan]:
        tag = hashlib.sha256(repr([(c.name, c.option, c.rank) for c in plan.choices]).encode()).hexdigest()[:16]
        tasks = match_layers(self.model, plan, self.coverage)
        builder = Builder(self.model, tasks, self.sweeps, Shelf(self.sweeps.shelf.folder / tag))
        with self.ground.stage("blocks") as report:
            small, self._changes = builder.run(report)
        return small, replace(plan, search=replace(plan.search, expected=self._changes.check))

    def finish(self, small: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
        measured, fitted = self._changes.last, self._changes.fitted
        if measured is not None and fitted is not None:
            plan = with_change(plan, self.inputs, measured, fitted, False)
        if is_pretrained(small):
            import_module("rankwise.hf").attach_(small, plan)
        return small, plan

    def forget(self) -> None:
        """Remove what was put aside, once the result is written. Whichever files stay, the same job can go on."""
        for _ in range(2):  # what could not be removed is tried once more
            with suppress(MemoryError):
                shutil.rmtree(self.folder, ignore_errors=True)


def _check(request: Request, data: Data | str | None) -> None:
    """What is not possible block by block is said before anything is read."""
    if not request.is_free or request.plan is not None:
        raise RankwiseError("block by block only method auto is possible, with its own errors: add --no-blocks")
    if data is None:
        raise RankwiseError("block by block auto needs texts: add --data text:FILE, or --no-blocks")
    if request.recovers:
        raise RankwiseError("--recover trains the whole network at once: leave it out, or add --no-blocks")
    if request.changes.get("never_slower"):
        raise RankwiseError("--never-slower times the network, which is not done block by block: leave it out")


class _TableMaker:
    """Effects of all layers, and their factors at the largest rank, block by block from the last one."""

    def __init__(
        self, model: nn.Module, coverage: Coverage, settings: Settings, sweeps: Sweeps, workers: Workers | None
    ) -> None:
        self.model, self.coverage, self.settings, self.sweeps = model, coverage, settings, sweeps
        self.inputs, self.shelf, self.workers = sweeps.inputs, sweeps.shelf, workers
        self.measuring = Measuring(self.shelf.folder.resolve(), self.inputs.kind, settings)

    def make(self, weights: str, report: Progress | None) -> tuple[Table, dict[str, Influence]]:
        self.table = Table(self.coverage, {}, {}, weights)
        self.table.decompositions = self.settings.decompositions
        parts, able = self.sweeps.parts, fittable(self.coverage)
        by_block = [[la for la in able if la.name.startswith(parts.prefix(i))] for i in range(len(parts))]
        outer = [la for la in able if not la.name.startswith(parts.name + ".")]
        self.sweeps.forward(report)
        found = self.sweeps.behind(outer)
        behind = [la for la in outer if la.name in found]
        self._part("behind", behind, ((la, found[la.name]) for la in behind), f"pull-{len(parts)}")
        for done, number in enumerate(reversed(range(len(parts)))):
            if report:
                report(f"block {number}", done, len(parts))
            mine = by_block[number]
            self._part(f"block-{number}", mine, self.sweeps.block(number, mine), f"pull-{number}")
        lookups = [la for la in outer if la.kind == LOOKUP]
        seen = self.sweeps.before() if lookups else {}
        self._part("before", lookups, ((la, seen[la.name]) for la in lookups), "pull-0")
        if report:
            report("", len(parts), len(parts))
        return self.table, {la.name: self._stub(la) for la in able}

    def _part(self, name: str, layers: list[Layer], found: Iterator[tuple[Layer, Influence]], pull: str) -> None:
        """Take a part of the table from the shelf, or make it and put it there. It is the last of what is written.

        It is made again where something that belongs to it is gone: `pull`, or the factors of a layer.
        """
        mine = self._kept(f"table-{name}", layers)
        if mine is None or not all(n in self.shelf for n in (pull, *_factors_of(mine))):
            some = replace(self.coverage, layers=tuple(layers), skipped=(), embeddings=())
            mine = Table(some, {}, {}, self.table.fingerprint)
            every = (SeenLayer(la, self._weight(la), one) for la, one in found)
            self.measuring.measure_all(mine, every, self.workers)
            mine.save(self.shelf.path(f"table-{name}"))
        add_table(self.table, mine)

    def _weight(self, layer: Layer) -> Tensor:
        module: Any = self.model.get_submodule(layer.name)
        weight: Tensor = module.weight
        return weight.detach()

    def _kept(self, name: str, layers: list[Layer]) -> Table | None:
        """A table that lies on the shelf, which must be of these layers of this network."""
        if name not in self.shelf:
            return None
        found = Table.load(self.shelf.path(name))
        sizes = [[(la.name, la.filters, la.channels) for la in some] for some in (layers, found.coverage.layers)]
        if found.fingerprint != self.table.fingerprint or sizes[0] != sizes[1]:
            raise self.shelf.damaged(name, "it is a table of other layers")
        return found

    def _stub(self, layer: Layer) -> Influence:
        """As much of an influence as plans ask for: whether a layer was reached, and the unit of effects."""
        reached = any(name == layer.name for name, _ in (*self.table.spectra, *self.table.given))
        halves = (Half(Moments(int(reached))), Half(Moments(int(reached))))
        whole = layer.channels <= largest_for(self.inputs)
        return Influence(halves, whole, self.sweeps.unit, by_token=True, nats=True)


def _factors_of(table: Table) -> set[str]:
    """Names on the shelf: every layer that can be decomposed has its factors there."""
    return {f"factors-{name}" for name, _ in (*table.spectra, *table.given)}
