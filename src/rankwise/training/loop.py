"""Train a network in place: one loop for training from scratch, for retraining, and for any number of processes.

A training is epochs first … last of a recipe. Training from scratch is 0 … e; retraining for r epochs with
learning-rate rewinding is e − r … e; resuming is a later start. The rest is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, AdamW, Optimizer, RMSprop

from rankwise.data.augment import IGNORED
from rankwise.data.batches import Feed
from rankwise.data.splits import Split
from rankwise.errors import RankwiseError
from rankwise.surgery.multiplied import multiplied, pairs_to_multiply
from rankwise.training import resume as states
from rankwise.training.evaluate import Score, class_logits, evaluate, like, mode
from rankwise.training.processes import Engine, make_engine
from rankwise.training.recipes import Recipe, rate
from rankwise.training.resume import State
from rankwise.training.soap import Soap
from rankwise.training.teacher import Teacher, lesson

Progress = Callable[[int, int, float], None]  # epochs done, epochs in all, mean loss of the last one
Penalty = Callable[[int], Callable[[], Tensor]]  # at the start of an epoch → a scalar to add to every loss
_AUXILIARY = 0.5  # weight of a segmentation network's second output


class TrainingWatch(Protocol):
    """Who looks on: `step` after every batch, `epoch` with the record of every epoch."""

    def step(self, epoch: int, step: int, steps: int, loss: float, top1: float) -> None: ...

    def epoch(self, record: dict[str, Any]) -> None: ...


@runtime_checkable
class Told(Protocol):
    """Who looks on and wants to know, in one sentence, how the network is trained."""

    def chosen(self, says: str) -> None: ...


@dataclass(frozen=True)
class TrainingJob:
    """What is trained how: epochs `first` … `last` of the recipe."""

    recipe: Recipe
    first: int
    last: int
    seed: int = 0
    retraining: bool = False


def training(recipe: Recipe, seed: int = 0) -> TrainingJob:
    return TrainingJob(recipe, 0, recipe.epochs, seed)


def retraining(recipe: Recipe, seed: int = 0) -> TrainingJob:
    """The last `recipe.retrain` epochs, [e − r, e], with their hyperparameters."""
    if not recipe.retrain:
        raise RankwiseError(f"the recipe {recipe.name} does not say how long to retrain: give --set retrain=EPOCHS")
    return TrainingJob(recipe, recipe.epochs - recipe.retrain, recipe.epochs, seed, retraining=True)


@dataclass
class Hooks:
    """What a training may have beside it: an early-stopping split, somebody who looks on, a place for its state.

    A `teacher` is in evaluation mode and on the engine's device (see teacher.py, `ready`).
    """

    stop: Split | None = None
    watch: TrainingWatch | None = None
    save: Callable[[State], None] | None = None
    penalty: Penalty | None = None
    teacher: nn.Module | None = None
    size: int | None = None
    state: State = field(default_factory=lambda: State({}, 0))


def train_(model: nn.Module, split: Split, job: TrainingJob, engine: Engine, hooks: Hooks) -> State:
    """Train in place and return the state after the last epoch, with the record of every epoch.

    The same job gives the same weights on the same machine and as many processes; torch's global random state is left
    alone, and every module is in the mode it was in. Where the recipe says `keep_best`, the network ends with the
    weights of its best epoch.
    """
    recipe, state = job.recipe, hooks.state
    feed = Feed(split, recipe.batch_size, recipe.augment, job.seed, hooks.size, engine.rank, engine.world)
    optimizer = make_optimizer(model, recipe)
    if state.model:
        states.load_model_(model, state.model, "the state")
        states.load_optimizer_(optimizer, state.optimizer, "the state")
    devices = range(torch.cuda.device_count())
    with (
        torch.random.fork_rng(devices),
        training_mode(model, recipe),
        multiplied(model, pairs_to_multiply(model, recipe.form)),
        engine.prepared(model, optimizer) as prepared,
    ):
        for epoch in range(max(job.first, state.epoch), job.last):
            if _has_stopped(state, recipe.patience):
                break
            start = time.perf_counter()
            torch.manual_seed((job.seed * 100_003 + epoch) * 1_009 + engine.rank)  # for dropout and the like
            record = _epoch_(prepared, feed, job, epoch, engine, hooks)
            engine.align_(model)
            if hooks.stop is not None:
                score = evaluate(model, hooks.stop, share=(engine.rank, engine.world))
                record["stop"] = score.to_json()
                _note_best_(state, score, epoch, model, recipe.keep_best)
            record["seconds"] = time.perf_counter() - start
            state.epoch, state.seconds = epoch + 1, state.seconds + record["seconds"]
            state.history.append(record)
            if hooks.save is not None:
                state.model, state.optimizer = states.model_tensors(model), states.optimizer_tensors(optimizer)
                hooks.save(state)
            if hooks.watch is not None:
                hooks.watch.epoch(record)
    if recipe.keep_best and state.best:
        states.load_model_(model, state.best, "the state")
    return state


@contextmanager
def training_mode(model: nn.Module, recipe: Recipe) -> Iterator[None]:
    """The model in training mode, and afterwards every module as it was.

    With `norms` running, batch norms normalise as in evaluation, and only their scales and shifts are trained: what is
    trained is the very function that is used afterwards, and a network that is nearly right is not shaken at first.
    """
    with mode(model, training=True):
        for module in model.modules():
            if recipe.norms == "running" and isinstance(module, _BatchNorm):
                module.eval()
        yield


def make_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """Weight decay is on every parameter, as in the paper: also on batch norm, and on each factor of a pair.

    Without `norm_decay` it is on weights only, not on what has one axis: norms and biases.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise RankwiseError("the network has no parameter that can be trained")
    decay = recipe.weight_decay
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if not recipe.norm_decay:
        flat = [p for p in parameters if p.dim() < 2]
        groups = [{"params": [p for p in parameters if p.dim() >= 2]}, {"params": flat, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
    # Not torch's fused steps: they walk over memory, and the momentum of a training that resumes lies otherwise there.
    if recipe.optimizer == "sgd":
        return SGD(groups, recipe.lr, recipe.momentum, weight_decay=decay, nesterov=recipe.nesterov)
    if recipe.optimizer == "rmsprop":
        # MobileNetV2: "decay and momentum are set to 0.9"
        return RMSprop(groups, recipe.lr, alpha=0.9, momentum=recipe.momentum, weight_decay=decay)
    if recipe.optimizer == "soap":
        return Soap(groups, recipe.lr, weight_decay=decay)
    return AdamW(groups, recipe.lr, betas=(recipe.momentum, 0.999), weight_decay=decay)


def _epoch_(
    prepared: tuple[nn.Module, Optimizer], feed: Feed, job: TrainingJob, epoch: int, engine: Engine, hooks: Hooks
) -> dict[str, Any]:
    """One pass over the data; returns the record of the epoch, over the images of all processes."""
    model, optimizer = prepared
    recipe, steps = job.recipe, feed.steps
    sums = torch.zeros(3, dtype=torch.float64, device=engine.device)  # loss, right, targets
    lr = 0.0
    teacher = teacher_for(hooks.teacher, recipe)
    penalty = None if hooks.penalty is None else hooks.penalty(epoch)
    for step, (images, y) in enumerate(feed.epoch(epoch)):
        lr = rate(recipe, epoch * steps + step, steps, job.retraining)
        for group in optimizer.param_groups:
            group["lr"] = lr
        y = y.to(engine.device)
        whole, loss, logits = losses(model, teacher, feed.split, images.to(engine.device), y, recipe.label_smoothing)
        if penalty is not None:
            whole = whole + penalty()
        optimizer.zero_grad()
        engine.backward(whole)
        optimizer.step()
        with torch.no_grad():
            count = (y != IGNORED).sum() if y.dim() > 1 else torch.tensor(len(y), device=y.device)
            sums += torch.stack((loss.detach() * count, (logits.argmax(1) == y).sum(), count)).double()
        if hooks.watch is not None and (step + 1 == steps or step % 10 == 9):  # reading a number stops a GPU
            total, right, seen = sums.tolist()
            hooks.watch.step(epoch, step + 1, steps, total / max(seen, 1), 100 * right / max(seen, 1))
    total, right, seen = engine.sum(sums).tolist()
    mean = total / max(seen, 1)
    if not isfinite(mean):
        raise RankwiseError(
            f"the loss became {mean} in epoch {epoch + 1}: train with a learning rate below {recipe.lr:g}"
        )
    return {"epoch": epoch + 1, "lr": lr, "loss": mean, "top1": 100 * right / max(seen, 1)}


def teacher_for(network: nn.Module | None, recipe: Recipe) -> Teacher | None:
    """The network that teaches, with the weights and the precision of the recipe."""
    return None if network is None else Teacher(network, recipe.labels, recipe.layers, recipe.precision == "bf16")


def losses(
    model: nn.Module, teacher: Teacher | None, split: Split, images: Tensor, y: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What is made small, the loss by labels alone, and the logits of a batch: images uint8 B×C×H×W, targets int64."""
    x = like(model, split.normalise(images)).contiguous(memory_format=torch.channels_last)
    with lesson(teacher, model, x, partial(class_logits, split=split)) as taught:
        output = model(x)
    logits = class_logits(output, split).float()
    loss = _loss(logits, y, smoothing)
    whole = taught(loss + _AUXILIARY * _loss(output["aux"], y, 0.0) if _has_second(output) else loss, logits)
    return whole, loss, logits


def _loss(logits: Tensor, y: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(logits.float(), y, label_smoothing=smoothing, ignore_index=IGNORED if y.dim() > 1 else -100)


def _has_second(output: object) -> bool:
    return isinstance(output, dict) and isinstance(output.get("aux"), Tensor)


def _note_best_(state: State, score: Score, epoch: int, model: nn.Module, keep: bool) -> None:
    """Of equal scores the later epoch counts as better: its learning rate was lower."""
    if state.best_score is None or score.main >= state.best_score:
        state.best_score, state.best_epoch = score.main, epoch + 1
        state.best = states.model_tensors(model) if keep else {}


def _has_stopped(state: State, patience: int) -> bool:
    return bool(patience) and state.best_epoch is not None and state.epoch - state.best_epoch >= patience


def fit_(
    model: nn.Module,
    split: Split,
    *,
    epochs: int,
    lr: float = 0.1,
    batch_size: int = 64,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[float]:
    """Cross-entropy by SGD with Nesterov momentum 0.9; the rate rises to `lr` and falls again (one cycle).

    Returns the mean loss of each epoch. A short way to `train_` with weight decay 5e-4, without augmentation, stopping
    or saving.
    """
    if epochs < 0:
        raise RankwiseError(f"{epochs} epochs were asked for: ask for 0 or more")
    if batch_size < 1:
        raise RankwiseError(f"batch size {batch_size} was given: give 1 or more")
    if not epochs:
        return []
    recipe = Recipe(
        "fit",
        epochs,
        batch_size,
        lr,
        warmup=0.3 * epochs,
        schedule="cycle",
        nesterov=True,
        weight_decay=5e-4,
        augment="none",
    )
    watch = None if progress is None else _Losses(progress, epochs)
    state = train_(model, split, training(recipe, seed), make_engine(), Hooks(watch=watch))
    return [record["loss"] for record in state.history]


@dataclass(frozen=True)
class _Losses:
    progress: Progress
    epochs: int

    def step(self, epoch: int, step: int, steps: int, loss: float, top1: float) -> None:
        pass

    def epoch(self, record: dict[str, Any]) -> None:
        self.progress(record["epoch"], self.epochs, record["loss"])
