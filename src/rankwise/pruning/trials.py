"""Trials: whether channels can really be taken out, decided by running the network and not by its graph.

A network without some channels must give what the whole network gives when every layer that reads those
channels sees zeros in their place. Both are run on a copy with random weights in float64: whether a
mapping is right does not depend on the weights, and random ones hide no mistake behind a dead channel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.layer import LINEAR_KINDS
from rankwise.errors import RankwiseError
from rankwise.planning.plan import Pruned
from rankwise.surgery.forward import Example, run_example, tensors_of, undisturbed
from rankwise.surgery.hooks import Look, Seen, watching
from rankwise.surgery.macs import counter
from rankwise.surgery.modules import kind_of
from rankwise.surgery.narrow import NORMS, narrow_, part_of
from rankwise.surgery.replace import copy_model

NEEDED = "the network cannot run without all of its channels"
OUTPUT = "its filters are what the network gives out"
MIXED = "without its channels the others change too, or torch-pruning cannot follow its graph"
SILENT = "the network gives nothing but zeros, so that nothing can be tried"
OUTSIDE = "the network multiplies its channels outside of its layers"
TOLERANCE = 1e-8  # of the largest output, in float64
Dead = Mapping[str, list[int]]  # inputs that a layer must not see, by layer


def random_copy(model: nn.Module) -> nn.Module:
    """The same network in float64 and eval mode, with random weights of usual sizes."""
    probe = copy_model(model).double().eval()
    random = torch.Generator().manual_seed(0)

    def around(t: Tensor, middle: float, reach: float) -> None:
        t.uniform_(middle - reach, middle + reach, generator=random if t.device.type == "cpu" else None)

    with torch.no_grad():
        for module in probe.modules():
            part = part_of(module, "")
            for name, value in module.named_parameters(recurse=False):
                if part is not None and part.layer is not None and name == "weight":
                    around(value, 0.0, math.sqrt(6 * part.outputs / max(1, value.numel())))
                elif isinstance(module, NORMS) and name == "weight":
                    around(value, 1.0, 0.5)
                elif value.is_floating_point():
                    around(noise := torch.empty_like(value), 0.0, 0.2)
                    value.add_(noise)
            if isinstance(module, NORMS) and module.running_var is not None:
                assert isinstance(module.running_mean, Tensor)
                around(module.running_mean, 0.0, 0.2)
                around(module.running_var, 1.0, 0.5)
    return probe


def why_not(probe: nn.Module, example: Example, entries: list[Pruned], dead: Dead, macs: int) -> str | None:
    """None if the narrowed network is right, counted macs included; otherwise the reason why it is not."""
    example = _lively(example)
    whole, _ = _run(probe, example, dead)
    if not any(bool(t.any()) for t in whole):
        return SILENT
    try:
        with _narrow(probe, entries):
            thin, counted = _run(probe, example, {})
    except RankwiseError:
        return NEEDED
    if [t.shape for t in whole] != [t.shape for t in thin]:
        return OUTPUT
    if not all(_same(a, b) for a, b in zip(whole, thin, strict=True)):
        return MIXED
    return None if counted == macs else OUTSIDE


def _lively(example: Example) -> Example:
    """The example with random numbers in place of tensors that are all one number: zeros would hide mistakes."""
    if isinstance(example, Mapping):
        return {k: _lively(v) for k, v in example.items()}
    if isinstance(example, tuple | list):
        return tuple(_lively(v) for v in example)
    if not isinstance(example, Tensor) or not example.is_floating_point() or example.numel() < 2:
        return example
    if not bool((example == example.flatten()[0]).all()):
        return example
    return torch.randn(example.shape, generator=torch.Generator().manual_seed(1)).to(example)


def _same(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    size = float(a.abs().max()) if a.numel() else 0.0
    return math.isfinite(size) and bool(((a - b).abs() <= TOLERANCE * size).all())


def _run(probe: nn.Module, example: Example, dead: Dead) -> tuple[list[Tensor], int]:
    blind = {name: _blind(probe.get_submodule(name), indices) for name, indices in dead.items()}
    with undisturbed(probe), watching(probe, before=blind), counter() as counted:
        torch.manual_seed(0)  # undisturbed puts the user's random state back
        return tensors_of(run_example(probe, example)), counted.get_total_flops() // 2


def _blind(module: Any, indices: list[int]) -> Look:
    """Puts zeros in place of some of a layer's inputs."""
    after = 0 if kind_of(module) in LINEAR_KINDS else len(module.kernel_size)

    def look(call: Seen) -> Tensor:
        zero = torch.tensor(indices, device=call.given.device)
        return call.given.index_fill(call.given.ndim - after - 1, zero, 0.0)

    return look


@contextmanager
def _narrow(model: nn.Module, entries: list[Pruned]) -> Iterator[None]:
    """Narrow modules for a while: the tensors of the wide ones are kept aside, not copied."""
    modules = {entry.name: model.get_submodule(entry.name) for entry in entries}
    saved = {
        name: {**vars(m), "_parameters": dict(m._parameters), "_buffers": dict(m._buffers)}
        for name, m in modules.items()
    }
    try:
        for entry in entries:
            narrow_(modules[entry.name], entry)
        yield
    finally:
        for name, module in modules.items():
            vars(module).clear()
            vars(module).update(saved[name])
