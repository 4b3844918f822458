"""Fingerprints of many requests through Python: plan and weights of each, so that two commits can be compared.

    python benchmarks/fingerprints.py write before.json      # at one commit
    python benchmarks/fingerprints.py compare before.json    # at another: what is equal, and what is not

One thread, seeded inputs. The trained ResNet20 is used where ../shared has it, and seeded weights elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rankwise as rw

WEIGHTS = Path(__file__).resolve().parents[2] / "shared" / "weights" / "resnet20-cifar10.safetensors"


def resnet20() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    network = rw.networks.build("resnet20")
    if WEIGHTS.exists():
        from safetensors.torch import load_file

        network.load_state_dict(load_file(WEIGHTS))
    return network.eval(), torch.zeros(1, 3, 32, 32)


def mixed() -> tuple[nn.Module, torch.Tensor]:
    """Strided, grouped, transposed, dilated and linear layers in one small network."""
    torch.manual_seed(1)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 24, 3, padding=2, dilation=2),
        nn.ReLU(),
        nn.ConvTranspose2d(24, 16, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    return network.eval(), torch.zeros(1, 3, 16, 16)


def sound() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(2)
    network = nn.Sequential(
        nn.Conv1d(4, 32, 5, padding=2),
        nn.ReLU(),
        nn.Conv1d(32, 32, 7, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(928, 20),
    )
    return network.eval(), torch.zeros(1, 4, 64)


def batches(example: torch.Tensor, count: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(16, *example.shape[1:], generator=random) for _ in range(count)]


MIXED = ("svd", "pca", "tucker2", "messi")
NETWORKS = {"resnet20": resnet20, "mixed": mixed, "sound": sound}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *(("resnet20", {"method": m, "keep": 0.6}) for m in ("alds", "alds+", "alds-error", "alds-simple", "svd-error")),
    *(("resnet20", {"method": m, "keep": 0.6}) for m in ("svd", "svd-energy", "l-rank", "messi", "tucker2", "ft")),
    ("resnet20", {"method": "tucker2"}),
    ("resnet20", {"method": "alds", "macs": 0.5, "error": "max"}),
    ("resnet20", {"method": "alds+", "keep": 0.7, "macs": 0.7, "search": "minimax"}),
    ("resnet20", {"method": "pca", "macs": 0.6, "data": 4}),
    ("resnet20", {"method": "pfp", "keep": 0.7, "data": 2}),
    ("resnet20", {"method": "auto", "keep": 0.5, "error": "energy"}),
    ("resnet20", {"method": "auto", "keep": 0.5}),
    ("resnet20", {"method": "auto", "keep": 0.5, "data": 8}),
    ("resnet20", {"method": "auto", "macs": 0.6, "data": 4, "exclude": "conv1"}),
    ("mixed", {"method": "alds", "keep": 0.6, "error": "exact"}),
    ("mixed", {"method": "messi", "keep": 0.6}),
    ("mixed", {"method": "tucker2", "keep": 0.6}),
    ("mixed", {"method": "auto", "keep": 0.6}),
    ("mixed", {"method": "auto", "keep": 0.6, "data": 4, "recover": 5}),
    ("mixed", {"method": "auto", "macs": 0.6, "data": 4, "rank_multiple": 4}),
    (
        "mixed",
        {
            "method": "auto",
            "keep": 0.6,
            "data": 4,
            "error": "output",
            "decompositions": ("svd", "pca", "tucker2", "messi"),
        },
    ),
    ("sound", {"method": "alds+", "keep": 0.5, "groups": "any"}),
    ("sound", {"method": "auto", "keep": 0.5, "data": 4}),
    ("sound", {"method": "auto", "keep": 0.5}),
    ("sound", {"method": "pca", "keep": 0.6, "data": 4, "fuse": True}),
]


def request(name: str, wanted: dict[str, Any]) -> dict[str, Any]:
    network, example = NETWORKS[name]()
    wanted = dict(wanted)
    if "data" in wanted:
        wanted["data"] = batches(example, wanted["data"])
    start = time.process_time()
    small, plan = rw.compress(network, example, **wanted)
    spent = time.process_time() - start
    weights = hashlib.sha256()
    for key, value in small.state_dict().items():
        weights.update(key.encode())
        weights.update(value.contiguous().numpy().tobytes())
    with torch.no_grad():
        outputs = small(batches(example, 1)[0])
    choices = [
        [
            c.name,
            c.decomposition,
            c.fold,
            c.option.groups if hasattr(c.option, "groups") else c.option.slices,
            c.outer,
            c.rank,
        ]
        for c in plan.choices
    ]
    kept = [[p.name, p.filters, p.channels] for p in plan.pruned]
    return {
        "seconds": round(spent, 2),
        "choices": hashlib.sha256(json.dumps([choices, kept]).encode()).hexdigest()[:16],
        "plan": choices,
        "weights": weights.hexdigest()[:16],
        "outputs": [float(outputs.double().sum()), float(outputs.double().square().sum())],
        "objective": plan.search.objective,
    }


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "compare"):
        sys.exit(__doc__)
    torch.set_num_threads(1)
    path = Path(sys.argv[2])
    before = json.loads(path.read_text()) if sys.argv[1] == "compare" else {}
    found, different = {}, 0
    for name, wanted in REQUESTS:
        key = f"{name} {json.dumps(wanted)}"
        found[key] = mine = request(name, wanted)
        if not before:
            print(f"{mine['seconds']:7.2f} s  {key}", flush=True)
            continue
        theirs = before[key]
        same = [part for part in ("choices", "weights", "outputs", "objective") if mine[part] == theirs[part]]
        different += len(same) < 4
        told = (
            "equal"
            if len(same) == 4
            else f"DIFFERENT {sorted({'choices', 'weights', 'outputs', 'objective'} - set(same))}"
        )
        print(f"{mine['seconds']:7.2f} s (was {theirs['seconds']:.2f})  {told}  {key}", flush=True)
        if len(same) < 4:
            print("    ", theirs["outputs"], mine["outputs"], theirs["objective"], mine["objective"])
    if before:
        print(f"{len(REQUESTS) - different} of {len(REQUESTS)} requests are equal")
    else:
        path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
