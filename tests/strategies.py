"""Hypothesis strategies: a small module of every kind that rankwise decomposes, and an input for it.

All weights are float64, so that a law holds to many digits or not at all. The helpers below the
strategies are a second, independent reading of docs/math.md in numpy: nothing here uses rankwise.fold.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn

from rankwise.core.fold import all_folds
from rankwise.core.layer import Layer
from rankwise.core.option import Option
from rankwise.methods import METHODS, needs_data
from rankwise.planning.planner import Settings

CONVS = ("Conv1d", "Conv2d", "Conv3d")
TRANSPOSED = ("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
LINEAR = ("Linear", "Conv1D") if find_spec("transformers") else ("Linear",)
KINDS = (*LINEAR, *CONVS, *TRANSPOSED)
# Methods that decompose slices of the weights; the others have tests of their own.
DATA_FREE = sorted(
    name
    for name, method in METHODS.items()
    if isinstance(method.settings, Settings)
    and not needs_data(method.settings)
    and method.settings.decompositions == ("svd",)
)

Case = tuple[nn.Module, Tensor]


def cases(kind: str) -> st.SearchStrategy[Case]:
    """A module of one kind with random weights, and an input that fits it."""
    return linear_cases(kind) if kind in LINEAR else conv_cases(kind)


@st.composite
def linear_cases(draw: st.DrawFn, kind: str = "Linear") -> Case:
    c, f = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    rows = draw(st.sampled_from([(1,), (3,), (2, 3), (2, 1, 2), ()]))
    if kind == "Conv1D":
        from transformers.pytorch_utils import Conv1D

        module: nn.Module = Conv1D(f, c)
        rows = rows or (1,)  # it cannot take a single vector
    else:
        module = nn.Linear(c, f, bias=draw(st.booleans()))
    return _filled(draw, module, (*rows, c))


@st.composite
def conv_cases(draw: st.DrawFn, kind: str) -> Case:
    """Kernel axes of 1, stride, dilation, every padding and padding mode, groups, with or without bias."""
    dims = int(kind[-2])
    few = 3 if dims < 3 else 2  # sizes stay small where there are three axes
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    c = groups * draw(st.integers(1 if groups == 1 else 2, 7 if groups == 1 else 4))
    f = groups * draw(st.integers(1, 5 if groups == 1 else 3))

    def axes(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel, stride, dilation = axes(1, 3 if few == 2 else 4), axes(1, few), axes(1, 2)
    reach = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    size = tuple(r + draw(st.integers(0, few)) for r in reach)
    args: dict[str, Any] = {"dilation": dilation, "groups": groups, "bias": draw(st.booleans())}
    if kind in CONVS:
        args["padding_mode"] = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
        args["padding"] = draw(_paddings(size))
        if args["padding"] == "same":
            stride = (1,) * dims
    else:
        args["padding"] = tuple(draw(st.integers(0, 2)) for _ in range(dims))
        most = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
        args["output_padding"] = tuple(draw(st.integers(0, m)) for m in most)
        size = axes(1, few + 1)
        parts = zip(size, stride, args["padding"], reach, args["output_padding"], strict=True)
        assume(all((i - 1) * s - 2 * p + r + o >= 1 for i, s, p, r, o in parts))
    module = getattr(nn, kind)(c, f, kernel, stride=stride, **args)
    return _filled(draw, module, (draw(st.integers(1, 3)), c, *size))


def _paddings(size: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """An int, one for each axis, or a word; below the input's size, as reflection demands."""
    one = st.integers(0, min(2, min(size) - 1))
    each = st.tuples(*(st.integers(0, min(2, s - 1)) for s in size))
    return st.one_of(one, each, st.sampled_from(["same", "valid"]))


def _filled(draw: st.DrawFn, module: nn.Module, shape: tuple[int, ...]) -> Case:
    """Weights of full rank mostly; sometimes of rank one, partly zero, or with equal singular values."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    module = module.double()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    weight = module.weight.data
    match draw(st.sampled_from(["plain", "plain", "plain", "ones", "gaps", "signs"])):
        case "ones":
            weight.fill_(0.5)
        case "gaps":
            weight.mul_(torch.rand(weight.shape, generator=generator) < 0.3)
        case "signs":
            weight.sign_()
    return module, torch.randn(shape, generator=generator, dtype=torch.float64)


def every_option(layer: Layer) -> list[Option]:
    """Every fold with every number of slices that can be built."""
    c = layer.group_channels
    if layer.groups > 1:
        ks = [k for k in range(1, c + 1) if c % k == 0]
    else:
        ks = sorted({-(-c // -(-c // k)) for k in range(1, c + 1)})  # slices of ⌈c/k⌉, as many as it takes
    return [Option(fold, k) for fold in all_folds(layer.dims) for k in ks]


# An independent way: numpy, straight from the definition.


def blocks(weight: Tensor, module: nn.Module) -> list[np.ndarray]:
    """The weight of each layer group as (filters, channels, *kernel)."""
    w = weight.detach().numpy()
    if type(module).__name__ == "Conv1D":
        return [w.T]
    parts = np.split(w, getattr(module, "groups", 1))
    return [p.swapaxes(0, 1) for p in parts] if type(module).__name__ in TRANSPOSED else parts


def slices(block: np.ndarray, option: Option) -> list[np.ndarray]:
    """Cut the channels first, then fold every slice into a matrix, entry by entry."""
    f, c, *kernel = block.shape
    letters = "dhw"[3 - len(kernel) :]
    left, right = (side[1:] for side in option.fold.split("│"))
    width = -(-c // option.slices)
    found = []
    for start in range(0, c, width):
        piece = block[:, start : start + width]
        rows = [(i, t) for i in range(f) for t in np.ndindex(*(kernel[letters.index(a)] for a in left))]
        columns = [
            (i, t) for i in range(piece.shape[1]) for t in np.ndindex(*(kernel[letters.index(a)] for a in right))
        ]
        matrix = np.empty((len(rows), len(columns)))
        for r, (i, s) in enumerate(rows):
            for q, (j, t) in enumerate(columns):
                place = dict(zip(left + right, s + t, strict=True))
                matrix[r, q] = piece[(i, j, *(place[a] for a in letters))]
        found.append(matrix)
    return found


def operator_norm(weight: Tensor, module: nn.Module, option: Option) -> float:
    """‖W‖₂ of the fold's matrix, the largest over the layer groups."""
    return max(float(np.linalg.norm(np.hstack(slices(b, option)), 2)) for b in blocks(weight, module))
