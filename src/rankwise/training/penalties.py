"""Learning–compression: train while the network is pulled towards one that the plan can build.

Idelbayev & Carreira-Perpiñán (2020) alternate two steps, with μ growing:

    L step    train  loss(W) + μ/2 · Σ_l ‖W_l − Θ_l‖²
    C step    Θ = the compressed network nearest to W:  min_Θ  Σ_l ‖W_l − Θ_l‖² + λ · cost(Θ)

The C step of the method `l-rank` is exactly that, with the λ that the budget asks for; any other method that needs no
data may take its place. Here an L step is one epoch, so the C step depends on nothing but the weights at the start of
an epoch, and an interrupted loop resumes bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankwise.compression import Compression, Request
from rankwise.errors import RankwiseError
from rankwise.methods import get_method, needs_data
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Plan
from rankwise.pruning.filters import Filters
from rankwise.surgery.replace import apply_plan, densify
from rankwise.training.processes import Engine
from rankwise.training.recipes import Recipe


@dataclass(frozen=True)
class SizeTarget:
    """What the loop is to end at: at most `params` parameters, decided by `method`."""

    params: int
    method: str = "l-rank"
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        settings = get_method(self.method).settings
        if isinstance(settings, Filters) or needs_data(settings):
            raise RankwiseError(
                f"--loop lc decomposes weights alone, and {self.method} removes filters or looks at data: give l-rank"
            )


def strength(recipe: Recipe, epoch: int) -> float:
    """μ in an epoch, counted from 0: recipe.mu · recipe.mu_growth^epoch, and never so large that a step overshoots."""
    return float(min(recipe.mu * recipe.mu_growth**epoch, 1 / recipe.lr))


def c_step(model: nn.Module, target: SizeTarget, engine: Engine) -> dict[str, Tensor]:
    """Θ by name of the parameter, for every layer that would be decomposed; the plan is the first process'."""
    text = None
    if engine.writes:
        job = Compression(model, None, Request(target.method, exclude=target.exclude))
        text = job.plan(Budget(params=target.params)).dumps().encode()
    plan = Plan.loads(engine.from_first(text) or b"", "the plan of the C step")
    near = densify(apply_plan(model, plan))
    names = {f"{choice.name}.weight" for choice in plan.choices}
    return {name: value.detach() for name, value in near.named_parameters() if name in names}


def pull(model: nn.Module, target: SizeTarget, recipe: Recipe, engine: Engine) -> Callable[[int], Callable[[], Tensor]]:
    """For `train.Hooks`: at the start of an epoch the C step, then in every step μ/2 · Σ ‖W − Θ‖²."""

    def begin(epoch: int) -> Callable[[], Tensor]:
        mu, theta = strength(recipe, epoch), c_step(model, target, engine)
        weights = dict(model.named_parameters())

        def penalty() -> Tensor:
            apart = [(weights[name] - value).square().sum() for name, value in theta.items()]
            return mu / 2 * torch.stack(apart).sum() if apart else torch.zeros((), device=engine.device)

        return penalty

    return begin
