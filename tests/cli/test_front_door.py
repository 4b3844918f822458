"""What a new user meets: mistakes are found before the work, nothing is overwritten, random weights are said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_commands import refused, run
from torch import nn

import rankwise as rw
from rankwise.__main__ import main
from rankwise.cli import outcome, progress
from rankwise.cli.app import app
from rankwise.cli.commands import COMMANDS
from rankwise.compression import Compression, Request, basis
from rankwise.models import networks
from sentences import check_sentence

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    torch.manual_seed(1)
    save_file(networks.build("digits-cnn").state_dict(), path)
    return path


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever begins to compute has failed."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(basis, "table_for", never)
    monkeypatch.setattr(basis, "find_inputs", never)


# ---- 1: random weights -----------------------------------------------------------------------------------


def test_random_weights_are_asked_for_where_a_result_is_written(capsys: Capture, tmp_path: Path) -> None:
    given = ["compress", "digits-cnn", "--keep", 0.5, "--method", "svd", "--out", tmp_path / "o"]
    said = refused(capsys, *given)
    assert "are random" in said
    assert "--random-weights" in said
    assert "--weights FILE" in said
    assert not (tmp_path / "o").exists()
    status, out, err = run(capsys, *given, "--random-weights", "--json")
    assert status == 0
    assert "warning: the weights of digits-cnn are random" in err
    assert json.loads(out)["random_weights"] is True


def test_where_nothing_is_written_random_weights_are_said(capsys: Capture, weights: Path) -> None:
    dry = ["compress", "digits-cnn", "--keep", 0.5, "--method", "svd", "--dry-run"]
    score = ["evaluate", "digits-cnn", "--data", "digits", "--limit", 50]
    for given in (dry, score):
        assert "are random" in run(capsys, *given)[2]
        assert "are random" not in run(capsys, *given, "--weights", weights)[2]


def test_advice_fits_the_source_of_the_network(capsys: Capture, tmp_path: Path) -> None:
    flags = ["--keep", 0.5, "--out", tmp_path / "o"]
    assert "?weights=DEFAULT" in refused(capsys, "compress", "torchvision:resnet18", *flags)
    assert "?pretrained" in refused(capsys, "compress", "timm:test_vit", *flags)


def test_a_plan_knows_its_weights(capsys: Capture, tmp_path: Path, weights: Path) -> None:
    common = ["compress", "digits-cnn", "--method", "svd"]
    run(capsys, *common, "--weights", weights, "--keep", 0.5, "--out", tmp_path / "a")
    plan = tmp_path / "a" / "plan.json"
    assert len(rw.Plan.load(plan).weights) == 64
    replay = ["compress", "digits-cnn", "--plan", plan]
    same = run(capsys, *replay, "--weights", weights, "--out", tmp_path / "b")
    assert "other weights" not in same[1]
    _, out, _ = run(capsys, *replay, "--random-weights", "--out", tmp_path / "c")
    assert "warning: the plan was made for other weights" in out


def test_plans_without_a_hash_load(tmp_path: Path) -> None:
    _, plan = rw.compress(networks.build("digits-cnn"), method="svd", keep=0.5)
    body = plan.to_json()
    assert body.pop("weights") == plan.weights
    old = rw.Plan.loads(json.dumps(body))
    assert old.weights == ""
    assert "weights" not in old.to_json()
    assert Compression(networks.build("digits-cnn"), request=Request(plan=old)).plan(None).warnings == ()


def test_the_hash_is_that_of_every_number_and_of_no_counter() -> None:
    from rankwise.surgery.trained import weights_hash

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    first = weights_hash(model)
    model[1].num_batches_tracked += 1
    assert weights_hash(model) == first
    model[1].running_mean[0] += 1
    assert weights_hash(model) != first


def test_odd_tensors_do_not_stop_the_hash() -> None:
    from rankwise.surgery.trained import check_weights, weights_hash

    model = nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16), nn.Linear(4, 4), nn.LazyLinear(3), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    model[3].to("meta")
    model.register_buffer("number", torch.tensor(1.0))
    assert weights_hash(model) == weights_hash(model)
    check_weights(model, rw.find_layers(model))


# ---- 2: before the work ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_work")
def test_nan_weights_are_found_first() -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.Linear(20, 20))
    for at, value in ((0, float("nan")), (1, float("inf")), (2, float("nan"))):
        with torch.no_grad():
            before = model[at].weight.clone()
            model[at].weight.view(-1)[0] = value
        assert f"layer '{at}'" in check_sentence(lambda: rw.compress(model, torch.randn(2, 20), keep=0.5))
        with torch.no_grad():
            model[at].weight.copy_(before)


@pytest.mark.usefixtures("no_work")
def test_a_plan_of_another_model_is_found_first(capsys: Capture, tmp_path: Path, weights: Path) -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    path = tmp_path / "plan.json"
    plan = rw.allocate(rw.build_table(model), rw.Budget(params=0.7), "svd")
    plan.save(path)
    flags = ["--weights", weights, "--plan", path, "--data", "digits", "--out", tmp_path / "o"]
    assert "made for another model" in refused(capsys, "compress", "digits-cnn", *flags)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("out", ["file/below", "file", "\0", "n" * 300], ids=["below a file", "file", "zero", "long"])
def test_a_folder_that_cannot_be_written_is_found_first(
    capsys: Capture, tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    opened: list[Any] = []
    monkeypatch.setattr("rankwise.cli.flags.open_model", lambda *a: opened.append(a))
    before = sorted(tmp_path.iterdir())
    assert "--out" in refused(capsys, "compress", "digits-cnn", "--weights", weights, "--keep", 0.5, "--out", out)
    assert not opened
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.usefixtures("no_work")
def test_percent_is_asked_back(capsys: Capture, tmp_path: Path, weights: Path) -> None:
    model = networks.build("digits-cnn")
    assert "40 % is keep=0.4?" in check_sentence(lambda: rw.compress(model, keep=40))
    small = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    assert "40 % is keep=0.4?" in check_sentence(lambda: rw.compress(small, keep=40))
    assert "50 % is macs=0.5?" in check_sentence(lambda: rw.compress(model, torch.zeros(1, 1, 8, 8), macs=50))
    flags = ["--weights", weights, "--keep", 40, "--out", tmp_path / "o"]
    assert "40 % is keep=0.4?" in refused(capsys, "compress", "digits-cnn", *flags)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--keep", "-1"], "above 0"),
        (["--keep", "0.5", "--method", "best"], "svd-energy"),
        (["--budget", "grams=0.5"], "macs=VALUE"),
        (["--keep", "0.5", "--error", "l1"], "energy"),
        (["--keep", "0.5", "--recover", "soon"], "90s"),
        (["--max-drop", "1", "--data", "digits", "--unit", "grams"], "params"),
        (["--max-drop", "1", "--metric", "nothing.py:mine"], "nothing.py"),
        (["--keep", "0.5", "--metric", "nothing.py:mine"], "--max-drop"),
    ],
)
def test_wrong_flags_are_found_before_the_network_is_opened(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str], says: str
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr("rankwise.cli.flags.open_model", lambda *a: opened.append(a))
    assert says in refused(capsys, "compress", "digits-cnn", "--random-weights", "--out", tmp_path / "o", *flags)
    assert not opened


@pytest.mark.usefixtures("no_work")
def test_a_budget_that_is_too_small_is_found_first(capsys: Capture, tmp_path: Path, weights: Path) -> None:
    flags = ["--weights", weights, "--out", tmp_path / "o"]
    for method in ("auto", "alds+", "tucker2"):
        for budget in (["--keep", 0.001], ["--budget", "macs=0.002"], ["--keep", 0.9, "--budget", "macs=0.001"]):
            said = refused(capsys, "compress", "digits-cnn", *flags, "--method", method, *budget)
            assert "the budget cannot be met" in said
            assert "(keep 0." in said
    pca = ["--method", "pca", "--data", "digits", "--keep", 0.001]
    assert "the least possible is at least" in refused(capsys, "compress", "digits-cnn", *flags, *pca)


@pytest.mark.usefixtures("no_work")
def test_data_that_does_not_fit_is_found_first(capsys: Capture, tmp_path: Path) -> None:
    flags = ["--random-weights", "--keep", 0.5, "--out", tmp_path / "o", "--data", "digits"]
    assert "8×8" in refused(capsys, "compress", "resnet20", *flags)
    assert "split" in refused(capsys, "compress", "digits-cnn", *flags, "--split", "nowhere")


# ---- 4: torchvision, timm and transformers ---------------------------------------------------------------

SCRIPT = """
import sys
import rankwise
assert "torch" not in sys.modules, "torch is imported before it is needed"
import {first}
import torch, torchvision, timm, transformers
from transformers import ViTConfig, ViTForImageClassification
torchvision.models.resnet18()
timm.create_model("test_vit")
config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=32)
print(ViTForImageClassification(config)(torch.zeros(1, 3, 32, 32)).logits.shape, end="")
"""


@pytest.mark.parametrize("first", ["torchvision", "timm", "transformers"])
def test_a_script_imports_what_it_likes_after_us(first: str, tmp_path: Path) -> None:
    for package in ("torchvision", "timm", "transformers"):
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(first=first)], capture_output=True, text=True, cwd=tmp_path, timeout=900
    )
    assert done.stdout == "torch.Size([1, 2])", done.stderr


# ---- 6: interrupts, folders, odd networks ----------------------------------------------------------------


def test_ctrl_c_says_what_became_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n\ndef net():\n    print('here', flush=True)\n    time.sleep(60)\n")
    command = [sys.executable, "-m", "rankwise", "compress", f"{tmp_path / 'slow.py'}:net", "--keep", "0.5"]
    # A shell without job control starts background processes with SIGINT ignored, and they would inherit that.
    restore = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    child = subprocess.Popen(
        [*command, "--out", str(tmp_path / "o")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **restore
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "here\n"
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=900)
    assert child.returncode == 130
    assert err.splitlines()[-1] == "rankwise: interrupted; nothing was written"
    assert not (tmp_path / "o").exists()


def test_a_folder_in_use_is_refused(capsys: Capture, tmp_path: Path, weights: Path) -> None:
    flags = ["compress", "digits-cnn", "--weights", weights, "--method", "svd", "--out", tmp_path / "o"]
    (tmp_path / "o").mkdir()
    assert run(capsys, *flags, "--keep", 0.5)[0] == 0  # an empty folder is no result
    before = (tmp_path / "o" / "plan.json").read_bytes()
    assert "--force" in refused(capsys, *flags, "--keep", 0.4)
    assert (tmp_path / "o" / "plan.json").read_bytes() == before
    assert run(capsys, *flags, "--keep", 0.4, "--force")[0] == 0
    assert (tmp_path / "o" / "plan.json").read_bytes() != before


def test_a_network_is_not_compressed_onto_itself(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    header = {"rankwise": json.dumps({"network": "digits-cnn"})}
    save_file(networks.build("digits-cnn").state_dict(), tmp_path / "net" / "model.safetensors", metadata=header)
    given = ["compress", tmp_path / "net", "--keep", 0.5, "--out", tmp_path / "net", "--force"]
    assert "another folder" in refused(capsys, *given)


@pytest.mark.parametrize("wrap", [False, True])
def test_torch_jit_is_refused_in_a_sentence(wrap: bool) -> None:
    traced = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(1, 8))
    model = nn.Sequential(traced, nn.Linear(8, 8)) if wrap else traced
    for call in (
        lambda: rw.find_layers(model),
        lambda: rw.compress(model, torch.randn(1, 8), keep=0.5),
        lambda: rw.build_table(model),
    ):
        assert "torch.jit" in check_sentence(call)


@pytest.mark.parametrize("command", ["train", "retrain", "iterate"])
def test_no_epochs_are_no_training(capsys: Capture, tmp_path: Path, command: str) -> None:
    flags = [command, tmp_path if command == "retrain" else "digits-cnn", "--data", "digits", "--out", tmp_path / "o"]
    assert "trains nothing" in refused(capsys, *flags, "--set", "epochs=0")
    assert not (tmp_path / "o").exists()


def test_evaluate_takes_the_folder_of_iterate(capsys: Capture, tmp_path: Path) -> None:
    out = tmp_path / "many"
    short = ["--set", "epochs=1", "--set", "retrain=1", "--limit", 200]
    rounds = ["iterate", "digits-cnn", "--data", "digits", "--method", "svd", "--rounds", 2, "--out", out, *short]
    assert run(capsys, *rounds)[0] == 0
    _, text, _ = run(capsys, "evaluate", out, "--data", "digits", "--json")
    _, last, _ = run(capsys, "evaluate", out / "round-2", "--data", "digits", "--json")
    assert json.loads(text)["top1"] == json.loads(last)["top1"]
    assert json.loads(text)["top1"] == json.loads((out / "round-2" / "row.json").read_text())["retrained"]["top1"]


def test_help_names_what_applies(capsys: Capture) -> None:
    _, text, _ = run(capsys, "compress", "--help")
    text = " ".join(text.split())
    assert "effect" in text
    assert "for pfp sampling or minimax" in text


# ---- 7: no Python on the command line --------------------------------------------------------------------


def test_the_command_line_advises_flags(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))\n"
    )
    spec = f"{tmp_path / 'mine.py'}:net"
    assert run(capsys, "compress", spec, "--keep", 0.7, "--method", "svd", "--out", tmp_path / "o")[0] == 0
    for command in (["inspect"], ["export", "--to", "onnx"]):
        said = refused(capsys, command[0], tmp_path / "o", *command[1:])
        assert f"--base {spec}" in said
        assert "build(" not in said
        assert "Python" not in said
    pca = ["compress", "digits-cnn", "--random-weights", "--keep", 0.5, "--method", "pca", "--dry-run"]
    assert refused(capsys, *pca).endswith("give --data\n")
    ft = ["compress", "digits-cnn", "--random-weights", "--budget", "latency=0.5", "--method", "ft", "--dry-run"]
    assert "Python" not in refused(capsys, *ft)


# ---- in the way ------------------------------------------------------------------------------------------


def test_help_and_version_need_no_torch(tmp_path: Path) -> None:
    """Nor numpy: of the program, and of every command. A flag that is not known is refused as quickly."""
    code = """
import sys
from rankwise.__main__ import main
from rankwise.cli.commands import COMMANDS
for given in (["--version"], [], ["--help"], *([name, "--help"] for name in COMMANDS)):
    assert main(given) == 0, given
for name in COMMANDS:
    assert main([name, "--nonsense"]) == 2, name
print("heavy:", [name for name in ("torch", "numpy", "plotly", "torchvision") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"rankwise {rw.__version__}"
    assert done.stdout.splitlines()[-1] == "heavy: []"
    assert all(f"Usage: rankwise {name} [OPTIONS]" in done.stdout for name in COMMANDS)


def test_wrong_usage_says_where_to_look(capsys: Capture) -> None:
    assert f"the commands are {', '.join(COMMANDS)}" in refused(capsys, "shrink", "digits-cnn")
    assert refused(capsys, "compress").endswith("MODEL'; see rankwise compress --help\n")
    assert "--keep" in refused(capsys, "compress", "digits-cnn", "--kep", 0.4)


def test_help_lists_what_the_registries_hold() -> None:
    """words.py is there so that help needs no torch, and is never out of date."""
    from rankwise.cli import words
    from rankwise.cli.flags import budget_help
    from rankwise.core.measures import ALL_MEASURES
    from rankwise.decompositions import DECOMPOSITIONS
    from rankwise.decompositions.clusters import CLUSTERINGS
    from rankwise.deploy.bench import ENGINES
    from rankwise.deploy.export import TARGETS
    from rankwise.planning.planner import SEARCHES
    from rankwise.planning.times import LAYOUTS
    from rankwise.planning.units import UNITS
    from rankwise.pruning.filters import SEARCHES as FILTER_SEARCHES

    held = {
        "METHODS": ", ".join(rw.METHODS),
        "MEASURES": ", ".join(ALL_MEASURES),
        "DECOMPOSITIONS": ", ".join(DECOMPOSITIONS),
        "CLUSTERINGS": ", ".join(CLUSTERINGS),
        "SEARCHES": ", ".join(SEARCHES),
        "FILTER_SEARCHES": " or ".join(FILTER_SEARCHES[1:]),
        "UNITS": ", ".join(UNITS),
        "BUDGET": budget_help(),
        "ENGINES": ", ".join(ENGINES),
        "TARGETS": " or ".join(TARGETS),
        "LAYOUTS": " or ".join(LAYOUTS),
    }
    assert {name: text for name, text in vars(words).items() if name.isupper()} == held


def test_the_table_of_commands_says_what_their_docstrings_say() -> None:
    about = {info.name: (info.callback.__doc__ or "").splitlines()[0] for info in app.registered_commands}
    assert about == {name: text for name, (_, _, text) in COMMANDS.items()}


def test_progress_is_a_line_every_few_seconds_without_a_terminal(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "BEAT", 0.02)

    def seen(text: str) -> bool:
        """Within a minute: on a busy machine the thread that prints may wait."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if any(line.startswith(text) for line in capsys.readouterr().err.splitlines()):
                return True
            time.sleep(0.02)
        return False

    with progress.progress("outer"):
        with progress.progress("inner") as report:
            report("conv1", 3, 20)
            assert seen("inner conv1 3/20, ")
        assert seen("outer, ")


def test_a_study_says_what_it_does_from_the_first_second(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("filelock")
    said: list[str] = []

    def run_study(*_: Any) -> None:
        said.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr("rankwise.studies.runner.run_study", run_study)
    study = Path(__file__).resolve().parents[2] / "studies" / "smoke.toml"
    status, _, err = run(capsys, "run", study, "--out", tmp_path / "o")
    assert "smoke: 120 cells, 120 to run" in said[0]
    assert status == 130
    assert "the same command goes on" in err


def test_tables_fit_80_columns_and_reasons_are_told_once(capsys: Capture) -> None:
    for given in (
        ["inspect", "torchvision:mobilenet_v2"],
        ["compress", "torchvision:mobilenet_v2", "--method", "svd", "--keep", 0.7, "--dry-run"],
    ):
        _, out, _ = run(capsys, *given)
        rows = [line for line in out.splitlines() if line.startswith((" features.", " layer", " ──"))]
        assert len(rows) > 30
        assert max(map(len, rows)) <= 80
        assert any("features.17.conv.0.0 " in line for line in rows), "names are whole"
        assert sum("depthwise" in line for line in out.splitlines()) == 1


METRIC = """
import torch
from neighbour_of_score import ADDED

def error(network):
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
    assert not network.training
    return ADDED + float(network(x).square().mean())

def text(network):
    return "good"
"""


def test_max_drop_with_a_metric_of_ones_own(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_score.py").write_text(
        "import torch\nfrom torch import nn\nADDED = 5.0\ndef net():\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 20))\n"
    )
    (tmp_path / "score.py").write_text(METRIC)
    common = ["compress", f"{tmp_path / 'neighbour_of_score.py'}:net", "--method", "svd", "--out", tmp_path / "o"]
    common.append("--json")
    limit = ["--max-drop", 0.02, "--metric", f"{tmp_path / 'score.py'}:error"]
    status, out, err = run(capsys, *common, *limit)
    assert status == 0, err
    trials = json.loads(out)["trials"]
    assert 1 <= len(trials) <= 11
    kept = min(t["keep"] for t in trials if t["within"])
    assert json.loads(out)["plan"]["after"]["params"] == round(kept * json.loads(out)["plan"]["before"]["params"])
    said = refused(capsys, *common[:-1], "--force", "--max-drop", 1, "--metric", f"{tmp_path / 'score.py'}:text")
    assert "the metric gave a str" in said
    assert "--lower-is-better" in refused(capsys, *common[:-1], "--force", "--keep", 0.5, "--lower-is-better")


def test_a_written_network_was_the_one_that_was_scored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With norms folded at the end, too: the metric sees the network as it is shipped."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval()
    x, seen = torch.randn(2, 3, 8, 8), []

    def metric(network: nn.Module) -> float:
        seen.append(network)
        return 0.0

    small, plan = rw.smallest(model, x, metric, method="svd", fuse=True)
    assert plan.fused
    assert any(network is small for network in seen)
    assert len(seen) <= 12


def test_interrupted_outcome_names_a_folder_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(KeyboardInterrupt, match="as it was"), outcome.interruptible(tmp_path):
        raise KeyboardInterrupt


def test_the_environment_is_as_it_was() -> None:
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    assert main(["--version"]) == 0
