"""`auto` on ImageNet classifiers: what a plan states, and what happens.

    python benchmarks/imagenet.py NETWORK --networks DIR --data FOLDER [--images N ...] [--budget UNIT=KEEP ...]
        [--recover STEPS] [--threads N]

NETWORK is resnet50 or lite0, DIR holds its weights (resnet50-v1.safetensors with resnet50_v1.py, or
efficientnet-lite0.safetensors), FOLDER holds {train,test}.parquet of ImageNet images at 224×224 (columns img, label).
Calibration is on N training images without labels; with 0, on none. Nothing is chosen by looking at the test images.
Budgets of one number of images share a job: the first row is all of it, from the model to the finished network, the
others are what another budget takes. A row has the change in top-1 with its paired 95 % interval, the change of
the outputs that the plan states and those that were measured (on held-out calibration images, and on the test images),
CPU seconds and peak memory of the job with its images; test images are read when a network is scored.
"""

from __future__ import annotations

import argparse
import io
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import torch
from common import machine, say
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import pil_to_tensor

import rankwise as rw
from rankwise.compression import Compression, Request
from rankwise.models import networks

NETWORKS = {
    "resnet50": ("resnet50_v1.py:resnet50", "resnet50-v1.safetensors", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "lite0": ("timm:tf_efficientnet_lite0", "efficientnet-lite0.safetensors", (0.498,) * 3, (0.502,) * 3),
}
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("network", choices=tuple(NETWORKS))
    parser.add_argument("--networks", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, action="append")
    parser.add_argument("--budget", action="append", help="params=0.75, macs=0.7 …")
    parser.add_argument("--recover", default="0")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    spec, weights, mean, deviation = NETWORKS[args.network]
    spec = spec if spec.startswith("timm:") else str(args.networks / spec)
    model = networks.build(spec)
    networks.load_weights_(model, args.networks / weights)
    model.eval()
    scale = torch.tensor(mean).view(3, 1, 1), torch.tensor(deviation).view(3, 1, 1)
    seen, _ = read(args.data / "train.parquet")
    seen = seen[torch.randperm(len(seen), generator=torch.Generator().manual_seed(0))]
    labels, before = answers(model, args.data / "test.parquet", scale)
    right = before.argmax(1) == labels
    say(f"n = {len(labels):,} test images, before: {100 * float(right.float().mean()):.2f} %; {machine()}\n")
    say("| images | budget | change in top-1 | stated | held out | test images | CPU s | peak GiB |")
    say("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for count in args.images or [1000]:
        data = [scaled(part, scale) for part in seen[:count].split(BATCH)] if count else None
        start = time.process_time()
        job = Compression(model, scaled(seen[:1], scale), Request(recover=args.recover), data)
        for budget in args.budget or ["params=0.75"]:
            unit, keep = budget.split("=")
            small, plan = job.run(rw.Budget(**{unit: float(keep)}))
            spent = time.process_time() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            _, after = answers(small, args.data / "test.parquet", scale)
            change = (after.argmax(1) == labels).float() - right.float()
            lost = float((before - after).square().sum(1).mean() / before.var(0, unbiased=False).sum())
            found = plan.search
            say(
                f"| {count} | {budget}{f', recover {args.recover}' if args.recover != '0' else ''} | "
                f"{100 * float(change.mean()):+.2f} ± {196 * float(change.std()) / len(change) ** 0.5:.2f} | "
                f"{show(found.stated)} | {show(found.measured)} | {lost:.4f} | {spent:.0f} | "
                f"{peak:.2f} |"
            )
            start = time.process_time()


def read(path: Path) -> tuple[Tensor, Tensor]:
    parts = list(each_part(path, 1000))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def each_part(path: Path, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Images as bytes, and their labels."""
    for batch in pq.ParquetFile(path).iter_batches(size):
        rows = batch.to_pydict()
        found = [pil_to_tensor(Image.open(io.BytesIO(one["bytes"])).convert("RGB")) for one in rows["img"]]
        yield torch.stack(found), torch.tensor(rows["label"])


def scaled(images: Tensor, scale: tuple[Tensor, Tensor]) -> Tensor:
    return (images.float() / 255 - scale[0]) / scale[1]


@torch.no_grad()
def answers(model: nn.Module, path: Path, scale: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Labels, and what the network says; a batch of images is in memory at a time."""
    labels, found = [], []
    for images, right in each_part(path, BATCH):
        labels.append(right)
        found.append(model(scaled(images, scale).contiguous(memory_format=torch.channels_last)))
    return torch.cat(labels), torch.cat(found)


def show(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    main()
