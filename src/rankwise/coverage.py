"""Coverage: which modules of a network can be decomposed, and why the others are left alone."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.flop_counter import FlopCounterMode

from rankwise.decompose import check_finite
from rankwise.errors import RankwiseError
from rankwise.layer import LINEAR_KINDS, Call, Coverage, Layer, Skipped
from rankwise.modules import describe, kind_of, mark_of

# Reasons that are no gap in coverage: there is nothing to decompose, or the user said so.
OTHER_KIND = "not a linear or convolution layer"
EXCLUDED = "excluded by name"
COMPRESSED = "already compressed"
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def find_layers(model: nn.Module, example: Any = None, exclude: Iterable[str] | str = ()) -> Coverage:
    """Every module with parameters: a `Layer` that can be decomposed, or `Skipped` with the reason.

    `example` (a tensor, a tuple of arguments or a dict of keyword arguments) is only used to count
    positions, in eval mode; the model is left exactly as it was. `exclude` holds names or patterns such
    as "layer1.*".
    """
    if not isinstance(model, nn.Module):
        raise RankwiseError(f"a torch.nn.Module is needed, and {type(model).__name__} was given")
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    _check_patterns(model, patterns)
    owners = _owners(model)
    layers: dict[str, nn.Module] = {}
    skipped = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if mark_of(module) is not None:
            inside = (*inside, name + ".")
            skipped.append(Skipped(name, "pair", _numel(module.parameters()), COMPRESSED))
        if name.startswith(inside) and inside:
            continue
        own = list(module.parameters(recurse=False))
        if not own and not is_parametrized(module):
            continue
        reason = _reason(model, name, module, owners, patterns)
        if reason is None:
            check_finite(module.weight, name)
            layers[name] = module
        elif mark_of(module) is None:
            skipped.append(Skipped(name, type(module).__name__, _numel(own), reason))
    described = {name: _with_aliases(describe(m, name), model, m) for name, m in layers.items()}
    macs = None
    if example is not None:
        calls, macs = _count(model, example, layers)
        described = {name: replace(layer, calls=calls[name]) for name, layer in described.items()}
    return Coverage(tuple(described.values()), tuple(skipped), _numel(model.parameters()), macs)


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


def _place(parameter: Tensor) -> int:
    return parameter.data_ptr() or id(parameter)


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _reason(
    model: nn.Module, name: str, module: nn.Module, owners: dict[int, set[str]], patterns: list[str]
) -> str | None:
    """Why a module is left alone; None if it can be decomposed."""
    if isinstance(module, nn.MultiheadAttention):
        return "it keeps its projections in one tensor of its own"
    kind = kind_of(module)
    if kind is None:
        base = next((c.__name__ for c in type(module).__mro__[1:] if kind_of_class(c)), None)
        return f"{type(module).__name__} changes how {base} works" if base else OTHER_KIND
    if _matches(name, patterns):
        return EXCLUDED
    if name == "":
        return "the model is this single layer: wrap it in nn.Sequential to decompose it"
    weight = module._parameters.get("weight")
    if is_parametrized(module) or weight is None:
        return "its weight is parametrised (weight norm, spectral norm or the like)"
    if isinstance(weight, UninitializedParameter) or weight.is_meta:
        return "its weight has no values yet"
    if weight.dtype not in DTYPES or type(weight) is not nn.Parameter:
        return f"its weight is stored as {type(weight).__name__} of {weight.dtype}"
    tied = sorted(owners[_place(weight)] - {name})
    if tied:
        return f"its weight is tied to {tied[0]}"
    if isinstance(_parent(model, name), nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its weight without calling it"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "it has hooks, which a replacement would lose"
    layer = describe(module, name)
    if layer.groups > 1 and layer.group_channels == 1:
        return "depthwise: every filter sees one channel"
    return None


def kind_of_class(cls: type) -> bool:
    return cls in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) or cls.__name__.startswith("ConvTranspose")


def _with_aliases(layer: Layer, model: nn.Module, module: nn.Module) -> Layer:
    names = [n for n, m in model.named_modules(remove_duplicate=False) if m is module and n != layer.name]
    return replace(layer, aliases=tuple(names))


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the model in eval mode without gradients; restore modes, buffers and random states after."""
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    python_state = random.getstate()
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    fastpath = torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.backends.mha.set_fastpath_enabled(False)  # it would bypass the modules
            model.eval()
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        random.setstate(python_state)
        for module, mode in modes.items():
            module.training = mode
        for name, buffer in model.named_buffers():
            if name in buffers and not torch.equal(buffer, buffers[name]):
                buffer.copy_(buffers[name])


def run_example(model: nn.Module, example: Any) -> Any:
    """model(example) for a tensor, a tuple or list of arguments, or a dict of keyword arguments."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def ready(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)

    try:
        if isinstance(example, Mapping):
            return model(**{k: ready(v) for k, v in example.items()})
        args = example if isinstance(example, tuple | list) else (example,)
        return model(*map(ready, args))
    except Exception as err:
        first_line = (str(err).splitlines() or [""])[0]
        raise RankwiseError(
            f"the model could not run on an input of {_sizes(example)} "
            f"({type(err).__name__}: {first_line}): give an input that fits the model"
        ) from err


def _sizes(example: Any) -> str:
    if isinstance(example, Tensor):
        return "x".join(map(str, example.shape))
    if isinstance(example, Mapping):
        return ", ".join(f"{k} {_sizes(v)}" for k, v in example.items())
    if isinstance(example, tuple | list):
        return ", ".join(map(_sizes, example))
    return type(example).__name__


def _count(model: nn.Module, example: Any, layers: dict[str, nn.Module]) -> tuple[dict[str, tuple[Call, ...]], int]:
    """Calls of every layer in one forward pass, and all macs of that pass by torch's own counter."""
    seen: dict[str, list[Call]] = {name: [] for name in layers}

    def watch(name: str, module: nn.Module) -> Any:
        dims = 0 if kind_of(module) in LINEAR_KINDS else len(module.kernel_size)  # type: ignore[arg-type]

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            given = args[0] if args else next(iter(kwargs.values()))
            before, after = (tuple(t.shape[t.ndim - dims :]) for t in (given, output))
            rows = output.shape[: output.ndim - max(1, dims + 1)] if dims else output.shape[:-1]
            seen[name].append(Call(before, after, int(torch.Size(rows).numel())))

        return module.register_forward_hook(hook, with_kwargs=True)

    handles = []
    counter = FlopCounterMode(display=False)
    try:
        with undisturbed(model):
            handles = [watch(name, module) for name, module in layers.items()]
            with counter:
                run_example(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return {name: _merge(calls) for name, calls in seen.items()}, counter.get_total_flops() // 2


def _merge(calls: list[Call]) -> tuple[Call, ...]:
    """Equal sizes together, in order of appearance."""
    counts: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for call in calls:
        counts[call.inputs, call.outputs] = counts.get((call.inputs, call.outputs), 0) + call.count
    return tuple(Call(i, o, n) for (i, o), n in counts.items())
