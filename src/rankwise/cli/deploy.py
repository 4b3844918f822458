"""The commands `bench` and `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rankwise.cli import output, words
from rankwise.cli.options import JsonOpt
from rankwise.errors import RankwiseError

FolderArg = Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `rankwise compress` wrote.")]
BaseOpt = Annotated[
    str | None, typer.Option("--base", metavar="MODEL", help="The network to rebuild (needed for file.py:factory).")
]
InputOpt = Annotated[
    str | None,
    typer.Option("--input", metavar="SHAPE", help="Shape of an input, such as 1,3,224,224, or tokens of a text."),
]
FuseOpt = Annotated[bool, typer.Option("--fuse", help="Fold batch norms into the layers before them.")]


def bench_command(
    folder: FolderArg,
    input: InputOpt = None,
    batch: Annotated[str, typer.Option("--batch", metavar="N,…", help="Inputs in a batch.")] = "1,32",
    threads: Annotated[str | None, typer.Option("--threads", metavar="N,…", help="Default: 1 and all.")] = None,
    engines: Annotated[
        str | None,
        typer.Option("--engines", metavar="E,…", help=f"Of {words.ENGINES}; all, or eager for a language model."),
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", help=f"{words.LAYOUTS}. Default: as the plan was timed.")
    ] = None,
    fuse: FuseOpt = False,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Runs that count, at most.")] = 9,
    base: BaseOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Time, memory and file size of a compressed network against the dense one."""
    from rankwise.cli import show
    from rankwise.deploy.bench import BenchJob, bench

    _need_folder(folder)
    given: dict[str, Any] = {} if threads is None else {"threads": _numbers("--threads", threads)}
    job = BenchJob(
        str(folder),
        base,
        input,
        batches=_numbers("--batch", batch),
        engines=tuple(e.strip() for e in (engines or _engines(folder)).split(",")),
        layout=layout or _planned_layout(folder),
        fuse=fuse,
        repeats=repeats,
        **given,
    )
    with output.progress("bench") as report:
        found = bench(job, report)
    if as_json:
        output.print_json(found)
        return
    terminal = output.console()
    terminal.print(show.times_grid(found))
    for sentence in show.not_timed(found):
        terminal.print(sentence)
    if "tokens" in found:
        terminal.print(show.tokens_grid(found))
    terminal.print(show.sizes_grid(found))


def export_command(
    folder: FolderArg,
    to: Annotated[str, typer.Option("--to", help=f"{words.TARGETS}.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Default: a file in DIR.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    input: InputOpt = None,
    fuse: FuseOpt = False,
    merge: Annotated[bool, typer.Option("--merge", help="Multiply out pairs that are slower than one layer.")] = False,
    timing: Annotated[
        str | None, typer.Option("--timing", metavar="T", help="For --merge, such as batch=32,threads=2.")
    ] = None,
    base: BaseOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Write an ONNX file or a torch.export program, and read it back.

    Its outputs are compared with the network's before it says done.
    """
    from rankwise.deploy.export import TARGETS
    from rankwise.deploy.export import export as write
    from rankwise.models import networks
    from rankwise.models.inputs import example_for
    from rankwise.surgery.fuse import fuse as fuse_network
    from rankwise.timing.clock import read_timing
    from rankwise.timing.merge import merge_slow

    if to not in TARGETS:
        raise RankwiseError(f"--to {to} was given: possible are {', '.join(TARGETS)}")
    how = read_timing(timing)
    _need_folder(folder)
    target = out or folder / TARGETS[to]
    if target.is_dir() or (target.exists() and not force):
        what = "is a folder: give a file" if target.is_dir() else "exists: give another --out, or --force"
        raise RankwiseError(f"{target} {what}")
    network = networks.build(str(folder), base=base).eval()
    example = example_for(str(folder), input, network)
    if example is None:
        raise RankwiseError(f"the input of {folder} is not known: give its shape, such as --input 1,3,224,224")
    merged: list[str] = []
    with output.progress("export") as report:
        if merge:
            report("timing pairs", 0, 2)
            network, merged = merge_slow(network, example, how)
        report(to, 1, 2)
        network = fuse_network(network, example) if fuse else network
        found = {**write(network, example, target, to), "merged": merged}
    if as_json:
        output.print_json(found)
        return
    terminal = output.console()
    for name in merged:
        terminal.print(f"multiplied out, one layer is faster: {name}")
    if "why" in found:
        terminal.print(f"the network takes batches of {found['batch']} only ({found['why']})")
    sizes = " and ".join(map(str, found["batches"]))
    terminal.print(
        f"done: {found['path']} ({found['bytes']:,} bytes) was written and read back; for batches of {sizes} its "
        f"outputs differ from PyTorch's by {found['difference']:.1e} at most (relative)"
    )


def _engines(folder: Path) -> str:
    """What is timed unless it is said: language models take minutes to compile."""
    from rankwise.models.networks import is_folder_for_transformers

    return "eager" if is_folder_for_transformers(str(folder)) else words.ENGINES


def _need_folder(folder: Path) -> None:
    from rankwise.surgery.checkpoint import is_compressed

    if not is_compressed(folder):
        raise RankwiseError(f"{folder} is not a compressed network: give a folder that `rankwise compress` wrote")


def _planned_layout(folder: Path) -> str:
    """The memory layout that the plan's budget in time was measured in; what torch does by itself if there is none."""
    from rankwise.planning.times import LAYOUTS
    from rankwise.surgery.checkpoint import read_plan

    latency = read_plan(folder).search.latency
    layout = None if latency is None else latency.timing.get("layout")
    return layout if layout in LAYOUTS else LAYOUTS[0]


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(p.strip().isdigit() and int(p) > 0 for p in parts):
        raise RankwiseError(f"{flag} {text} is not understood: give whole numbers such as 1,32")
    return tuple(int(p) for p in parts)
