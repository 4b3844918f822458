"""Rows, and what they say together: means, deviations, the most that can be removed, tables in three forms."""

from __future__ import annotations

import csv
import io
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.errors import RankwiseError
from rankwise.reports.summary import curves, delta_table
from rankwise.reports.tables import tables
from rankwise.reports.text import RENDER, Number, Tab
from rankwise.training import results

Row = dict[str, Any]


def row(label: str = "alds", asked: float = 0.5, change: float = -0.3, repeat: int = 0, **more: Any) -> Row:
    before = more.pop("before", 90.0)
    share = more.pop("share", 1.0)
    after = {"n": 100, "top1": before + change, "top5": 99.0 + change, "loss": 1.0}
    found = {
        "format": 1,
        "status": "done",
        "kind": "cell",
        "study": "s",
        "cell": f"{label}-{asked}-{repeat}-{share}",
        "mode": "oneshot",
        "model": "resnet20",
        "data": "parquet:x",
        "dataset": "cifar10",
        "split": "test",
        "method": label,
        "label": label,
        "settings": {},
        "unit": "params",
        "asked": asked,
        "keep": {"params": asked, "macs": asked},
        "CR-P": 100 * (1 - asked),
        "CR-F": 90 * (1 - asked),
        "reference": {"n": 100, "top1": before, "top5": 99.0, "loss": 0.5},
        "compressed": {"n": 100, "top1": 10.0, "top5": 50.0, "loss": 9.0} if share else after,
        "retrain": {"share": share, "epochs": round(10 * share)},
        "repeat": repeat,
        "seed": repeat,
        "seconds": {"all": 1.0},
    }
    return {**found, **({"retrained": after} if share else {}), **more}


CHANGES = st.lists(st.floats(-20, 5), min_size=1, max_size=4)


@given(CHANGES, st.floats(50, 100))
def test_means_and_deviations(changes: list[float], before: float) -> None:
    rows = [row(change=c, repeat=i, before=before + i) for i, c in enumerate(changes)]
    (curve,) = [c for c in curves(rows) if c["share"] == 1.0]
    (point,) = curve["points"]
    assert point["n"] == len(changes)
    assert point["change"]["mean"] == pytest.approx(statistics.fmean(changes), abs=1e-9)
    if len(changes) > 1:
        assert point["change"]["std"] == pytest.approx(statistics.stdev(changes), abs=1e-6)
    else:
        assert point["change"]["std"] is None


@given(st.lists(st.floats(-5, 1), min_size=1, max_size=8), st.floats(0, 4), st.sampled_from(["curves", "repeats"]))
def test_the_most_within_delta(changes: list[float], delta: float, average: str) -> None:
    """Equals the definition: the largest ratio among measured networks that lose at most δ; none if there is none."""
    rows = [row(asked=round(0.9 - 0.1 * i, 1), change=c) for i, c in enumerate(changes)]
    (entry,) = [e for e in delta_table(rows, [delta], average) if e["share"] == 1.0]
    able = [r["CR-P"] for r in rows if r["retrained"]["top1"] - 90.0 >= -delta - 1e-9]
    assert entry["CR-P"] == (max(able) if able else None)
    assert (entry["change"] is None) == (not able)
    if able:
        assert entry["change"] >= -delta - 1e-6
        assert entry["CR-F"] == pytest.approx(0.9 * entry["CR-P"])


def test_sweeps_average_the_ratios_of_repeats() -> None:
    """As the paper: 0 for a repeat without such a network, so that 10, none and none are 3.33."""
    rows = [row(asked=0.9, change=-0.5 if i == 0 else -3.0, repeat=i) for i in range(3)]
    (by_repeat,) = [e for e in delta_table(rows, [1.0], "repeats") if e["share"] == 1.0]
    assert by_repeat["CR-P"] == pytest.approx(10 / 3)
    assert by_repeat["change"] is None
    assert (by_repeat["n"], by_repeat["repeats"]) == (1, 3)
    (by_curve,) = [e for e in delta_table(rows, [1.0]) if e["share"] == 1.0]
    assert by_curve["CR-P"] is None  # the mean change is −2.17
    with pytest.raises(RankwiseError, match="possible are curves, repeats"):
        delta_table(rows, [1.0], "medians")


def test_best_of_a_column() -> None:
    rows = [row("alds", 0.3), row("svd", 0.6), row("ft", 0.3), row("alds", 0.5, share=0.5)]
    best = {(e["label"], e["share"]): e["best"] for e in delta_table(rows, [1.0]) if e["share"]}
    both = ["CR-P", "CR-F"]
    assert best == {("alds", 1.0): both, ("svd", 1.0): [], ("ft", 1.0): both, ("alds", 0.5): both}


def test_networks_before_retraining_are_a_curve_too() -> None:
    drawn = {c["share"]: c for c in curves([row(change=-0.1)])}
    assert drawn[0.0]["points"][0]["change"]["mean"] == -80.0
    assert drawn[0.0]["points"][0]["retrained"] is None
    drawn = {c["share"]: c for c in curves([row(change=-0.1), row(change=-7.0, share=0.0)])}
    assert drawn[0.0]["points"][0]["change"]["mean"] == -7.0  # measured, not derived
    assert drawn[0.0]["points"][0]["n"] == 1


def test_segmentation_is_compared_by_mean_iou() -> None:
    one = row(share=0.0)
    one["reference"]["miou"], one["compressed"]["miou"] = 68.0, 67.0
    (curve,) = curves([one])
    assert curve["metric"] == "miou"
    assert curve["points"][0]["change"]["mean"] == -1.0


def test_the_papers_numbers_stand_beside_ours() -> None:
    found = tables([row("alds"), row("auto", 0.4)], [0.5])
    beside = next(t for t in found if "the most that can be removed" in t.title and "compressed only" not in t.title)
    lines = {line[0]: line[1:] for line in beside.body}
    assert list(lines)[:3] == ["alds", "ALDS (paper)", "auto"]
    assert [cell.value for cell in lines["ALDS (paper)"] if isinstance(cell, Number)] == [-0.47, 74.91, 67.86]
    assert "PFP (paper)" in lines
    bare = next(t for t in found if "the most that can be removed" in t.title and "compressed only" in t.title)
    assert [line[0] for line in bare.body][:2] == ["alds", "ALDS (paper)"]  # the sweep's column for r = 0
    digits = tables([row("alds", dataset="digits", data="digits")], [0.5])
    assert not any("paper" in str(line[0]) for t in digits for line in t.body)
    variant = tables([row("alds-max", method="alds")], [0.5])
    names = [line[0] for line in next(t for t in variant if "retrained for 100 %" in t.title).body]
    assert names.index("ALDS (paper)") == 1  # it stands apart: the paper does not have this variant


def test_rounds_stand_beside_the_benchmarks() -> None:
    rows = [
        row(asked=0.8**i, mode="iterate", round=i, model="torchvision:resnet18", dataset="imagenet") for i in (1, 2)
    ]
    (found,) = tables(rows)
    names = [line[0] for line in found.body]
    assert names[:2] == ["alds, round 1", "alds, round 2"]
    assert "MUSCO (paper)" in names


def test_failures_are_listed() -> None:
    failed = {**row(), "status": "failed", "error": "it | broke & 50 % were_lost", "cell": "x"}
    found = tables([row(), failed])
    assert found[-1].body == (("x", "it | broke & 50 % were_lost"),)
    for render in RENDER.values():
        assert render(found[-1])


def test_forms_say_the_same() -> None:
    table = Tab(
        "δ = 1 %",
        ("method", "Δ", "CR-P"),
        (("a_b", Number(-0.5, 0.25, signed=True), Number(74.91, best=True)), ("c", None, None)),
        ("A note.",),
    )
    markdown = RENDER["md"](table)
    assert "| a_b | −0.50 ± 0.25 | **74.91** |" in markdown
    assert "| c |  |  |" in markdown
    read = list(csv.reader(io.StringIO(RENDER["csv"](table))))
    assert read[1] == ["method", "Δ", "Δ ±", "CR-P"]
    assert read[2] == ["a_b", "-0.5000", "0.2500", "74.9100"]
    assert read[3] == ["c", "", "", ""]
    latex = RENDER["latex"](table)
    assert r"a\_b & $-$0.50$\pm$0.25 & \textbf{74.91} \\" in latex
    assert r"$\delta$ = 1 \%" in latex
    assert latex.count("{") == latex.count("}")


def test_rows_are_read_strictly_and_others_passed_over(tmp_path: Path) -> None:
    place = tmp_path / "rows"
    results.write_row(place / "b.json", row(asked=0.4))
    results.write_row(place / "a.json", row())
    (place / "other.json").write_text(json.dumps({"kind": "train"}))
    (place / "notes.txt").write_text("not JSON")
    (place / "c.json.part").write_text("{")
    assert [r["asked"] for r in results.read_rows(tmp_path)] == [0.5, 0.4]
    assert results.read_rows(place) == results.read_rows(tmp_path)
    results.write_row(place / "0.json", row("svd"))
    assert [r["label"] for r in results.read_rows(tmp_path)] == ["svd", "alds", "alds"]
    for text in ("{", "[]", json.dumps({"networks": 3, "entries": [None]})):  # the order is all that is lost
        (tmp_path / "study.json").write_text(text)
        assert [r["label"] for r in results.read_rows(tmp_path)] == ["svd", "alds", "alds"]
    order = {"networks": [{"model": "resnet20"}], "entries": [{"label": "alds"}, {"label": "svd"}]}
    (tmp_path / "study.json").write_text(json.dumps(order))
    assert [r["label"] for r in results.read_rows(tmp_path)] == ["alds", "alds", "svd"]
    for broken, says in (
        ({**row(), "format": 99}, "upgrade rankwise"),
        ({**row(), "status": "odd"}, "done or failed"),
        ({k: v for k, v in row().items() if k != "keep"}, "has no 'keep'"),
        ({**row(), "asked": "half"}, "must be a number"),
        ({**row(), "plan": 3}, "'plan' of .* must be a string"),
        ({**row(), "compressed": {"top1": "good"}}, "'top1' in 'compressed' of .* must be a number"),
        ({**row(), "status": "failed"}, "has no 'error'"),
    ):
        results.write_row(place / "d.json", broken)
        with pytest.raises(RankwiseError, match=says):
            results.read_rows(tmp_path)
    (place / "d.json").write_text("{")
    with pytest.raises(RankwiseError, match="not readable JSON"):
        results.read_rows(tmp_path)
    with pytest.raises(RankwiseError, match="is not a folder"):
        results.read_rows(tmp_path / "none")


def test_provenance_names_the_commit() -> None:
    """That of our own checkout, or nothing."""
    said = results.provenance()["commit"]
    root = Path(results.__file__).resolve().parents[3]
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    if (root / ".git").exists() and done.returncode == 0:
        assert done.stdout.strip().startswith(said.removesuffix("-dirty"))
    else:
        assert said is None


def test_a_loss_that_diverged_does_not_spoil_a_folder(tmp_path: Path) -> None:
    broken = row()
    broken["compressed"]["loss"] = float("nan")
    broken["history"] = [{"loss": float("inf")}]
    results.write_row(tmp_path / "rows" / "a.json", broken)
    (read,) = results.read_rows(tmp_path)
    assert read["compressed"]["loss"] is None
    assert read["history"] == [{"loss": None}]
