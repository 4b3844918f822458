"""A pair that is computed as the product of its factors is the same function, with the same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.surgery.modules import mark_of
from rankwise.surgery.multiplied import multiplied, pairs_to_multiply

X = torch.randn(3, 6, 9, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network(**how: object) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(6, 16, 3, padding=1, **how), nn.Tanh(), nn.Conv2d(16, 12, 3, bias=False)]  # type: ignore[arg-type]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 20)).double()


def outcome(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    out = model(X)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("method", ["alds", "svd", "tucker2", "messi", "cp", "auto"])
@pytest.mark.parametrize("how", [{}, {"stride": 2}, {"dilation": 2, "groups": 2}], ids=["plain", "stride", "groups"])
def test_it_is_the_same_function_with_the_same_gradients(method: str, how: dict[str, int]) -> None:
    small, _ = rw.compress(network(**how), X[:1], method=method, keep=0.6)
    assert pairs_to_multiply(small, "product"), "something was decomposed"
    wanted = outcome(small)
    with multiplied(small):
        found = outcome(small)
    assert len(wanted) == len(found)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(small(X), wanted[0], rtol=0, atol=0)  # and afterwards it is what it was


def test_auto_multiplies_convolutions_that_are_not_tiny() -> None:
    small, _ = rw.compress(network(), X[:1], method="svd", keep=0.6)
    chosen = pairs_to_multiply(small, "auto")
    kinds = [mark["kind"] for pair in chosen if (mark := mark_of(pair)) is not None]
    assert kinds
    assert set(kinds) == {"Conv2d"}
    assert not pairs_to_multiply(small, "factors")


@pytest.mark.parametrize(("width", "stride", "multiplied_by_auto"), [(64, 1, False), (64, 2, True), (8, 1, True)])
def test_auto_counts_what_depthwise_parts_cost(width: int, stride: int, multiplied_by_auto: bool) -> None:
    """Wide layers run as 1×1, depthwise, 1×1; narrow ones, and strided depthwise parts, as one whole convolution."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(width, width, 3, stride, padding=1))
    small, _ = rw.compress(model, torch.randn(1, width, 8, 8), method="cp", keep=0.4)
    pairs = pairs_to_multiply(small, "product")
    assert len(pairs) == 1
    assert pairs_to_multiply(small) == (pairs if multiplied_by_auto else [])
