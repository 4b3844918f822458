"""Studies: networks × methods × keeps × retraining × repeats, and the cells that they are made of.

    oneshot    compress once, retrain for a share of the recipe's epochs (0: compress only)
    sweep      the same for several shares
    iterate    compress to αⁱ, retrain and project back in every round i

A study names what it cannot know in angle brackets, `data = "<cifar10>"`; the command line says what that is. Two
cells that would give the same row have the same name, on every machine.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rankwise.errors import RankwiseError
from rankwise.models.spec import parse
from rankwise.studies.store import digest, file_digest
from rankwise.training.recipes import Recipe

MODES = ("oneshot", "sweep", "iterate")
_PLACES = ("source", "file", "weights", "keeps", "alpha", "cpus", "gpus")


@dataclass(frozen=True)
class StudyNetwork:
    """`data` and `weights` as the study has them; `source` and `file` what they stand for, once that is known.

    With `teacher` the reference network teaches what is retrained.
    """

    model: str
    data: str
    recipe: dict[str, Any]
    keeps: tuple[float, ...]
    weights: str | None = None
    exclude: tuple[str, ...] = ()
    size: int | None = None
    limit: int | None = None
    cpus: float = 1
    gpus: float = 0
    alpha: float | None = None
    teacher: bool = False
    source: str = ""
    file: str | None = None
    file_digest: str | None = None

    @cached_property
    def training(self) -> Recipe:
        return Recipe.from_json(self.recipe)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What decides results: neither where things lie nor the rest of the grid does."""
        own = {key: value for key, value in asdict(self).items() if key not in (*_PLACES, "teacher")}
        return {**own, "teacher": True} if self.teacher else own  # as it was before there were teachers

    @property
    def name(self) -> str:
        """How the command line speaks of it: `resnet18` for torchvision:resnet18."""
        return parse(self.model).name


@dataclass(frozen=True)
class Entry:
    """A method of the registry, the settings that the study changes, and what tables call it.

    `recover` are steps of distillation after compression, or seconds. `calibrate` is the number of images without
    labels that it may look at: the study's own unless given, and with 0 the method gets no data.
    """

    method: str
    label: str
    settings: dict[str, Any]
    recover: int | str = 0
    calibrate: int | None = None

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What decides results; keys that are not given are left out, as they were before there were such keys."""
        more = {"recover": self.recover or None, "calibrate": self.calibrate}
        own = {"method": self.method, "label": self.label, "settings": self.settings}
        return {**own, **{key: value for key, value in more.items() if value is not None}}


@dataclass(frozen=True)
class Cell:
    """One row to be. `asked` is the keep, `share` of the recipe's epochs are retrained, `round` counts from 1."""

    study: str
    mode: str
    network: StudyNetwork
    entry: Entry
    unit: str
    asked: float
    share: float
    repeat: int
    seed: int
    calibrate: int
    split: str
    round: int = 0
    timing: str = ""  # how its network is timed beside the original one; empty: it is not

    @property
    def images(self) -> int:
        """How many images the method may look at."""
        return self.calibrate if self.entry.calibrate is None else self.entry.calibrate

    @property
    def epochs(self) -> int:
        """How many epochs are retrained: a share of the recipe's, at least one where the share is not 0."""
        return max(1, round(self.share * self.network.training.epochs)) if self.share else 0

    @cached_property
    def name(self) -> str:
        """Readable, and with a hash of all that decides the result: where files lie does not."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("study", "timing")}
        own |= {"timing": self.timing} if self.timing else {}  # as it was before there were times
        what = digest({**own, "network": self.network.identity, "entry": self.entry.identity})
        keep = f"round{self.round}" if self.round else f"{self.unit}{self.asked:.4g}"
        title = f"{_slug(self.network.model)}-{_slug(self.entry.label)}-{keep}"
        return f"{title}-r{100 * self.share:g}-{self.repeat}-{what[:6]}"


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    mode: str
    networks: tuple[StudyNetwork, ...]
    entries: tuple[Entry, ...]
    retrain: tuple[float, ...]
    paper: tuple[str, ...] = ()
    unit: str = "params"
    repeats: int = 1
    seed: int = 0
    calibrate: int = 256
    split: str = "test"
    timing: str = ""

    def cells(self) -> list[Cell]:
        """Grouped by network and repeat, so that cells in a row share their reference network."""
        return [
            Cell(
                study=self.name,
                mode=self.mode,
                network=network,
                entry=entry,
                unit=self.unit,
                asked=keep,
                share=share,
                repeat=repeat,
                seed=self.seed + repeat,
                calibrate=self.calibrate,
                split=self.split,
                round=i if self.mode == "iterate" else 0,
                timing=self.timing,
            )
            for network in self.networks
            for repeat in range(self.repeats)
            for entry in self.entries
            for share in self.retrain
            for i, keep in enumerate(network.keeps, start=1)
        ]

    def to_json(self) -> dict[str, Any]:
        return {"format": 1, **asdict(self)}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9._]+", "-", text.lower().replace("+", "plus")).strip("-.") or "x"


def asks(study: Study) -> bool:
    """Whether something in angle brackets is left for the command line to say."""
    return any((n.data + (n.weights or "")).find("<") >= 0 for n in study.networks)


def fill_in(study: Study, data: list[str], weights: list[str]) -> Study:
    """The study with everything in angle brackets replaced by what the command line says.

    `data` holds NAME=SPEC or SPEC, `weights` NETWORK=FILE or FILE; without a name it is meant for all networks of the
    study, which must then be of one kind. Weights that are given are the reference network, which is not trained.
    """
    sources = _named(data, {_inner(n.data) for n in study.networks}, "--data")
    files = _named(weights, {n.name for n in study.networks}, "--weights")
    if "" in files and len(study.networks) > 1:
        names = ", ".join(n.name for n in study.networks)
        raise RankwiseError(f"--weights was given once for several networks: say for which, NETWORK=FILE, of {names}")
    return replace(study, networks=tuple(_placed(n, sources, files, study.name) for n in study.networks))


def _placed(network: StudyNetwork, sources: dict[str, str], files: dict[str, str], study: str) -> StudyNetwork:
    name = _inner(network.data)
    source = sources.get(name) or sources.get("") or network.data
    if source.startswith("<"):
        raise RankwiseError(
            f"the study {study} needs the data {network.data}, and only you know where it is: add "
            f"--data {name}=parquet:FOLDER (or imagefolder:FOLDER, voc:FOLDER, hub:NAME)"
        )
    kind, _, place = source.partition(":")
    if kind in ("parquet", "imagefolder", "voc") and not os.path.isdir(place):
        raise RankwiseError(f"the data {source} is not there: {place} is not a folder")
    file = files.get(network.name) or files.get("") or network.weights
    if file is not None and file.startswith("<"):
        raise RankwiseError(
            f"the study {study} needs weights for {network.name}, and only you know where they are: add "
            f"--weights {network.name}=FILE"
        )
    if file is not None and not os.path.isfile(file):
        raise RankwiseError(f"the weights {file} for {network.name} are not there: give a .safetensors or .pth file")
    data = network.data if network.data.startswith("<") else source  # another data set is another cell
    return replace(network, data=data, source=source, file=file, file_digest=file_digest(Path(file)) if file else None)


def _inner(text: str) -> str:
    return text[1:-1] if text.startswith("<") and text.endswith(">") else text


def _named(given: list[str], names: set[str], flag: str) -> dict[str, str]:
    """NAME=VALUE by name, and a bare VALUE under the empty name; a value may itself hold an equals sign."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or "/" in name or ":" in name:
            name, value = "", text
        elif name not in names:
            raise RankwiseError(f"{flag} {text}: the study has no {name!r}, it has {', '.join(sorted(names))}")
        if name in found:
            raise RankwiseError(f"{flag} was given twice for {name or 'everything'}: give it once")
        found[name] = value
    if "" in found and flag == "--data" and len(names) > 1:
        raise RankwiseError(
            f"{flag} {found['']} was given, and the study has several data sets: say which, NAME={found['']}, of "
            f"{', '.join(sorted(names))}"
        )
    return found
