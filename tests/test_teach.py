"""A network that learns from the one before it was compressed, beside the labels."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from rankwise.teach import SHARE, TEMPERATURE, taught


@pytest.mark.parametrize("shape", [(7, 5), (3, 5, 4, 4)])
def test_a_teacher_who_says_the_same_adds_nothing(shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    loss = taught(torch.tensor(2.0), logits, logits.detach() + 3.0)
    assert float(loss.detach()) == pytest.approx(2.0 * (1 - SHARE), abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert float(gradient.abs().max()) < 1e-6


def test_it_is_the_formula() -> None:
    random = torch.Generator().manual_seed(1)
    ours, theirs = (torch.randn(6, 4, generator=random) for _ in range(2))
    p, q = ((t / TEMPERATURE).softmax(1) for t in (theirs, ours))
    apart = (p * (p.log() - q.log())).sum(1).mean()
    label = F.cross_entropy(ours, torch.zeros(6, dtype=torch.long))
    expected = (1 - SHARE) * label + SHARE * TEMPERATURE**2 * apart
    assert float(taught(label, ours, theirs)) == pytest.approx(float(expected), rel=1e-5)
    pixels = [t.t().reshape(1, 4, 2, 3) for t in (ours, theirs)]  # each of the six as a pixel
    assert float(taught(label, *pixels)) == pytest.approx(float(expected), rel=1e-5)
