"""The command line: what people see, what machines read, and one sentence for what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

import rankwise as rw
from rankwise.__main__ import main
from rankwise.models import networks

SHARED = Path(__file__).resolve().parents[3] / "shared"
FACTORY = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.Flatten(),
                         nn.Linear(16 * 6 * 6, 10))
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one sentence on standard error; nothing on standard output, status 2."""
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("rankwise: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture
def factory(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FACTORY)
    return f"{tmp_path / 'mine.py'}:net"


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys)
    assert status == 0
    assert all(command in out for command in ("inspect", "compress", "evaluate", "demo"))


def test_python_dash_m_works() -> None:
    done = subprocess.run([sys.executable, "-m", "rankwise", "inspect", "nothing"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("rankwise: unknown network 'nothing'")


class TestInspect:
    def test_people_see_every_layer_and_why(self, capsys: pytest.CaptureFixture[str], factory: str) -> None:
        status, out, _ = run(capsys, "inspect", factory, "--input", "1,4,8,8")
        assert status == 0
        assert "16×4×3×3" in out
        assert "depthwise" in out
        assert "6,522 params" in out

    def test_machines_read_the_same_numbers(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, out, _ = run(capsys, "inspect", "resnet20", "--json")
        found = json.loads(out)
        assert status == 0
        assert (found["params"], found["macs"]) == (269_722, 40_551_040)
        assert len(found["layers"]) == 20
        assert sum(la["params"] for la in found["layers"]) + sum(s["params"] for s in found["skipped"]) + 10 == 269_722

    def test_excluded_layers_are_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, out, _ = run(capsys, "inspect", "resnet20", "--exclude", "layer1.*", "--json")
        reasons = {s["name"]: s["reason"] for s in json.loads(out)["skipped"]}
        assert reasons["layer1.0.conv1"] == "excluded by name"

    def test_bad_shape(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "1,3,224,224" in refused(capsys, "inspect", "resnet20", "--input", "1,x,3")
        assert "could not run on an input of 1x5x8x8" in refused(capsys, "inspect", "resnet20", "--input", "1,5,8,8")


class TestCompress:
    def test_writes_reads_back_and_says_done(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        out_folder = tmp_path / "out"
        status, out, _ = run(capsys, "compress", "digits-cnn", "--random-weights", "--keep", 0.4, "--out", out_folder)
        assert status == 0
        assert "gives the same outputs" in out
        plan = rw.Plan.load(out_folder / "plan.json")
        small = networks.build(str(out_folder))
        assert sum(p.numel() for p in small.parameters()) == plan.after.params
        assert plan.keep() <= 0.4
        assert plan.model == "digits-cnn"

    def test_json_holds_plan_and_scores(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        arguments = [
            "compress",
            "digits-cnn",
            "--random-weights",
            "--budget",
            "macs=0.5",
            "--budget",
            "params=0.6",
            "--method",
            "alds+",
        ]
        status, out, _ = run(capsys, *arguments, "--data", "digits", "--out", tmp_path / "o", "--json")
        found = json.loads(out)
        assert status == 0
        assert found["plan"]["budget"] == {"params": 0.6, "macs": 0.5}
        assert found["plan"]["after"]["macs"] <= 0.5 * found["plan"]["before"]["macs"]
        assert found["scores"]["before"]["n"] == found["scores"]["after"]["n"] == 355

    def test_dry_run_writes_nothing(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        status, out, _ = run(
            capsys, "compress", "digits-cnn", "--random-weights", "--keep", 0.5, "--dry-run", "--out", tmp_path / "o"
        )
        assert status == 0
        assert "CR-P" in out
        assert "done" not in out
        assert not (tmp_path / "o").exists()

    def test_a_plan_is_replayed(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        save_file(networks.build("digits-cnn").state_dict(), tmp_path / "w.safetensors")
        common = ["compress", "digits-cnn", "--weights", tmp_path / "w.safetensors"]
        run(capsys, *common, "--keep", 0.5, "--method", "svd-energy", "--out", tmp_path / "a")
        plan = tmp_path / "a" / "plan.json"
        status, _, _ = run(capsys, *common, "--plan", plan, "--out", tmp_path / "b")
        assert status == 0
        assert (tmp_path / "b" / "plan.json").read_text() == plan.read_text()
        assert "--keep" in refused(capsys, *common, "--plan", plan, "--keep", 0.3, "--dry-run")

    @pytest.mark.parametrize("flag", ["--slices", "--groups"])
    def test_settings_reach_the_search(self, capsys: pytest.CaptureFixture[str], flag: str) -> None:
        flags = [
            "--method",
            "alds",
            "--error",
            "max",
            "--search",
            "minimax",
            flag,
            "1,2",
            "--folds",
            "0,3",
            "--seed",
            7,
        ]
        _, out, _ = run(
            capsys, "compress", "digits-cnn", "--random-weights", "--keep", 0.5, *flags, "--dry-run", "--json"
        )
        settings = json.loads(out)["plan"]["settings"]
        assert (settings["error"], settings["search"], settings["seed"]) == ("max", "minimax", 7)
        assert (settings["slices"], settings["folds"]) == ([1, 2], [0, 3])
        assert {c["slices"] for c in json.loads(out)["plan"]["layers"] if "slices" in c} <= {1, 2}

    def test_strict_refuses_gaps(self, capsys: pytest.CaptureFixture[str], factory: str) -> None:
        common = ["compress", factory, "--keep", 0.5, "--input", "1,4,8,8", "--dry-run", "--strict"]
        assert "depthwise" in refused(capsys, *common)
        assert run(capsys, *common, "--exclude", "2")[0] == 0

    def test_without_an_input_params_still_work(
        self, capsys: pytest.CaptureFixture[str], factory: str, tmp_path: Path
    ) -> None:
        status, out, _ = run(capsys, "compress", factory, "--keep", 0.5, "--out", tmp_path / "o")
        assert status == 0
        assert "same weights" in out
        assert "--input" in refused(capsys, "compress", factory, "--budget", "macs=0.5", "--out", tmp_path / "p")

    def test_a_folder_never_runs_code_it_names(
        self, capsys: pytest.CaptureFixture[str], factory: str, tmp_path: Path
    ) -> None:
        run(capsys, "compress", factory, "--keep", 0.5, "--out", tmp_path / "o")
        assert "is not run" in refused(capsys, "inspect", tmp_path / "o")
        assert run(capsys, "inspect", tmp_path / "o", "--base", factory)[0] == 0

    def test_compressing_twice_is_refused(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        run(capsys, "compress", "digits-cnn", "--random-weights", "--keep", 0.5, "--out", tmp_path / "o")
        assert "already compressed" in refused(capsys, "compress", tmp_path / "o", "--keep", 0.5, "--dry-run")

    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (["--keep", "0.4"], "--out DIR"),
            (["--out", "o"], "--keep 0.4"),
            (["--keep", "zero", "--out", "o"], "--keep"),
            (["--keep", "0.0001", "--out", "o"], "least possible"),
            (["--keep", "-1", "--out", "o"], "above 0"),
            (["--keep", "0.5", "--budget", "params=0.4", "--out", "o"], "twice"),
            (["--budget", "seconds=0.4", "--out", "o"], "macs=VALUE"),
            (["--budget", "macs=", "--out", "o"], "macs=VALUE"),
            (["--keep", "0.5", "--method", "best", "--out", "o"], "svd-energy"),
            (["--keep", "0.5", "--error", "l1", "--out", "o"], "energy"),
            (["--keep", "0.5", "--search", "magic", "--out", "o"], "minimax"),
            (["--keep", "0.5", "--slices", "two", "--out", "o"], "1,2,4"),
            (["--keep", "0.5", "--folds", "9", "--out", "o"], "unknown fold"),
            (["--keep", "0.5", "--exclude", "nope", "--out", "o"], "matches no module"),
            (["--keep", "0.5", "--weights", "missing.pth", "--out", "o"], "missing.pth"),
            (["--keep", "0.5", "--data", "mnist", "--out", "o"], "digits"),
            (["--plan", "missing.json", "--out", "o"], "missing.json"),
            (["--nonsense"], "nonsense"),
        ],
    )
    def test_bad_input_is_one_sentence(
        self,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        flags: list[str],
        says: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert says in refused(capsys, "compress", "digits-cnn", "--random-weights", *flags)
        assert not list(tmp_path.iterdir()), "nothing is half-written"


class TestEvaluate:
    def test_a_folder_and_its_original(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        run(capsys, "compress", "digits-cnn", "--random-weights", "--keep", 0.5, "--out", tmp_path / "o")
        status, out, _ = run(capsys, "evaluate", tmp_path / "o", "--data", "digits", "--split", "val", "--json")
        found = json.loads(out)
        assert status == 0
        assert found["n"] == 355
        assert 0 <= found["top1"] <= 100
        status, out, _ = run(capsys, "evaluate", "digits-cnn", "--data", "digits", "--limit", 50)
        assert status == 0
        assert "on 50 images" in out

    def test_data_that_does_not_fit(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "could not run" in refused(capsys, "evaluate", "resnet20", "--data", "digits")
        assert "has no split" in refused(capsys, "evaluate", "digits-cnn", "--data", "digits", "--split", "x")


@pytest.mark.skipif(not SHARED.is_dir(), reason="no pretrained weights beside the repository")
def test_pretrained_resnet20_end_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    weights = SHARED / "weights" / "resnet20-cifar10.safetensors"
    flags = ["--weights", weights, "--keep", 0.85, "--method", "alds", "--error", "max"]
    status, out, _ = run(capsys, "compress", "resnet20", "--random-weights", *flags, "--out", tmp_path / "o", "--json")
    plan = json.loads(out)["plan"]
    assert status == 0
    assert plan["after"]["params"] <= 229_263
    trace = plan["search"]["trace"]
    assert trace == sorted(trace, reverse=True)
    assert {c["slices"] for c in plan["layers"] if "slices" in c} - {1}, "without √k the search uses several slices"
