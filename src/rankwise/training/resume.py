"""The state of an unfinished training: one safetensors file, written whole or not at all.

It holds the network, the optimiser, the best weights so far where those are kept, and in its header, as JSON, what is
being trained, the epochs done and their record. The learning rate and the random numbers need no room: both are
functions of seed and epoch. Nothing in the file is executed, and a file that is cut short or comes from elsewhere is
refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.optim import Optimizer

from rankwise.core import files
from rankwise.core.disk import why
from rankwise.core.shards import UNREADABLE
from rankwise.errors import RankwiseError
from rankwise.training.results import finite

FILE = "state.safetensors"
FORMAT = 1
_HEADER_LIMIT = 10**8  # bytes; the safetensors library has the same limit


@dataclass
class State:
    """`epoch` epochs are done. `job` says what is trained; `history` has one record for each epoch.

    `best` are the weights of the epoch `best_epoch`, which scored `best_score` on the early-stopping split.
    """

    job: dict[str, Any]
    epoch: int
    history: list[dict[str, Any]] = field(default_factory=list)
    best_score: float | None = None
    best_epoch: int | None = None
    seconds: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    best: dict[str, Tensor] = field(default_factory=dict)


_TENSORS = ("model", "optimizer", "best")
_PLAIN = {
    "job": dict,
    "epoch": int,
    "history": list,
    "best_score": float,
    "best_epoch": int,
    "seconds": float,
    "notes": dict,
}


def dumps(state: State) -> bytes:
    tensors = {
        f"{kind}/{name}": value.detach().cpu().contiguous().clone()
        for kind in _TENSORS
        for name, value in getattr(state, kind).items()
    }
    header = {"format": FORMAT, **{key: getattr(state, key) for key in _PLAIN}}
    header |= {key: finite(header[key]) for key in ("history", "notes")}  # a loss that is none could not be read again
    return to_safetensors(tensors, metadata={"rankwise-state": json.dumps(header)})


def loads(content: bytes, where: str) -> State:
    """The state in the content of a file, or one sentence on why it is none."""
    try:
        tensors = from_safetensors(content)
        text = _metadata(content).get("rankwise-state")
    except (*UNREADABLE, KeyError) as err:
        reason = why(err)
        raise RankwiseError(
            f"{where} is damaged or cut short ({reason}): remove it to train from the beginning"
        ) from None
    if not isinstance(text, str):
        raise RankwiseError(f"{where} is no state of a training by rankwise: give the folder that `train` was writing")
    header = files.parse(text, f"the header of {where}")
    files.check_format(header, FORMAT, where)
    files.strict(header, ["format", *_PLAIN], f"the header of {where}")
    values = {
        key: files.field(header, key, kind, f"the header of {where}")
        for key, kind in _PLAIN.items()
        if header.get(key) is not None or key in ("job", "epoch", "history")
    }
    parts: dict[str, dict[str, Tensor]] = {kind: {} for kind in _TENSORS}
    for name, value in tensors.items():
        kind, _, rest = name.partition("/")
        if kind not in parts:
            raise RankwiseError(f"{where} holds the tensor {name!r}, which no training of rankwise writes: restore it")
        parts[kind][rest] = value
    return State(**values, model=parts["model"], optimizer=parts["optimizer"], best=parts["best"])


def _metadata(content: bytes) -> dict[str, Any]:
    """The `__metadata__` of a safetensors file: 8 bytes of length, then a JSON header."""
    length = int.from_bytes(content[:8], "little")
    if not 0 < length <= min(_HEADER_LIMIT, len(content) - 8):
        raise ValueError("its header is not there")
    found = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
    return dict(found)


def write(folder: Path, state: State) -> None:
    """The old file stays until the new one is whole and on the disk."""
    files.write_whole(folder / FILE, dumps(state))


def read(folder: Path) -> bytes | None:
    """The content of the state file, or None where there is none."""
    path = folder / FILE
    return files.read(path, limit=None) if path.exists() else None  # as large as network and optimiser


def check_job(state: State, job: dict[str, Any], where: str) -> None:
    """Going on with other settings would give a network that no settings describe."""
    flat, asked = _flat(state.job), _flat(job)
    for key in {**flat, **asked}:
        if flat.get(key) != asked.get(key):
            raise RankwiseError(
                f"{where} was begun with {key} = {flat.get(key)!r}, and {asked.get(key)!r} is asked now: "
                "resume with the same settings, or give another --out"
            )


def check_progress(state: State, first: int, last: int, compressed: bool, where: str) -> None:
    """A state that says what no training from epoch `first` to `last` could have written is not gone on with.

    One that claims to be at the end would pass for a trained network. A retraining knows what came before it.
    """
    if not first <= state.epoch <= last or (state.epoch > first and not state.model):
        raise RankwiseError(f"{where} says that {state.epoch} epochs are done, of {first} to {last}: remove it")
    for record in state.history:
        files.typed(record, dict, f"every epoch in 'history' of {where}")
    if compressed:
        score = files.field(state.notes, "compressed", dict, f"'notes' of {where}")
        for key, value in score.items():
            if value is not None:
                files.typed(value, float, f"{key!r} in 'compressed' of {where}")
        files.field(score, "top1", float, f"'compressed' of {where}")


def plan_of(state: State, where: str) -> bytes:
    """The plan of a retraining, as JSON."""
    text: str = files.field(state.notes, "plan", str, f"'notes' of {where}")
    return text.encode()


def rate_of(state: State, where: str) -> float:
    """The learning rate that a training began with."""
    recipe = files.field(state.job, "recipe", dict, f"'job' of {where}")
    return float(files.field(recipe, "lr", float, f"'recipe' of {where}"))


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """INDEX/KEY → tensor; numbers become tensors, None is left out."""
    found = {}
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            if value is not None:
                found[f"{index}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return found


def load_optimizer_(optimizer: Optimizer, tensors: dict[str, Tensor], where: str) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, key = name.partition("/")
        if not index.isdigit() or int(index) >= len(parameters):
            raise RankwiseError(f"{where} does not fit the network: it has an optimiser state for parameter {index}")
        if value.dim() and not _fits(value, parameters[int(index)]):
            raise RankwiseError(f"{where} does not fit the network: its optimiser state {name} has another shape")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _fits(value: Tensor, parameter: Tensor) -> bool:
    """What an optimiser keeps for a parameter has its shape, that of its table (rows × columns), or is square."""
    sides = (len(parameter), parameter.numel() // len(parameter)) if parameter.dim() > 1 else ()
    return value.shape in (parameter.shape, torch.Size(sides)) or any(value.shape == (side, side) for side in sides)


def load_model_(model: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """Copy weights into a network that must have the same names and shapes."""
    own = model.state_dict()
    wrong = [n for n in {**own, **tensors} if n not in own or n not in tensors or own[n].shape != tensors[n].shape]
    if wrong:
        raise RankwiseError(f"{where} does not fit the network at {wrong[0]!r}: it was written for another one")
    model.load_state_dict(tensors)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The weights as they are now, copied."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
