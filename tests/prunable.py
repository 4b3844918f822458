"""Small networks with every way in which channels meet, for the tests of filter pruning."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.models import networks


class Concat(nn.Module):
    """Densely connected: every layer reads all that came before, in the order of a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.second = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3, padding=1, bias=False))
        self.third = nn.Sequential(nn.BatchNorm2d(11), nn.ReLU(), nn.Conv2d(11, 4, 3, padding=1, bias=False))
        self.head = nn.Linear(15, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.cat([x, self.second(x)], 1)
        x = torch.cat([self.third(x), x], 1)
        return self.head(F.relu(x).mean((2, 3)))


class Residual(nn.Module):
    """A block with a 1×1 shortcut and a block without."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.a1, self.a2 = nn.Conv2d(8, 10, 3, stride=2, padding=1), nn.Conv2d(10, 12, 3, padding=1)
        self.short = nn.Conv2d(8, 12, 1, stride=2)
        self.b1, self.b2 = nn.Conv2d(12, 6, 1), nn.Conv2d(6, 12, 1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.a2(F.relu(self.a1(x))) + self.short(x))
        x = x + self.b2(F.relu(self.b1(x)))
        return self.head(x.mean((2, 3)))


class Squeeze(nn.Module):
    """Inverted residual with a depthwise convolution and a gate for every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.expand, self.norm = nn.Conv2d(6, 12, 1, bias=False), nn.BatchNorm2d(12)
        self.depth = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.down, self.up = nn.Linear(12, 4), nn.Linear(4, 12)
        self.project = nn.Conv2d(12, 6, 1)
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        y = F.relu6(self.depth(F.relu6(self.norm(self.expand(x)))))
        gate = torch.sigmoid(self.up(F.relu(self.down(y.mean((2, 3))))))
        x = x + self.project(y * gate[:, :, None, None])
        return {"out": self.head(x)}


class Shared(nn.Module):
    """One layer called twice, so that its inputs and outputs are the same channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.twice, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.twice(F.relu(self.twice(F.relu(self.stem(x)))))))


class Halves(nn.Module):
    """Splits its channels in the middle, wherever that is: removing some would mix the halves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(5, 8), nn.Linear(4, 6), nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.stem(x).chunk(2, 1)
        return self.head(F.relu(self.left(a) + self.right(b)))


class Normed(nn.Module):
    """A transformer's feed-forward block: the inside can be pruned, what the layer norm sees cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(5, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))


class Scaled(nn.Module):
    """A parameter of the network's own for every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.mid(F.relu(self.stem(x)) * self.scale)))


def flat() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3), nn.PReLU(),
        nn.Flatten(), nn.Linear(6 * 4, 9), nn.ReLU(), nn.Linear(9, 4),
    )  # fmt: skip


def upward() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.InstanceNorm2d(8, affine=True), nn.Tanh(),
        nn.ConvTranspose2d(8, 6, 3, stride=2, output_padding=1), nn.BatchNorm2d(6, affine=False),
        nn.ConvTranspose2d(6, 4, 2, stride=2, bias=False), nn.ELU(), nn.Conv2d(4, 2, 3),
    )  # fmt: skip


def lines() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 8, 3, padding="same"), nn.BatchNorm1d(8), nn.SiLU(),
        nn.Conv1d(8, 6, 3, padding=1, padding_mode="reflect", bias=False), nn.ReLU(), nn.Conv1d(6, 2, 1),
    )  # fmt: skip


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 30, 3), nn.ReLU(),
        nn.Conv2d(30, 2, 1),
    )  # fmt: skip


IMAGE, ROW = (2, 3, 11, 11), (2, 5)
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "concat": (Concat, IMAGE),
    "residual": (Residual, IMAGE),
    "squeeze": (Squeeze, IMAGE),
    "flat": (flat, IMAGE),
    "upward": (upward, IMAGE),
    "lines": (lines, (2, 3, 12)),
    "grouped": (grouped, IMAGE),
    "shared": (Shared, ROW),
    "halves": (Halves, ROW),
    "normed": (Normed, ROW),
    "scaled": (Scaled, ROW),
    "resnet20": (lambda: networks.build("resnet20"), (1, 3, 32, 32)),
    "digits-cnn": (lambda: networks.build("digits-cnn"), (2, 1, 8, 8)),
}


def make(name: str) -> tuple[nn.Module, Tensor]:
    """A network in float64 and eval mode with seeded weights and busy batch norms, and an input."""
    torch.manual_seed(0)
    build, shape = NETS[name]
    model = build().double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.normal_(std=0.2)
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.3)
    return model, torch.randn(shape, dtype=torch.float64)


class Unseen(nn.Module):
    """A branch that runs only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.extra, self.head, self.side = (
            nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2),
        )  # fmt: skip

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        out: Tensor = self.head(F.relu(self.used(x)))
        return out + self.side(F.relu(self.extra(x))) if other else out
