"""Filter pruning: the smaller network is the old one without some channels, and sizes and bounds are true."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import rankwise as rw
from prunable import NETS, Unseen, make
from rankwise.__main__ import main
from rankwise.models import networks
from rankwise.planning.plan import Plan, Pruned
from rankwise.pruning.channels import Channels, Group, cost, find_channels
from rankwise.pruning.filters import distinct, error_curve, norms
from rankwise.pruning.sensitivity import sensitivities
from rankwise.surgery.forward import tensors_of
from rankwise.surgery.narrow import narrowed
from sentences import check_sentence

METHODS = ("ft", "pfp")
PROBLEMS = [(n, m) for n in NETS for m in METHODS]


def prune(name: str, method: str, **budget: Any) -> tuple[nn.Module, Tensor, nn.Module, Plan]:
    model, x = make(name)
    data = [torch.randn(6, *x.shape[1:], dtype=torch.float64) for _ in range(2)] if method == "pfp" else None
    small, plan = rw.compress(model, x, method=method, data=data, **(budget or {"keep": 0.6}))
    return model, x, small, plan


def check_same(a: Any, b: Any, tolerance: float = 1e-9) -> None:
    for one, other in zip(tensors_of(a), tensors_of(b), strict=True):
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance * max(1.0, float(other.detach().abs().max()))
        )


def zeroed(model: nn.Module, plan: Plan, x: Tensor) -> Any:
    """The original network where every layer sees zeros for the channels that the plan takes from it."""
    handles = []
    for entry in plan.pruned:
        module = model.get_submodule(entry.name)
        if entry.channels is None or getattr(module, "groups", 1) > 1:
            continue
        axis = -1 if isinstance(module, nn.Linear) else 1

        def hook(_: nn.Module, args: Any, kept: Any = entry.channels, axis: int = axis) -> Any:
            mask = torch.zeros(args[0].shape[axis], dtype=args[0].dtype)
            mask[list(kept)] = 1
            return (args[0] * (mask if axis == -1 else mask.view(-1, *[1] * (args[0].ndim - 2))),)

        handles.append(module.register_forward_pre_hook(hook))
    try:
        return model(x)
    finally:
        for handle in handles:
            handle.remove()


def counted(model: nn.Module, x: Tensor) -> tuple[int, int]:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops() // 2


@pytest.mark.parametrize(("name", "method"), PROBLEMS)
@pytest.mark.parametrize("budget", [{"keep": 0.75}, {"macs": 0.7}, {"keep": 0.8, "macs": 0.85}], ids=str)
def test_the_network_without_some_channels(name: str, method: str, budget: dict[str, float]) -> None:
    """Outputs equal those of the original whose layers see zeros instead; sizes are exact and within the budget."""
    model, x, small, plan = prune(name, method, **budget)
    assert plan.pruned
    check_same(small(x), zeroed(model, plan, x))
    assert counted(small, x) == (plan.after.params, plan.after.macs)
    assert counted(model, x) == (plan.before.params, plan.before.macs)
    for unit, limit in (("params", budget.get("keep")), ("macs", budget.get("macs"))):
        assert limit is None or plan.keep(unit) <= limit
    for entry in plan.pruned:
        module = model.get_submodule(entry.name)
        if isinstance(module, nn.Linear):
            assert entry.wide == (module.out_features, module.in_features)
        elif len(entry.shape) > 1:
            assert entry.wide == (module.out_channels, module.in_channels)
        own = sum(p.numel() for p in small.get_submodule(entry.name).parameters(recurse=False))
        assert own == entry.after.params
    named = {e.name for e in plan.layers}
    assert named >= {n for n, m in model.named_modules() if list(m.parameters(recurse=False))}


@pytest.mark.parametrize(("name", "method"), PROBLEMS)
def test_saved_loaded_and_made_dense_again(
    name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, small, plan = prune(name, method)
    monkeypatch.setitem(sys.modules, "torch_pruning", None)  # replaying a plan needs no graph
    assert Plan.loads(plan.dumps()) == plan
    rw.save(small, plan, tmp_path)
    fresh, _ = make(name)
    for parameter in fresh.parameters():
        nn.init.normal_(parameter)
    again = rw.load(tmp_path, fresh)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(again(x)), tensors_of(small(x)), strict=True))
    assert [str(m) for m in again.modules()] == [str(m) for m in small.modules()]
    check_same(rw.apply_plan(model, plan)(x), small(x))
    dense = rw.densify(small)
    check_same(dense(x), small(x))
    assert {k: v.shape for k, v in dense.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert [str(m) for m in dense.modules()] == [str(m) for m in model.modules()]
    assert not [m for m in dense.modules() if narrowed(m)]
    assert not [s for s in rw.find_layers(dense).skipped if s.reason == "already compressed"]


@pytest.mark.parametrize("keep", [0.9, 0.6, 0.3, 0.1])
def test_ft_takes_the_same_share_everywhere_and_the_smallest_norms(keep: float) -> None:
    model, x, _, plan = prune("resnet20", "ft", keep=keep)
    share = Fraction(plan.search.objective).limit_denominator(10_000)
    for group in plan.search.groups:
        assert group.kept == max(1, group.channels - math.floor(share * group.channels))
    conv = model.layer2[1].conv1
    size = conv.weight.detach().abs().sum((1, 2, 3))
    entry = next(e for e in plan.pruned if e.name == "layer2.1.conv1")
    assert entry.filters is not None
    gone = sorted(set(range(32)) - set(entry.filters))
    assert size[gone].max() <= size[list(entry.filters)].min()
    # no smaller share would do
    found, groups = study(model, x)
    smaller = max(Fraction(i, 64) for i in range(64) if Fraction(i, 64) < share)
    kept = [max(1, g.size - math.floor(smaller * g.size)) for g in groups]
    assert cost(found, groups, kept).params > plan.budget.limit("params", plan.before.params)


def study(model: nn.Module, x: Tensor) -> tuple[Channels, tuple[Group, ...]]:
    found = find_channels(model, x, rw.find_layers(model, x))
    return found, found.free


def test_norms_add_up_over_all_who_make_a_channel() -> None:
    model, x = make("residual")
    found, groups = study(model, x)
    group = next(g for g in groups if "short" in g.names("out"))
    expected = sum(m.weight.detach().abs().sum((1, 2, 3)) for m in (model.a2, model.short, model.b2))
    torch.testing.assert_close(norms(model, found, group), expected)


def one_by_one(module: nn.Module, given: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(p, n) of shape (channels, …): what every channel adds alone, positive and negative products apart."""
    weight = module.weight.detach()
    flip = isinstance(module, nn.ConvTranspose2d)
    axis = 0 if flip else 1

    def run(x: Tensor, w: Tensor) -> Tensor:
        if isinstance(module, nn.Linear):
            return F.linear(x, w)
        if flip:
            return F.conv_transpose2d(x, w, None, module.stride, module.padding, module.output_padding)
        return module._conv_forward(x, w, None)

    parts = []
    for sign in (1, -1):
        rows = []
        for j in range(0, given.shape[1], width):
            x, w = given.narrow(1, j, width), weight.narrow(axis, j, width)
            same = run(x.clamp(min=0), (sign * w).clamp(min=0))
            rows.append(same + run((-x).clamp(min=0), (-sign * w).clamp(min=0)))
        parts.append(torch.stack(rows))
    return parts[0], parts[1]


@pytest.mark.parametrize(
    ("name", "maker", "reader", "width"),
    [
        ("residual", "stem", "a1", 1),  # 3×3, stride
        ("residual", "a2", "b1", 1),  # 1×1, activations of one sign
        ("flat", "3", "6", 4),  # flatten, activations of both signs
        ("flat", "6", "8", 1),  # linear
        ("upward", "0", "3", 1),  # transposed, both signs
        ("lines", "0", "3", 1),  # 1-D, reflecting margins
        ("digits-cnn", "conv1", "conv2", 1),
    ],
)
def test_sensitivities_by_hand(name: str, maker: str, reader: str, width: int) -> None:
    """sⱼ is the largest share of channel j, and removed channels change both parts by at most their sum."""
    model, x = make(name)
    x = torch.randn(5, *x.shape[1:], dtype=torch.float64)
    found, groups = study(model, x[:2])
    at = next(i for i, g in enumerate(groups) if g.names("out")[0] == maker)
    only = replace(groups[at], members=tuple(m for m in groups[at].members if m.name == reader or m.side == "out"))
    (score,) = sensitivities(model, [x[:2], x[2:]], found, [only])
    assert score is not None
    seen: list[Tensor] = []
    handle = model.get_submodule(reader).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(x)
    handle.remove()
    p, n = one_by_one(model.get_submodule(reader), seen[0].detach(), width)
    shares = torch.stack([part / part.sum(0).clamp(min=1e-300) for part in (p, n)])
    expected = shares.movedim(1, 0).flatten(1).amax(1)
    torch.testing.assert_close(score, expected, rtol=1e-9, atol=1e-12)
    # the guarantee
    gone = score.argsort()[: len(score) // 2]
    for part in (p, n):
        lost = part[gone].sum(0) / part.sum(0).clamp(min=1e-300)
        assert float(lost.max()) <= float(score[gone].sum()) + 1e-12
    z = model.get_submodule(reader)(seen[0]).detach()
    bias = model.get_submodule(reader).bias
    plain = z if bias is None else z - bias.detach().view(-1, *[1] * (z.ndim - 2))
    torch.testing.assert_close((p - n).sum(0), plain, rtol=1e-8, atol=1e-10)


def test_a_channel_with_several_readers_counts_where_it_counts_most() -> None:
    model, x = make("concat")
    found, groups = study(model, x)
    at = next(i for i, g in enumerate(groups) if g.names("out")[0] == "first")
    together = sensitivities(model, [x], found, groups)[at]
    alone = []
    for reader in groups[at].names("in"):
        members = tuple(m for m in groups[at].members if m.side == "out" or m.name == reader)
        alone.append(sensitivities(model, [x], found, [replace(groups[at], members=members)])[0])
    assert len(alone) == 3
    assert together is not None
    torch.testing.assert_close(together, torch.stack([s for s in alone if s is not None]).amax(0))


@pytest.mark.parametrize("budget", [{"keep": 0.8}, {"keep": 0.5}, {"macs": 0.6}, {"keep": 0.7, "macs": 0.7}], ids=str)
def test_minimax_finds_the_least_largest_error(budget: dict[str, float]) -> None:
    """Against all numbers of channels in every group."""
    model, x = make("flat")
    data = [torch.randn(6, *x.shape[1:], dtype=torch.float64)]
    _, plan = rw.compress(model, x, method="pfp", data=data, search="minimax", **budget)
    found, groups = study(model, x)
    curves = [error_curve(s) for s in sensitivities(model, data, found, groups) if s is not None]
    limits = {unit: plan.budget.limit(unit, getattr(plan.before, unit)) for unit in plan.budget.units}
    best = math.inf
    for kept in itertools.product(*(range(1, g.size + 1) for g in groups)):
        size = cost(found, groups, kept)
        if all(getattr(size, unit) <= limit for unit, limit in limits.items()):
            best = min(best, max(float(c[n]) for c, n in zip(curves, kept, strict=True)))
    assert plan.search.objective == pytest.approx(best, abs=1e-12)
    now = max(float(c[g.kept]) for c, g in zip(curves, plan.search.groups, strict=True))
    assert now == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("keep", [0.4, 0.2, 0.05])
def test_pfp_takes_as_many_as_its_draws_are_expected_to_find(keep: float) -> None:
    """Against simulated draws; and a little more of them would be above the budget."""
    model, x = make("digits-cnn")
    data = [torch.rand(16, 1, 8, 8, dtype=torch.float64)]
    _, plan = rw.compress(model, x, method="pfp", data=data, keep=keep)
    found, groups = study(model, x)
    scores = [s for s in sensitivities(model, data, found, groups) if s is not None]

    def kept(draws: float) -> list[int]:
        return [distinct(s, math.ceil(draws * float(s.sum()))) for s in scores]

    assert kept(2.0**60) == [int((s > 0).sum()) for s in scores]
    draws = plan.search.draws
    assert [g.kept for g in plan.search.groups] == kept(draws)
    assert cost(found, groups, kept(draws)).params <= plan.budget.limit("params", plan.before.params)
    assert cost(found, groups, kept(draws * (1 + 1e-9))).params > plan.budget.limit("params", plan.before.params)
    bounds = [float(error_curve(s)[n]) for s, n in zip(scores, kept(draws), strict=True)]
    assert plan.search.objective == pytest.approx(max(bounds))
    random = torch.Generator().manual_seed(0)
    for s in scores:
        m = math.ceil(draws * float(s.sum()))
        rounds = [len(s.multinomial(m, replacement=True, generator=random).unique()) for _ in range(400)]
        assert abs(sum(rounds) / len(rounds) - distinct(s, m)) < 1.25  # rounded down, and noise


@pytest.mark.parametrize("method", METHODS)
def test_nothing_goes_when_everything_may_stay(method: str) -> None:
    model, x, small, plan = prune("digits-cnn", method, keep=1.0)
    assert not plan.pruned
    assert torch.equal(small(x), model(x))
    assert {s.reason for s in plan.kept} == {
        "the budget leaves it whole",
        "its filters are what the network gives out",
        "not a linear or convolution layer",
    }


@pytest.mark.parametrize("method", METHODS)
def test_a_budget_that_cannot_be_met_states_what_can(method: str) -> None:
    message = check_sentence(lambda: prune("concat", method, keep=0.01))
    least = float(message.split("(keep ")[1].split(")")[0])
    _, _, _, plan = prune("concat", method, keep=least)
    assert {g.kept for g in plan.search.groups} == {1}
    assert "macs" in check_sentence(lambda: prune("concat", method, macs=0.01, keep=0.9))


def no_trace(model: nn.Module) -> Callable[[], None]:
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]

    def check() -> None:
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert [m.training for m in model.modules()] == modes
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert not [m for m in model.modules() if narrowed(m)]

    return check


def test_data_that_cannot_be_used() -> None:
    model, x = make("flat")
    model.train()
    check = no_trace(model)
    for data, words in (
        (None, "no calibration data"),
        ([], "is empty"),
        ([x, x * float("nan")], "calibration batch 2 gives NaN"),
        ([x[:, :1]], "could not run"),
    ):
        message = check_sentence(lambda d=data: rw.compress(model, x, method="pfp", keep=0.5, data=d))
        assert words in message
        check()
    rw.compress(model, x, method="pfp", keep=0.5, data=x)  # one tensor is one batch
    check()


def test_what_means_nothing_to_these_methods() -> None:
    model, x = make("flat")
    assert "error=" in check_sentence(lambda: rw.compress(model, x, method="ft", keep=0.5, error="max"))
    assert "slices=" in check_sentence(lambda: rw.compress(model, x, method="ft", keep=0.5, groups=3))
    assert "unknown setting" in check_sentence(lambda: rw.compress(model, x, method="ft", keep=0.5, colour=3))
    assert "unknown search" in check_sentence(lambda: rw.compress(model, x, method="ft", keep=0.5, search="fair"))
    assert "score='norm'" in check_sentence(lambda: rw.compress(model, x, method="ft", keep=0.5, search="minimax"))
    assert "unknown setting 'score'" in check_sentence(lambda: rw.compress(model, x, keep=0.5, score="norm"))
    assert "example input" in check_sentence(lambda: rw.compress(model, method="ft", keep=0.5))
    table = rw.build_table(model, x)
    assert "rankwise.compress" in check_sentence(lambda: rw.allocate(table, rw.Budget(params=0.5), method="ft"))
    model[0].weight.data[0] = float("nan")
    assert "NaN" in check_sentence(lambda: rw.compress(model, x, method="ft", keep=0.5))
    single = nn.Sequential(nn.Linear(4, 3))
    assert "no filter" in check_sentence(lambda: rw.compress(single, torch.randn(1, 4), method="ft", keep=0.5))


def test_a_reader_that_the_data_never_reaches_keeps_its_channels() -> None:
    model, x = Unseen().double().eval(), torch.randn(2, 4, dtype=torch.float64)
    _, plan = rw.compress(model, {"x": x, "other": True}, method="pfp", keep=0.8, data=[{"x": x}])
    assert [g.layers for g in plan.search.groups] == [("used",)]
    assert "does not reach" in next(s.reason for s in plan.kept if s.name == "extra")
    assert "does not reach those who read extra" in plan.warnings[0]


def changed(plan: Plan, layer: str, **what: Any) -> Plan:
    layers = tuple(replace(e, **what) if e.name == layer and isinstance(e, Pruned) else e for e in plan.layers)
    return replace(plan, layers=layers)


def test_plans_that_do_not_fit_change_nothing() -> None:
    model, x, small, plan = prune("squeeze", "ft")
    check = no_trace(model)
    for what, words in (
        ({"filters": ()}, "keeps none"),
        ({"filters": (0, 99)}, "possible are 0 to 11"),
        ({"filters": (-1, 2)}, "number -1"),
        ({"filters": (2, 1)}, "out of order"),
        ({"filters": (1, 1)}, "more than once"),
        ({"channels": (0, 6)}, "possible are 0 to 5"),
        ({"kind": "Linear"}, "another model"),
        ({"shape": (3, 3, 1, 1)}, "another model"),
        ({"name": "nowhere"}, "does not have"),
        ({"name": "head"}, "another model"),
    ):
        wrong = changed(plan, "expand", **what)
        assert words in check_sentence(lambda p=wrong: rw.apply_plan_(model, p)), what
        check()
    assert "depthwise" in check_sentence(lambda: rw.apply_plan_(model, changed(plan, "depth", channels=(0, 1))))
    assert "already compressed" in check_sentence(lambda: rw.apply_plan(small, plan))
    assert "already compressed" in check_sentence(lambda: rw.compress(small, x, method="ft", keep=0.5))
    assert "already compressed" in check_sentence(lambda: rw.compress(small, x, keep=0.9))


def test_saving_checks_that_the_model_follows_the_plan(tmp_path: Path) -> None:
    model, _, small, plan = prune("residual", "ft")
    _, _, _, other = prune("residual", "ft", keep=0.4)
    empty = replace(plan, layers=())
    for network, decision in ((model, plan), (small, other), (small, empty)):
        assert "does not follow the plan" in check_sentence(lambda n=network, d=decision: rw.save(n, d, tmp_path))
    assert not list(tmp_path.iterdir())


def test_reading_doubtful_entries() -> None:
    _, _, _, plan = prune("residual", "ft")
    body = plan.to_json()
    at = next(i for i, e in enumerate(body["layers"]) if e["name"] == "a1")
    for change, words in (
        ({"filters": "all"}, "a list"),
        ({"filters": [0, 1.5]}, "whole number"),
        ({"rank": 3}, "unknown key"),
        ({"after": {"params": 3, "flops": 1}}, "unknown key"),
        ({"shape": None}, "a list"),
    ):
        layers = [{**e, **change} if i == at else e for i, e in enumerate(body["layers"])]
        assert words in check_sentence(lambda b={**body, "layers": layers}: Plan.loads(json.dumps(b)))
    for missing in ("filters", "channels", "before", "shape"):
        layers = [{k: v for k, v in e.items() if k != missing or i != at} for i, e in enumerate(body["layers"])]
        assert missing in check_sentence(lambda b={**body, "layers": layers}: Plan.loads(json.dumps(b)))


def test_training_goes_on() -> None:
    """Gradients reach every parameter, and what was frozen stays frozen."""
    model, x = make("residual")
    model.a1.weight.requires_grad_(False)
    small, _ = rw.compress(model, x, method="ft", keep=0.5)
    small(x).sum().backward()
    assert [k for k, p in small.named_parameters() if p.grad is None] == ["a1.weight"]
    small.train()
    assert torch.isfinite(small(x)).all()


@pytest.mark.skipif(not (find_spec("torchvision") and find_spec("timm")), reason="needs rankwise[vision]")
@pytest.mark.parametrize("spec", ["torchvision:resnet18", "torchvision:mobilenet_v2"])
@pytest.mark.parametrize("method", METHODS)
def test_torchvision(spec: str, method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = networks.build(spec).eval(), torch.randn(1, 3, 48, 48)
    small, plan = rw.compress(model, x, method=method, macs=0.6, data=[torch.randn(2, 3, 48, 48)])
    assert counted(small, x) == (plan.after.params, plan.after.macs)
    check_same(small(x), zeroed(model, plan, x), 1e-3)
    rw.save(small, plan, tmp_path)
    assert torch.equal(rw.load(tmp_path, model)(x), small(x))
    assert [g.reason for g in plan.search.whole] == ["its filters are what the network gives out"]


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, weights = tmp_path / "o", tmp_path / "w.safetensors"
    save_file(rw.networks.build("digits-cnn").state_dict(), weights)
    digits = ["compress", "digits-cnn", "--weights", str(weights)]
    flags = ["--keep", "0.5", "--data", "digits", "--calibrate", "64"]
    assert main([*digits, "--method", "pfp", *flags, "--json", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["after"]["params"] <= 0.5 * found["plan"]["before"]["params"]
    assert found["verified"] == "it gives the same outputs"
    assert main(["evaluate", str(out), "--data", "digits", "--limit", "50"]) == 0
    assert "top-1" in capsys.readouterr().out
    again = tmp_path / "again"
    assert main([*digits, "--plan", str(out / "plan.json"), "--out", str(again), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == found["plan"]
    excluded = ["--exclude", "conv2", "--budget", "macs=0.9", "--dry-run"]
    assert main(["compress", "resnet20", "--method", "ft", "--exclude", "conv1", "--keep", "0.6", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "filters kept" in shown
    assert "layer1.0.conv1" in shown
    assert "excluded by name" in shown
    for bad, words in (
        (["digits-cnn", "--method", "ft", *excluded, "--error", "max"], "error="),
        (["digits-cnn", "--method", "pfp", "--keep", "0.5", "--dry-run"], "--data"),
        (["digits-cnn", "--method", "ft", "--keep", "0.00001", "--dry-run"], "least possible"),
        (["resnet20", "--method", "ft", "--keep", "0.5", "--strict", "--dry-run"], "--strict"),
        (["digits-cnn", "--method", "ft", "--keep", "0.5", "--search", "alternate", "--dry-run"], "unknown search"),
    ):
        assert main(["compress", *bad]) == 2
        assert words in capsys.readouterr().err
    assert main(["compress", "digits-cnn", "--method", "ft", "--keep", "0.5", "--strict", "--dry-run"]) == 0
