"""Narrow modules: take filters and channels out of a module for good, and put zeros back in their place.

A narrowed module is the same object with smaller tensors. It carries `rankwise`, a dict of plain values
that says what was kept, so that it is not compressed again and can be turned back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.layer import LINEAR_KINDS, Layer
from rankwise.core.option import Cost
from rankwise.errors import RankwiseError
from rankwise.planning.plan import Pruned
from rankwise.surgery.effective import CONVS
from rankwise.surgery.modules import MARK, describe, kind_of

# Modules that treat every channel on its own: what comes in is what goes out.
NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class Prunable:
    """A module that can be narrowed: its kind, its stored shape, and what it costs.

    `layer` is None for modules that treat every channel on its own without macs (batch norm, instance norm,
    PReLU); those have `each` params for each of their `outputs`.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    outputs: int
    inputs: int
    layer: Layer | None = None
    each: int = 0

    @property
    def depthwise(self) -> bool:
        return self.layer is not None and self.layer.groups == self.outputs == self.inputs > 1

    @property
    def own(self) -> bool:
        """Whether every channel is on its own here, so that outputs and inputs go together."""
        return self.layer is None or self.depthwise

    def cost(self, outputs: int, inputs: int) -> Cost:
        """Params with the bias, and macs, when so many outputs and inputs are left."""
        if self.layer is None:
            return Cost(self.each * outputs, 0)
        groups = outputs if self.depthwise else self.layer.groups
        layer = replace(self.layer, filters=outputs, channels=inputs, groups=groups)
        return Cost(layer.params + (outputs if layer.bias else 0), layer.macs)


def part_of(module: nn.Module, name: str) -> Prunable | None:
    """What can be narrowed in a module; None for modules that are not known."""
    m: Any = module
    if kind_of(module) is not None:
        layer = describe(module, name)
        if layer.computed:  # from all of its channels: with fewer it would be another weight
            return None
        return Prunable(name, layer.kind, layer.shape, layer.filters, layer.channels, layer)
    if isinstance(module, NORMS):
        n, each = int(m.num_features), 2 if m.affine else 0
    elif isinstance(module, nn.PReLU) and m.num_parameters > 1:
        n, each = int(m.num_parameters), 1
    else:
        return None
    kind = next(c.__name__ for c in type(module).__mro__ if c.__module__.startswith("torch.nn"))
    return Prunable(name, kind, (n,), n, n, None, each)


def narrowed(module: nn.Module) -> dict[str, Any] | None:
    """What was kept of a narrowed module, or None for any other module."""
    mark = vars(module).get(MARK)
    return mark if isinstance(mark, dict) and "filters" in mark else None


def check_entry(module: nn.Module | None, entry: Pruned) -> None:
    """Refuse an entry of a plan that does not fit the module it names."""
    if module is None:
        raise RankwiseError(
            f"the plan was made for another model: it names layer {entry.name!r}, which this one does not have"
        )
    if narrowed(module) is not None:
        raise RankwiseError(
            f"layer {entry.name!r} is already compressed: apply the plan to the original, or densify this one"
        )
    part = part_of(module, entry.name)
    if part is None or (part.kind, part.shape) != (entry.kind, entry.shape):
        here = type(module).__name__ if part is None else f"{part.kind!r} with weight {part.shape}"
        raise RankwiseError(
            f"the plan was made for another model: it has layer {entry.name!r} as {entry.kind!r} with weight "
            f"{entry.shape}, and the model as {here}"
        )
    entry.check(part.outputs, part.inputs)
    if part.depthwise and entry.filters != entry.channels:
        raise RankwiseError(
            f"layer {entry.name!r} of the plan keeps other filters than channels: in a depthwise convolution they "
            f"are the same"
        )
    if part.layer is not None and part.layer.groups > 1 and not part.depthwise:
        raise RankwiseError(
            f"layer {entry.name!r} of the plan is a grouped convolution, and only depthwise ones can be narrowed"
        )


def narrow_(module: nn.Module, entry: Pruned) -> None:
    """Keep only the entry's filters and channels; `check_entry` comes first."""
    part = part_of(module, entry.name)
    assert part is not None, f"{entry.name} cannot be narrowed"
    mark = {
        "kind": part.kind,
        "depthwise": part.depthwise,
        "filters": entry.filters,
        "channels": entry.channels,
        "outputs": part.outputs,
        "inputs": part.inputs,
    }
    _resize_(module, mark, wider=False)
    setattr(module, MARK, mark)


def widen_(module: nn.Module) -> None:
    """Back to the original shape: zeros where something was removed, so that the network's outputs stay the same.

    What a removed channel carries does not matter, because those who read it have zeros for it.
    """
    mark = narrowed(module)
    assert mark is not None, "only narrowed modules can be widened"
    _resize_(module, mark, wider=True)
    delattr(module, MARK)


def _resize_(module: nn.Module, mark: dict[str, Any], wider: bool) -> None:
    """Select the kept indices of every tensor, or spread it over zeros (a variance over ones)."""
    m: Any = module
    sides = (("filters", "outputs"), ("channels", "inputs"))
    for name, *axes in _axes(mark["kind"], mark["depthwise"]):
        old = getattr(m, name, None)
        if old is None:
            continue
        new = old.detach()
        for axis, (kept, wide) in zip(axes, sides, strict=True):
            if axis is not None and mark[kept] is not None:
                fill = 1.0 if name == "running_var" else 0.0
                new = _spread(new, axis, mark[kept], mark[wide], fill) if wider else _select(new, axis, mark[kept])
        setattr(m, name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
    out, into = (mark[wide] if wider or mark[kept] is None else len(mark[kept]) for kept, wide in sides)
    if mark["kind"] == "Linear":
        m.out_features, m.in_features = out, into
    elif mark["kind"] == "Conv1D":
        m.nf, m.nx = out, into
    elif mark["kind"] == "PReLU":
        m.num_parameters = out
    elif mark["kind"] in CONVS:
        m.groups = out if mark["depthwise"] else m.groups
        m.out_channels, m.in_channels = out, into
    else:
        m.num_features = out


def _axes(kind: str, depthwise: bool) -> list[tuple[str, int | None, int | None]]:
    """For every tensor of a module: the axis of its outputs, and that of its inputs."""
    if kind in CONVS or kind in LINEAR_KINDS:
        out, into = (1, 0) if kind == "Conv1D" or kind.startswith("ConvTranspose") else (0, 1)
        return [("weight", 0, None) if depthwise else ("weight", out, into), ("bias", 0, None)]
    return [(name, 0, None) for name in ("weight", "bias", "running_mean", "running_var")]


def _select(tensor: Tensor, axis: int, kept: tuple[int, ...]) -> Tensor:
    return tensor.index_select(axis, torch.tensor(kept, device=tensor.device))


def _spread(tensor: Tensor, axis: int, kept: tuple[int, ...], wide: int, fill: float) -> Tensor:
    shape = list(tensor.shape)
    shape[axis] = wide
    index = torch.tensor(kept, device=tensor.device)
    return tensor.new_full(shape, fill).index_copy(axis, index, tensor)
