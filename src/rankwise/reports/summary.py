"""Curves and δ-tables as plain dicts, for tables in text and for your own scripts; what they say is from curves.py.

As in the paper, nothing is interpolated: the ratios are those of networks that were measured. In its one-shot tables
the curves are averaged over repeats first, and the largest CR-P whose mean change is at least −δ is taken, with the
CR-F of the same networks. In its retrain sweeps the largest is taken in every repeat, 0 where there is none, and those
are averaged (its 3.33 is the mean of 0, 0 and 10). `average` chooses between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rankwise.errors import RankwiseError
from rankwise.reports.curves import DELTAS, CurvePoint, Line, Pair, Panel, Row, Stage, all_or_none, change_of, panels
from rankwise.reports.curves import delta_table as largest

AVERAGES = ("curves", "repeats")
_ABOUT = ("model", "data", "dataset", "split", "unit", "method", "label", "mode")
_NOTHING = {"change": None, "top5": None, "CR-P": None, "CR-F": None, "asked": None, "n": 0}


def curves(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One curve for each network, method and share of retraining; failed rows are left out.

    {"model", "data", "dataset", "split", "mode", "unit", "method", "label", "share", "epochs", "metric", "points"},
    where the metric is "top1" or "miou" and a point is
    {"asked": keep, "round": i or None, "n": repeats, "CR-P": mean, "CR-F": mean or None, "keep": {"params", "macs"},
     "reference", "compressed", "retrained" (None without), "final", "change", "top5" (its change, or None)},
    the last six as {"mean": m, "std": s} of the metric.

    Points go from much kept to little. The deviation is that of a sample (n − 1), None for a single repeat. A study
    that only retrains has curves of share 0, too: the same networks before they were retrained.
    """
    every = list(rows)
    return [
        {**_about(every, panel, stage, line), "points": [_point(every, panel, stage, p) for p in line.points]}
        for panel, stage, line in _lines(every)
    ]


def _lines(rows: list[Row]) -> Iterator[tuple[Panel, Stage, Line]]:
    yield from ((panel, stage, line) for panel in panels(rows) for stage in panel.stages for line in stage.lines)


def _about(rows: list[Row], panel: Panel, stage: Stage, line: Line) -> dict[str, Any]:
    """What is said once for a curve. A network that was not retrained has share 0, whatever came of it later."""
    first = rows[line.points[0].rows[0]]
    retrain = first["retrain"] if stage.when == "retrained" else {"share": 0.0, "epochs": 0}
    share = {"share": retrain.get("share"), "epochs": retrain.get("epochs"), "metric": panel.metric}
    return {**{key: first.get(key) for key in _ABOUT}, **share}


def _point(rows: list[Row], panel: Panel, stage: Stage, point: CurvePoint) -> dict[str, Any]:
    mine = [rows[i] for i in point.rows]
    scored = ("reference", "compressed", *(["retrained"] if stage.when == "retrained" else []))
    scores = {when: all_or_none([(row.get(when) or {}).get(panel.metric) for row in mine]) for when in scored}
    return {
        "asked": point.asked,
        "round": mine[0].get("round"),
        "n": len(mine),
        "CR-P": _mean(point.cut["params"]),
        "CR-F": _mean(point.cut["macs"]),
        "keep": {unit: _mean(all_or_none([row["keep"].get(unit) for row in mine])) for unit in ("params", "macs")},
        "reference": _spread(scores["reference"]),
        "compressed": _spread(scores["compressed"]),
        "retrained": _spread(scores.get("retrained")),
        "final": _spread(point.score),
        "change": _spread(point.change),
        "top5": _spread(_top5(mine, stage)),
    }


def _top5(rows: list[Row], stage: Stage) -> Pair | None:
    return all_or_none([change_of(row, stage.when, "top5") for row in rows])


def _spread(found: Pair | None) -> dict[str, float | None] | None:
    return None if found is None else {"mean": found[0], "std": found[1]}


def _mean(found: Pair | None) -> float | None:
    return None if found is None else found[0]


def delta_table(rows: Iterable[Row], deltas: Sequence[float] = DELTAS, average: str = "curves") -> list[dict[str, Any]]:
    """For every curve and every δ the most that can be removed at a change of at least −δ points.

    {"model", "data", "dataset", "mode", "unit", "method", "label", "share", "metric", "delta",
     "change": mean or None, "top5": mean or None, "CR-P": percent or None, "CR-F": percent or None,
     "asked": keep or None, "n": repeats that have such a network, "repeats": in all,
     "best": those of "CR-P" and "CR-F" that are best in their column}

    A column is one network, data set, unit, share and δ. None where no measured network is good enough. How repeats are
    averaged: see the top of this file.
    """
    if average not in AVERAGES:
        raise RankwiseError(f"average={average!r} was given: possible are {', '.join(AVERAGES)}")
    every = list(rows)
    parts = [every]
    if average == "repeats":
        parts = [[row for row in every if row.get("repeat") == one] for one in {row.get("repeat"): 0 for row in every}]
    groups: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for part in parts:
        for key, entry in _entries(part, deltas):
            groups.setdefault(key, []).append(entry)
    return _mark_best([_joined(group) if average == "repeats" else group[0] for group in groups.values()])


def _entries(rows: list[Row], deltas: Sequence[float]) -> Iterator[tuple[tuple[object, ...], dict[str, Any]]]:
    """Entries of the table, by the means over all rows, each with what tells its curve and its δ from others."""
    for panel, stage, line in _lines(rows):
        (picked,) = largest(replace(stage, lines=(line,)), "params", deltas)
        about = {k: v for k, v in _about(rows, panel, stage, line).items() if k not in ("split", "epochs")}
        repeats = len({rows[i].get("repeat") for point in line.points for i in point.rows})
        curve = panel.study, panel.model, panel.data, panel.split, line.label, line.unit, line.mode, stage.title
        for delta, at in zip(deltas, picked, strict=True):
            most = _NOTHING if at is None else _most(rows, stage, line.points[at])
            yield (*curve, delta), {**about, "delta": float(delta), **most, "repeats": repeats}


def _most(rows: list[Row], stage: Stage, point: CurvePoint) -> dict[str, Any]:
    top5 = _mean(_top5([rows[i] for i in point.rows], stage))
    cut = {"CR-P": _mean(point.cut["params"]), "CR-F": _mean(point.cut["macs"])}
    return {"change": point.change[0], "top5": top5, **cut, "asked": point.asked, "n": len(point.rows)}


def _joined(group: list[dict[str, Any]]) -> dict[str, Any]:
    """One entry from those of single repeats: a repeat without such a network counts as 0 and has no change."""
    picked = [entry for entry in group if entry["n"]]
    share = len(picked) / len(group)
    means: dict[str, float | None] = {}
    for key in ("change", "top5", "CR-P", "CR-F"):
        mean = _mean(all_or_none([entry[key] for entry in picked]))
        means[key] = None if mean is None or (share < 1 and key in ("change", "top5")) else share * mean
    return {**group[0], **means, "asked": None, "n": len(picked), "repeats": len(group)}


def _mark_best(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Best of every column: larger is better; equal ones are all best."""
    most: dict[tuple[object, ...], float] = {}
    for entry in found:
        for key in ("CR-P", "CR-F"):
            if entry[key] is not None:
                most[_column(entry, key)] = max(most.get(_column(entry, key), entry[key]), entry[key])
    return [
        {**entry, "best": [key for key in ("CR-P", "CR-F") if most.get(_column(entry, key), -1.0) == entry[key]]}
        for entry in found
    ]


def _column(entry: dict[str, Any], key: str) -> tuple[object, ...]:
    return (*(entry[name] for name in ("model", "data", "unit", "share", "delta")), key)
