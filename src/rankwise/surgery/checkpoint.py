"""Checkpoints: a folder with plan.json and model.safetensors, replayed on the user's own model.

Nothing in such a folder is executed. The weights file names the plan it belongs to, so that a folder
that was half overwritten, or a plan that was edited, is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core import files
from rankwise.core.disk import part_of, remove
from rankwise.errors import RankwiseError
from rankwise.planning.plan import Plan
from rankwise.surgery.fuse import fuse_norms_
from rankwise.surgery.layout import lay_out_
from rankwise.surgery.modules import mark_of, recipe
from rankwise.surgery.narrow import narrowed
from rankwise.surgery.pairs import decision_of
from rankwise.surgery.pretrained_folder import CONFIG, files_for, is_pretrained, plan_in
from rankwise.surgery.replace import copy_model, need_module, replace_layers_
from rankwise.surgery.weights_file import (
    LARGEST,
    PLAN,
    WEIGHTS,
    read_header,
    read_tensors,
    remove_stale,
    weights_in,
    write_parts,
)

_TRIES = 100  # half a second
__all__ = ["PLAN", "WEIGHTS", "hashes", "is_compressed", "load", "plan_hash", "read_plan", "save"]


def save(model: nn.Module, plan: Plan, folder: str | Path, largest: int | None = None) -> None:
    """Write plan.json and model.safetensors, whole or not at all; of a network of transformers a folder for it, too.

    Such a folder has config.json with the plan in it, the tokenizer and a README, and `import rankwise.hf` teaches
    transformers to open it. Weights of more than 4 GB are several files with an index.

    Args:
        model: what `compress` or `apply_plan` gave, trained since or not.
        plan: the plan that it follows.
        folder: where to write; it is made if it is not there.
        largest: bytes of a file of weights, of a network of transformers; 4 GB unless given.

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
    decided |= {head for mark in pairs.values() for head in mark.get("heads", ())}  # with their embedding
    unknown = sorted({*pairs, *thin} - decided)
    if unknown:
        raise RankwiseError(
            f"the model does not follow the plan: {unknown[0]!r} is compressed and the plan has no choice for it"
        )
    tensors, same = _unshared(model.state_dict())
    # One key only: safetensors writes several in random order, and the same model should give the same bytes.
    changed = {name: recipe(modules[name]) for name in (*pairs, *thin, *_folded(plan)) if name in modules}
    metadata = {"rankwise": json.dumps({**hashes(plan), "same": same, "modules": changed})}
    others = files_for(model, plan) if is_pretrained(model) else {}
    folder = Path(folder)
    files.make_folder(folder, "give another folder")
    for place in {(folder / name).parent for name in others} - {folder}:
        files.make_folder(place, "give another folder")
    weights = write_parts(
        folder, tensors, metadata, (LARGEST if largest is None else largest) if others else sys.maxsize
    )
    # In this order: weights name their plan, so between two renames `read_plan` can tell which one counts.
    beside = {folder / name: content for name, content in others.items()}
    # With an index, one file that was here before goes before the plan gets its name: it would count otherwise.
    stale = {} if folder / WEIGHTS in weights else {folder / WEIGHTS: None}
    files.write_together({**weights, **stale, folder / PLAN: plan.dumps().encode(), **beside})
    if others:
        remove_stale(folder, next(iter(weights)))
    elif plan_in(folder) is not None:
        remove(folder / CONFIG)  # of another network that was here before


def load(folder: str | Path, model: nn.Module) -> nn.Module:
    """A compressed copy of `model`, as `save` wrote it; `models.networks.load` is its public face."""
    plan, tensors, header = _read_both(Path(folder))
    path = weights_in(Path(folder))
    small = copy_model(model)
    replace_layers_(small, plan, fill=False)
    fuse_norms_(small, plan.fused, fill=False)
    _load_state_(small, tensors, header, path)
    lay_out_(small, plan.layout)
    return small


def read_plan(folder: str | Path) -> Plan:
    """The plan of a folder that `save` wrote."""
    if not os.path.isdir(folder):
        raise RankwiseError(f"{folder} is not a folder: give one that rankwise.save or rankwise compress wrote")
    return _plan_and_text(Path(folder))[0]


def _plan_and_text(folder: Path) -> tuple[Plan, bytes]:
    waiting = _waiting_plan(folder)
    if waiting is not None:
        return waiting
    if not (folder / PLAN).exists() and (plan := plan_in(folder)) is not None:
        return plan, plan.dumps().encode()  # as save_pretrained of transformers writes it again
    text = files.read(folder / PLAN)
    return Plan.loads(text, str(folder / PLAN)), text


def is_compressed(folder: str | Path) -> bool:
    """Whether a folder has a plan."""
    place = Path(folder)
    return (place / PLAN).is_file() or _waiting_plan(place) is not None or plan_in(place) is not None


def _waiting_plan(folder: Path) -> tuple[Plan, bytes] | None:
    """The plan that the weights name, where `save` was killed after it gave the weights their name and before the plan.

    It is whole then, and the plan under its own name is the older one.
    """
    part = part_of(folder / PLAN)
    if not part.is_file() or not weights_in(folder).is_file():
        return None
    try:
        text = files.read(part)
        plan = Plan.loads(text, str(part))
        return (plan, text) if _belong(plan, text, read_header(weights_in(folder))) else None
    except RankwiseError:
        return None  # left by somebody who was killed earlier: the folder is as it was before


def _read_both(folder: Path) -> tuple[Plan, dict[str, Tensor], dict[str, Any]]:
    """Plan, tensors and header that belong together. Again, in case somebody saves at the same moment."""
    read_plan(folder)  # says what is wrong with the folder
    for number in range(_TRIES):
        time.sleep(0.005 * min(number, 1))
        plan, text = _plan_and_text(folder)
        path = weights_in(folder)
        before = _stamp(path)
        try:
            tensors, header = read_tensors(path)
        except RankwiseError:
            if before == _stamp(path):
                raise
            continue
        # safetensors opens a file twice, by its name: header and numbers may be those of two files.
        if before == _stamp(path) and _belong(plan, text, header):
            return plan, tensors, header
    raise RankwiseError(
        f"{weights_in(folder)} and plan.json beside it do not belong together: one of them was changed; "
        "save the model again"
    )


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever another file is put in place."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _belong(plan: Plan, text: bytes, header: dict[str, Any]) -> bool:
    """As the file lies there, or as we would write it: files of an older format have the hash of their own text."""
    stated = hashes(plan)
    same = header.get("plan") in (stated["plan"], hashlib.sha256(text).hexdigest())
    return same or header.get("decisions") == stated["decisions"]


def _folded(plan: Plan) -> list[str]:
    """Norms that are gone and layers that have a bias instead; pairs are new anyway."""
    pairs = {choice.name for choice in plan.choices}
    return [*plan.fused, *(layer for layer in plan.fused.values() if layer not in pairs)]


def plan_hash(plan: Plan) -> str:
    return hashes(plan)["plan"]


def hashes(plan: Plan) -> dict[str, str]:
    """What weights say of their plan: a hash of plan.json, and one that the order of keys in it does not change."""
    text = plan.dumps()
    texts = {"plan": text, "decisions": json.dumps(json.loads(text), sort_keys=True)}
    return {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}


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
            tensors[name] = value.detach()
    return tensors, same


def _place(name: str, value: Tensor) -> tuple[object, ...]:
    """Equal for two names of one tensor."""
    return (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype) if value.numel() else (name,)


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
