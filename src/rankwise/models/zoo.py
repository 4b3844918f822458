"""Networks of our own for CIFAR, and a small one for 8×8 digits.

Each takes `num_classes` and `in_channels`, and images of 32×32 unless it says otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.errors import RankwiseError


@dataclass(frozen=True)
class Network:
    """How to make a network (keyword arguments: num_classes, in_channels) and the shape of one input, N×C×H×W."""

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
    """N×3×32×32 → N×num_classes; `depth` = 6n + 2 layers: n blocks each of 16, 32 and 64 channels.

    He et al. (2016), section 4.2.
    """

    def __init__(self, depth: int, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks, stride=2)
        self.linear = nn.Linear(64, num_classes)
        _init_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        out: Tensor = self.linear(torch.mean(x, dim=(2, 3)))
        return out


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)))


def _init_(model: nn.Module, mode: Literal["fan_in", "fan_out"] = "fan_in") -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode=mode)
            if module.bias is not None and isinstance(module, nn.Conv2d):
                nn.init.zeros_(module.bias)


_VGG16 = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512)


class CifarVGG(nn.Module):
    """N×3×32×32 → N×num_classes: configuration D of Simonyan & Zisserman (2015) with batch norm, for CIFAR.

    Its three wide layers at the end would hold 120 M parameters; on CIFAR they are replaced by the mean over
    the last 2×2 positions and one linear layer, which leaves the 14.7 M that the pruning literature counts
    (for instance Liu et al. 2019, "Rethinking the value of network pruning").
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(OrderedDict(_vgg_layers(in_channels)))
        self.classifier = nn.Linear(512, num_classes)
        _init_(self, "fan_out")

    def forward(self, x: Tensor) -> Tensor:
        if min(x.shape[-2:]) < 16:
            raise RankwiseError(
                f"vgg16 halves its images four times, and these have {x.shape[-2]}×{x.shape[-1]} pixels"
            )
        out: Tensor = self.classifier(torch.mean(self.features(x), dim=(2, 3)))
        return out


def _vgg_layers(channels: int) -> Iterator[tuple[str, nn.Module]]:
    conv = pool = 0
    for width in _VGG16:
        if isinstance(width, str):
            pool += 1
            yield f"pool{pool}", nn.MaxPool2d(2)
            continue
        conv += 1
        yield f"conv{conv}", nn.Conv2d(channels, width, 3, padding=1, bias=False)
        yield f"bn{conv}", nn.BatchNorm2d(width)
        yield f"relu{conv}", nn.ReLU(inplace=True)
        channels = width


class DenseLayer(nn.Module):
    """1×1 to 4·growth channels, 3×3 to `growth` channels, which join the input: the bottleneck of DenseNet-BC."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))
        return torch.cat((x, new), dim=1)


class Transition(nn.Module):
    """1×1 to half the channels, then half the image."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, inputs // 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.bn(x))), 2)


class CifarDenseNet(nn.Module):
    """N×3×32×32 → N×num_classes: DenseNet-BC of Huang et al. (2017), 6n + 4 layers, compression 0.5.

    With growth 12 the paper's own depth 100 has 0.8 M parameters, which checks the construction; the ALDS
    paper uses depth 22 (71,686 parameters).
    """

    def __init__(self, depth: int = 22, growth: int = 12, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise RankwiseError(f"depth {depth} was given: a DenseNet-BC has 6n + 4 layers, such as 22, 40 or 100")
        channels = 2 * growth
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        for block in (1, 2, 3):
            layers = [DenseLayer(channels + i * growth, growth) for i in range((depth - 4) // 6)]
            channels += len(layers) * growth
            stages[f"dense{block}"] = nn.Sequential(*layers)
            if block < 3:
                stages[f"transition{block}"] = Transition(channels)
                channels //= 2
        self.features = nn.Sequential(stages)
        self.bn = nn.BatchNorm2d(channels)
        self.linear = nn.Linear(channels, num_classes)
        _init_(self, "fan_out")

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(self.conv1(x))
        out: Tensor = self.linear(torch.mean(F.relu(self.bn(x)), dim=(2, 3)))
        return out


class WideBlock(nn.Module):
    """Batch norm and ReLU before each of two 3×3 convolutions; a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ready = F.relu(self.bn1(x))
        y: Tensor = self.conv2(F.relu(self.bn2(self.conv1(ready))))
        return y + (x if self.shortcut is None else self.shortcut(ready))


class WideResNet(nn.Module):
    """N×3×32×32 → N×num_classes: WRN-depth-width of Zagoruyko & Komodakis (2016), 6n + 4 layers.

    WRN-16-8 has 11.0 M parameters (their table 4).
    """

    def __init__(self, depth: int = 16, width: int = 8, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise RankwiseError(f"depth {depth} was given: a wide ResNet has 6n + 4 layers, such as 16, 22 or 28")
        blocks = (depth - 4) // 6
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        channels = 16
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        for stage, (outputs, stride) in enumerate(((16 * width, 1), (32 * width, 2), (64 * width, 2)), start=1):
            first = WideBlock(channels, outputs, stride)
            rest = [WideBlock(outputs, outputs, 1) for _ in range(blocks - 1)]
            stages[f"layer{stage}"] = nn.Sequential(first, *rest)
            channels = outputs
        self.features = nn.Sequential(stages)
        self.bn = nn.BatchNorm2d(channels)
        self.linear = nn.Linear(channels, num_classes)
        _init_(self, "fan_out")

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(self.conv1(x))
        out: Tensor = self.linear(torch.mean(F.relu(self.bn(x)), dim=(2, 3)))
        return out


def digits_cnn(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """N×1×8×8 → N×num_classes; 75,370 parameters with ten classes, far more than 8×8 digits need."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 32, 3, padding=1, bias=False),
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


_CIFAR = (1, 3, 32, 32)
NETWORKS = {
    **{f"resnet{d}": Network(partial(CifarResNet, d), _CIFAR) for d in (20, 32, 44, 56, 110)},
    "vgg16": Network(CifarVGG, _CIFAR),
    "densenet22": Network(CifarDenseNet, _CIFAR),
    "wrn16-8": Network(WideResNet, _CIFAR),
    "digits-cnn": Network(digits_cnn, (1, 1, 8, 8)),
}
