"""The command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankwise.cli import show
from rankwise.errors import RankwiseError


def report(
    results: Annotated[
        Path, typer.Argument(metavar="RESULTS", help="A folder that `rankwise run` or `rankwise demo` wrote.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The page to write.")] = Path("report.html"),
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FOLDER", help="Static figures too, one for each network and stage.")
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Title of the page; the folder's name unless given.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """One HTML file that opens without a network: curves, tables, plans to explore.

    It says where every number is from.
    """
    from rankwise.reports.html import write_report

    if out.is_dir():
        raise RankwiseError(f"{out} is a folder: give the file to write, such as {out / 'report.html'}")
    with show.progress("report") as progress:
        written = write_report(results, out, title, png=png, progress=progress)
    if as_json:
        show.print_json(written)
        return
    failed = f", {written['failed']} of them failed" if written["failed"] else ""
    terminal = show.console()
    terminal.print(f"{written['rows']:,} rows{failed}, {written['plans']['embedded']:,} plans")
    if png is not None:
        terminal.print(f"{len(written['figures'])} figures in {png}")
    terminal.print(f"done: open {out} in a browser ({written['bytes'] / 1e6:.1f} MB)")
