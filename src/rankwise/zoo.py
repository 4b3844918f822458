"""Networks of our own: the CIFAR ResNets of He et al. (2016) and a small one for 8×8 digits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Network:
    """How to make a network (keyword arguments: num_classes) and the shape of one input, N×C×H×W."""

    make: Callable[..., nn.Module]
    input: tuple[int, ...]


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut without parameters ("option A" of the paper).

    Where the block halves the image and doubles the channels, the shortcut takes every second pixel and
    pads the new channels with zeros, half of them before the old channels and half after.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.new_channels = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride != 1 or self.new_channels:
            before = self.new_channels // 2
            after = self.new_channels - before
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, after))
        return F.relu(y + x)


class CifarResNet(nn.Module):
    """N×3×32×32 → N×num_classes; `depth` = 6n + 2 layers: n blocks each of 16, 32 and 64 channels."""

    def __init__(self, depth: int, num_classes: int = 10) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks, stride=2)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        out: Tensor = self.linear(torch.mean(x, dim=(2, 3)))
        return out


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)))


def digits_cnn(num_classes: int = 10) -> nn.Sequential:
    """N×1×8×8 → N×num_classes; 75,370 parameters with ten classes, far more than 8×8 digits need."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 32, 3, padding=1, bias=False),
            bn1=nn.BatchNorm2d(32),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
            bn2=nn.BatchNorm2d(64),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(64, 96, 3, padding=1, bias=False),
            bn3=nn.BatchNorm2d(96),
            relu3=nn.ReLU(),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            linear=nn.Linear(96, num_classes),
        )
    )


NETWORKS = {
    **{f"resnet{d}": Network(partial(CifarResNet, d), (1, 3, 32, 32)) for d in (20, 32, 44, 56, 110)},
    "digits-cnn": Network(digits_cnn, (1, 1, 8, 8)),
}
