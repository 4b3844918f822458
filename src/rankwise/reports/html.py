"""The report of a study: one HTML file that opens anywhere, without a network.

What is shown is computed here and in curves.py; the page (page/*.js) only draws it. Text from rows and plans reaches
the page as JSON and is put there as text, and the page's policy allows no script but its own and no address at all.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rankwise.core import files
from rankwise.errors import RankwiseError
from rankwise.planning.table import Progress
from rankwise.reports import charts, curves, embedded, looks, published
from rankwise.reports.assemble import make_page, plotly_source
from rankwise.reports.pack import columns
from rankwise.surgery.coverage import OTHER_KIND
from rankwise.training import results

SCRIPTS = ("base.js", "table.js", "study.js", "layers.js", "curves.js", "explorer.js", "runs.js")
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
    plotly = plotly_source()
    say = progress or _quietly
    rows = results.read_rows(folder, say)
    if not rows:
        raise RankwiseError(f"{folder} has no result rows: give a folder that `rankwise run` or `rankwise demo` wrote")
    rows = embedded.with_times(folder, rows)
    content = page_content(
        folder, rows, title or f"rankwise: {folder.resolve().name}", published.points() if paper is None else paper, say
    )
    page = make_page(content, "report.html", SCRIPTS, plotly)
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
    panels = curves.panels(rows)
    several = len({panel.study for panel in panels}) > 1
    plans = embedded.plans_of(folder, rows, say)
    spectra, chosen = embedded.spectra_of(folder, rows)
    shown = []
    for panel in panels:
        key = (panel.study, panel.model, panel.data, panel.split)
        body = asdict(panel)
        body["title"] = charts.panel_title(panel, several)
        body["stages"] = [_stage_content(stage, panel.reference[0]) for stage in panel.stages]
        order = {(line["label"], line["unit"], line["mode"]): i for i, line in enumerate(body["stages"][-1]["lines"])}
        body["shelves"] = sorted(
            plans.shelves.get(key, []), key=lambda s: order.get((s["label"], s["unit"], s["mode"]), len(order))
        )
        body["macs"] = plans.macs.get(key, {})
        body["spectra"] = chosen.get(key)
        shown.append(body)
    return {
        "title": title,
        "made": results.provenance(),
        "folder": folder.name or str(folder),
        "rows": {"n": len(rows), "columns": columns(rows)},
        **appearance(_labels(rows)),
        "dashes": {unit: dash for unit, (dash, _) in charts.DASHES.items()},
        "axes": charts.AXES,
        "metrics": charts.METRICS,
        "deltas": curves.DELTAS,
        "panels": shown,
        "book": plans.book,
        "spectra": spectra,
        "paper": paper,
        "caps": {"plans": plans.cap},
    }


def appearance(labels: dict[str, int]) -> dict[str, Any]:
    """What any page needs to draw: the looks of its labels, and others for the folds of a layer."""
    return {
        "labels": [{"label": label, **asdict(looks.look(number))} for label, number in labels.items()],
        "looks": [asdict(looks.look(number)) for number in range(7)],
        "shapes": looks.SHAPES,
        "other": OTHER_KIND,
    }


def _labels(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Every label and the number of its look, in the order of the rows."""
    return looks.look_numbers(curves.line_key(row)[0] for row in rows)


def _stage_content(stage: curves.Stage, reference: float) -> dict[str, Any]:
    """A stage with its δ-tables and bands; the method that removes most comes first."""
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
        for drawn, point in zip(line["points"], stage.lines[i].points, strict=True):
            drawn["band"] = {
                "score": curves.band(point.score),
                "change": curves.band(point.change, -reference, 100 - reference),
            }
    return body
