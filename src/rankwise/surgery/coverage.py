"""Coverage: which modules of a network can be decomposed, and why the others are left alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from rankwise.core.layer import Coverage, Layer, Skipped
from rankwise.errors import RankwiseError
from rankwise.surgery.effective import was_tried
from rankwise.surgery.forward import Example, Observed, observe
from rankwise.surgery.modules import describe, is_lookup, kind_of, mark_of
from rankwise.surgery.narrow import narrowed

# Reasons that are no gap in coverage: there is nothing to decompose, or the user said so.
OTHER_KIND = "not a linear or convolution layer"
EXCLUDED = "excluded by name"
COMPRESSED = "already compressed"
# Reasons that concern pairs of layers, and not the removal of filters.
DEPTHWISE = "depthwise: every filter sees one channel"
HOOKS = "it has hooks, which a replacement would lose"
# Modules that compute with matrices of their own, which no plain module of torch can stand in for.
ATTENTION = "it multiplies with its projections itself, and torch has no attention whose projections are modules"
RECURRENT = "its matrices are read by one fused call for all steps, and torch has no such call for pairs"
EXPERTS = "its experts are one tensor with three axes, and torch has no module that takes pairs in place of it"
ROWS = 5  # of an embedding for each of its columns, at least
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def find_layers(model: nn.Module, example: Example | None = None, exclude: Iterable[str] | str = ()) -> Coverage:
    """Every module with parameters: a `Layer` that can be decomposed, or `Skipped` with the reason.

    Args:
        model: any network; it is left exactly as it was.
        example: an input (a tensor, a tuple of arguments or a dict of keyword arguments), to count positions in eval
            mode. Without one, multiply-adds are not counted.
        exclude: names or patterns of layers to leave alone, such as "layer1.*".

    Returns:
        A `Coverage`: layers, skipped, params and macs of the whole network.

    >>> import torch, rankwise as rw
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval()
    >>> x = torch.randn(1, 3, 8, 8)
    >>> coverage = rw.find_layers(model, x)
    >>> [layer.name for layer in coverage.layers], coverage.params
    (['0', '3'], 2800)
    """
    need_python_modules(model)
    patterns = [exclude] if isinstance(exclude, str) else list(exclude or ())
    if not all(isinstance(p, str) for p in patterns):
        raise RankwiseError(f"exclude={exclude!r} was given: give names or patterns of layers, such as 'layer1.*'")
    _check_patterns(model, patterns)
    owners = _owners(model)
    excluded = {m for n, m in model.named_modules(remove_duplicate=False) if _matches(n, patterns)}
    layers: dict[str, nn.Module] = {}
    skipped = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if mark_of(module) is not None:
            inside = (*inside, name + "." if name else "")
            skipped.append(Skipped(name, "pair", _numel(module.parameters()), COMPRESSED))
        if name.startswith(inside) and inside:
            continue
        own = list(module.parameters(recurse=False))
        if not own and not is_parametrized(module):
            continue
        reason = COMPRESSED if narrowed(module) is not None else _reason(model, name, module, owners, excluded)
        if reason is None:
            layers[name] = module
        elif mark_of(module) is None:
            skipped.append(Skipped(name, type(module).__name__, _numel(own), reason))
    lookups = _lookups(model, owners, excluded)
    observed = None if example is None else observe(model, example, layers | _modules_of(model, lookups))
    found, names = [], _names(model)
    for name, module in layers.items():
        reason = observed.unfit.get(name) if observed else None
        if reason:
            skipped.append(Skipped(name, type(module).__name__, _numel(module.parameters()), reason))
        else:
            calls = observed.calls[name] if observed else None
            aliases = tuple(other for other in names[module] if other != name)
            found.append(replace(describe(module, name), calls=calls, aliases=aliases))
    macs = observed.macs if observed else None
    embeddings = tuple(_seen(layer, observed) for layer in lookups if not _unfit(layer, observed))
    return Coverage(tuple(found), tuple(skipped), _numel(model.parameters()), macs, embeddings)


def _lookups(model: nn.Module, owners: dict[int, set[str]], excluded: set[nn.Module]) -> list[Layer]:
    """Embeddings with their heads: linear layers that have the same parameter, and nothing else has it."""
    found, names = [], _names(model)
    for name, module in model.named_modules():
        if not is_lookup(module) or not name or _lookup_reason(model, name, owners, excluded):
            continue
        weight = cast(Tensor, module.weight)
        heads = sorted(owners[_place(weight)] - {name})
        aliases = tuple(other for other in names[module] if other != name)
        found.append(replace(describe(module, name), heads=tuple(heads), aliases=aliases))
    return found


def _lookup_reason(model: nn.Module, name: str, owners: dict[int, set[str]], excluded: set[nn.Module]) -> bool:
    """Whether something forbids to decompose an embedding, by itself or by a head of it.

    Tables of few rows stay, those of positions and types: one of them is not like another, and inputs hardly ever show
    all of them, so a fit would give up the others.
    """
    weight = cast(nn.Embedding, model.get_submodule(name)).weight
    if weight.ndim != 2 or len(weight) < ROWS * weight.shape[1]:
        return True
    if type(weight) is not nn.Parameter or weight.is_meta or weight.dtype not in DTYPES or not weight.numel():
        return True
    for user in owners[_place(weight)]:
        module = model.get_submodule(user)
        if module in excluded or is_parametrized(module) or any(getattr(module, h) for h in _HOOKS):
            return True
        if user != name and not (type(module) is nn.Linear and module.weight is weight):
            return True
    return False


def _modules_of(model: nn.Module, lookups: list[Layer]) -> dict[str, nn.Module]:
    return {name: model.get_submodule(name) for layer in lookups for name in (layer.name, *layer.heads)}


def _unfit(layer: Layer, observed: Observed | None) -> bool:
    return observed is not None and any(name in observed.unfit for name in (layer.name, *layer.heads))


def _seen(layer: Layer, observed: Observed | None) -> Layer:
    if observed is None:
        return layer
    rows = sum(call.count for head in layer.heads for call in observed.calls[head])
    return replace(layer, calls=observed.calls[layer.name], head_rows=rows)


def need_python_modules(model: object) -> None:
    """Refuse what is no network, and what torch.jit has compiled: its modules cannot be replaced."""
    if not isinstance(model, nn.Module):
        raise RankwiseError(f"a torch.nn.Module is needed, and {type(model).__name__} was given")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"the module {name!r} of the model" if name else "the model"
            raise RankwiseError(
                f"{what} was compiled by torch.jit ({type(module).__name__}): give the network it was made from, and "
                f"compile the result"
            )


def _numel(parameters: Iterable[Tensor]) -> int:
    # A parameter that has no size yet counts as nothing.
    return sum(p.numel() for p in parameters if not isinstance(p, UninitializedParameter))


def _check_patterns(model: nn.Module, patterns: list[str]) -> None:
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in patterns:
        if not any(_matches(name, [pattern]) for name in names):
            some = ", ".join(n for n in names[1:5]) or "none"
            raise RankwiseError(f"the pattern {pattern!r} to exclude matches no module: names here are like {some}")


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, p) or name.startswith(p + ".") for p in patterns)


def _owners(model: nn.Module) -> dict[int, set[str]]:
    """For every place in memory that holds a parameter: the modules (by first name) that use it."""
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, UninitializedParameter) and parameter.numel():
                owners.setdefault(_place(parameter), set()).add(name)
    return owners


def tied_to(model: nn.Module, name: str) -> str | None:
    """Another module that holds one of this module's own parameters, or None."""
    owners = _owners(model)
    own = [p for p in model.get_submodule(name).parameters(recurse=False) if p.numel()]
    return next((other for p in own for other in sorted(owners[_place(p)] - {name})), None)


def _place(parameter: Tensor) -> int:
    return (parameter.layout is torch.strided and parameter.data_ptr()) or id(parameter)


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _reason(
    model: nn.Module, name: str, module: nn.Module, owners: dict[int, set[str]], excluded: set[nn.Module]
) -> str | None:
    """Why a module is left alone; None if it can be decomposed."""
    if module in excluded:
        return EXCLUDED
    if isinstance(module, nn.MultiheadAttention):
        return ATTENTION
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return RECURRENT
    kind = kind_of(module)
    if kind is None:
        if "experts" in type(module).__name__.lower() and any(p.ndim == 3 for p in module.parameters(recurse=False)):
            return EXPERTS
        base = next((c.__name__ for c in type(module).__mro__[1:] if kind_of_class(c)), None)
        return f"{type(module).__name__} changes how {base} works" if base else OTHER_KIND
    if name == "":
        return "the model is this single layer: wrap it in nn.Sequential to decompose it"
    weight = module._parameters.get("weight")
    if is_parametrized(module) or weight is None:
        return "its weight is parametrised (weight norm, spectral norm or the like)"
    if isinstance(weight, UninitializedParameter) or weight.is_meta:
        return "its weight has no values yet"
    if weight.dtype not in DTYPES or type(weight) is not nn.Parameter or weight.layout is not torch.strided:
        return f"its weight is stored as {type(weight).__name__} of {weight.dtype} ({weight.layout})"
    if not weight.numel():
        return "it has no weights"
    for what, own in module._parameters.items():
        tied = sorted(owners[_place(own)] - {name}) if own is not None else []
        if tied:
            return f"its {what} is tied to {tied[0] or 'the model itself'}"
    if not was_tried(module) and (
        not module._parameters.keys() <= {"weight", "bias"} or module._buffers or module._modules
    ):
        return "it holds more than a weight and a bias"
    if "forward" in vars(module):
        return "its forward was replaced on this very module"
    if isinstance(_parent(model, name), nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its weight without calling it"
    if any(getattr(module, h) for h in _HOOKS):
        return HOOKS
    layer = describe(module, name)
    if layer.groups > 1 and layer.group_channels == 1:
        return DEPTHWISE
    return None


def kind_of_class(cls: type) -> bool:
    return cls in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) or cls.__name__.startswith("ConvTranspose")


def _names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every name of every module, in one walk: a walk for each layer takes a second on 600 layers."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names
