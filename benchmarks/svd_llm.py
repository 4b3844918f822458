"""Uniform SVD-LLM, written for comparison: truncation in whitened coordinates, the same ratio in all linear layers.

For a layer with inputs x and H = E[x xᵀ] = C Cᵀ (Cholesky), the SVD of W C = U Σ Vᵀ is cut at rank k and

    W ≈ (U_k √Σ_k) (√Σ_k V_kᵀ C⁻¹),

which is the least change of the layer's own outputs for the inputs of the original network (Wang et al. 2024). Layers
whose weight is shared with another module (a tied head) stay. Ranks follow from one ratio: the largest one for which
the whole network has at most the wanted number of parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """By name, those whose weight nobody else has."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and owners[id(m.weight)] == 1}


def second_moments(
    model: nn.Module, batches: Iterable[object], run: Callable[[nn.Module, object], Tensor]
) -> dict[str, Tensor]:
    """Σ x xᵀ of the inputs of every linear layer."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows = args[0].flatten(0, -2)
            found[name] = found.get(name, 0) + rows.t() @ rows

        return add

    hooks = [m.register_forward_pre_hook(hook(n)) for n, m in linear_layers(model).items()]
    with torch.no_grad():
        for batch in batches:
            run(model, batch)
    for one in hooks:
        one.remove()
    return found


def svd_llm(model: nn.Module, moments: dict[str, Tensor], params: int) -> nn.Module:
    """A copy with at most `params` parameters, every linear layer at the same ratio."""
    small = copy.deepcopy(model)
    layers = linear_layers(small)
    others = sum(p.numel() for p in model.parameters()) - sum(m.weight.numel() for m in layers.values())

    def rank(layer: nn.Linear, ratio: float) -> int:
        return max(1, int(ratio * layer.weight.numel() / sum(layer.weight.shape)))

    low, high = 0.0, 1.0
    for _ in range(40):
        ratio = (low + high) / 2
        fits = others + sum(rank(m, ratio) * sum(m.weight.shape) for m in layers.values()) <= params
        low, high = (ratio, high) if fits else (low, ratio)
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        setattr(small.get_submodule(parent), last, pair(layer, moments[name], rank(layer, low)))
    return small


def pair(layer: nn.Linear, moment: Tensor, rank: int) -> nn.Sequential:
    """The layer at a rank, as two linear layers."""
    moment = moment.double()
    root = torch.linalg.cholesky(moment + 1e-6 * moment.diagonal().mean() * torch.eye(len(moment)))
    u, s, v = torch.linalg.svd(layer.weight.detach().double() @ root, full_matrices=False)
    half = s[:rank].sqrt()
    first = nn.Linear(layer.in_features, rank, bias=False)
    second = nn.Linear(rank, layer.out_features, bias=layer.bias is not None)
    right = torch.linalg.solve_triangular(root, half[:, None] * v[:rank], upper=False, left=False)
    with torch.no_grad():
        first.weight.copy_(right)
        second.weight.copy_(u[:, :rank] * half)
        if layer.bias is not None:
            second.bias.copy_(layer.bias)
    return nn.Sequential(first, second)
