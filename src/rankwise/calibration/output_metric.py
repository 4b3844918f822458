"""How much the network's outputs move when a layer's outputs move.

For a change δ of a layer's outputs the network's outputs change by about J δ. The metric of a layer is

    E[JᵀJ] = E[g gᵀ],   g the gradient of v · output with v drawn from N(0, I),

summed over positions: E ‖J δ‖² ≈ tr(metric · E[δ δᵀ]) if positions and layers are taken as independent. So the
change of the network's outputs is a sum over layers, in one unit, and can be searched exactly. Labels are never needed,
and a network that is sure of itself (softmax near 0 and 1) does not hide its sensitivity, as gradients of a loss would.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from rankwise.calibration.activations import batches, check_finite, check_some, patch_size, patches, positions_of
from rankwise.core.layer import Layer
from rankwise.core.linalg import precise, zeros
from rankwise.core.moments import Moments
from rankwise.errors import RankwiseError
from rankwise.surgery.forward import Batches, Example, run_example, tensors_of, undisturbed
from rankwise.surgery.fuse import followers
from rankwise.surgery.hooks import Seen, watching

UNFOLDED = 1 << 26  # entries of unfolded patches at a time
ROWS = 64  # patches for each dimension: more hardly change a covariance
DRAWS = 2


@dataclass
class Influence:
    """What the data says of a layer: the moments of its patches, and the metric (G, f/G, f/G) of its outputs.

    The metric is relative to the `variance` of the network's outputs, which is the same for all layers.
    Where a patch has too many entries for a covariance, `seen` is of single entries and `whole` is False. `centred` is
    whether the mean of an error can be made up for, so that only what varies is lost: by the layer's bias, or without
    one by the running mean of the batch norm `norm` that follows. Outputs of a transposed convolution differ in how
    many inputs they see: one bias would not do.
    """

    seen: Moments
    metric: Tensor
    whole: bool = True
    variance: float = 0.0
    centred: bool = False
    norm: str = ""

    @property
    def moment(self) -> Tensor:
        """What errors of the layer's weight are measured with (G, d, d)."""
        return self.seen.covariance if self.centred else self.seen.second_moment


def influences(
    model: nn.Module, data: Batches, layers: list[Layer], largest: int, seed: int = 0, means: bool = True
) -> dict[str, Influence]:
    """For every layer its influence, relative to the variance of the network's outputs.

    Covariances of patches with more than `largest` entries are not collected. Without `means` those of the data are not
    to be trusted, and nothing makes up for the mean of an error.
    """
    found = {la.name: Influence(Moments(), _zeros(la), patch_size(la) <= largest) for la in layers}
    outputs: dict[str, list[Tensor]] = {}
    random = torch.Generator().manual_seed(seed)
    count = images = 0
    answers: dict[int, Moments] = {}

    def look(layer: Layer, call: Seen) -> Tensor:
        output: Tensor = call.output
        rows, _there = some_patches(layer, call.given.detach(), output.detach(), random)
        check_finite(rows, count, layer.name)
        one = found[layer.name]
        one.seen.add(rows if one.whole else rows.reshape(len(rows), -1, 1))
        kept = output if output.requires_grad else output.detach().requires_grad_()
        outputs.setdefault(layer.name, []).append(kept)
        return kept.clone()  # what follows may work in place

    with undisturbed(model), torch.enable_grad(), ExitStack() as hung:
        for count, batch in enumerate(batches(data), start=1):
            if count == 1:
                if means:
                    _find_means(model, batch, layers, found)
                hung.enter_context(watching(model, {layer.name: partial(look, layer) for layer in layers}))
            outputs.clear()
            answer = [t for t in tensors_of(run_example(model, batch)) if t.is_floating_point()]
            images += next((len(t) for t in answer if t.ndim), 1)
            add_answers(answers, answer)
            _add_metrics(found, outputs, answer, layers, random)
    check_some(count)
    variance = variance_of(answers)
    for one in found.values():
        one.metric, one.variance = one.metric / (variance * max(1, images) * DRAWS), variance
    return found


def _find_means(model: nn.Module, batch: Example, layers: list[Layer], found: dict[str, Influence]) -> None:
    norms = {name: norm for norm, name in followers(model, batch).items()}
    for layer in layers:
        one = found[layer.name]
        one.norm = "" if layer.bias else norms.get(layer.name, "")
        one.centred = bool(one.norm) or (layer.bias and not layer.transposed)


def _zeros(layer: Layer) -> Tensor:
    return zeros(layer.groups, layer.group_filters, layer.group_filters)


def some_patches(layer: Layer, given: Tensor, output: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """At most ROWS · d of a batch's patches (G, n, d), drawn at random, and the outputs (n, f) at the same places.

    Neighbouring patches say nearly the same. Of large images not all are unfolded to begin with. The outputs of a
    transposed convolution are at other places: none are given.
    """
    size = patch_size(layer)
    if given.ndim == output.ndim == layer.dims + 2:
        each = math.prod(given.shape[2:] if layer.transposed else output.shape[2:]) * layer.groups * size
        images = max(1, min(len(given), UNFOLDED // max(1, each)))
        if images < len(given):
            chosen = torch.randperm(len(given), generator=random)[:images].to(given.device)
            given, output = given[chosen], output[chosen]
    rows = patches(layer, given, output)
    there = positions_of(output, layer.dims) if not layer.transposed else output.new_zeros(rows.shape[1], 0)
    if rows.shape[1] > ROWS * size:
        chosen = torch.randint(rows.shape[1], (ROWS * size,), generator=random).to(rows.device)
        rows, there = rows[:, chosen], there[chosen]
    return rows, there


def add_answers(answers: dict[int, Moments], answer: list[Tensor]) -> None:
    """What the network says, entry by entry: only variances are needed, so every entry is a group of its own.

    Outputs of another size, as larger images may give, are other entries.
    """
    answer = [t for t in answer if t.ndim]
    if answer:
        flat = torch.cat([t.detach().reshape(len(answer[0]), -1) for t in answer if len(t) == len(answer[0])], dim=1)
        answers.setdefault(flat.shape[1], Moments()).add(flat.t()[:, :, None])


def variance_of(answers: dict[int, Moments]) -> float:
    """Of an input's outputs, summed over their entries; of their squares where they never vary."""
    count = max(1, sum(one.count for one in answers.values()))
    varied = sum(float(one.scatter.sum()) for one in answers.values()) / count
    energy = sum(one.count * float(one.mean.square().sum()) for one in answers.values()) / count
    return max(varied, 1e-12 * energy, 1e-300)


def _add_metrics(
    found: dict[str, Influence],
    outputs: dict[str, list[Tensor]],
    answer: list[Tensor],
    layers: list[Layer],
    random: torch.Generator,
) -> None:
    reached = [(layer, out) for layer in layers for out in outputs.get(layer.name, [])]
    tracked = [t for t in answer if t.requires_grad]
    if not tracked or not reached:
        raise RankwiseError(
            "the network's outputs do not depend on its layers, so their influence is unknown: leave data= out"
        )
    for _ in range(DRAWS):
        total = sum(((torch.randn(t.shape, generator=random).to(t) * t).sum() for t in tracked), start=torch.zeros(()))
        gradients = torch.autograd.grad(total, [out for _, out in reached], retain_graph=True, allow_unused=True)
        for (layer, _), gradient in zip(reached, gradients, strict=True):
            if gradient is not None:
                rows = precise(positions_of(gradient, layer.dims))
                groups = torch.unflatten(rows, 1, (layer.groups, -1)).transpose(0, 1)
                one = found[layer.name]
                one.metric = one.metric.to(groups.device) + groups.transpose(1, 2) @ groups
