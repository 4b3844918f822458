"""Dense against compressed, measured: time, memory and file sizes of a folder that `compress` wrote.

Of a network that writes text also tokens per second (generation.py).

Every combination of threads and engine runs in a process of its own, where both networks are timed in turns; peak
memory is that of a process that only ever had the one network.

    python -m rankwise.deploy.bench < job.json        one such process: a job in, a JSON document out
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankwise.deploy.export import export, open_onnx
from rankwise.deploy.generation import compared, writes_text
from rankwise.errors import RankwiseError
from rankwise.models import networks
from rankwise.models.inputs import example_for
from rankwise.planning.table import Progress
from rankwise.surgery import checkpoint
from rankwise.surgery.forward import Example
from rankwise.surgery.fuse import fuse
from rankwise.surgery.replace import densify
from rankwise.surgery.weights_file import tensor_files
from rankwise.timing.cache import machine
from rankwise.timing.clock import Run, Timing, inputs_for, on_threads, race, ready_to_run

ENGINES = ("eager", "compiled", "onnx")
SIDES = ("dense", "compressed")
SECONDS = 20.0  # for one comparison


@dataclass(frozen=True)
class BenchJob:
    """What to time: a folder, inputs of a shape in batches of several sizes, on so many threads, by several engines."""

    folder: str
    base: str | None = None
    input: str | None = None
    batches: tuple[int, ...] = (1, 32)
    threads: tuple[int, ...] = field(default_factory=lambda: (1, max(1, os.cpu_count() or 1)))
    engines: tuple[str, ...] = ENGINES
    layout: str = "contiguous"
    fuse: bool = False
    repeats: int = 9

    def __post_init__(self) -> None:
        unknown = [e for e in self.engines if e not in ENGINES]
        if unknown:
            raise RankwiseError(f"the engine {unknown[0]!r} is unknown: possible are {', '.join(ENGINES)}")
        for name in ("batches", "threads", "engines"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        for batch in self.batches:
            Timing(batch=batch, layout=self.layout, repeats=self.repeats)
        for threads in self.threads:
            Timing(threads=threads)


def bench(job: BenchJob, progress: Progress | None = None) -> dict[str, Any]:
    """Everything about the two networks that can be measured, as one JSON document."""
    plan = checkpoint.read_plan(job.folder)
    dense, small, _ = _open(job)
    cells = [(threads, engine) for engine in job.engines for threads in job.threads]
    writes = [{"threads": threads, "tokens": True} for threads in job.threads] if writes_text(small) else []
    total = len(cells) + len(writes) + 1
    rows: list[dict[str, Any]] = []
    for done, (threads, engine) in enumerate(cells):
        if progress:
            progress(f"{engine}, {threads} thread(s)", done, total)
        rows += _child(job, {"threads": threads, "engine": engine})
    tokens: list[dict[str, Any]] = []
    for done, part in enumerate(writes, start=len(cells)):
        if progress:
            progress(f"tokens, {part['threads']} thread(s)", done, total)
        tokens += _child(job, part)[:1]
    if progress:
        progress("memory", total - 1, total)
    memory = {
        side: {str(b): _child(job, {"memory": side, "batch": b})[0]["peak"] for b in job.batches} for side in SIDES
    }
    return {
        "folder": job.folder,
        "machine": machine(),
        "layout": job.layout,
        "fuse": job.fuse,
        "times": rows,
        **({"tokens": tokens} if tokens else {}),
        "params": {"dense": plan.before.params, "compressed": sum(p.numel() for p in small.parameters())},
        "macs": {"dense": plan.before.macs, "compressed": plan.after.macs},
        "bytes": {"dense": _bytes(dense), "compressed": sum(f.stat().st_size for f in tensor_files(Path(job.folder)))},
        "memory": memory,
    }


def _open(job: BenchJob) -> tuple[nn.Module, nn.Module, Example]:
    """The dense network, the compressed one, and an example input."""
    small = networks.build(job.folder, base=job.base).eval()
    example = example_for(job.folder, job.input, small)
    if example is None:
        raise RankwiseError(f"the input of {job.folder} is not known: give its shape, such as --input 1,3,224,224")
    return _dense(job), fuse(small, example) if job.fuse else small, example


def _dense(job: BenchJob) -> nn.Module:
    """The network that was compressed; its weights are of no interest here, and random, or those of the pairs."""
    if job.base is None and networks.is_folder_for_transformers(job.folder):
        original = checkpoint.read_plan(job.folder).model
        there = original.startswith("hf:") and os.path.isdir(original.removeprefix("hf:"))
        return (networks.build(original) if there else densify(networks.build(job.folder))).eval()
    return networks.build(job.base or networks.architecture(job.folder)).eval()


def _bytes(model: nn.Module) -> int:
    every = {t.data_ptr(): t for t in model.state_dict().values()}  # tied weights lie in a file once
    return sum(t.numel() * t.element_size() for t in every.values())


def _child(job: BenchJob, part: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a part of the job in a process of its own; where that fails, rows that say why."""
    threads = str(part.get("threads", max(job.threads)))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    text = json.dumps({"job": asdict(job), **part})
    done = subprocess.run(
        [sys.executable, "-m", "rankwise.deploy.bench"], input=text, capture_output=True, text=True, env=environment
    )
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return found
    except (ValueError, IndexError):
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return [{**part, "batch": part.get("batch", b), "error": why, "peak": None} for b in job.batches]


def _work(task: dict[str, Any]) -> list[dict[str, Any]]:
    """The child's side of `_child`."""
    job = BenchJob(**task["job"])
    if "memory" in task:
        return [{"peak": _peak(job, task["memory"], task["batch"])}]
    dense, small, example = _open(job)
    if "tokens" in task:
        with on_threads(task["threads"]):
            return [{"threads": task["threads"], **compared(dense, small, job.repeats)}]
    rows = []
    for batch in job.batches:
        row = {"engine": task["engine"], "threads": task["threads"], "batch": batch}
        try:
            rows.append({**row, **_compare([dense, small], example, job, task["engine"], task["threads"], batch)})
        except Exception as err:
            rows.append({**row, "error": (str(err).splitlines() or [type(err).__name__])[0][:300]})
    return rows


def _compare(
    models: list[nn.Module], example: Example, job: BenchJob, engine: str, threads: int, batch: int
) -> dict[str, Any]:
    timing = Timing(batch, threads, job.layout, engine == "compiled", job.repeats)
    with on_threads(threads), torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        if engine == "onnx":
            runs: list[Run] = []
            for i, model in enumerate(models):
                export(model, example, Path(folder) / f"{i}.onnx", "onnx")
                session = open_onnx(Path(folder) / f"{i}.onnx", threads)
                args, _ = inputs_for(model, example, Timing(batch=batch))
                given = {session.get_inputs()[0].name: args[0].numpy()}
                runs.append(partial(session.run, None, given))
        else:
            runs = [ready_to_run(model, example, timing)[1] for model in models]
        dense, small = race(runs, timing, most=SECONDS)
    ratio = small.median / dense.median
    return {"dense": dense.to_json(), "compressed": small.to_json(), "ratio": ratio}


def _peak(job: BenchJob, side: str, batch: int) -> int:
    """Bytes at the most in a process that opens one network and runs it once."""
    model = _dense(job) if side == "dense" else networks.build(job.folder, base=job.base).eval()
    example = example_for(job.folder, job.input, model)
    with torch.inference_mode():
        args, kwargs = inputs_for(model, example, Timing(batch=batch, layout=job.layout))
        model(*args, **kwargs)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(_work(json.load(sys.stdin))) + "\n")
