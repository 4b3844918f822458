"""The dependency graph of a network: which outputs and inputs of which modules are one and the same channel.

torch-pruning follows the network through autograd; here its answer becomes plain sets. It does not know
that padding along the channels shifts them, and has to guess what a flatten does, so both are given to it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rankwise.errors import RankwiseError, need
from rankwise.surgery.forward import Example, run_example, tensors_of
from rankwise.surgery.narrow import Prunable, part_of

Place = tuple[str, str, int]  # module, "out" or "in", index
Names = dict[nn.Module, str]
LIMIT = 2**22  # places that one layer may reach: a graph that is understood wrongly can go round in circles
LOST = "torch-pruning cannot follow it"


class Links:
    """Places that belong to one channel (union–find), and channels that must stay, with the reason."""

    def __init__(self) -> None:
        self.parent: dict[Place, Place] = {}
        self.reasons: dict[Place, str] = {}

    def find(self, place: Place) -> Place:
        root = self.parent.setdefault(place, place)
        while root != self.parent[root]:
            self.parent[root] = self.parent[self.parent[root]]
            root = self.parent[root]
        return root

    def join(self, a: Place, b: Place) -> None:
        self.parent[self.find(b)] = self.find(a)

    def channels(self) -> dict[Place, list[Place]]:
        """The places of every channel, by one of them."""
        found: dict[Place, list[Place]] = {}
        for place in list(self.parent):
            found.setdefault(self.find(place), []).append(place)
        return found

    def reason(self) -> dict[Place, str]:
        """Why a channel must stay, by the place that stands for it; the first reason counts."""
        found: dict[Place, str] = {}
        for place, reason in self.reasons.items():
            found.setdefault(self.find(place), reason)
        return found


@dataclass(frozen=True)
class _Move:
    """How the indices of channels change at an operation: `times` as many (flatten), shifted by `before` (padding)."""

    wide: int
    times: int = 1
    before: int = 0

    def there(self, places: list[Any]) -> list[Any]:
        return [p._replace(idx=p.idx * self.times + k + self.before) for p in places for k in range(self.times)]

    def back(self, places: list[Any]) -> list[Any]:
        """Zeros of a padding belong to no layer."""
        old = [p._replace(idx=(p.idx - self.before) // self.times) for p in places]
        return list(dict.fromkeys(p for p in old if 0 <= p.idx < self.wide))


class _Moves(TorchFunctionMode):
    """Notes where a network pads along its channels, axis 1, or flattens them with what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, _Move] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name, given = getattr(func, "__name__", ""), args[0] if args else kwargs.get("input")
        if not isinstance(out, Tensor) or not isinstance(given, Tensor) or given.ndim < 3 or out.grad_fn is None:
            return out
        wide = given.shape[1]
        if name in ("flatten", "reshape", "view") and out.shape == (given.shape[0], math.prod(given.shape[1:])):
            self.seen[out.grad_fn] = _Move(wide, times=math.prod(given.shape[2:]))
        elif name in ("pad", "constant_pad_nd"):
            pad = args[1] if len(args) > 1 else kwargs["pad"]
            at = 2 * (given.ndim - 2)  # pairs from the last axis on
            if len(pad) >= at + 2:
                self.seen[out.grad_fn] = _Move(wide, before=int(pad[at]))
        return out


def follow(model: nn.Module, example: Example) -> Links:
    """Every output of a linear or convolution layer, linked with all that must go when it goes.

    `model` should be a copy: it is run with gradients, in eval mode.
    """
    graph, names = _build(model, example), {module: name for name, module in model.named_modules()}
    parts = {module: part for module in names if (part := part_of(module, "")) is not None}
    links = Links()
    for module in list(graph.module2node):
        part = parts.get(module) if isinstance(module, nn.Module) else None
        if part is None or part.layer is None:
            continue
        root = names[module]
        if all((root, "out", i) in links.parent for i in range(part.outputs)):
            continue
        for i in range(part.outputs):
            links.find((root, "out", i))
        _spread(links, graph, names, parts, module)
    return links


def _spread(links: Links, graph: Any, names: Names, parts: dict[nn.Module, Prunable], root: nn.Module) -> None:
    """Follow the outputs of one layer along torch-pruning's dependencies, as far as there is something new.

    A node is left where a reason to stay is found: whoever is behind it finds it too, from its own side.
    """
    tp = need("torch_pruning", extra="prune", purpose="removing filters")
    start = [tp._helpers._HybridIndex(idx=i, root_idx=i) for i in range(parts[root].outputs)]
    remove = graph.get_pruner_of_module(root).prune_out_channels
    seen: dict[tuple[Any, Any], set[Any]] = {}
    work = [(graph.module2node[root], remove, start)]
    steps = 0
    while work:
        node, trigger, places = work.pop()
        for dependency in node.dependencies:
            if not dependency.is_triggered_by(trigger):
                continue
            there = places
            for mapping in dependency.index_mapping:
                there = there if mapping is None else mapping(there)
            known = seen.setdefault((dependency.target, dependency.handler), set())
            new = [p for p in dict.fromkeys(there) if p not in known]
            known.update(new)
            steps += len(new)
            if steps > LIMIT:
                for i in range(len(start)):
                    links.reasons.setdefault((names[root], "out", i), LOST)
                return
            new = _link(links, graph, names, parts, names[root], dependency, new)
            if new:
                work.append((dependency.target, dependency.handler, new))


def _build(model: nn.Module, example: Example) -> Any:
    tp = need("torch_pruning", extra="prune", purpose="removing filters")
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    moves = _Moves()

    def forward(network: nn.Module, given: Any) -> list[Tensor]:
        with moves:
            out = [t for t in tensors_of(run_example(network, given)) if t.grad_fn is not None]
        if not out:
            raise RankwiseError("no gradient reaches the network's output, so its graph cannot be followed")
        return out

    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        try:
            graph = tp.DependencyGraph().build_dependency(model, example, forward_fn=forward, verbose=False)
        except RankwiseError:
            raise
        except Exception as err:
            first = (str(err).splitlines() or [""])[0]
            raise RankwiseError(
                f"torch-pruning cannot follow this network ({type(err).__name__}: {first}): use another method"
            ) from err
    for node in list(graph.module2node.values()):
        if node.grad_fn not in moves.seen:
            continue
        move = moves.seen[node.grad_fn]
        for other in node.inputs:
            _set(node.dependencies, other, move.back)
            _set(other.dependencies, node, move.there)
    return graph


def _set(dependencies: Iterable[Any], target: Any, mapping: Any) -> None:
    for dependency in dependencies:
        if dependency.target is target:
            dependency.index_mapping[0] = mapping


def _link(
    links: Links, graph: Any, names: Names, parts: dict[nn.Module, Prunable], root: str, dep: Any, places: list[Any]
) -> list[Any]:
    """Note one module that must change with outputs of the layer `root`; the places from where to go on."""
    module = dep.target.module
    reason, name = "", None
    if isinstance(module, nn.Parameter):
        reason = f"it meets the parameter {graph._param_to_name.get(module, '?')!r}, which no layer holds"
    elif module in names and module not in parts and not isinstance(module, nn.PReLU):
        reason = f"it meets {names[module]!r} ({type(module).__name__}), which takes all channels together"
    elif module in parts:
        name = names[module]
    side = "in" if dep.handler.__name__ == "prune_in_channels" else "out"
    wide = 0 if name is None else parts[module].inputs if side == "in" else parts[module].outputs
    further = []
    for place in places:
        at = (root, "out", place.root_idx)
        if reason:
            links.reasons.setdefault(at, reason)
        elif name is not None and not 0 <= place.idx < wide:
            links.reasons.setdefault(at, f"torch-pruning's indices do not fit layer {name!r}")
        else:
            if name is not None:
                links.join(at, (name, side, place.idx))
            further.append(place)
    return further
