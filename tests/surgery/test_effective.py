"""Subclasses of plain layers are known by what they do: what pads or computes its weight is decomposed, others stay."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import rankwise as rw
from rankwise.core.border import SAME, margins
from rankwise.core.fold import all_folds
from rankwise.core.option import Option
from rankwise.decompositions import full_rank
from rankwise.surgery.borders import SamePad
from rankwise.surgery.coverage import DEPTHWISE
from rankwise.surgery.effective import form_of, weight_of
from rankwise.surgery.modules import describe
from rankwise.surgery.pairs import build_pair, fill_pair_, merge_pair
from rankwise.surgery.replace import target_of


def pad_same(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]) -> Tensor:
    """As TensorFlow says it, written down once more."""
    flat: list[int] = []
    for axis in (1, 0):
        size, s = x.shape[2 + axis], stride[axis]
        reach = dilation[axis] * (kernel[axis] - 1) + 1
        wide = max(0, reach - s if size % s == 0 else reach - size % s)
        flat += [wide // 2, wide - wide // 2]
    return F.pad(x, flat)


class Dynamic(nn.Conv2d):
    """Conv2dSame of timm, Conv2dDynamicSamePadding of EfficientNet-PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        x = pad_same(x, self.kernel_size, self.stride, self.dilation)
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class Static(nn.Conv2d):
    """Conv2dStaticSamePadding of EfficientNet-PyTorch: a module inside, made for one size of images."""

    def __init__(self, *args: Any, image: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sides = margins(SAME, (image, image), self.kernel_size, self.stride, self.dilation)
        flat = [side for both in reversed(sides) for side in both]
        self.static_padding = nn.ZeroPad2d(tuple(flat)) if any(flat) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.static_padding(x)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Causal(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, ((self.kernel_size[0] - 1) * self.dilation[0], 0)))


class Standardised(nn.Conv2d):
    """Standardised weights with a gain, and padding by size."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(self.out_channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        w = self.gain * w / (w.square().mean((1, 2, 3), keepdim=True) + 1e-6).sqrt()
        x = pad_same(x, self.kernel_size, self.stride, self.dilation)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Turned(nn.Linear):
    """No call of F.linear to be seen (FalconLinear)."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Unit(nn.Linear):
    """Rows of length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(self.weight, dim=1), self.bias)


class Upwards(nn.ConvTranspose2d):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


LAYERS: dict[str, Any] = {
    "dynamic": lambda: Dynamic(6, 8, 3, stride=2),
    "dynamic, stride 3, even kernel": lambda: Dynamic(6, 8, (4, 5), stride=(3, 2), dilation=(1, 2)),
    "dynamic, stride 1": lambda: Dynamic(6, 8, 3),
    "dynamic, groups": lambda: Dynamic(6, 8, 5, stride=2, groups=2, bias=False),
    "static": lambda: Static(6, 8, 3, stride=2, image=16),
    "static, odd images": lambda: Static(6, 8, 5, stride=2, image=15),
    "causal": lambda: Causal(6, 8, 3, dilation=2),
    "standardised": lambda: Standardised(6, 8, 3, stride=2),
    "turned": lambda: Turned(6, 8),
    "unit": lambda: Unit(6, 8),
    "upwards": lambda: Upwards(6, 8, 3, stride=2, output_padding=1),
}
FORMS = {
    "dynamic": ((0, 0), SAME, False),
    "dynamic, stride 3, even kernel": ((0, 0), SAME, False),
    "dynamic, stride 1": ((1, 1), (), False),
    "dynamic, groups": ((0, 0), SAME, False),
    "static": ((0, 0), (0, 1, 0, 1), False),
    "static, odd images": ((2, 2), (), False),
    "causal": ((0,), (4, 0), False),
    "standardised": ((0, 0), SAME, True),
    "turned": ((), (), False),
    "unit": ((), (), True),
    "upwards": ((0, 0), (), False),
}


def sizes_for(layer: nn.Module) -> list[tuple[int, ...]]:
    """Other sizes than those of the trial; the largest stride is 3."""
    if isinstance(layer, nn.Linear):
        return [(2, 6), (6,), (2, 3, 6)]
    dims = len(layer.kernel_size)  # type: ignore[arg-type]
    return [(2, 6, *sizes) for sizes in itertools.product((13, 14, 15, 16, 17, 18), repeat=dims)][::5]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_what_its_form_says(name: str) -> None:
    """The pair of full rank, for every fold, and the layer that it is merged to, for inputs of any size."""
    torch.manual_seed(0)
    module = LAYERS[name]().double().eval()
    found = form_of(module)
    assert found is not None
    assert (found.padding, found.border, found.computed) == FORMS[name]
    layer = describe(module, "x")
    for fold in all_folds(layer.dims):
        option = Option(fold, 1)
        rank = full_rank(layer, option)
        pair = build_pair(layer, option, rank, module)
        fill_pair_(pair, target_of(module, layer), option, rank)
        dense = merge_pair(pair)
        for shape in sizes_for(module):
            x = torch.randn(shape, dtype=torch.float64)
            with torch.no_grad():
                torch.testing.assert_close(pair(x), module(x), atol=1e-6, rtol=1e-6)
                torch.testing.assert_close(dense(x), module(x), atol=1e-6, rtol=1e-6)
        assert dense.state_dict().keys() == {"weight", *(["bias"] if layer.bias else [])}
        again = describe(dense, "x")  # and what was merged can be decomposed once more
        assert (again.padding, again.border, again.shape) == (layer.padding, layer.border, layer.shape)


class Remembers(nn.Conv2d):
    """Conv2dSameExport of timm: the first input decides how all others are padded."""

    pad: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if "pad" not in self._modules:
            sides = margins(SAME, x.shape[2:], self.kernel_size, self.stride, self.dilation)
            self._modules["pad"] = nn.ZeroPad2d(tuple(side for both in reversed(sides) for side in both))
        return super().forward(self._modules["pad"](x))  # type: ignore[misc]


class Adapted(nn.Linear):
    """Starts as the plain layer, as adapters do."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


class Idle(nn.Linear):
    """Holds a parameter that does nothing when it is evaluated."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale if self.training else x)


class Quantised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * 16).round() / 16)


class Reflected(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1, 1, 1), mode="reflect"))


class Called(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Both(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x


class Asks(nn.Conv2d):
    def forward(self, x: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


class Clamped(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight, bias).clamp(min=0)


class ByInput(nn.Conv2d):
    """Attention over kernels: the weight depends on the input."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight * x.mean(), self.bias)


OTHERS: dict[str, Any] = {
    "remembers": lambda: Remembers(6, 6, 3, stride=2),
    "adapted": Adapted,
    "idle": Idle,
    "quantised": lambda: Quantised(6, 6),
    "reflected": lambda: Reflected(6, 6, 3),
    "circular": lambda: Called(6, 6, 3, padding=1, padding_mode="circular"),
    "both": lambda: Both(6, 6),
    "asks": lambda: Asks(6, 6, 3),
    "clamped": lambda: Clamped(6, 6, 3),
    "by input": lambda: ByInput(6, 6, 3),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_whole(name: str) -> None:
    torch.manual_seed(0)
    module = OTHERS[name]()
    before = copy.deepcopy(vars(module))
    model = nn.Sequential(nn.Linear(6, 6), module)
    random = torch.random.get_rng_state()
    coverage = rw.find_layers(model)
    assert [layer.name for layer in coverage.layers] == ["0"]
    (left,) = coverage.skipped
    assert f"{type(module).__name__} changes how" in left.reason
    assert torch.equal(torch.random.get_rng_state(), random)
    assert repr(vars(module)) == repr(before)


def test_the_example_has_the_last_word() -> None:
    """A layer that is plain for the trial's sizes and not for larger ones stays whole where the example shows it."""

    class Sly(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + (x.shape[-1] > 20))

    model = nn.Sequential(Sly(3, 8, 3), nn.Conv2d(8, 8, 3)).eval()
    assert len(rw.find_layers(model, torch.randn(2, 3, 12, 12)).layers) == 2
    coverage = rw.find_layers(model, torch.randn(2, 3, 32, 32))
    assert [layer.name for layer in coverage.layers] == ["1"]
    assert "for the example" in coverage.skipped[0].reason


def test_a_trial_changes_nothing_and_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from rankwise.surgery import effective

    calls: list[str] = []
    find = effective._find
    monkeypatch.setattr(effective, "_find", lambda m, kind: calls.append(kind) or find(m, kind))  # type: ignore[func-returns-value]
    monkeypatch.setattr(effective, "_known", {})
    one = Dynamic(4, 4, 3, stride=2)
    for module in (one, copy.deepcopy(one), Dynamic(4, 4, 3, stride=2), Dynamic(4, 4, 3, stride=(2, 1))):
        assert form_of(module) is not None
    assert calls == ["Conv2d", "Conv2d"]


def test_a_trial_needs_no_values() -> None:
    with torch.device("meta"):
        module = Standardised(4, 4, 3, stride=2)
    assert form_of(module) is not None


def test_the_weight_is_the_one_of_now() -> None:
    module = Unit(4, 4)
    first = weight_of(module)
    torch.testing.assert_close(first, F.normalize(module.weight, dim=1).detach())
    with torch.no_grad():
        module.weight.copy_(torch.randn(4, 4))
    torch.testing.assert_close(weight_of(module), F.normalize(module.weight, dim=1).detach())
    assert not torch.equal(weight_of(module), first)


def test_zeros_of_tensorflow() -> None:
    pad = SamePad((3, 4), (2, 3), (1, 2))
    for height, width in itertools.product(range(1, 9), repeat=2):
        x = torch.ones(1, 1, height, width)
        assert torch.equal(pad(x), pad_same(x, (3, 4), (2, 3), (1, 2)))


# ---- networks --------------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        Dynamic(3, 16, 3, stride=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Standardised(16, 24, 3, stride=2),
        nn.ReLU(),
        Static(24, 24, 3, stride=2, image=16),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        Turned(24, 10),
    ).eval()


def counted(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("method", ["svd", "alds", "tucker2", "auto", "auto with data"])
def test_from_network_to_folder_and_back(method: str, tmp_path: Path) -> None:
    model, x = network(), torch.randn(2, 3, 33, 33, generator=torch.Generator().manual_seed(1))
    data: dict[str, Any] = {"data": [torch.randn(48, 3, 33, 33)]} if "data" in method else {}
    small, plan = rw.compress(model, x, method=method.split()[0], keep=0.6, **data)
    assert {"0", "3", "5"} & {choice.name for choice in plan.choices}
    assert sum(p.numel() for p in small.parameters()) == plan.after.params
    assert counted(small, x) == plan.after.macs
    assert (plan.before.params, plan.before.macs) == (sum(p.numel() for p in model.parameters()), counted(model, x))
    rw.save(small, plan, tmp_path)
    again = rw.load(tmp_path, network())
    whole = rw.densify(small)
    for size in (33, 32, 47):
        y = torch.randn(2, 3, size, size)
        with torch.no_grad():
            assert torch.equal(again(y), small(y))
            torch.testing.assert_close(whole(y), small(y), atol=1e-4, rtol=1e-4)
    assert not [s for s in plan.kept if "changes how" in s.reason]


def test_inputs_of_a_layer_with_a_border() -> None:
    """Moments are those of the padded input: the mean of outputs follows from the mean of patches."""
    from rankwise.calibration.activations import input_moments, output_moments

    model, data = network().double(), [torch.randn(8, 3, 33, 33, dtype=torch.float64)]
    layers = rw.find_layers(model, data[0]).layers
    inputs, outputs = input_moments(model, data, layers), output_moments(model, data, layers)
    for layer in layers:
        module: Any = model.get_submodule(layer.name)
        mean = weight_of(module).detach().flatten(1) @ inputs[layer.name].mean[0]
        mean = mean if module.bias is None else mean + module.bias.detach()
        torch.testing.assert_close(mean, outputs[layer.name].mean[0], atol=1e-9, rtol=1e-9)


def test_norms_fold_into_padded_layers_and_not_into_standardised_ones(tmp_path: Path) -> None:
    model, x = network(), torch.randn(2, 3, 33, 33)
    fused = rw.fuse(model, x)
    assert isinstance(fused[1], nn.Identity)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), atol=1e-4, rtol=1e-4)
    small, plan = rw.compress(model, x, method="svd", keep=0.7, fuse=True, exclude=["0"])
    rw.save(small, plan, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(rw.load(tmp_path, network())(x), small(x))
    with open(tmp_path / "model.safetensors", "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        modules = json.loads(json.loads(file.read(size))["__metadata__"]["rankwise"])["modules"]
    assert modules["0"][0] == "Dynamic"  # no convolution of torch, and nobody should take it for one


def test_tables_of_computed_weights_are_read_again(tmp_path: Path) -> None:
    model, x = network(), torch.randn(2, 3, 33, 33)
    table = rw.build_table(model, x)
    table.save(tmp_path / "t.safetensors")
    again = rw.Table.load(tmp_path / "t.safetensors", model)
    assert again.coverage == table.coverage
    assert (
        rw.allocate(again, rw.Budget(params=0.6), "alds").layers
        == rw.allocate(table, rw.Budget(params=0.6), "alds").layers
    )


def test_filters_of_padded_layers_are_pruned_and_standardised_ones_stay() -> None:
    pytest.importorskip("torch_pruning")
    torch.manual_seed(0)
    model = nn.Sequential(
        Dynamic(3, 16, 3, stride=2), nn.ReLU(), Dynamic(16, 16, 3, stride=2), nn.ReLU(), Standardised(16, 16, 3),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    ).eval()  # fmt: skip
    x = torch.randn(1, 3, 17, 17)
    small, plan = rw.compress(model, x, method="ft", keep=0.8)
    assert {entry.name for entry in plan.pruned} >= {"0", "2"}
    (left,) = [entry for entry in plan.kept if entry.name == "4"]
    assert "computed from all of its channels" in left.reason
    assert sum(p.numel() for p in small.parameters()) == plan.after.params
    with torch.no_grad():
        torch.testing.assert_close(rw.densify(small)(x), small(x), atol=1e-5, rtol=1e-5)


def test_times_of_padded_layers(tmp_path: Path) -> None:
    """Pairs of all layers run in their place, at the sizes that they get there."""
    model, x = network(), torch.randn(2, 3, 33, 33)
    times = rw.measure_times(model, x, rw.Timing(threads=1), cache=tmp_path, seconds=2)
    assert {name for name, _, _ in times.pairs} >= {"0", "3", "5"}


def test_networks_of_timm(tmp_path: Path) -> None:
    """Every layer but depthwise ones, with padding by size and standardised weights."""
    timm = pytest.importorskip("timm")
    nfnet = timm.models.nfnet
    config = nfnet._nfnet_cfg(
        depths=(1, 1, 1, 1), channels=(32, 32, 48, 64), feat_mult=1.0, group_size=8, act_layer="relu"
    )
    config = nfnet.replace(config, same_padding=True, attn_layer="se")
    made = {
        "mobilenet": lambda: timm.create_model("tf_mobilenetv3_small_minimal_100", num_classes=10),
        "efficientnet": lambda: timm.create_model("test_efficientnet", pad_type="same"),
        "nfnet": lambda: timm.create_model("test_nfnet"),
        "dm_nfnet": lambda: nfnet.NormFreeNet(config, num_classes=10),
        "bit": lambda: timm.models.ResNetV2(
            [1, 1, 1, 1], channels=(128, 128, 128, 256), stem_chs=32, num_classes=10, stem_type="fixed",
            conv_layer=timm.layers.StdConv2d,
        ),
        "hybrid": lambda: timm.models.ResNetV2(
            [1, 1, 1, 1], channels=(128, 128, 128, 256), stem_chs=32, num_classes=10, stem_type="same",
            conv_layer=timm.layers.StdConv2dSame,
        ),
        "convnext": lambda: timm.create_model("test_convnext"),
    }  # fmt: skip
    x = torch.randn(2, 3, 65, 65, generator=torch.Generator().manual_seed(0))
    for name, make in made.items():
        torch.manual_seed(0)
        model = make().eval()
        coverage = rw.find_layers(model, x)
        left = [s for s in coverage.skipped if s.reason not in (DEPTHWISE, "not a linear or convolution layer")]
        assert not left, (name, left)
        assert sum(la.computed for la in coverage.layers) == sum("Std" in type(m).__name__ for m in model.modules())
        small, plan = rw.compress(model, x, method="svd-energy", keep=0.6)
        assert sum(p.numel() for p in small.parameters()) == plan.after.params, name
        assert counted(small, x) == plan.after.macs, name
        rw.save(small, plan, tmp_path / name)
        again = rw.load(tmp_path / name, make().eval())
        y = torch.randn(1, 3, 96, 70)
        with torch.no_grad():
            assert torch.equal(again(y), small(y)), name
            torch.testing.assert_close(rw.densify(small)(y), small(y), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("to", ["onnx", "exported"])
def test_what_was_padded_is_exported(to: str, tmp_path: Path) -> None:
    if to == "onnx":
        pytest.importorskip("onnxruntime")
    model, x = network(), torch.randn(2, 3, 33, 33)
    small, _ = rw.compress(model, x, method="svd", keep=0.6)
    assert any(isinstance(m, SamePad) for m in small.modules())
    found = rw.export(small, x, tmp_path / "m", to=to)
    assert (found["batch"], found["difference"] < 1e-4) == ("any", True)
