"""A second teacher beside the labels: the network before it was compressed.

On the same augmented images the loss is

    SHARE · loss(s, labels)  +  ‖s − t‖² / Var(t)  +  mean over replaced layers of ‖y − y°‖² / Var(y°)

with logits s of the network that is trained and t of the teacher, and outputs y of its pairs and y° of the layers that
they stand for: what recovery without labels learns from (calibration/distill.py), on all images of the training data.
The teacher is in evaluation mode and is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.calibration.layer_targets import errors_of, outputs_of, relative, replaced

SHARE = 0.1

Lesson = Callable[[Tensor, Tensor], Tensor]  # loss by labels, logits → the loss above


@contextmanager
def lesson(
    teacher: nn.Module | None, small: nn.Module, x: Tensor, answer: Callable[[object], Tensor]
) -> Iterator[Lesson]:
    """What the teacher says to x; run `small` on it inside, and ask for the loss. Without a teacher it is the labels'.

    `answer` finds the logits in what a network gives.
    """
    if teacher is None:
        yield lambda loss, _: loss
        return
    if isinstance(small, DistributedDataParallel):
        small = small.module
    with torch.no_grad(), outputs_of(teacher, replaced(small, teacher)) as layers:
        wanted = answer(teacher(x))
    with errors_of(small, layers) as errors:

        def whole(loss: Tensor, logits: Tensor) -> Tensor:
            apart = relative(logits, wanted)
            return SHARE * loss + (apart + torch.stack(errors).mean() if errors else apart)

        yield whole
