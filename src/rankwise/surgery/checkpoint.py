"""Checkpoints: a folder with plan.json and model.safetensors, replayed on the user's own model.

Nothing in such a folder is executed. The weights file names the plan it belongs to, so that a folder
that was half overwritten, or a plan that was edited, is noticed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from rankwise.core import files
from rankwise.errors import RankwiseError
from rankwise.planning.plan import Plan
from rankwise.surgery.fuse import fuse_norms_
from rankwise.surgery.layout import lay_out_
from rankwise.surgery.modules import mark_of, recipe
from rankwise.surgery.narrow import narrowed
from rankwise.surgery.pairs import decision_of
from rankwise.surgery.replace import copy_model, need_module, replace_layers_

PLAN, WEIGHTS = "plan.json", "model.safetensors"


def save(model: nn.Module, plan: Plan, folder: str | Path) -> None:
    """Write plan.json and model.safetensors, whole or not at all.

    Args:
        model: what `compress` or `apply_plan` gave, trained since or not.
        plan: the plan that it follows.
        folder: where to write; it is made if it is not there.

    Returns:
        Nothing.

    >>> import tempfile, rankwise as rw
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20))
    >>> small, plan = rw.compress(model, method="svd", keep=0.7)
    >>> folder = tempfile.mkdtemp()
    >>> rw.save(small, plan, folder)
    >>> rw.Plan.load(f"{folder}/plan.json") == plan
    True
    """
    need_module(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    pairs = {name: mark for name, module in model.named_modules() if (mark := mark_of(module)) is not None}
    for choice in plan.choices:
        mark = mark_of(modules[choice.name]) if choice.name in modules else None
        if mark is None or decision_of(mark)[1:] != (choice.option, choice.rank):
            raise RankwiseError(
                f"the model does not follow the plan at layer {choice.name!r}: save what apply_plan gave for this plan"
            )
    thin = {name: mark for name, module in model.named_modules() if (mark := narrowed(module)) is not None}
    for entry in plan.pruned:
        mark = narrowed(modules[entry.name]) if entry.name in modules else None
        if mark is None or (mark["filters"], mark["channels"]) != (entry.filters, entry.channels):
            raise RankwiseError(
                f"the model does not follow the plan at layer {entry.name!r}: save what apply_plan gave for this plan"
            )
    decided = {choice.name for choice in plan.choices} | {entry.name for entry in plan.pruned}
    unknown = sorted({*pairs, *thin} - decided)
    if unknown:
        raise RankwiseError(
            f"the model does not follow the plan: {unknown[0]!r} is compressed and the plan has no choice for it"
        )
    tensors, same = _unshared(model.state_dict())
    # One key only: safetensors writes several in random order, and the same model should give the same bytes.
    changed = {name: recipe(modules[name]) for name in (*pairs, *thin, *_folded(plan)) if name in modules}
    metadata = {"rankwise": json.dumps({"plan": plan_hash(plan), "same": same, "modules": changed})}
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise RankwiseError(f"the folder {folder} could not be made ({err.strerror or err})") from None
    weights = to_safetensors(tensors, metadata=metadata)
    files.write_together({folder / WEIGHTS: weights, folder / PLAN: plan.dumps().encode()})


def load(folder: str | Path, model: nn.Module) -> nn.Module:
    """A compressed copy of `model`, as `save` wrote it. Nothing in the folder is executed.

    Args:
        folder: what `save` or `rankwise compress` wrote.
        model: the kind of network that the plan was made for; its weights do not matter.

    Returns:
        The compressed network, equal to the saved one to the last digit.

    >>> import tempfile, rankwise as rw
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20))
    >>> small, plan = rw.compress(model, method="svd", keep=0.7)
    >>> folder = tempfile.mkdtemp()
    >>> rw.save(small, plan, folder)
    >>> sum(p.numel() for p in rw.load(folder, model).parameters()) == plan.after.params
    True
    """
    plan = read_plan(folder)
    path = Path(folder) / WEIGHTS
    tensors, header = _read(path)
    # As the file lies there, or as we would write it: files of an older format have the hash of their own text.
    if header.get("plan") not in (plan_hash(plan), hashlib.sha256(files.read(Path(folder) / PLAN)).hexdigest()):
        raise RankwiseError(
            f"{path} and plan.json beside it do not belong together: one of them was changed; save the model again"
        )
    small = copy_model(model)
    replace_layers_(small, plan, fill=False)
    fuse_norms_(small, plan.fused, fill=False)
    _load_state_(small, tensors, header, path)
    lay_out_(small, plan.layout)
    return small


def read_plan(folder: str | Path) -> Plan:
    """The plan of a folder that `save` wrote."""
    if not Path(folder).is_dir():
        raise RankwiseError(f"{folder} is not a folder: give one that rankwise.save or rankwise compress wrote")
    return Plan.load(Path(folder) / PLAN)


def _folded(plan: Plan) -> list[str]:
    """Norms that are gone and layers that have a bias instead; pairs are new anyway."""
    pairs = {choice.name for choice in plan.choices}
    return [*plan.fused, *(layer for layer in plan.fused.values() if layer not in pairs)]


def plan_hash(plan: Plan) -> str:
    return hashlib.sha256(plan.dumps().encode()).hexdigest()


def _unshared(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor once, and for a second name of the same tensor the first one."""
    first: dict[tuple[object, ...], str] = {}
    tensors, same = {}, {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise RankwiseError(
                f"the model keeps {type(value).__name__} under {name!r} in its state dict; only tensors can be saved"
            )
        place = _place(name, value)
        if place in first:
            same[name] = first[place]
        else:
            first[place] = name
            tensors[name] = value.detach().cpu().contiguous().clone()
    return tensors, same


def _place(name: str, value: Tensor) -> tuple[object, ...]:
    """Equal for two names of one tensor."""
    return (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype) if value.numel() else (name,)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor, and what `save` wrote about them."""
    if not path.is_file():
        raise RankwiseError(f"{path} is missing: a compressed folder holds {PLAN} and {WEIGHTS}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
            text = (file.metadata() or {}).get("rankwise", "{}")
    except (SafetensorError, OSError, ValueError) as err:
        raise RankwiseError(f"{path} is damaged or cut short ({err}): restore it or save the model again") from None
    return tensors, files.parse(text, f"the header of {path}")


def _load_state_(model: nn.Module, tensors: dict[str, Tensor], header: dict[str, Any], path: Path) -> None:
    same = files.field(header, "same", dict, f"the header of {path}")
    state = {**tensors, **{name: tensors[str(first)] for name, first in same.items() if str(first) in tensors}}
    here = model.state_dict()
    for name in here:
        if name not in state:
            raise RankwiseError(f"{path} does not fit the model: it has no tensor {name!r}")
    for name, value in state.items():
        if name not in here:
            raise RankwiseError(f"{path} does not fit the model: it has the tensor {name!r}, which the model has not")
        for what, theirs, ours in (
            ("shape", tuple(value.shape), tuple(here[name].shape)),
            ("dtype", value.dtype, here[name].dtype),
        ):
            if theirs != ours:
                raise RankwiseError(
                    f"{path} does not fit the model: {name!r} has {what} {theirs} in the file and {ours} in the model"
                )
    first: dict[tuple[object, ...], str] = {}
    for name, value in here.items():
        other = first.setdefault(_place(name, value), name)
        if state[other] is not state[name] and not torch.equal(state[other], state[name]):
            raise RankwiseError(
                f"{path} does not fit the model: {other!r} and {name!r} are one tensor there and differ in the file"
            )
    here.update(state)  # its own state dict knows the versions of modules, which some of them ask for
    with torch.no_grad():
        model.load_state_dict(here)
