"""`rankwise run` for real, on digits: rows, shared work, failures, resuming, commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rankwise.__main__ import main
from rankwise.core import workers
from rankwise.planning.plan import Plan
from rankwise.reports.curves import panels
from rankwise.studies import cell as cells
from rankwise.studies import runner
from rankwise.studies.study import Study, fill_in
from rankwise.studies.study_file import make_study
from rankwise.training import results

pytest.importorskip("sklearn")
pytest.importorskip("accelerate")
pytest.importorskip("filelock")

NETWORK = {"model": "digits-cnn", "data": "digits", "limit": 150, "set": {"epochs": 2, "retrain": 0, "warmup": 0}}
QUICK: dict[str, Any] = {"methods": ["alds", "svd"], "keeps": [0.6, 0.4], "network": [NETWORK]}


def make(**changes: Any) -> Study:
    return fill_in(make_study({**QUICK, **changes}, "quick", "quick.toml"), [], [])


def run(study: Study, out: Path, again: bool = False) -> runner.Outcome:
    return runner.run_study(study, out, lambda count: workers.Here(), again=again)


def toml(path: Path, text: str = "") -> Path:
    body = """
        methods = ["alds", "svd"]
        keeps = [0.6, 0.4]
        [[network]]
        model = "digits-cnn"
        data = "digits"
        limit = 150
        set = { epochs = 2, retrain = 0, warmup = 0 }
    """
    path.write_text(text + body)
    return path


def test_rows_are_complete(tmp_path: Path) -> None:
    study = make(repeats=2, retrain=[0, 0.5], keeps=[0.5])
    outcome = run(study, tmp_path)
    assert not outcome.failed
    rows = results.read_rows(tmp_path)
    assert {row["cell"] for row in rows} == {cell.name for cell in study.cells()} == set(outcome.done)
    for row in rows:
        plan = Plan.load(tmp_path / row["plan"])
        assert row["params"] == plan.after.params <= row["asked"] * plan.before.params
        assert row["keep"]["params"] == pytest.approx(1 - row["CR-P"] / 100)
        assert row["keep"]["macs"] == pytest.approx(1 - row["CR-F"] / 100)
        assert ("retrained" in row) == (row["retrain"]["share"] > 0)
        assert row["retrain"]["epochs"] == (1 if row["retrain"]["share"] else 0)
        assert {"top1", "top5", "loss", "n"} <= set(row["reference"]) & set(row["compressed"])
        assert {"rankwise", "torch", "python", "machine", "threads", "commit"} <= set(row["provenance"])
        spectra = json.loads((tmp_path / row["spectra"]).read_text())
        assert spectra["model"] == "digits-cnn"
        for folds in spectra["layers"].values():
            for values in folds.values():
                assert values[0] == 1.0
                assert values == sorted(values, reverse=True)
                assert len(values) <= 256
    # Compressed is the same network whether it is retrained afterwards or not.
    by = {(r["label"], r["asked"], r["repeat"], r["retrain"]["share"]): r["compressed"]["top1"] for r in rows}
    assert all(by[label, k, i, 0.0] == by[label, k, i, 0.5] for label, k, i, _ in by)
    assert {row["reference"]["loss"] for row in rows if row["repeat"] == 0}.isdisjoint(
        row["reference"]["loss"] for row in rows if row["repeat"] == 1
    )
    assert not [p for p in (tmp_path / "work").iterdir() if p.is_dir()]


def test_the_reference_teaches(tmp_path: Path) -> None:
    """The same network before; afterwards one that learned from the reference, also where labels weigh nothing."""
    plain = {"model": "digits-cnn", "data": "digits", "set": {"epochs": 6, "retrain_lr": 1e-3}}
    taught = {**plain, "teacher": True}
    alone = {**taught, "set": {**plain["set"], "labels": 0.0}}
    rows = {}
    for name, network in (("plain", plain), ("taught", taught), ("alone", alone)):
        done = run(make(methods=["svd"], keeps=[0.3], retrain=[0.2], network=[network]), tmp_path).done
        rows[name] = next(row for row in results.read_rows(tmp_path) if row["cell"] in done)
        assert rows[name].get("teacher", False) == (name != "plain")
        assert rows[name]["compressed"] == rows["plain"]["compressed"]
    losses = {name: row["retrained"]["loss"] for name, row in rows.items()}
    assert len(set(losses.values())) == 3
    assert losses["alone"] < rows["alone"]["compressed"]["loss"]


def test_shared_work_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankwise.compression import basis
    from rankwise.studies import reference

    counted = {"train": 0, "table": 0}
    train, table = reference.steps.train, basis.table_for

    def training(*args: Any) -> Any:
        counted["train"] += 1
        return train(*args)

    def tabling(*args: Any) -> Any:
        counted["table"] += 1
        return table(*args)

    monkeypatch.setattr(reference.steps, "train", training)
    monkeypatch.setattr(basis, "table_for", tabling)
    run(make(methods=["alds", {"method": "alds", "error": "max", "label": "max"}, "svd", "pca"]), tmp_path)
    assert counted == {"train": 1, "table": 3}


def test_only_what_is_missing_is_run(tmp_path: Path) -> None:
    study = make()
    run(study, tmp_path)
    rows = {path: path.read_bytes() for path in (tmp_path / "rows").iterdir()}
    gone = sorted(rows)[1]
    gone.unlink()
    outcome = run(study, tmp_path)
    assert outcome.done == [gone.stem]
    assert len(outcome.before) == 3
    assert all(path.read_bytes() == content for path, content in rows.items() if path != gone)
    more = run(make(keeps=[0.6, 0.5, 0.4]), tmp_path)
    assert len(more.before) == 4
    assert len(more.done) == 2


def test_a_failure_is_a_row_and_the_study_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = make(keeps=[0.6, 0.001])
    outcome = run(study, tmp_path)
    assert (len(outcome.done), len(outcome.failed)) == (2, 2)
    failed = [row for row in results.read_rows(tmp_path) if row["status"] == "failed"]
    assert all("the budget cannot be met" in row["error"] for row in failed)
    assert "compressed" not in failed[0]
    again = run(study, tmp_path)
    assert (again.done, len(again.failed)) == ([], 2)  # a failed cell is not missing
    monkeypatch.setattr(cells, "_measured", lambda cell, out: 1 / 0)
    again = run(study, tmp_path, again=True)
    assert len(again.failed) == 2
    assert all("ZeroDivisionError" in r["error"] for r in results.read_rows(tmp_path) if r["status"] == "failed")


def test_a_reference_that_fails_fails_its_cells(tmp_path: Path) -> None:
    network = {**NETWORK, "set": {"epochs": 2, "retrain": 0, "warmup": 0, "lr": 1e30}}
    outcome = run(make(network=[network, NETWORK]), tmp_path)
    assert (len(outcome.done), len(outcome.failed)) == (4, 4)
    assert all("the loss became" in r["error"] for r in results.read_rows(tmp_path) if r["status"] == "failed")


def test_weights_from_a_file_are_not_trained(tmp_path: Path) -> None:
    run(make(), tmp_path / "first")
    weights = next((tmp_path / "first" / "store").glob("*/model.safetensors"))
    study = make_study({**QUICK, "network": [{**NETWORK, "weights": "<digits-cnn>"}]}, "given", "given.toml")
    run(fill_in(study, [], [f"digits-cnn={weights}"]), tmp_path / "second")
    first, second = results.read_rows(tmp_path / "first"), results.read_rows(tmp_path / "second")
    assert [r["compressed"] for r in first] == [r["compressed"] for r in second]
    assert [r["reference"] for r in first] == [r["reference"] for r in second]


def test_rounds(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"mode": "iterate", "methods": [{"method": "alds", "error": "max"}], "retrain": 0.5}
    run(make(**settings, keeps={"alpha": 0.8, "count": 2}), tmp_path)
    outcome = run(make(**settings, keeps={"alpha": 0.8, "count": 3}), tmp_path)
    assert (len(outcome.before), len(outcome.done)) == (2, 1)
    rows = sorted(results.read_rows(tmp_path), key=lambda row: row["round"])
    assert [row["round"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["keep"]["params"] <= 0.8 ** row["round"]
        assert Plan.load(tmp_path / row["plan"]).settings["error"] == "max"
        assert "retrained" in row


@pytest.mark.parametrize(
    "changes",
    [{"retrain": [0, 0.5]}, {"mode": "iterate", "retrain": 0.5, "keeps": {"alpha": 0.8, "count": 1}}],
    ids=["oneshot", "iterate"],
)
def test_networks_are_timed_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Every row then has its time beside the original's, and a report draws it."""
    monkeypatch.setattr(cells, "SECONDS", (0.0, 0.0))
    run(make(**{"methods": ["svd"], "keeps": [0.4], "timing": "batch=3,repeats=2", **changes}), tmp_path)
    rows = results.read_rows(tmp_path)
    assert len(rows) == len(make(**{"methods": ["svd"], "keeps": [0.4], **changes}).cells())
    for row in rows:
        found = row["time"]
        assert found["ratio"] == found["small"] / found["dense"] > 0
        assert (found["batch"], found["layout"]) == (3, "contiguous")
    points = [p for panel in panels(rows) for stage in panel.stages for line in stage.lines for p in line.points]
    assert all(point.cut["latency"] is not None for point in points)


def test_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    study = str(toml(tmp_path / "quick.toml"))
    out = ["--out", str(tmp_path / "results")]
    assert main(["run", study, *out, "--dry-run"]) == 0
    assert "4 cells, 4 missing: 1 networks to start from, 2 epochs" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()
    assert main(["run", study, *out, "--workers", "1", "--only", "svd"]) == 0
    said = capsys.readouterr().out
    assert "2 cells done: " in said
    assert "CR-P" in said
    assert main(["run", study, *out, "--workers", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["done"]), len(found["before"])) == (2, 2)
    assert main(["run", study, *out, "--timing", "batch=many"]) == 2
    assert "is not understood" in capsys.readouterr().err
    assert main(["run", study, *out, "--timing", "batch=2", "--dry-run", "--json"]) == 0
    assert {entry["status"] for entry in json.loads(capsys.readouterr().out)["list"]} == {"missing"}
    assert main(["run", study, *out, "--dry-run", "--json"]) == 0
    assert {entry["status"] for entry in json.loads(capsys.readouterr().out)["list"]} == {"done"}
    for form, sign in (("md", "| keep |"), ("csv", "keep,"), ("latex", r"\begin{tabular}")):
        assert main(["summary", str(tmp_path / "results"), "--to", form, "--delta", "5"]) == 0
        assert sign in capsys.readouterr().out
    assert main(["summary", str(tmp_path / "results"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["head"][0] == "keep"


def test_failures_show_in_the_exit_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = toml(tmp_path / "bad.toml")
    path.write_text(path.read_text().replace("[0.6, 0.4]", "[0.6, 0.001]"))
    command = ["run", str(path), "--out", str(tmp_path / "results"), "--workers", "1"]
    assert main(command) == 1
    assert "2 cells done, 2 failed" in capsys.readouterr().out
    assert main(command) == 1  # still failed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "none.toml"], "could not be read"),
        (["run", "{study}", "--workers", "0"], "give 1 or more"),
        (["run", "{study}", "--data", "imagenet=digits"], "it has digits"),
        (["run", "{asks}"], "--data cifar10=parquet:FOLDER"),
        (["summary", "{folder}"], "holds no row"),
        (["summary", "nowhere"], "is not a folder"),
        (["summary", "{folder}", "--to", "pdf"], "md, csv, latex"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], says: str) -> None:
    toml(tmp_path / "study.toml")
    asks = toml(tmp_path / "asks.toml")
    asks.write_text(asks.read_text().replace('"digits"', '"<cifar10>"'))
    (tmp_path / "empty").mkdir()
    names = {"study": tmp_path / "study.toml", "asks": asks, "folder": tmp_path / "empty"}
    given = [a.format(**names) for a in arguments]
    more = ["--out", str(tmp_path / "results")] if given[0] == "run" else []
    assert main([*given, *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "results").exists()
