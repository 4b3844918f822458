"""Reports: one HTML file that opens anywhere, without a network."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from rankwise import charts, jsonio
from rankwise.plan import Plan

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1d2733; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid #dde3ea; text-align: right; }
th:first-child, td:first-child { text-align: left; }
tr.best td { background: #e9f3ec; }
h2 { margin-top: 2.2rem; } footer { margin-top: 3rem; color: #5b6875; font-size: 0.85rem; }
"""


def write_report(path: Path, title: str, intro: str, rows: list[dict[str, Any]], plan: Plan, about: str) -> None:
    """Trade-off charts, the table behind them, and the decisions of one plan."""
    figures = [
        ("Compressed, not retrained", charts.trade_off(rows, "params", "compressed")),
        ("Compressed and retrained", charts.trade_off(rows, "params", "retrained")),
        ("The same against multiply-adds", charts.trade_off(rows, "macs", "retrained")),
    ]
    parts = [f"<h1>{escape(title)}</h1><p>{escape(intro)}</p>"]
    for i, (heading, figure) in enumerate(figures):
        parts.append(f"<h2>{escape(heading)}</h2>" + _figure(figure, first=i == 0))
    parts.append("<h2>Every run</h2>" + _rows_table(rows))
    decided = f"Decisions of {plan.method} at keep {plan.keep():.2f}"
    parts.append(f"<h2>{escape(decided)}</h2>" + _figure(charts.layer_sizes(plan)) + _plan_table(plan))
    parts.append(f"<footer>{escape(about)}</footer>")
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><body>{''.join(parts)}</body></html>"
    )
    jsonio.write_whole(path, page.encode())


def _figure(figure: Any, first: bool = False) -> str:
    # The library travels inside the page, once: the report opens without a network.
    return str(figure.to_html(full_html=False, include_plotlyjs=first, config={"displaylogo": False}))


def _table(head: list[str], body: list[list[str]], best: set[int] = frozenset()) -> str:  # type: ignore[assignment]
    cells = "".join(f"<th>{escape(h)}</th>" for h in head)
    lines = (
        f"<tr{' class=best' if i in best else ''}>" + "".join(f"<td>{escape(c)}</td>" for c in line) + "</tr>"
        for i, line in enumerate(body)
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _rows_table(rows: list[dict[str, Any]]) -> str:
    head = ["method", "keep asked", "keep params", "keep macs", "top-1 compressed", "top-1 retrained", "seconds"]
    body = [
        [
            r["method"],
            f"{r['asked']:.2f}",
            f"{r['keep']['params']:.3f}",
            f"{r['keep']['macs']:.3f}",
            f"{r['compressed']['top1']:.2f}",
            f"{r['retrained']['top1']:.2f}",
            f"{r['seconds']['compress']:.2f}",
        ]
        for r in rows
    ]
    best = set()
    for asked in {r["asked"] for r in rows}:
        same = [i for i, r in enumerate(rows) if r["asked"] == asked]
        best.add(max(same, key=lambda i: float(rows[i]["compressed"]["top1"])))
    return _table(head, body, best) + "<p>Shaded: best without retraining at that keep.</p>"


def _plan_table(plan: Plan) -> str:
    head = ["layer", "weight", "fold", "slices", "rank", "energy lost", "params before", "after"]
    body = [
        [
            c.name,
            "×".join(map(str, c.shape)),
            c.fold,
            str(c.groups),
            str(c.rank),
            f"{100 * c.error.get('energy', float('nan')):.2f} %",
            f"{c.before.params:,}",
            f"{c.after.params:,}",
        ]
        for c in plan.choices
    ]
    return _table(head, body)
