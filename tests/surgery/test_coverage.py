"""Which modules can be decomposed, why others are left alone, and that the user's model is never disturbed."""

from __future__ import annotations

import copy
import random
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

import rankwise as rw
from rankwise.core.layer import Call
from rankwise.core.option import Cost, Option
from rankwise.decompositions import full_rank
from rankwise.models import networks
from rankwise.surgery.forward import undisturbed
from rankwise.surgery.modules import mark_of
from strategies import DATA_FREE


def numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def macs_of(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    # Attention in plain products, which torch's counter knows; fused, it counts nothing.
    with undisturbed(model), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)
    return counter.get_total_flops() // 2


def mlp(width: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def names(model: nn.Module, **kwargs: Any) -> list[str]:
    return [layer.name for layer in rw.find_layers(model, **kwargs).layers]


def reasons(model: nn.Module, **kwargs: Any) -> dict[str, str]:
    return {s.name: s.reason for s in rw.find_layers(model, **kwargs).skipped}


def pairs(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if mark_of(module) is not None]


def plan_for(model: nn.Module, *wanted: str, rank: int | None = None) -> rw.Plan:
    """A plan by hand: one slice, first fold, at full rank unless a rank is given."""
    cost = Cost(1, None)
    choices = []
    for layer in rw.find_layers(model).layers:
        if not wanted or layer.name in wanted:
            option = Option("f│c" + "dhw"[3 - layer.dims :], 1)
            most = full_rank(layer, option)
            found = (layer.name, layer.kind, layer.shape, option.fold, 1, rank or most, {}, cost, cost)
            choices.append(rw.Choice(*found))
    assert len(choices) == len(wanted) or not wanted
    return rw.Plan("", "", rw.Budget(params=1.0), cost, cost, tuple(choices))


def one_sentence(caught: pytest.ExceptionInfo[rw.RankwiseError]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


# Everything is named once, and the counts add up


class Odd(nn.Module):
    """Parameters of its own beside children, a frozen part, a module without parameters, norms, a recurrent net."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.embed = nn.Embedding(11, 8)
        self.rnn = nn.LSTM(8, 6)
        self.conv = nn.Conv1d(6, 8, 3, groups=2)
        self.depthwise = nn.Conv1d(8, 16, 3, groups=8)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout()
        self.bilinear = nn.Bilinear(4, 4, 2)
        self.attention = nn.MultiheadAttention(8, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
        self.empty = nn.Linear(0, 3)
        self.heads = nn.ModuleList([nn.Linear(16, 2), nn.Linear(16, 2, bias=False)])
        self.frozen = nn.Linear(7, 7).requires_grad_(False)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about a layer without inputs
    NETWORKS = {
        "odd": Odd(),
        "mlp": mlp(),
        "bare": nn.Linear(3, 4),
        "empty": nn.Sequential(),
        "activations": nn.Sequential(nn.ReLU(), nn.Flatten()),
        "transformer": nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
        "pair": rw.apply_plan(mlp(), plan_for(mlp(), "0"))[0],
        "compressed": rw.apply_plan(mlp(), plan_for(mlp(), "2")),
    }


@pytest.mark.parametrize("name", NETWORKS)
def test_every_module_with_parameters_is_named_once_and_counts_add_up(name: str) -> None:
    model = NETWORKS[name]
    coverage = rw.find_layers(model)
    found = [entry.name for entry in (*coverage.layers, *coverage.skipped)]
    assert len(found) == len(set(found))
    inside = tuple(n + "." for n in pairs(model))
    for module_name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        if parameters and not module_name.startswith(inside) and "" not in pairs(model):
            assert module_name in found
    biases = sum(model.get_submodule(la.name).bias.numel() for la in coverage.layers if la.bias)
    listed = sum(la.params for la in coverage.layers) + biases + sum(s.params for s in coverage.skipped)
    assert listed == coverage.params == numel(model)
    assert coverage.macs is None
    assert all(s.reason for s in coverage.skipped)


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(rw.RankwiseError, match=r"torch\.nn\.Module is needed, and OrderedDict"):
        rw.find_layers(mlp().state_dict())


# Why a module is left alone


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Clamped(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight, bias).clamp(min=0)


class Scaled(nn.Linear):
    """The forward of torch, but something more that a pair could not hold."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(4))


class Plain(nn.Linear):
    """A subclass that changes nothing."""


def replaced_forward() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: 2 * x
    return layer


def with_buffer() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.register_buffer("mask", torch.ones(4))
    return layer


def with_weight(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def with_hook(register: str) -> nn.Linear:
    layer = nn.Linear(4, 4)
    getattr(layer, register)(lambda *args: None)
    return layer


HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
LEFT_ALONE = {
    "overridden forward": (lambda: Doubled(4, 4), "Doubled changes how Linear works"),
    "overridden convolution": (lambda: Clamped(4, 4, 3), "Clamped changes how Conv2d works"),
    "forward of the object": (replaced_forward, "forward was replaced"),
    "more parameters": (Scaled, "more than a weight and a bias"),
    "buffer": (with_buffer, "more than a weight and a bias"),
    "lazy": (lambda: nn.LazyLinear(4), "no values yet"),
    "meta": (lambda: nn.Linear(4, 4, device="meta"), "no values yet"),
    "int8": (lambda: with_weight(torch.ones(4, 4, dtype=torch.int8)), "int8"),
    "float8": (lambda: with_weight(torch.ones(4, 4).to(torch.float8_e4m3fn)), "float8_e4m3fn"),
    "complex": (lambda: with_weight(torch.ones(4, 4, dtype=torch.complex64)), "complex64"),
    "sparse": (lambda: with_weight(torch.eye(4).to_sparse()), "sparse_coo"),
    "no inputs": (lambda: with_weight(torch.ones(4, 0)), "it has no weights"),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), "depthwise"),
    "depthwise transposed": (lambda: nn.ConvTranspose1d(4, 4, 3, groups=4), "depthwise"),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3)), "parametrised"),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), "parametrised"),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), "parametrised"),
    "pruned": (lambda: prune.random_unstructured(nn.Linear(4, 4), "weight", 0.5), "parametrised"),
    **{hook: (lambda hook=hook: with_hook(f"register_{hook}"), "hooks") for hook in HOOKS},
    "norm": (lambda: nn.LayerNorm(4), "not a linear or convolution layer"),
}


def test_a_linear_layer_of_timm_is_one_of_torch() -> None:
    """It casts where it is scripted under autocast, and nothing else; MobileNetV3's classifier is one."""
    linear = pytest.importorskip("timm.layers.linear").Linear
    model = nn.Sequential(linear(16, 16), nn.ReLU(), linear(16, 8)).eval()
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    coverage = rw.find_layers(model, x)
    assert [layer.kind for layer in coverage.layers] == ["Linear", "Linear"]
    small, plan = rw.compress(model, x, keep=0.7, error="energy")
    assert plan.choices
    assert sum(p.numel() for p in small.parameters()) == plan.after.params
    whole = rw.densify(small)
    with torch.no_grad():
        torch.testing.assert_close(whole(x), small(x))


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone_with_a_reason(name: str) -> None:
    make, reason = LEFT_ALONE[name]
    model = nn.Sequential(mlp(), make())
    coverage = rw.find_layers(model)
    assert [la.name for la in coverage.layers] == ["0.0", "0.2"]
    (text,) = [s.reason for s in coverage.skipped if s.name == "1"]
    assert reason in text


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_old_norms_are_left_alone_and_their_networks_can_be_copied(norm: Any, tmp_path: Path) -> None:
    """They keep a weight that is computed, and deepcopy refuses those."""
    model, x = nn.Sequential(norm(nn.Linear(12, 12)), mlp()), torch.randn(2, 12)
    model(x)
    assert "parametrised" in reasons(model)["0"]
    small, plan = rw.compress(model, x, keep=0.9)
    rw.save(small, plan, tmp_path)
    for version in (small, rw.densify(small), rw.load(tmp_path, model)):
        torch.testing.assert_close(version.eval()(x), small.eval()(x))
    small.train()(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_subclass_that_changes_nothing_is_decomposed() -> None:
    assert names(nn.Sequential(Plain(4, 4))) == ["0"]


def test_a_grouped_convolution_is_decomposed_but_not_a_depthwise_one() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=8))
    assert names(model) == ["0"]


def test_plan_for_a_layer_that_must_be_left_alone_is_refused() -> None:
    plan = plan_for(mlp(), "0")
    model = mlp()
    model[0].register_forward_hook(lambda *args: None)
    with pytest.raises(rw.RankwiseError, match="hooks") as caught:
        rw.apply_plan_(model, plan)
    assert "'0'" in one_sentence(caught)
    assert type(model[0]) is nn.Linear


def test_a_bare_layer_is_left_alone_with_advice() -> None:
    assert "wrap it in nn.Sequential" in reasons(nn.Linear(4, 4))[""]
    with pytest.raises(rw.RankwiseError, match="no layer that can be decomposed"):
        rw.compress(nn.Linear(4, 4), keep=0.5)


@pytest.mark.parametrize("model", [nn.Sequential(), nn.Sequential(nn.ReLU())])
def test_a_model_without_parameters_is_covered_but_cannot_be_compressed(model: nn.Module) -> None:
    assert rw.find_layers(model, torch.zeros(2)) == rw.Coverage((), (), 0, 0)
    with pytest.raises(rw.RankwiseError, match="no layer that can be decomposed"):
        rw.compress(model, keep=0.5)


# Shared modules and tied weights


class Shared(nn.Module):
    """One block under two names, and one of its layers under a third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(12, 12), nn.ReLU())
        self.second = self.first
        self.third = self.first[0]
        self.last = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.third(self.second(self.first(x))))


def test_a_shared_module_is_one_layer_with_aliases_called_often_and_counted_once() -> None:
    model, x = Shared(), torch.randn(5, 12)
    coverage = rw.find_layers(model, x)
    shared, last = coverage.layers
    assert (shared.name, shared.aliases) == ("first.0", ("second.0", "third"))
    assert (last.name, last.aliases) == ("last", ())
    assert shared.calls == (Call((), (), 15),)
    assert last.calls == (Call((), (), 5),)
    assert coverage.params == numel(model) == 2 * 12 * 13
    assert coverage.macs == shared.macs + last.macs == macs_of(model, x)


def test_what_was_shared_stays_shared() -> None:
    model, x = Shared(), torch.randn(5, 12)
    small, plan = rw.compress(model, x, keep=0.7, method="svd")
    assert small.first is small.second
    assert small.first[0] is small.third
    assert mark_of(small.third) is not None
    assert plan.after == Cost(numel(small), macs_of(small, x))
    dense = rw.densify(small)
    assert dense.first is dense.second
    assert dense.first[0] is dense.third
    assert type(dense.third) is nn.Linear
    torch.testing.assert_close(dense(x), small(x))


@pytest.mark.parametrize("pattern", ["first.0", "second.0", "third", "second", "thi*"])
def test_a_shared_module_is_excluded_by_any_of_its_names(pattern: str) -> None:
    assert names(Shared(), exclude=pattern) == ["last"]


def tied_head() -> nn.ModuleDict:
    model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "body": nn.Linear(4, 4), "head": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def tied_linears() -> nn.ModuleDict:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "body": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    return model


def tied_by_memory() -> nn.ModuleDict:
    """Two Parameter objects on the same numbers."""
    model = tied_linears()
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    return model


def tied_biases() -> nn.ModuleDict:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "body": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].bias = model["a"].bias
    return model


@pytest.mark.parametrize("make", [tied_head, tied_linears, tied_by_memory, tied_biases])
def test_tied_tensors_are_left_alone(make: Any) -> None:
    model = make()
    assert names(model) == ["body"]
    assert any("tied to" in reason for reason in reasons(model).values())


def test_a_weight_that_the_model_itself_holds_too_is_tied() -> None:
    model = mlp()
    model.register_parameter("also", model[0].weight)
    assert names(model) == ["2"]
    assert reasons(model)["0"].startswith("its weight is tied to ")


# Attention and torch's fast path, which reads weights without calling modules


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.attention(x, x, x)[0])


def test_attention_is_left_alone_and_runs_in_both_modes() -> None:
    model, x = Attending(), torch.randn(2, 3, 16)
    assert names(model) == ["fc"]
    assert "MultiheadAttention" in reasons(model)["attention.out_proj"]
    small, plan = rw.compress(model, x, keep=0.95)
    assert pairs(small) == ["fc"]
    assert plan.after == Cost(numel(small), macs_of(small, x))
    small.train()(x).sum().backward()
    with torch.no_grad():
        assert small.eval()(x).shape == x.shape


def encoder(layers: int) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return (nn.TransformerEncoder(layer, layers) if layers > 1 else layer).eval()


MASK = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
FEED_FORWARD = {1: [("linear1",), ("linear1", "linear2")], 2: [("layers.0.linear2",), ("layers.1.linear1",), ()]}
FAST = [(n, wanted) for n, choices in FEED_FORWARD.items() for wanted in choices]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("layers", "wanted"), FAST)
def test_transformer_encoders_survive_the_fast_path(layers: int, wanted: tuple[str, ...], tmp_path: Path) -> None:
    model, x = encoder(layers), torch.randn(2, 5, 16)
    plan = plan_for(model, *wanted)
    small = rw.apply_plan(model, plan)
    assert len(pairs(small)) == (len(wanted) or 4)
    rw.save(small, plan, tmp_path)
    versions = [small, rw.load(tmp_path, model), rw.densify(small), copy.deepcopy(small)]
    with torch.no_grad():
        for version in versions:
            torch.testing.assert_close(version(x), model(x), rtol=1e-4, atol=1e-5)
            masked, expected = (m(x, src_key_padding_mask=MASK) for m in (version, model))
            torch.testing.assert_close(masked[~MASK], expected[~MASK], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(small.train()(x), copy.deepcopy(model).train()(x), rtol=1e-4, atol=1e-5)


def test_macs_of_an_encoder_are_counted_without_the_fast_path() -> None:
    model, x = encoder(2), torch.randn(2, 5, 16)
    coverage = rw.find_layers(model, x)
    assert all(la.calls == (Call((), (), 10),) for la in coverage.layers)
    # attention 16 → 48 and 16 → 16, feed-forward 16 → 32 → 16, and the scores of 5 positions in 2 sequences
    by_hand = 2 * (10 * 16 * (48 + 16 + 32 + 32) + 2 * 2 * 5 * 5 * 16)
    assert coverage.macs == rw.find_layers(model, x, exclude="*").macs == by_hand
    small, plan = rw.compress(model, x, keep=0.8)
    assert plan.after == Cost(numel(small), macs_of(small, x))
    assert torch.backends.mha.get_fastpath_enabled()


# Networks that read a layer's weight themselves: known limits


class Reader(nn.Module):
    """What swin (torchvision), BEiT (timm), T5, ViT and CLIP (transformers) do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.other = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(nn.functional.linear(x.to(self.fc.weight.dtype), self.fc.weight, self.fc.bias))


class Upsampling(nn.Module):
    """What many U-Nets do: the layer is given the size it should reach."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(16, 16, 3, stride=2)
        self.conv = nn.Conv2d(16, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.up(x, output_size=[2 * x.shape[-2] + 2, 2 * x.shape[-1] + 2]))


def test_a_layer_whose_weight_is_read_directly_is_left_alone() -> None:
    x = torch.randn(2, 16)
    small, _ = rw.compress(Reader(), x, keep=0.6)
    assert small(x).shape == x.shape


def test_a_layer_that_is_called_with_more_than_its_input_is_left_alone() -> None:
    x = torch.randn(1, 16, 4, 4)
    small, _ = rw.compress(Upsampling(), x, keep=0.6)
    assert small(x).shape == (1, 16, 8, 8)


# Excluding


def nested() -> nn.Module:
    return nn.ModuleDict({"block": mlp(), "block1": mlp(), "head": nn.Linear(12, 4)})


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ("head", ["block.0", "block.2", "block1.0", "block1.2"]),
        ("block", ["block1.0", "block1.2", "head"]),
        ("block*", ["head"]),
        (["*.0", "head"], ["block.2", "block1.2"]),
        (("block.0",), ["block.2", "block1.0", "block1.2", "head"]),
    ],
)
def test_excluded_by_name_prefix_or_pattern(exclude: Any, left: list[str]) -> None:
    assert names(nested(), exclude=exclude) == left
    gone = {n for n, r in reasons(nested(), exclude=exclude).items() if r == "excluded by name"}
    assert gone | set(left) == set(names(nested()))


@pytest.mark.parametrize("pattern", ["hea", "block.1.0", "Block*", "head.weight"])
def test_a_pattern_that_matches_nothing_is_an_error(pattern: str) -> None:
    with pytest.raises(rw.RankwiseError, match="matches no module") as caught:
        rw.find_layers(nested(), exclude=["head", pattern])
    assert repr(pattern) in one_sentence(caught)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_named_and_can_be_excluded(value: float) -> None:
    model = nn.ModuleDict({"good": nn.Linear(12, 12), "bad": nn.Linear(12, 12)})
    model["bad"].weight.data[3, 4] = value
    with pytest.raises(rw.RankwiseError, match="'bad' has 1 weights that are NaN or infinite") as caught:
        rw.compress(model, keep=0.9)
    assert "exclude='bad'" in one_sentence(caught)
    small, plan = rw.compress(model, keep=0.9, exclude=["bad"])
    assert [c.name for c in plan.choices] == ["good"]
    assert type(small["bad"]) is nn.Linear


def test_a_plan_is_not_applied_to_weights_that_are_not_finite() -> None:
    plan, model = plan_for(mlp(), rank=2), mlp()
    model[2].weight.data[0, 0] = float("nan")
    with pytest.raises(rw.RankwiseError, match="'2' has 1 weights"):
        rw.apply_plan_(model, plan)
    assert pairs(model) == []


def test_a_saved_model_can_be_read_into_one_that_holds_rubbish(tmp_path: Path) -> None:
    small, plan = rw.compress(mlp(), keep=0.7)
    rw.save(small, plan, tmp_path)
    rubbish = mlp()
    for p in rubbish.parameters():
        p.data.fill_(float("nan"))
    x = torch.randn(2, 12)
    torch.testing.assert_close(rw.load(tmp_path, rubbish)(x), small(x))


def test_compressing_twice_is_refused() -> None:
    small, _ = rw.compress(mlp(), keep=0.7)
    with pytest.raises(rw.RankwiseError, match="already compressed"):
        rw.compress(small, keep=0.5)
    again, plan = rw.compress(rw.densify(small), keep=0.7)
    assert numel(again) == plan.after.params


# What the result keeps of the original


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_result_keeps_the_dtype(dtype: torch.dtype) -> None:
    model, x = nn.Sequential(mlp(), nn.BatchNorm1d(12)).to(dtype).eval(), torch.randn(3, 12, dtype=dtype)
    small, plan = rw.compress(model, x, keep=0.8)
    assert {p.dtype for p in small.parameters()} == {dtype}
    assert plan.after == Cost(numel(small), macs_of(small, x))
    whole = rw.apply_plan(model, plan_for(model))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(whole(x), model(x), rtol=tolerance, atol=tolerance)
    assert {p.dtype for p in rw.densify(small).parameters()} == {dtype}


def test_frozen_stays_frozen_and_every_module_keeps_its_mode() -> None:
    model = nn.ModuleDict({"a": nn.Linear(12, 12), "b": nn.Linear(12, 12), "c": nn.Conv1d(12, 12, 3)}).train()
    model["a"].requires_grad_(False).eval()
    model["b"].bias.requires_grad_(False)
    small = rw.apply_plan(model, plan_for(model, rank=2))
    for result in (small, rw.densify(small)):
        trained = {n for n, p in result.named_parameters() if p.requires_grad}
        assert not any(n.startswith("a.") for n in trained)
        assert [n for n in trained if n.startswith("b.") and n.endswith("bias")] == []
        assert any(n.startswith("b.") for n in trained)
        assert any(n.startswith("c.") and n.endswith("bias") for n in trained)
        modes = {n: {m.training for m in result[n].modules()} for n in result}
        assert modes == {"a": {False}, "b": {True}, "c": {True}}


def test_the_original_is_not_touched() -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    small, _ = rw.compress(model, torch.randn(2, 12), keep=0.6)
    for p in small.parameters():
        p.data.zero_()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert pairs(model) == []


def states() -> tuple[Any, ...]:
    numpy_state = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (numpy_state[1].tolist(), *numpy_state[2:])


def test_surgery_draws_no_random_numbers() -> None:
    parts = [nn.Linear(6, 6), nn.Conv2d(6, 6, 3), nn.ConvTranspose1d(6, 6, 3)]
    try:
        from transformers.pytorch_utils import Conv1D

        parts.append(Conv1D(6, 6))
    except ImportError:
        pass
    model = nn.ModuleList(parts)
    plan = plan_for(model)
    before = states()
    rw.densify(rw.apply_plan(model, plan))
    assert states() == before


# Example inputs


class Wild(nn.Module):
    """Everything that a forward pass may change: statistics, buffers, random states; and it may fail."""

    def __init__(self, fail: bool) -> None:
        super().__init__()
        self.fail = fail
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout().eval()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(1, 4))
        self.register_buffer("nothing", None)
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.training or self.norm.training or torch.is_grad_enabled())
        self.calls += 1
        self.cache = torch.cat([self.cache, x])
        self.register_buffer("late", x)
        self.norm.running_mean += 1
        random.random()
        np.random.rand()
        y = self.norm(self.fc(x)) + torch.rand(4)
        if self.fail:
            raise ValueError("wild\nand long")
        return y


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_an_example_leaves_no_trace(fail: bool, training: bool) -> None:
    model = Wild(fail).train(training)
    model.drop.eval()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    values = copy.deepcopy(model.state_dict())
    modes = {n: m.training for n, m in model.named_modules()}
    hooks = {n: len(m._forward_hooks) + len(m._forward_pre_hooks) for n, m in model.named_modules()}
    before = states()
    if fail:
        with pytest.raises(rw.RankwiseError, match="ValueError: wild") as caught:
            rw.find_layers(model, torch.randn(3, 4))
        assert "3x4" in one_sentence(caught)
    else:
        assert rw.find_layers(model, torch.ones(3, 4)).macs == 48
    assert model.seen == [False]
    assert states()[1:] == before[1:]
    assert modes == {n: m.training for n, m in model.named_modules()}
    assert hooks == {n: len(m._forward_hooks) + len(m._forward_pre_hooks) for n, m in model.named_modules()}
    for had, has in ((parameters, dict(model.named_parameters())), (buffers, dict(model.named_buffers()))):
        assert list(had) == list(has)
        assert all(had[n] is has[n] for n in had)
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())


def test_an_example_leaves_the_random_state_of_torch() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout()), torch.randn(3, 4)
    model.register_forward_hook(lambda *args: torch.rand(3))
    before = torch.get_rng_state()
    rw.find_layers(model, x)
    assert torch.equal(torch.get_rng_state(), before)


def test_lazy_layers_must_be_run_by_their_owner_first() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(rw.RankwiseError, match="lazy"):
        rw.find_layers(model, torch.randn(2, 3))
    assert type(model[0]) is nn.LazyLinear


def test_a_model_without_values_can_be_counted() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to("meta")
    assert rw.find_layers(model, torch.zeros(2, 3, 5, 5)).macs == 2 * 9 * 4 * 27


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)

    def forward(self, a: Tensor, b: Tensor | None = None, plus: int = 0) -> Tensor:
        return self.fc(a if b is None else a + b) + plus


@pytest.mark.parametrize(
    "example",
    [
        torch.randn(5, 4),
        (torch.randn(5, 4),),
        [torch.randn(5, 4), torch.randn(5, 4)],
        (torch.randn(5, 4), None, 1),
        {"b": torch.randn(5, 4), "a": torch.randn(5, 4), "plus": 2},
        torch.randn(5, 4, dtype=torch.float64),
        torch.randn(5, 4, dtype=torch.float16),
    ],
)
def test_examples_of_every_form_count_the_same(example: Any) -> None:
    coverage = rw.find_layers(Two(), example)
    assert coverage.macs == coverage.layers[0].macs == 5 * 24


def test_without_an_example_params_can_be_planned_and_macs_cannot() -> None:
    small, plan = rw.compress(mlp(), keep=0.7)
    assert plan.after == Cost(numel(small), None)
    with pytest.raises(rw.RankwiseError, match="example"):
        rw.compress(mlp(), macs=0.7)


@pytest.mark.parametrize(("example", "size"), [(torch.zeros(2, 5), "2x5"), ({"a": torch.zeros(3, 7)}, "a 3x7")])
def test_an_example_that_does_not_fit_is_one_sentence(example: Any, size: str) -> None:
    with pytest.raises(rw.RankwiseError, match="could not run") as caught:
        rw.find_layers(Two(), example)
    assert size in one_sentence(caught)


class Pyramid(nn.Module):
    """One layer at several sizes, one layer that is never called, one called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.strided = nn.Conv2d(8, 8, (3, 1), stride=2)
        self.idle = nn.Linear(16, 16)
        self.up = nn.ConvTranspose2d(8, 8, (1, 3), stride=2, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.conv(self.conv(input=x))[:, :, ::2, 1:]
        return self.up(self.strided(x))


def test_calls_at_several_sizes_add_up() -> None:
    model, x = Pyramid(), torch.randn(3, 8, 20, 12)
    coverage = rw.find_layers(model, x)
    calls = {la.name: la.calls for la in coverage.layers}
    assert calls["conv"] == (Call((20, 12), (20, 12), 6), Call((10, 11), (10, 11), 6))
    assert calls["idle"] == ()
    assert coverage.macs == sum(la.macs for la in coverage.layers) == macs_of(model, x)
    for budget in ({"keep": 0.6}, {"macs": 0.6}, {"keep": 0.7, "macs": 0.6}):
        small, plan = rw.compress(model, x, **budget)
        assert plan.after == Cost(numel(small), macs_of(small, x))
        assert plan.after.params <= budget.get("keep", 1) * numel(model)
        assert plan.after.macs <= budget.get("macs", 1) * coverage.macs


def test_a_layer_that_is_never_called_is_smaller_only_where_params_count() -> None:
    model, x = Pyramid(), torch.randn(1, 8, 20, 12)
    _, plan = rw.compress(model, x, macs=0.5)
    assert "idle" not in [c.name for c in plan.choices]
    _, plan = rw.compress(model, x, keep=0.3)
    assert "idle" in [c.name for c in plan.choices]


@pytest.mark.parametrize("shape", [(7, 12), (2, 3, 12), (12,), (0, 12)])
def test_macs_of_linear_layers_are_those_of_torch_for_any_number_of_rows(shape: tuple[int, ...]) -> None:
    model, x = mlp(), torch.randn(shape)
    small, plan = rw.compress(model, x, keep=0.75, groups=3, search="minimax")
    assert {c.groups for c in plan.choices} == {3}
    assert plan.before.macs == macs_of(model, x)
    assert plan.after.macs == macs_of(small, x)
    assert small(x).shape == shape


def test_a_convolution_takes_one_image_without_a_batch() -> None:
    model, x = nn.Sequential(nn.Conv2d(10, 10, 3)), torch.randn(10, 6, 6)
    small, plan = rw.compress(model, x, keep=0.6, groups=[4])
    assert "pad" in dict(small[0].named_children())
    assert plan.after == Cost(numel(small), macs_of(small, x))
    torch.testing.assert_close(small(x), small(x[None])[0])


# Degenerate layers


@pytest.mark.parametrize("method", DATA_FREE)
def test_a_layer_of_zeros_works(method: str) -> None:
    model, x = mlp(), torch.randn(2, 12)
    nn.init.zeros_(model[0].weight)
    small, plan = rw.compress(model, x, method=method, keep=0.5)
    assert numel(small) == plan.after.params <= numel(model) // 2
    assert all(e == 0 for c in plan.choices if c.name == "0" for e in c.error.values())
    assert small(x).isfinite().all()
    torch.testing.assert_close(rw.densify(small)[0].weight, torch.zeros(12, 12), rtol=0, atol=0)


@pytest.mark.parametrize("method", DATA_FREE)
def test_layers_with_one_input_or_one_output_stay_as_they_are(method: str) -> None:
    model = nn.Sequential(nn.Linear(1, 12), mlp(), nn.Linear(12, 1))
    small, plan = rw.compress(model, method=method, keep=0.6)
    assert set(pairs(small)) <= {"1.0", "1.2"}
    why = {s.name: s.reason for s in plan.kept}
    assert why["0"] == why["2"] == "no pair of factors is smaller than the layer"
    assert small(torch.randn(3, 1)).shape == (3, 1)


@pytest.mark.parametrize("layer", [nn.Linear(1, 1), nn.Conv2d(1, 1, 1), nn.Conv3d(1, 1, (1, 3, 1)), nn.Linear(1, 9)])
def test_the_smallest_layers_can_be_built_at_full_rank(layer: nn.Module) -> None:
    model = nn.Sequential(layer)
    x = torch.randn(2, 1) if isinstance(layer, nn.Linear) else torch.randn(2, 1, *[4] * (layer.weight.ndim - 2))
    torch.testing.assert_close(rw.apply_plan(model, plan_for(model))(x), model(x))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_plan_does_not_depend_on_the_scale_of_the_weights(scale: float) -> None:
    model, scaled = mlp(), mlp()
    for p in scaled.parameters():
        p.data *= scale
    (_, plan), (small, other) = rw.compress(model, keep=0.6), rw.compress(scaled, keep=0.6)
    assert [(c.name, c.option, c.rank) for c in plan.choices] == [(c.name, c.option, c.rank) for c in other.choices]
    assert all(p.isfinite().all() for p in small.parameters())


def test_large_half_precision_weights_do_not_overflow() -> None:
    model = nn.Sequential(nn.Linear(64, 64)).half()
    model[0].weight.data[:, 0] = 30000
    small, _ = rw.compress(model, keep=0.3)
    assert all(p.isfinite().all() for p in small.parameters())


# Whole networks


@pytest.mark.parametrize(
    ("spec", "side", "method"),
    [
        ("timm:vit_tiny_patch16_224?img_size=64", 64, "auto"),
        ("torchvision:mobilenet_v2", 64, "svd"),
        ("torchvision:deeplabv3_resnet50", 64, "svd"),
    ],
)
@pytest.mark.skipif(not (find_spec("torchvision") and find_spec("timm")), reason="needs rankwise[vision]")
def test_whole_networks_are_counted_as_torch_counts_them(spec: str, side: int, method: str) -> None:
    torch.manual_seed(0)
    model, x = networks.build(spec), torch.randn(2, 3, side, side)
    small, plan = rw.compress(model, x, method=method, keep=0.6)
    assert plan.before == Cost(numel(model), macs_of(model, x))
    assert plan.after == Cost(numel(small), macs_of(small, x))
    assert 0.55 < plan.keep() <= 0.6
    assert all(m.training for m in small.modules())
    dense = rw.densify(small)
    assert {k: v.shape for k, v in dense.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}


# ---- work done once --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [None, [torch.randn(40, 12)]])
def test_a_plan_is_matched_with_the_layers_once(monkeypatch: pytest.MonkeyPatch, data: list[Tensor] | None) -> None:
    """Also where its pairs are fitted to data, and where it does not fit."""
    from rankwise.surgery import replace

    model, looked = mlp(), 0
    plan = plan_for(model)

    def counted(*args: Any) -> rw.Coverage:
        nonlocal looked
        looked += 1
        return rw.find_layers(*args)

    monkeypatch.setattr(replace, "find_layers", counted)
    if data is None:
        rw.apply_plan(model, plan)
        assert looked == 1
        model[2].weight = model[0].weight
        with pytest.raises(rw.RankwiseError, match="tied"):
            rw.apply_plan(model, plan)
        assert looked == 2
    else:
        _, plan = rw.compress(model, data[0][:1], keep=0.6, data=data)
        assert any(choice.decomposition.startswith("whitened") for choice in plan.choices), "something was fitted"
        assert looked == 0, "the job knows its layers"


def test_walks_over_a_network_do_not_grow_with_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or hundreds of layers would take seconds."""
    walks: list[nn.Module] = []
    real = nn.Module.named_modules

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        walks.append(self)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    found = []
    for depth in (2, 20):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)])
        walks.clear()
        assert len(rw.find_layers(model).layers) == depth
        found.append(sum(walked is model for walked in walks))
    assert found[0] == found[1]
