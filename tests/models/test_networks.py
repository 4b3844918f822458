"""MODEL specifications."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.errors import RankwiseError
from rankwise.models import networks
from rankwise.models.networks import build, default_input
from rankwise.models.spec import parse
from rankwise.models.zoo import NETWORKS
from sentences import check_sentence


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def one_sentence(caught: pytest.ExceptionInfo[RankwiseError]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", NETWORKS)
def test_own_networks_take_their_default_input(name: str) -> None:
    shape = default_input(name)
    assert shape is not None
    assert build(name).eval()(torch.zeros(shape)).shape == (1, 10)
    assert build(f"{name}?num_classes=7").eval()(torch.zeros(shape)).shape == (1, 7)


def test_parameter_counts() -> None:
    # He et al. (2016), table 6: 0.27, 0.46, 0.66, 0.85 and 1.7 million
    counts = [count(build(f"resnet{depth}")) for depth in (20, 32, 44, 56, 110)]
    assert counts == [269_722, 464_154, 658_586, 853_018, 1_727_962]
    assert 60_000 < count(build("digits-cnn")) < 150_000


def test_parameter_counts_of_vgg_densenet_and_wide_resnet() -> None:
    convolutions = sum(a * b * 9 for a, b in pairwise((3, 64, 64, 128, 128, 256, 256, 256, *[512] * 6)))
    assert count(build("vgg16")) == convolutions + 2 * 4224 + 512 * 10 + 10 == 14_724_042  # 14.7 M in the literature
    assert count(build("wrn16-8")) == 10_961_370  # Zagoruyko & Komodakis (2016), table 4: 11.0 M
    assert count(build("wrn16-8?depth=28&width=10")) == 36_479_194  # the same: 36.5 M
    assert count(build("densenet22?depth=100")) == 769_162  # Huang et al. (2017), table 2: 0.8 M
    assert count(build("densenet22")) == 71_686


def test_a_dense_layer_keeps_what_it_was_given() -> None:
    layer = build("densenet22").features.dense1[0].eval()
    x = torch.rand(2, 24, 8, 8)
    out = layer(x)
    assert out.shape == (2, 36, 8, 8)
    assert torch.equal(out[:, :24], x)


@pytest.mark.parametrize("name", NETWORKS)
def test_channels_and_sizes_are_part_of_a_specification(name: str) -> None:
    spec = f"{name}?in_channels=1&image_size=16"
    assert default_input(spec) == (1, 1, 16, 16)
    assert build(spec).eval()(torch.zeros(1, 1, 16, 16)).shape == (1, 10)


@pytest.mark.parametrize(
    ("spec", "size", "fitted"),
    [
        ("resnet20", (10, 3, 32), "resnet20"),
        ("resnet20", (100, 3, 32), "resnet20?num_classes=100"),
        ("resnet20?num_classes=12", (10, 1, 8), "resnet20?num_classes=12&in_channels=1&image_size=8"),
        ("digits-cnn", (10, 1, 8), "digits-cnn"),
        ("timm:test_vit", (10, 1, 8), "timm:test_vit?num_classes=10&in_chans=1"),
        ("a.py:net", (10, 1, 8), "a.py:net"),
    ],
)
def test_a_specification_is_fitted_to_data(spec: str, size: tuple[int, int, int], fitted: str) -> None:
    assert networks.fit_spec(spec, *size) == fitted
    assert networks.fit_spec(fitted, *size) == fitted


@pytest.mark.parametrize(
    ("spec", "says"),
    [("wrn16-8?depth=17", "6n"), ("densenet22?depth=21", "6n"), ("resnet20?image_size=0", "image_size=0")],
)
def test_architectures_that_do_not_exist(spec: str, says: str) -> None:
    with pytest.raises(RankwiseError, match=says):
        build(spec)
    with pytest.raises(RankwiseError, match="halves its images"):
        build("vgg16")(torch.zeros(1, 3, 8, 8))


def test_option_a_shortcut_has_no_parameters_and_keeps_the_old_channels() -> None:
    block = build("resnet20").layer2[0]
    assert {name.split(".")[0] for name, _ in block.named_parameters()} == {"conv1", "bn1", "conv2", "bn2"}
    nn.init.zeros_(block.bn2.weight)  # the residual branch is now zero: what remains is relu(shortcut)
    x = torch.rand(2, 16, 8, 8)
    expected = torch.zeros(2, 32, 4, 4)
    expected[:, 8:24] = x[:, :, ::2, ::2]
    assert torch.equal(block.eval()(x), expected)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("resnet20", {}),
        ("resnet20?num_classes=100", {"num_classes": 100}),
        ("timm:x?a=1&b=0.5&c=true&d=False&e=same", {"a": 1, "b": 0.5, "c": True, "d": False, "e": "same"}),
        ("torchvision:x?a=1e-3&b=-2", {"a": 1e-3, "b": -2}),
    ],
)
def test_options(text: str, options: dict[str, object]) -> None:
    found = parse(text).options
    assert found == options
    assert [type(v) for v in found.values()] == [type(v) for v in options.values()]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("resnet21", "resnet20"),
        ("", "resnet20"),
        ("no/such/folder", "folder that `rankwise compress` wrote"),
        ("resnet20?num_classes", "key=value"),
        ("resnet20?colour=1", "colour"),
        ("resnet20?num_classes=-1", "negative"),
        ("nowhere.py:make", "no file nowhere.py"),
        ("nowhere.py", "file.py:factory"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(spec: str, says: str) -> None:
    with pytest.raises(RankwiseError) as caught:
        build(spec)
    assert says in one_sentence(caught)


class TestTorchvision:
    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        if not has("torchvision"):
            pytest.skip("torchvision is not installed")

    def test_classification(self) -> None:
        model = build("torchvision:resnet18?num_classes=10").eval()
        assert default_input("torchvision:resnet18") == (1, 3, 224, 224)
        assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
        assert count(build("torchvision:resnet18")) == 11_689_512

    def test_segmentation_downloads_nothing(self) -> None:
        model = build("torchvision:deeplabv3_resnet50").eval()
        assert model(torch.zeros(1, 3, 33, 33))["out"].shape == (1, 21, 33, 33)
        assert default_input("torchvision:deeplabv3_resnet50") == (1, 3, 224, 224)

    def test_inputs_that_are_not_224(self) -> None:
        assert default_input("torchvision:inception_v3") == (1, 3, 299, 299)
        assert default_input("torchvision:vit_b_16?image_size=64") == (1, 3, 64, 64)
        assert default_input("torchvision:r3d_18") == (1, 3, 16, 112, 112)
        assert default_input("torchvision:raft_small") is None

    @pytest.mark.parametrize(
        ("spec", "says"),
        [
            ("torchvision:resnet19", "resnet18"),
            ("torchvision:qqqqqq", "none of its"),
            ("torchvision:resnet18?weights=DEFAULT", "weights"),
            ("torchvision:deeplabv3_resnet50?weights_backbone=DEFAULT", "weights_backbone"),
        ],
    )
    def test_refusals(self, spec: str, says: str) -> None:
        with pytest.raises(RankwiseError) as caught:
            build(spec)
        assert says in one_sentence(caught)

    def test_transforms_come_along_in_a_fresh_process(self) -> None:
        code = (
            "from rankwise.models.vision import import_torchvision; tv = import_torchvision();"
            "import torchvision.transforms.v2 as v2, torch;"
            "assert import_torchvision() is tv; assert v2.Resize(4)(torch.zeros(3, 8, 8)).shape == (3, 4, 4)"
        )
        done = subprocess.run([sys.executable, "-c", code], env=child_env(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


class TestTimm:
    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        if not has("timm"):
            pytest.skip("timm is not installed")

    def test_input_is_the_networks_own(self) -> None:
        assert default_input("timm:test_vit") == (1, 3, 160, 160)
        assert default_input("timm:vit_tiny_patch16_224?img_size=96&in_chans=1") == (1, 1, 96, 96)
        assert build("timm:test_vit?num_classes=5").eval()(torch.zeros(1, 3, 160, 160)).shape == (1, 5)

    @pytest.mark.parametrize(
        ("spec", "says"),
        [
            ("timm:test_vi", "test_vit"),
            ("timm:hf-hub:timm/resnet18", "timm has no network"),
            ("timm:local-dir:.", "timm has no network"),
            ("timm:test_vit?pretrained=true", "pretrained"),
            ("timm:test_vit?checkpoint_path=w.pth", "checkpoint_path"),
        ],
    )
    def test_refusals(self, spec: str, says: str) -> None:
        with pytest.raises(RankwiseError) as caught:
            build(spec)
        assert says in one_sentence(caught)

    def test_works_first_thing_in_a_fresh_process(self) -> None:
        code = "from rankwise.networks import build; build('timm:test_vit')"
        done = subprocess.run([sys.executable, "-c", code], env=child_env(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


class TestFile:
    def write(self, folder: Path, text: str) -> str:
        (folder / "mine.py").write_text("from torch import nn\n" + text)
        return str(folder / "mine.py")

    def test_factory_with_options_dataclass_and_neighbour(self, tmp_path: Path) -> None:
        (tmp_path / "neighbour_of_mine.py").write_text("WIDTH = 3\n")
        file = self.write(
            tmp_path,
            "from dataclasses import dataclass\nfrom neighbour_of_mine import WIDTH\n"
            "@dataclass\nclass Config:\n    outputs: int = 2\n"
            "def make(outputs=2):\n    return nn.Linear(WIDTH, Config(outputs).outputs)\n",
        )
        path_before = list(sys.path)
        assert build(f"{file}:make")(torch.zeros(1, 3)).shape == (1, 2)
        assert build(f"{file}:make?outputs=4")(torch.zeros(1, 3)).shape == (1, 4)
        assert sys.path == path_before
        assert "mine" not in sys.modules
        assert default_input(f"{file}:make") is None

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("def other(): return nn.ReLU()", "there are other"),
            ("def make(): return 3", "returned a int"),
            ("def make(): return 1 / 0", "ZeroDivisionError in line 2"),
            ("import no_such_package_anywhere", "ModuleNotFoundError in line 2"),
            ("def make(: pass", "SyntaxError"),
            ("make = 3", "no function 'make'"),
        ],
    )
    def test_faults_are_one_sentence(self, tmp_path: Path, text: str, says: str) -> None:
        file = self.write(tmp_path, text)
        with pytest.raises(RankwiseError) as caught:
            build(f"{file}:make")
        assert says in one_sentence(caught)

    def test_code_can_be_switched_off(self, tmp_path: Path) -> None:
        mark = tmp_path / "ran"
        file = self.write(tmp_path, f"open({str(mark)!r}, 'w')\ndef make(): return nn.ReLU()")
        with pytest.raises(RankwiseError, match="switched off"):
            build(f"{file}:make", allow_code=False)
        assert not mark.exists()


class TestFolder:
    """The part that needs no weights: which base a folder gets. Reloading is tested with the checkpoints."""

    def folder(self, path: Path, model: str) -> str:
        pytest.importorskip("rankwise.surgery.checkpoint")
        from rankwise.core.option import Cost
        from rankwise.planning.budget import Budget
        from rankwise.planning.plan import Plan

        path.mkdir(exist_ok=True)
        Plan(model, "svd", Budget(params=0.5), Cost(10, 10), Cost(5, 5), ()).save(path / "plan.json")
        return str(path)

    def test_code_named_by_a_folder_is_not_run(self, tmp_path: Path) -> None:
        mark = tmp_path / "ran"
        (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\ndef make(): pass")
        out = self.folder(tmp_path / "out", f"{tmp_path / 'evil.py'}:make")
        with pytest.raises(RankwiseError) as caught:
            build(out)
        assert "base=" in one_sentence(caught)
        assert default_input(out) is None
        again = self.folder(tmp_path / "again", out)  # one folder deeper, even with base for the outer one
        for base in (None, out):
            with pytest.raises(RankwiseError, match="not run"):
                build(again, base=base)
        assert not mark.exists()

    def test_input_is_that_of_the_base(self, tmp_path: Path) -> None:
        out = self.folder(tmp_path / "out", "resnet20")
        assert default_input(out) == (1, 3, 32, 32)
        assert default_input(self.folder(tmp_path / "again", out)) == (1, 3, 32, 32)

    def test_a_folder_that_names_itself(self, tmp_path: Path) -> None:
        out = self.folder(tmp_path / "out", str(tmp_path / "out"))
        for ask in (build, default_input):
            with pytest.raises(RankwiseError, match="its own base"):
                ask(out)

    def test_a_base_that_has_no_name(self, tmp_path: Path) -> None:
        with pytest.raises(RankwiseError, match="--base"):
            build(self.folder(tmp_path / "out", "MyNet"))

    def test_not_a_compressed_folder(self, tmp_path: Path) -> None:
        with pytest.raises(RankwiseError, match=r"no plan\.json"):
            build(str(tmp_path))
        with pytest.raises(RankwiseError, match=r"no plan\.json"):
            default_input(str(tmp_path))

    def test_base_is_for_folders(self) -> None:
        with pytest.raises(RankwiseError, match="no folder"):
            build("resnet20", base="resnet32")


def has(package: str) -> bool:
    return find_spec(package) is not None


def child_env() -> dict[str, str]:
    source = str(Path(networks.__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}


class TestPretrained:
    """Trained weights by specification; what would be downloaded is given by the test."""

    def test_torchvision_loads_what_it_downloads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("torchvision")
        model = networks.build("torchvision:squeezenet1_1")
        asked: list[str] = []

        def state(url: str, **_: Any) -> dict[str, Any]:
            asked.append(url)
            assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1", "a download must not run code"
            return dict(model.state_dict())

        monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", state)
        found = networks.build("torchvision:squeezenet1_1?weights=DEFAULT")
        assert len(asked) == 1
        assert all(
            torch.equal(a, b) for a, b in zip(found.state_dict().values(), model.state_dict().values(), strict=True)
        )
        assert not networks.has_random_weights("torchvision:squeezenet1_1?weights=DEFAULT")
        assert networks.has_random_weights("torchvision:squeezenet1_1")

    def test_without_a_connection_one_sentence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("timm")

        def fail(*_: Any, **__: Any) -> None:
            raise OSError("Name or service not known")

        monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fail)
        monkeypatch.setattr("timm.create_model", fail)
        for spec in ("torchvision:squeezenet1_1?weights=DEFAULT", "timm:test_vit?pretrained"):
            said = check_sentence(lambda spec=spec: networks.build(spec))
            assert "Name or service not known" in said
            assert f"{spec.partition('?')[0]} with --weights FILE" in said

    def test_unknown_weights_are_refused_before_a_download(self) -> None:
        pytest.importorskip("torchvision")
        said = check_sentence(lambda: networks.build("torchvision:resnet18?weights=BEST"))
        assert "IMAGENET1K_V1" in said
        assert "?pretrained" in check_sentence(lambda: networks.build("timm:test_vit?pretrained=2"))

    def test_timm_is_asked_for_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        timm = pytest.importorskip("timm")
        make, seen = timm.create_model, []

        def create(name: str, **options: Any) -> Any:
            seen.append(options)
            return make(name, **{**options, "pretrained": False})

        monkeypatch.setattr("timm.create_model", create)
        networks.build("timm:test_vit?pretrained&num_classes=3")
        assert seen == [{"pretrained": True, "num_classes": 3}]

    def test_a_folder_downloads_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has its weights: only the architecture is built, whatever its plan names."""
        pytest.importorskip("torchvision")
        spec = "torchvision:squeezenet1_1?weights=DEFAULT"
        assert networks.architecture(spec) == "torchvision:squeezenet1_1"
        small, plan = rw.compress(networks.build("torchvision:squeezenet1_1"), method="svd", keep=0.7, name=spec)
        rw.save(small, plan, tmp_path / "o")

        def never(*_: Any, **__: Any) -> None:
            raise AssertionError("something was downloaded")

        monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", never)
        networks.build(str(tmp_path / "o"))
