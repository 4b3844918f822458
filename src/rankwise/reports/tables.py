"""The tables of a study, as `rankwise summary` prints them, with the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rankwise.reports import published
from rankwise.reports.curves import DELTAS, Row, panel_key
from rankwise.reports.summary import curves, delta_table
from rankwise.reports.text import Content, Number, Tab

PAPER = "paper"
_NAMES = {"top1": "top-1", "top5": "top-5", "miou": "mean IoU"}
_SWEEP_DELTA = 1.0  # the loss that the paper's retrain sweeps allow


def tables(rows: Iterable[Row], deltas: Sequence[float] = DELTAS, paper: bool = True) -> list[Tab]:
    """For every network: accuracy by keep, the most that can be removed for each δ, sweeps and rounds if there are."""
    every = list(rows)
    failed = [row for row in every if row["status"] == "failed"]
    found: list[Tab] = []
    for panel in dict.fromkeys(panel_key(row) for row in every if row["status"] == "done"):
        mine = [row for row in every if panel_key(row) == panel]
        known = _records(mine[0]) if paper else []
        rounds = [row for row in mine if row["mode"] == "iterate"]
        shots = [row for row in mine if row["mode"] != "iterate"]
        for unit in dict.fromkeys(row["unit"] for row in shots):
            found += _shots([row for row in shots if row["unit"] == unit], deltas, known)
        if any(row["status"] == "done" for row in rounds) and curves(rounds):  # rows without a score have no curve
            found.append(_rounds(rounds, known))
    if failed:
        body = tuple((row["cell"], row["error"]) for row in failed)
        found.append(Tab(f"Failed: {len(failed)} of {len(every)} cells", ("cell", "error"), body))
    return found


def _records(row: Row) -> list[dict[str, Any]]:
    name = row["model"].partition("?")[0].rpartition(":")[2]
    return published.records(name, str(row.get("dataset", row["data"])))


def _shots(rows: list[Row], deltas: Sequence[float], known: list[dict[str, Any]]) -> list[Tab]:
    found = []
    drawn = curves(rows)
    shares = sorted({curve["share"] for curve in drawn})
    for share in shares:
        found.append(_by_keep([curve for curve in drawn if curve["share"] == share]))
        # For r = e there are tables by δ; for other shares the sweeps, with δ = 1 % alone.
        table = "_retrain" if share == 1.0 else "_retrainsweep"
        same = [r for r in known if r.get("share") == share and r["table"].endswith(table)]
        found.append(_by_delta([e for e in delta_table(rows, deltas) if e["share"] == share], same))
    if len(shares) > 1:
        swept = delta_table(rows, (_SWEEP_DELTA,), average="repeats")
        found.append(_by_share(swept, [r for r in known if r["table"].endswith("_retrainsweep")]))
    return found


def _title(curve: dict[str, Any]) -> str:
    data = curve.get("dataset") or curve["data"]
    after = f"retrained for {curve['epochs']} epochs" if curve.get("epochs") else "compressed only"
    if "epochs" not in curve:
        after = f"retrained for {100 * curve['share']:g} % of the epochs" if curve["share"] else "compressed only"
    return f"{curve['model']}, {data}, {after}"


def _by_keep(drawn: list[dict[str, Any]]) -> Tab:
    """Change of the main metric, mean ± deviation, a row for each keep that was asked for; best of a row marked."""
    keeps = sorted({p["asked"] for curve in drawn for p in curve["points"]}, reverse=True)
    at = {(curve["label"], p["asked"]): p["change"] for curve in drawn for p in curve["points"]}
    body = []
    for keep in keeps:
        found = [at.get((curve["label"], keep)) for curve in drawn]
        best = max((f["mean"] for f in found if f), default=None)
        cells: list[Content] = [
            Number(f["mean"], f["std"], signed=True, best=f["mean"] == best) if f else None for f in found
        ]
        body.append((f"{keep:.4g}", *cells))
    first = drawn[0]["points"][0]
    before = f"{first['reference']['mean']:.2f} %"
    most = max(p["n"] for curve in drawn for p in curve["points"])
    note = f"Before: {before}; {most} repeat{'s' if most > 1 else ''}. Best of a row marked."
    metric = _NAMES[drawn[0]["metric"]]
    title = f"{_title(drawn[0])}: change in {metric} (points) by keep of {drawn[0]['unit']}"
    return Tab(title, ("keep", *(curve["label"] for curve in drawn)), tuple(body), (note,))


def _entry_cells(entry: dict[str, Any], change: float | None, best: Sequence[str]) -> list[Content]:
    cells: list[Content] = [None if change is None else Number(change, signed=True)]
    for key in ("CR-P", "CR-F"):
        value = entry.get(key)
        cells.append(None if value is None else Number(value, best=key in best))
    return cells


def _by_delta(entries: list[dict[str, Any]], known: list[dict[str, Any]]) -> Tab:
    """The most that can be removed within a loss of δ: change, CR-P and CR-F for each δ."""
    deltas = sorted({entry["delta"] for entry in entries})
    metric = entries[0]["metric"]
    head = ["method", *(f"{name}, δ = {d:g} %" for d in deltas for name in (_NAMES[metric], "CR-P", "CR-F"))]
    note = "Largest CR-P among the networks that were measured, by the mean over repeats; best of a column marked."
    title = f"{_title(entries[0])}: the most that can be removed for a loss of at most δ"
    return Tab(title, tuple(head), _beside(entries, known, "delta", deltas, metric), (note,))


def _by_share(entries: list[dict[str, Any]], known: list[dict[str, Any]]) -> Tab:
    shares = sorted({entry["share"] for entry in entries})
    metric = entries[0]["metric"]
    head = ["method", *(f"{name}, r = {100 * s:g} % e" for s in shares for name in (_NAMES[metric], "CR-P", "CR-F"))]
    note = "Means over repeats of the largest CR-P of each, 0 where a repeat has none; best of a column marked."
    data = entries[0].get("dataset") or entries[0]["data"]
    title = f"{entries[0]['model']}, {data}: the most that can be removed for a loss of at most {_SWEEP_DELTA:g} %"
    return Tab(title, tuple(head), _beside(entries, known, "share", shares, metric), (note,))


def _beside(
    entries: list[dict[str, Any]], known: list[dict[str, Any]], axis: str, values: list[float], metric: str
) -> tuple[tuple[Content, ...], ...]:
    """A row for each method of ours, followed by the same method's in the paper; then what only the paper has."""
    ours: dict[str, dict[float, dict[str, Any]]] = {}
    theirs: dict[str, dict[float, dict[str, Any]]] = {}
    for entry in entries:
        ours.setdefault(entry["label"], {})[entry[axis]] = entry
    for record in known:
        theirs.setdefault(record["label"], {})[record[axis]] = record
    methods = {label: next(iter(found.values()))["method"] for label, found in ours.items()}
    body: list[tuple[Content, ...]] = []
    left = dict(theirs)
    for label, found in ours.items():
        body.append((label, *_line(found, values, "change", "best")))
        for name in [n for n, t in left.items() if next(iter(t.values()))["method"] == methods[label]]:
            if label == methods[label]:  # a variant with other settings is not what the paper has
                body.append((f"{name} ({PAPER})", *_line(left.pop(name), values, metric, "bold")))
    body += [(f"{name} ({PAPER})", *_line(found, values, metric, "bold")) for name, found in left.items()]
    return tuple(body)


def _line(found: dict[float, dict[str, Any]], values: list[float], change: str, best: str) -> list[Content]:
    cells: list[Content] = []
    for value in values:
        entry = found.get(value, {})
        cells += _entry_cells(entry, entry.get(change), entry.get(best, ()))
    return cells


def _rounds(rows: list[Row], known: list[dict[str, Any]]) -> Tab:
    """Iterative compression: a row for each round, then the paper's benchmarks."""
    body: list[tuple[Content, ...]] = []
    drawn = curves(rows)
    for curve in drawn:
        for p in curve["points"]:
            flops: Content = None if p["CR-F"] is None else Number(p["CR-F"])
            top5: Content = None if p["top5"] is None else Number(p["top5"]["mean"], p["top5"]["std"], signed=True)
            change = Number(p["change"]["mean"], p["change"]["std"], signed=True)
            body.append((f"{curve['label']}, round {p['round']}", change, top5, Number(p["CR-P"]), flops))
    for record in (r for r in known if r["table"].endswith("benchmarks")):
        cells = [_known_cell(record, key) for key in ("top1", "top5", "CR-P", "CR-F")]
        body.append((f"{record['label']} ({PAPER})", *cells))
    head = ("method", f"change in {_NAMES[drawn[0]['metric']]}", "change in top-5", "CR-P", "CR-F")
    data = drawn[0].get("dataset") or drawn[0]["data"]
    return Tab(f"{drawn[0]['model']}, {data}, iterative", head, tuple(body))


def _known_cell(record: dict[str, Any], key: str) -> Content:
    value = record.get(key)
    return None if value is None else Number(value, signed=key.startswith("top"), best=key in record["bold"])
