"""`auto` looks at data: how layers influence the outputs, what is chosen by it, and how it is fitted."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_laws import macs_of, numel
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.linalg import LinAlgError
from torch.nn import functional as F

import rankwise as rw
from rankwise.__main__ import main
from rankwise.calibration import effect_table, fit, in_order, inputs, output_metric, synthetic
from rankwise.calibration.inputs import CALIBRATION, MOST_ASIDE, Inputs
from rankwise.calibration.lockstep import Gate
from rankwise.calibration.output_metric import influences
from rankwise.compression import Compression, Request
from rankwise.data import splits as images
from rankwise.decompositions import whitened
from rankwise.models import networks
from rankwise.planning.planner import Settings
from rankwise.surgery.pairs import build_pair, fill_pair_
from rankwise.surgery.replace import match_layers, swap_modules_, target_of
from rankwise.training.evaluate import evaluate
from rankwise.training.loop import fit_
from sentences import check_sentence

pytest.importorskip("sklearn")


# ---- networks and data -----------------------------------------------------------------------------------


def seeded(make: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


@pytest.fixture(scope="module")
def digits() -> nn.Module:
    """digits-cnn after a few epochs."""
    model = seeded(lambda: networks.build("digits-cnn"))
    fit_(model, images.load("digits", "train"), epochs=4)
    model.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    """A trained network without batch norm, with operations in place."""
    model = seeded(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(16, 24, 3, stride=2)),
            *(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(24 * 9, 48), nn.ReLU(inplace=True), nn.Linear(48, 10)),
        )
    )
    fit_(model, images.load("digits", "train"), epochs=4, lr=0.05)
    return model.eval()


@pytest.fixture(scope="module")
def seen() -> list[Tensor]:
    return [x for x, _ in images.load("digits", "train").thin(200).batches(64)]


@pytest.fixture(scope="module")
def held_out() -> Tensor:
    return torch.cat([x for x, _ in images.load("digits").batches(128)])


def moved(model: nn.Module, small: nn.Module, x: Tensor) -> float:
    """Mean square of what changes in the outputs."""
    with torch.no_grad():
        return float((model.eval()(x) - small.eval()(x)).square().mean())


def mixed() -> nn.Module:
    """Groups, dilation, an upsampling, a batch norm, operations in place."""
    return seeded(
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(inplace=True)),
            *(nn.Conv2d(12, 16, 3, stride=2, groups=2, dilation=2), nn.ReLU(inplace=True)),
            *(nn.ConvTranspose2d(16, 8, 2, stride=2, bias=False), nn.Flatten(), nn.Linear(8 * 64, 20)),
        )
    ).eval()


def random_images(n: int = 24, *shape: int) -> Tensor:
    return torch.randn(n, *(shape or (3, 11, 11)), generator=torch.Generator().manual_seed(1))


class Untouched:
    """Checks that a model is, bit for bit, as it was: values, modes, gradients, hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.state = model, copy.deepcopy(model.state_dict())
        self.modes = [m.training for m in model.modules()]
        self.needs = [p.requires_grad for p in model.parameters()]
        self.random = torch.get_rng_state()

    def check(self) -> None:
        now = self.model.state_dict()
        assert list(now) == list(self.state)
        assert all(torch.equal(now[k], v) for k, v in self.state.items())
        assert [m.training for m in self.model.modules()] == self.modes
        assert [p.requires_grad for p in self.model.parameters()] == self.needs
        assert all(p.grad is None for p in self.model.parameters())
        assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in self.model.modules())
        assert torch.equal(torch.get_rng_state(), self.random)


# ---- influence -------------------------------------------------------------------------------------------


def influence_of(model: nn.Module, batches: Any, example: Any = None) -> dict[str, output_metric.Influence]:
    return influences(model, batches, list(rw.find_layers(model, example).layers), 10_000, means=False)


def spread_of(y: Tensor) -> float:
    return float(y.detach().double().var(0, unbiased=False).sum())


def exact_metric(tail: nn.Module, z: Tensor, dims: int) -> Tensor:
    """Σ over positions of JᵀJ, mean over images, of the tail at a layer's outputs z (n, f, *positions)."""
    total = torch.zeros(z.shape[1], z.shape[1], dtype=torch.float64)
    for one in z:
        j = jacobian(lambda v: tail(v[None])[0], one).reshape(-1, z.shape[1], max(1, one[0].numel()))
        total += torch.einsum("ofp,ogp->fg", j, j)
    return total / len(z)


def check_close(got: Tensor, wanted: Tensor, share: float = 0.1) -> None:
    assert float((got - wanted).norm() / wanted.norm()) < share


def tailed() -> nn.Module:
    """A ReLU in place, a grouped convolution, and an end that is no layer."""
    return seeded(
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 6, 2, groups=2), nn.ReLU(inplace=True), nn.Flatten()),
            *(nn.Linear(6 * 9, 5), nn.Tanh()),
        )
    ).double()


def test_moments_of_gammas_are_those_of_exact_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """E over v of Γ Γᵀ and Γᵀ Γ is a sum over outputs of their exact gradients with respect to the weight."""
    monkeypatch.setattr(output_metric, "DRAWS", 400)
    monkeypatch.setattr(output_metric, "INPUTS", 10**6)
    monkeypatch.setattr(inputs, "FEWEST", 10**6)  # none is set aside
    model = tailed()
    clean = copy.deepcopy(model)
    clean[3] = nn.ReLU()
    x = torch.randn(12, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = influence_of(model, list(torch.split(x, 5)), x)
    for name in ("0", "2", "5"):
        layer = clean[int(name)]
        groups = getattr(layer, "groups", 1)
        outer: Any = 0
        inner: Any = 0
        for one in x:

            def output(weight: Tensor, one: Tensor = one, name: str = name) -> Tensor:
                return torch.func.functional_call(clean, {f"{name}.weight": weight}, (one[None],))[0]  # type: ignore[no-any-return]

            gradient = jacobian(output, layer.weight.detach())  # (outputs, f, …)
            gammas = gradient.reshape(5, groups, layer.weight.shape[0] // groups, -1)
            outer = outer + torch.einsum("ogfd,oged->gfe", gammas, gammas) / len(x)
            inner = inner + torch.einsum("ogfd,ogfe->gde", gammas, gammas) / len(x)
        scale = spread_of(clean(x))
        check_close(found[name].both.outer, outer / scale)
        check_close(found[name].both.moment, inner / scale)


def test_the_effect_of_a_change_is_that_of_its_gamma() -> None:
    """In front of a mean over positions, an error that is alike everywhere moves the outputs as if it were one."""
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)))
    calm = torch.randn(96, 3, 1, 1, generator=torch.Generator().manual_seed(0)).expand(-1, -1, 7, 7).contiguous()
    found = influence_of(model, [calm], calm)["0"]
    change = torch.randn(6, 3, generator=torch.Generator().manual_seed(2)).double()
    other = copy.deepcopy(model)
    other[0].weight.data += change.float()[:, :, None, None]
    real = moved(model, other, calm) * 4 / spread_of(model(calm))
    both = found.both
    outer = both.outer[0].double() / float(both.outer.diagonal(dim1=1, dim2=2).sum())
    foretold = float((outer * (change @ both.moment[0].double() @ change.t())).sum())
    single = float((both.metric[0].double() * (change @ found.seen.second_moment[0].double() @ change.t())).sum())
    assert 0.6 < foretold / real < 1.6
    assert single < real / 20, "positions one by one: a part of 49"
    assert found.alike > 0.95


def test_the_metric_is_that_of_the_exact_jacobian(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a network with a ReLU and a grouped convolution; v is drawn, so only up to the noise of the draws."""
    monkeypatch.setattr(output_metric, "DRAWS", 400)
    monkeypatch.setattr(output_metric, "INPUTS", 10**6)
    monkeypatch.setattr(inputs, "FEWEST", 10**6)  # none is set aside
    model = tailed()
    x = torch.randn(12, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = influence_of(model, list(torch.split(x, 5)), x)
    assert list(found) == ["0", "2", "5"]
    clean = copy.deepcopy(model)
    clean[3] = nn.ReLU()
    for name, dims in (("0", 2), ("2", 2), ("5", 0)):
        i = int(name)
        with torch.no_grad():
            z = clean[: i + 1](x)
        wanted = exact_metric(clean[i + 1 :], z, dims) / spread_of(clean(x))
        if name == "2":
            assert found[name].both.metric.shape == (2, 3, 3)
            for g in range(2):
                check_close(found[name].both.metric[g], wanted[3 * g : 3 * g + 3, 3 * g : 3 * g + 3])
        else:
            check_close(found[name].both.metric[0], wanted)


def test_the_metric_of_a_linear_network_is_that_of_its_matrices() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4)))
    x = torch.randn(20_000, 5, generator=torch.Generator().manual_seed(0))
    found = influence_of(model, [x[:12_000], x[12_000:]])
    b = model[1].weight.detach().double()
    check_close(found["0"].both.metric[0].double(), b.t() @ b / spread_of(model(x)), 0.05)
    assert found["1"].is_output, "its metric is known without drawing"
    assert not found["0"].is_output
    assert found["0"].seen.count == len(x) - 2 * MOST_ASIDE
    check_close(found["0"].seen.second_moment[0].double(), (x.double().t() @ x.double()) / len(x), 0.2)


def test_the_outputs_move_as_foretold() -> None:
    """Small errors in every layer: the sum of their effects is the relative change of the outputs."""
    model = mixed().double()
    x = random_images(64).double()
    found = influence_of(model, [x], x[:1])
    for name, one in found.items():
        other = copy.deepcopy(model)
        layer = other.get_submodule(name)
        change = 1e-3 * torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(2)).double()
        layer.weight.data += change
        kind = {la.name: la for la in rw.find_layers(model).layers}[name]
        if kind.transposed:
            continue  # its positions overlap in the moments: every tap is an output of its own
        flat = change.reshape(kind.groups, kind.group_filters, -1)
        if one.is_output:
            foretold = float((flat @ one.seen.second_moment @ flat.transpose(1, 2)).diagonal(dim1=1, dim2=2).sum())
            foretold /= one.variance
        else:
            both = one.both
            delta = flat @ both.moment @ flat.transpose(1, 2)
            foretold = float((both.outer * delta).sum() / both.outer.diagonal(dim1=1, dim2=2).sum())
        with torch.no_grad():
            real = float((other(x) - model(x)).square().sum(1).mean()) / spread_of(model(x))
        assert 0.3 < foretold / real < 3, name


def test_frozen_parameters_are_no_obstacle() -> None:
    model = mixed()
    x = random_images()
    wanted = influence_of(model, [x], x)
    for parameters in ("all", "first"):
        frozen = copy.deepcopy(model)
        (frozen if parameters == "all" else frozen[0]).requires_grad_(False)
        watch = Untouched(frozen)
        got = influence_of(frozen, [x], x)
        watch.check()
        for name, one in wanted.items():
            torch.testing.assert_close(got[name].both.metric, one.both.metric)


def test_it_works_inside_no_grad_and_inference_of_the_caller() -> None:
    model, x = mixed(), random_images()
    wanted = influence_of(model, [x], x)
    with torch.no_grad():
        got = influence_of(model, [x], x)
    torch.testing.assert_close(got["0"].both.metric, wanted["0"].both.metric)


def test_operations_in_place_change_nothing() -> None:
    """A ReLU in place behind a layer must not reach what was kept of the layer's outputs."""
    model, x = mixed(), random_images()
    clean = copy.deepcopy(model)
    clean[2], clean[4] = nn.ReLU(), nn.ReLU()
    one, other = influence_of(model, [x], x), influence_of(clean, [x], x)
    for name in one:
        torch.testing.assert_close(one[name].both.metric, other[name].both.metric)
        torch.testing.assert_close(one[name].both.moment, other[name].both.moment)
        torch.testing.assert_close(one[name].seen.second_moment, other[name].seen.second_moment)


class Words(nn.Module):
    """Integers in, a dict out, a layer that is called twice, and one that is never reached."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.shared, self.unused, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 12)

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        h = self.shared(self.shared(self.words(tokens)))
        return {"logits": self.last(h.mean(1)), "tokens": tokens, "more": (h[:, 0],)}


def test_integers_dicts_and_shared_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_metric, "DRAWS", 300)
    monkeypatch.setattr(output_metric, "INPUTS", 10**6)
    model = seeded(Words)
    tokens = torch.randint(20, (16, 3), generator=torch.Generator().manual_seed(0))
    watch = Untouched(model)
    found = influence_of(model, [tokens], tokens)
    watch.check()
    w, last = (m.weight.detach().double() for m in (model.shared, model.last))
    out = model(tokens)
    scale = spread_of(torch.cat([out["logits"], out["more"][0]], dim=1))
    # a position moves the logits by a third of last, and the first position is itself an answer
    second = last.t() @ last / 3 + torch.eye(16, dtype=torch.float64)
    check_close(found["shared"].both.metric[0].double(), (second + w.t() @ second @ w) / scale)
    check_close(found["last"].both.metric[0].double(), torch.eye(12, dtype=torch.float64) / scale)
    small, plan = rw.compress(model, tokens, keep=0.8, data=[tokens])
    assert "unused" not in {c.name for c in plan.choices}
    assert numel(small) == plan.after.params
    assert small(tokens)["logits"].shape == (16, 12)


def test_bad_data_is_one_sentence_and_leaves_no_trace() -> None:
    model, x = mixed().train(), random_images()
    bad = x.clone()
    bad[2, 0, 3, 3] = torch.nan
    watch = Untouched(model)

    def run(data: Any) -> Any:
        return lambda: rw.compress(model, x[:1], keep=0.5, data=data)

    assert "empty" in check_sentence(run([]))
    assert "empty" in check_sentence(run(iter([])))
    assert "batch 2" in check_sentence(run([x, bad]))
    assert "could not run" in check_sentence(run([x, x[:, :1]]))
    assert "unknown data" in check_sentence(run("mnist"))
    watch.check()


class Decided(nn.Module):
    """Says only which class it is: nothing to differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).argmax(1)


def test_answers_without_a_gradient_are_refused() -> None:
    x = torch.randn(8, 12)
    model = Decided()
    watch = Untouched(model)
    assert "leave data= out" in check_sentence(lambda: rw.compress(model, x, keep=0.8, data=[x]))
    watch.check()
    assert rw.compress(model, x, keep=0.8)[1].choices


def test_batches_of_different_sizes_of_image() -> None:
    """A network for images of any size: one answer for each position, so answers differ in length."""
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3)))
    batches = [random_images(4, 3, 12, 12), random_images(4, 3, 16, 10)]
    small, plan = rw.compress(model, batches[0], keep=0.5, data=batches)
    assert plan.search.inputs == "calibration"
    assert small(batches[1]).shape == model(batches[1]).shape


class WithLoss(nn.Module):
    """The first answer is a number for the whole batch, as where a loss comes with the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.last(self.first(x).relu())
        return logits.square().mean(), logits


def test_a_number_for_the_whole_batch_is_not_a_batch() -> None:
    model = seeded(WithLoss)
    x = torch.randn(100, 16, generator=torch.Generator().manual_seed(0))
    found = influence_of(model, [x], x)
    scale = spread_of(model(x)[1])
    check_close(found["last"].both.metric[0].double(), torch.eye(12, dtype=torch.float64) / scale, 0.5)


def test_attention() -> None:
    """Modules that would take a fast path around their layers."""
    model = seeded(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)).eval()
    x = torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(0))
    small, plan = rw.compress(model, x[:1], keep=0.8, data=[x])
    assert {c.decomposition for c in plan.choices} <= {"whitened", "svd"}
    assert moved(model, small, x) <= moved(model, by_weights(model, plan), x)


# ---- the whole job ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [{"keep": 0.5}, {"macs": 0.4}, {"keep": 0.6, "macs": 0.5}], ids=str)
@pytest.mark.parametrize("with_data", [True, False])
def test_the_whole_job(budget: dict[str, float], with_data: bool, tmp_path: Path) -> None:
    model, x = mixed().train(), random_images()
    watch = Untouched(model)
    rest: dict[str, Any] = {"data": list(torch.split(x, 9))} if with_data else {}
    small, plan = rw.compress(model, x[:1], **budget, **rest)
    watch.check()
    assert plan.method == "auto"
    assert plan.search.inputs == ("calibration" if with_data else "synthetic")
    assert plan.choices
    assert {c.decomposition for c in plan.choices} <= {"whitened", "whitened-tucker2", "whitened-cp", "svd"}
    assert plan.settings["error"] == "effect"
    assert all(c.error["effect"] >= 0 for c in plan.choices)
    assert numel(small) == plan.after.params
    model.eval(), small.eval()
    assert macs_of(small, x[:1]) == plan.after.macs
    for unit, limit in (("params", budget.get("keep")), ("macs", budget.get("macs"))):
        assert limit is None or plan.keep(unit) <= limit
    rw.save(small, plan, tmp_path)
    assert rw.Plan.load(tmp_path / "plan.json") == plan
    assert torch.equal(rw.load(tmp_path, model).eval()(x), small(x))
    dense = rw.densify(small).eval()
    assert [p.shape for p in dense.parameters()] == [p.shape for p in model.parameters()]
    torch.testing.assert_close(dense(x), small(x), rtol=1e-3, atol=1e-4)
    assert "calibration data" in check_sentence(lambda: rw.apply_plan(model, plan))


def test_the_objective_is_the_sum_of_effects(plain: nn.Module, seen: list[Tensor]) -> None:
    _, plan = rw.compress(plain, seen[0][:1], keep=0.4, data=seen)
    assert plan.search.objective == pytest.approx(sum(c.error["effect"] for c in plan.choices), rel=1e-6)


def test_without_batch_norm_data_and_example_it_is_the_energy_as_before(plain: nn.Module) -> None:
    small, plan = rw.compress(plain, keep=0.5)
    assert plan.search.inputs is None
    assert {c.decomposition for c in plan.choices} == {"svd"}
    wanted = rw.allocate(rw.build_table(plain), rw.Budget(params=0.5), model=plan.model)
    assert replace(plan, warnings=(), weights="") == wanted
    assert "no example input" in plan.warnings[0]
    same = rw.apply_plan(plain, plan)
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), same.parameters(), strict=True))


@pytest.mark.parametrize("keep", [0.5, 0.3])
def test_without_batch_norm_noise_is_better_than_nothing(plain: nn.Module, held_out: Tensor, keep: float) -> None:
    """On real digits the outputs move less than with weights alone; biases stay; a plan from a file is the same."""
    x = held_out[:1]
    small, plan = rw.compress(plain, x, keep=keep)
    assert plan.search.inputs == "noise"
    blind, _ = rw.compress(plain, x, keep=keep, error="energy")
    assert moved(plain, small, held_out) < moved(plain, blind, held_out)
    for choice in plan.choices:
        assert torch.equal(small.get_submodule(choice.name).decoder.bias, plain.get_submodule(choice.name).bias)
    again, _ = Compression(plain, x, Request(plan=plan)).run(None)
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    "asked",
    [{"error": "energy"}, {"decompositions": ("svd",), "error": "energy"}, {"method": "svd-energy"}],
    ids=str,
)
def test_what_is_asked_for_is_what_is_done(asked: dict[str, Any]) -> None:
    model, x = mixed(), random_images()
    _, plan = rw.compress(model, x[:1], keep=0.5, data=[x], **asked)
    assert {c.decomposition for c in plan.choices} == {"svd"}
    assert plan.settings["error"] == "energy"
    assert plan.search.inputs is None


def test_without_an_example_it_works_too() -> None:
    """No example: budgets in params only, and no inputs can be made."""
    model, x = mixed(), random_images()
    _, plan = rw.compress(model, keep=0.5, data=[x])
    assert plan.search.inputs == "calibration"
    _, plan = rw.compress(model, keep=0.5)
    assert plan.search.inputs is None


@pytest.mark.parametrize("with_data", [True, False])
def test_the_same_twice(with_data: bool) -> None:
    model, x = mixed(), random_images()
    rest: dict[str, Any] = {"data": [x]} if with_data else {}
    one, plan = rw.compress(model, x[:1], keep=0.5, **rest)
    torch.rand(7)  # the state of the global generator plays no part
    other, again = rw.compress(model, x[:1], keep=0.5, **rest)
    assert plan == again
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_generators_tensors_and_splits_are_data(plain: nn.Module) -> None:
    x = random_images(40, 1, 8, 8)

    def stream() -> Iterator[Tensor]:
        yield from torch.split(x, 8)

    one, plan = rw.compress(plain, x[:1], keep=0.4, data=stream())
    other, again = rw.compress(plain, x[:1], keep=0.4, data=list(stream()))
    assert plan == again
    assert moved(one, other, x) == 0
    assert rw.compress(plain, x[:1], keep=0.4, data=x)[1].search.inputs == "calibration"
    few = images.load("digits", "calibration")
    one, plan = rw.compress(plain, x[:1], keep=0.4, data="digits")
    other, again = rw.compress(plain, x[:1], keep=0.4, data=few)
    assert plan == again
    assert moved(one, other, x) == 0


@pytest.mark.parametrize("budget", [{"keep": 0.4}, {"macs": 0.4}], ids=str)
def test_more_to_choose_from_is_never_worse(plain: nn.Module, seen: list[Tensor], budget: dict[str, float]) -> None:
    def objective(**rest: Any) -> tuple[float, float]:
        found = rw.compress(plain, seen[0][:1], data=seen, **budget, **rest)[1].search
        return found.objective, found.gap or 0.0

    most, gap = objective()
    for fewer in ({"groups": 1}, {"folds": (0,)}, {"groups": (1, 2), "folds": (0, 3)}):
        less, _ = objective(**fewer)
        assert most <= less * (1 + gap) + 1e-9


def test_slices_of_unequal_width(plain: nn.Module, seen: list[Tensor]) -> None:
    small, plan = rw.compress(plain, seen[0][:1], keep=0.4, data=seen, groups=(3, 5))
    assert plan.keep("params") <= 0.4
    assert numel(small) == plan.after.params


def test_a_large_layer_is_decomposed_by_its_weights(
    plain: nn.Module, seen: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """216 inputs and 144 are too many here: an svd, measured in the same unit as the others."""
    monkeypatch.setattr(effect_table, "LARGEST", 100)
    small, plan = rw.compress(plain, seen[0][:1], keep=0.3, data=seen)
    kinds = {c.name: c.decomposition for c in plan.choices}
    assert kinds["5"] == "svd"
    assert kinds.get("2", "svd") == "svd"
    assert "effect" in next(c for c in plan.choices if c.name == "5").error
    assert plan.search.inputs == "calibration"
    assert plan.keep("params") <= 0.3
    assert numel(small) == plan.after.params
    monkeypatch.setattr(effect_table, "LARGEST", 0)
    small, plan = rw.compress(plain, seen[0][:1], keep=0.3, data=seen)
    assert {c.decomposition for c in plan.choices} == {"svd"}
    same = rw.apply_plan(plain, plan)  # nothing in it needs data
    assert moved(small, same, seen[0]) == 0


def test_a_plan_that_was_fitted_is_not_replayed_without_inputs(
    plain: nn.Module, seen: list[Tensor], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, plan = rw.compress(plain, seen[0][:1], keep=0.4, data=seen)
    again, _ = Compression(plain, seen[0][:1], Request(plan=plan), seen).run(None)
    assert moved(again, rw.compress(plain, seen[0][:1], keep=0.4, data=seen)[0], seen[0]) == 0
    with pytest.raises(rw.RankwiseError, match="calibration data"):
        Compression(plain, seen[0][:1], Request(plan=plan)).run(None)


def test_few_options_of_a_large_layer_are_as_good_as_all(
    plain: nn.Module, seen: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a rough measure puts near the front: fewer fits, the same total effect or nearly."""
    counts, totals = [], []
    for slack in (1e9, whitened.SLACK):
        monkeypatch.setattr(whitened, "SLACK", slack)
        table, _ = effect_table.effect_table(
            plain,
            rw.find_layers(plain, seen[0][:1]),
            Settings(error="effect", decompositions=("whitened",)),
            Inputs(seen, CALIBRATION),
        )
        counts.append(len(table.given))
        plans = [
            rw.allocate(table, rw.Budget(params=k), error="effect", decompositions=("whitened",)) for k in (0.3, 0.6)
        ]
        totals.append([sum(c.error["effect"] for c in plan.choices) for plan in plans])
    assert counts[1] < counts[0]
    for every, some in zip(*totals, strict=True):
        assert every <= some * (1 + 1e-9) <= 1.1 * every


def test_slices_and_folds_can_be_asked_for_where_few_options_were_fitted(
    plain: nn.Module, seen: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whitened, "worth_fitting", lambda _target, options: options[:1])
    _, plan = rw.compress(plain, seen[0][:1], keep=0.7, data=seen, groups=[1, 2, 4])
    assert plan.choices
    assert {c.groups for c in plan.choices} <= {1, 2, 4}
    _, plan = rw.compress(plain, seen[0][:1], keep=0.7, data=seen, folds=[0, 3])
    assert {c.fold for c in plan.choices} <= {"f│chw", "fhw│c", "f│c"}


def failing(*_: Any, **__: Any) -> Any:
    raise LinAlgError("it did not converge\nat all")


@pytest.mark.parametrize("when", ["score", "factors"], ids=["while planning", "while fitting"])
@pytest.mark.parametrize("with_data", [True, False])
def test_numbers_that_fail_leave_the_weights(
    when: str, with_data: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, x = mixed(), random_images()
    wanted = rw.compress(model, x[:1], keep=0.5, error="convex")[1]
    monkeypatch.setattr(whitened.Whitened, when, failing)
    watch = Untouched(model)
    small, plan = rw.compress(model, x[:1], keep=0.5, **({"data": [x]} if with_data else {}))
    watch.check()
    (warning,) = plan.warnings
    assert "it did not converge" in warning
    assert "weights alone" in warning
    assert "\n" not in warning
    assert plan.layers == wanted.layers
    assert numel(small) == plan.after.params
    plan.save(tmp_path / "plan.json")
    assert rw.Plan.load(tmp_path / "plan.json") == plan


def test_one_image_and_dead_channels_are_enough() -> None:
    model, x = mixed(), random_images(1)
    model[1].weight.data[:5] = 0
    model[1].bias.data[:5] = -1
    small, plan = rw.compress(model, x, keep=0.5, data=[x])
    assert plan.search.inputs == "calibration"
    assert "too few to hold some out" in plan.warnings[0]
    assert bool(torch.isfinite(small(x)).all())
    model[1].bias.data[:] = -1  # nothing gets through
    model[1].weight.data[:] = 0
    small, _ = rw.compress(model, x, keep=0.5, data=[x])
    assert bool(torch.isfinite(small.eval()(x)).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes(digits: nn.Module, seen: list[Tensor], held_out: Tensor, dtype: torch.dtype) -> None:
    """Activations of some hundreds: fine in float16, but sums of their squares are not."""
    model = copy.deepcopy(digits)
    model.bn1.weight.data *= 100
    model.bn1.bias.data *= 100
    model.conv2.weight.data /= 100
    assert float(moved(model, digits, held_out)) < 1e-6
    model = model.to(dtype)
    small, plan = rw.compress(model, seen[0][:1], keep=0.25, data=seen)
    assert all(p.dtype == dtype for p in small.parameters())
    assert all("new inputs" in warning for warning in plan.warnings)
    assert "conv2" in {c.name for c in plan.choices}
    with torch.no_grad():
        assert float((small(held_out.to(dtype)).argmax(1) == digits(held_out).argmax(1)).float().mean()) > 0.9


def test_a_table_of_effects_can_be_saved(plain: nn.Module, seen: list[Tensor], tmp_path: Path) -> None:
    wanted = Settings(error="effect", decompositions=("whitened", "svd"))
    coverage = rw.find_layers(plain, seen[0][:1])
    table, _ = effect_table.effect_table(plain, coverage, wanted, Inputs(seen, CALIBRATION))
    table.save(tmp_path / "table.safetensors")
    again = rw.Table.load(tmp_path / "table.safetensors", plain)
    rest: dict[str, Any] = {"error": "effect", "decompositions": ("whitened", "svd")}
    one, other = (rw.allocate(t, rw.Budget(params=0.4), **rest) for t in (table, again))
    assert one == other
    for layer in coverage.layers:
        for option in table.options(layer):
            curve = table.curve(layer, option, "effect").values()
            np.testing.assert_array_equal(curve, again.curve(layer, option, "effect").values())
            assert np.all(np.diff(curve) <= 0)


@pytest.mark.parametrize("asked", [{"method": "alds", "error": "effect"}, {"decompositions": ("whitened",)}], ids=str)
def test_settings_that_name_it_work_or_say_why(asked: dict[str, Any]) -> None:
    """An effect without `whitened`, and `whitened` without an effect: a plan, or a sentence that is true."""
    model, x = mixed(), random_images()
    try:
        _, plan = rw.compress(model, x[:1], keep=0.5, data=[x], **asked)
    except rw.RankwiseError as err:
        assert "budget cannot be met" not in str(err)  # noqa: PT017
    else:
        assert plan.keep("params") <= 0.5
    assert "no calibration data" in check_sentence(lambda: rw.compress(model, x[:1], keep=0.5, **asked))


# ---- fitting ---------------------------------------------------------------------------------------------


def by_weights(model: nn.Module, plan: rw.Plan) -> nn.Module:
    """The same parts and ranks, from the weights alone."""
    small = copy.deepcopy(model)
    for choice, layer in match_layers(model, plan):
        old: Any = small.get_submodule(layer.name)
        pair = build_pair(layer, choice.option, choice.rank, old)
        fill_pair_(pair, target_of(old, layer), choice.option, choice.rank)
        swap_modules_(small, {old: pair})
    return small


@pytest.mark.parametrize("keep", [0.2, 0.4, 0.6])
@pytest.mark.parametrize("name", ["digits", "plain"])
def test_fitted_factors_are_closer_than_those_of_the_weights(
    name: str, keep: float, request: pytest.FixtureRequest, seen: list[Tensor], held_out: Tensor
) -> None:
    """The same plan, on the images it was fitted to and on others."""
    model = request.getfixturevalue(name)
    small, plan = rw.compress(model, seen[0][:1], keep=keep, data=seen)
    other = by_weights(model, plan)
    assert numel(small) == numel(other)
    for x in (torch.cat(seen), held_out):
        assert moved(model, small, x) < moved(model, other, x)


@pytest.mark.parametrize("keep", [0.2, 0.4])
@pytest.mark.parametrize("name", ["digits", "plain"])
def test_data_is_never_worse_than_none_on_real_digits(
    name: str, keep: float, request: pytest.FixtureRequest, held_out: Tensor
) -> None:
    """Calibration images, none of which are in the test; synthetic ones where there is batch norm."""
    model, x = request.getfixturevalue(name), held_out[:1]
    energy = moved(model, rw.compress(model, x, keep=keep, error="energy")[0], held_out)
    assert moved(model, rw.compress(model, x, keep=keep, data="digits")[0], held_out) <= energy
    if name == "digits":
        assert moved(model, rw.compress(model, x, keep=keep)[0], held_out) <= energy


class Backwards(nn.Module):
    """Registered in another order than they run."""

    def __init__(self) -> None:
        super().__init__()
        self.third, self.second, self.first = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).relu_()).relu_())


def test_layers_are_fitted_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(Backwards)
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    order: list[str] = []
    real = in_order.Crowd.gather

    def watched(crowd: Any, layer: Any) -> Any:
        order.append(layer.name)
        return real(crowd, layer)

    monkeypatch.setattr(in_order.Crowd, "gather", watched)
    small, plan = rw.compress(model, x[:1], keep=0.5, data=[x])
    assert {c.name for c in plan.choices} == {"first", "second", "third"}
    assert order == ["first", "second", "third"]
    assert moved(model, small, x) < moved(model, by_weights(model, plan), x)


def test_all_layers_are_fitted_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The original network runs once over the inputs, however many layers there are."""
    model = seeded(Backwards)
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    job = Compression(model, x[:1], data=list(x.split(40)))
    plan = job.plan(rw.Budget(params=0.5))
    assert {c.name for c in plan.choices} == {"first", "second", "third"}
    rows, forward = 0, F.linear

    def counted(*given: Any) -> Tensor:
        nonlocal rows
        rows += len(given[0]) * (given[1] is model.third.weight)  # type: ignore[union-attr]
        return forward(*given)

    monkeypatch.setattr(F, "linear", counted)
    small, _ = job.build(plan)
    inputs = job.seen(plan).inputs
    assert inputs is not None
    order, judging = 1, 2 * len(inputs.check)
    assert rows <= order + len(inputs.fitted) + judging
    assert not any(isinstance(m, Gate) for m in small.modules())


@pytest.mark.parametrize("held", [0, 1 << 12, 1 << 30])
def test_passes_that_cannot_all_be_held_join_later_or_are_dropped(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little may be held, every layer is fitted, and no thread is left behind."""
    monkeypatch.setattr(in_order, "HELD", held)
    monkeypatch.setattr(in_order, "PIECE", 1 << 8)
    model, x = mixed(), random_images(40)
    before = threading.active_count()
    small, plan = rw.compress(model, x[:1], keep=0.5, data=[x])
    assert threading.active_count() == before
    assert numel(small) == plan.after.params
    assert bool(torch.isfinite(small(x)).all())


def test_a_network_that_fails_in_the_middle_of_a_fit_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(Backwards)
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    job = Compression(model, x[:1], data=[x])
    plan = job.plan(rw.Budget(params=0.5))
    before = threading.active_count()

    def broken(*_: Any) -> Any:
        raise LinAlgError("no")

    monkeypatch.setattr(fit, "wanted_target", broken)
    assert job.build(plan)[1].warnings
    assert threading.active_count() == before


def test_operations_in_place_do_not_spoil_the_fit(plain: nn.Module, seen: list[Tensor]) -> None:
    clean = copy.deepcopy(plain)
    for i, module in enumerate(plain):
        if isinstance(module, nn.ReLU):
            clean[i] = nn.ReLU()
    one, plan = rw.compress(plain, seen[0][:1], keep=0.4, data=seen)
    other, again = rw.compress(clean, seen[0][:1], keep=0.4, data=seen)
    assert plan == again
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# ---- synthetic inputs ------------------------------------------------------------------------------------


def gap_of(model: nn.Module, x: Tensor) -> dict[str, float]:
    """How far mean and deviation are from what each batch norm remembers, in deviations."""
    found: dict[str, float] = {}

    def hook(name: str) -> Any:
        def look(norm: Any, args: tuple[Tensor, ...], _: Tensor) -> None:
            mean, deviation = args[0].mean([0, 2, 3]), args[0].std([0, 2, 3])
            there = norm.running_var.sqrt()
            found[name] = float((((mean - norm.running_mean) / there) ** 2 + (deviation / there - 1) ** 2).mean())

        return look

    handles = [m.register_forward_hook(hook(n)) for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad():
        model.eval()(x)
    for handle in handles:
        handle.remove()
    return found


def made_up(model: nn.Module, example: Tensor, seed: int = 0) -> list[Tensor]:
    return synthetic.synthetic_images(model, example, rw.find_layers(model, example).macs, seed)


def test_synthetic_images_have_the_statistics_that_are_remembered(digits: nn.Module) -> None:
    watch = Untouched(digits)
    found = made_up(digits, torch.zeros(1, 1, 8, 8))
    watch.check()
    got = torch.cat(found)
    assert got.shape == (synthetic.MOST, 1, 8, 8)
    assert not got.requires_grad
    noise = synthetic.smooth_noise((synthetic.MOST, 1, 8, 8), torch.Generator().manual_seed(0))
    before, after = gap_of(digits, noise), gap_of(digits, got)
    assert list(before) == ["bn1", "bn2", "bn3"]
    for name in before:
        assert after[name] < 0.5 * before[name]
    assert all(torch.equal(a, b) for a, b in zip(found, made_up(digits, torch.zeros(3, 1, 8, 8)), strict=True))
    assert not torch.equal(found[0], made_up(digits, torch.zeros(1, 1, 8, 8), seed=1)[0])


@pytest.mark.parametrize("shape", [(1, 3, 9, 14), (2, 3, 16, 5), (1, 3, 7, 7)], ids=str)
def test_images_need_not_be_square(shape: tuple[int, ...]) -> None:
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.Conv2d(12, 12, 3)
        )
    )
    found = made_up(model, torch.zeros(shape))
    assert all(x.shape[1:] == shape[1:] for x in found)
    assert all(bool(torch.isfinite(x).all()) for x in found)
    _, plan = rw.compress(model, torch.zeros(shape), keep=0.6)
    assert plan.search.inputs == "synthetic"


def test_noise_is_smooth_and_of_variance_one() -> None:
    noise = synthetic.smooth_noise((32, 2, 16, 12), torch.Generator().manual_seed(0))
    torch.testing.assert_close(noise.flatten(1).std(1), torch.ones(32), rtol=1e-4, atol=1e-4)
    steps = (noise[..., 1:] - noise[..., :-1]).square().mean()
    assert float(steps) < 0.5  # independent pixels would give 2


def refuses(make: Any, model: nn.Module, example: Any, macs: int | None) -> str:
    """The reason why there are no inputs."""
    with pytest.raises(synthetic.NoInputs) as caught:
        make(model, example, macs)
    return str(caught.value)


def test_nothing_is_made_where_nothing_is_remembered() -> None:
    make, noise = synthetic.synthetic_images, synthetic.noise
    x = torch.zeros(1, 3, 8, 8)
    bare = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    forgetful = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    flat = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    normed = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert "no batch norm" in refuses(make, bare, x, 1000)
    assert "no batch norm" in refuses(make, forgetful, x, 1000)
    assert "images" in refuses(make, flat, torch.zeros(2, 8), 1000)
    assert "no example" in refuses(make, normed, None, None)
    assert "images" in refuses(make, normed, (x,), 1000)
    assert "images" in refuses(make, normed, x.long(), 1000)
    broken = copy.deepcopy(normed)
    broken[0].weight.data[0] = torch.nan
    assert "finite" in refuses(make, broken, x, 1000)
    assert make(normed, x, 1000)
    assert "batch norms" in refuses(noise, normed, x, 1000), "it has something better"
    assert "no example" in refuses(noise, bare, None, None)
    assert "images" in refuses(noise, bare, x.long(), 1000)
    assert "could not run" in refuses(noise, nn.Sequential(bare, nn.Flatten(), nn.Linear(3, 3)), x, 1000)
    found = noise(bare, x, 1000)
    assert [len(part) for part in found] == [64, 64]


class InPlaceFirst(nn.Module):
    """Normalises its input in place, as some networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(x.sub_(0.5))))


class NoGradient(InPlaceFirst):
    """Made for use, not for training."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(x)))


class Asks(InPlaceFirst):
    """Refuses batches of more than one image."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            raise ValueError("one at a time")
        return self.last(self.norm(self.conv(x)))


@pytest.mark.parametrize("make", [InPlaceFirst, NoGradient, Asks])
def test_a_network_without_inputs_is_compressed_by_its_weights(make: Any) -> None:
    """Nobody asked for images: what worked without them must work still."""
    model = seeded(make)
    watch = Untouched(model)
    small, plan = rw.compress(model, torch.zeros(1, 3, 10, 10), keep=0.6)
    watch.check()
    assert plan.keep("params") <= 0.6
    assert numel(small) == plan.after.params


def test_data_is_not_changed_by_networks_that_work_in_place() -> None:
    model = seeded(InPlaceFirst).double()
    x = random_images(8, 3, 10, 10).double()
    kept = x.clone()
    rw.compress(model, x[:1].clone(), keep=0.6, data=[x])
    assert torch.equal(x, kept)


# ---- the command line ------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("with_data", [True, False])
def test_the_command_line(
    with_data: bool, digits: nn.Module, capsys: pytest.CaptureFixture[str], tmp_path: Path, held_out: Tensor
) -> None:
    weights = tmp_path / "digits.safetensors"
    save_file(digits.state_dict(), weights)
    common = ["compress", "digits-cnn", "--weights", weights, *(["--data", "digits"] if with_data else [])]
    folder = tmp_path / "o"
    status, out, _ = run(capsys, *common, "--keep", 0.5, "--out", folder)
    assert status == 0
    assert "done" in out
    plan = rw.Plan.load(folder / "plan.json")
    inputs = "calibration" if with_data else "synthetic"
    assert plan.search.inputs == inputs
    small = rw.load(folder, digits)
    same, wanted = rw.compress(digits, torch.zeros(1, 1, 8, 8), keep=0.5, data="digits" if with_data else None)
    assert plan.layers == wanted.layers
    assert moved(small, same, held_out) < 1e-6
    assert evaluate(small, images.load("digits")).top1 > evaluate(digits, images.load("digits")).top1 - 3
    again = tmp_path / "again"
    assert run(capsys, *common, "--plan", folder / "plan.json", "--out", again)[0] == 0
    assert moved(small, rw.load(again, digits), held_out) == 0, "the same inputs give the same network"
    assert inputs in out  # people are told what it looked at


@pytest.mark.parametrize("norm", [False, True])
def test_the_mean_of_an_error_costs_nothing(norm: bool) -> None:
    """Inputs far from zero lose no more than inputs around zero: a bias or a batch norm takes up the mean."""
    middle = [nn.Linear(12, 8, bias=not norm), *([nn.BatchNorm1d(8)] if norm else [])]
    model = seeded(lambda: nn.Sequential(*middle, nn.Linear(8, 8))).eval()
    x = torch.randn(400, 12, generator=torch.Generator().manual_seed(0))  # so few that all of them are looked at
    centre = rw.compress(model, x[:1], keep=0.8, data=[x])[1].search.objective
    small, plan = rw.compress(model, x[:1], keep=0.8, data=[x + 5])
    assert plan.search.objective == pytest.approx(centre, rel=0.05)
    with torch.no_grad():
        gap = small(x + 5) - model(x + 5)
    assert float(gap.mean(0).abs().max()) < 0.05 * float(gap.std(0).max())
    assert float(gap.std(0).max()) > 1e-3, "something was removed"
    assert not norm or torch.equal(model[1].running_mean, torch.zeros(8)), "the original stays as it is"
