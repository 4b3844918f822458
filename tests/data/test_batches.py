"""What a network is trained on: the views of the supplement, and batches that belong to a seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from rankwise.data import augment, splits
from rankwise.data.batches import Feed
from rankwise.data.images import held
from rankwise.data.splits import Split
from sentences import check_sentence

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("sklearn")


def numbered(count: int, channels: int = 1, side: int = 4) -> Split:
    """Image i is filled with i, and its label is i too."""
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(count, channels, side, side)
    return Split("numbers", "fit", tuple(map(str, range(count))), torch.arange(count), held(images.contiguous()))


class TestViews:
    @given(st.integers(0, 10**6), st.sampled_from([("shift", 1), ("cifar", 2)]))
    def test_every_view_is_a_crop_of_the_padded_image(self, seed: int, how: tuple[str, int]) -> None:
        name, padding = how
        make = torch.Generator().manual_seed(seed)
        images = torch.randint(0, 256, (5, 3, 6, 6), dtype=torch.uint8, generator=make)
        chance = torch.rand(5, augment.DRAWS[name], generator=make)
        views = augment.shift_flip(images, chance, padding, name in augment.FLIPPED)
        for image, view, c in zip(images, views, chance, strict=True):
            padded = F.pad(image, (padding,) * 4)
            top, left = int(c[0] * (2 * padding + 1)), int(c[1] * (2 * padding + 1))
            expected = padded[:, top : top + 6, left : left + 6]
            assert torch.equal(view, expected.flip(-1) if len(c) > 2 and c[2] < 0.5 else expected)

    def test_cifar_moves_by_up_to_two_pixels_and_mirrors_half(self) -> None:
        point = torch.zeros(4000, 1, 9, 9, dtype=torch.uint8)
        point[:, :, 4, 3] = 1
        chance = torch.rand(4000, 3, generator=torch.Generator().manual_seed(0))
        _, _, rows, columns = augment.shift_flip(point, chance, 2, flip=True).nonzero().T
        assert set(rows.tolist()) == {2, 3, 4, 5, 6}
        assert set(columns.tolist()) == {1, 2, 3, 4, 5} | {3, 4, 5, 6, 7}
        assert abs(float(rows.double().mean()) - 4) < 0.1
        assert abs(float(columns.double().mean()) - 4) < 0.15  # 3 or its mirror image, 5

    @given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**6))
    def test_crop_boxes_lie_inside_and_have_the_right_shape(self, width: int, height: int, seed: int) -> None:
        chance = torch.rand(22, generator=torch.Generator().manual_seed(seed))
        left, top, right, bottom = augment.crop_box(width, height, chance)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        w, h = right - left, bottom - top
        assert (w - 0.5) / (h + 0.5) <= 4 / 3 + 1e-9
        assert (h - 0.5) / (w + 0.5) <= 4 / 3 + 1e-9
        if width == height and width > 20:
            assert w * h >= 0.08 * width * height * 0.85

    def test_resized_crops_are_torchvisions(self) -> None:
        vision = pytest.importorskip("rankwise.models.vision").import_torchvision()
        transforms = __import__(f"{vision.__name__}.transforms.functional", fromlist=["x"])
        pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        for seed in range(5):
            chance = torch.rand(23, generator=torch.Generator().manual_seed(seed))
            left, top, right, bottom = augment.crop_box(60, 40, chance[:-1])
            expected = transforms.resized_crop(image, top, left, bottom - top, right - left, [32, 32])
            expected = augment.to_tensor(expected)
            view = augment.resized_crop(image, 32, chance)
            if chance[-1] < 0.5:
                view = view.flip(-1)
            assert view.shape == (3, 32, 32)
            # Cropping first or scaling a box: only what lies at the border of the box may differ.
            assert (view.float() - expected.float()).abs()[:, 3:-3, 3:-3].mean() < 2

    @pytest.mark.parametrize("seed", range(6))
    def test_masks_move_with_their_images(self, seed: int) -> None:
        classes = np.random.default_rng(seed).integers(0, 5, (6, 9)).repeat(40, 0).repeat(40, 1).astype(np.uint8)
        image, mask = Image.fromarray(classes * 40), Image.fromarray(classes)
        chance = torch.rand(4, generator=torch.Generator().manual_seed(seed))
        view, target = augment.scaled_crop(image.convert("RGB"), mask, 513, chance)
        assert view.shape == (3, 513, 513)
        assert target.shape == (513, 513)
        outside = target == augment.IGNORED
        assert bool((view[:, outside] == 0).all())
        agree = (view[0].float() / 40 - target.float()).abs()[~outside] < 0.1
        assert agree.float().mean() > 0.9  # bilinear blends at the borders between classes
        assert set(target.unique().tolist()) <= {0, 1, 2, 3, 4, augment.IGNORED}

    def test_which_one_is_meant(self) -> None:
        assert augment.choose("auto", True, 3, None) == "voc"
        assert augment.choose("none", True, 3, None) == "none"
        assert "segmentation data" in check_sentence(lambda: augment.choose("cifar", True, 3, 32))
        assert "classification data" in check_sentence(lambda: augment.choose("voc", False, 3, 32))


class TestFeed:
    @given(st.integers(4, 60), st.integers(1, 20), st.integers(1, 3), st.integers(0, 5))
    def test_processes_share_every_image_of_an_epoch_once(self, n: int, batch: int, world: int, epoch: int) -> None:
        if n < 2 * world:
            return
        feeds = [Feed(numbered(n), batch, "none", 3, rank=r, world=world) for r in range(world)]
        seen = [[y.tolist() for _, y in feed.epoch(epoch)] for feed in feeds]
        assert {len(s) for s in seen} == {feeds[0].steps}
        for step in zip(*seen, strict=True):
            assert len({len(part) for part in step}) == 1
        flat = [i for s in seen for part in s for i in part]
        assert len(flat) == len(set(flat))
        if world == 1 and (batch == 1 or n % batch != 1):
            assert sorted(flat) == list(range(n))

    def test_images_stay_with_their_labels(self) -> None:
        for x, y in Feed(numbered(50), 8, "none", 1).epoch(0):
            assert torch.equal(x[:, 0, 0, 0].long(), y)

    def test_seed_epoch_and_process_decide(self) -> None:
        def views(seed: int, epoch: int) -> Tensor:
            return torch.cat([x for x, _ in Feed(splits.load("digits", "fit"), 64, "shift", seed).epoch(epoch)])

        assert torch.equal(views(1, 2), views(1, 2))
        assert not torch.equal(views(1, 2), views(1, 3))
        assert not torch.equal(views(1, 2), views(2, 2))

    def test_refusals(self) -> None:
        assert "encoded images" in check_sentence(lambda: Feed(numbered(9), 2, "imagenet", size=8))
        assert "at least 2" in check_sentence(lambda: Feed(numbered(1), 2, "none"))


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    """Six images whose halves are background and one class, which is also their colour."""
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (tmp_path / folder).mkdir(parents=True)
    for i in range(6):
        mask = np.zeros((30, 40 + i), dtype=np.uint8)
        mask[:, 20:] = i + 1
        mask[:2] = augment.IGNORED
        pixels = np.stack([mask * 30] * 3, axis=-1)
        Image.fromarray(pixels).save(tmp_path / "JPEGImages" / f"a{i}.jpg", quality=95)
        Image.fromarray(mask).save(tmp_path / "SegmentationClass" / f"a{i}.png")
    (tmp_path / "ImageSets/Segmentation/train.txt").write_text("a0\na1\na2\na3\n")
    (tmp_path / "ImageSets/Segmentation/val.txt").write_text("a4\na5\n")
    return tmp_path


class TestSegmentation:
    def test_evaluation_is_scaled_exactly(self, voc: Path) -> None:
        split = splits.load(f"voc:{voc}", "test", size=24)
        (x, y), *rest = split.batches(2)
        assert not rest
        assert x.shape == (2, 3, 24, 24)
        assert y.shape == (2, 24, 24)
        assert set(y[0].unique().tolist()) == {0, 5, augment.IGNORED}
        assert len(split.classes) == 21
        assert splits.load(f"voc:{voc}", "val").subset(torch.tensor([1])).targets(torch.tensor([0])).max() == 255

    def test_training_views(self, voc: Path) -> None:
        feed = Feed(splits.load(f"voc:{voc}", "train"), 2, "voc", 0, size=33)
        batches = list(feed.epoch(0))
        assert [x.shape for x, _ in batches] == [(2, 3, 33, 33)] * 2
        assert [y.shape for _, y in batches] == [(2, 33, 33)] * 2
        for (x, y), (x2, y2) in zip(batches, feed.epoch(0), strict=True):
            assert torch.equal(x, x2)  # threads decode, the seed decides
            assert torch.equal(y, y2)

    def test_extra_labels(self, voc: Path) -> None:
        (voc / "SegmentationClass").rename(voc / "SegmentationClassAug")
        (voc / "ImageSets/Segmentation/trainaug.txt").write_text("a0 a1 a2 a3 a4")
        (voc / "classes.txt").write_text("nothing\nsomething\n")
        split = splits.load(f"voc:{voc}", "train")
        assert len(split) == 5
        assert split.classes == ("nothing", "something")

    def test_refusals(self, voc: Path) -> None:
        assert "train.txt" in check_sentence(lambda: splits.load(f"voc:{voc / 'JPEGImages'}"))
        (voc / "SegmentationClass/a5.png").unlink()
        assert "a5.png, which is not there" in check_sentence(lambda: splits.load(f"voc:{voc}"))
        (voc / "ImageSets/Segmentation/val.txt").write_text("")
        assert "names no images" in check_sentence(lambda: splits.load(f"voc:{voc}"))


def test_large_images_are_decoded_and_cropped(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / "train" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        pixels = np.full((20 + i, 30, 3), 40 * i, dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "train" / "ab"[i % 2] / f"{i}.png")
    split = splits.load(f"imagefolder:{tmp_path}", "train", size=16, hold=False)
    seen = [(x, y) for x, y in Feed(split, 2, "imagenet", 0, size=16).epoch(0)]
    colours = {int(image[0, 0, 0]): int(label) for x, y in seen for image, label in zip(x, y, strict=True)}
    assert len(seen) == 2
    assert all(colour // 40 % 2 == label for colour, label in colours.items())
