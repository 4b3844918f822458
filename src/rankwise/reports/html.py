"""Reports: one HTML file that opens anywhere, without a network.

What is shown is computed here and in curves.py; the page (page/*.js) only draws it. Text from rows and plans reaches
the page as JSON and is put there as text, and the page's policy allows no script but its own and no address at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, replace
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from rankwise.core import files
from rankwise.errors import RankwiseError, need
from rankwise.planning.plan import Plan
from rankwise.planning.table import Progress
from rankwise.reports import charts, curves, published
from rankwise.reports.pack import Book, columns, evenly, script_json
from rankwise.surgery.coverage import OTHER_KIND
from rankwise.training import results

MOST_PLANS = 40  # of one line of one panel
PLAN_BYTES = 4_000_000  # of all plans together; above it, fewer of each line
SPECTRA_BYTES = 2_000_000
SPECTRUM_POINTS = 160
SCRIPTS = ("base.js", "table.js", "curves.js", "explorer.js", "runs.js")
PAPER_KEYS = ("network", "data", "method", "delta_top1", "CR-P", "CR-F", "table", "share")


def write_report(
    folder: Path,
    out: Path,
    title: str = "",
    paper: list[dict[str, Any]] | None = None,
    png: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """RESULTS folder → one HTML file, and PNG figures if asked. Returns what was written and how much it shows.

    `paper` are points to draw beside ours: those of the paper unless others are given.
    """
    plotly = need("plotly.offline", extra="report", purpose="a report")
    say = progress or _quietly
    rows = results.read_rows(folder, say)
    if not rows:
        raise RankwiseError(f"{folder} has no result rows: give a folder that `rankwise run` or `rankwise demo` wrote")
    content = page_content(
        folder, rows, title or f"rankwise: {folder.resolve().name}", published.points() if paper is None else paper, say
    )
    page = _page(content, plotly.get_plotlyjs())
    figures = [] if png is None else charts.write_figures(png, curves.panels(rows), _labels(rows))
    files.write_whole(out, page)
    failed = sum(row["status"] == "failed" for row in rows)
    return {
        "report": str(out),
        "bytes": len(page),
        "rows": len(rows),
        "failed": failed,
        "plans": {"embedded": len(content["book"]["plans"]), "at_most": content["caps"]["plans"]},
        "figures": [str(path) for path in figures],
    }


def _quietly(name: str, done: int, total: int) -> None:
    pass


def page_content(
    folder: Path, rows: list[dict[str, Any]], title: str, paper: list[dict[str, Any]], say: Progress = _quietly
) -> dict[str, Any]:
    """Everything that the page shows, as one JSON value."""
    for entry in paper:
        files.strict(entry, PAPER_KEYS, "a published entry")
    panels, labels = curves.panels(rows), _labels(rows)
    several = len({panel.study for panel in panels}) > 1
    book, shelves, cap = _plans(folder, rows, say)
    spectra, chosen = _spectra(folder, rows)
    shown = []
    for panel in panels:
        key = (panel.study, panel.model, panel.data, panel.split)
        body = asdict(panel)
        body["title"] = charts.panel_title(panel, several)
        body["stages"] = [_stage_content(stage) for stage in panel.stages]
        order = {(line["label"], line["unit"], line["mode"]): i for i, line in enumerate(body["stages"][-1]["lines"])}
        body["shelves"] = sorted(
            shelves.get(key, []), key=lambda s: order.get((s["label"], s["unit"], s["mode"]), len(order))
        )
        body["spectra"] = chosen.get(key)
        shown.append(body)
    return {
        "title": title,
        "made": results.provenance(),
        "rows": {"n": len(rows), "columns": columns(rows)},
        "labels": [{"label": label, **asdict(charts.style(number))} for label, number in labels.items()],
        "looks": [asdict(charts.style(number)) for number in range(len(charts.COLOURS))],
        "other": OTHER_KIND,
        "dashes": {unit: dash for unit, (dash, _) in charts.DASHES.items()},
        "axes": charts.AXES,
        "metrics": charts.METRICS,
        "deltas": curves.DELTAS,
        "panels": shown,
        "book": book,
        "spectra": spectra,
        "paper": paper,
        "caps": {"plans": cap},
    }


def _labels(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Every label and its number, which decides how it looks, in the order of the rows."""
    return {label: i for i, label in enumerate(dict.fromkeys(curves.line_key(row)[0] for row in rows))}


def _stage_content(stage: curves.Stage) -> dict[str, Any]:
    """A stage with its δ-tables; the line that removes most comes first."""
    removed = [
        sum((line.points[at].cut["params"] or (0.0, None))[0] for at in cells if at is not None)
        for line, cells in zip(stage.lines, curves.delta_table(stage, "params"), strict=True)
    ]
    order = sorted(range(len(removed)), key=lambda i: -removed[i])
    stage = replace(stage, lines=tuple(stage.lines[i] for i in order))
    body = asdict(stage)
    tables = {unit: curves.delta_table(stage, unit) for unit in curves.UNITS}
    for i, (line, name) in enumerate(zip(body["lines"], charts.line_names(stage.lines), strict=True)):
        line["name"] = name
        line["delta"] = {unit: table[i] for unit, table in tables.items()}
    return body


Key = tuple[str, str, str, str]


def _plans(
    folder: Path, rows: list[dict[str, Any]], say: Progress
) -> tuple[dict[str, Any], dict[Key, list[dict[str, Any]]], int]:
    """A book of plans and, for each panel, shelves: one for each line, with its plans by budget.

    Of several repeats at one budget the first row's plan is taken.
    """
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
    for at, ((panel, (label, unit, mode)), members) in enumerate(ordered.items()):
        say("plans", at, len(ordered))
        kept = [members[i] for i in evenly(len(members), cap)]
        plans = [book.add(_read_plan(folder, rows[i]["plan"])) for i in kept]
        shelf = {"label": label, "unit": unit, "mode": mode, "rows": kept, "plans": plans, "of": len(members)}
        shelves.setdefault(panel, []).append(shelf)
    return book.to_json(), shelves, cap


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
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise RankwiseError(
            f"a row of {folder} names the file {name!r}, which is outside of the folder: correct the row"
        )
    return path


def _spectra(folder: Path, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[Key, int]]:
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
            read.append(_thin(files.parse(files.read(path), str(path)), str(path)))
            size += len(json.dumps(read[-1]))
            numbers[name] = len(read) - 1
        chosen[key] = numbers[name]
    return read, chosen


def _thin(body: dict[str, Any], where: str) -> dict[str, Any]:
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


def _page(content: dict[str, Any], plotly: str) -> bytes:
    """The page with everything inside. Its policy: these scripts by their hash, no other, and nothing from anywhere."""
    style = _asset("report.css")
    scripts = [text.replace("\r", "") for text in (plotly, "\n".join(_asset(name) for name in SCRIPTS))]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
    title = escape(content["title"])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{_asset('report.html')}\n"
        f'<script type="application/json" id="data">{script_json(content)}</script>\n'
        + "".join(f"<script>{s}</script>\n" for s in scripts)
        + "</body>\n</html>\n"
    ).encode()


def _asset(name: str) -> str:
    return resources.files("rankwise.reports").joinpath("page", name).read_text(encoding="utf-8")
