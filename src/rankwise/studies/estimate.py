"""How long a study may take: cells counted, epochs added up, and one forward pass of every network timed."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rankwise.errors import RankwiseError
from rankwise.models import networks
from rankwise.studies.runner import reference_of, status_of
from rankwise.studies.study import Cell, StudyNetwork
from rankwise.surgery.forward import undisturbed

# Images to train on (the paper's 90 %) and to score, by what studies call the data.
IMAGES = {"digits": (972, 355), "cifar10": (45_000, 10_000), "imagenet": (1_153_051, 50_000), "voc": (9_524, 1_449)}
_SECOND_PASSES = 3  # a training step takes about as long as so many forward passes


@dataclass(frozen=True)
class Estimate:
    """`seconds` on one worker of this machine, None where the size of the data is not known; rough on purpose."""

    cells: int
    missing: int
    references: int
    epochs: int
    seconds: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate(cells: list[Cell], out: str) -> Estimate:
    """What is left to do: training of references, retraining, and scoring; planning is not counted."""
    missing = [cell for cell in cells if status_of(cell, out) == "missing"]
    references = {reference_of(cell): cell for cell in missing}
    trained = [cell for cell in references.values() if cell.network.weights is None and cell.network.file is None]
    epochs = sum(cell.network.training.epochs for cell in trained) + sum(cell.epochs for cell in missing)
    return Estimate(len(cells), len(missing), len(references), epochs, _seconds(missing, trained))


def _seconds(missing: list[Cell], trained: list[Cell]) -> float | None:
    speeds: dict[str, float | None] = {}
    total = 0.0
    for cell, epochs in [*((c, c.epochs) for c in missing), *((c, c.network.training.epochs) for c in trained)]:
        network = cell.network
        if network.model not in speeds:
            speeds[network.model] = _one_image(network)
        speed, images = speeds[network.model], IMAGES.get(network.data.strip("<>"))
        if speed is None or images is None:
            return None
        fit = min(images[0], network.limit or images[0])
        total += speed * (_SECOND_PASSES * fit * epochs + images[1])
    return total


def _one_image(network: StudyNetwork) -> float | None:
    """Seconds for one image forward, on one thread of this machine; None where the network's input is not known."""
    shape = networks.default_input(network.model)
    if shape is None:
        return None
    if network.data == "digits":
        shape = (1, 1, 8, 8)
    elif network.data.strip("<>") == "voc":
        shape = (1, 3, 513, 513)
    size = shape[-1]
    try:
        model = networks.build(networks.fit_spec(network.model, 10, shape[1], size)).eval()
    except RankwiseError:
        return None
    with undisturbed(model), torch.inference_mode():
        start = time.perf_counter()
        model(torch.zeros(shape))
        first = time.perf_counter() - start
        count = max(1, min(32, int(0.5 / max(first, 1e-4))))
        start = time.perf_counter()
        model(torch.zeros(count, *shape[1:]))
    return (time.perf_counter() - start) / count
