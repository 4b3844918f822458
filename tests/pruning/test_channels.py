"""Channels: what goes together in a network, what must stay and why, and that trials find mistakes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from prunable import NETS, make
from rankwise.pruning import channels as ch
from rankwise.pruning import graph, trials
from rankwise.surgery.modules import kind_of
from sentences import check_sentence


def study(model: nn.Module, x: Any, exclude: Any = ()) -> ch.Channels:
    return ch.find_channels(model, x, rw.find_layers(model, x, exclude))


def by_maker(found: ch.Channels) -> dict[str, ch.Group]:
    return {g.names("out")[0]: g for g in found.groups}


@pytest.mark.parametrize("name", NETS)
def test_every_output_of_every_layer_is_in_exactly_one_group(name: str) -> None:
    model, x = make(name)
    found = study(model, x)
    for layer, module in model.named_modules():
        if kind_of(module) is not None:
            rows = [i for g in found.groups for m in g.members if (m.name, m.side) == (layer, "out") for i in m.indices]
            wide = module.out_features if isinstance(module, nn.Linear) else module.out_channels
            assert sorted(i for row in rows for i in row) == list(range(wide))
    assert any(g.reason == trials.OUTPUT for g in found.fixed)
    for group in found.groups:
        for member in group.members:
            assert len(member.indices) == group.size
            assert len({len(row) for row in member.indices}) == 1


FREE = {
    "concat": ["first", "second.2", "third.2"],
    "residual": ["stem", "a1", "a2", "b1"],
    "squeeze": ["stem", "expand", "down"],
    "flat": ["0", "3", "6"],
    "upward": ["0", "3", "5"],
    "lines": ["0", "3"],
    "grouped": ["4"],
    "shared": ["stem"],
    "halves": ["left"],
    "normed": ["up"],
    "scaled": ["mid"],
    "digits-cnn": ["conv1", "conv2", "conv3"],
}


@pytest.mark.parametrize("name", FREE)
def test_what_is_free(name: str) -> None:
    model, x = make(name)
    assert [g.names("out")[0] for g in study(model, x).free] == FREE[name]


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("grouped", "0", "grouped"),
        ("normed", "stem", "'norm' (LayerNorm)"),
        ("scaled", "stem", "parameter 'scale'"),
    ],
)
def test_reasons(name: str, layer: str, reason: str) -> None:
    model, x = make(name)
    assert reason in by_maker(study(model, x))[layer].reason


def test_where_channels_go() -> None:
    """Concatenation shifts indices, flattening multiplies them, a shared layer reads what it makes."""
    found = by_maker(study(*make("concat")))
    where = {(m.name, m.side): m.indices for m in found["second.2"].members}
    assert where["third.2", "in"] == tuple((6 + i,) for i in range(5))
    assert where["head", "in"] == tuple((4 + 6 + i,) for i in range(5))
    flat = {(m.name, m.side): m.indices for m in by_maker(study(*make("flat")))["3"].members}
    assert flat["6", "in"] == tuple(tuple(range(4 * c, 4 * c + 4)) for c in range(6))
    shared = by_maker(study(*make("shared")))["stem"]
    assert {("twice", "out"), ("twice", "in"), ("head", "in")} <= {(m.name, m.side) for m in shared.members}


def test_shortcuts_that_pad_channels_with_zeros() -> None:
    """ResNet20: channel j of the first stage is 8 + j in the second and 24 + j in the third; the rest must stay."""
    found = study(*make("resnet20"))
    trunk = {(m.name, m.side): m.indices for m in by_maker(found)["conv1"].members}
    assert trunk["layer1.2.conv2", "out"] == tuple((j,) for j in range(16))
    assert trunk["layer2.0.conv2", "out"] == trunk["layer3.0.conv1", "in"] == tuple((8 + j,) for j in range(16))
    assert trunk["layer3.2.conv2", "out"] == trunk["linear", "in"] == tuple((24 + j,) for j in range(16))
    stay = {g.names("out")[0]: (g.size, g.reason) for g in found.fixed}
    assert stay == {
        "layer2.0.conv2": (16, trials.NEEDED),
        "layer3.0.conv2": (32, trials.NEEDED),
        "linear": (10, trials.OUTPUT),
    }


def test_without_hints_about_padding_trials_refuse_the_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch-pruning alone maps the padded shortcut wrongly; a wrong graph must not become a wrong network."""
    monkeypatch.setattr(graph, "_set", lambda *_: None)
    found = study(*make("resnet20"))
    assert "conv1" not in {g.names("out")[0] for g in found.free}
    assert len(found.free) == 9  # the insides of the blocks


def test_a_layer_that_leads_round_in_circles_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where indices are mapped wrongly, following them need not end: there is a limit, and it is a reason."""
    monkeypatch.setattr(graph, "LIMIT", 30)
    found = by_maker(study(*make("residual")))
    assert found["stem"].reason == found["a2"].reason == graph.LOST
    assert not found["b1"].reason


@pytest.mark.parametrize("name", ["concat", "residual", "flat"])
def test_trials_refuse_wrong_indices(name: str) -> None:
    """Swap two channels at one reader: the shapes fit, the numbers do not."""
    model, x = make(name)
    found = study(model, x)
    group = found.free[0]
    at = next(i for i, m in enumerate(group.members) if m.side == "in")
    reader = group.members[at]
    turned = ch.Member(reader.name, "in", (reader.indices[1], reader.indices[0], *reader.indices[2:]))
    wrong = ch.Group(group.size, (*group.members[:at], turned, *group.members[at + 1 :]))
    probe = trials.random_copy(model)
    for candidate, answer in ((group, None), (wrong, trials.MIXED)):
        kept = [list(range(1, group.size))]
        after = ch.cost(found, [candidate], [group.size - 1]).macs or 0
        entries, dead = ch.entries(found, [candidate], kept), ch.readers([candidate], kept)
        assert trials.why_not(probe, x, entries, dead, after) == answer
        if answer is None:
            assert trials.why_not(probe, x, entries, dead, after + 1) == trials.OUTSIDE


def test_excluded_layers_hold_what_they_touch() -> None:
    model, x = make("residual")
    found = by_maker(study(model, x, ["short"]))
    assert "'short': excluded by name" in found["a2"].reason
    assert "'short': excluded by name" in found["stem"].reason
    assert not found["b1"].reason
    assert "excluded" in by_maker(study(model, x, ["norm"]))["stem"].reason


def test_tied_and_parametrised_weights_stay() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    model[2].weight = model[0].weight
    assert not study(model, torch.randn(2, 6)).free
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 2)).eval()
    assert "parametrised" in study(model, torch.randn(2, 6)).fixed[0].reason
    model = nn.Sequential(
        nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 1)
    )
    model[3].weight = model[1].weight
    assert not study(model.eval(), torch.randn(2, 2, 5)).free


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.head, self.unused = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.used(x)))


def test_a_layer_that_is_never_called_has_a_reason() -> None:
    found = study(Unused().eval(), torch.randn(2, 4))
    assert by_maker(found)["unused"].reason == ch.UNSEEN


def test_the_network_is_left_alone() -> None:
    model, x = make("residual")
    model.train()
    model.a1.weight.requires_grad_(False)
    model(x).sum().backward()
    handle = model.b1.register_forward_hook(lambda *_: None)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    grads = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    state = torch.get_rng_state()
    found = study(model, x)
    assert "b1" in by_maker(found)  # a hook is no reason to stay: the module is not replaced
    assert not by_maker(found)["b1"].reason
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(p.grad, grads[k]) for k, p in model.named_parameters() if p.grad is not None)
    assert all(m.training for m in model.modules())
    assert [k for k, p in model.named_parameters() if not p.requires_grad] == ["a1.weight"]
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 1
    assert torch.equal(torch.get_rng_state(), state)
    handle.remove()


def test_an_example_of_zeros_hides_nothing() -> None:
    """Without biases the network gives zeros for zeros, and any mapping would look right."""
    model = nn.Sequential(nn.Linear(5, 8, bias=False), Halve(), nn.Linear(4, 3, bias=False)).eval()
    for example in (torch.zeros(2, 5), (torch.zeros(2, 5),), {"input": torch.zeros(2, 5)}):
        assert not study(model, example).free
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Linear(8, 4, bias=False), Zero()).eval()
    assert trials.SILENT in {g.reason for g in study(model, torch.randn(2, 5)).fixed}


class Halve(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :4] * x[:, 4:]


class Zero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) * 0


def test_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make("flat")
    assert "example input" in check_sentence(lambda: ch.find_channels(model, None, rw.find_layers(model)))
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    assert "rankwise[prune]" in check_sentence(lambda: study(model, x))
