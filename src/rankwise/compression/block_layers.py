"""What is found out about one layer of a block: the effects of its options, and its factors at the largest rank.

Layers of a block do not depend on each other. So they are measured one after the other, or by several processes
(core/workers.py): what was seen of a layer is put on the shelf for a process to take, and what it finds lies there
afterwards, as if it had been found here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankwise.calibration.effect_table import add_layer
from rankwise.calibration.influence import Influence
from rankwise.calibration.inputs import Inputs
from rankwise.calibration.shelf import Shelf
from rankwise.calibration.shrinkage import target_of_both
from rankwise.core.layer import LOOKUP, Coverage, Layer
from rankwise.core.linalg import check_finite
from rankwise.core.option import Option
from rankwise.core.workers import Job, Workers, run
from rankwise.decompositions import Target, of
from rankwise.errors import RankwiseError
from rankwise.planning.planner import Settings
from rankwise.planning.table import Table

MakeWorkers = Callable[[], AbstractContextManager[Workers]]


@dataclass(frozen=True, eq=False)
class SeenLayer:
    """A layer, its weight in its own precision, and what the inputs say of it."""

    layer: Layer
    weight: Tensor
    influence: Influence


@dataclass(frozen=True)
class Measuring:
    """How layers are measured, and where factors are put: the same for all layers of a network."""

    folder: Path
    kind: str  # of the inputs
    settings: Settings

    def measure(self, table: Table, seen: SeenLayer) -> None:
        """Add the options of a layer to a table, and put its factors aside."""
        layer, one = seen.layer, seen.influence
        check_finite(seen.weight, layer.name)
        weight = seen.weight.detach().float()
        add_layer(table, layer, weight, one, Inputs([], self.kind), self.settings)
        options = [option for name, option in dict.fromkeys([*table.spectra, *table.given]) if name == layer.name]
        if options:
            target = Target(layer, weight, tokens=one.tokens)
            if layer.kind != LOOKUP and one.whole and one.count:
                target = target_of_both(layer, weight, one)
            Shelf(self.folder).put(f"factors-{layer.name}", _largest(seen, options[0], target))

    def measure_all(self, table: Table, every: Iterable[SeenLayer], workers: Workers | None) -> None:
        """Here, one at a time; or by workers, as many at a time as they take."""
        if workers is None:
            for seen in every:
                self.measure(table, seen)
            return
        left = iter(every)
        while some := list(islice(left, workers.window)):
            jobs = [self._job(seen, table.fingerprint) for seen in some]
            run(jobs, workers, _told)
            for job in jobs:
                _merge(table, Shelf(self.folder), job.name)

    def _job(self, seen: SeenLayer, fingerprint: str) -> Job:
        tensors: dict[str, Tensor] = {}
        rest = _without(seen, tensors)
        Shelf(self.folder).put(f"seen-{seen.layer.name}", tensors)
        return Job(seen.layer.name, measure_apart, (self, rest, fingerprint))


def measure_apart(measuring: Measuring, rest: Any, fingerprint: str) -> None:
    """In some process: a table of this layer alone on the shelf, and its factors."""
    shelf, layer = Shelf(measuring.folder), rest.layer
    seen = _with(rest, shelf.read(f"seen-{layer.name}"))
    table = Table(Coverage((layer,), (), layer.params, layer.macs), {}, {}, fingerprint)
    measuring.measure(table, seen)
    table.save(shelf.path(f"layer-{layer.name}"))


def _merge(table: Table, shelf: Shelf, name: str) -> None:
    add_table(table, Table.load(shelf.path(f"layer-{name}")))
    for kind in ("layer", "seen"):
        shelf.path(f"{kind}-{name}").unlink(missing_ok=True)


def add_table(table: Table, other: Table) -> None:
    """The curves of another table, of other layers."""
    table.given.update(other.given)
    table.spectra.update(other.spectra)
    table.norms.update(other.norms)


def _told(job: Job, error: str | None) -> None:
    if error is not None:
        raise RankwiseError(f"layer {job.name}: {error}")


def _largest(seen: SeenLayer, option: Option, target: Target) -> dict[str, Tensor]:
    """Factors at the largest rank that is smaller than the layer, in the precision of its weight."""
    layer, one = seen.layer, seen.influence
    params, macs = of(option).costs(layer, option)
    most = [int(params.searchsorted(layer.params)) - 1]
    if macs is not None and layer.macs:
        most.append(int(macs.searchsorted(layer.macs)) - 1)
    rank = min(max(1, *most), of(option).full_rank(layer, option))
    found = of(option).factors(target, option, rank).weights
    kept = {name: parts[0].to(seen.weight.dtype) for name, parts in found.items()}
    if layer.bias and one.centred and layer.kind != LOOKUP and one.whole:
        kept["mean"] = sum(one.means, start=torch.zeros(()))[0].float() / 2
    return kept


@dataclass(frozen=True)
class _Slot:
    """In place of a tensor that lies on the shelf."""

    name: str


def _without(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value with slots for its tensors, which are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors[str(len(tensors))] = value
        return _Slot(str(len(tensors) - 1))
    return _each(value, lambda part: _without(part, tensors))


def _with(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    return tensors[value.name] if isinstance(value, _Slot) else _each(value, lambda part: _with(part, tensors))


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(change, value))
    if is_dataclass(value) and not isinstance(value, type | _Slot):
        return replace(value, **{f.name: change(getattr(value, f.name)) for f in fields(value) if f.init})
    return value
