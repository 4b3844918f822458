"""What a report embeds from a RESULTS folder: plans, spectra and times, each within a size that a page can hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankwise.core import files
from rankwise.core.disk import why
from rankwise.errors import RankwiseError
from rankwise.planning.plan import Plan
from rankwise.planning.table import Progress
from rankwise.planning.units import LATENCY
from rankwise.reports import curves
from rankwise.reports.pack import Book, evenly

MOST_PLANS = 40  # of one method of one panel
PLAN_BYTES = 4_000_000  # of all plans together; above it, fewer of each method
SPECTRA_BYTES = 2_000_000
SPECTRUM_POINTS = 160

Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Plans:
    """A book of plans and, for each panel, shelves: one for each method, with its plans by budget, at most `cap`.

    `macs` are those of every layer of a panel's network that any plan tells of: plans of earlier versions do not tell
    of the layers that they leave whole.
    """

    book: dict[str, Any]
    shelves: dict[Key, list[dict[str, Any]]]
    macs: dict[Key, dict[str, int]]
    cap: int


def plans_of(folder: Path, rows: list[dict[str, Any]], say: Progress) -> Plans:
    """The plans of a results folder; of several repeats at one budget the first row's plan is taken."""
    lines: dict[tuple[Key, tuple[str, str, str]], dict[Any, int]] = {}
    for at, row in enumerate(rows):
        if row["status"] == "done" and row.get("plan"):
            budgets = lines.setdefault((curves.panel_key(row), curves.line_key(row)), {})
            budgets.setdefault(row.get("asked"), at)
    ordered = {
        line: sorted(budgets.values(), key=lambda at: (rows[at].get("asked") or 0.0, at))
        for line, budgets in lines.items()
    }
    cap = _cap([(len(at), _packed_size(folder, rows[at[len(at) // 2]]["plan"])) for at in ordered.values()])
    book = Book()
    shelves: dict[Key, list[dict[str, Any]]] = {}
    macs: dict[Key, dict[str, int]] = {}
    for at, ((panel, (label, unit, mode)), members) in enumerate(ordered.items()):
        say("plans", at, len(ordered))
        kept = [members[i] for i in evenly(len(members), cap)]
        bodies = [_read_plan(folder, rows[i]["plan"]) for i in kept]
        for body in bodies:
            macs.setdefault(panel, {}).update(_layer_macs(body))
        plans = [book.add(body) for body in bodies]
        shelf = {"label": label, "unit": unit, "mode": mode, "rows": kept, "plans": plans, "of": len(members)}
        shelves.setdefault(panel, []).append(shelf)
    return Plans(book.to_json(), shelves, macs, cap)


def _layer_macs(plan: dict[str, Any]) -> dict[str, int]:
    found = {entry["name"]: (entry.get("before") or entry).get("macs") for entry in plan["layers"]}
    return {name: macs for name, macs in found.items() if macs is not None}


def with_times(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with `time` from the plan where a method measured time and the row itself does not tell."""
    found = []
    for row in rows:
        timed = row.get("plan") and not row.get("time") and _asks_for_time(row)
        time = Plan.load(_inside(folder, row["plan"])).search.latency if timed else None
        if time is not None:
            ratio = time.keep if time.measured is None else time.measured
            row = {**row, "time": {"ratio": ratio, "measured": time.measured is not None}}
        found.append(row)
    return found


def _asks_for_time(row: dict[str, Any]) -> bool:
    settings = row.get("settings")
    return row.get("unit") in (LATENCY.name,) or bool(isinstance(settings, dict) and settings.get("never_slower"))


def _cap(lines: list[tuple[int, int]]) -> int:
    """How many plans every line may have, for lines of (plans, bytes of one of them): PLAN_BYTES in all, at least 2."""
    fits = (cap for cap in range(MOST_PLANS, 2, -1) if sum(min(cap, n) * size for n, size in lines) <= PLAN_BYTES)
    return next(fits, 2)


def _packed_size(folder: Path, name: str) -> int:
    book = Book()
    book.add(_read_plan(folder, name))
    return sum(map(len, book.plans))


def _read_plan(folder: Path, name: str) -> dict[str, Any]:
    path = _inside(folder, name)
    text = files.read(path)
    Plan.loads(text, str(path))  # refuses what could not be replayed
    body: dict[str, Any] = json.loads(text)
    return body


def _inside(folder: Path, name: str) -> Path:
    """A file that a row names. Nothing outside of the folder is read: a report is made to be given away."""
    try:
        path = (folder / name).resolve()
    except (OSError, ValueError, RuntimeError) as err:  # a name that no file can have, links in a circle
        raise RankwiseError(f"a row of {folder} names the file {name!r:.80} ({why(err)}): correct the row") from None
    if not path.is_relative_to(folder.resolve()):
        raise RankwiseError(
            f"a row of {folder} names the file {name!r}, which is outside of the folder: correct the row"
        )
    return path


def spectra_of(folder: Path, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[Key, int]]:
    """Spectra of the first row of each panel that has any, until SPECTRA_BYTES are used; long ones are thinned."""
    numbers: dict[str, int] = {}
    chosen: dict[Key, int] = {}
    read: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        name, key = row.get("spectra"), curves.panel_key(row)
        if not name or key in chosen or size > SPECTRA_BYTES:
            continue
        if name not in numbers:
            path = _inside(folder, name)
            read.append(thin(files.parse(files.read(path), str(path)), str(path)))
            size += len(json.dumps(read[-1]))
            numbers[name] = len(read) - 1
        chosen[key] = numbers[name]
    return read, chosen


def thin(body: dict[str, Any], where: str) -> dict[str, Any]:
    """{layer: {fold: {"n": values there were, "at": their numbers from 1, "s": σᵢ/σ₁ to four digits}}}"""
    found: dict[str, Any] = {}
    for layer, folds in files.field(body, "layers", dict, where).items():
        found[layer] = {}
        for fold, values in files.typed(folds, dict, f"layer {layer!r} of {where}").items():
            values = files.typed(values, list, f"fold {fold!r} of layer {layer!r} of {where}")
            at = evenly(len(values), SPECTRUM_POINTS)
            numbers = [float(files.typed(values[i], float, f"a value in {where}")) for i in at]
            found[layer][fold] = {
                "n": len(values),
                "at": [i + 1 for i in at],
                "s": [float(f"{v:.4g}") for v in numbers],
            }
    return found
