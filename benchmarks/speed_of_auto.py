"""CPU seconds of `auto` from a model to the finished network, beside another checkout, in one run.

    python benchmarks/speed_of_auto.py --other FOLDER --networks DIR [--data CIFAR] [--images IMAGENET] [--text TEXT]
        [--only NAME ...]

FOLDER is a checkout of another commit (git worktree add). CIFAR and IMAGENET are folders with train.parquet, TEXT has
tinystories-calibration.txt and stsb-en-train.csv, DIR holds the networks. One thread; each run is a process of its own,
and both get the same inputs. The budget is params=0.75. `second` are the CPU seconds of another budget (0.7) on the
same job, which the other checkout is not asked for.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from common import SHARED, machine, say
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor
from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parents[1]
# Before the packages rw.compress was the only door, so a second budget is timed here only.
JOB = """
import json, sys, time
import torch
torch.set_num_threads(1)
import torch._dynamo  # one of the first steps imports it, in both
import rankwise as rw
spec, weights, inputs, mine = sys.argv[1:]
data = torch.load(inputs, weights_only=True)
if spec.startswith(("causal:", "encoder:")):
    if mine != "mine":
        from rankwise.vision import import_torchvision
        import_torchvision()
    import transformers
    kind, folder = spec.split(":", 1)
    if kind == "causal":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model.config.use_cache = False
    else:
        model = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False)
    example = {key: value[:1] for key, value in data[0].items()}
else:
    from rankwise import networks
    model = networks.build(spec)
    networks.load_weights_(model, weights)
    example = data[0][:1]
model.eval()
start = time.process_time()
times = []
if mine == "mine":
    from rankwise.compression import Compression, Request
    job = Compression(model, example, Request(), data)
    for keep in (0.75, 0.7):
        job.run(rw.Budget(params=keep))
        times.append(time.process_time() - start)
        start = time.process_time()
else:
    rw.compress(model, example, keep=0.75, data=data)
    times.append(time.process_time() - start)
print(json.dumps(times))
"""


def images(path: Path, count: int, mean: float, deviation: float) -> list[Tensor]:
    rows = pq.read_table(path / "train.parquet").slice(0, count).to_pydict()
    found = [pil_to_tensor(Image.open(io.BytesIO(one["bytes"])).convert("RGB")) for one in rows["img"]]
    return list(((torch.stack(found).float() / 255 - mean) / deviation).split(128 if count > 256 else 32))


def windows(folder: Path, text: Path) -> list[dict[str, Tensor]]:
    ids = torch.tensor(
        AutoTokenizer.from_pretrained(folder)((text / "tinystories-calibration.txt").read_text()).input_ids
    )
    return [{"input_ids": part} for part in ids[: 64 * 256].view(64, 256).split(8)]


def sentences(folder: Path, text: Path) -> list[dict[str, Tensor]]:
    """By length, so that nothing is padded."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with (text / "stsb-en-train.csv").open(newline="") as file:
        texts = [row[0] for row in csv.reader(file)][:256]
    by_length: dict[int, list[str]] = {}
    for one in texts:
        by_length.setdefault(len(tokenizer(one)["input_ids"]), []).append(one)
    return [dict(tokenizer(some, return_tensors="pt")) for _, some in sorted(by_length.items())]


def cases(args: argparse.Namespace) -> dict[str, tuple[str, Path, Callable[[], Any]]]:
    """By name: the network, its weights, and its inputs."""
    found: dict[str, tuple[str, Path, Callable[[], Any]]] = {}
    none = Path()
    if args.data:
        weights = SHARED / "weights" / "resnet20-cifar10.safetensors"
        found["resnet20, 1,024 images"] = ("resnet20", weights, lambda: images(args.data, 1024, 0.45, 0.225))
    if args.images:
        weights = args.networks / "efficientnet-lite0.safetensors"
        inputs = lambda: images(args.images, 256, 0.498, 0.502)  # noqa: E731
        found["lite0, 256 images"] = ("timm:tf_efficientnet_lite0", weights, inputs)
    if args.text:
        folder = args.networks / "minilm"
        found["minilm, 256 sentences"] = (
            f"encoder:{folder}",
            none,
            lambda: sentences(args.networks / "minilm", args.text),
        )
        folder = args.networks / "stories15m"
        found["stories15m, 64 × 256 tokens"] = (f"causal:{folder}", none, lambda: windows(folder, args.text))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--other", type=Path, required=True)
    parser.add_argument("--networks", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="folder with train.parquet of CIFAR-10")
    parser.add_argument("--images", type=Path, help="folder with train.parquet of ImageNet images")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--only", action="append")
    args = parser.parse_args()
    say(f"{machine()}\n")
    say("| case | this, s | other, s | this ÷ other | second budget, s | ÷ other's first |")
    say("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, (spec, weights, inputs) in cases(args).items():
        if args.only and not any(name.startswith(one) for one in args.only):
            continue
        with tempfile.TemporaryDirectory() as place:
            torch.save(inputs(), Path(place) / "inputs.pt")
            given = (spec, str(weights), f"{place}/inputs.pt")
            ours = run(HERE, *given, "mine")
            theirs = run(args.other.resolve(), *given, "other")[0]
        ratios = f"{ours[0] / theirs:.3f} | {ours[1]:.1f} | {ours[1] / theirs:.3f}"
        say(f"| {name} | {ours[0]:.1f} | {theirs:.1f} | {ratios} |")


def run(folder: Path, *arguments: str) -> list[float]:
    """First and second budget, by the source of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", JOB, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
