"""A second teacher beside the labels: the network before it was compressed.

With logits s of the network that is trained and t of the teacher, on the same augmented images, the loss is (Hinton et
al. 2015)

    (1 − SHARE) · loss(s, labels) + SHARE · T² · KL(softmax(t / T) ‖ softmax(s / T)),   T = TEMPERATURE

where T² keeps the gradients of both terms in one unit. The teacher is in evaluation mode and is never changed.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

SHARE = 0.9
TEMPERATURE = 4.0


def taught(loss: Tensor, logits: Tensor, wanted: Tensor) -> Tensor:
    """The loss above; logits are B×C, or B×C×H×W for segmentation, where every pixel counts as one input."""
    ours, theirs = ((t.float() / TEMPERATURE).log_softmax(1) for t in (logits, wanted))
    apart = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(1).mean()
    return (1 - SHARE) * loss + SHARE * TEMPERATURE**2 * apart
