"""Batch norms folded into the layers before them, for inference: fewer passes over memory, the same function.

    norm(W x + b) = (s W) x + s (b − μ) + β,   s = γ / √(σ² + ε)

Which norm follows which layer is seen while an example runs, and believed only after a trial: a layer whose output is
read by anybody else as well keeps its norm, because the network would not give the same outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.errors import RankwiseError
from rankwise.surgery.forward import Example, run_example, tensors_of, undisturbed
from rankwise.surgery.hooks import Look, Seen, watching
from rankwise.surgery.modules import mark_of
from rankwise.surgery.replace import copy_model, swap_modules_

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
SAME = 1e-9  # relative, in float64


def fuse(model: nn.Module, example: Example) -> nn.Module:
    """A copy of the model for inference: every batch norm that can be is folded into the layer before it.

    Args:
        model: a network, compressed or not.
        example: an input; it shows which norm follows which layer.

    Returns:
        A network with the same outputs in eval mode.

    >>> import torch, rankwise as rw
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval()
    >>> x = torch.randn(1, 3, 8, 8)
    >>> rw.fuse(model, x)[1]
    Identity()
    """
    return fuse_norms(model, find_norms(model, example))


def find_norms(model: nn.Module, example: Example | None) -> dict[str, str]:
    """Batch norms that can be folded, each with the layer (or pair) that takes it; empty where there is no example."""
    if example is None:
        return {}
    found = followers(model, example)
    exact = copy_model(model).double()
    wanted = _outputs(exact, example)
    if not _same(wanted, _outputs(fuse_norms(exact, found), example)):
        found = {
            norm: la for norm, la in found.items() if _same(wanted, _outputs(fuse_norms(exact, {norm: la}), example))
        }
    return found


def fuse_norms(model: nn.Module, norms: Mapping[str, str]) -> nn.Module:
    """A copy of the model with these norms folded into these layers."""
    fused = copy_model(model)
    fuse_norms_(fused, norms)
    return fused


def fuse_norms_(model: nn.Module, norms: Mapping[str, str], fill: bool = True) -> None:
    """Fold norms into layers, in place. Without `fill` the weights are left for a file to set."""
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    for norm, name in norms.items():
        layer = _last(modules[name]) if name in modules else None
        if not isinstance(layer, LAYERS) or not isinstance(modules.get(norm), NORMS):
            raise RankwiseError(
                f"the plan folds {norm!r} into {name!r}, which this model does not have as a batch norm and a layer: "
                f"give the model that it was made for"
            )
        if layer.bias is None:
            zeros = layer.weight.new_zeros(layer.weight.shape[0])
            layer.bias = nn.Parameter(zeros, requires_grad=layer.weight.requires_grad)
        if fill:
            _fold_(layer, modules[norm])
    swap_modules_(model, {modules[norm]: nn.Identity() for norm in norms})


def _fold_(layer: Any, norm: Any) -> None:
    with torch.no_grad():
        mean, variance = norm.running_mean.double(), norm.running_var.double()
        scale = (variance + norm.eps).rsqrt() * (1.0 if norm.weight is None else norm.weight.double())
        shift = -mean * scale + (0.0 if norm.bias is None else norm.bias.double())
        layer.bias.copy_(layer.bias.double() * scale + shift)
        layer.weight.copy_(layer.weight.double() * scale.reshape(-1, *[1] * (layer.weight.ndim - 1)))


def _last(module: nn.Module) -> nn.Module:
    """The layer itself, or the last factor of a pair."""
    return list(module.children())[-1] if mark_of(module) is not None else module


def followers(model: nn.Module, example: Example) -> dict[str, str]:
    """Norms whose only input, in one call, is the very output of one call of a layer."""
    outputs: list[tuple[str, Tensor]] = []
    inputs: list[tuple[str, Tensor]] = []
    after: dict[str, Look] = {}
    before: dict[str, Look] = {}
    inner: set[nn.Module] = set()

    def made(name: str, call: Seen) -> None:
        outputs.append((name, call.output))

    def read(name: str, call: Seen) -> None:
        inputs.append((name, call.given))

    for name, module in model.named_modules():
        if mark_of(module) is not None:
            inner.update(module.modules())
        if isinstance(_last(module), LAYERS) and (module not in inner or mark_of(module) is not None):
            after[name] = partial(made, name)
        elif isinstance(module, NORMS) and module.running_mean is not None:
            before[name] = partial(read, name)
    if not before:
        return {}
    with undisturbed(model), watching(model, after, before):
        run_example(model, example)
    makers = {id(out): name for name, out in outputs}  # the lists keep the tensors, so no id comes twice
    called = [name for name, _ in outputs]
    pairs = [(norm, makers[id(given)]) for norm, given in inputs if id(given) in makers]
    norms, layers = [norm for norm, _ in inputs], [la for _, la in pairs]
    return {n: la for n, la in pairs if norms.count(n) == 1 and called.count(la) == 1 and layers.count(la) == 1}


def _outputs(model: nn.Module, example: Example) -> list[Tensor]:
    with undisturbed(model):
        return tensors_of(run_example(model, example))


def _same(wanted: list[Tensor], given: list[Tensor]) -> bool:
    return len(wanted) == len(given) and all(
        a.shape == b.shape and bool(((a - b).abs().max() <= SAME * a.abs().max().clamp_min(1e-30)).item())
        for a, b in zip(wanted, given, strict=True)
        if a.numel() and a.is_floating_point()
    )
