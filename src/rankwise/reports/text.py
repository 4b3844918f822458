"""Tables as values, and as Markdown, CSV, LaTeX, and plain text that fits a terminal."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Sequence
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


COLUMNS = 80  # of a terminal
LONGEST = 28  # characters of the first column in a line


def plain(table: Tab) -> str:
    """At most 80 columns: a wide table goes on below, with its first column again. The best are marked with a star.

    >>> print(plain(Tab("a table", ("method", "CR-P"), (("alds", Number(74.9, best=True)), ("svd", None)))))
    a table
    <BLANKLINE>
    method    CR-P
    --------------
    alds    74.90*
    svd
    <BLANKLINE>
    """
    body = [
        [_text(c, "−", " ± ") + ("*" if isinstance(c, Number) and c.best else "") for c in row] for row in table.body
    ]
    rows = [list(table.head), *body]
    lines = [*textwrap.wrap(table.title, COLUMNS), ""]
    first = min(LONGEST, max(len(row[0]) for row in rows))
    for block in _blocks([max(len(row[i]) for row in rows) for i in range(1, len(table.head))], COLUMNS - first):
        lines += [*_block(rows, first, block), ""]
    return "\n".join([*lines, *(line for note in table.notes for line in [*textwrap.wrap(note, COLUMNS), ""])])


def _blocks(widths: Sequence[int], room: int) -> list[list[tuple[int, int]]]:
    """(column, width) of those that fit beside the first one, block by block; one that never fits is wrapped."""
    blocks: list[list[tuple[int, int]]] = [[]]
    for at, wide in enumerate(widths, start=1):
        wide = min(wide, room - 2)
        if blocks[-1] and sum(w + 2 for _, w in blocks[-1]) + wide + 2 > room:
            blocks.append([])
        blocks[-1].append((at, wide))
    return blocks


def _block(rows: Sequence[Sequence[str]], first: int, block: Sequence[tuple[int, int]]) -> list[str]:
    """These columns of all rows, the first row being the head: numbers to the right, wrapped texts to the left."""
    lines = []
    for number, row in enumerate(rows):
        cells = [textwrap.wrap(row[0], first) or [""], *(textwrap.wrap(row[at], wide) or [""] for at, wide in block)]
        long = [any(len(r[at]) > wide for r in rows) for at, wide in block]
        for i in range(max(map(len, cells))):
            part = [cell[i] if i < len(cell) else "" for cell in cells]
            sides = [
                t.ljust(w) if wraps else t.rjust(w) for t, (_, w), wraps in zip(part[1:], block, long, strict=True)
            ]
            lines.append("  ".join([part[0].ljust(first), *sides]).rstrip())
        if number == 0:
            lines.append("-" * (first + sum(wide + 2 for _, wide in block)))
    return lines


RENDER: dict[str, Callable[[Tab], str]] = {"md": markdown, "csv": comma_separated, "latex": latex, "text": plain}
