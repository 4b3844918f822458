"""The command line on a language model and on a sentence encoder, from folder to folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_commands import run

import rankwise as rw
import tiny_language as tiny
from rankwise.deploy import bench
from rankwise.deploy.generation import writes_text

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("story") / "story.txt"
    path.write_text("\n".join(tiny.SENTENCE + " ".join(tiny.WORDS[i % 20 :]) for i in range(40)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("llama"), tiny.llama())


def test_a_language_model_goes_through_every_command(
    capsys: Capture, folder: Path, story: Path, tmp_path: Path
) -> None:
    given = ["--data", f"text:{story}", "--calibrate", 8, "--input", 16, "--json", "--no-report"]
    status, out, _ = run(capsys, "compress", f"hf:{folder}", "--keep", 0.85, "--out", tmp_path / "out", *given)
    assert status == 0
    done = json.loads(out)
    assert done["plan"]["search"]["inputs"] == "calibration"
    assert done["verified"] == "it gives the same outputs"
    after = done["scores"]["after"]
    assert after["perplexity"] > 1
    status, out, _ = run(
        capsys, "evaluate", tmp_path / "out", "--data", f"text:{story}", "--split", "test", "--size", 16
    )
    assert status == 0
    assert f"perplexity {after['perplexity']:.3f} ± " in out
    status, out, _ = run(capsys, "evaluate", tmp_path / "out", "--data", f"text:{story}", "--json")
    assert json.loads(out)["split"] == "all"
    status, out, _ = run(capsys, "inspect", f"hf:{folder}", "--json")
    assert json.loads(out)["macs"] > 0


def test_tokens_per_second_of_both_networks(folder: Path, tmp_path: Path) -> None:
    network = rw.networks.build(f"hf:{folder}")
    assert writes_text(network)
    small, plan = rw.compress(network, method="svd", keep=0.85, name=f"hf:{folder}")
    rw.save(small, plan, tmp_path)
    job: dict[str, Any] = {"folder": str(tmp_path), "repeats": 3}
    (row,) = bench._work({"job": job, "tokens": True, "threads": 1})
    assert row["prompt"] + row["written"] <= 64
    for part in ("prefill", "decode"):
        assert row["dense"][part] > 0
        assert row["compressed"][part] > 0
        assert row[f"{part}_ratio"] > 0


def test_the_smallest_within_a_share_of_the_perplexity(
    capsys: Capture, folder: Path, story: Path, tmp_path: Path
) -> None:
    given = ["--data", f"text:{story}", "--method", "svd-energy", "--input", 16, "--json", "--no-report"]
    status, out, _ = run(capsys, "compress", f"hf:{folder}", "--max-drop", "2%", "--out", tmp_path / "out", *given)
    assert status == 0
    found = json.loads(out)
    network = rw.networks.build(f"hf:{folder}")
    before, after = (
        rw.evaluate(one, f"text:{story}", "val", size=16).perplexity for one in (network, rw.load(tmp_path / "out"))
    )
    assert after <= 1.02 * before
    assert [t["within"] for t in found["trials"]].count(True) >= 1
    status, _, err = run(capsys, "compress", f"hf:{folder}", "--max-drop", "much", "--dry-run", *given)
    assert status == 2
    assert "a share such as 5%" in err


def test_an_encoder_is_calibrated_on_sentences(capsys: Capture, story: Path, tmp_path: Path) -> None:
    encoder = tiny.folder(tmp_path / "in", tiny.bert(), sentence=True)
    given = ["--data", f"text:{story}", "--calibrate", 16, "--json", "--no-report"]
    status, out, said = run(capsys, "compress", f"hf:{encoder}", "--keep", 0.85, "--out", tmp_path / "out", *given)
    assert status == 0, said
    done = json.loads(out)
    assert done["scores"] is None
    assert done["plan"]["search"]["inputs"] == "calibration"
    status, _, err = run(capsys, "evaluate", tmp_path / "out", "--data", f"text:{story}")
    assert status == 2
    assert "gives no probabilities of tokens" in err
