"""Read trained weights from a file into a network, without running anything the file contains."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rankwise.core.shards import UNREADABLE
from rankwise.errors import RankwiseError
from rankwise.models.shards import INDEX, read_sharded

_PICKLES = (".pth", ".pt", ".th", ".bin")
_INNER_KEYS = ("state_dict", "model")  # where training scripts keep the weights beside the epoch and the like


def load_weights_(model: nn.Module, path: str | Path) -> None:
    """Copy the weights in `path` into `model`; every name and every shape has to fit.

    `.safetensors`, the index of several such files (`.safetensors.index.json`), or a state dict in
    `.pth`, `.pt`, `.th`, `.bin`, also one that lies under the key
    `state_dict` or `model`, or whose names all start with `module.` (DataParallel). When it raises, the
    model is as it was.
    """
    path = Path(path)
    own = model.state_dict()
    state = _without_prefix(_read(path), own)
    state = {**_may_be_absent(own, state), **state}
    problem = _mismatch(own, state)
    if problem:
        raise RankwiseError(
            f"the weights in {path} do not fit this network: {problem}; build the one they were trained in"
        )
    model.load_state_dict(state)


def _read(path: Path) -> dict[str, Tensor]:
    if not os.path.isfile(path):  # False, too, for a name that no file can have
        raise RankwiseError(f"there is no weights file {path}: give a .safetensors file or a .pth state dict")
    if path.name.endswith(INDEX):
        return read_sharded(path)
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except UNREADABLE as err:
            raise _unreadable(path, err) from err
    if path.suffix in _PICKLES:
        return _tensors_in(_read_pickle(path), path)
    raise RankwiseError(
        f"weights cannot be read from {path}: give a file that ends in .safetensors, {INDEX}, {', '.join(_PICKLES)}"
    )


def _read_pickle(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except UnpicklingError as err:
        # Only torch's wording tells a file that wants to call something from a file that is broken.
        if "global" in str(err).lower() or "unsupported class" in str(err).lower():
            raise RankwiseError(
                f"{path} holds more than tensors, and reading it could run code it contains: "
                "save model.state_dict() alone, best as .safetensors"
            ) from err
        raise _unreadable(path, err) from err
    except Exception as err:  # a broken pickle can raise nearly anything: KeyError, EOFError, struct.error, …
        raise _unreadable(path, err) from err


def _unreadable(path: Path, err: Exception) -> RankwiseError:
    return RankwiseError(
        f"{path} is truncated or is no weights file ({type(err).__name__} while reading it): get it again"
    )


def _tensors_in(content: Any, path: Path) -> dict[str, Tensor]:
    for key in _INNER_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if isinstance(content, Mapping) and content:
        state = dict(content)
        if all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
            return state
    raise RankwiseError(
        f"{path} holds no state dict, only a {type(content).__name__}: save model.state_dict(), "
        f"alone or under the key {' or '.join(map(repr, _INNER_KEYS))}"
    )


def _without_prefix(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = "module."
    wrapped = all(key.startswith(prefix) for key in state)
    if wrapped and not all(key.startswith(prefix) for key in own):
        return {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def _may_be_absent(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values for the names that a complete file may lack.

    Batch norm's step counter came with torch 0.4.1 and plays no part in inference; of tied weights
    safetensors keeps one name only.
    """
    here = {_place(own[key]): value for key, value in state.items() if key in own}
    absent = {key: value for key, value in own.items() if key not in state}
    found = {key: here[_place(value)] for key, value in absent.items() if _place(value) in here}
    counters = {key: value for key, value in absent.items() if key.endswith("num_batches_tracked")}
    return {**counters, **found}


def _place(tensor: Tensor) -> tuple[object, ...]:
    # The address alone is not enough: all empty tensors share it, and so do all tensors on "meta".
    unique = id(tensor) if tensor.data_ptr() == 0 else 0
    return tensor.data_ptr(), unique, tuple(tensor.shape), tensor.stride()


def _mismatch(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """What does not fit, the first few names of each kind; empty when everything does."""
    missing = [key for key in own if key not in state]
    unexpected = [key for key in state if key not in own]
    differing = [
        f"{key} (file {_shape(value)}, network {_shape(own[key])})"
        for key, value in state.items()
        if key in own and value.shape != own[key].shape
    ]
    complex_ = [key for key, value in state.items() if key in own and value.is_complex() and not own[key].is_complex()]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": differing, "complex": complex_}
    return "; ".join(f"{kind}: {_first(names)}" for kind, names in kinds.items() if names)


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"


def _first(names: list[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
