"""Training recipes: every hyperparameter as one frozen value, and the learning rate as a function of it.

`paper:NETWORK` are the tables of the supplement of Liebenwein et al. (2021), one recipe for each network.
`fast`, `gentle`, `taught` and `distilled` are ours, for few epochs on a CPU. Any field can be replaced:
`change(recipe, epochs="3")`, on the command line `--set epochs=3`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from rankwise.errors import RankwiseError

OPTIMIZERS = ("sgd", "rmsprop", "adamw", "soap")
SCHEDULES = ("constant", "steps", "every", "polynomial", "cycle")
AUGMENTS = ("auto", "none", "shift", "cifar", "imagenet", "voc")  # see augment.py
PRECISIONS = ("no", "bf16", "fp16", "auto")
FORMS = ("auto", "factors", "product")  # see `surgery/multiplied.py`
NORMS = ("batch", "running")  # the statistics that batch norms use


@dataclass(frozen=True)
class Recipe:
    """How to train.

    `epochs` is e, all epochs of a training from scratch; `retrain` is r, how many of them a retraining
    repeats: the last r (learning-rate rewinding, Renda et al. 2020). `warmup` is in epochs.

    The rate after the warm-up, at epoch t (a real number, steps included):

        constant      lr
        steps         lr · decay^(number of `milestones` ≤ t)
        every         lr · decay^⌊t / every⌋
        polynomial    lr · (1 − t/epochs)^power
        cycle         lr · (1 + cos(π·(t − warmup)/(epochs − warmup)))/2, which ends at 0

    `retrain_lr` replaces lr in a retraining. `patience` > 0 ends a training after so many epochs without a
    better score on the early-stopping split; `keep_best` gives back the weights of the best epoch there.
    `alpha` and `starts` (the paper's n_seed) are for compression: keep αⁱ in round i, random starts of
    Algorithm 1; `mu` and `mu_growth` are for the learning–compression loop (see `lc`). `batch_size` is that of all
    processes together.

    `form` is how pairs are computed: by their factors, or as the product that they stand for, which is the same
    function; `auto` takes the one that costs less on the device. `norm_decay` puts weight decay on norms and biases
    too, as the paper does. With a teacher, `labels` is the weight of the loss by labels and `layers` that of the
    outputs of replaced layers (training/teacher.py). `precision` auto is bf16 where the machine multiplies it faster.
    With `find_lr` a retraining finds lr by a range test first (training/range_test.py), unless lr is given. `norms`
    says what batch norms normalise by in training: the statistics of the batch, or the running ones, which then stay.
    """

    name: str
    epochs: int
    batch_size: int
    lr: float
    optimizer: str = "sgd"
    warmup: float = 0.0
    schedule: str = "constant"
    decay: float = 0.1
    milestones: tuple[int, ...] = ()
    every: int = 30
    power: float = 0.9
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    augment: str = "auto"
    retrain: int = 0
    retrain_lr: float | None = None
    patience: int = 0
    keep_best: bool = False
    precision: str = "no"
    alpha: float = 0.8
    starts: int = 15
    mu: float = 0.01
    mu_growth: float = 1.5
    form: str = "auto"
    norm_decay: bool = True
    labels: float = 0.1
    layers: float = 1.0
    find_lr: bool = False
    norms: str = "batch"

    def __post_init__(self) -> None:
        for name, known in (
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("augment", AUGMENTS),
            ("precision", PRECISIONS),
            ("form", FORMS),
            ("norms", NORMS),
        ):
            value = getattr(self, name)
            if value not in known:
                raise RankwiseError(f"{name}={value} was given: possible are {', '.join(known)}")
        for name, (low, high, says) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not (low <= value < high):
                raise RankwiseError(f"{name}={value} was given: give {says}")
        if not self.lr > 0 or (self.retrain_lr is not None and not self.retrain_lr > 0):
            raise RankwiseError(
                f"learning rate {self.retrain_lr if self.lr > 0 else self.lr} was given: give one above 0"
            )
        if not 0 < self.alpha < 1:
            raise RankwiseError(f"alpha={self.alpha} was given: give a number between 0 and 1, such as 0.8")
        if self.retrain > self.epochs:
            raise RankwiseError(
                f"retraining for {self.retrain} of {self.epochs} epochs was asked: a retraining repeats the last "
                f"epochs of the training, so give retrain up to {self.epochs}"
            )
        if self.optimizer == "sgd" and self.nesterov and not self.momentum:
            raise RankwiseError("nesterov=true was given with momentum=0: give a momentum, such as 0.9")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "milestones": list(self.milestones)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Recipe:
        known = cls.__dataclass_fields__
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise RankwiseError(f"a recipe has no {unknown[0]!r}: it has {', '.join(known)}")
        missing = [name for name in ("name", "epochs", "batch_size", "lr") if name not in data]
        if missing:
            raise RankwiseError(f"a recipe needs {missing[0]!r}, which is not there")
        return cls(**{key: _typed(key, value) for key, value in data.items()})


_WHOLE = (0, math.inf, "a whole number from 0 on")
_RANGES: dict[str, tuple[float, float, str]] = {
    "epochs": _WHOLE,
    "batch_size": (1, math.inf, "a whole number from 1 on"),
    "warmup": (0, math.inf, "a number of epochs from 0 on"),
    "every": (1, math.inf, "a whole number of epochs from 1 on"),
    "power": (0, math.inf, "a number from 0 on"),
    "decay": (0, math.inf, "a number from 0 on"),
    "momentum": (0, 1, "a number from 0 up to, but below, 1"),
    "weight_decay": (0, math.inf, "a number from 0 on"),
    "label_smoothing": (0, 1, "a number from 0 up to, but below, 1"),
    "retrain": _WHOLE,
    "patience": _WHOLE,
    "starts": (1, math.inf, "a whole number from 1 on"),
    "labels": (0, math.inf, "a number from 0 on"),
    "layers": (0, math.inf, "a number from 0 on"),
    "mu": (0, math.inf, "a number from 0 on"),
    "mu_growth": (1, math.inf, "a number from 1 on"),
}


def rate(recipe: Recipe, step: int, steps_per_epoch: int, retraining: bool = False) -> float:
    """The learning rate of step `step`, counted from the start of the whole training, never of the retraining.

    A pure function, so that rewinding to epoch e − r, and resuming, are nothing but starting at another step.
    """
    lr = recipe.lr if not retraining or recipe.retrain_lr is None else recipe.retrain_lr
    warm = recipe.warmup * steps_per_epoch
    t = step / steps_per_epoch
    if step + 1 < warm:
        # From 0 to what the schedule gives at the end of the warm-up; the first step already moves.
        return lr * _shape(recipe, recipe.warmup) * (step + 1) / warm
    return lr * _shape(recipe, t)


def _shape(recipe: Recipe, t: float) -> float:
    """The schedule at epoch t, as a fraction of the nominal rate."""
    if recipe.schedule == "steps":
        return float(recipe.decay ** sum(m <= t for m in recipe.milestones))
    if recipe.schedule == "every":
        return float(recipe.decay ** int(t // recipe.every))
    if recipe.schedule == "polynomial":
        return float(max(0.0, 1 - t / recipe.epochs) ** recipe.power)
    if recipe.schedule == "cycle":
        length = max(recipe.epochs - recipe.warmup, 1e-9)
        done = min(1.0, max(0.0, (t - recipe.warmup) / length))
        return (1 + math.cos(math.pi * done)) / 2
    return 1.0


def _cifar(network: str, **values: Any) -> Recipe:
    return Recipe(f"paper:{network}", augment="cifar", keep_best=True, **values)


def _imagenet(network: str, **values: Any) -> Recipe:
    return Recipe(f"paper:{network}", augment="imagenet", keep_best=True, **values)


_STEPS = {"schedule": "steps", "decay": 0.1}
_RESNET = {"epochs": 182, "warmup": 5, "batch_size": 128, "lr": 0.1, "milestones": (91, 136), "weight_decay": 1e-4}
_IMAGENET_SGD = {"epochs": 90, "warmup": 5, "batch_size": 256, "lr": 0.1, "milestones": (30, 60, 80)}

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        # tab-supp:cifar_hyperparameters
        _cifar(
            "vgg16", epochs=300, warmup=10, batch_size=256, lr=0.05, schedule="every", decay=0.5, every=30,
            weight_decay=5e-4,
        ),
        *(_cifar(f"resnet{depth}", **_RESNET, **_STEPS) for depth in (20, 32, 44, 56, 110)),
        _cifar(
            "densenet22", epochs=300, warmup=10, batch_size=64, lr=0.1, milestones=(150, 225), nesterov=True,
            weight_decay=1e-4, **_STEPS,
        ),
        _cifar(
            "wrn16-8", epochs=200, warmup=5, batch_size=128, lr=0.1, schedule="every", decay=0.2, every=60,
            nesterov=True, weight_decay=5e-4,
        ),
        # tab-supp:imagenet_hyperparameters
        _imagenet("resnet18", weight_decay=1e-4, **_IMAGENET_SGD, **_STEPS),
        _imagenet("alexnet", weight_decay=1e-4, **_IMAGENET_SGD, **_STEPS),
        # "0.98 per step": a step of the schedule, which is an epoch; by optimiser steps nothing would be left
        # of the rate within the first epoch (0.98^1669 = 2e-15).
        _imagenet(
            "mobilenet_v2", epochs=300, batch_size=768, lr=0.045, optimizer="rmsprop", schedule="every", decay=0.98,
            every=1, weight_decay=4e-5, retrain_lr=1e-4,
        ),
        # tab-supp:voc_hyperparameters
        Recipe(
            "paper:deeplabv3_resnet50", epochs=45, batch_size=32, lr=0.02, schedule="polynomial", power=0.9,
            weight_decay=1e-4, augment="voc", keep_best=True,
        ),
        # Ours: few epochs on a CPU. `fast` from scratch, `gentle` for networks that are trained already.
        Recipe(
            "fast", epochs=20, batch_size=64, lr=0.1, warmup=4, schedule="cycle", nesterov=True, weight_decay=5e-4,
            label_smoothing=0.1, augment="auto", retrain=5,
        ),
        Recipe(
            "gentle", epochs=3, batch_size=128, lr=0.02, warmup=0.2, schedule="cycle", nesterov=True,
            weight_decay=1e-4, augment="auto", retrain=3,
        ),
        # With a teacher (teach.py), whose losses are small numbers: steps must not depend on their size.
        Recipe(
            "taught", epochs=3, batch_size=128, lr=1e-3, warmup=0.2, schedule="cycle", optimizer="adamw",
            weight_decay=0.0, augment="auto", retrain=3,
        ),
        # With a teacher and more epochs: from its outputs alone, which costs less, at a rate that so many epochs allow.
        Recipe(
            "distilled", epochs=15, batch_size=128, lr=3e-3, warmup=1, schedule="cycle", optimizer="soap",
            weight_decay=0.0, norm_decay=False, augment="auto", retrain=15, precision="auto", layers=0.0,
            find_lr=True,
        ),
    )
}  # fmt: skip


def get_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise RankwiseError(f"unknown recipe {name!r}: the recipes are {', '.join(RECIPES)}")
    return RECIPES[name]


def read_changes(pairs: Iterable[str]) -> dict[str, Any]:
    """Fields to replace from texts such as `epochs=3`, `milestones=30,60`, `retrain_lr=none`.

    >>> read_changes(["epochs=3", "nesterov=true", "milestones=30,60"])
    {'epochs': 3, 'nesterov': True, 'milestones': (30, 60)}
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise RankwiseError(f"--set {pair} is not understood: give a field and a value, such as --set epochs=3")
        if key in found:
            raise RankwiseError(f"--set {key} was given twice: give it once")
        found[key] = _parsed(key, text)
    return found


def change(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """The recipe with some fields replaced; names and types are checked.

    With other `epochs`, the warm-up of a cycle is stretched alike, and `retrain` is at most that, unless they are
    given too.

    >>> short = change(RECIPES["fast"], {"epochs": 5})
    >>> short.warmup, short.retrain
    (1.0, 5)
    """
    new = {key: _typed(key, value) for key, value in changes.items()}
    if "lr" in new:
        new.setdefault("find_lr", False)
    epochs = new.get("epochs", recipe.epochs)
    if epochs != recipe.epochs and epochs >= 0:
        new.setdefault("retrain", min(recipe.retrain, epochs))
        if recipe.schedule == new.get("schedule", recipe.schedule) == "cycle":
            new.setdefault("warmup", recipe.warmup * epochs / max(1, recipe.epochs))
    return replace(recipe, **new)


_KINDS: dict[str, str] = {f.name: str(f.type) for f in fields(Recipe)}


def _known(key: str) -> str:
    if key not in _KINDS or key == "name":
        raise RankwiseError(f"a recipe has no {key!r}: it has {', '.join(k for k in _KINDS if k != 'name')}")
    return _KINDS[key]


def _parsed(key: str, text: str) -> Any:
    kind = _known(key)
    try:
        if kind == "int":
            return int(text)
        if kind == "float" or (kind == "float | None" and text.lower() != "none"):
            return float(text)
        if kind == "float | None":
            return None
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "tuple[int, ...]":
            return tuple(int(part) for part in text.split(",") if part.strip())
    except (ValueError, KeyError):
        raise RankwiseError(f"--set {key}={text} is not understood: {key} is {_SAYS[kind]}") from None
    return text


_SAYS = {
    "int": "a whole number",
    "float": "a number",
    "float | None": "a number or none",
    "bool": "true or false",
    "tuple[int, ...]": "a list of whole numbers such as 91,136",
    "str": "a word",
}


def _typed(key: str, value: Any) -> Any:
    kind = _KINDS["name"] if key == "name" else _known(key)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    fits = {
        "int": number and isinstance(value, int),
        "float": number,
        "float | None": number or value is None,
        "bool": isinstance(value, bool),
        "str": isinstance(value, str),
        "tuple[int, ...]": isinstance(value, list | tuple) and all(type(v) is int for v in value),
    }[kind]
    if not fits:
        raise RankwiseError(f"{key}={value!r} was given: {key} is {_SAYS[kind]}")
    return tuple(value) if kind == "tuple[int, ...]" else value
