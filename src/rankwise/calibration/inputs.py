"""What a plan looks at: calibration data, or inputs that are made up where there is none; and which part serves what.

Whoever is fitted to an input cannot be judged on it. So inputs are dealt out at random to four parts:

    two halves   statistics are kept apart for each: factors are fitted on one and measured on the other
    check        judges what is decided after the plan: corrections of the prediction, fitting in order, recovery
    last         sees nothing until the network is finished: what is measured there is what the plan states as measured

One image or one sequence is one sample, whatever the number of its positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

import torch
from torch import Tensor, nn

from rankwise.calibration.activations import Data, batches
from rankwise.calibration.synthetic import noise, norms_of, synthetic_images
from rankwise.surgery.forward import Example, tensors_of

CALIBRATION, SYNTHETIC, NOISE = "calibration", "synthetic", "noise"
SHRINKAGE = 0.1  # of moments of inputs that are not data, towards the identity, at least
ENTRIES = 1 << 21  # of a batch of images: 13 of 3×224×224
MOST_AT_ONCE = 256  # samples of a batch
TOKENS = 2048  # of a batch of texts: a vocabulary of 32,000 makes 262 MB of them
FEWEST = 12  # samples: with fewer, all of them are in the halves
ASIDE, MOST_ASIDE = 12, 64  # one of so many samples is in `check`, another one in `last`; at most so many

Rows = list[tuple[int, Tensor]]  # which samples of which batch


@dataclass(frozen=True, eq=False)
class Portion:
    """Some samples of some batches; read as often as needed, a piece of a batch at a time."""

    sources: list[Example]
    rows: Rows

    def __iter__(self) -> Iterator[Example]:
        for piece in self.pieces():
            yield piece.together()

    def pieces(self, entries: int = ENTRIES, samples: int = MOST_AT_ONCE) -> Iterator[Portion]:
        """Portions that run at once, of at most so many entries and samples where they are images.

        Small batches are joined.
        """
        joined: Rows = []
        size, shape = 0, None
        for number, rows in self.rows:
            batch = self.sources[number]
            kind = _kind(batch) if samples_in(batch) > 0 else None
            most = _at_once(batch, entries, samples)
            for some in torch.split(rows, most):
                if joined and (kind is None or kind != shape or size + len(some) > most):
                    yield Portion(self.sources, joined)
                    joined, size = [], 0
                joined.append((number, some))
                size, shape = size + len(some), kind
        if joined:
            yield Portion(self.sources, joined)

    def together(self) -> Example:
        """All samples as one batch; what `pieces` gives can be joined."""
        parts = [_take(self.sources[number], rows) for number, rows in self.rows]
        return _laid_out(parts[0] if len(parts) == 1 else _joined(parts))

    def __len__(self) -> int:
        return sum(len(rows) for _, rows in self.rows)

    @property
    def of_images(self) -> bool:
        """Whether batches can be cut anywhere."""
        return all(_is_images(self.sources[number]) for number, _ in self.rows)

    def source_of(self, sample: int) -> int:
        """The number of the batch that a sample of this portion is from."""
        for number, rows in self.rows:
            if sample < len(rows):
                return number
            sample -= len(rows)
        return self.rows[-1][0]

    def first(self, count: int) -> Portion:
        """At most so many samples, the first ones."""
        return self.parted(count)[0]

    def parted(self, count: int) -> tuple[Portion, Portion]:
        """At most so many samples, the first ones; and the others."""
        here: Rows = []
        there: Rows = []
        for number, rows in self.rows:
            cut = max(0, min(count, len(rows)))
            here += [(number, rows[:cut])] if cut else []
            there += [(number, rows[cut:])] if cut < len(rows) else []
            count -= cut
        return Portion(self.sources, here), Portion(self.sources, there)

    def __add__(self, other: Portion) -> Portion:
        """The samples of both, those of one batch together."""
        joined: dict[int, list[Tensor]] = {}
        for number, rows in (*self.rows, *other.rows):
            joined.setdefault(number, []).append(rows)
        return Portion(self.sources, [(number, torch.cat(parts).sort()[0]) for number, parts in sorted(joined.items())])


@dataclass(frozen=True, eq=False)
class Inputs:
    """Batches of inputs, of what `kind` they are, and their parts, drawn with `seed`."""

    batches: list[Example]
    kind: str
    seed: int = 0

    @property
    def real(self) -> bool:
        """Whether they are data: a layer that data does not reach stays as it is."""
        return self.kind == CALIBRATION

    @property
    def means(self) -> bool:
        """Whether means of activations are to be trusted, so that layers can be fitted one after the other."""
        return self.kind != NOISE

    @property
    def least(self) -> float:
        """How far moments are drawn towards the identity at least."""
        return 0.0 if self.real else SHRINKAGE

    @cached_property
    def _parts(self) -> tuple[Portion, ...]:
        sizes = [samples_in(batch) for batch in self.batches]
        total = sum(sizes)
        aside = 0 if total < FEWEST else min(MOST_ASIDE, max(2, total // ASIDE))
        order = torch.randperm(total, generator=torch.Generator().manual_seed(self.seed))
        fitted = order[2 * aside :]
        drawn = (fitted[::2], fitted[1::2], order[:aside], order[aside : 2 * aside])
        return tuple(Portion(self.batches, _by_batch(some, sizes)) for some in drawn)

    @property
    def halves(self) -> tuple[Portion, Portion]:
        """What factors are fitted to and measured on. A single input is alone in the first."""
        return self._parts[0], self._parts[1]

    @property
    def fitted(self) -> Portion:
        """Both halves together."""
        return self._parts[0] + self._parts[1]

    @property
    def check(self) -> Portion:
        return self._parts[2]

    @property
    def last(self) -> Portion:
        return self._parts[3]


def find_inputs(
    model: nn.Module, example: Example | None, data: Data | None, macs: int | None, seed: int = 0
) -> Inputs:
    """The data; without any, images that fit the batch norms, or smooth noise where there are none.

    Raises `NoInputs` with the reason where nothing can be made up. `macs` are those of the example.
    """
    if data is not None:
        return Inputs(list(batches(data)), CALIBRATION, seed)
    if norms_of(model):
        return Inputs(list(synthetic_images(model, example, macs, seed)), SYNTHETIC, seed)
    return Inputs(list(noise(model, example, macs, seed)), NOISE, seed)


def samples_in(batch: Example) -> int:
    """How many samples a batch has: the first size of its tensors, or 1 if they differ in it."""
    sizes = {len(t) if t.ndim else 0 for t in tensors_of(batch)}
    return sizes.pop() if len(sizes) == 1 and 0 not in sizes else 1


def _by_batch(samples: Tensor, sizes: list[int]) -> Rows:
    """Numbers of samples over all batches → their numbers in each batch, in order."""
    ends = torch.tensor(sizes).cumsum(0)
    samples = samples.sort()[0]
    which = torch.bucketize(samples, ends, right=True)
    starts = ends - torch.tensor(sizes)
    return [(b, samples[which == b] - starts[b]) for b in sorted(set(which.tolist()))]


def _at_once(batch: Example, entries: int, samples: int) -> int:
    """So many samples like those of a batch run at once."""
    count = max(1, samples_in(batch))
    if isinstance(batch, Mapping) and _kind(batch) is not None:
        tokens = sum(t.numel() for t in batch.values() if not t.is_floating_point()) // count
        return max(1, TOKENS // tokens) if tokens else count
    if not _is_images(batch):
        return count
    each = batch.numel() // count
    return max(1, min(samples, entries // max(1, each)))


def _is_images(batch: Example) -> TypeGuard[Tensor]:
    return isinstance(batch, Tensor) and batch.ndim == 4


def _kind(batch: Example) -> object:
    """Batches of one kind can be joined: tensors of equal shapes but for their first size, alone or by equal names."""
    if isinstance(batch, Tensor):
        return batch.shape[1:], batch.dtype
    if isinstance(batch, Mapping) and all(isinstance(value, Tensor) and value.ndim for value in batch.values()):
        return tuple((key, value.shape[1:], value.dtype) for key, value in batch.items())
    return None


def _joined(parts: list[Example]) -> Example:
    """What `_kind` says can be joined."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: torch.cat([part[key] for part in parts if isinstance(part, Mapping)]) for key in first}
    return torch.cat(parts)  # type: ignore[arg-type]


def _take(batch: Example, rows: Tensor) -> Example:
    if isinstance(batch, Tensor) and batch.ndim:
        return batch[rows.to(batch.device)]
    if samples_in(batch) == 1:
        return batch
    if isinstance(batch, Mapping):
        return {key: _take_part(value, rows) for key, value in batch.items()}
    return type(batch)(_take_part(value, rows) for value in batch)


def _take_part(value: object, rows: Tensor) -> object:
    if isinstance(value, Tensor):
        return value[rows.to(value.device)]
    if isinstance(value, Mapping):
        return {key: _take_part(part, rows) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_take_part(part, rows) for part in value)
    return value


def _laid_out(batch: Example) -> Example:
    """Images with channels innermost in memory: convolutions on the CPU take half of the time, for the same numbers."""
    if _is_images(batch) and batch.is_floating_point():
        return batch.contiguous(memory_format=torch.channels_last)
    return batch
