"""The demo, shortened: its story holds, its rows say where they come from, and its report opens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.cli import demo, show
from rankwise.data import splits
from rankwise.models import networks
from rankwise.training.evaluate import evaluate
from rankwise.training.results import read_rows


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Two methods, three keeps, two networks."""
    patch = pytest.MonkeyPatch()
    patch.setattr(demo, "METHODS", ("auto", "svd"))
    patch.setattr(demo, "KEEPS", (0.6, 0.5, 0.25))
    patch.setattr(demo, "REPEATS", 2)
    patch.setattr(demo, "RETRAIN", 2)
    out = tmp_path_factory.mktemp("demo")
    yield out, demo.run_demo(out)
    patch.undo()


def test_rows_are_files_with_their_provenance(story: tuple[Path, dict[str, Any]]) -> None:
    out, result = story
    rows = read_rows(out)
    assert sorted(r["cell"] for r in rows) == sorted(r["cell"] for r in result["rows"])
    assert len(rows) == 12
    assert all(row["keep"]["params"] <= row["asked"] for row in rows)
    assert all({"torch", "python", "machine", "rankwise"} <= set(row["provenance"]) for row in rows)
    assert all(json.loads((out / row["plan"]).read_text())["after"]["params"] == row["params"] for row in rows)
    assert all((out / row["spectra"]).is_file() for row in rows)


def test_the_story_holds(story: tuple[Path, dict[str, Any]]) -> None:
    """Trained well; retraining brings `auto` back; `auto` beats `svd` without retraining."""
    rows = {(r["method"], r["asked"]): r for r in story[1]["rows"] if not r["repeat"]}
    assert rows["auto", 0.6]["reference"]["top1"] > 95
    assert rows["auto", 0.5]["retrained"]["top1"] > 95
    assert "retrained" not in rows["auto", 0.6]
    assert rows["auto", 0.6]["compressed"]["top1"] > rows["svd", 0.6]["compressed"]["top1"]


def test_spectra_begin_with_one_and_fall(story: tuple[Path, dict[str, Any]]) -> None:
    out, result = story
    body = json.loads((out / result["rows"][0]["spectra"]).read_text())
    weights = networks.build(demo.MODEL).state_dict().items()
    assert set(body["layers"]) == {name.removesuffix(".weight") for name, w in weights if w.dim() > 1}
    for folds in body["layers"].values():
        for values in folds.values():
            assert values[0] == 1
            assert values == sorted(values, reverse=True)


def test_the_compressed_folder_opens(story: tuple[Path, dict[str, Any]]) -> None:
    out, result = story
    shown = next(r for r in result["rows"] if (r["method"], r["asked"], r["repeat"]) == (*demo.SHOWN, 0))
    score = evaluate(networks.build(str(out / "compressed")), splits.load("digits", "test"))
    assert score.top1 == shown["retrained"]["top1"]


def test_threads_are_as_before_and_the_report_is_there(story: tuple[Path, dict[str, Any]]) -> None:
    out, result = story
    assert torch.get_num_threads() == 1, "conftest.py says so"
    assert result["report"] == str(out / "report.html")
    assert (out / "report.html").stat().st_size == result["bytes"]


def test_the_terminal_shows_means(story: tuple[Path, dict[str, Any]]) -> None:
    grid = show.rows_grid(story[1]["rows"])
    mean = sum(r["compressed"]["top1"] for r in story[1]["rows"] if (r["method"], r["asked"]) == ("svd", 0.6)) / 2
    column = next(c for c in grid.columns if c.header == "svd")
    first, second, _ = column.cells
    assert first == f"{mean:.2f}"
    assert " → " in second, "retrained, too"
