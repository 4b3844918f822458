"""The protocol: what holds for every decomposition of the registry, whatever it is."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rankwise as rw
from rankwise.calibration.activations import input_moments, output_moments
from rankwise.core.option import Option
from rankwise.core.parts import cost_of
from rankwise.decompositions import DECOMPOSITIONS, NOTHING, OUTPUTS, Selection, Target, of
from rankwise.decompositions.base import chain
from rankwise.surgery.pairs import build_pair, merge_pair, put_factors_

LAYERS = {
    "plain": lambda: nn.Conv2d(6, 8, 3, padding=1),
    "grouped": lambda: nn.Conv2d(8, 12, 3, stride=2, groups=2, bias=False),
    "one axis": lambda: nn.Conv1d(6, 9, 5),
    "transposed": lambda: nn.ConvTranspose2d(6, 4, 2, stride=2),
    "linear": lambda: nn.Linear(12, 9),
}
SIZES = {"plain": (6, 7, 7), "grouped": (8, 7, 7), "one axis": (6, 9), "transposed": (6, 4, 4), "linear": (12,)}


def target_for(kind: str) -> tuple[nn.Module, Target, Tensor]:
    """A layer with everything that any decomposition looks at."""
    torch.manual_seed(0)
    module = LAYERS[kind]()
    x = torch.randn(32, *SIZES[kind])
    layer = rw.find_layers(nn.Sequential(module), x[:1]).layers[0]
    seen = input_moments(nn.Sequential(module), [x], [layer])[layer.name]
    given = output_moments(nn.Sequential(module), [x], [layer])[layer.name]
    metric = torch.eye(layer.group_filters, dtype=torch.float64).expand(layer.groups, -1, -1)
    return module, Target(layer, module.weight, module.bias, seen, given, seen.second_moment, metric), x


def full_options(name: str, target: Target) -> list[tuple[Option, int]]:
    """Every option that scoring gives, with its largest outer rank, and its full rank."""
    scores = DECOMPOSITIONS[name].score(target, Selection())
    options = [*scores.spectra, *scores.given]
    full = [replace(o, outer=of(o).outers(target.layer)) if of(o).outers(target.layer) else o for o in options]
    return [(o, of(o).full_rank(target.layer, o)) for o in dict.fromkeys(full)]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_full_rank_is_the_same_function(name: str, kind: str) -> None:
    module, target, x = target_for(kind)
    for option, rank in full_options(name, target)[:6]:
        pair = build_pair(target.layer, option, rank, module)
        found = of(option).factors(target, option, rank)
        put_factors_(pair, found, target.layer)
        bias = target.bias if found.bias is None else found.bias
        if bias is not None:
            pair[-1].bias.data.copy_(bias)
        torch.testing.assert_close(pair(x), module(x), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(merge_pair(pair)(x), module(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_costs_are_those_of_the_modules(name: str, kind: str) -> None:
    """At every rank: counted from the parts as arrays, and from the modules that are built of them."""
    module, target, _ = target_for(kind)
    bias = target.layer.filters if target.bias is not None else 0
    for option, most in full_options(name, target)[:4]:
        params, macs = of(option).costs(target.layer, option)
        assert len(params) == most + 1
        for rank in sorted({1, most // 2 or 1, most}):
            pair = build_pair(target.layer, option, rank, module)
            assert params[rank] == sum(p.numel() for p in pair.parameters()) - bias
            one = cost_of(target.layer, of(option).parts(target.layer, option, rank))
            assert macs is not None
            assert one[1] == macs[rank]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_curves_fall(name: str, kind: str) -> None:
    _, target, _ = target_for(kind)
    for curves in DECOMPOSITIONS[name].score(target, Selection()).given.values():
        for curve in curves.values():
            assert (np.diff(curve, axis=-1) <= 1e-9 * np.abs(curve).max()).all()
            assert (curve >= 0).all()


@pytest.mark.parametrize("name", [name for name, one in DECOMPOSITIONS.items() if one.needs in (NOTHING, OUTPUTS)])
def test_every_one_of_them_saves_and_loads(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(72, 10)).eval()
    x = torch.randn(8, 6, 7, 7)
    error = "energy" if DECOMPOSITIONS[name].needs == NOTHING else "output"
    small, plan = rw.compress(model, x[:1], keep=0.5, decompositions=(name,), error=error, data=[x])
    assert plan.choices
    rw.save(small, plan, tmp_path)
    assert torch.equal(rw.load(tmp_path, model)(x), small(x))


@settings(max_examples=60)
@given(st.data())
def test_a_chain_of_layers_multiplies_out(data: st.DataObject) -> None:
    """Pointwise, depthwise or grouped layers in a row are one convolution: torch against `chain`."""
    groups = data.draw(st.sampled_from([1, 2]))
    rank, c, f = (data.draw(st.integers(1, 3)) for _ in range(3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def layer(inputs: int, outputs: int, kernel: tuple[int, int], g: int) -> nn.Conv2d:
        made = nn.Conv2d(inputs, outputs, kernel, groups=g, bias=False).double()
        made.weight.data = torch.randn(made.weight.shape, generator=generator, dtype=torch.float64)
        return made

    middle = groups * rank
    parts = nn.Sequential(
        *(layer(groups * c, middle, (1, 1), groups), layer(middle, middle, (3, 1), middle)),
        *(layer(middle, middle, (1, 2), groups), layer(middle, groups * f, (1, 1), groups)),
    )
    canonical = [torch.unflatten(p.weight.detach(), 0, (p.groups, -1)) for p in parts]
    whole = chain(canonical)
    assert whole.shape == (groups, f, c, 3, 2)
    x = torch.randn(2, groups * c, 5, 5, generator=generator, dtype=torch.float64)
    wanted = nn.functional.conv2d(x, whole.flatten(0, 1), groups=groups)
    torch.testing.assert_close(parts(x), wanted)


def test_nobody_outside_asks_for_a_decomposition_by_its_name() -> None:
    """Names of decompositions stand in decompositions/ only; `svd` and others are also names of methods."""
    source = Path(rw.__file__).parent
    allowed = {"methods.py", "demo.py", "option.py"}  # the registry of methods, the demo's methods, a default
    names = set(DECOMPOSITIONS)
    for path in source.rglob("*.py"):
        if "decompositions" in path.parts or path.name in allowed:
            continue
        tree = ast.parse(path.read_text())
        found = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in names]
        assert not found, f"{path} names {found}"


def test_the_registry_is_one_line_for_each_file() -> None:
    folder = Path(rw.__file__).parent / "decompositions"
    files = {p.stem for p in folder.glob("*.py") if "DECOMPOSITION = " in p.read_text()} - {"__init__"}
    assert len(files) == len(DECOMPOSITIONS)
    assert all(one.name == name for name, one in DECOMPOSITIONS.items())
