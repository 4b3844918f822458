"""Tutorial 1: compress a network with data that has labels, see what it cost, save it and read it back.

python examples/compress_with_data.py --out small/
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from my_network import digits, network, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankwise as rw


@torch.no_grad()
def accuracy(net: nn.Module) -> float:
    _, _, x, y = digits()
    return 100 * float((net(x).argmax(1) == y).float().mean())


def main(out: Path, epochs: int = 8) -> dict[str, float]:
    torch.manual_seed(0)
    model = network()
    train(model, epochs)
    x, y, test, _ = digits()

    # A loader as it is used for training. Labels are dropped, and the plan says so.
    loader = DataLoader(TensorDataset(x[:512], y[:512]), batch_size=64)
    small, plan = rw.compress(model, x[:1], keep=0.3, data=loader)
    print(plan.summary())
    for sentence in plan.warnings:
        print("note:", sentence)

    # The same budget without data: inputs are made up from the statistics that batch norms remember.
    blind, _ = rw.compress(model, x[:1], keep=0.3)

    rw.save(small, plan, out)
    again = rw.load(out, network()).eval()
    assert torch.equal(again(test), small(test)), "a folder gives back the same network"
    found = {"before": accuracy(model), "with data": accuracy(small), "without data": accuracy(blind)}
    for name, percent in found.items():
        print(f"{name}: {percent:.2f} %")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("small"))
    parser.add_argument("--epochs", type=int, default=8)
    given = parser.parse_args()
    main(given.out, given.epochs)
