"""Surgery: replay a plan on a model, and turn the result back. Nothing is decided here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from rankwise.core.layer import Coverage, Layer
from rankwise.core.linalg import check_finite
from rankwise.core.moments import Moments
from rankwise.decompositions import METRIC, OUTPUTS, TOKENS, Target, of
from rankwise.errors import RankwiseError
from rankwise.planning.plan import Choice, Plan
from rankwise.surgery.coverage import find_layers
from rankwise.surgery.effective import weight_of
from rankwise.surgery.lookups import head_swaps, tied_again
from rankwise.surgery.modules import describe, is_lookup, kind_of, mark_of
from rankwise.surgery.narrow import check_entry, narrow_, narrowed, widen_
from rankwise.surgery.pairs import build_pair, fill_pair_, merge_pair
from rankwise.surgery.pretrained_folder import forget_plan_

Swap = dict[nn.Module, nn.Module]
Match = tuple[Choice, Layer]


def need_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise RankwiseError(f"a torch.nn.Module is needed, and {type(model).__name__} was given")


def copy_model(model: nn.Module, shared: bool = False) -> nn.Module:
    """A deep copy, also where a module keeps a tensor it has computed (old weight norm), which deepcopy refuses.

    If `shared`, it has the very same parameters: no weight is read for it.
    """
    need_module(model)
    kept = (value for module in model.modules() for value in vars(module).values())
    computed = {id(t): t.detach().clone() for t in kept if isinstance(t, Tensor) and t.grad_fn is not None}
    return copy.deepcopy(model, computed | ({id(p): p for p in model.parameters()} if shared else {}))


def apply_plan(model: nn.Module, plan: Plan, moments: Mapping[str, Moments] | None = None) -> nn.Module:
    """A copy of the model with every chosen layer replaced by its pair.

    Args:
        model: the network that the plan was made for, or one of the same shapes.
        plan: what `allocate` or `compress` gave.
        moments: by layer, what `activations.output_moments` gives; choices of the decomposition `pca` need them.

    Returns:
        The smaller network.

    >>> import torch, rankwise as rw
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval()
    >>> x = torch.randn(1, 3, 8, 8)
    >>> plan = rw.allocate(rw.build_table(model, x), rw.Budget(params=0.6), "svd")
    >>> small = rw.apply_plan(model, plan)
    >>> sum(p.numel() for p in small.parameters()) == plan.after.params
    True
    """
    return follow(model, plan, moments, None)


def follow(model: nn.Module, plan: Plan, moments: Mapping[str, Moments] | None, coverage: Coverage | None) -> nn.Module:
    """`apply_plan` where the model's coverage is known already."""
    layers = match_layers(model, plan, coverage)
    small = copy_model(model)
    replace_layers_(small, plan, fill=True, moments=moments, layers=layers)
    return small


def apply_plan_(model: nn.Module, plan: Plan, moments: Mapping[str, Moments] | None = None) -> None:
    """Replace every chosen layer by its pair, in place. Checked first: a plan that does not fit changes nothing.

    Args:
        model: the network, which is changed.
        plan: as for `apply_plan`.
        moments: as for `apply_plan`.

    Returns:
        Nothing: the model itself is smaller.

    >>> import torch, rankwise as rw
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval()
    >>> x = torch.randn(1, 3, 8, 8)
    >>> plan = rw.allocate(rw.build_table(model, x), rw.Budget(params=0.6), "svd")
    >>> rw.apply_plan_(model, plan)
    >>> sum(p.numel() for p in model.parameters()) == plan.after.params
    True
    """
    replace_layers_(model, plan, fill=True, moments=moments)


def replace_layers_(
    model: nn.Module,
    plan: Plan,
    fill: bool,
    moments: Mapping[str, Moments] | None = None,
    later: Collection[str] = (),
    layers: list[Match] | None = None,
) -> None:
    """Put the pairs of a plan into a model and narrow what it prunes.

    Without `fill` the weights of pairs are left for a file to set. `later` names choices that somebody fits to data
    afterwards; until then the layers stay as they are. `layers` is what `match_layers` gave, if it was called.
    """
    layers = match_layers(model, plan) if layers is None else layers
    modules = dict(model.named_modules(remove_duplicate=False))
    for entry in plan.pruned:
        check_entry(modules.get(entry.name), entry)
    if fill:
        for choice, _ in layers:
            needs = of(choice.option).needs
            unseen = needs == OUTPUTS and choice.name not in (moments or {})
            if unseen or (needs in (METRIC, TOKENS) and choice.name not in later):
                raise RankwiseError(
                    f"layer {choice.name!r} of the plan is decomposed by what flows through it, which needs "
                    f"calibration data: give some with --data (in Python: compress(..., data=...))"
                )
            check_finite(weight_of(model.get_submodule(choice.name)), choice.name)
    swap: Swap = {}
    for choice, layer in layers:
        if choice.name in later:
            continue
        old = model.get_submodule(choice.name)
        pair = build_pair(layer, choice.option, choice.rank, old)
        if fill:
            fill_pair_(pair, target_of(old, layer, (moments or {}).get(choice.name)), choice.option, choice.rank)
        swap[old] = pair
        swap.update(head_swaps(model, layer, pair))
    swap_modules_(model, swap)
    for entry in plan.pruned:
        narrow_(modules[entry.name], entry)


def target_of(module: nn.Module, layer: Layer, outputs: Moments | None = None) -> Target:
    """A layer with the weight and the bias of its module."""
    old: Any = module
    return Target(layer, weight_of(old), getattr(old, "bias", None), outputs=outputs)


def match_layers(model: nn.Module, plan: Plan, coverage: Coverage | None = None) -> list[Match]:
    """The model's layer for every choice of the plan, or one sentence on what does not fit.

    `coverage` is what `find_layers` gave for this model, if that is known.
    """
    need_module(model)
    if not isinstance(plan, Plan):
        raise RankwiseError(f"a Plan is needed, and {type(plan).__name__} was given: see rankwise.allocate")
    modules = dict(model.named_modules(remove_duplicate=False))
    able: dict[str, Layer] | None = None
    found = []
    for choice in plan.choices:
        module = modules.get(choice.name)
        if module is None:
            raise RankwiseError(
                f"the plan was made for another model: it names layer {choice.name!r}, which this one does not have"
            )
        if mark_of(module) is not None:
            raise RankwiseError(
                f"layer {choice.name!r} is already compressed: apply the plan to the original, or densify this one"
            )
        if kind_of(module) is None and not is_lookup(module):
            raise RankwiseError(
                f"the plan was made for another model: layer {choice.name!r} is {type(module).__name__} here, "
                f"and {choice.kind!r} in the plan"
            )
        choice.check(describe(module, choice.name))
        if able is None:
            coverage = coverage or find_layers(model)
            able = {layer.name: layer for layer in (*coverage.layers, *coverage.embeddings)}
        if choice.name not in able:
            skipped = coverage.skipped if coverage is not None else ()
            reason = {s.name: s.reason for s in skipped}.get(choice.name, "it has another name too")
            raise RankwiseError(f"layer {choice.name!r} of the plan cannot be replaced: {reason}")
        found.append((choice, able[choice.name]))
    return found


def swap_modules_(model: nn.Module, swap: Swap) -> None:
    """Replace modules wherever they occur, so that what was shared stays shared."""
    new = set(swap.values())
    for parent in model.modules():
        if parent in new:
            continue
        for name, child in parent._modules.items():
            if child is not None and child in swap:
                parent._modules[name] = swap[child]
                if isinstance(parent, nn.TransformerEncoderLayer):
                    # Its fast path reads linear1.weight and linear2.weight instead of calling the modules.
                    parent.activation_relu_or_gelu = 0
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and not new.isdisjoint(module.modules()):
            module.use_nested_tensor = False  # only the fast path of a layer takes those


def densify(model: nn.Module) -> nn.Module:
    """A copy of the model with every pair multiplied out and zeros where filters were removed.

    Args:
        model: a compressed network.

    Returns:
        A network of the original shapes with the same outputs.

    >>> import torch, rankwise as rw
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval()
    >>> x = torch.randn(1, 3, 8, 8)
    >>> small, _ = rw.compress(model, x, method="svd", keep=0.6)
    >>> dense = rw.densify(small)
    >>> dense[0].weight.shape == model[0].weight.shape, torch.allclose(dense(x), small(x), atol=1e-5)
    (True, True)
    """
    dense = copy_model(model)
    densify_(dense)
    return dense


def densify_(model: nn.Module) -> None:
    """Multiply every pair out and fill up what was narrowed with zeros, in place.

    Args:
        model: a compressed network.

    Returns:
        Nothing: the model itself has the original shapes.

    >>> import rankwise as rw
    >>> from torch import nn
    >>> small, _ = rw.compress(nn.Sequential(nn.Linear(20, 20), nn.ReLU()), method="svd", keep=0.7)
    >>> rw.densify_(small)
    >>> small[0]
    Linear(in_features=20, out_features=20, bias=True)
    """
    if mark_of(model) is not None:
        raise RankwiseError("the model is itself a compressed layer: densify the network that holds it")
    swap_modules_(model, _merged(model, merge_pair))
    for module in model.modules():
        if narrowed(module) is not None:
            widen_(module)
    forget_plan_(model)


def _merged(model: nn.Module, merge: Callable[[nn.Sequential], nn.Module]) -> Swap:
    pairs = [m for m in model.modules() if isinstance(m, nn.Sequential) and mark_of(m) is not None]
    return tied_again(model, {pair: merge(pair) for pair in pairs})
