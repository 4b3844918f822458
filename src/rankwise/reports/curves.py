"""Curves and δ-tables of a study: pure functions of result rows, no files and no drawing.

panel   rows that may be compared: one study, network, data set and split
stage   when a network was scored: compressed only, or retrained for a share of the recipe's epochs
line    one label with one unit of budget and one mode of the study
point   all repeats of a line at one budget: mean and sample standard deviation (n − 1) over them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import Any

Row = dict[str, Any]
Pair = tuple[float, float | None]  # mean, and deviation where there are at least two repeats

DELTAS = (0.0, 0.5, 1.0, 2.0, 3.0)  # the losses that the paper's tables allow, in points
UNITS = ("params", "macs")
SCORES = (0.0, 100.0)  # where every metric lies, in percent
_ROUNDING = 1e-9  # 91.73 − 91.23 is a loss of 0.5, whatever binary fractions make of it


@dataclass(frozen=True)
class CurvePoint:
    """`rows` are positions in the list of rows. `cut` is what was removed, in percent: CR-P, CR-F, and time where it
    was measured.

    `score` is the panel's metric in percent, `change` its difference from the reference, in points.
    """

    asked: float | None
    rows: tuple[int, ...]
    cut: dict[str, Pair | None]
    score: Pair
    change: Pair


@dataclass(frozen=True)
class Line:
    label: str
    unit: str
    mode: str
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True)
class Stage:
    """`share` is None before retraining, and where a row does not say how long it was retrained."""

    title: str
    when: str
    share: float | None
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Panel:
    """`reference` is the metric of the network before compression, over the repeats; `n` images are scored."""

    study: str
    model: str
    data: str
    split: str
    metric: str
    reference: Pair
    n: int | None
    stages: tuple[Stage, ...]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Every panel in the order in which its first row comes; rows that failed or have no scores are in none."""
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for at, row in enumerate(rows):
        if row.get("status") == "done" and _score(row, "reference") is not None:
            found.setdefault(panel_key(row), []).append(at)
    return [panel for key, members in found.items() if (panel := _panel(rows, key, members)).stages]


def panel_key(row: Row) -> tuple[str, str, str, str]:
    """Where a row names its data set, that name counts, and not where the data lay on a machine."""
    study, model, split = (str(row.get(key) or "") for key in ("study", "model", "split"))
    return study, model, str(row.get("dataset") or row.get("data") or ""), split


def line_key(row: Row) -> tuple[str, str, str]:
    """A sweep over retraining is many one-shot compressions: both are one line at the same share."""
    label, unit = str(row.get("label") or row.get("method") or "?"), str(row.get("unit") or "params")
    return label, unit, "iterate" if row.get("mode") == "iterate" else "oneshot"


def delta_table(stage: Stage, unit: str, deltas: Iterable[float] = DELTAS) -> list[list[int | None]]:
    """For each line and each δ the number of its point with the largest cut whose mean loss is at most δ, or None."""
    table = []
    for line in stage.lines:
        cuts = [(p.cut[unit], i, p.change[0]) for i, p in enumerate(line.points)]
        known = [(cut[0], i, change) for cut, i, change in cuts if cut is not None]
        best = [max(((cut, i) for cut, i, change in known if within(change, d)), default=None) for d in deltas]
        table.append([None if found is None else found[1] for found in best])
    return table


def within(change: float, delta: float) -> bool:
    """Whether a change, in points, is a loss of at most δ."""
    return change >= -delta - _ROUNDING


def change_of(row: Row, when: str, metric: str) -> float | None:
    """Points gained (lost, if negative) against the reference of the same repeat."""
    after, before = _score(row, when, metric), _score(row, "reference", metric)
    return None if after is None or before is None else float(after) - float(before)


def pair(values: Sequence[float]) -> Pair:
    """Mean and sample standard deviation of at least one value.

    >>> pair([1.0, 3.0])
    (2.0, 1.4142135623730951)
    >>> pair([5.0])
    (5.0, None)
    """
    mean = fmean(values)
    if len(values) == 1:
        return mean, None
    return mean, sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


def all_or_none(values: Sequence[float | None]) -> Pair | None:
    """The `pair` of the values, None where one of them is not known: a mean over some repeats is not comparable."""
    known = [float(v) for v in values if v is not None]
    return pair(known) if known and len(known) == len(values) else None


def band(spread: Pair, low: float = SCORES[0], high: float = SCORES[1]) -> tuple[float, float]:
    """Mean ± deviation, cut off where no score can be.

    >>> band((99.5, 1.0))
    (98.5, 100.0)
    """
    mean, deviation = spread[0], spread[1] or 0.0
    return max(low, mean - deviation), min(high, mean + deviation)


def _panel(rows: Sequence[Row], key: tuple[str, str, str, str], members: list[int]) -> Panel:
    metric = "miou" if all(rows[i]["reference"].get("miou") is not None for i in members) else "top1"
    by_repeat = {(rows[i].get("repeat"), rows[i].get("seed")): rows[i] for i in reversed(members)}
    references = [r for row in by_repeat.values() if (r := _score(row, "reference", metric)) is not None]
    sizes = {rows[i]["reference"].get("n") for i in members}
    stages = []
    # What an iteration compresses has been retrained in the rounds before.
    once = [i for i in members if rows[i].get("mode") != "iterate"]
    if any(_score(rows[i], "compressed", metric) is not None for i in once):
        stages.append(_stage(rows, once, metric, "compressed", None, "compressed only"))
    shares = {_share(rows[i]) for i in members if _score(rows[i], "retrained", metric) is not None}
    for share in sorted(shares, key=lambda s: -1.0 if s is None else s):
        plain = share is None or (share == 1 and len(shares) == 1)
        title = "retrained" if plain or share is None else f"retrained, {100 * share:.3g} % of epochs"
        stages.append(_stage(rows, members, metric, "retrained", share, title))
    return Panel(*key, metric, pair(references), sizes.pop() if len(sizes) == 1 else None, tuple(stages))


def _stage(rows: Sequence[Row], members: list[int], metric: str, when: str, share: float | None, title: str) -> Stage:
    lines: dict[tuple[str, str, str], dict[Any, dict[Any, int]]] = {}
    for i in members:
        row = rows[i]
        if _score(row, when, metric) is None or (when == "retrained" and _share(row) != share):
            continue
        # A sweep over retraining scores the same compressed network once for each share: it counts once, and a row
        # that was not retrained says it best.
        repeats = lines.setdefault(line_key(row), {}).setdefault(row.get("asked"), {})
        repeat = row.get("repeat"), row.get("seed")
        if repeat not in repeats or row.get("retrained") is None:
            repeats[repeat] = i
    drawn = []
    for key, budgets in lines.items():
        points = [_point(rows, asked, tuple(repeats.values()), when, metric) for asked, repeats in budgets.items()]
        drawn.append(Line(*key, tuple(sorted(points, key=_position))))
    return Stage(title, when, share, tuple(drawn))


def _point(rows: Sequence[Row], asked: float | None, members: tuple[int, ...], when: str, metric: str) -> CurvePoint:
    scores = [float(rows[i][when][metric]) for i in members]
    changes = [c for i in members if (c := change_of(rows[i], when, metric)) is not None]
    cut = {unit: all_or_none([removed(rows[i]) for i in members]) for unit, removed in _REMOVED.items()}
    return CurvePoint(asked, members, cut, pair(scores), pair(changes))


def _position(point: CurvePoint) -> tuple[float, float]:
    """From large networks to small ones."""
    cut = point.cut["params"] or point.cut["macs"] or (0.0, None)
    return cut[0], -(point.asked or 0.0)


def _score(row: Row, when: str, metric: str = "top1") -> float | None:
    body = row.get(when)
    return body.get(metric) if isinstance(body, dict) else None


def _time_removed(row: Row) -> float | None:
    body = row.get("time")
    ratio = body.get("ratio") if isinstance(body, dict) else None
    return 100 * (1 - float(ratio)) if isinstance(ratio, int | float) else None


_REMOVED: dict[str, Callable[[Row], float | None]] = {
    "params": lambda row: row.get("CR-P"),
    "macs": lambda row: row.get("CR-F"),
    "latency": _time_removed,
}


def _share(row: Row) -> float | None:
    body = row.get("retrain")
    return body.get("share") if isinstance(body, dict) else None
