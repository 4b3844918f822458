"""Weight files: every layout that is understood, and every way they can be wrong."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rankwise.errors import RankwiseError
from rankwise.models.networks import build, load_weights_

SHARED = Path(__file__).resolve().parents[3] / "shared"
RESNET20 = SHARED / "weights" / "resnet20-cifar10.safetensors"


def one_sentence(caught: pytest.ExceptionInfo[RankwiseError]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.skipif(not RESNET20.exists(), reason="the shared ResNet20 weights are not here")
def test_shared_weights_fit_resnet20() -> None:
    model = build("resnet20")
    before = model.linear.weight.clone()
    load_weights_(model, RESNET20)
    assert not torch.equal(model.linear.weight, before)
    # A trained network is sure of something; a random one is not: batch norm's statistics arrived as well.
    assert model.layer3[2].bn2.running_var.min() > 0
    assert not torch.equal(model.bn1.running_mean, torch.zeros(16))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.mark}",)


class TestWeights:
    def small(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

    @pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".th", ".bin"])
    def test_round_trip(self, tmp_path: Path, suffix: str) -> None:
        source, target, path = self.small(), self.small(), tmp_path / f"w{suffix}"
        save = save_file if suffix == ".safetensors" else torch.save
        save(source.state_dict(), path)
        load_weights_(target, path)
        assert_same(source.state_dict(), target.state_dict())

    @pytest.mark.parametrize("key", ["state_dict", "model"])
    def test_inner_key_and_prefix(self, tmp_path: Path, key: str) -> None:
        source, target = self.small(), self.small()
        inner = {f"module.{name}": value for name, value in source.state_dict().items()}
        torch.save({key: inner, "epoch": 3}, tmp_path / "w.th")
        load_weights_(target, tmp_path / "w.th")
        assert_same(source.state_dict(), target.state_dict())

    def test_a_network_whose_own_names_start_with_module(self, tmp_path: Path) -> None:
        source, target = (nn.ModuleDict({"module": nn.Linear(2, 2)}) for _ in range(2))
        torch.save(source.state_dict(), tmp_path / "w.pth")
        load_weights_(target, tmp_path / "w.pth")
        assert_same(source.state_dict(), target.state_dict())

    def test_step_counters_and_second_names_of_tied_weights_may_be_absent(self, tmp_path: Path) -> None:
        source, target = self.small(), self.small()
        state = {k: v for k, v in source.state_dict().items() if "num_batches" not in k}
        save_file(state, tmp_path / "w.safetensors")
        load_weights_(target, tmp_path / "w.safetensors")
        assert_same(source.state_dict(), target.state_dict())
        tied = Tied()
        save_file({"second.weight": torch.eye(4)}, tmp_path / "tied.safetensors")
        load_weights_(tied, tmp_path / "tied.safetensors")
        assert torch.equal(tied.first.weight, torch.eye(4))
        assert tied.first.weight is tied.second.weight

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda s: s.pop("0.weight"), "missing: 0.weight"),
            (lambda s: s.update(extra=torch.zeros(1)), "unexpected: extra"),
            (lambda s: s.update({"0.bias": torch.zeros(5)}), "0.bias (file 5, network 4)"),
            (lambda s: [s.update({f"x{i}": torch.zeros(1)}) for i in range(9)], "and 6 more"),
        ],
    )
    def test_mismatch_is_one_sentence_and_changes_nothing(
        self, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], says: str
    ) -> None:
        state = self.small().state_dict()
        change(state)
        torch.save(state, tmp_path / "w.pth")
        model = self.small()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with pytest.raises(RankwiseError) as caught:
            load_weights_(model, tmp_path / "w.pth")
        assert says in one_sentence(caught)
        assert_same(before, model.state_dict())

    @pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
    @pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
    def test_truncated(self, tmp_path: Path, suffix: str, share: float) -> None:
        path = tmp_path / f"w{suffix}"
        (save_file if suffix == ".safetensors" else torch.save)(self.small().state_dict(), path)
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(RankwiseError) as caught:
            load_weights_(self.small(), path)
        assert "truncated or is no weights file" in one_sentence(caught)

    @pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
    def test_garbage(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"w{suffix}"
        path.write_bytes(b"this is not a network" * 10)
        with pytest.raises(RankwiseError) as caught:
            load_weights_(self.small(), path)
        assert "is no weights file" in one_sentence(caught)

    def test_code_in_a_pickle_is_not_run(self, tmp_path: Path) -> None:
        mark = tmp_path / "ran"
        torch.save({"state_dict": Evil(mark)}, tmp_path / "zip.pth")
        (tmp_path / "plain.pth").write_bytes(pickle.dumps({"a": Evil(mark)}, protocol=2))
        torch.save(self.small(), tmp_path / "whole.pth")
        for name in ("zip", "plain", "whole"):
            with pytest.raises(RankwiseError) as caught:
                load_weights_(self.small(), tmp_path / f"{name}.pth")
            assert "could run code" in one_sentence(caught)
        assert not mark.exists()

    def test_other_refusals(self, tmp_path: Path) -> None:
        torch.save([1, 2], tmp_path / "list.pth")
        (tmp_path / "w.txt").write_text("hello")
        for name, says in (
            ("no.pth", "no weights file"),
            ("list.pth", "no state dict"),
            ("w.txt", ".safetensors"),
        ):
            with pytest.raises(RankwiseError) as caught:
                load_weights_(self.small(), tmp_path / name)
            assert says in one_sentence(caught)
        with pytest.raises(RankwiseError, match="no weights file"):
            load_weights_(self.small(), tmp_path)


def assert_same(expected: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert torch.equal(value, got[name]), name
