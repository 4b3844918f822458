"""Calibration data as people have it: what a loader yields becomes what the network takes.

A batch may be a tensor, a tuple or list with labels in it, or a dict (a Hugging Face batch is one). Which part is the
input follows from the example and from the arguments of the network's forward; `part` names it by index or key where
that is not clear. Labels are dropped, and `Cleaned.notes` says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from rankwise.errors import RankwiseError

LABELS = ("label", "labels", "target", "targets", "y", "class", "classes")
BATCH = 32  # samples of a data set that come one by one
DROPPED = "the data comes with labels, which are not used: {} of every batch is the input"


class Cleaned:
    """Inputs of a network out of whatever a loader yields, as often as the loader can be read."""

    def __init__(self, data: Any, model: nn.Module, example: Any, part: int | str | None) -> None:
        self.data, self.part = data, part
        self.takes, self.needs = _arguments(model)
        self.example = example
        self.notes: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        return map(self.clean, self.data)

    def clean(self, batch: Any) -> Any:
        """What `run_example` takes: a tensor, a tuple of arguments, or a dict of keyword arguments."""
        if self.part is not None:
            return self._picked(batch, self.part)
        if isinstance(batch, Mapping):
            return self._of_dict(batch)
        if isinstance(batch, tuple | list):
            return self._of_sequence(tuple(batch))
        return _tensor(batch)

    def _picked(self, batch: Any, part: int | str) -> Any:
        parts: dict[Any, Any] = {}  # a tensor has none: its first entry would be one example
        if isinstance(batch, Mapping | tuple | list):
            parts = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
        if part in parts:
            return _tensor(parts[part])
        possible = f"give one of {', '.join(map(repr, parts))}" if parts else "leave it out"
        raise RankwiseError(f"input={part!r} was given, and a batch of the data is {_shape(batch)}: {possible}")

    def _of_dict(self, batch: Mapping[str, Any]) -> Any:
        tensors = {key: _tensor(value) for key, value in batch.items()}
        if isinstance(self.example, Mapping):
            known = {key: tensors[key] for key in self.example if key in tensors}
        else:
            names, anything = self.takes
            known = {k: v for k, v in tensors.items() if k in names or (anything and isinstance(v, Tensor))}
        known = {key: value for key, value in known.items() if key.lower() not in LABELS}
        if not known:
            inputs = [k for k, v in tensors.items() if isinstance(v, Tensor) and k.lower() not in LABELS]
            if len(inputs) != 1:
                raise self._unclear(batch)
            self._say(set(tensors) - set(inputs), repr(inputs[0]))
            return tensors[inputs[0]]
        self._say({key for key in tensors if key.lower() in LABELS}, ", ".join(map(repr, known)))
        return known

    def _of_sequence(self, batch: tuple[Any, ...]) -> Any:
        if len(batch) == 1:
            return self.clean(batch[0])
        wanted = len(self.example) if isinstance(self.example, tuple | list) else None
        if wanted is None and not isinstance(self.example, Tensor):
            names, anything = self.takes
            wanted = 1 if len(names) <= 1 and not anything else None
        if wanted is None and isinstance(self.example, Tensor):
            wanted = 1
        if wanted is None and (self.needs >= len(batch) or not _is_label(batch[-1], batch[0])):
            return tuple(map(_tensor, batch))  # arguments by position, as an example may be
        if wanted is None:
            wanted = len(batch) - 1
        if wanted > len(batch):
            raise self._unclear(batch)
        if wanted < len(batch):
            self._say(batch[wanted:], "the first part" if wanted == 1 else f"the first {wanted} parts")
        return self.clean(batch[0]) if wanted == 1 else tuple(map(_tensor, batch[:wanted]))

    def _say(self, dropped: Iterable[Any], kept: str) -> None:
        if list(dropped):
            said = DROPPED.format(kept)
            self.notes[:] = dict.fromkeys([*self.notes, said])

    def _unclear(self, batch: Any) -> RankwiseError:
        return RankwiseError(
            f"a batch of the data is {_shape(batch)}, and it is not clear which part the network takes: give input= "
            f"with its index or its name"
        )


def clean(data: Any, model: nn.Module, example: Any, part: int | str | None = None) -> Any:
    """Data for a network: a tensor stays one, a map-style data set is read in batches, anything else is cleaned.

    What has `batches` knows itself what is input and what is label. A dict is one batch. A generator stays one, and is
    read once.
    """
    if isinstance(data, Tensor | np.ndarray):
        if part is not None:
            raise RankwiseError(f"input={part!r} was given, and the data is a tensor, which is the input: leave it out")
        return _tensor(data)
    if hasattr(data, "batches"):
        return data
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=BATCH)
    if isinstance(data, Mapping):
        data = [data]
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise RankwiseError(
            f"data={type(data).__name__} was given: give a tensor, a DataLoader, a list of batches, or the name of a "
            f"data set such as 'digits'"
        )
    cleaned = Cleaned(data, model, example, part)
    return OneRun(cleaned) if isinstance(data, Iterator) else cleaned


class OneRun(Iterator[Any]):
    """`Cleaned` for a generator: it can be read once, and says so by being an iterator."""

    def __init__(self, cleaned: Cleaned) -> None:
        self.cleaned, self.notes = cleaned, cleaned.notes

    def __next__(self) -> Any:
        return self.cleaned.clean(next(self.cleaned.data))


def notes_of(data: object) -> list[str]:
    """What was dropped while the data was read."""
    return list(data.notes) if isinstance(data, Cleaned | OneRun) else []


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return value


def _arguments(model: nn.Module) -> tuple[tuple[list[str], bool], int]:
    """Names of the arguments of forward, whether it takes any number of others, and how many it cannot do without."""
    try:
        every = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return ([], True), 0
    names = [p.name for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needs = sum(p.default is p.empty for p in every if p.name in names)
    return (names, any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in every)), needs


def _is_label(last: Any, first: Any) -> bool:
    """Whole numbers, one for each input: what a classifier is trained with."""
    numbers = isinstance(last, Tensor) and not last.is_floating_point() and last.ndim <= 1
    return numbers and isinstance(first, Tensor) and first.ndim > 1 and last.numel() == len(first)


def _shape(batch: Any) -> str:
    if isinstance(batch, Tensor | np.ndarray):
        return "×".join(map(str, batch.shape)) or "a number"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key!r}: {_shape(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, tuple | list):
        return "(" + ", ".join(map(_shape, batch)) + ")"
    return f"a {type(batch).__name__}"
