"""AdamW in the axes along which gradients vary (SOAP, Vyas et al. 2024).

The gradient G of a weight, rows × columns, has the moments L = E[G Gᵀ] and R = E[Gᵀ G]. In their eigenvectors P and Q
its entries are nearly uncorrelated, and what AdamW does to each entry by itself is right there:

    W ← W − lr · P · adam(Pᵀ G Q) · Qᵀ

Factors of a layer need that more than the layer itself does: channels that enter a layer are correlated, and so are the
columns of a factor, of which any basis would do. The axes follow the moments by one step of orthogonal iteration every
EVERY steps. Sides with more than MOST entries, norms and biases keep their own axes, so for them it is AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rankwise.core.linalg import eigenvectors

EVERY, MOST = 10, 256
_SIDES = (("left", "left_axes", 0), ("right", "right_axes", 1))


class Soap(Optimizer):
    """All that it remembers is tensors of a fixed layout in memory, so that a training can go on bit for bit."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.95, 0.95), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, _table(p.grad), group)

    def _step(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state |= {"step": torch.tensor(0.0), "mean": torch.zeros(gradient.shape).to(gradient)}
            state["square"] = state["mean"].clone()
        first, second = group["betas"]
        if _remember_moments_(state, gradient, second):
            return  # in axes of its own a gradient is diagonal, and beside the diagonal lies nothing but rounding
        turned = _turned(gradient, state, back=False)
        state["step"] += 1
        count = int(state["step"])
        state["mean"].lerp_(gradient, 1 - first)
        state["square"].mul_(second).addcmul_(turned, turned, value=1 - second)
        size = (state["square"] / (1 - second**count)).sqrt_().add_(group["eps"])
        change = _turned(_turned(state["mean"] / (1 - first**count), state, back=False) / size, state, back=True)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(change.reshape(p.shape), alpha=group["lr"])
        if count % EVERY == 0:
            _follow_moments_(state)


def _table(gradient: Tensor) -> Tensor:
    """Rows × columns in float32; what has one axis stays as it is."""
    gradient = gradient.float()
    return gradient.reshape(len(gradient), -1).contiguous() if gradient.dim() > 1 else gradient


def _remember_moments_(state: dict[str, Tensor], gradient: Tensor, keep: float) -> bool:
    """Take a gradient into the moments of both sides; the first one gives the axes, and True is returned."""
    fresh = False
    for side, axes, axis in _SIDES:
        if gradient.dim() < 2 or not 1 < gradient.shape[axis] <= MOST:
            continue
        moment = gradient @ gradient.T if axis == 0 else gradient.T @ gradient
        if side in state:
            state[side].lerp_(moment, 1 - keep)
            continue
        fresh, state[side] = True, (1 - keep) * moment.contiguous()
        state[axes] = eigenvectors(moment.double())[1].to(moment).contiguous()
    return fresh


def _turned(table: Tensor, state: dict[str, Tensor], *, back: bool) -> Tensor:
    """Pᵀ · table · Q, and back P · table · Qᵀ."""
    if (left := state.get("left_axes")) is not None:
        table = (left if back else left.T) @ table
    if (right := state.get("right_axes")) is not None:
        table = table @ (right.T if back else right)
    return table


def _follow_moments_(state: dict[str, Tensor]) -> None:
    """One step of orthogonal iteration; sorted, so that the strongest axes come first and stay orthogonal to others."""
    for side, axes, axis in _SIDES:
        if side not in state:
            continue
        moment, now = state[side], state[axes]
        order = (now * (moment @ now)).sum(0).argsort(descending=True, stable=True)
        state["square"] = state["square"].index_select(axis, order).contiguous()
        state[axes] = torch.linalg.qr((moment @ now[:, order]).double())[0].to(now).contiguous()
