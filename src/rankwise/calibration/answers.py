"""What a network gives: how much it varies over inputs, and how far another network is from it."""

from __future__ import annotations

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
    lost, count = 0.0, 0
    with undisturbed(model), undisturbed(small):
        for batch in inputs:
            answers = [_floats(run_example(net, batch)) for net in (model, small)]
            logits = logits_in(model, answers[0])
            if logits is not None:
                lost += 2 * divergence(logits, answers[1][_index(answers[0], logits)])
                count += len(logits)
                continue
            wanted, given = (flat_answer(answer) for answer in answers)
            if wanted is not None and given is not None:
                lost += float((given.double() - wanted.to(given.device).double()).square().sum())
                count += len(wanted)
    return lost / max(1, count) / variance


def _floats(output: object) -> list[Tensor]:
    return [t for t in tensors_of(output) if t.is_floating_point()]


def _index(answer: list[Tensor], one: Tensor) -> int:
    return next(i for i, t in enumerate(answer) if t is one)
