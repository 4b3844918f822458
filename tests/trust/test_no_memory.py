"""Where memory runs out nobody falls back to another result: the call ends with that error, and the command says so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.calibration import synthetic
from rankwise.deploy import export
from rankwise.errors import out_of_memory
from rankwise.surgery.forward import run_example
from sentences import check_sentence

SAID = "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried"


def no_memory(*_: Any, **__: Any) -> Any:
    raise RuntimeError(SAID)


def wrapped(*_: Any, **__: Any) -> Any:
    """As libraries do that say something of their own."""
    try:
        no_memory()
    except RuntimeError as err:
        raise ValueError("could not be traced") from err


@pytest.mark.parametrize("failing", [no_memory, wrapped])
def test_an_export_without_memory_is_not_one_of_another_batch_size(
    failing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = export.CONTENTS["exported"], []

    def first_time(*given: Any) -> Any:
        calls.append(given)
        return failing() if len(calls) == 1 else real(*given)

    monkeypatch.setitem(export.CONTENTS, "exported", first_time)
    with pytest.raises(MemoryError):
        rw.export(nn.Linear(3, 2), torch.ones(1, 3), tmp_path / "m.pt2", "exported")
    assert not list(tmp_path.iterdir())


def test_an_export_that_cannot_be_opened_again_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says no more than that where memory runs out meanwhile."""

    def fails(path: Path, to: str) -> Any:
        raise RuntimeError("We ran into an error when deserializing the saved file.\nPlease check the warnings")

    monkeypatch.setattr(export, "open_exported", fails)
    assert "deserializing" in check_sentence(
        lambda: rw.export(nn.Linear(3, 2), torch.ones(1, 3), tmp_path / "m.pt2", "exported")
    )
    monkeypatch.setattr(export, "open_exported", wrapped)
    with pytest.raises(MemoryError):
        rw.export(nn.Linear(3, 2), torch.ones(1, 3), tmp_path / "m.pt2", "exported")
    assert not list(tmp_path.iterdir())


def test_inputs_that_do_not_fit_into_memory_are_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    monkeypatch.setattr(synthetic, "_improve", no_memory)
    with pytest.raises(RuntimeError, match="allocate memory"):
        rw.compress(net, torch.zeros(1, 3, 8, 8), keep=0.8)


def test_a_layer_is_not_left_whole_for_want_of_memory() -> None:
    class Mine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return no_memory()

    with pytest.raises(RuntimeError, match="allocate memory"):
        rw.find_layers(nn.Sequential(Mine(4, 4)))


def test_a_network_without_memory_is_no_wrong_input() -> None:
    """The sentence would say that another input is needed."""

    class Starved(nn.Module):
        def __init__(self, says: str) -> None:
            super().__init__()
            self.linear, self.says = nn.Linear(4, 4), says

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(self.says)

    for says in (SAID, "could not create a primitive"):
        with pytest.raises(RuntimeError, match=re.escape(says)) as caught:
            run_example(Starved(says), torch.zeros(1, 4))
        assert not isinstance(caught.value, rw.RankwiseError)
    says = "could not create a primitive descriptor for the matmul primitive. Run workload with more"
    with pytest.raises(rw.RankwiseError, match="give an input that fits the model"):
        run_example(Starved(says), torch.zeros(1, 4))


def test_errors_that_are_not_of_memory() -> None:
    assert not out_of_memory(ValueError("no"))
    assert not out_of_memory(None)
    with pytest.raises(ValueError, match="traced") as found:
        wrapped()
    assert out_of_memory(found.value)
