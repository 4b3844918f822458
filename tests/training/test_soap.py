"""AdamW in the axes of the gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from rankwise.training import soap
from rankwise.training.soap import Soap


def _walk(kind: type[Optimizer], start: Tensor, targets: Tensor, left: Tensor, right: Tensor, **how: float) -> Tensor:
    """The weight after a step towards each target, the whole problem turned by orthogonal `left` and `right`."""
    weight = nn.Parameter(left @ start @ right.T)
    optimizer = kind([weight], lr=0.05, betas=(0.95, 0.95), **how)  # type: ignore[call-arg]
    for target in targets:
        optimizer.zero_grad()
        (weight - left @ target @ right.T).square().sum().backward()
        optimizer.step()
    return weight.detach()


def _problem(rows: int, columns: int, steps: int = 30) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(rows, columns, generator=draw)
    mix = torch.logspace(0, -1.5, columns) * torch.randn(rows, rows, generator=draw)[:, :1]
    targets = 3 * torch.randn(steps, rows, columns, generator=draw) * mix
    turn = [torch.linalg.qr(torch.randn(n, n, generator=draw))[0] for n in (rows, columns)]
    return start, targets, turn[0], turn[1]


def test_axes_of_the_weights_do_not_matter() -> None:
    start, targets, left, right = _problem(5, 5)
    plain = _walk(Soap, start, targets, torch.eye(5), torch.eye(5))
    turned = left.T @ _walk(Soap, start, targets, left, right) @ right
    assert (turned - plain).norm() < 1e-3 * (plain - start).norm()
    usual = left.T @ _walk(AdamW, start, targets, left, right, weight_decay=0.0) @ right
    other = _walk(AdamW, start, targets, torch.eye(5), torch.eye(5), weight_decay=0.0)
    assert (usual - other).norm() > 0.05 * (other - start).norm(), "for AdamW they do"


def test_what_has_one_axis_or_long_sides_is_adamw() -> None:
    for shape in ((7,), (soap.MOST + 1, soap.MOST + 2)):
        torch.manual_seed(0)
        start = torch.randn(shape)
        ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        how = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
        pair = ((ours, Soap([ours], **how)), (theirs, AdamW([theirs], **how)))  # type: ignore[arg-type]
        for k in range(3):
            for weight, optimizer in pair:
                weight.grad = (weight.detach() - k).sign() * (1 + k) + weight.detach()
                optimizer.step()
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_convolutions_without_a_gradient_and_zero_gradients() -> None:
    torch.manual_seed(0)
    conv, idle = nn.Conv2d(3, 5, 3), nn.Conv2d(3, 5, 3)
    before = idle.weight.detach().clone()
    optimizer = Soap([*conv.parameters(), *idle.parameters()], lr=0.01)
    x = torch.randn(2, 3, 8, 8)
    loss = conv(x).square().mean().item()
    for k in range(2 * soap.EVERY + 1):
        optimizer.zero_grad()
        (conv(x).square().mean() * (k > 0)).backward()  # the first gradient is 0: no axes can be seen in it
        optimizer.step()
    assert torch.equal(idle.weight, before)
    assert torch.isfinite(conv.weight).all()
    assert conv(x).square().mean() < loss / 4
    axes = optimizer.state[conv.weight]["right_axes"]
    assert torch.allclose(axes.T @ axes, torch.eye(27), atol=1e-5)
