"""The scripts in examples/, run as a reader would run them, on little data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(folder: Path, *command: str) -> str:
    """What it prints. One thread, and measured times are nobody's but its own."""
    bin_folder = str(Path(sys.executable).parent)
    more = {"OMP_NUM_THREADS": "1", "RANKWISE_CACHE": str(folder / "cache"), "DEMO": "no"}
    path = os.pathsep.join([bin_folder, os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **more, "PATH": path}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_path_of_a_new_user(tmp_path: Path) -> None:
    for extra in ("sklearn", "plotly", "onnxruntime"):
        pytest.importorskip(extra)
    said = run(tmp_path, "sh", str(EXAMPLES / "new_user.sh"), "work")
    assert "worst class:" in said
    plan = json.loads((tmp_path / "work/small/plan.json").read_text())
    assert plan["after"]["params"] < 0.9 * plan["before"]["params"]
    assert (tmp_path / "work/small/model.onnx").stat().st_size > 0
    assert "Sizes that were tried" in (tmp_path / "work/small/report.html").read_text()
    assert "report: open" in said


def test_compress_with_data(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    said = run(tmp_path, sys.executable, str(EXAMPLES / "compress_with_data.py"), "--epochs", "3", "--out", "small")
    found = {
        name: float(text.split()[0]) for name, _, text in (line.partition(": ") for line in said.splitlines()[-3:])
    }
    assert found["before"] > 90
    assert found["with data"] > found["before"] - 5
    assert "labels, which are not used" in said
    assert (tmp_path / "small/model.safetensors").exists()


def test_language_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    said = run(tmp_path, sys.executable, str(EXAMPLES / "language_model.py"), "--steps", "40").splitlines()[-1]
    before, _, after = said.removeprefix("perplexity ").split(",")[0].partition(" -> ")
    assert float(after) <= float(before) + 0.51
    assert float(said.split(", ")[1].split(" ")[0]) < 95


def test_latency_and_export(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("onnxruntime")
    said = run(tmp_path, sys.executable, str(EXAMPLES / "latency_and_export.py"), "--epochs", "1", "--out", "fast")
    assert float(said.split("largest difference ")[1].split()[0]) < 1e-4
    plan = json.loads((tmp_path / "fast/plan.json").read_text())
    assert plan["search"]["latency"]["rounds"]
    assert plan["fused"]
