"""Charts for reports, as plotly figures."""

from __future__ import annotations

from typing import Any

from rankwise.errors import need
from rankwise.plan import Choice, Plan


def trade_off(rows: list[dict[str, Any]], unit: str, when: str) -> Any:
    """Change in top-1 against what was removed, one line for each method. `when` is compressed or retrained."""
    go = need("plotly.graph_objects", extra="report", purpose="a report")
    figure = go.Figure()
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = sorted((r for r in rows if r["method"] == method), key=lambda r: r["keep"][unit], reverse=True)
        removed = [100 * (1 - r["keep"][unit]) for r in mine]
        change = [r[when]["top1"] - r["reference"]["top1"] for r in mine]
        figure.add_trace(go.Scatter(x=removed, y=change, name=method, mode="lines+markers"))
    name = {"params": "parameters", "macs": "multiply-adds"}[unit]
    figure.update_layout(
        xaxis_title=f"{name} removed (%)",
        yaxis_title="change in top-1 (points)",
        legend_title="method",
        template="plotly_white",
        height=420,
        margin={"t": 20, "r": 20},
    )
    return figure


def layer_sizes(plan: Plan) -> Any:
    """What remains of every layer, with the decision in the tooltip."""
    go = need("plotly.graph_objects", extra="report", purpose="a report")
    names = [entry.name for entry in plan.layers if isinstance(entry, Choice)]
    before = [c.before.params for c in plan.choices]
    after = [c.after.params for c in plan.choices]
    notes = [f"{c.fold}, {c.groups} slices, rank {c.rank}" for c in plan.choices]
    figure = go.Figure()
    figure.add_trace(go.Bar(x=names, y=before, name="before", marker_color="#c9d3df"))
    figure.add_trace(go.Bar(x=names, y=after, name="after", marker_color="#2a6f97", customdata=notes))
    figure.data[1].hovertemplate = "%{y:,} params<br>%{customdata}"
    figure.update_layout(
        barmode="group", yaxis_title="parameters", template="plotly_white", height=380, margin={"t": 20, "r": 20}
    )
    return figure
