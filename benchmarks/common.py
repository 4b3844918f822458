"""What the benchmarks share: the network, and where a number comes from."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from rankwise.models import networks

SHARED = Path(__file__).resolve().parents[2] / "shared"


def machine() -> str:
    """Processor, cores, threads, torch and commit, for the line beside every number."""
    cpu = next(
        (ln.split(":")[1].strip() for ln in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in ln),
        platform.processor(),
    )
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except OSError:
        commit = "unknown"
    return f"{cpu}, {torch.get_num_threads()} thread(s), torch {torch.__version__}, commit {commit}"


def resnet18() -> nn.Module:
    """torchvision's resnet18 with seeded random weights: the shapes are what is timed."""
    torch.manual_seed(0)
    return networks.build("torchvision:resnet18").eval()


def resnet20_arguments() -> argparse.ArgumentParser:
    """Where CIFAR-10 ({train,test}.parquet) and the weights of the pretrained ResNet20 lie."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", type=Path, default=SHARED / "weights" / "resnet20-cifar10.safetensors")
    return parser


def resnet20(weights: Path) -> nn.Module:
    """The pretrained ResNet20."""
    model = networks.build("resnet20")
    networks.load_weights_(model, weights)
    return model.eval()


def say(text: str) -> None:
    print(text, flush=True)
    sys.stdout.flush()
