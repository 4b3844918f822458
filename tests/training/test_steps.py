"""Train, compress, retrain, repeat: what folders hold, and that an interruption changes nothing."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.errors import RankwiseError
from rankwise.models import networks
from rankwise.surgery.modules import mark_of
from rankwise.training import resume, steps
from rankwise.training.dataset import open_material
from rankwise.training.evaluate import evaluate
from rankwise.training.recipes import RECIPES, Recipe, change
from rankwise.training.steps import Rounds, Run
from sentences import check_sentence

pytest.importorskip("sklearn")
pytest.importorskip("accelerate")

SHORT = change(RECIPES["fast"], {"epochs": 4, "retrain": 2, "warmup": 1, "batch_size": 32})
DROPOUT = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
                         nn.Linear(8 * 36, 10))
"""


def run(out: Path, recipe: Recipe = SHORT, **how: Any) -> Run:
    return Run("digits", recipe, out, limit=how.pop("limit", 200), **how)


def tensors(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


class Stop(BaseException):
    """As abrupt as a kill, but within the process."""


class StopAt:
    """Looks on and ends everything at a step of an epoch, or at the end of an epoch (step None)."""

    def __init__(self, epoch: int, step: int | None) -> None:
        self.at = (epoch, step)

    def step(self, epoch: int, step: int, steps: int, loss: float, top1: float) -> None:
        if self.at == (epoch, step) or (self.at[1] == -1 and epoch == self.at[0] and step == steps):
            raise Stop

    def epoch(self, record: dict[str, Any]) -> None:
        if self.at == (record["epoch"] - 1, None):
            raise Stop


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    steps.train("digits-cnn", run(out, change(SHORT, {"epochs": 8, "retrain": 3}), limit=None))
    return out


@pytest.fixture(scope="module")
def compressed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compressed") / "small"
    model = networks.build(str(trained))
    small, plan = rw.compress(model, torch.zeros(1, 1, 8, 8), keep=0.25, error="energy")
    rw.save(small, replace(plan, model="digits-cnn"), out)
    return out


class TestTrain:
    def test_what_a_folder_holds(self, trained: Path) -> None:
        assert {path.name for path in trained.iterdir()} == {"model.safetensors", "row.json"}
        row = json.loads((trained / "row.json").read_text())
        assert row["status"] == "done"
        assert (row["model"], row["CR-P"], row["CR-F"]) == ("digits-cnn", 0.0, 0.0)
        assert [record["epoch"] for record in row["history"]] == list(range(1, 9))
        assert row["trained"]["top1"] > 95
        assert row["recipe"]["augment"] == "shift"  # what auto came to
        again = evaluate(networks.build(str(trained)), open_material("digits", "digits-cnn", "none").split("test"))
        assert again.to_json() == row["trained"]

    def test_the_network_is_built_for_the_data(self, tmp_path: Path) -> None:
        row = steps.train("resnet20", run(tmp_path / "a", change(SHORT, {"epochs": 1, "retrain": 0}), limit=64))
        assert row["model"] == "resnet20?in_channels=1&image_size=8"
        assert networks.default_input(str(tmp_path / "a")) == (1, 1, 8, 8)
        assert networks.architecture(str(tmp_path / "a")) == row["model"]
        assert networks.build(str(tmp_path / "a")).conv1.weight.shape[1] == 1

    def test_weights_to_start_from(self, trained: Path, tmp_path: Path) -> None:
        recipe = change(SHORT, {"epochs": 0, "retrain": 0})
        from_file = steps.train("digits-cnn", run(tmp_path / "a", recipe), trained / "model.safetensors")
        from_folder = steps.train(str(trained), run(tmp_path / "b", recipe))
        expected = json.loads((trained / "row.json").read_text())["trained"]
        assert from_file["trained"] == from_folder["trained"] == expected

    def test_the_best_epoch_is_kept_and_patience_ends(self, tmp_path: Path) -> None:
        worse = change(SHORT, {"epochs": 8, "retrain": 0, "schedule": "constant", "lr": 1.5, "warmup": 0.0})
        last = steps.train("digits-cnn", run(tmp_path / "a", worse, split="stop"))
        best = steps.train("digits-cnn", run(tmp_path / "b", change(worse, {"keep_best": True}), split="stop"))
        scores = [record["stop"]["top1"] for record in best["history"]]
        assert scores == [record["stop"]["top1"] for record in last["history"]]
        assert best["trained"]["top1"] == max(scores)
        assert last["trained"]["top1"] == scores[-1]
        assert scores[best["best_epoch"] - 1] == max(scores)
        short = steps.train("digits-cnn", run(tmp_path / "c", change(worse, {"patience": 1}), split="stop"))
        seen = [record["stop"]["top1"] for record in short["history"]]
        assert seen == scores[: len(seen)]
        fell = [i for i in range(1, 8) if scores[i] < max(scores[:i])]
        assert len(seen) == (fell[0] + 1 if fell else 8)

    def test_a_failed_run_is_a_row_too(self, tmp_path: Path) -> None:
        wild = change(SHORT, {"lr": 1e12, "epochs": 3, "retrain": 0})
        with pytest.raises(RankwiseError, match="learning rate below"):
            steps.train("digits-cnn", run(tmp_path / "a", wild))
        row = json.loads((tmp_path / "a" / "row.json").read_text())
        assert row["status"] == "failed"
        assert "learning rate below" in row["error"]

    def test_mixed_precision(self, tmp_path: Path) -> None:
        # A process of its own: some virtual machines promise bf16 instructions that they do not have.
        settings = ["epochs=3", "retrain=0", "warmup=1", "batch_size=32", "precision=bf16"]
        command = [sys.executable, "-m", "rankwise", "train", "digits-cnn", "--data", "digits", "--limit", "200"]
        command += ["--json", "--out", str(tmp_path / "half"), *(part for s in settings for part in ("--set", s))]
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        full = steps.train("digits-cnn", run(tmp_path / "full", change(SHORT, {"epochs": 3, "retrain": 0})))
        losses = [[record["loss"] for record in row["history"]] for row in (json.loads(done.stdout), full)]
        assert losses[0] != losses[1]
        assert losses[0] == pytest.approx(losses[1], rel=0.2)
        assert networks.build(str(tmp_path / "half")).conv1.weight.dtype == torch.float32


class TestRetrain:
    def test_rewinding_repeats_the_last_epochs(self, compressed: Path, tmp_path: Path) -> None:
        recipe = change(SHORT, {"epochs": 8, "retrain": 3})
        row = steps.retrain(compressed, run(tmp_path / "r", recipe, limit=None))
        assert [record["epoch"] for record in row["history"]] == [6, 7, 8]
        whole = steps.train("digits-cnn", run(tmp_path / "t", recipe, limit=None))
        assert [r["lr"] for r in row["history"]] == [r["lr"] for r in whole["history"][-3:]]
        assert row["keep"]["params"] <= 0.25
        assert row["CR-P"] == pytest.approx(100 * (1 - row["keep"]["params"]))
        assert row["CR-F"] == pytest.approx(100 * (1 - row["keep"]["macs"]))
        assert row["retrained"]["top1"] > row["compressed"]["top1"]
        assert rw.Plan.load(tmp_path / "r" / "plan.json") == rw.Plan.load(compressed / "plan.json")
        small = networks.build(str(tmp_path / "r"))
        assert sum(p.numel() for p in small.parameters()) == row["params"]

    def test_refusals(self, trained: Path, compressed: Path, tmp_path: Path) -> None:
        assert "could not be read" in check_sentence(lambda: steps.retrain(trained, run(tmp_path / "a")))
        assert "use `rankwise retrain`" in check_sentence(lambda: steps.train(str(compressed), run(tmp_path / "b")))
        endless = change(RECIPES["paper:resnet20"], {})
        assert "--set retrain=EPOCHS" in check_sentence(lambda: steps.retrain(compressed, run(tmp_path / "c", endless)))

    def test_a_teacher_is_a_part_of_what_is_resumed(self, trained: Path, compressed: Path, tmp_path: Path) -> None:
        recipe = change(SHORT, {"epochs": 2, "retrain": 2})
        plain = steps.retrain(compressed, run(tmp_path / "plain", recipe))
        taught = steps.retrain(compressed, run(tmp_path / "file", recipe, teacher=trained / "model.safetensors"))
        steps.retrain(compressed, run(tmp_path / "folder", recipe, teacher=trained))
        assert "teacher" not in plain
        assert taught["teacher"] == str(trained / "model.safetensors")
        assert tensors(tmp_path / "plain") != tensors(tmp_path / "file") == tensors(tmp_path / "folder")
        stopped = run(tmp_path / "r", recipe, teacher=trained, watch=StopAt(0, None))
        with pytest.raises(Stop):
            steps.retrain(compressed, stopped)
        later = replace(stopped, watch=None, resume=True)
        assert "teacher" in check_sentence(lambda: steps.retrain(compressed, replace(later, teacher=None)))
        steps.retrain(compressed, later)
        assert tensors(tmp_path / "r") == tensors(tmp_path / "folder")

    def test_a_teacher_must_fit(self, compressed: Path, tmp_path: Path) -> None:
        missing = run(tmp_path / "a", teacher=tmp_path / "nowhere.safetensors")
        assert "nowhere" in check_sentence(lambda: steps.retrain(compressed, missing))


class TestIterate:
    def test_three_rounds(self, trained: Path, tmp_path: Path) -> None:
        recipe = change(SHORT, {"epochs": 8, "retrain": 1})
        rows = steps.iterate(str(trained), run(tmp_path / "i", recipe), Rounds(3))
        assert [row["round"] for row in rows] == [1, 2, 3]
        whole = networks.build("digits-cnn")
        count = sum(p.numel() for p in whole.parameters())
        layers = {name for name, m in whole.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
        for i, row in enumerate(rows, start=1):
            small = networks.build(str(tmp_path / "i" / f"round-{i}"))
            plan = rw.Plan.load(tmp_path / "i" / f"round-{i}" / "plan.json")
            assert sum(p.numel() for p in small.parameters()) == row["params"] <= 0.8**i * count
            assert row["CR-P"] == pytest.approx(100 * (1 - row["params"] / count))
            assert {choice.name for choice in plan.choices} <= layers  # of the whole network, so of no pair
            pairs = [m for m in small.modules() if mark_of(m) is not None]
            assert len(pairs) == len(plan.choices)
            for pair in pairs:
                assert [mark_of(inner) for inner in pair.modules() if inner is not pair] in (
                    [None] * 2,
                    [None] * 3,
                )  # with a core
        assert rows[-1]["keep"]["params"] <= 0.8**3
        assert rows[-1]["retrained"]["top1"] > 90

    def test_an_interrupted_round_keeps_its_plan(self, trained: Path, tmp_path: Path) -> None:
        recipe = change(SHORT, {"epochs": 8, "retrain": 2})
        whole = steps.iterate(str(trained), run(tmp_path / "a", recipe), Rounds(2, "alds"))
        for epoch, step in ((6, -1), (7, -1)):
            with pytest.raises(Stop):
                steps.iterate(
                    str(trained), run(tmp_path / "b", recipe, resume=True, watch=StopAt(epoch, step)), Rounds(2, "alds")
                )
        again = steps.iterate(str(trained), run(tmp_path / "b", recipe, resume=True), Rounds(2, "alds"))
        for i in (1, 2):
            for name in ("plan.json", "model.safetensors"):
                parts = [(tmp_path / ab / f"round-{i}" / name).read_bytes() for ab in "ab"]
                assert parts[0] == parts[1]
        assert [row["retrained"] for row in again] == [row["retrained"] for row in whole]

    def test_filters_are_removed_round_by_round(self, trained: Path, tmp_path: Path) -> None:
        pytest.importorskip("torch_pruning")
        recipe = change(SHORT, {"epochs": 8, "retrain": 1})
        rows = steps.iterate(str(trained), run(tmp_path / "i", recipe), Rounds(2, "ft"))
        count = sum(p.numel() for p in networks.build("digits-cnn").parameters())
        for i, row in enumerate(rows, start=1):
            small = networks.build(str(tmp_path / "i" / f"round-{i}"))
            assert sum(p.numel() for p in small.parameters()) == row["params"] <= 0.8**i * count
            assert row["CR-P"] == pytest.approx(100 * (1 - row["params"] / count))

    def test_it_trains_first_where_there_are_no_weights(self, tmp_path: Path) -> None:
        rows = steps.iterate("digits-cnn", run(tmp_path / "i", change(SHORT, {"retrain": 1})), Rounds(1, "pca"))
        assert [row["kind"] for row in rows] == ["train", "retrain"]
        assert rows[1]["method"] == "pca"  # which looks at the calibration split
        assert "1 or more" in check_sentence(lambda: Rounds(0))


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("factory") / "mine.py"
    path.write_text(DROPOUT)
    return f"{path}:net"


@pytest.fixture(scope="module")
def uninterrupted(factory: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("whole")
    steps.train(factory, run(out))
    return tensors(out)


class TestInterruptions:
    @pytest.mark.parametrize("at", [(0, -1), (1, -1), (1, None), (2, -1), (3, -1), (3, None)])
    def test_resuming_is_bit_for_bit(
        self, factory: str, uninterrupted: bytes, tmp_path: Path, at: tuple[int, int | None]
    ) -> None:
        with pytest.raises(Stop):
            steps.train(factory, run(tmp_path, watch=StopAt(*at)))
        assert (tmp_path / resume.FILE).exists() == (at != (0, -1))
        torch.rand(7)  # the state of the global generator plays no part
        steps.train(factory, run(tmp_path, resume=True))
        assert tensors(tmp_path) == uninterrupted
        assert not (tmp_path / resume.FILE).exists()

    @pytest.mark.parametrize("optimizer", ["rmsprop", "adamw", "soap"])
    def test_other_optimisers_resume_too(self, tmp_path: Path, optimizer: str) -> None:
        recipe = change(SHORT, {"optimizer": optimizer, "lr": 0.002, "keep_best": True})
        steps.train("digits-cnn", run(tmp_path / "a", recipe))
        with pytest.raises(Stop):
            steps.train("digits-cnn", run(tmp_path / "b", recipe, watch=StopAt(2, -1)))
        steps.train("digits-cnn", run(tmp_path / "b", recipe, resume=True))
        assert tensors(tmp_path / "a") == tensors(tmp_path / "b")

    def test_a_finished_run_is_done(self, trained: Path) -> None:
        before = tensors(trained)
        recipe = change(SHORT, {"epochs": 8, "retrain": 3})
        assert "finished training" in check_sentence(lambda: steps.train("digits-cnn", run(trained, recipe)))
        row = steps.train("digits-cnn", run(trained, recipe, resume=True))
        assert row == json.loads((trained / "row.json").read_text())
        assert tensors(trained) == before

    def test_a_folder_in_use_needs_resume_and_the_same_settings(self, tmp_path: Path) -> None:
        with pytest.raises(Stop):
            steps.train("digits-cnn", run(tmp_path, watch=StopAt(1, -1)))
        assert "interrupted" in check_sentence(lambda: steps.train("digits-cnn", run(tmp_path)))
        other = run(tmp_path, change(SHORT, {"lr": 0.2}), resume=True)
        assert "recipe.lr = 0.1, and 0.2" in check_sentence(lambda: steps.train("digits-cnn", other))
        assert "seed = 0" in check_sentence(lambda: steps.train("digits-cnn", run(tmp_path, seed=1, resume=True)))

    def test_damaged_and_foreign_states(self, trained: Path, tmp_path: Path) -> None:
        with pytest.raises(Stop):
            steps.train("digits-cnn", run(tmp_path, watch=StopAt(2, -1)))
        path = tmp_path / resume.FILE
        whole = path.read_bytes()
        contents = [whole[:cut] for cut in (0, 5, 8, 200, len(whole) // 2, len(whole) - 1)]
        contents += [b"PK\x03\x04" + whole, b"\xff" * 64, whole.replace(b'"format\\": 1', b'"format\\": 9')]
        for content in contents:
            path.write_bytes(content)
            says = check_sentence(lambda: steps.train("digits-cnn", run(tmp_path, resume=True)))
            assert str(path) in says
        path.write_bytes(tensors(trained))
        assert "no state of a training" in check_sentence(lambda: steps.train("digits-cnn", run(tmp_path, resume=True)))
        path.write_bytes(whole)
        steps.train("digits-cnn", run(tmp_path, resume=True))

    @pytest.mark.parametrize("name", ["fsync", "replace"])
    def test_a_write_that_ends_halfway_leaves_the_old_state(
        self, factory: str, uninterrupted: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        with pytest.raises(Stop):
            steps.train(factory, run(tmp_path, watch=StopAt(1, -1)))
        old = (tmp_path / resume.FILE).read_bytes()

        def killed(*arguments: object) -> None:
            raise Stop

        with monkeypatch.context() as patch:
            patch.setattr(f"rankwise.core.files.os.{name}", killed)
            with pytest.raises(Stop):
                steps.train(factory, run(tmp_path, resume=True))
        assert (tmp_path / resume.FILE).read_bytes() == old
        steps.train(factory, run(tmp_path, resume=True))
        assert tensors(tmp_path) == uninterrupted

    def test_a_full_disk_is_one_sentence_and_loses_nothing(
        self, factory: str, uninterrupted: bytes, tmp_path: Path
    ) -> None:
        with pytest.raises(Stop):
            steps.train(factory, run(tmp_path, watch=StopAt(1, -1)))
        old = (tmp_path / resume.FILE).read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, limits[1]))  # a real write that really fails
            says = check_sentence(lambda: steps.train(factory, run(tmp_path, resume=True)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "could not be written" in says
        assert (tmp_path / resume.FILE).read_bytes() == old
        assert not list(tmp_path.glob("*.part"))
        steps.train(factory, run(tmp_path, resume=True))
        assert tensors(tmp_path) == uninterrupted


SEGMENT = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
        self.side = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return {"out": self.body(x), "aux": self.side(x)}

def net():
    return Net()
"""


def test_segmentation_is_trained_compressed_and_retrained(tmp_path: Path) -> None:
    """Three classes that are colours: red is 0, green is 1, blue is 2."""
    np, image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (tmp_path / "voc" / folder).mkdir(parents=True)
    rng = np.random.default_rng(0)
    names = [f"a{i}" for i in range(26)]
    for name in names:
        mask = rng.integers(0, 3, (3, 4)).repeat(16, 0).repeat(16, 1).astype(np.uint8)
        image.fromarray(np.eye(3, dtype=np.uint8)[mask] * 255).save(tmp_path / "voc/JPEGImages" / f"{name}.jpg")
        mask[:3] = 255
        image.fromarray(mask).save(tmp_path / "voc/SegmentationClass" / f"{name}.png")
    (tmp_path / "voc/ImageSets/Segmentation/train.txt").write_text("\n".join(names[:22]))
    (tmp_path / "voc/ImageSets/Segmentation/val.txt").write_text("\n".join(names[22:]))
    (tmp_path / "voc/classes.txt").write_text("red\ngreen\nblue\n")
    (tmp_path / "net.py").write_text(SEGMENT)
    spec, data = f"{tmp_path / 'net.py'}:net", f"voc:{tmp_path / 'voc'}"
    recipe = change(SHORT, {"epochs": 6, "retrain": 2, "batch_size": 4, "label_smoothing": 0.0})
    row = steps.train(spec, Run(data, recipe, tmp_path / "a", size=40))
    assert row["recipe"]["augment"] == "voc"
    assert row["trained"]["miou"] > 80
    assert row["trained"]["top1"] > 90
    assert "miou" in row["history"][-1]["stop"]
    model = networks.build(spec)
    networks.load_weights_(model, tmp_path / "a" / "model.safetensors")
    small, plan = rw.compress(model, torch.zeros(1, 3, 40, 40), keep=0.8)
    rw.save(small, replace(plan, model=spec), tmp_path / "small")
    again = steps.retrain(tmp_path / "small", Run(data, recipe, tmp_path / "b", size=40), base=spec)
    assert again["retrained"]["miou"] > 80


def test_large_images_in_a_torchvision_network(tmp_path: Path) -> None:
    np, image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")
    pytest.importorskip("rankwise.models.vision").import_torchvision()
    rng = np.random.default_rng(0)
    for split, count in (("train", 44), ("val", 8)):
        for i in range(count):
            folder = tmp_path / "images" / split / "ab"[i % 2]
            folder.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 60, (50 + i, 70, 3), dtype=np.uint8)
            pixels[..., i % 2] += 150
            image.fromarray(pixels).save(folder / f"{i}.png")
    recipe = change(SHORT, {"epochs": 2, "retrain": 1, "batch_size": 10, "augment": "imagenet"})
    run = Run(f"imagefolder:{tmp_path / 'images'}", recipe, tmp_path / "out", size=64)
    row = steps.train("torchvision:shufflenet_v2_x0_5", run)
    assert row["model"] == "torchvision:shufflenet_v2_x0_5?num_classes=2"
    assert row["trained"]["n"] == 8  # the development set is the test set
    assert row["trained"]["top5"] is None
    assert sum(p.numel() for p in networks.build(str(tmp_path / "out")).parameters()) < 400_000
