"""What a search knows about its own result: a part of the plan that is not needed to replay it.

The keys in plan.json are the names here; what is not known is not written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from rankwise.core import files
from rankwise.errors import RankwiseError
from rankwise.planning.units import LATENCY

T = TypeVar("T")

NATS = "nats"  # the unit of changes of probabilities
INPUTS = ("calibration", "synthetic", "noise")
_FORMERLY = {"imagined": "synthetic"}  # inputs that have another name by now


@dataclass(frozen=True)
class Latency:
    """Seconds of the network before and after as the measured times predict them, and `keep`, their quotient.

    `layers` has the seconds of every decomposed layer before and after, `slower` names those that get slower, `timing`
    says how it was measured. `measured` is the quotient for the planned network itself; `rounds` are the quotients that
    were asked for, predicted and measured on the way to it.
    """

    before: float
    after: float
    keep: float
    layers: dict[str, tuple[float, float]] = field(default_factory=dict)
    slower: tuple[str, ...] = ()
    timing: dict[str, Any] = field(default_factory=dict)
    measured: float | None = None
    rounds: tuple[tuple[float, float, float], ...] | None = None

    def to_json(self) -> dict[str, Any]:
        return _known(asdict(self))


@dataclass(frozen=True)
class CutGroup:
    """A group of channels that pruning made smaller, by the layers that make them."""

    layers: tuple[str, ...]
    channels: int
    kept: int


@dataclass(frozen=True)
class WholeGroup:
    """A group of channels that must stay, and why."""

    layers: tuple[str, ...]
    channels: int
    reason: str


@dataclass(frozen=True)
class Findings:
    """`objective` is what the search minimised, `gap` how far from optimal it may be, `price` the error that one more
    unit of cost is worth, `trace` the errors on the way; `ranks` says what chose them where there was no budget.

    Where the effects of layers turned out to be wrong, the objective is that of corrected ones, `uncorrected` what it
    had been (calibration/agreement.py).

    `inputs` are those that the network was measured on (INPUTS; None for weights alone), `variance` that of its outputs
    there. `expected` and `measured` are changes of the outputs of the network that was built, relative to that
    variance: on inputs that only chose between ways to build it, and on inputs that nothing was fitted to or chosen by.
    `fitted` is the same on inputs that it was fitted to: far below `measured`, more inputs would help. With the `unit`
    "nats" these, and the objective, are divergences of a language model's probabilities instead, in nats for each
    position, and `variance` is what the changes of its logits were divided by for that.
    `draws` for each unit of sensitivity, `groups` and `whole` are of pruning. `other` holds what
    there is of further units (planning/units.py), and keys of older files that are not read any more, as they were.
    """

    objective: float | None = None
    gap: float | None = None
    price: float | None = None
    trace: tuple[float, ...] | None = None
    ranks: str | None = None
    latency: Latency | None = None
    inputs: str | None = None
    variance: float | None = None
    unit: str | None = None
    expected: float | None = None
    measured: float | None = None
    fitted: float | None = None
    uncorrected: float | None = None
    draws: float | None = None
    groups: tuple[CutGroup, ...] | None = None
    whole: tuple[WholeGroup, ...] | None = None
    other: dict[str, Any] = field(default_factory=dict)

    @property
    def stated(self) -> float | None:
        """The change of the outputs to expect: of the network that was built, where it is known, or by the search."""
        return self.objective if self.expected is None else self.expected

    def of_what(self) -> str:
        """Behind a number that is a change of the outputs."""
        return "nats for each position" if self.unit == NATS else "of their variance"

    def change(self, unit: str) -> tuple[object, object] | None:
        """What there is of a unit before and after, of those that are no part of a `Cost`."""
        if unit == LATENCY.name:
            return None if self.latency is None else (self.latency.before, self.latency.after)
        record = self.other.get(unit)
        return (record.get("before"), record.get("after")) if isinstance(record, dict) else None

    def to_json(self) -> dict[str, Any]:
        body = _known({k: v for k, v in asdict(self).items() if k != "other"})
        if self.latency is not None:
            body["latency"] = self.latency.to_json()
        return {**body, **self.other}


def read_findings(data: dict[str, Any], where: str) -> Findings:
    """What `Findings.to_json` wrote. Keys that are not known are kept: a reader of the plan does not need them."""
    known = {key: read(data[key], f"{key!r} of {where}") for key, read in _READERS.items() if key in data}
    return Findings(**known, other={key: value for key, value in data.items() if key not in known})


def _known(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if value is not None}


def _number(value: object, where: str) -> float:
    number: float = files.typed(value, float, where)  # as it stands there: 1 is not written again as 1.0
    return number


def _text(value: object, where: str) -> str:
    text: str = files.typed(value, str, where)
    return text


def _all(read: Callable[[object, str], T]) -> Callable[[object, str], tuple[T, ...]]:
    def read_all(value: object, where: str) -> tuple[T, ...]:
        return tuple(read(one, f"every entry of {where}") for one in files.typed(value, list, where))

    return read_all


def _some_numbers(value: object, where: str, many: int) -> tuple[float, ...]:
    numbers = _all(_number)(value, where)
    if len(numbers) != many:
        raise RankwiseError(f"{where} must be {many} numbers, and it has {len(numbers)}")
    return numbers


def _inputs(value: object, where: str) -> str:
    name = _FORMERLY.get(_text(value, where), value)
    if name not in INPUTS:
        raise RankwiseError(f"{where} is {name!r}: possible are {', '.join(INPUTS)}")
    return str(name)


def _latency(value: object, where: str) -> Latency:
    data = files.typed(value, dict, where)
    layers = files.typed(data.get("layers", {}), dict, f"'layers' of {where}")
    return Latency(
        before=files.field(data, "before", float, where),
        after=files.field(data, "after", float, where),
        keep=files.field(data, "keep", float, where),
        layers={name: _pair(seconds, f"{name!r} in 'layers' of {where}") for name, seconds in layers.items()},
        slower=_all(_text)(data.get("slower", []), f"'slower' of {where}"),
        timing=files.typed(data.get("timing", {}), dict, f"'timing' of {where}"),
        measured=_number(data["measured"], f"'measured' of {where}") if "measured" in data else None,
        rounds=_all(_round)(data["rounds"], f"'rounds' of {where}") if "rounds" in data else None,
    )


def _pair(value: object, where: str) -> tuple[float, float]:
    before, after = _some_numbers(value, where, 2)
    return before, after


def _round(value: object, where: str) -> tuple[float, float, float]:
    asked, predicted, measured = _some_numbers(value, where, 3)
    return asked, predicted, measured


def _group(value: object, where: str) -> tuple[dict[str, Any], tuple[str, ...], int]:
    data = files.typed(value, dict, where)
    layers = _all(_text)(files.field(data, "layers", list, where), f"'layers' of {where}")
    return data, layers, files.field(data, "channels", int, where)


def _cut_group(value: object, where: str) -> CutGroup:
    data, layers, channels = _group(value, where)
    return CutGroup(layers, channels, files.field(data, "kept", int, where))


def _whole_group(value: object, where: str) -> WholeGroup:
    data, layers, channels = _group(value, where)
    return WholeGroup(layers, channels, files.field(data, "reason", str, where))


_READERS: dict[str, Callable[[object, str], Any]] = {
    "objective": _number,
    "gap": _number,
    "price": _number,
    "trace": _all(_number),
    "ranks": _text,
    "latency": _latency,
    "inputs": _inputs,
    "variance": _number,
    "unit": _text,
    "expected": _number,
    "measured": _number,
    "fitted": _number,
    "uncorrected": _number,
    "draws": _number,
    "groups": _all(_cut_group),
    "whole": _all(_whole_group),
}
