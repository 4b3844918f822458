"""Splits, layouts, decoding and every way that data can be wrong."""

from __future__ import annotations

import io
import pickle
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rankwise.data import images
from rankwise.data import splits as data
from rankwise.errors import RankwiseError

datasets = pytest.importorskip("datasets")
Image = pytest.importorskip("PIL.Image")

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def picture(seed: int, height: int = 6, width: int = 6, mode: str = "RGB") -> np.ndarray:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def write_parquet(path: Path, pictures: list[np.ndarray], labels: list[int], **columns: str) -> None:
    """`columns` renames: image="img", label="fine_label"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image, label = columns.get("image", "img"), columns.get("label", "label")
    features = datasets.Features({image: datasets.Image(), label: datasets.ClassLabel(names=["cat", "dog", "owl"])})
    rows = {image: [{"bytes": png(p), "path": None} for p in pictures], label: labels}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(path))


def write_images(root: Path, pictures: dict[str, list[np.ndarray]]) -> None:
    for name, found in pictures.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i, pixels in enumerate(found):
            Image.fromarray(pixels).save(root / name / f"{i:03}.png")


def everything(split: data.Split, **how: int) -> tuple[Tensor, Tensor]:
    xs, ys = zip(*split.batches(3, **how), strict=True)
    return torch.cat(xs), torch.cat(ys)


def as_set(x: Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in x}


@pytest.fixture
def cifar_like(tmp_path: Path) -> str:
    write_parquet(tmp_path / "train.parquet", [picture(i) for i in range(40)], [i % 3 for i in range(40)])
    write_parquet(tmp_path / "test.parquet", [picture(100 + i) for i in range(7)], [i % 3 for i in range(7)])
    return f"parquet:{tmp_path}"


class TestDigits:
    def test_splits_are_whole_disjoint_fixed_and_stratified(self) -> None:
        sklearn = pytest.importorskip("sklearn.datasets").load_digits()
        splits = {name: data.load("digits", name) for name in ("train", "val", "test")}
        rows = {name: {x.numpy().tobytes() for x in everything(s)[0]} for name, s in splits.items()}
        assert set.union(*rows.values()) == {x.astype("float32").tobytes() for x in sklearn.images / 16}
        assert sum(map(len, rows.values())) == len(set.union(*rows.values()))
        assert sum(map(len, splits.values())) == 1797
        whole = np.bincount(sklearn.target)
        for name, share in (("train", 0.6), ("val", 0.2), ("test", 0.2)):
            assert np.abs(splits[name].labels.bincount().numpy() - share * whole).max() <= 2
            assert torch.equal(splits[name].labels, data.load("digits", name).labels)

    def test_the_papers_splits_are_cut_from_train(self) -> None:
        train = as_set(everything(data.load("digits", "train"))[0])
        parts = [as_set(everything(data.load("digits", name))[0]) for name in data.PARTS]
        assert set.union(*parts) == train
        assert [len(data.load("digits", name)) for name in data.PARTS] == [979, 54, 54]

    def test_form(self) -> None:
        split = data.load("digits")
        x, y = next(split.batches(5))
        assert (x.shape, x.dtype, y.dtype) == ((5, 1, 8, 8), torch.float32, torch.int64)
        assert (float(everything(split)[0].min()), float(everything(split)[0].max())) == (0.0, 1.0)
        assert (split.name, split.split, split.classes) == ("digits", "test", tuple("0123456789"))

    def test_refusals(self) -> None:
        with pytest.raises(RankwiseError, match="test, train, val"):
            data.load("digits", "testing")
        with pytest.raises(RankwiseError, match="8×8"):
            data.load("digits", size=32)


class TestSplit:
    def test_shuffling_is_a_permutation_that_belongs_to_the_seed(self) -> None:
        split = data.load("digits")
        orders = [torch.cat([y for _, y in split.batches(50, shuffle_seed=s)]) for s in (1, 1, 2)]
        assert torch.equal(orders[0], orders[1])
        assert not torch.equal(orders[0], orders[2])
        assert torch.equal(orders[0].sort().values, split.labels.sort().values)

    def test_images_and_labels_stay_together_when_shuffled(self, cifar_like: str) -> None:
        split = data.load(cifar_like)
        plain, shuffled = everything(split), everything(split, shuffle_seed=3)
        pairs = [{(x.numpy().tobytes(), int(y)) for x, y in zip(*found, strict=True)} for found in (plain, shuffled)]
        assert pairs[0] == pairs[1]

    def test_thin_takes_evenly_spaced_images(self) -> None:
        split = data.load("digits")
        few = split.thin(10)
        assert torch.equal(few.labels, split.labels[torch.arange(10) * len(split) // 10])
        assert torch.equal(everything(few)[0], everything(split)[0][torch.arange(10) * len(split) // 10])
        assert len(split.thin(10**6)) == len(split)
        with pytest.raises(RankwiseError, match="1 or more"):
            split.thin(0)

    def test_batch_size_is_checked(self) -> None:
        with pytest.raises(RankwiseError, match="batch size 0"):
            next(data.load("digits").batches(0))

    def test_goes_to_another_process(self, cifar_like: str) -> None:
        for split in (data.load("digits"), data.load(cifar_like), data.load(cifar_like, "val")):
            again = pickle.loads(pickle.dumps(split))
            assert torch.equal(everything(again)[0], everything(split)[0])


class TestParquet:
    def test_values_and_labels(self, cifar_like: str) -> None:
        split = data.load(cifar_like)
        x, y = everything(split)
        expected = (np.stack([picture(100 + i) for i in range(7)]) / 255 - MEAN) / STD
        assert np.allclose(x.numpy(), expected.transpose(0, 3, 1, 2), atol=1e-5)
        assert y.tolist() == [0, 1, 2, 0, 1, 2, 0]
        assert split.classes == ("cat", "dog", "owl")

    def test_val_is_a_fixed_twentieth_of_train(self, cifar_like: str) -> None:
        train, val = data.load(cifar_like, "train"), data.load(cifar_like, "val")
        assert (len(train), len(val)) == (38, 2)
        rows = [{x.numpy().tobytes() for x in everything(s)[0]} for s in (train, val)]
        assert len(rows[0] | rows[1]) == 40
        assert torch.equal(everything(val)[0], everything(data.load(cifar_like, "val"))[0])

    def test_the_papers_splits_are_90_5_5_percent_of_train(self, cifar_like: str) -> None:
        whole = [everything(data.load(cifar_like, name))[0] for name in ("train", "val")]
        parts = [everything(data.load(cifar_like, name))[0] for name in data.PARTS]
        count = sum(map(len, whole))
        assert [len(p) for p in parts] == [count - 2 * (count // 20), count // 20, count // 20]
        assert torch.equal(parts[2], whole[1])  # nothing that stops a training is trained on, also under the name val
        assert as_set(torch.cat(parts)) == as_set(torch.cat(whole))
        other = everything(data.load(cifar_like, "stop", seed=1))[0]
        assert not torch.equal(other, parts[2])
        again = [everything(data.load(cifar_like, name, seed=1))[0] for name in data.PARTS]
        assert as_set(torch.cat(again)) == as_set(torch.cat(whole))

    def test_the_development_set_is_the_test_set_where_there_is_no_other(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "train.parquet", [picture(i) for i in range(40)], [0, 1] * 20)
        write_parquet(tmp_path / "val.parquet", [picture(100)], [0])
        spec = f"parquet:{tmp_path}"
        assert torch.equal(everything(data.load(spec, "test"))[0], everything(data.load(spec, "val"))[0])
        assert [len(data.load(spec, name)) for name in ("train", *data.PARTS)] == [40, 36, 2, 2]

    def test_a_val_of_its_own_leaves_train_whole(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "data/train-00000-of-00002.parquet", [picture(0)] * 20, [0] * 20)
        write_parquet(tmp_path / "data/train-00001-of-00002.parquet", [picture(1)] * 20, [1] * 20)
        write_parquet(tmp_path / "data/validation-00000-of-00001.parquet", [picture(2)] * 5, [2] * 5)
        assert data.load(f"parquet:{tmp_path}", "train").labels.tolist() == [0] * 20 + [1] * 20
        assert len(data.load(f"parquet:{tmp_path}", "val")) == 5
        assert len(data.load(f"parquet:{tmp_path}", "test")) == 5

    @pytest.mark.parametrize("label", ["label", "labels", "fine_label"])
    @pytest.mark.parametrize("image", ["img", "image"])
    def test_columns(self, tmp_path: Path, image: str, label: str) -> None:
        write_parquet(tmp_path / "test.parquet", [picture(1)], [2], image=image, label=label)
        assert data.load(f"parquet:{tmp_path}").labels.tolist() == [2]

    def test_tables_without_the_librarys_metadata(self, tmp_path: Path) -> None:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        for i, cell in enumerate((png(picture(4)), {"bytes": png(picture(4)), "path": "x.png"})):
            folder = tmp_path / str(i)
            folder.mkdir()
            parquet.write_table(arrow.table({"image": [cell], "label": [1]}), folder / "test.parquet")
            split = data.load(f"parquet:{folder}")
            assert split.pixels(torch.tensor([0]))[0].permute(1, 2, 0).numpy().tolist() == picture(4).tolist()
            assert split.classes == ("0", "1")

    def test_odd_folder_names(self, tmp_path: Path) -> None:
        folder = tmp_path / "train [v2]*"
        write_parquet(folder / "test.parquet", [picture(1)], [1])
        assert len(data.load(f"parquet:{folder}")) == 1

    def test_a_changed_file_is_read_anew(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "test.parquet", [picture(1)], [1])
        assert len(data.load(f"parquet:{tmp_path}")) == 1
        write_parquet(tmp_path / "test.parquet", [picture(1)] * 4, [1] * 4)
        assert len(data.load(f"parquet:{tmp_path}")) == 4


class TestImagefolder:
    def test_splits_and_classes(self, tmp_path: Path) -> None:
        write_images(tmp_path / "train", {"owl": [picture(i) for i in range(3)], "cat": [picture(9)]})
        write_images(tmp_path / "test", {"owl": [picture(5)]})  # owl is 1 here too, though it is alone
        split = data.load(f"imagefolder:{tmp_path}")
        assert (split.classes, split.labels.tolist()) == (("cat", "owl"), [1])
        assert split.pixels(torch.tensor([0]))[0].permute(1, 2, 0).numpy().tolist() == picture(5).tolist()
        assert len(data.load(f"imagefolder:{tmp_path}", "train")) == 3
        assert len(data.load(f"imagefolder:{tmp_path}", "val")) == 1

    def test_without_split_folders(self, tmp_path: Path) -> None:
        write_images(tmp_path, {"a": [picture(i) for i in range(30)], "b": [picture(i) for i in range(30)]})
        assert len(data.load(f"imagefolder:{tmp_path}", "train")) == 57
        assert len(data.load(f"imagefolder:{tmp_path}", "val")) == 3
        with pytest.raises(RankwiseError, match="has calibration, fit, stop, train, val"):
            data.load(f"imagefolder:{tmp_path}", "test")

    def test_code_in_the_folder_is_not_run(self, tmp_path: Path) -> None:
        mark = tmp_path / "ran"
        root = tmp_path / "set"
        write_images(root / "test", {"a": [picture(0)], "b": [picture(1)]})
        for name in ("set.py", "imagefolder.py", "test/a/set.py"):
            (root / name).write_text(f"open({str(mark)!r}, 'w')")
        assert len(data.load(f"imagefolder:{root}")) == 2
        assert not mark.exists()


class TestDecoding:
    def test_greyscale_stays_between_0_and_1(self, tmp_path: Path) -> None:
        write_images(tmp_path / "test", {"a": [picture(0, mode="L")], "b": [picture(1, mode="L")]})
        x, _ = everything(data.load(f"imagefolder:{tmp_path}"))
        assert x.shape == (2, 1, 6, 6)
        assert np.allclose(x[0, 0].numpy(), picture(0, mode="L") / 255)

    def test_one_grey_image_among_colours_becomes_colour(self, tmp_path: Path) -> None:
        write_images(tmp_path / "test", {"a": [picture(0, mode="L")], "b": [picture(1)]})
        assert everything(data.load(f"imagefolder:{tmp_path}"))[0].shape == (2, 3, 6, 6)

    def test_different_sizes_need_a_size(self, tmp_path: Path) -> None:
        write_images(tmp_path / "test", {"a": [picture(0, 40, 60)], "b": [picture(1, 64, 32)]})
        with pytest.raises(RankwiseError, match="give a size"):
            data.load(f"imagefolder:{tmp_path}")
        x, _ = everything(data.load(f"imagefolder:{tmp_path}", size=14))
        assert x.shape == (2, 3, 14, 14)

    def test_scaling_is_torchvisions(self, tmp_path: Path) -> None:
        if find_spec("torchvision") is None:
            pytest.skip("torchvision is not installed")
        from rankwise.models.vision import import_torchvision

        import_torchvision()
        from torchvision import transforms

        shapes = [(40, 61), (75, 50), (14, 14), (9, 20), (16, 16)]
        pictures = [picture(i, *shape) for i, shape in enumerate(shapes)]
        write_images(tmp_path / "test", {"a": pictures})
        found = data.load(f"imagefolder:{tmp_path}", size=14).pixels(torch.arange(len(shapes)))
        theirs = transforms.Compose([transforms.Resize(16), transforms.CenterCrop(14)])
        for pixels, raw in zip(found, pictures, strict=True):
            image = Image.fromarray(raw)
            expected = image if image.size == (14, 14) else theirs(image)  # what fits already is left alone
            assert np.array_equal(pixels.permute(1, 2, 0).numpy(), np.array(expected))

    def test_held_or_decoded_makes_no_difference(self, cifar_like: str, monkeypatch: pytest.MonkeyPatch) -> None:
        held = data.load(cifar_like)
        monkeypatch.setattr(images, "_HOLD", 10)
        decoded = data.load(cifar_like)
        assert isinstance(decoded.pixels, images.Decoder)
        assert not isinstance(held.pixels, images.Decoder)
        for how in ({}, {"shuffle_seed": 1}):
            assert torch.equal(everything(held, **how)[0], everything(decoded, **how)[0])

    def test_different_sizes_show_when_decoded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_images(tmp_path / "test", {"a": [picture(0, 4, 4)], "b": [picture(1, 5, 5)]})
        monkeypatch.setattr(images, "_HOLD", 10)
        split = data.load(f"imagefolder:{tmp_path}")
        with pytest.raises(RankwiseError, match="give a size"):
            next(split.batches(2))


class TestWhatIsWrong:
    def refused(self, spec: str, split: str = "test", **how: int) -> str:
        with pytest.raises(RankwiseError) as caught:
            data.load(spec, split, **how)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_specification(self, tmp_path: Path) -> None:
        assert "digits, parquet:FOLDER, imagefolder:FOLDER, hub:NAME" in self.refused("mnist")
        assert "digits, parquet:FOLDER" in self.refused("parquet:")
        assert "no folder" in self.refused(f"parquet:{tmp_path}/none")
        assert "no folder" in self.refused(f"imagefolder:{tmp_path}/none")
        assert "no .parquet file" in self.refused(f"parquet:{tmp_path}")
        assert "no folders" in self.refused(f"imagefolder:{tmp_path}")
        assert "image size 0" in self.refused("digits", size=0)
        assert "no name on the Hugging Face hub" in self.refused("hub:../../etc")

    def test_split(self, cifar_like: str) -> None:
        assert "has calibration, fit, stop, test, train, val" in self.refused(cifar_like, "evaluation")

    def test_hub_without_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        assert "hub:nobody/nothing cannot be read" in self.refused("hub:nobody/nothing")

    @pytest.mark.parametrize("content", [b"", b"PAR1 and then nonsense", None])
    def test_corrupted_parquet(self, tmp_path: Path, content: bytes | None) -> None:
        path = tmp_path / "test.parquet"
        write_parquet(path, [picture(i) for i in range(5)], [0] * 5)
        path.write_bytes(path.read_bytes()[:-20] if content is None else content)
        assert "cannot be read" in self.refused(f"parquet:{tmp_path}")

    def test_columns(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "test.parquet", [picture(0)], [0], image="photo")
        assert "columns photo, label: call the one with the images img or image" in self.refused(f"parquet:{tmp_path}")
        write_parquet(tmp_path / "test.parquet", [picture(0)], [0], label="kind")
        assert "label or labels or fine_label" in self.refused(f"parquet:{tmp_path}")

    def test_labels(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "test.parquet", [picture(0)] * 2, [0, -1])
        assert "without a label" in self.refused(f"parquet:{tmp_path}")
        table = datasets.Dataset.from_dict({"image": [png(picture(0))], "label": ["cat"]})
        table.to_parquet(str(tmp_path / "test.parquet"))
        assert "no whole numbers" in self.refused(f"parquet:{tmp_path}")

    def test_empty(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "test.parquet", [], [])
        assert "empty" in self.refused(f"parquet:{tmp_path}")
        (tmp_path / "test" / "cat").mkdir(parents=True)
        assert f"imagefolder:{tmp_path}" in self.refused(f"imagefolder:{tmp_path}")

    def test_one_training_image(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "train.parquet", [picture(0)], [0])
        assert len(data.load(f"parquet:{tmp_path}", "train")) == 1
        assert "single training image" in self.refused(f"parquet:{tmp_path}", "val")

    @pytest.mark.parametrize("keep", [0, 20, 60])
    def test_corrupted_image(self, tmp_path: Path, keep: int) -> None:
        write_images(tmp_path / "test", {"a": [picture(i, 20, 20) for i in range(3)]})
        broken = tmp_path / "test" / "a" / "001.png"
        broken.write_bytes(broken.read_bytes()[:keep])
        assert "image 1 of imagefolder:" in self.refused(f"imagefolder:{tmp_path}")

    def test_a_table_cannot_name_files(self, tmp_path: Path) -> None:
        Image.fromarray(picture(0)).save(tmp_path / "secret.png")
        features = datasets.Features({"img": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}})
        features["label"] = datasets.Value("int64")
        rows = {"img": [{"bytes": None, "path": str(tmp_path / "secret.png")}], "label": [0]}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "test.parquet"))
        assert "no encoded image" in self.refused(f"parquet:{tmp_path}")

    def test_sixteen_bits(self, tmp_path: Path) -> None:
        (tmp_path / "test" / "a").mkdir(parents=True)
        Image.fromarray(np.full((4, 4), 40_000, dtype=np.uint16)).save(tmp_path / "test" / "a" / "0.png")
        assert "8 bits" in self.refused(f"imagefolder:{tmp_path}")
