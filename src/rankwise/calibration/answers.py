"""What a network gives: how much it varies over inputs, and how far another network is from it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rankwise.calibration.objective import divergence, logits_in
from rankwise.surgery.forward import Batches, run_example, tensors_of, undisturbed


@dataclass
class Spread:
    """Mean and variance of every entry of an answer, over inputs."""

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros(()))
    scatter: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, rows: Tensor) -> None:
        rows = rows.detach()
        rows = rows if rows.dtype == torch.float64 else rows.float()
        mean = rows.mean(0).double()
        scatter = (rows - mean.to(rows)).square().sum(0).double()
        shift, total = mean - self.mean, self.count + len(rows)
        self.scatter = self.scatter + scatter + shift.square() * (self.count * len(rows) / total)
        self.mean, self.count = self.mean + shift * (len(rows) / total), total


def add_answers(answers: dict[int, Spread], answer: list[Tensor]) -> None:
    """What the network says, entry by entry. Outputs of another size, as larger images may give, are other entries."""
    flat = flat_answer(answer)
    if flat is not None:
        answers.setdefault(flat.shape[1], Spread()).add(flat)


def flat_answer(answer: list[Tensor]) -> Tensor | None:
    """(inputs, entries): all outputs that have as many rows as the first one that is no single number."""
    answer = [t.detach() for t in answer if t.ndim and t.is_floating_point()]
    if not answer:
        return None
    parts = [t.reshape(len(answer[0]), -1) for t in answer if len(t) == len(answer[0])]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def variance_of(answers: dict[int, Spread]) -> float:
    """Of an input's outputs, summed over their entries; of their squares where they never vary."""
    count = max(1, sum(one.count for one in answers.values()))
    varied = sum(float(one.scatter.sum()) for one in answers.values()) / count
    energy = sum(one.count * float(one.mean.square().sum()) for one in answers.values()) / count
    return max(varied, 1e-12 * energy, 1e-300)


def change_of(model: nn.Module, small: nn.Module, inputs: Batches, variance: float) -> float:
    """What `effect` predicts: E ‖out − out°‖² relative to the variance of the outputs.

    Of networks that end in a vocabulary: the divergence of probabilities in nats for each position (objective.py).
    """
    return changes_of(model, [small], inputs, variance)[0]


def changes_of(model: nn.Module, others: list[nn.Module], inputs: Batches, variance: float) -> list[float]:
    """`change_of` for each of some networks; the original runs once."""
    lost, count = [0.0] * len(others), 0
    with undisturbed(model), ExitStack() as calm:
        for small in others:
            calm.enter_context(undisturbed(small))
        for batch in inputs:
            wanted = _floats(run_example(model, batch))
            logits = logits_in(model, wanted)
            count += len(logits) if logits is not None else _rows(wanted)
            for i, small in enumerate(others):
                given = _floats(run_example(small, batch))
                if logits is not None:
                    lost[i] += 2 * divergence(logits, given[_index(wanted, logits)])
                else:
                    lost[i] += _distance(wanted, given)
    return [one / max(1, count) / variance for one in lost]


def _rows(answer: list[Tensor]) -> int:
    flat = flat_answer(answer)
    return 0 if flat is None else len(flat)


def _distance(wanted: list[Tensor], given: list[Tensor]) -> float:
    """‖out − out°‖², summed over inputs."""
    one, other = flat_answer(wanted), flat_answer(given)
    if one is None or other is None:
        return 0.0
    return float((other.double() - one.to(other.device).double()).square().sum())


def _floats(output: object) -> list[Tensor]:
    return [t for t in tensors_of(output) if t.is_floating_point()]


def _index(answer: list[Tensor], one: Tensor) -> int:
    return next(i for i, t in enumerate(answer) if t is one)
