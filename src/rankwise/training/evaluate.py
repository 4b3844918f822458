"""How often a network is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.data.augment import IGNORED
from rankwise.data.splits import Split
from rankwise.errors import RankwiseError, need
from rankwise.models.vision import import_torchvision
from rankwise.surgery.forward import run_example


@dataclass(frozen=True)
class Score:
    """`n` images; `top1` and `top5` in percent, `loss` the mean cross-entropy in nats.

    `top5` is None with fewer than six classes, where it would say nothing. For segmentation `top1` counts pixels,
    `top5` is None, and `miou` is the mean over classes of intersection ÷ union, in percent.
    """

    n: int
    top1: float
    top5: float | None
    loss: float
    miou: float | None = None

    def to_json(self) -> dict[str, int | float | None]:
        found = asdict(self)
        return found if self.miou is not None else {k: v for k, v in found.items() if k != "miou"}

    @property
    def main(self) -> float:
        """What epochs are compared by: mean IoU for segmentation, otherwise top-1."""
        return self.top1 if self.miou is None else self.miou


def evaluate(
    model: nn.Module,
    split: Split,
    batch_size: int = 256,
    limit: int | None = None,
    share: tuple[int, int] = (0, 1),
) -> Score:
    """Score `model` on all images of `split`, or on `limit` of them, evenly spaced.

    Runs in eval mode, on the model's device and in its precision; afterwards every module is in the mode
    it was in. With several processes, all of them call this with their `share`, (number, how many), and
    get the score of all images.
    """
    if limit is not None:
        split = split.thin(limit)
    if not len(split):
        raise RankwiseError(f"{split.name} has no images in {split.split}: choose another split")
    rank, world = share
    own = split if world == 1 else split.subset(torch.arange(rank, len(split), world))
    pixels = split.masks is not None
    meter = Meter(len(split.classes), pixels, sync=world > 1)
    with mode(model, training=False), torch.inference_mode():
        for x, y in own.batches(min(batch_size, 8) if pixels else batch_size):
            logits = class_logits(run_example(model, x), split).float()
            meter.add(logits, y.to(logits.device))
    return meter.score(len(split))


class Meter:
    """Sums over batches by torchmetrics, which adds up over processes too where `sync` is given."""

    def __init__(self, classes: int, pixels: bool, sync: bool = False) -> None:
        library = _torchmetrics()
        self.classes, self.outputs = classes, 0
        names = ("targets", "loss", "top1") if pixels else ("targets", "loss", "top1", "top5")
        # Not torchmetrics' accuracy: it lets NaN win, and the order of equal logits is anybody's guess.
        self.sums = {
            name: library.SumMetric(nan_strategy="disable", sync_on_compute=sync).set_dtype(torch.float64)
            for name in names
        }
        self.overlap = None
        if pixels:
            jaccard = library.classification.MulticlassJaccardIndex
            self.overlap = jaccard(classes, ignore_index=IGNORED, sync_on_compute=sync)

    def add(self, logits: Tensor, y: Tensor) -> None:
        """Logits N×C and classes N, or N×C×H×W and N×H×W with 255 for pixels that do not count."""
        self.outputs = logits.shape[1]
        if self.overlap is not None:
            self.overlap.to(logits.device).update(logits[:, : self.classes].argmax(1), y)
            counted = y != IGNORED
            logits, y = logits.movedim(1, -1)[counted], y[counted]
        found = {"targets": torch.tensor(float(len(y)))}
        found["loss"] = F.cross_entropy(logits, y, reduction="none").double().sum()
        rank = _rank(logits, y)
        found |= {"top1": (rank < 1).sum(), "top5": (rank < 5).sum()}
        for name, metric in self.sums.items():
            metric.update(found[name].double().cpu())

    def score(self, n: int) -> Score:
        total = {name: float(metric.compute()) for name, metric in self.sums.items()}
        count = max(1.0, total["targets"])
        top5 = 100 * total["top5"] / count if "top5" in total and min(self.outputs, self.classes) > 5 else None
        miou = None if self.overlap is None else 100 * float(self.overlap.compute())
        return Score(n, 100 * total["top1"] / count, top5, total["loss"] / count, miou)


def _torchmetrics() -> Any:
    with suppress(RankwiseError):  # not installed is fine; where it is, torchmetrics needs our way of importing it
        import_torchvision()
    need("torchmetrics.classification", extra="train", purpose="scoring a network")
    return need("torchmetrics", extra="train", purpose="scoring a network")


def class_logits(output: object, split: Split) -> Tensor:
    """N×classes (segmentation: N×classes×H×W) out of a tensor, or of `out` or `logits` of a dict or an object."""
    for key in ("logits", "out"):
        if isinstance(output, Mapping) and key in output:
            output = output[key]
        elif isinstance(getattr(output, key, None), Tensor) and not isinstance(output, Tensor):
            output = getattr(output, key)
    dims, needs = (2, "images × classes") if split.masks is None else (4, "images × classes × height × width")
    if not isinstance(output, Tensor) or output.dim() != dims:
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"type {type(output).__name__}"
        raise RankwiseError(f"the network's output has {got}: a classifier of shape {needs} is needed")
    needed = int(split.labels.max()) + 1 if split.masks is None else len(split.classes)
    if output.shape[1] < needed:
        raise RankwiseError(
            f"the network tells {output.shape[1]} classes apart, and {split.name} has labels up to "
            f"{needed - 1}: use data and a network that belong together"
        )
    return output


def like(model: nn.Module, x: Tensor) -> Tensor:
    """`x` on the device and in the precision of the model's first floating-point parameter."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return x.to(parameter.device, parameter.dtype)
    return x


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """The whole model in train or eval mode, and afterwards every module as it was."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, flag in before.items():
            module.training = flag


def _rank(logits: Tensor, y: Tensor) -> Tensor:
    """How many classes come before the right one, int64, N; after all of them where a logit is NaN.

    Among equal logits the lower class comes first, so that a network that says nothing is not always right.
    """
    mine = logits.gather(1, y[:, None])
    number = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > mine) | ((logits == mine) & (number < y[:, None]))
    return before.sum(1).masked_fill(logits.isnan().any(1), logits.shape[1])
