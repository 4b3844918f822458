"""Recovery: a short distillation of the original network into the compressed one, on inputs without labels.

The outputs of the original network are the targets, and so are those of each of its layers that were replaced:

    ‖out − out°‖² / Var(out°)  +  mean over replaced layers of ‖y − y°‖² / Var(y°)

is minimised by Adam with a rate that falls to zero (cosine). The layers say more of an image than the few numbers at
the end of the network do. Where the network ends in a vocabulary the divergence of its probabilities stands in for the
first term (texts.py). Batch norms keep their statistics and dropout is off: the networks are compared as they will
be used.

A few hundred images are soon known by heart. So half of the images of a batch are mirrored, all are moved by up to an
eighth of their sides (what comes in at the border is reflected), and half are mixed with another one,
x = λ a + (1 − λ) b: whatever such a picture shows, the original network has an answer to it (Beyer et al. 2022).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.calibration.activations import Data, batches, check_some
from rankwise.calibration.layer_targets import errors_of, outputs_of, replaced
from rankwise.calibration.objective import is_text, logits_in
from rankwise.calibration.texts import EVERY, Best, divergence_loss, factors_of, some_texts
from rankwise.errors import RankwiseError
from rankwise.surgery.forward import Example, run_example, tensors_of, undisturbed
from rankwise.surgery.replace import copy_model

BATCH = 128
RATE = 1e-3
WARM = 10  # steps in which the rate rises: Adam's first steps are as large as all others, whatever the gradients say
MANY = 10**6  # steps, where the clock decides
MOVE = 8  # images move by up to this part of their sides
PIXELS = 1 << 22  # entries of a batch of images: fewer large ones, so that there are as many steps
SMALLEST = 32  # images of a batch
TRIED, TRIALS = 8, 3  # rates are tried for this part of the effort each, so many of them
LEAST_STEPS, LEAST_SECONDS = 80, 30.0  # below, no rate is tried

Steps = Callable[[int, int, float], None]  # steps done, steps in all, loss


@dataclass(frozen=True)
class Effort:
    """At most so many steps and, if they are given, seconds; `rate` is the highest learning rate."""

    steps: int = 300
    seconds: float | None = None
    rate: float = RATE

    def __post_init__(self) -> None:
        if self.steps < 0 or not self.rate > 0:
            raise RankwiseError(
                f"{self.steps} steps at rate {self.rate:g} were asked for: give 0 or more steps and a rate above 0"
            )

    @property
    def none(self) -> bool:
        return not self.steps or self.seconds == 0

    @property
    def tries_rates(self) -> bool:
        return self.steps >= LEAST_STEPS and (self.seconds is None or self.seconds >= LEAST_SECONDS)

    def trial(self) -> Effort:
        """The part of it that a rate is tried for."""
        return replace(self, steps=self.steps // TRIED, seconds=None if self.seconds is None else self.seconds / TRIED)

    def without(self, other: Effort) -> Effort:
        """What is left after another one."""
        seconds = None if self.seconds is None or other.seconds is None else self.seconds - other.seconds
        return replace(self, steps=self.steps - other.steps, seconds=seconds)

    def rate_at(self, step: int, done: float) -> float:
        """The rate of a step, counted from 0, when so much of the whole is `done`: a short rise, then a cosine."""
        return self.rate * min(1, (step + 1) / WARM) * (1 + math.cos(math.pi * min(1.0, done))) / 2


EFFORT = Effort()


def read_effort(asked: int | str) -> Effort:
    """From 300 or "300" steps, or from "90s", as many steps as that takes.

    >>> read_effort("300").steps, read_effort("90s").seconds
    (300, 90.0)
    """
    text = str(asked)
    timed = text.endswith("s")
    try:
        number = float(text[:-1]) if timed else float(int(text))
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise RankwiseError(f"recover={asked!r} is not understood: give a number of steps (300), or seconds (90s)")
    return Effort(MANY, number) if timed else Effort(int(number))


def recover(
    small: nn.Module,
    original: nn.Module,
    data: Data,
    effort: Effort = EFFORT,
    seed: int = 0,
    progress: Steps | None = None,
) -> nn.Module:
    """A copy of `small` whose outputs are closer to the original's on the data."""
    better = copy_model(small)
    recover_(better, original, data, effort, seed, progress)
    return better


def recover_(
    small: nn.Module,
    original: nn.Module,
    data: Data,
    effort: Effort = EFFORT,
    seed: int = 0,
    progress: Steps | None = None,
    check: Callable[[], float] | None = None,
) -> list[float]:
    """The same in place; gives the loss of every step.

    `check` is a measure on held-out inputs of which less is better. On texts only factors are trained, and the best
    state by `check` is kept. On images it decides the rate, if the effort is long enough to try some.
    """
    pieces, scale = _pieces(original, data)
    original = copy_model(original)
    text = all(map(is_text, pieces))
    trained = factors_of(small) if text else [p for p in small.parameters() if p.is_floating_point()]
    states = [(p, p.requires_grad) for p in small.parameters() if p.is_floating_point()]
    best = Best(small, check) if text and check is not None else None
    modes = {module: module.training for module in small.modules()}
    layout = _channels_last_(small)
    _channels_last_(original)
    work = partial(_train_, small, _Lesson(original, pieces, scale, torch.Generator().manual_seed(seed)), trained)
    try:
        small.eval()
        for p, _ in states:
            p.requires_grad_(False)
        for p in trained:
            p.requires_grad_(True)
        if check is not None and not text and effort.tries_rates:
            effort = _with_rate(small, work, effort, check)
        losses = work(effort, progress, best)
    finally:
        for p, before in states:
            p.requires_grad_(before)
            p.grad = None
        for module, mode in modes.items():
            module.training = mode
        if layout:
            small.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    if best is not None and losses:
        best.look()
        best.restore()
    return losses


@dataclass(frozen=True, eq=False)
class _Lesson:
    """Whom to learn from, by which inputs, and what errors of the outputs are relative to."""

    original: nn.Module
    pieces: list[Example]
    scale: float
    random: torch.Generator


def _with_rate(
    small: nn.Module, work: Callable[[Effort], list[float]], effort: Effort, check: Callable[[], float]
) -> Effort:
    """The highest of some rates at which a short trial helps on held-out inputs, and what is left of the effort.

    A network of thin layers is soon worse at a rate that suits others. A trial that helps is not undone.
    """
    before, state = check(), copy.deepcopy(small.state_dict())
    for _ in range(TRIALS):
        trial = effort.trial()
        work(trial)
        effort = effort.without(trial)
        if check() <= before:
            return effort
        small.load_state_dict(state)
        effort = replace(effort, rate=effort.rate / 3)
    return effort


def _train_(
    small: nn.Module,
    lesson: _Lesson,
    trained: list[nn.Parameter],
    effort: Effort,
    progress: Steps | None = None,
    best: Best | None = None,
) -> list[float]:
    """Adam for as many steps as the effort allows; the loss of each."""
    steps, seconds = effort.steps, effort.seconds
    end = math.inf if seconds is None else time.monotonic() + seconds
    losses: list[float] = []
    optimiser = torch.optim.Adam(trained, lr=effort.rate) if trained else None
    while optimiser is not None and len(losses) < steps and time.monotonic() < end:
        if best is not None and len(losses) % EVERY == 0 and not best.look():
            break
        done = max(len(losses) / steps, 0.0 if seconds is None else 1 - (end - time.monotonic()) / seconds)
        for group in optimiser.param_groups:
            group["lr"] = effort.rate_at(len(losses), done)
        losses.append(_step_(small, lesson, optimiser))
        if not math.isfinite(losses[-1]):
            raise RankwiseError(f"recovery diverged in step {len(losses)}: give a rate below {effort.rate:g}")
        if progress:
            progress(len(losses), min(steps, math.ceil(len(losses) / max(done, 1 / steps))), losses[-1])
    return losses


def _channels_last_(model: nn.Module) -> bool:
    """Channels innermost in memory, which convolutions like better; False where nothing was to be done."""
    images = [p for p in model.parameters() if p.ndim == 4]
    if not images or any(p.ndim == 5 or not p.is_contiguous() for p in model.parameters()):
        return False
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return True


def _step_(small: nn.Module, lesson: _Lesson, optimiser: torch.optim.Optimizer) -> float:
    original, pieces, random = lesson.original, lesson.pieces, lesson.random
    batch = pieces[int(torch.randint(len(pieces), (), generator=random))]
    if isinstance(batch, Tensor):
        most = _at_once(batch)
        if len(batch) > most:
            batch = batch[torch.randperm(len(batch), generator=random)[:most]]
        if batch.ndim == 4 and batch.is_floating_point():
            batch = varied(batch, random).contiguous(memory_format=torch.channels_last)
    if is_text(batch):
        batch = some_texts(batch, random)
    with undisturbed(original), outputs_of(original, replaced(small, original)) as layers:
        wanted = _answers(run_example(original, batch))
    with errors_of(small, layers) as errors:
        given = _answers(run_example(small, batch))
    loss = divergence_loss(original, wanted, given)
    if loss is None:
        parts = [(a.float() - b.to(a.device).float()).square().sum() for a, b in zip(given, wanted, strict=True)]
        loss = torch.stack(parts).sum() / (len(wanted[0]) * lesson.scale)
    if errors:
        loss = loss + torch.stack(errors).mean()
    optimiser.zero_grad()
    torch.autograd.backward(loss)
    optimiser.step()
    return float(loss.detach())


def _at_once(batch: Tensor) -> int:
    """So many samples make a batch."""
    each = max(1, batch[0].numel()) if batch.ndim else 1
    return max(SMALLEST, min(BATCH, PIXELS // each)) if batch.ndim == 4 else BATCH


def varied(images: Tensor, random: torch.Generator) -> Tensor:
    """B×C×H×W → the same shape: half of the images mirrored, all moved, half of them mixed with another one."""
    mirrored = torch.rand(len(images), generator=random) < 0.5
    share = torch.rand(len(images), generator=random)
    share[torch.rand(len(images), generator=random) < 0.5] = 1
    other = torch.randperm(len(images), generator=random).to(images.device)
    images = torch.where(mirrored[:, None, None, None].to(images.device), images.flip(-1), images)
    images = moved(images, random)
    mixed: Tensor = images.lerp(images[other], (1 - share)[:, None, None, None].to(images))
    return mixed


def moved(images: Tensor, random: torch.Generator) -> Tensor:
    """The same shape: each image moved by up to H // MOVE rows and W // MOVE columns, what lies beyond is reflected."""
    height, width = images.shape[-2:]
    down, right = height // MOVE, width // MOVE
    views = F.pad(images, (right, right, down, down), mode="reflect").unfold(2, height, 1).unfold(3, width, 1)
    rows, columns = (
        torch.randint(2 * most + 1, (len(images),), generator=random).to(images.device) for most in (down, right)
    )
    found: Tensor = views[torch.arange(len(images), device=images.device), :, rows, columns]
    return found


def _pieces(original: nn.Module, data: Data) -> tuple[list[Example], float]:
    """Inputs, and the variance of what the original network says to them; plain tensors become one to draw from."""
    found: list[Example] = []
    answers: list[list[Tensor]] = []
    with undisturbed(original):
        for batch in batches(data):
            found.append(batch)
            if answers and logits_in(original, answers[0]) is not None:
                continue  # the divergence needs no scale, and the logits of all texts no memory
            answers.append([t.clone() for t in _answers(run_example(original, batch))])
    check_some(len(found))
    if not answers[0]:
        raise RankwiseError("the network gives no numbers to learn from: recovery needs outputs that are tensors")
    plain = [b for b in found if isinstance(b, Tensor)]
    alike = len(plain) == len(found) and len({b.shape[1:] for b in plain}) == 1
    return [torch.cat(plain)] if alike else found, _variance(answers)


def _answers(output: object) -> list[Tensor]:
    return [t for t in tensors_of(output) if t.is_floating_point() and t.ndim]


def _variance(answers: list[list[Tensor]]) -> float:
    """Of an input's outputs, summed over their entries."""
    total = 0.0
    for parts in zip(*answers, strict=True):
        whole = torch.cat([p.reshape(len(p), -1) for p in parts]).double()
        total += float(whole.var(dim=0, unbiased=False).sum()) or float(whole.square().mean(dim=0).sum())
    return max(total, 1e-300)
