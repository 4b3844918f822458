"""`rankwise train`, `retrain` and `iterate` as people and machines use them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankwise.__main__ import main
from rankwise.cli import live
from rankwise.training.recipes import RECIPES

pytest.importorskip("sklearn")
pytest.importorskip("accelerate")

QUICK = ["--set", "epochs=2", "--set", "retrain=1", "--set", "warmup=0", "--limit", "150"]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("rankwise: ")
    assert err.count("\n") == 1
    return err


def test_the_whole_story(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    net, small, again = (tmp_path / name for name in ("net", "small", "again"))
    status, out, _ = run(capsys, "train", "digits-cnn", "--data", "digits", *QUICK, "--out", net)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith("epoch 1/2: rate ")
    assert "stop split: top-1" in lines[1]
    assert lines[-2].startswith("top-1 ")
    assert lines[-1] == f"done: {net}"
    assert run(capsys, "inspect", net)[0] == 0
    assert run(capsys, "compress", net, "--keep", "0.4", "--out", small)[0] == 0
    assert json.loads((small / "plan.json").read_text())["model"] == "digits-cnn"
    status, out, err = run(
        capsys,
        "retrain",
        small,
        "--data",
        "digits",
        "--recipe",
        "fast",
        *QUICK,
        "--out",
        again,
        "--json",
        "--tensorboard",
    )
    row = json.loads(out)
    assert status == 0
    assert err.startswith("recipe fast: ")
    assert "\nepoch 2/2: " in err
    assert row["CR-P"] >= 60
    assert row["CR-F"] > 0
    assert list((again / "tensorboard").glob("events.out.tfevents.*"))
    _, out, _ = run(capsys, "evaluate", again, "--data", "digits", "--json")
    assert json.loads(out)["top1"] == row["retrained"]["top1"]
    status, out, _ = run(
        capsys, "retrain", small, "--data", "digits", "--recipe", "fast", *QUICK, "--out", again, "--resume"
    )
    assert "compressed only" in out  # done already: the row is shown again


def test_iterate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["iterate", "digits-cnn", "--data", "digits", *QUICK, "--rounds", "2", "--out", tmp_path / "i"]
    status, out, _ = run(capsys, *arguments, "--json")
    rows = json.loads(out)
    assert status == 0
    assert [row["kind"] for row in rows] == ["train", "retrain", "retrain"]
    assert rows[2]["keep"]["params"] <= 0.64
    assert "finished training" in refused(capsys, *arguments)


def test_event_files_hold_every_epoch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with live.Live(RECIPES["fast"], tmp_path) as watch:
        for epoch in (1, 2):
            watch.epoch({"epoch": epoch, "lr": 0.1, "loss": epoch / 2, "top1": 50.0, "seconds": 1.0})
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 1.0)]
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "digits-cnn", "--data", "digits", "--recipe", "slow"], "unknown recipe 'slow'"),
        (["train", "digits-cnn", "--data", "digits", "--set", "epoch=3"], "it has epochs"),
        (["train", "digits-cnn", "--data", "nothing"], "unknown data"),
        (["train", "nothing", "--data", "digits"], "unknown network"),
        (["train", "vgg16", "--data", "digits", "--set", "epochs=1", "--set", "retrain=2"], "up to 1"),
        (["train", "vgg16", "--data", "digits", "--limit", "8"], "halves its images"),
        (["train", "torchvision:alexnet", "--data", "digits"], "8×8 images"),
        (["retrain", "nowhere", "--data", "digits"], "not a folder"),
        (["iterate", "digits-cnn", "--data", "digits", "--rounds", "0"], "1 or more"),
        (["iterate", "digits-cnn", "--data", "digits", "--method", "magic", *QUICK], "unknown method"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], says: str) -> None:
    assert says in refused(capsys, *arguments, "--out", tmp_path / "out")


def test_a_folder_is_not_retrained_into_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "give another one" in refused(capsys, "retrain", tmp_path, "--data", "digits", "--out", tmp_path)
