"""The network that a study compresses, and what is known about it: made once, kept in the store, opened by every cell.

Each process also remembers what it opened last: the images, the network and its tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from rankwise.core import files
from rankwise.core.layer import Coverage
from rankwise.data import splits
from rankwise.data.splits import Split
from rankwise.decompositions import DECOMPOSITIONS
from rankwise.methods import build_table, needs_data
from rankwise.models import networks
from rankwise.planning.planner import Settings
from rankwise.planning.table import Table
from rankwise.studies.store import entry, lock
from rankwise.studies.study import Cell
from rankwise.surgery.coverage import find_layers
from rankwise.training import steps
from rankwise.training.dataset import side_for
from rankwise.training.evaluate import evaluate
from rankwise.training.resume import model_tensors

POINTS = 256  # singular values kept for a figure
_ABOUT = "about.json"


@dataclass(frozen=True, eq=False)
class Reference:
    """A trained network. `name` is the hash under which the store has it, `score` its result on the study's split."""

    name: str
    spec: str
    weights: Path
    network: nn.Module
    example: Tensor
    coverage: Coverage
    score: dict[str, Any]

    @property
    def params(self) -> int:
        return self.coverage.params

    @property
    def macs(self) -> int | None:
        return self.coverage.macs


def open_reference(cell: Cell, out: Path) -> Reference:
    """Trained by the study's recipe with the repeat's seed, or with the weights that were given."""
    folder = entry(out / "store", reference_key(cell), lambda work: _make(cell, work))
    return _opened(str(folder), cell.network.model, cell.network.exclude)


def prepare(cell: Cell, out: str) -> None:
    """The reference of a cell, and its spectra as a file for figures."""
    reference = open_reference(cell, Path(out))
    path = Path(out) / "spectra" / f"{reference.name}.json"
    with lock(path.with_suffix(".lock")):
        if not path.exists():
            files.write_whole(path, (json.dumps(spectra_json(reference, cell.network.model)) + "\n").encode())


def reference_key(cell: Cell) -> dict[str, Any]:
    """What decides the reference: the weights, or how they are trained."""
    network = cell.network
    trained = None
    if network.file is None:
        recipe = {k: v for k, v in network.recipe.items() if k not in ("retrain", "retrain_lr", "alpha", "starts")}
        trained = {"recipe": recipe, "seed": cell.seed, "limit": network.limit}
    return {
        "kind": "reference",
        "model": network.model,
        "data": network.source,
        "split": cell.split,
        "size": network.size,
        "weights": network.file_digest,
        "trained": trained,
    }


def _make(cell: Cell, work: Path) -> None:
    network = cell.network
    test = split_of(cell, cell.split)
    about: dict[str, Any] = {"shape": list(test.pixels(torch.tensor([0])).shape[1:]), "classes": len(test.classes)}
    if network.file is None:
        run = steps.Run(
            network.source, network.training, work, cell.seed, True, cell.split, network.limit, network.size
        )
        row = steps.train(network.model, run)
        about |= {"score": row["trained"], "seconds": row["seconds"]}
    else:
        model = networks.build(_fitted(network.model, about))
        networks.load_weights_(model, Path(network.file))
        about |= {"score": score(model, cell)}
        files.write_whole(work / networks.WEIGHTS, to_safetensors(model_tensors(model)))
    files.write_whole(work / _ABOUT, json.dumps(about, indent=1).encode())


def _fitted(model: str, about: Mapping[str, Any]) -> str:
    """The specification with the arguments that the data asks for."""
    channels, height, width = about["shape"]
    return networks.fit_spec(model, about["classes"], channels, height if height == width else None)


@lru_cache(maxsize=2)
def _opened(folder: str, model: str, exclude: tuple[str, ...]) -> Reference:
    path = Path(folder)
    about = files.parse(files.read(path / _ABOUT), str(path / _ABOUT))
    spec = _fitted(model, about)
    network = networks.build(spec).eval()
    networks.load_weights_(network, path / networks.WEIGHTS)
    example = torch.zeros(1, *about["shape"])
    coverage = find_layers(network, example, exclude)
    return Reference(path.name, spec, path / networks.WEIGHTS, network, example, coverage, about["score"])


def split_of(cell: Cell, name: str) -> Split:
    network = cell.network
    return _loaded(network.source, name, side_for(network.source, network.model, network.size))


@lru_cache(maxsize=4)
def _loaded(source: str, split: str, side: int | None) -> Split:
    return splits.load(source, split, size=side)


def images(cell: Cell) -> Split:
    """Calibration images: evenly spaced, from a part of the training images that no network was trained on here."""
    return split_of(cell, "calibration").thin(cell.images)


def score(model: nn.Module, cell: Cell) -> dict[str, Any]:
    """Accuracy on the study's split, on a GPU where there is one."""
    if torch.cuda.is_available():
        model = model.to("cuda")
    found = evaluate(model, split_of(cell, cell.split)).to_json()
    model.to("cpu")
    return found


def table_of(cell: Cell, out: Path, reference: Reference, settings: Settings, make: Callable[[], Table]) -> Table:
    """What the settings need to know about every layer, whatever the budget: made once, and kept in the store."""
    wanted: dict[str, Any] = {
        "kind": "table",
        "reference": reference.name,
        "exclude": list(cell.network.exclude),
        "folds": settings.folds,
        "slices": settings.slices,
        "decompositions": settings.decompositions,
    }
    if any(DECOMPOSITIONS[name].alone for name in settings.decompositions):
        wanted |= {"clustering": settings.clustering, "seed": settings.seed, "starts": settings.starts}
    if needs_data(settings):
        wanted |= {"error": settings.error, "data": cell.network.source, "calibrate": cell.images}
    folder = entry(out / "store", wanted, lambda work: make().save(work / "table.safetensors"))
    table = _table(str(folder))
    if table.weights is None:
        table.weights = {layer.name: _weight(reference.network, layer.name) for layer in table.coverage.layers}
    return table


def _weight(network: nn.Module, name: str) -> Tensor:
    weight = network.get_submodule(name).weight
    assert isinstance(weight, Tensor), "a covered layer has a weight"
    return weight


@lru_cache(maxsize=8)
def _table(folder: str) -> Table:
    return Table.load(Path(folder) / "table.safetensors")


def spectra_json(reference: Reference, model: str) -> dict[str, Any]:
    """σ_i ÷ σ_1 of every layer by fold, as one slice. More than 256 are thinned evenly; `counts` has their number."""
    table = build_table(reference.network, reference.example, folds="all", slices=1)
    layers: dict[str, dict[str, list[float]]] = {}
    counts: dict[str, dict[str, int]] = {}
    for (name, option), values in table.spectra.items():
        sigma = np.sort(values[:, 0, :-1].ravel())[::-1]  # a convolution with groups has the values of all of them
        shown = sigma[np.unique(np.linspace(0, len(sigma) - 1, min(len(sigma), POINTS)).round().astype(int))]
        scale = float(sigma[0]) or 1.0
        layers.setdefault(name, {})[option.fold] = [round(float(s) / scale, 6) for s in shown]
        counts.setdefault(name, {})[option.fold] = len(sigma)
    return {"model": model, "layers": layers, "counts": counts}
