"""Every table of every command fits 80 columns, with names and numbers whole."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table as Grid
from torch import nn

import rankwise as rw
from made_rows import row
from rankwise.cli import cells, output, show
from rankwise.models import networks
from rankwise.planning.plan import Plan
from rankwise.reports.tables import tables
from rankwise.reports.text import plain
from rankwise.studies.study_file import read_study

LONG = "encoder.layers.11.attention.output.dense"


def drawn(grid: Grid) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=output.COLUMNS, highlight=False, markup=False).print(grid)
    return stream.getvalue().splitlines()


def check(grid: Grid, *whole: str) -> list[str]:
    """It fits, no line of it is cut, and what is asked for stands in one line."""
    lines = drawn(grid)
    assert max(map(len, lines)) <= output.COLUMNS
    assert "…" not in "".join(lines)
    for text in whole:
        assert any(text in line for line in lines), f"{text!r} is cut"
    return lines


def test_layers() -> None:
    """Names fold where they are too long; numbers do not."""
    found = rw.find_layers(nn.Sequential(nn.Linear(3, 4)), torch.zeros(512, 3))
    layers = tuple(replace(layer, name=LONG, channels=30000, filters=40000) for layer in found.layers)
    wide = layers[0]
    said = (f"{wide.params:,}", f"{wide.macs:,}", "40000×30000", "100.0 %")
    lines = check(show.coverage_grid(replace(found, layers=layers, params=layers[0].params), "deep"), *said)
    assert LONG in "".join(line[1:].split(" ")[0] for line in lines)


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)).eval()
    return rw.compress(model, torch.zeros(1, 16, 8, 8), method="tucker2", keep=0.4, name="two")[1]


def test_plans(plan: Plan) -> None:
    check(show.plan_grid(plan, "energy"), "tucker2", "slices", "macs")
    check(show.before_after_grid(plan, {"before": {"top1": 91.73}, "after": {"top1": 9.73}}), "CR-P 6", "-82.00")


def test_filters() -> None:
    pytest.importorskip("torch_pruning")
    model = networks.build("digits-cnn").eval()
    plan = rw.compress(model, torch.zeros(1, 1, 8, 8), method="ft", keep=0.4)[1]
    check(show.plan_grid(plan, "energy"), "filters", "kept", " of ")


def test_rows_of_the_demo() -> None:
    """Five methods, three digits before the point, compressed and retrained."""
    names = ("auto", "alds+", "alds", "svd-energy", "svd")
    rows = [row(name, asked=k, retrained={"top1": 99.99, "n": 9}) for name in names for k in (0.25, 0.15)]
    check(show.rows_grid(rows), *names)


SIDE = {"median": 12.345678, "best": 1.0, "spread": 0.33, "n": 9}
MISSING = "writing ONNX needs the package 'onnx', which is not installed: pip install 'rankwise[export]'"


def bench() -> dict[str, Any]:
    both = {"dense": SIDE, "compressed": SIDE, "ratio": 0.98}
    cells = [(e, t, b) for e in ("eager", "compiled") for t in (1, 128) for b in (1, 1024)]
    missing = [{"engine": "onnx", "threads": t, "batch": 1, "error": MISSING} for t in (1, 128)]
    large = {"dense": 123_456_789_012, "compressed": 23_456_789_012}
    return {
        "layout": "channels-last",
        "fuse": True,
        "machine": "a machine with a very long name, 96 cores, " * 3,
        "times": [*({"engine": e, "threads": t, "batch": b, **both} for e, t, b in cells), *missing],
        **dict.fromkeys(("params", "bytes"), large),
        "macs": {"dense": 1_234_567_890_123, "compressed": None},
        "memory": {side: {1: count, 1024: count} for side, count in large.items()},
    }


def test_times_and_sizes() -> None:
    """An engine that is not there is a sentence, told once, brackets and all."""
    found = bench()
    lines = check(show.times_grid(found), "12345.68 ms", "compiled", "±16 %")
    assert sum("ms" in line for line in lines) == 8
    assert show.not_timed(found) == [f"onnx was not timed: {MISSING}"]
    check(show.sizes_grid(found), "1,234,567,890,123", "peak memory, batch 1024")


@pytest.mark.parametrize("name", ["cifar10-oneshot", "imagenet-iterative", "voc-oneshot", "smoke"])
def test_cells(name: str, tmp_path: Any, request: pytest.FixtureRequest) -> None:
    study = read_study(request.config.rootpath / "studies" / f"{name}.toml")
    lines = check(cells.cells_grid(study.cells(), str(tmp_path)), "missing", "epochs")
    assert len(lines) >= len(study.cells())


def test_summaries() -> None:
    """As text, wide tables go on below; every number of them is there, once."""
    labels = [f"a method with a long label, {i}" for i in range(12)]
    rows = [row(label, asked=k, settings={}) for label in labels for k in (0.8, 0.5, 0.3)]
    rows.append(row("failed", status="failed", error="what was given, what is possible, what to do " * 6))
    found = tables(rows)
    assert len(found) >= 3
    for table in found:
        text = plain(table)
        assert max(map(len, text.splitlines())) <= 80
        numbers = [cell for line in table.body for cell in line if cell is not None and not isinstance(cell, str)]
        printed = re.findall(r"(?<!δ = )(?<![\w.])[+−]?\d+\.\d\d(?!\d)", text)
        assert len(printed) >= len(numbers)


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    grid = output.new_grid("a [title]")
    grid.add_column("[red]")
    grid.add_row("layers[0].x")
    output.console().print(grid)
    said = capsys.readouterr().out
    assert all(text in said for text in ("a [title]", "[red]", "layers[0].x"))
