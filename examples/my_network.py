"""A network of one's own, with trained weights and a metric of one's own. `new_user.sh` compresses it.

python examples/my_network.py weights.safetensors      # trains for a few seconds and writes the weights
"""

from __future__ import annotations

import sys
from functools import cache

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn


class Network(nn.Module):
    """Any torch.nn.Module will do; rankwise replaces its linear and convolution layers by name."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        )
        self.classifier = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def network() -> nn.Module:
    """The factory that `my_network.py:network` names. It takes no arguments."""
    return Network()


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, and to measure on: handwritten digits that come with scikit-learn."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(bunch.images[:, None], dtype=torch.float32)[order] / 16
    y = torch.tensor(bunch.target)[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


@torch.no_grad()
def metric(net: nn.Module) -> float:
    """The metric that `my_network.py:metric` names: from a network to a number. Here: the worst class's accuracy."""
    _, _, x, y = digits()
    right = net(x).argmax(1) == y
    return 100 * min(float(right[y == digit].float().mean()) for digit in range(10))


def train(net: nn.Module, epochs: int = 5) -> None:
    x, y, _, _ = digits()
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3)
    net.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimiser.step()
    net.eval()


if __name__ == "__main__":
    torch.manual_seed(0)
    trained = network()
    train(trained)
    save_file(trained.state_dict(), sys.argv[1])
    print(f"worst class: {metric(trained):.1f} %")
