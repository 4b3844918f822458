"""A second teacher beside the labels: the network before it was compressed.

On the same augmented images the loss is

    labels · loss(s, labels)  +  ‖s − t‖² / Var(t)  +  layers · mean over replaced layers of ‖y − y°‖² / Var(y°)

with logits s of the network that is trained and t of the teacher, and outputs y of its pairs and y° of the layers that
they stand for: what recovery without labels learns from (calibration/distill.py), on all images of the training data.
The teacher is in evaluation mode and is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.calibration.layer_targets import errors_of, outputs_of, relative, replaced
from rankwise.surgery.fuse import fuse
from rankwise.surgery.replace import copy_model

SHARE = 0.1

Lesson = Callable[[Tensor, Tensor], Tensor]  # loss by labels, logits → the loss above


@dataclass(frozen=True, eq=False)
class Teacher:
    """The network that teaches, in bf16 or not, and the weights of the loss above."""

    network: nn.Module
    labels: float = SHARE
    layers: float = 1.0
    bf16: bool = False

    def answers(self, x: Tensor) -> object:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            return self.network(x)


def ready(network: nn.Module, example: Tensor, layers: float) -> nn.Module:
    """A copy of the teacher that answers sooner: with channels innermost in memory.

    Where no layer of it is looked at, batch norms are folded into the layers before them, too.
    """
    quick = (copy_model(network) if layers else fuse(network, example)).eval()
    if any(p.dim() == 4 for p in quick.parameters()) and all(p.dim() != 5 for p in quick.parameters()):
        quick.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return quick


@contextmanager
def lesson(
    teacher: Teacher | None, small: nn.Module, x: Tensor, answer: Callable[[object], Tensor]
) -> Iterator[Lesson]:
    """What the teacher says to x; run `small` on it inside, and ask for the loss. Without a teacher it is the labels'.

    `answer` finds the logits in what a network gives.
    """
    if teacher is None:
        yield lambda loss, _: loss
        return
    if isinstance(small, DistributedDataParallel):
        small = small.module
    names = replaced(small, teacher.network) if teacher.layers else []
    with torch.no_grad(), outputs_of(teacher.network, names) as layers:
        wanted = answer(teacher.answers(x))
    with errors_of(small, layers) as errors:

        def whole(loss: Tensor, logits: Tensor) -> Tensor:
            apart = teacher.labels * loss + relative(logits, wanted)
            return apart + teacher.layers * torch.stack(errors).mean() if errors else apart

        yield whole
