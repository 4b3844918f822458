"""Python, the command line and a study are doors to one job: the same request gives the same plan and weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rankwise as rw
from rankwise.__main__ import main
from rankwise.compression import Compression, Request, basis
from rankwise.data import splits
from rankwise.models import networks
from rankwise.studies import cell as cells
from rankwise.studies.study import Cell, fill_in
from rankwise.studies.study_file import make_study
from rankwise.surgery import checkpoint
from rankwise.training.loop import fit_

pytest.importorskip("sklearn")
pytest.importorskip("filelock")

Made = tuple[str, dict[str, Tensor]]  # plan.json and the weights


@dataclass(frozen=True)
class Asked:
    """A request, in no door's words."""

    method: str
    unit: str
    value: float
    data: bool = False
    exclude: tuple[str, ...] = ()
    recover: int = 0
    model: str = "digits-cnn"


REQUESTS = [
    Asked("auto", "params", 0.5),
    Asked("auto", "params", 0.5, data=True),
    Asked("auto", "macs", 0.6),
    Asked("auto", "macs", 0.6, data=True, exclude=("conv1", "linear")),
    Asked("auto", "params", 0.4, data=True, recover=3),
    Asked("auto", "params", 0.6, exclude=("conv2",), recover=3),
    Asked("alds", "params", 0.5),
    Asked("alds", "macs", 0.5, data=True, exclude=("linear",), recover=3),
    Asked("pca", "params", 0.5, data=True),
    Asked("pca", "macs", 0.6, data=True, exclude=("conv1",), recover=3),
    Asked("ft", "params", 0.7),
    Asked("ft", "macs", 0.7, data=True, recover=3),
    # A name with arguments, which a study finds out by itself.
    Asked("svd", "params", 0.6, model="resnet20?in_channels=1&image_size=8"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of both networks, and what a study keeps."""
    path = tmp_path_factory.mktemp("doors")
    torch.manual_seed(0)
    model = networks.build("digits-cnn")
    fit_(model, splits.load("digits", "fit"), epochs=2)
    save_file(model.state_dict(), path / "digits-cnn.safetensors")
    save_file(networks.build("resnet20?in_channels=1").state_dict(), path / "resnet20.safetensors")
    return path


def weights_of(asked: Asked, folder: Path) -> Path:
    return folder / f"{asked.model.partition('?')[0]}.safetensors"


def opened(asked: Asked, folder: Path) -> tuple[nn.Module, Tensor]:
    model = networks.build(asked.model).eval()
    model.load_state_dict(load_file(weights_of(asked, folder)))
    return model, torch.zeros(1, 1, 8, 8)


def by_python(asked: Asked, folder: Path) -> Made:
    rest = {"data": "digits"} if asked.data else {}
    budget = {"keep" if asked.unit == "params" else asked.unit: asked.value}
    model, example = opened(asked, folder)
    how = {"exclude": asked.exclude, "recover": asked.recover, "name": asked.model}
    small, plan = rw.compress(model, example, asked.method, **budget, **how, **rest)
    return plan.dumps(), small.state_dict()


def by_command(asked: Asked, folder: Path, out: Path) -> Made:
    given = ["compress", asked.model, "--weights", weights_of(asked, folder), "--method", asked.method, "--out", out]
    given += ["--budget", f"{asked.unit}={asked.value}", "--recover", asked.recover]
    given += [*(["--data", "digits"] if asked.data else []), *(x for e in asked.exclude for x in ("--exclude", e))]
    assert main([str(argument) for argument in given]) == 0
    return (out / "plan.json").read_text(), dict(load_file(out / "model.safetensors"))


def cell_of(asked: Asked, folder: Path) -> Cell:
    name = asked.model.partition("?")[0]
    network = {"model": name, "data": "digits", "weights": f"<{name}>", "exclude": list(asked.exclude)}
    entry = {"method": asked.method, "recover": asked.recover, **({} if asked.data else {"calibrate": 0})}
    about = {"methods": [entry], "keeps": [asked.value], "unit": asked.unit, "network": [network]}
    (cell,) = fill_in(make_study(about, "doors", "doors.toml"), [], [f"{name}={weights_of(asked, folder)}"]).cells()
    return cell


def by_study(asked: Asked, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """The plan that a cell writes, and the network that it scores."""
    found: list[nn.Module] = []
    score = cells.score
    monkeypatch.setattr(cells, "score", lambda small, cell: found.append(small) or score(small, cell))
    cell, out = cell_of(asked, folder), folder / "results"
    cells.run_cell(cell, str(out))
    monkeypatch.setattr(cells, "score", score)
    (small,) = found
    return (out / "plans" / f"{cell.name}.json").read_text(), small.state_dict()


def same(one: Made, other: Made) -> None:
    assert one[0] == other[0]
    assert set(one[1]) == set(other[1])
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


@pytest.mark.parametrize("asked", REQUESTS, ids=str)
def test_every_door_leads_to_the_same_network(
    asked: Asked, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = by_python(asked, folder)
    same(python, by_command(asked, folder, tmp_path / "out"))
    same(python, by_study(asked, folder, monkeypatch))
    plan = rw.Plan.loads(python[0])
    assert (plan.model, plan.method, plan.budget.to_json()) == (asked.model, asked.method, {asked.unit: asked.value})
    assert plan.keep(asked.unit) <= asked.value
    excluded = {entry.name for entry in plan.kept if entry.reason == "excluded by name"}
    assert excluded >= set(asked.exclude)


def test_plans_of_a_folder_are_read_back_by_it(folder: Path, tmp_path: Path) -> None:
    """What a door wrote, another one replays: the same plan and weights, also after fitting to data."""
    asked = REQUESTS[1]
    first = by_command(asked, folder, tmp_path / "out")
    model, example = opened(asked, folder)
    plan = checkpoint.read_plan(tmp_path / "out")
    small, again = Compression(model, example, Request(plan=plan), "digits").run(None)
    same(first, (again.dumps(), small.state_dict()))


def test_cells_of_a_method_share_what_no_budget_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is made once for cells that follow each other, and the plans are as if it were not."""
    made: list[Any] = []
    real = basis.make_basis
    monkeypatch.setattr(basis, "make_basis", lambda *given: made.append(given) or real(*given))
    monkeypatch.setattr("rankwise.compression.job.make_basis", basis.make_basis)
    cells._last.clear()
    several = [replace(REQUESTS[1], value=value) for value in (0.45, 0.35, 0.25)]
    found = [by_study(asked, folder, monkeypatch) for asked in several]
    assert len(made) == 1
    for asked, one in zip(several, found, strict=True):
        same(one, by_python(asked, folder))
