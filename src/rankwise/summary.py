"""What the rows of a study say together: curves over repeats, and the most that can be removed for a given loss.

As in the paper, nothing is interpolated: the ratios are those of networks that were measured. In its one-shot tables
the curves are averaged over repeats first, and the largest CR-P whose mean change is at least −δ is taken, with the
CR-F of the same networks. In its retrain sweeps the largest is taken in every repeat, 0 where there is none, and those
are averaged (its 3.33 is the mean of 0, 0 and 10). `average` chooses between the two.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from rankwise.errors import RankwiseError

DELTAS = (0.0, 0.5, 1.0, 2.0, 3.0)
AVERAGES = ("curves", "repeats")
_ROUNDING = 1e-9  # a change of −0.5 computed in floating point is still within 0.5
_ABOUT = ("model", "data", "dataset", "split", "unit", "method", "label")
_NOTHING = {"change": None, "top5": None, "CR-P": None, "CR-F": None, "asked": None, "n": 0}
Row = dict[str, Any]


def metric_of(row: Row) -> str:
    """`miou` for segmentation, else `top1`."""
    return "miou" if row["reference"].get("miou") is not None else "top1"


def final(row: Row) -> dict[str, Any]:
    """The scores at the end: after retraining, where there was one."""
    return dict(row.get("retrained") or row["compressed"])


def change_of(row: Row, metric: str | None = None) -> float | None:
    """Points gained (lost, if negative) against the reference of the same repeat."""
    name = metric or metric_of(row)
    after, before = final(row).get(name), row["reference"].get(name)
    return None if after is None or before is None else float(after) - float(before)


def with_compressed(rows: Iterable[Row]) -> list[Row]:
    """The rows that are done, and for every retrained one what it was before, unless a row of the study says that."""
    done = [row for row in rows if row["status"] == "done"]
    have = {_place(row) for row in done if not row["retrain"]["share"]}
    before = [
        {**{k: v for k, v in row.items() if k != "retrained"}, "retrain": {"share": 0.0, "epochs": 0}}
        for row in done
        if "retrained" in row and row["mode"] != "iterate"
    ]
    unique = {_place(row): row for row in before if _place(row) not in have}
    return done + list(unique.values())


def _place(row: Row) -> tuple[Any, ...]:
    return (row["model"], row["data"], row["label"], row["unit"], row["asked"], row["repeat"])


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
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in with_compressed(rows):
        groups.setdefault(_curve_of(row), []).append(row)
    found = []
    for key, mine in groups.items():
        asked = sorted({row["asked"] for row in mine}, reverse=True)
        points = [_point([row for row in mine if row["asked"] == keep]) for keep in asked]
        about = {**dict(zip(_ABOUT, key, strict=False)), "mode": mine[0]["mode"]}
        share = {"share": key[-1], "epochs": mine[0]["retrain"]["epochs"], "metric": metric_of(mine[0])}
        found.append({**about, **share, "points": points})
    return found


def _curve_of(row: Row) -> tuple[Any, ...]:
    """What tells the curve of a row from others. Rounds of an iteration are no one-shot networks."""
    return (*(row.get(key) for key in _ABOUT), row["mode"] == "iterate", row["retrain"]["share"])


def _point(rows: list[Row]) -> dict[str, Any]:
    metric = metric_of(rows[0])
    retrained = [row["retrained"][metric] for row in rows if "retrained" in row]
    changes = [change_of(row) for row in rows]
    return {
        "asked": rows[0]["asked"],
        "round": rows[0].get("round"),
        "n": len(rows),
        "CR-P": statistics.fmean(row["CR-P"] for row in rows),
        "CR-F": _mean([row["CR-F"] for row in rows]),
        "keep": {unit: _mean([row["keep"][unit] for row in rows]) for unit in ("params", "macs")},
        "reference": spread([row["reference"][metric] for row in rows]),
        "compressed": spread([row["compressed"][metric] for row in rows]),
        "retrained": spread(retrained) if retrained else None,
        "final": spread([final(row)[metric] for row in rows]),
        "change": spread([c for c in changes if c is not None]),
        "top5": spread([c for c in (change_of(row, "top5") for row in rows) if c is not None]),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if len(known) == len(values) and known else None


def spread(values: Sequence[float]) -> dict[str, float | None] | None:
    """
    >>> spread([1.0, 3.0])
    {'mean': 2.0, 'std': 1.4142135623730951}
    """
    if not values:
        return None
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None}


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
    every = with_compressed(rows)
    found = []
    for curve in curves(every):
        key = (*(curve[k] for k in _ABOUT), curve["mode"] == "iterate", curve["share"])
        mine = [row for row in every if _curve_of(row) == key]
        about = {k: curve[k] for k in (*_ABOUT, "mode", "share", "metric") if k != "split"}
        for delta in deltas:
            most = _most_of_curve(curve, delta) if average == "curves" else _most_of_repeats(mine, delta)
            found.append({**about, "delta": float(delta), **most, "repeats": len({row["repeat"] for row in mine})})
    return _mark_best(found)


def _most_of_curve(curve: dict[str, Any], delta: float) -> dict[str, Any]:
    able = [p for p in curve["points"] if p["change"]["mean"] >= -delta - _ROUNDING]
    if not able:
        return dict(_NOTHING)
    best = max(able, key=lambda p: p["CR-P"])
    top5 = None if best["top5"] is None else best["top5"]["mean"]
    kept = {key: best[key] for key in ("CR-P", "CR-F", "asked", "n")}
    return {"change": best["change"]["mean"], "top5": top5, **kept}


def _most_of_repeats(rows: list[Row], delta: float) -> dict[str, Any]:
    repeats = sorted({row["repeat"] for row in rows})
    picked = []
    for repeat in repeats:
        mine = [(change_of(row), row) for row in rows if row["repeat"] == repeat]
        able = [row for change, row in mine if change is not None and change >= -delta - _ROUNDING]
        if able:
            picked.append(max(able, key=lambda r: r["CR-P"]))
    if not picked:
        return dict(_NOTHING)
    all_there = len(picked) == len(repeats)
    flops = [row["CR-F"] for row in picked]
    return {
        # A repeat without such a network has no change that could be averaged.
        "change": _mean([change_of(row) for row in picked]) if all_there else None,
        "top5": _mean([change_of(row, "top5") for row in picked]) if all_there else None,
        "CR-P": sum(row["CR-P"] for row in picked) / len(repeats),
        "CR-F": None if None in flops else sum(flops) / len(repeats),
        "asked": None,
        "n": len(picked),
    }


def _mark_best(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Best of every column: larger is better; equal ones are all best."""
    most: dict[tuple[Any, ...], float] = {}
    for entry in found:
        for key in ("CR-P", "CR-F"):
            if entry[key] is not None:
                most[_column(entry, key)] = max(most.get(_column(entry, key), entry[key]), entry[key])
    return [
        {**entry, "best": [key for key in ("CR-P", "CR-F") if most.get(_column(entry, key), -1.0) == entry[key]]}
        for entry in found
    ]


def _column(entry: dict[str, Any], key: str) -> tuple[Any, ...]:
    return (*(entry[name] for name in ("model", "data", "unit", "share", "delta")), key)
