"""How the command line speaks: tables and sentences for people, one JSON document for machines. It needs no torch."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid

from rankwise.cli.progress import progress as progress
from rankwise.cli.progress import warn as warn
from rankwise.cli.wording import UNSEEN
from rankwise.cli.wording import printable as printable

COLUMNS = 80  # of a file or a pipe: tables fit into it


class Output:
    """Standard output. Tables fit into the terminal; sentences are one line each, so that they can be searched."""

    def print(self, what: object) -> None:
        if isinstance(what, str):
            sys.stdout.write(printable(what) + "\n")
        else:
            Console(width=None if sys.stdout.isatty() else COLUMNS, highlight=False, markup=False).print(what)


def console() -> Output:
    return Output()


def print_json(data: object) -> None:
    """Names of strangers are escaped where a terminal would not show them; for a program it is the same text."""
    for line in json.dumps(data, indent=1, ensure_ascii=False).split("\n"):
        sys.stdout.write(UNSEEN.sub(lambda found: json.dumps(found[0])[1:-1], line) + "\n")


def percent(part: int | None, whole: int | None) -> str:
    return "" if part is None or not whole else f"{100 * part / whole:.1f} %"


def count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


class PlainGrid(Grid):
    """A table whose cells say nothing to the terminal."""

    def add_row(self, *cells: Any, **how: Any) -> None:
        super().add_row(*(printable(cell) if isinstance(cell, str) else cell for cell in cells), **how)


def new_grid(title: str | None = None) -> Grid:
    """Without lines between columns, so that more fits into a terminal."""
    title = None if title is None else printable(title)
    return PlainGrid(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
