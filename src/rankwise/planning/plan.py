"""Plans: one decision for each layer, as a value that can be printed, saved, compared and replayed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rankwise.core import files
from rankwise.core.layer import LOOKUP, Layer, Skipped
from rankwise.core.measures import ALL_MEASURES
from rankwise.core.option import Cost, Option
from rankwise.decompositions import PLAIN, check_option, full_rank
from rankwise.errors import RankwiseError
from rankwise.planning.budget import Budget
from rankwise.planning.findings import Findings, read_findings
from rankwise.planning.summary import one_line, summary
from rankwise.planning.times import LAYOUTS
from rankwise.planning.units import UNITS

FORMAT = 2  # 1 called slices groups
LISTED = 5  # names in a sentence


def listed(names: Sequence[str]) -> str:
    """Names for a sentence; of many the first few.

    >>> listed(list("abcdefg"))
    'a, b, c, d, e and 2 more'
    """
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


@dataclass(frozen=True)
class Choice:
    """The decision for a layer that is decomposed; `error` holds its relative error by measure."""

    name: str
    kind: str
    shape: tuple[int, ...]
    fold: str
    slices: int
    rank: int
    error: dict[str, float]
    before: Cost
    after: Cost
    decomposition: str = PLAIN.name
    outer: int = 0
    clusters: tuple[tuple[int, ...], ...] = ()
    heads: tuple[str, ...] = ()  # of an embedding: linear layers that share its weight, and are decomposed with it

    @property
    def option(self) -> Option:
        return Option(self.fold, self.slices, self.decomposition, self.outer, self.clusters)

    @property
    def groups(self) -> int:
        """Another name of `slices`."""
        return self.slices

    def check(self, layer: Layer) -> None:
        """Refuse a decision that does not fit the layer it names."""
        if (self.kind, self.shape) != (layer.kind, layer.shape):
            raise RankwiseError(
                f"the plan was made for another model: it has layer {self.name!r} as {self.kind!r} with weight "
                f"{self.shape}, and the model as {layer.kind!r} with weight {layer.shape}"
            )
        where = f"layer {self.name!r} of the plan"
        if self.heads and layer.kind != LOOKUP:
            raise RankwiseError(f"{where} has heads, which only an embedding has")
        check_option(layer, self.option, where)
        most = full_rank(layer, self.option)
        if not 1 <= self.rank <= most:
            raise RankwiseError(f"{where} has rank {self.rank}: possible are 1 to {most}")


@dataclass(frozen=True)
class Pruned:
    """The decision for a module that gets narrower: the outputs and inputs that it keeps, None for all of them.

    `shape` is that of its weight before. Costs count the bias too, which gets shorter with the outputs.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    filters: tuple[int, ...] | None
    channels: tuple[int, ...] | None
    before: Cost
    after: Cost

    @property
    def wide(self) -> tuple[int, int]:
        """Outputs and inputs before; modules with every channel on its own have as many of both."""
        if len(self.shape) == 1 or (self.filters is not None and self.filters == self.channels and self.shape[1] == 1):
            return self.shape[0], self.shape[0]
        turned = self.kind == "Conv1D" or self.kind.startswith("ConvTranspose")
        return (self.shape[1], self.shape[0]) if turned else (self.shape[0], self.shape[1])

    def check(self, outputs: int, inputs: int) -> None:
        """Refuse indices that a module with so many outputs and inputs does not have."""
        for what, kept, wide in (("filters", self.filters, outputs), ("channels", self.channels, inputs)):
            if kept is None:
                continue
            where = f"layer {self.name!r} of the plan"
            if not kept:
                raise RankwiseError(f"{where} keeps none of its {wide} {what}: at least one must stay")
            if list(kept) != sorted(set(kept)):
                raise RankwiseError(f"{where} lists the {what} it keeps out of order or more than once: sort them")
            if kept[0] < 0 or kept[-1] >= wide:
                bad = kept[0] if kept[0] < 0 else kept[-1]
                raise RankwiseError(f"{where} keeps number {bad} of its {what}: possible are 0 to {wide - 1}")


@dataclass(frozen=True, repr=False)
class Plan:
    """What becomes of every layer: a `Choice`, `Pruned`, or `Skipped` with the reason.

    `settings` says how the plan was found (measure, search, seed), `search` what the search knows about
    its own result (objective value, optimality gap, trace). Neither is needed to replay the plan. `fused` names batch
    norms that were folded into layers afterwards, each with its layer; `layout` is the memory layout of the weights, if
    it is not that of the model. `warnings` are sentences on what was done otherwise than was asked for.
    `weights` is a hash of the weights that the plan was made for, where that is known.
    """

    model: str
    method: str
    budget: Budget
    before: Cost
    after: Cost
    layers: tuple[Choice | Pruned | Skipped, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    search: Findings = field(default_factory=Findings)
    fused: dict[str, str] = field(default_factory=dict)
    layout: str | None = None
    warnings: tuple[str, ...] = ()
    weights: str = ""

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(entry for entry in self.layers if isinstance(entry, Choice))

    @property
    def pruned(self) -> tuple[Pruned, ...]:
        return tuple(entry for entry in self.layers if isinstance(entry, Pruned))

    @property
    def kept(self) -> tuple[Skipped, ...]:
        return tuple(entry for entry in self.layers if isinstance(entry, Skipped))

    @property
    def inputs(self) -> str | None:
        """What the plan was measured on: calibration, synthetic or noise; None for weights alone."""
        return self.search.inputs

    def __repr__(self) -> str:
        return one_line(self)

    def summary(self) -> str:
        """The plan in words and a table of 80 columns: what every layer becomes, or why it stays as it is.

        >>> import torch, rankwise as rw
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.Linear(20, 20))
        >>> _, plan = rw.compress(model, method="svd", keep=0.7)
        >>> print(plan.summary())  # doctest: +ELLIPSIS
        plan of Sequential by svd for params 0.7
          params: 880 → 560, keep 0.6364
        layer                          becomes                       error  params kept
        0                              svd f│c rank 6               0...       60.0 %
        2                              svd f│c rank 6               0...       60.0 %
        whole, not a linear or convolution layer: 1
        """
        return summary(self)

    def warned(self, *more: str) -> Plan:
        """The plan with more warnings, each of them once."""
        return replace(self, warnings=tuple(dict.fromkeys([*self.warnings, *more]))) if more else self

    def keep(self, unit: str = "params") -> float:
        """What remains ÷ what was there: 1 − CR-P for params, 1 − CR-F for macs; for latency as it was predicted."""
        counts = self.change(unit)
        if counts is None:
            advice = UNITS[unit].advice if unit in UNITS else ""
            raise RankwiseError(f"the plan does not know its {unit}: {advice or f'plan with a budget in {unit}'}")
        before, after = counts
        return float(after / before) if before else 1.0

    def change(self, unit: str) -> tuple[float, float] | None:
        """What there is of a unit before and after; None if the plan does not know. Time is in seconds."""
        if unit in Cost.__dataclass_fields__:
            before, after = getattr(self.before, unit), getattr(self.after, unit)
        else:
            before, after = self.search.change(unit) or (None, None)
        if not isinstance(before, int | float) or not isinstance(after, int | float):
            return None
        return before, after

    def to_json(self) -> dict[str, Any]:
        body = {k: v for k, v in asdict(self).items() if k != "budget"} | {"search": self.search.to_json()}
        for entry in body["layers"]:
            optional = ("macs",) if "reason" in entry else ("outer", "clusters", "heads")
            for key in optional:  # only where there are any: most plans have none
                if not entry.get(key, True):
                    del entry[key]
        for key in ("fused", "layout", "warnings", "weights"):
            if not body[key]:
                del body[key]
        return {"format": FORMAT, **body, "budget": self.budget.to_json()}

    def dumps(self) -> str:
        try:
            text = json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
            text.encode()
        except (ValueError, TypeError) as err:
            raise RankwiseError(f"the plan holds a value that JSON does not have ({err})") from None
        return text

    @classmethod
    def loads(cls, text: str | bytes, where: str = "the plan") -> Plan:
        return _read_plan(files.parse(text, where), where)

    def save(self, path: str | Path) -> None:
        files.write_whole(Path(path), self.dumps().encode())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        return cls.loads(files.read(Path(path)), str(path))


def _read_plan(data: dict[str, Any], where: str) -> Plan:
    files.check_format(data, FORMAT, where)
    files.strict(data, ["format", *Plan.__dataclass_fields__], where)
    budget = files.field(data, "budget", dict, where)
    files.strict(budget, UNITS, f"the budget of {where}")
    layers = [_read_entry(e, where) for e in files.field(data, "layers", list, where)]
    names = [entry.name for entry in layers]
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise RankwiseError(f"{where} names layer {twice[0]!r} more than once")
    search = dict(files.typed(data.get("search", {}), dict, f"'search' of {where}"))
    old = [files.typed(search.pop("warning"), str, f"'warning' of {where}")] if "warning" in search else []
    plan = Plan(
        model=files.field(data, "model", str, where),
        method=files.field(data, "method", str, where),
        budget=Budget(**budget),
        before=_read_cost(data, "before", where),
        after=_read_cost(data, "after", where),
        layers=tuple(layers),
        settings=files.typed(data.get("settings", {}), dict, f"'settings' of {where}"),
        search=read_findings(search, f"'search' of {where}"),
        fused={
            norm: files.typed(layer, str, f"{norm!r} in 'fused' of {where}")
            for norm, layer in files.typed(data.get("fused", {}), dict, f"'fused' of {where}").items()
        },
        layout=_read_layout(data, where),
        warnings=tuple(
            files.typed(text, str, f"a warning of {where}")
            for text in files.typed(data.get("warnings", []), list, f"'warnings' of {where}")
        ),
        weights=files.typed(data.get("weights", ""), str, f"'weights' of {where}"),
    )
    return plan.warned(*old)  # there was one at most, and it stood beside what the search found


def _read_layout(data: dict[str, Any], where: str) -> str | None:
    layout = data.get("layout")
    if layout is not None and layout not in LAYOUTS:
        raise RankwiseError(f"{where} has the layout {layout!r}: possible are {', '.join(LAYOUTS)}")
    return layout


def _read_entry(data: Any, where: str) -> Choice | Pruned | Skipped:
    data = files.typed(data, dict, f"every entry of 'layers' of {where}")
    name = files.field(data, "name", str, f"a layer of {where}")
    where = f"layer {name!r} of {where}"
    kind = files.field(data, "kind", str, where)
    if "reason" in data:
        files.strict(data, Skipped.__dataclass_fields__, where)
        params = files.field(data, "params", int, where)
        macs = data.get("macs")
        macs = None if macs is None else files.typed(macs, int, f"'macs' of {where}")
        return Skipped(name, kind, params, files.field(data, "reason", str, where), macs)
    if "filters" in data or "channels" in data:
        return _read_pruned(data, name, kind, where)
    data = _renamed(data, where)
    files.strict(data, Choice.__dataclass_fields__, where)
    error = files.field(data, "error", dict, where)
    files.strict(error, ALL_MEASURES, f"'error' of {where}")
    return Choice(
        name=name,
        kind=kind,
        shape=files.whole_numbers(files.field(data, "shape", list, where), f"'shape' of {where}"),
        fold=files.field(data, "fold", str, where),
        slices=files.field(data, "slices", int, where),
        rank=files.field(data, "rank", int, where),
        error={m: float(files.typed(v, float, f"error {m!r} of {where}")) for m, v in error.items()},
        before=_read_cost(data, "before", where),
        after=_read_cost(data, "after", where),
        decomposition=files.typed(data.get("decomposition", PLAIN.name), str, f"'decomposition' of {where}"),
        outer=files.typed(data.get("outer", 0), int, f"'outer' of {where}"),
        clusters=tuple(
            files.whole_numbers(files.typed(c, list, f"a cluster of {where}"), f"a cluster of {where}")
            for c in files.typed(data.get("clusters", []), list, f"'clusters' of {where}")
        ),
        heads=tuple(
            files.typed(head, str, f"a head of {where}")
            for head in files.typed(data.get("heads", []), list, f"'heads' of {where}")
        ),
    )


def _renamed(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Slices were called groups in format 1."""
    if "groups" not in data:
        return data
    if "slices" in data:
        raise RankwiseError(f"{where} has slices and groups, which are the same: leave groups out")
    return {"slices" if key == "groups" else key: value for key, value in data.items()}


def _read_pruned(data: dict[str, Any], name: str, kind: str, where: str) -> Pruned:
    files.strict(data, Pruned.__dataclass_fields__, where)
    kept: dict[str, tuple[int, ...] | None] = {}
    for side in ("filters", "channels"):
        if side not in data:
            raise RankwiseError(f"{where} has no {side!r}")
        value = data[side]
        kept[side] = None if value is None else files.whole_numbers(value, f"{side!r} of {where}")
    return Pruned(
        name=name,
        kind=kind,
        shape=files.whole_numbers(files.field(data, "shape", list, where), f"'shape' of {where}"),
        filters=kept["filters"],
        channels=kept["channels"],
        before=_read_cost(data, "before", where),
        after=_read_cost(data, "after", where),
    )


def _read_cost(data: dict[str, Any], key: str, where: str) -> Cost:
    body = files.field(data, key, dict, where)
    where = f"{key!r} of {where}"
    files.strict(body, Cost.__dataclass_fields__, where)
    macs = body.get("macs")
    return Cost(
        files.field(body, "params", int, where),
        None if macs is None else files.typed(macs, int, f"'macs' of {where}"),
    )
