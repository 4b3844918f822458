"""Tables as values, and as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Number:
    """A mean, with its standard deviation where there are repeats; `signed` for changes."""

    value: float
    std: float | None = None
    signed: bool = False
    best: bool = False


Content = Number | str | None  # None is a field that stays blank


@dataclass(frozen=True)
class Tab:
    title: str
    head: tuple[str, ...]
    body: tuple[tuple[Content, ...], ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        body = [[vars(cell) if isinstance(cell, Number) else cell for cell in row] for row in self.body]
        return {"title": self.title, "head": list(self.head), "body": body, "notes": list(self.notes)}


def _text(cell: Content, minus: str, plus_minus: str) -> str:
    if not isinstance(cell, Number):
        return cell or ""
    said = f"{cell.value:+.2f}" if cell.signed else f"{cell.value:.2f}"
    if cell.std is not None:
        said += f"{plus_minus}{cell.std:.2f}"
    return said.replace("-", minus)


def markdown(table: Tab) -> str:
    """
    >>> print(markdown(Tab("a table", ("method", "CR-P"), (("alds", Number(74.9, best=True)), ("svd", None)))))
    ### a table
    <BLANKLINE>
    | method | CR-P |
    | --- | ---: |
    | alds | **74.90** |
    | svd |  |
    <BLANKLINE>
    """
    lines = [f"### {table.title}", "", f"| {' | '.join(table.head)} |"]
    lines.append(f"| --- |{' ---: |' * (len(table.head) - 1)}")
    for row in table.body:
        cells = [_text(c, "−", " ± ").replace("|", "\\|") for c in row]
        marked = [f"**{t}**" if isinstance(c, Number) and c.best else t for c, t in zip(row, cells, strict=True)]
        lines.append(f"| {' | '.join(marked)} |")
    lines += ["", *(f"{note}\n" for note in table.notes)]
    return "\n".join(lines)


def comma_separated(table: Tab) -> str:
    """The title as a comment, then a column for each number, and one for its deviation where there are any."""
    columns = list(zip(*table.body, strict=True)) if table.body else [() for _ in table.head]
    head: list[str] = []
    wanted: list[list[str]] = []
    for name, cells in zip(table.head, columns, strict=True):
        head.append(name)
        wanted.append([f"{c.value:.4f}" if isinstance(c, Number) else c or "" for c in cells])
        stds = [c.std if isinstance(c, Number) else None for c in cells]
        if any(std is not None for std in stds):
            head.append(f"{name} ±")
            wanted.append(["" if std is None else f"{std:.4f}" for std in stds])
    out = io.StringIO()
    out.write(f"# {table.title}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(zip(*wanted, strict=True))
    return out.getvalue()


_ESCAPES = {"\\": r"\textbackslash{}", "δ": r"$\delta$", "±": r"$\pm$", "−": "$-$", "α": r"$\alpha$", "│": "$|$"}
_ESCAPES |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


def escaped(text: str) -> str:
    """
    >>> escaped("a_b 50 %")
    'a\\\\_b 50 \\\\%'
    """
    return "".join(_ESCAPES.get(sign, sign) for sign in text)


def latex(table: Tab) -> str:
    """A table environment without packages."""
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{escaped(table.title)}}}"]
    lines += [rf"\begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}", r"\hline"]
    lines += [" & ".join(escaped(h) for h in table.head) + r" \\", r"\hline"]
    for row in table.body:
        cells = [_text(c, "$-$", r"$\pm$") if isinstance(c, Number) else escaped(c or "") for c in row]
        both = zip(row, cells, strict=True)
        marked = [rf"\textbf{{{t}}}" if isinstance(c, Number) and c.best else t for c, t in both]
        lines.append(" & ".join(marked) + r" \\")
    lines += [r"\hline", r"\end{tabular}", *(rf"\par {escaped(note)}" for note in table.notes), r"\end{table}", ""]
    return "\n".join(lines)


RENDER: dict[str, Callable[[Tab], str]] = {"md": markdown, "csv": comma_separated, "latex": latex}
