"""CPU seconds of `auto` from a model to the finished network, beside another checkout, in turns in one run.

    python benchmarks/speed_of_auto.py --other FOLDER [--data CIFAR] [--networks DIR --images IMAGENET] [--only NAME]

FOLDER is a checkout of another commit (git worktree add). One thread; each run is a process of its own, so that imports
and caches are alike. `second` are the CPU seconds of another budget on the same job.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from common import SHARED, machine, say

HERE = Path(__file__).resolve().parents[1]
JOB = """
import io, json, sys, time
import numpy as np
import pyarrow.parquet as pq
import torch
torch.set_num_threads(1)
from PIL import Image
import rankwise as rw
from rankwise.compression import Compression, Request
from rankwise.models import networks
name, parquet, count, spec, weights = sys.argv[1:]
model = networks.build(spec)
networks.load_weights_(model, weights)
model.eval()
rows = pq.read_table(parquet).slice(0, int(count)).to_pydict()
found = [np.array(Image.open(io.BytesIO(r["bytes"])).convert("RGB")) for r in rows["img"]]
images = torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2)
data = list(((images.float() / 255 - 0.45) / 0.25).split(128))
times = []
start = time.process_time()
job = Compression(model, data[0][:1], Request(), data)
for keep in (0.75, 0.7):
    small, plan = job.run(rw.Budget(params=keep))
    times.append(time.process_time() - start)
    start = time.process_time()
print(json.dumps(times))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--other", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="folder with train.parquet of CIFAR-10")
    parser.add_argument("--networks", type=Path)
    parser.add_argument("--images", type=Path, help="folder with train.parquet of ImageNet images")
    parser.add_argument("--only", action="append")
    args = parser.parse_args()
    cases = {}
    if args.data:
        weights = SHARED / "weights" / "resnet20-cifar10.safetensors"
        cases["resnet20, 1,024 images"] = (args.data / "train.parquet", "1024", "resnet20", weights)
    if args.networks and args.images:
        spec, weights = "timm:tf_efficientnet_lite0", args.networks / "efficientnet-lite0.safetensors"
        cases["lite0, 256 images"] = (args.images / "train.parquet", "256", spec, weights)
    say(f"{machine()}\n")
    say("| case | this, s | other, s | ratio | second budget: this, s | other, s |")
    say("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, case in cases.items():
        if args.only and not any(name.startswith(one) for one in args.only):
            continue
        ours, theirs = (run(folder, name, *map(str, case)) for folder in (HERE, args.other.resolve()))
        first, second = (f"{one:.1f} | {other:.1f}" for one, other in zip(ours, theirs, strict=True))
        say(f"| {name} | {first} | {ours[0] / theirs[0]:.3f} | {second} |")


def run(folder: Path, *arguments: str) -> list[float]:
    """First and second budget, by the source of a checkout; the older layout has its job in another module."""
    code = JOB
    if not (folder / "src" / "rankwise" / "compression").exists():
        code = OLD
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=True
    )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


# Before the packages: the table is made by compress itself, so a second budget is planned from a job of its own.
OLD = (
    JOB.replace("from rankwise.compression import Compression, Request\n", "")
    .replace("from rankwise.models import networks\n", "from rankwise import networks\n")
    .replace("job = Compression(model, data[0][:1], Request(), data)\n", "")
    .replace(
        "small, plan = job.run(rw.Budget(params=keep))",
        "small, plan = rw.compress(model, data[0][:1], keep=keep, data=data)",
    )
)

if __name__ == "__main__":
    main()
