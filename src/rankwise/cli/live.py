"""Looking on while a network trains: a bar on a terminal, a line for each epoch elsewhere, TensorBoard if asked."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from rankwise.errors import need
from rankwise.training.recipes import Recipe


def first_process() -> bool:
    """True in the process that speaks, also before anything distributed has begun."""
    return int(os.environ.get("RANK", "0")) == 0


class Live:
    """A `train.Watch` for people. Lines go to `stream`, or to standard output."""

    def __init__(self, recipe: Recipe, board: Path | None = None, stream: TextIO | None = None) -> None:
        self.recipe, self.board = recipe, board
        self.stream = stream or sys.stdout
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        self.writer: Any = None
        self.runs = 0
        self.last = 0
        self.began_at: int | None = None

    def __enter__(self) -> Live:
        if first_process():
            if self.board is not None:
                module = need("torch.utils.tensorboard", extra="train", purpose="writing TensorBoard files")
                self.board.mkdir(parents=True, exist_ok=True)
                self.writer = module.SummaryWriter(str(self.board))
            if self.console.is_terminal:
                columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
                self.bar = Progress(*columns, console=self.console, transient=True)
                self.bar.start()
                self.task = self.bar.add_task("training", total=None)
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.writer is not None:
            self.writer.close()

    def chosen(self, says: str) -> None:
        """How the network is trained, before the first epoch."""
        if self.bar is not None:
            self.bar.console.print(says, highlight=False, markup=False)
        else:
            print(says, file=self.stream, flush=True)

    def step(self, epoch: int, step: int, steps: int, loss: float, top1: float) -> None:
        if self.bar is None:
            return
        if self.began_at is None:
            # A retraining starts late in its recipe: that is no progress, or the time left would be wrong.
            self.began_at = epoch * steps
            self.bar.reset(self.task, completed=self.began_at, total=self.recipe.epochs * steps)
        what = f"epoch {epoch + 1}/{self.recipe.epochs} step {step}/{steps} loss {loss:.4f} top-1 {top1:.2f} %"
        self.bar.update(self.task, description=what, completed=epoch * steps + step, total=self.recipe.epochs * steps)

    def epoch(self, record: dict[str, Any]) -> None:
        if record["epoch"] <= self.last:
            self.runs += 1  # the next round of `iterate` counts its epochs anew
            self.began_at = None
        self.last = record["epoch"]
        stop = record.get("stop")
        scored = "" if stop is None else f", stop split: top-1 {stop['top1']:.2f} %, loss {stop['loss']:.4f}"
        if stop is not None and "miou" in stop:
            scored += f", mean IoU {stop['miou']:.2f} %"
        left = (self.recipe.epochs - record["epoch"]) * record["seconds"]
        line = (
            f"epoch {record['epoch']}/{self.recipe.epochs}: rate {record['lr']:.4g}, loss {record['loss']:.4f}, "
            f"top-1 {record['top1']:.2f} %{scored}, {record['seconds']:.1f} s, about {left:.0f} s left"
        )
        if self.bar is not None:
            self.bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=self.stream, flush=True)
        if self.writer is not None:
            self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        step = self.runs * self.recipe.epochs + record["epoch"]
        for key in ("lr", "loss", "top1", "seconds"):
            self.writer.add_scalar(f"train/{key}", record[key], step)
        for key, value in (record.get("stop") or {}).items():
            if key != "n" and value is not None:
                self.writer.add_scalar(f"stop/{key}", value, step)
        self.writer.flush()
