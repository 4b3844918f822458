"""Files for others: exports give the same outputs, folders open without rankwise, folded norms change nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.__main__ import main
from rankwise.deploy import bench as bench_module
from rankwise.deploy import export as export_module
from rankwise.deploy.export import export, open_exported
from rankwise.models import networks
from rankwise.surgery.forward import tensors_of
from rankwise.surgery.fuse import find_norms, fuse_norms
from sentences import check_sentence

ROOT = Path(__file__).resolve().parents[2]


def trained(model: nn.Module) -> nn.Module:
    """Batch norms that do something."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.weight.data, module.bias.data):
                tensor.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return trained(
        nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 16, 3, stride=2, groups=2),
            nn.BatchNorm2d(16),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 20),
        )
    )


X = torch.randn(1, 3, 9, 9)


# ---- folded norms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["resnet20", "densenet22", "wrn16-8", "vgg16", "digits-cnn"])
def test_folding_norms_changes_nothing(spec: str) -> None:
    torch.manual_seed(0)
    model = trained(networks.build(spec)).double()
    x = torch.randn(2, *(networks.default_input(spec) or ())[1:], dtype=torch.float64)
    found = find_norms(model, x)
    fused = fuse_norms(model, found)
    with torch.no_grad():
        assert torch.allclose(fused(x), model(x), rtol=1e-8, atol=1e-10)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d | nn.BatchNorm1d)]
    left = [m for m in fused.modules() if isinstance(m, nn.BatchNorm2d | nn.BatchNorm1d)]
    assert len(left) == len(norms) - len(found)
    assert found or spec == "densenet22"


def test_a_norm_stays_where_somebody_else_reads_the_layer() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b, self.free = (
                nn.Conv2d(3, 3, 1),
                nn.BatchNorm2d(3),
                nn.Conv2d(3, 3, 1),
                nn.BatchNorm2d(3),
            )

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.free(self.b(self.norm(y) + y))

    torch.manual_seed(0)
    assert find_norms(trained(Both()), X) == {"free": "b"}


@pytest.mark.parametrize("method", ["svd", "alds", "auto"])
def test_a_fused_network_is_saved_and_read_again(method: str, tmp_path: Path) -> None:
    model = small_net()
    small, plan = rw.compress(model, X, method=method, keep=0.7, fuse=True)
    assert plan.fused == {"1": "0", "4": "3"}
    rw.save(small, plan, tmp_path)
    again = rw.load(tmp_path, model)
    assert torch.equal(again(X), small(X))
    assert plan.after.params == sum(p.numel() for p in again.parameters())
    unfused, _ = rw.compress(model, X, method=method, keep=0.7)
    assert torch.allclose(unfused(X), small(X), atol=1e-5)
    assert torch.allclose(rw.densify(again)(X), small(X), atol=1e-5)
    rw.save(small, replace(plan, fused={"1": "2"}), tmp_path)
    assert "batch norm" in check_sentence(lambda: rw.load(tmp_path, model))


# ---- exports ---------------------------------------------------------------------------------------------


def check_export(model: nn.Module, example: Any, path: Path, to: str) -> dict[str, Any]:
    """What was written gives the network's outputs, for a batch size that nobody compared on the way."""
    found = export(model, example, path, to)
    assert path.stat().st_size == found["bytes"]
    assert found["batch"] == "any"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    args, kwargs = export_module._inputs(model, example, 5)
    with torch.no_grad():
        wanted = tensors_of(model(*args, **kwargs))
    given = open_exported(path, to)(args, kwargs)
    for a, b in zip(wanted, given, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 1e-3 * a.abs().max()
    return found


@pytest.mark.parametrize("to", ["onnx", "exported"])
def test_classification(to: str, tmp_path: Path) -> None:
    small, _ = rw.compress(small_net(), X, method="alds", keep=0.7)
    check_export(small, X, tmp_path / f"m.{to}", to)


def test_segmentation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = networks.build("torchvision:deeplabv3_mobilenet_v3_large?num_classes=3").eval()
    small, plan = rw.compress(model, torch.randn(1, 3, 33, 33), method="svd", keep=0.6)
    assert len(plan.choices) > 20
    check_export(small, torch.randn(1, 3, 33, 33), tmp_path / "m.onnx", "onnx")


def test_a_timm_vit(tmp_path: Path) -> None:
    networks.build("torchvision:resnet18")  # torchvision first, in the way that suits this torch
    import timm

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=4).eval()
    x = torch.randn(1, 3, 32, 32)
    small, plan = rw.compress(model, x, keep=0.6, error="energy")
    assert {"patch_embed.proj", "blocks.0.attn.qkv", "blocks.0.mlp.fc1"} & {c.name for c in plan.choices}
    rw.save(small, plan, tmp_path / "o")
    assert torch.equal(rw.load(tmp_path / "o", model)(x), small(x))
    (tmp_path / "e").mkdir()
    check_export(small, x, tmp_path / "e" / "m.onnx", "onnx")


def test_a_transformers_encoder(tmp_path: Path) -> None:
    networks.build("torchvision:resnet18")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50, max_position_embeddings=16)).eval()
    x = {"input_ids": torch.randint(0, 50, (1, 8)), "attention_mask": torch.ones(1, 8, dtype=torch.long)}
    small, plan = rw.compress(model, x, method="svd", keep=0.8)
    assert any("attention" in c.name for c in plan.choices)
    rw.save(small, plan, tmp_path / "o")
    again = rw.load(tmp_path / "o", model)
    assert torch.equal(again(**x).last_hidden_state, small(**x).last_hidden_state)
    (tmp_path / "e").mkdir()
    check_export(small, x, tmp_path / "e" / "m.pt2", "exported")


def test_an_export_that_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.pt2").write_text("before")
    wrong = small_net()
    wrong[7].weight.data += 1
    program = export_module._program
    monkeypatch.setattr(export_module, "_program", lambda _, *rest: program(wrong, *rest))
    assert "other outputs" in check_sentence(lambda: export(small_net(), X, tmp_path / "m.pt2", "exported"))
    assert (tmp_path / "m.pt2").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_exported_is_one_sentence(tmp_path: Path) -> None:
    class Numpy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.sum().item()) if x.mean().item() > 0 else x

    assert "cannot be exported" in check_sentence(lambda: export(Numpy(), X, tmp_path / "m.pt2", "exported"))
    assert "onnx, exported" in check_sentence(lambda: export(small_net(), X, tmp_path / "m", "tflite"))
    assert not list(tmp_path.iterdir())


def test_a_network_with_one_batch_size_says_so(tmp_path: Path) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Parameter(torch.randn(1, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(1, 3) + self.place

    found = export(One(), torch.randn(1, 3), tmp_path / "m.pt2", "exported")
    assert (found["batch"], found["batches"]) == (1, [1])
    assert found["why"]


# ---- without rankwise ------------------------------------------------------------------------------------

WITHOUT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"rankwise", "torchvision", "timm", "typer", "rich"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
import torch
from torch import nn
exec(open("snippet.py", encoding="utf-8").read())
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.b, self.c = nn.Conv2d(12, 16, 3, stride=2, padding=1, groups=2), nn.Conv2d(16, 16, (1, 3), dilation=(1, 2))
        self.d, self.e, self.f = nn.Linear(16, 20), nn.PReLU(16), nn.InstanceNorm2d(16, affine=True)
    def forward(self, x):
        return self.d(self.f(self.c(self.e(self.b(self.norm(self.a(x)).relu())))).square().mean((2, 3)))
"""


def test_folders_open_without_rankwise(tmp_path: Path) -> None:
    """The snippet of docs/export.md: every fold, with slices and without, fused and not, other decompositions."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "export.md").read_text("utf-8"), flags=re.S)
    snippet = next(b for b in blocks if "def open_compressed" in b)
    assert len([line for line in snippet.splitlines() if line]) <= 15
    (tmp_path / "snippet.py").write_text(snippet, encoding="utf-8")
    space: dict[str, Any] = {}
    exec(WITHOUT[WITHOUT.index("import torch") : WITHOUT.index("exec(")] + WITHOUT[WITHOUT.index("class Net") :], space)
    torch.manual_seed(0)
    model = trained(space["Net"]())
    x = torch.randn(2, 3, 12, 12)
    known: dict[str, Tensor] = {}
    for fold in range(4):
        for fuse in (False, True):
            how: dict[str, Any] = {"groups": [1, 2], "exclude": ["d"]} if fold else {"groups": 1}
            small, plan = rw.compress(model, x, method="svd", keep=0.75, folds=[fold], fuse=fuse, **how)
            assert len(plan.choices) >= 2
            assert bool(plan.fused) == fuse
            rw.save(small, plan, tmp_path / f"{fold}{fuse}")
            known[f"{fold}{fuse}"] = small(x).detach()
    for method in ("pca", "tucker2", "ft", "auto"):
        given: dict[str, Any] = {"data": [x]} if method in ("pca", "auto") else {}
        given |= {"exclude": ["d"]} if method == "auto" else {}  # sliced linear layers are no modules of torch
        small, plan = rw.compress(model, x, method=method, keep=0.85, fuse=method == "ft", **given)
        assert plan.choices or plan.pruned
        rw.save(small, plan, tmp_path / method)
        known[method] = small(x).detach()
    torch.save({"x": x, "known": known}, tmp_path / "xy.pt")
    code = WITHOUT + (
        "data = torch.load('xy.pt', weights_only=True)\n"
        "assert 'rankwise' not in sys.modules\n"
        "for folder, y in data['known'].items():\n"
        "    assert torch.allclose(open_compressed(folder, Net())(data['x']), y, atol=1e-6), folder\n"
        "print('same')\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "same\n", done.stderr


# ---- commands --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compressed") / "o"
    flags = ["--keep", "0.6", "--method", "svd-energy", "--out", str(out), "--fuse", "--json"]
    assert main(["compress", "digits-cnn", "--random-weights", *flags]) == 0
    return out


def test_the_command_export(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "export",
                str(folder),
                "--to",
                "exported",
                "--out",
                str(tmp_path / "m.pt2"),
                "--merge",
                "--timing",
                "repeats=1",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "was written and read back" in out
    assert (tmp_path / "m.pt2").is_file()
    assert main(["export", str(folder), "--to", "onnx", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(folder / "model.onnx")


def test_the_command_bench(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--threads", "1", "--batch", "2", "--repeats", "3"]
    assert main(["bench", str(folder), "--engines", "eager", "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(r["engine"], r["threads"], r["batch"]) for r in found["times"]] == [("eager", 1, 2)]
    assert all(r["dense"]["n"] == r["compressed"]["n"] == 3 for r in found["times"])
    assert all(r["ratio"] == r["compressed"]["median"] / r["dense"]["median"] for r in found["times"])
    assert found["params"]["compressed"] < 0.6 * found["params"]["dense"]
    assert found["bytes"]["compressed"] < found["bytes"]["dense"]
    assert all(found["memory"][side][b] > 1e7 for side in ("dense", "compressed") for b in "2")
    # what a process cannot do is said in its rows
    monkeypatch.setattr(bench_module.sys, "executable", "/bin/false")
    assert main(["bench", str(folder), "--engines", "onnx", *flags]) == 0
    assert "onnx was not timed: " in capsys.readouterr().out


def test_bad_input_is_one_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        (["bench", tmp_path], "rankwise compress"),
        (["bench", folder, "--batch", "x"], "--batch x"),
        (["bench", folder, "--engines", "tpu"], "eager"),
        (["bench", folder, "--layout", "rows"], "channels-last"),
        (["export", folder, "--to", "tflite"], "onnx, exported"),
        (["export", tmp_path, "--to", "onnx"], "rankwise compress"),
        (["export", folder, "--to", "onnx", "--input", "1,x", "--out", tmp_path / "x.onnx"], "--input"),
        (["export", folder, "--to", "onnx", "--out", __file__], "--force"),
        (
            ["compress", "digits-cnn", "--random-weights", "--keep", "0.5", "--timing", "speed=1", "--out", tmp_path],
            "batch=32",
        ),
    ]
    for arguments, says in cases:
        assert main([str(a) for a in arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("rankwise: ")
        assert err.count("\n") == 1
        assert says in err
