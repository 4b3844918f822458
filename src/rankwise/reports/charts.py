"""Names of axes and lines, on the page and in static figures, and the static figures themselves.

They are drawn by matplotlib: it needs no browser and no program beside Python, as kaleido does for plotly.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from rankwise.core import files
from rankwise.errors import need
from rankwise.reports.curves import UNITS, Line, Panel, Stage, band
from rankwise.reports.looks import look

DASHES = {"params": ("solid", "-"), "macs": ("dash", "--"), "latency": ("dot", ":")}
AXES = {
    "params": "parameters removed, CR-P (%)",
    "macs": "multiply-adds removed, CR-F (%)",
    "latency": "time removed (%)",
}
METRICS = {"top1": "top-1 accuracy (%)", "miou": "mean IoU (%)"}


def line_names(lines: tuple[Line, ...]) -> list[str]:
    """Labels, with the unit of the budget or the mode where there are several of them."""
    units, modes = {line.unit for line in lines}, {line.mode for line in lines}
    return [
        line.label + (f", {line.unit} budget" if len(units) > 1 else "") + (f", {line.mode}" if len(modes) > 1 else "")
        for line in lines
    ]


def panel_title(panel: Panel, several: bool = False) -> str:
    """`several`: whether the rows come from more than one study."""
    split = "" if panel.split in ("", "test") else f" ({panel.split})"
    return (f"{panel.study}: " if several and panel.study else "") + f"{panel.model} on {panel.data}{split}"


def write_figures(folder: Path, panels: list[Panel], labels: dict[str, int]) -> list[Path]:
    """One PNG for each panel and stage: the score against what was removed, mean ± deviation. Returns the files."""
    pyplot = need("matplotlib.figure", extra="report", purpose="a static figure")
    files.make_folder(folder, "give another --png")
    several = len({panel.study for panel in panels}) > 1
    drawn: dict[Path, bytes] = {}
    for at, panel in enumerate(panels, start=1):
        for stage in panel.stages:
            name = f"{at:02d}-{_slug(f'{panel.model}-{panel.data}')}-{_slug(stage.title)}.png"
            drawn[folder / name] = _draw(pyplot, panel, stage, labels, panel_title(panel, several))
    if drawn:
        files.write_together(drawn)
    return list(drawn)


def _draw(library: Any, panel: Panel, stage: Stage, labels: dict[str, int], title: str) -> bytes:
    figure = library.Figure(figsize=(10, 4.6), dpi=150, layout="constrained")
    figure.suptitle(f"{title}: {stage.title}", fontsize=11, parse_math=False)
    handles: list[Any] = []
    for place, unit in enumerate(UNITS):
        axes = figure.add_subplot(1, 2, place + 1)
        axes.axhline(panel.reference[0], color="#5c6773", linewidth=1, linestyle=(0, (2, 3)))
        drawn = [_draw_line(axes, line, unit, labels[line.label]) for line in stage.lines]
        handles = handles or drawn
        axes.set_xlabel(AXES[unit])
        axes.set_ylabel(METRICS[panel.metric] if not place else "")
        axes.grid(color="#e3e6ea", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    # A space first, because matplotlib hides a label that begins with an underscore.
    names = [f" {name}" for name in line_names(stage.lines)]
    legend = figure.legend(handles, names, loc="outside lower center", ncols=min(5, max(1, len(names))), frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _draw_line(axes: Any, line: Line, unit: str, number: int) -> Any:
    drawn = look(number)
    known = [(cut, p.score) for p in line.points if (cut := p.cut[unit]) is not None]
    x, y = [cut[0] for cut, _ in known], [score[0] for _, score in known]
    if any(score[1] for _, score in known):
        low, high = zip(*(band(score) for _, score in known), strict=True)
        axes.fill_between(x, low, high, color=drawn.light, alpha=0.15, linewidth=0)
    dash = DASHES.get(line.unit, DASHES["params"])[1]
    return axes.plot(x, y, color=drawn.light, marker=drawn.corners, linestyle=dash, linewidth=1.6, markersize=6)[0]


def _slug(text: str) -> str:
    """A short file name that every system takes: the end of the text, which tells more than the beginning of a path."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[-60:].strip("-") or "x"
