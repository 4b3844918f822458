"""Would layers that read the same tensor (q, k, v; gate, up) be better with one encoder together?

    python benchmarks/shared_encoder.py stories15m|minilm|gpt2|llama --networks DIR --text DIR

Some layers with weights W_i (f_i, d) and one encoder of rank r have r (d + Σ f_i) parameters; apart, with ranks r_i,
Σ r_i (d + f_i). Errors are those that `auto` plans with: held-out effects on the network's outputs, from two halves of
the calibration inputs. Printed is the least sum of effects over all linear layers (on the convex hull) at equal
parameters: with every layer apart, with every group as it is best (all ways to part it, by layer and rank), and with
all groups together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from common import machine, say
from language import TASKS, Task, common_arguments
from torch import Tensor

from rankwise.calibration.effect_table import each_influence
from rankwise.calibration.inputs import CALIBRATION, Inputs
from rankwise.calibration.shrinkage import target_for
from rankwise.core.layer import LOOKUP, canonical
from rankwise.core.linalg import Array, precise
from rankwise.decompositions import Sample
from rankwise.decompositions.held_out import whole_slice_errors
from rankwise.surgery.coverage import find_layers

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"))
KEEPS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
PRICES = 2000


@dataclass(frozen=True, eq=False)
class One:
    """A layer: its weight (f, d), and both ways to fit on one half and to measure on the other."""

    name: str
    weight: Tensor
    samples: tuple[Sample, ...]


@dataclass(frozen=True, eq=False)
class Curve:
    """What some layers may cost, in parameters, and their effect on the network's outputs; entry 0 is them whole."""

    params: Array
    effects: Array

    def at(self, prices: Array) -> Array:
        """The least of effect + price · params, for each price."""
        found = np.full(len(prices), np.inf)
        for params, effect in zip(self.params, self.effects, strict=True):
            found = np.minimum(found, effect + prices * params)
        return found


def layers_of(task: Task) -> list[One]:
    coverage = find_layers(task.model, task.data[0])
    inputs, found = Inputs(task.data, CALIBRATION, 0), []
    for layer, one in each_influence(task.model, inputs, coverage, 0):
        if layer.kind == LOOKUP or not one.whole or not one.count or one.is_output:
            continue
        weight = task.model.get_submodule(layer.name).weight.detach()
        target = target_for(layer, weight, one, inputs.least)
        found.append(One(layer.name, canonical(weight, layer).flatten(2)[0], target.samples))
    return found


def with_one_moment(group: list[One]) -> list[One]:
    """Layers that read the same tensor, at positions that were drawn for each: with the mean of their moments."""
    found = [list(one.samples) for one in group]
    for i in range(len(found[0])):
        moment, test = (torch.stack([getattr(some[i], n) for some in found]).mean(0) for n in ("moment", "test_moment"))
        for some in found:
            some[i] = replace(some[i], moment=moment, test_moment=test)
    return [replace(one, samples=tuple(some)) for one, some in zip(group, found, strict=True)]


def curve(layers: list[One]) -> Curve:
    """One encoder for all of them. What is lost of one and of another adds up, as it does for layers apart."""
    weight = torch.cat([one.weight for one in layers])
    lost = []
    for parts in zip(*(one.samples for one in layers), strict=True):
        moment, test = parts[0].moment[0], parts[0].test_moment[0]
        metric = torch.block_diag(*(part.metric[0] for part in parts))
        test_metric = torch.block_diag(*(part.test_metric[0] for part in parts))
        lost.append(whole_slice_errors(precise(weight).to(moment), moment, metric, test, test_metric))
    effects = np.minimum.accumulate(np.maximum(0.0, np.mean(lost, axis=0)))
    params = np.arange(len(effects)) * sum(weight.shape)
    smaller = params < weight.numel()
    return Curve(np.append(weight.numel(), params[smaller]), np.append(0.0, effects[smaller]))


def parted(names: list[str]) -> Iterator[list[list[str]]]:
    """All ways to part some layers."""
    if not names:
        yield []
        return
    first, *others = names
    for rest in parted(others):
        yield [[first], *rest]
        for i, part in enumerate(rest):
            yield [*rest[:i], [first, *part], *rest[i + 1 :]]


def groups_of(names: list[str]) -> list[list[str]]:
    """Layers of one module that read the same tensor; others alone."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        found.setdefault((parent, next((group for group in GROUPS if last in group), (last,))), []).append(name)
    return list(found.values())


def main() -> None:
    args = common_arguments().parse_args()
    torch.set_num_threads(args.threads)
    layers = {one.name: one for one in layers_of(TASKS[args.network](args))}
    whole = sum(one.weight.numel() for one in layers.values())
    groups = groups_of(list(layers))
    known: dict[tuple[str, ...], Curve] = {}
    for group in groups:
        layers |= {one.name: one for one in with_one_moment([layers[name] for name in group])}
        for part in {tuple(part) for way in parted(group) for part in way}:
            known[part] = curve([layers[name] for name in part])
    slopes = [c.effects[c.effects > 0] / (c.params[0] - c.params[c.effects > 0]) for c in known.values()]
    prices = np.geomspace(min(map(np.min, slopes)) / 10, max(map(np.max, slopes)) * 10, PRICES)
    at = {part: found.at(prices) for part, found in known.items()}
    sums = {
        "apart": sum(at[name,] for name in layers),
        "best": sum(np.min([sum(at[tuple(p)] for p in way) for way in parted(group)], axis=0) for group in groups),
        "together": sum(at[tuple(group)] for group in groups),
    }
    say(f"{args.network}: {len(layers)} linear layers, {whole:,} parameters; {machine()}\n")
    say("| keep of linear layers | apart | best | ÷ apart | all together | ÷ apart |")
    say("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for keep in KEEPS:
        # On the hull: the largest of all lower bounds.
        apart, best, together = (float(np.max(found - prices * keep * whole)) for found in sums.values())
        shares = f"{best:.5g} | {best / apart:.3f} | {together:.5g} | {together / apart:.3f}"
        say(f"| {keep} | {apart:.5g} | {shares} |")


if __name__ == "__main__":
    main()
