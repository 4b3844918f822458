"""Arguments and flags that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelArg = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="resnet20, torchvision:NAME, timm:NAME, hf:FOLDER, file.py:factory, or a folder."
    ),
]
WeightsOpt = Annotated[
    Path | None, typer.Option("--weights", metavar="FILE", help="Weights: .safetensors, or a .pth/.th state dict.")
]
InputOpt = Annotated[
    str | None,
    typer.Option(
        "--input", metavar="SHAPE", help="Shape of an example input, such as 1,3,224,224, or tokens of a text."
    ),
]
ExcludeOpt = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Leave these layers alone; may be repeated.")
]
DataOpt = Annotated[
    str | None,
    typer.Option("--data", metavar="D", help="digits, parquet:FOLDER, imagefolder:FOLDER, text:FILE, jsonl:FILE …"),
]
SplitOpt = Annotated[str, typer.Option("--split", help="Split of the data.")]
BaseOpt = Annotated[
    str | None,
    typer.Option("--base", metavar="MODEL", help="For a folder: the network to rebuild (needed for file.py:factory)."),
]
TimingOpt = Annotated[
    str | None,
    typer.Option("--timing", metavar="T", help="How to time, such as batch=32,threads=2,layout=channels-last."),
]
FuseOpt = Annotated[
    bool | None,
    typer.Option(
        "--fuse/--no-fuse",
        help="Fold batch norms into the layers before them, for inference; on for a budget in latency.",
    ),
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
BlocksOpt = Annotated[
    bool | None,
    typer.Option(
        "--blocks/--no-blocks",
        help="Block by block, on disk: for networks larger than memory; on for a hf:FOLDER above 1 GB.",
    ),
]
WorkersOpt = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", help="Processes on this machine that work at the same time."),
]
RayOpt = Annotated[
    str | None,
    typer.Option("--ray", metavar="auto|ADDRESS", help="Work on Ray: a running cluster, or one on this machine."),
]
