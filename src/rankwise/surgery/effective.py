"""What a subclass of a plain layer really computes, found by trying it: zeros around its input, then the plain layer.

    Conv2dSame(x)   = conv(W, zeros around x)          the margins may depend on the size of x
    StdConv2d(x)    = conv(standardised W, x)          the weight is computed from parameters

The class says nothing of that; its behaviour does. A copy with random parameters runs on random inputs of several
sizes, odd ones among them, and every product with a weight is seen (`_Products`). It is believed where the padded input
and the plain layer give the same outputs on all of them; otherwise the layer is left alone. So a layer that multiplies
twice, quantises, adds an adapter or remembers what it saw is no plain layer, whatever its name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rankwise.core.border import SAME, Border, margins, with_zeros
from rankwise.errors import out_of_memory
from rankwise.planning import table

CONVS: dict[str, type[nn.Module]] = {
    cls.__name__: cls
    for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
}
PLAIN: dict[str, type[nn.Module]] = {"Linear": nn.Linear, **CONVS}
CONVOLVE: dict[str, Any] = {"Conv1d": F.conv1d, "Conv2d": F.conv2d, "Conv3d": F.conv3d}
UPSAMPLE: dict[str, Any] = {
    "ConvTranspose1d": F.conv_transpose1d,
    "ConvTranspose2d": F.conv_transpose2d,
    "ConvTranspose3d": F.conv_transpose3d,
}
MULTIPLY = {F.linear, *CONVOLVE.values(), *UPSAMPLE.values()}
TRIALS = ((torch.float64, 1e-6), (torch.float32, 1e-4))  # dtype, and what may be off of the largest output
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}  # and half precision less
SIZES = 5  # of inputs, at least two of them odd
Product = tuple[Tensor, Tensor, Any]  # input, weight, padding


@dataclass(frozen=True)
class Form:
    """The plain layer that a subclass of it is: its padding, zeros before that, and whether its weight is computed."""

    padding: tuple[int, ...] | str = ()
    border: Border = ()
    computed: bool = False


PLAIN_FORM = Form()  # the layer itself
_known: dict[object, Form | None] = {}  # of modules that are described by plain values
_others: WeakKeyDictionary[nn.Module, Form | None] = WeakKeyDictionary()


def base_of(module: nn.Module) -> str | None:
    """The plain kind that a module is one of, or is derived from."""
    return next((kind for kind, known in PLAIN.items() if isinstance(module, known)), None)


def form_of(module: nn.Module) -> Form | None:
    """What a module computes as a plain layer; None where it is none, or does something else.

    It is found once: parameters may change afterwards, and how they are used does not.
    """
    kind = base_of(module)
    if kind is None:
        return None
    if all(getattr(type(module), f, None) is getattr(PLAIN[kind], f, None) for f in ("forward", "_conv_forward")):
        return PLAIN_FORM
    key = _key(module)
    if key is not None:
        if key not in _known:
            _known[key] = _find(module, kind)
        return _known[key]
    if module not in _others:
        _others[module] = _find(module, kind)
    return _others[module]


def _key(module: nn.Module) -> object | None:
    """All that decides what a module does with its parameters; None where that is more than plain values."""
    values = {k: v for k, v in vars(module).items() if k not in nn.Module().__dict__}
    simple = all(_simple(value) for value in values.values())
    children = [*module.modules()][1:]
    if not simple or any(not type(c).__module__.startswith("torch.nn") for c in children) or module._buffers:
        return None
    shapes = tuple((name, None if p is None else tuple(p.shape)) for name, p in module._parameters.items())
    return (type(module), shapes, repr(sorted(values.items())), repr(children))


def _simple(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_simple, value))
    return value is None or isinstance(value, str | int | float)


def weight_of(module: Any) -> Tensor:
    """The weight that a layer multiplies with: its parameter, or what it computes from its parameters."""
    form = form_of(module)
    if form is None or not form.computed:
        weight: Tensor = module.weight
        return weight
    with torch.no_grad():
        _, call = _run(_copy(module), _inputs(module, module.weight)[0])
    assert call is not None, "the trial has seen it"
    return call[1].detach().clone()


def was_tried(module: nn.Module) -> bool:
    """Whether it is a plain layer by its behaviour, and not by its class."""
    return form_of(module) not in (None, PLAIN_FORM)


def sizes_with(border: Border, module: Any, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of an input with the zeros that a layer puts around it before its padding."""
    if not border:
        return sizes
    sides = margins(border, sizes, module.kernel_size, module.stride, module.dilation)
    return tuple(size + before + after for size, (before, after) in zip(sizes, sides, strict=True))


def is_plain_on(module: Any, x: Tensor, out: Tensor) -> bool:
    """Whether a layer that was tried gave for this input what the plain layer gives, but for rounding."""
    form, kind, weight = form_of(module), base_of(module), weight_of(module)
    assert form is not None, "it was tried"
    assert kind is not None, "it was tried"
    if not x.dtype == weight.dtype == out.dtype:
        return False
    with torch.no_grad():
        return _close(out, _plain(form, module, kind, x, weight, module.bias), ROUNDING.get(x.dtype, 0.03))


table.read_weight = weight_of  # tables are made of weights, and know no modules


class _Products(TorchFunctionMode):
    """Remembers the input, the weight and the padding of every product with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Product] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in MULTIPLY:
            named = dict(zip(("input", "weight", "bias", "stride", "padding"), args, strict=False)) | given
            self.calls.append((named["input"], named["weight"], named.get("padding", 0)))
        return func(*args, **given)


def _copy(module: nn.Module) -> Any:
    """A copy that shares its parameters; what a forward pass may write to is its own. Hooks do not run: see forward."""
    probe: Any = copy.copy(module)
    probe.__dict__ |= {
        "_parameters": dict(module._parameters),
        "_buffers": {name: b if b is None else b.clone() for name, b in module._buffers.items()},
        "_modules": copy.deepcopy(module._modules),
    }
    return probe.eval()


def _random(module: nn.Module, dtype: torch.dtype) -> Any:
    """A copy with random parameters on the CPU: nothing that a parameter does hides behind a zero or a one."""
    probe = _copy(module)
    random = torch.Generator().manual_seed(0)
    for name, value in module._parameters.items():
        if value is not None:
            numbers = torch.randn(value.shape, generator=random, dtype=dtype)
            probe._parameters[name] = nn.Parameter(0.3 * numbers, requires_grad=False)
    for name, buffer in probe._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            probe._buffers[name] = buffer.to("cpu", dtype)
    return probe


def _find(module: nn.Module, kind: str) -> Form | None:
    if any(True for child in module.children() for _ in child.parameters()):
        return None
    own = [*module._parameters.values(), *module._buffers.values()]
    if any(p is not None and (p.is_complex() or p.layout is not torch.strided) for p in own) or not _sized(module):
        return None
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for dtype, tolerance in TRIALS:
            try:
                return _tried(module, kind, dtype, tolerance)
            except Exception as err:  # somebody else's code, which may want another dtype or more than an input
                if out_of_memory(err):
                    raise
    return None


def _sized(module: Any) -> bool:
    """Whether it has the parameters of the plain layer, with values or without."""
    weight = module._parameters.get("weight")
    return weight is not None and not nn.parameter.is_lazy(weight) and bool(weight.numel())


def _tried(module: Any, kind: str, dtype: torch.dtype, tolerance: float) -> Form | None:
    probe = _random(module, dtype)
    inputs = _inputs(module, probe.weight)
    runs = [_run(probe, x) for x in inputs]
    afresh = [_run(_random(module, dtype), x)[0] for x in inputs[1:]]  # by one that has seen no other size
    if not all(_close(out, new, 0.0) for (out, _), new in zip(runs[1:], afresh, strict=True)):
        return None
    calls = [call for _, call in runs if call is not None]
    weight = calls[0][1] if len(calls) == len(runs) else probe.weight
    if weight.shape != probe.weight.shape or not all(torch.equal(w, weight) for _, w, _ in calls):
        return None
    computed = not torch.equal(weight, probe.weight)
    if not computed and not module._parameters.keys() <= {"weight", "bias"}:
        return None  # they do nothing here, and nobody knows what they are for
    for form in _candidates(module, kind, inputs, calls, computed):
        plain = [_plain(form, module, kind, x, weight.to(dtype), probe.bias) for x in inputs]
        if all(_close(out, wanted, tolerance) for (out, _), wanted in zip(runs, plain, strict=True)):
            return form
    return None


def _inputs(module: Any, like: Tensor) -> list[Tensor]:
    """Without zeros, so that a border shows; of small sizes one apart, so that padding by size does."""
    random = torch.Generator().manual_seed(1)

    def some(*shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=random, dtype=torch.float64)
        return torch.where(numbers < 0, numbers - 0.1, numbers + 0.1).to(like)

    if isinstance(module, nn.Linear):
        return [some(3, module.in_features), some(1, 2, module.in_features)]
    reach = [1 + d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return [some(1 + i % 2, module.in_channels, *(r + i + a for a, r in enumerate(reach))) for i in range(SIZES)]


def _run(probe: Any, x: Tensor) -> tuple[Tensor, Product | None]:
    """The output, and its product with a weight where there is just one."""
    with _Products() as seen:
        out: Tensor = probe.forward(x.clone())
    return out, seen.calls[0] if len(seen.calls) == 1 else None


def _close(a: object, b: Tensor, tolerance: float) -> bool:
    if not isinstance(a, Tensor) or a.shape != b.shape:
        return False
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def _plain(form: Form, module: Any, kind: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the plain layer gives."""
    if kind == "Linear":
        return F.linear(x, weight, bias)
    m, dims = module, len(module.kernel_size)
    if kind in UPSAMPLE:
        up: Tensor = UPSAMPLE[kind](x, weight, bias, m.stride, m.padding, m.output_padding, m.groups, m.dilation)
        return up
    sides = margins(form.border, x.shape[-dims:], m.kernel_size, m.stride, m.dilation)
    out: Tensor = CONVOLVE[kind](with_zeros(x, sides), weight, bias, m.stride, form.padding, m.dilation, m.groups)
    return out


def _candidates(
    module: Any, kind: str, inputs: Sequence[Tensor], calls: Sequence[Product], computed: bool
) -> Iterator[Form]:
    """Forms that what was seen allows; without products to look at those that are usual."""
    if kind == "Linear" or kind in UPSAMPLE:
        yield Form(() if kind == "Linear" else tuple(module.padding), (), computed)
        return
    dims = len(module.kernel_size)
    none, own = (0,) * dims, module.padding if isinstance(module.padding, str) else tuple(module.padding)
    if len(calls) < len(inputs):
        yield from (Form(own), Form(none, SAME))
        return
    seen = [_added(x, given, dims) for x, (given, _, _) in zip(inputs, calls, strict=True)]
    padding = calls[0][2]
    if isinstance(padding, str):
        yield Form(padding, (), computed)
        return
    inner = tuple(padding) if isinstance(padding, Sequence) else (int(padding),)
    inner = inner * dims if len(inner) == 1 else inner
    if seen[0] is not None and all(sides == seen[0] for sides in seen):
        sides = [(before + p, after + p) for (before, after), p in zip(seen[0], inner, strict=True)]
        if all(before == after for before, after in sides):
            yield Form(tuple(before for before, _ in sides), (), computed)
        else:
            yield Form(none, tuple(side for both in sides for side in both), computed)
    elif not any(inner):
        yield Form(none, SAME, computed)


def _added(x: Tensor, given: Tensor, dims: int) -> list[tuple[int, int]] | None:
    """Zeros that were put around an input, axis by axis; None where something else was done to it."""
    if given.ndim != x.ndim or given.shape[:2] != x.shape[:2]:
        return None
    sides = []
    for axis in range(2, 2 + dims):
        before = int((given == 0).all(dim=[a for a in range(x.ndim) if a != axis]).long().argmin())
        sides.append((before, given.shape[axis] - x.shape[axis] - before))
    if any(after < 0 for _, after in sides) or not torch.equal(with_zeros(x, sides), given.to(x)):
        return None
    return sides
