"""The command `report`, and the page that `compress` writes beside its network."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankwise.cli import output
from rankwise.errors import RankwiseError

if TYPE_CHECKING:
    from torch import nn

    from rankwise.reports.single import About


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
    with output.progress("report") as progress:
        written = write_report(results, out, title, png=png, progress=progress)
    if as_json:
        output.print_json(written)
        return
    failed = f", {written['failed']} of them failed" if written["failed"] else ""
    terminal = output.console()
    terminal.print(f"{written['rows']:,} rows{failed}, {written['plans']['embedded']:,} plans")
    if png is not None:
        terminal.print(f"{len(written['figures'])} figures in {png}")
    terminal.print(f"done: open {out} in a browser ({written['bytes'] / 1e6:.1f} MB)")


def single_report(found: dict[str, Any], network: nn.Module, about: About) -> tuple[str | None, str]:
    """The page about one compression, in the folder that it wrote, and a sentence about it.

    `found` is what `--json` prints. Without the extra there is no page, and a page that cannot be written undoes
    nothing: both are said.
    """
    from rankwise.reports.single import write_report

    if found.get("out") is None:
        return None, ""
    if find_spec("plotly") is None:
        return None, "no report: pip install 'rankwise[report]' for a page about every layer (--no-report for silence)"
    out = Path(found["out"]) / "report.html"
    try:
        with output.progress("report") as progress:
            write_report(out, found, network, about, progress)
    except RankwiseError as err:
        return None, f"no report: {err}"
    return str(out), f"report: open {out} in a browser"


def typed() -> str | None:
    """The command as it was given, where it was given to this program."""
    return shlex.join(["rankwise", *sys.argv[1:]]) if Path(sys.argv[0]).stem == "rankwise" else None
