"""Whether `compress` takes a network block by block, and the job for it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from rankwise.cli import flags, output
from rankwise.compression import BlockCompression, Compression, Request
from rankwise.compression.block_layers import MakeWorkers
from rankwise.core.workers import Pool, Ray
from rankwise.errors import RankwiseError
from rankwise.models.inputs import example_for
from rankwise.models.mapped import is_large, open_mapped
from rankwise.planning.budget import Budget

Opened = tuple[Path | None, str | None, Path | None]  # --weights, --input, and the folder if it is block by block


def wants_blocks(
    model: str, asked: bool | None, request: Request, data: str | None, budget: Budget | None, whole: bool
) -> bool:
    """--blocks, or unless it was said: for large networks, if what is asked for can be done so.

    `whole` is whether something else needs the whole network at once.
    """
    whole = whole or budget is None or budget.timed
    if asked and whole:
        raise RankwiseError(
            "--blocks takes the weights of the folder and a budget in params or macs: leave --weights, --max-drop and "
            "latencies out, or --blocks"
        )
    possible = request.is_free and request.plan is None and data is not None and not request.recovers
    free = possible and not whole and not request.changes.get("never_slower")
    return free and is_large(model) if asked is None else asked


def folder_for(out: Path | None, apart: bool) -> Path | None:
    """What `out.blocks` is named after, if it is block by block; a dry run without --out has a name of its own."""
    return (out or Path(f"dry-run-{os.getpid()}")) if apart else None


def workers_for(workers: int | None, ray: str | None, apart: bool) -> MakeWorkers | None:
    """Where the layers of a block are measured: in this process unless something else was asked for."""
    flags.check_workers(workers)
    if workers is None and ray is None:
        return None
    if not apart:
        raise RankwiseError(
            "--workers and --ray measure the layers of a block, and this network is taken whole: add --blocks, or "
            "leave them out"
        )
    return partial(Pool, workers or 1) if ray is None else partial(Ray, ray, workers)


def job_for(model: str, request: Request, data: str | None, opened: Opened, workers: MakeWorkers | None) -> Compression:
    """The network, opened as the job needs it, and the job."""
    weights, shape, out = opened
    if out is None:
        network = flags.open_model(model, weights, None)
        return Compression(network, example_for(model, shape, network), request, data, output.progress)
    network = open_mapped(model)
    place = out.with_name(f"{out.name}.blocks")
    return BlockCompression(network, example_for(model, shape, network), request, data, output.progress, place, workers)
