"""What `rankwise compress --dry-run` predicts against what is measured, on the pretrained CIFAR-10 ResNet20.

    python benchmarks/forecast.py --data FOLDER [--weights FILE] [--images N] [--out FOLDER]

FOLDER holds {train,test}.parquet of CIFAR-10. Plans are those of `auto` with 1,024 training images without labels. A
forecast must look at inputs that are new to the network, so it sees N images of the first half of the test set, and the
network that is built is scored on the other half: nothing that is predicted is measured on what it was predicted from.
With --out, the networks are kept there, and those that are there already are not made again.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from common import machine, resnet20, resnet20_arguments, say
from torch import nn

import rankwise as rw
from rankwise.compression import Compression, Request
from rankwise.data import splits
from rankwise.data.splits import Split
from rankwise.training.forecast import forecast

REMOVED = {"params": (25, 40, 50, 60, 70), "macs": (25, 45, 55)}  # %
IMAGES = 1024


def main() -> None:
    parser = resnet20_arguments()
    parser.add_argument("--images", type=int, default=2_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = resnet20(args.weights)
    test = splits.load(f"parquet:{args.data}", "test")
    half = len(test) // 2
    seen, kept = test.subset(torch.arange(half)), test.subset(torch.arange(half, len(test)))
    say(f"forecast on {min(args.images, half):,}, measured on {len(kept):,} other test images; {machine()}\n")
    say("| budget | CR-P % | CR-F % | predicted loss, points | its interval | measured ± 1.96 std. errors | inside |")
    say("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    example = torch.zeros(1, 3, 32, 32)
    images = splits.load(f"parquet:{args.data}", "fit").thin(IMAGES)
    job = Compression(model, example, Request(name="resnet20"), images)
    for unit, removed in [(u, r) for u in REMOVED for r in REMOVED[u]]:
        plan = job.plan(rw.Budget(**{unit: 1 - removed / 100}))
        expected = forecast(model, plan, job.seen(plan), seen, args.images)
        folder = None if args.out is None else args.out / f"calibration-{unit}{removed}"
        if folder is not None and folder.exists() and rw.Plan.load(folder / "plan.json").choices == plan.choices:
            small = rw.load(folder, model)
        else:
            small, plan = job.build(plan)
            if folder is not None:
                rw.save(small, plan, folder)
        drop, error = lost(model, small, kept)
        cut = [100 * (1 - plan.keep(u)) for u in ("params", "macs")]
        inside = "yes" if expected.low <= drop <= expected.high else "no"
        say(
            f"| {unit} −{removed} % | {cut[0]:.1f} | {cut[1]:.1f} | {expected.drop:.2f} "
            f"| {expected.low:.2f} … {expected.high:.2f} | {drop:.2f} ± {1.96 * error:.2f} | {inside} |"
        )


def lost(model: nn.Module, small: nn.Module, split: Split) -> tuple[float, float]:
    """Points of top-1, and the standard error of that difference on the same images."""
    right = []
    with torch.inference_mode():
        for network in (model, small):
            right.append(torch.cat([network(x).argmax(1) == y for x, y in split.batches(250)]).double())
    each = 100 * (right[0] - right[1])
    return float(each.mean()), float(each.std()) / math.sqrt(len(each))


if __name__ == "__main__":
    main()
