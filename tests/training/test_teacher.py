"""A network that learns from the one before it was compressed, beside the labels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.calibration.layer_targets import errors_of, outputs_of, relative, replaced
from rankwise.training.teacher import SHARE, Teacher, lesson, ready


def network(shape: tuple[int, ...] = ()) -> nn.Sequential:
    torch.manual_seed(0)
    head: list[nn.Module] = [nn.Conv2d(16, 5, 1)] if shape else [nn.Flatten(), nn.Linear(16 * 36, 5)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3, padding=1), *head)


def same(output: object) -> Tensor:
    assert isinstance(output, Tensor)
    return output


X = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(), (6, 6)])
def test_a_teacher_who_says_the_same_adds_nothing(shape: tuple[int, ...]) -> None:
    teacher = network(shape).eval()
    with lesson(Teacher(teacher), teacher, X, same) as taught:
        logits = teacher(X)
    assert float(taught(torch.tensor(2.0), logits).detach()) == pytest.approx(2.0 * SHARE, abs=1e-6)


def test_it_is_the_formula() -> None:
    """Labels, logits and every replaced layer, relative to the teacher's variance; gradients reach the pairs."""
    teacher = network().eval()
    small, plan = rw.compress(teacher, X[:1], keep=0.5, error="energy")
    names = replaced(small, teacher)
    assert names == [c.name for c in plan.choices]
    assert len(names) > 1
    with lesson(Teacher(teacher), small, X, same) as taught:
        logits = small(X)
    label = F.cross_entropy(logits, torch.zeros(8, dtype=torch.long))
    with torch.no_grad():
        expected = SHARE * label + share_of(logits, teacher(X))
        seen = [(teacher[: int(n) + 1](X), small[: int(n) + 1](X)) for n in names]
        expected = expected + sum(share_of(ours, theirs) for theirs, ours in seen) / len(names)
    loss = taught(label, logits)
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in small[2].parameters())
    assert all(p.grad is None for p in teacher.parameters())
    assert not any(m._forward_hooks for network in (small, teacher) for m in network.modules()), "hooks are taken back"


def share_of(ours: Tensor, theirs: Tensor) -> Tensor:
    return (ours - theirs).square().sum() / (theirs - theirs.mean(0)).square().sum()


def test_without_a_teacher_there_are_the_labels() -> None:
    model = network()
    with lesson(None, model, X, same) as taught:
        logits = model(X)
    loss = torch.tensor(1.5)
    assert taught(loss, logits) is loss


def test_a_layer_that_is_called_twice_is_compared_call_by_call() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    teacher = nn.Sequential(layer, nn.Tanh(), layer)
    small, _ = rw.compress(teacher, torch.randn(1, 6), keep=0.8, error="energy")
    x = torch.randn(10, 6)
    with torch.no_grad(), outputs_of(teacher, replaced(small, teacher)) as layers:
        teacher(x)
    with torch.no_grad(), errors_of(small, layers) as errors:
        small(x)
    assert len(errors) == 2
    with torch.no_grad():
        assert float(errors[0]) == pytest.approx(float(share_of(small[0](x), layer(x))), rel=1e-5)
        assert float(errors[1]) == pytest.approx(float(share_of(small(x), teacher(x))), rel=1e-5)


def test_constant_targets_do_not_divide_by_zero() -> None:
    assert bool(torch.isfinite(relative(torch.randn(4, 3), torch.ones(4, 3))))
    assert float(relative(torch.zeros(4, 3), torch.zeros(4, 3))) == 0


@pytest.mark.parametrize("shape", [(9,), (9, 5), (9, 4, 7), (9, 4, 3, 6), (9, 4, 3, 2, 2)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_errors_do_not_depend_on_how_tensors_lie(shape: tuple[int, ...], last: bool, half: bool) -> None:
    """The formula in float64, from a mean far from 0; in bf16 only the inputs are rounded, not the mean."""
    torch.manual_seed(0)
    given, wanted = torch.randn(shape) + 30, torch.randn(shape) + 30
    if half:
        given, wanted = given.bfloat16(), wanted.bfloat16()
    exact, there = given.double(), wanted.double()
    told = (exact - there).square().sum() / (there - there.mean(0)).square().sum()
    if last and len(shape) == 4:
        wanted = wanted.contiguous(memory_format=torch.channels_last)
    given.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        found = relative(given, wanted)
    assert float(found.detach()) == pytest.approx(float(told), rel=1e-4)
    found.backward()
    slope = 2 * (exact - there) / (there - there.mean(0)).square().sum()
    assert given.grad is not None
    assert torch.allclose(given.grad.double(), slope, rtol=1e-2 if half else 1e-4, atol=1e-6)


def test_a_teacher_whose_layers_nobody_looks_at_folds_its_norms() -> None:
    """The same answers, with hooks on nothing: the loss is then by labels and outputs only."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 36, 5))
    teacher[1].running_var.uniform_(0.5, 2.0)
    teacher.eval()
    quick = ready(teacher, X[:1], layers=0.0)
    assert isinstance(quick[1], nn.Identity)
    assert isinstance(ready(teacher, X[:1], layers=1.0)[1], nn.BatchNorm2d)
    torch.testing.assert_close(quick(X), teacher(X), rtol=1e-4, atol=1e-5)
    small, _ = rw.compress(teacher, X[:1], keep=0.5, error="energy")
    label = torch.tensor(3.0)
    with lesson(Teacher(quick, labels=0.2, layers=0.0), small, X, same) as taught:
        logits = small(X)
    with torch.no_grad():
        assert float(taught(label, logits)) == pytest.approx(0.6 + float(share_of(logits, teacher(X))), rel=1e-3)
