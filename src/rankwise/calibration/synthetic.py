"""Synthetic inputs: images that give every batch norm the statistics it remembers from training.

Batch norms keep the mean and variance of what they saw. Starting from smooth noise, images are changed by gradient
descent until the statistics of the whole batch, at every batch norm, are close to those (Cai et al. 2020, "ZeroQ").
They look like nothing, and their covariances are close enough to those of real images to plan and to fit with.

A network without batch norms remembers nothing. What is left is that neighbouring pixels are alike: smooth noise tells
which directions a layer will see far better than none at all, but not their means, so nothing is fitted to it in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rankwise.errors import RankwiseError, out_of_memory
from rankwise.surgery.forward import Example, run_example, tensors_of, undisturbed
from rankwise.surgery.hooks import Seen, watching

STEPS = 50
MOST = 128  # images
BATCH = 64
WORK = 2e12  # multiply-adds to spend; larger networks get fewer images and steps
RATE = 0.2
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class NoInputs(RankwiseError):
    """No inputs can be made up for a network; the message is the reason, without a full stop."""


def synthetic_images(model: nn.Module, example: Example | None, macs: int | None, seed: int = 0) -> list[Tensor]:
    """Batches of images in the shape of the example that fit what the batch norms remember."""
    norms, like = norms_of(model), _image(example)
    if not norms:
        raise NoInputs("there is no batch norm that remembers statistics")
    each = _work(like, macs)
    steps = STEPS if WORK / each >= STEPS * 32 else STEPS // 2
    count = int(min(MOST, max(8, WORK // (each * steps))))
    random = torch.Generator().manual_seed(seed)
    found = []
    for size in [BATCH] * (count // BATCH) + ([count % BATCH] if count % BATCH else []):
        start = smooth_noise((size, *like.shape[1:]), random).to(next(model.parameters()))
        try:
            found.append(_improve(model, start, norms, steps))
        except (RankwiseError, RuntimeError) as err:  # it does not run on such a batch, or has no gradients
            if out_of_memory(err):
                raise
            raise _failed("synthetic inputs", err) from err
    if not all(bool(torch.isfinite(x).all()) for x in found):
        raise NoInputs("synthetic inputs could not be made (they do not stay finite)")
    return found


def noise(model: nn.Module, example: Example | None, macs: int | None, seed: int = 0) -> list[Tensor]:
    """Smooth noise in the shape of the example, for networks without batch norm: those have something better."""
    like = _image(example)
    if norms_of(model):
        raise NoInputs("noise is not what the batch norms remember")
    count = int(min(MOST, max(8, WORK // _work(like, macs))))
    random = torch.Generator().manual_seed(seed)
    whole = smooth_noise((count, *like.shape[1:]), random).to(next(model.parameters()))
    found = list(torch.split(whole, BATCH))
    try:
        with undisturbed(model):
            said = [t for x in found for t in tensors_of(run_example(model, x))]
    except RankwiseError as err:
        raise _failed("smooth noise", err) from err
    if not all(bool(torch.isfinite(t).all()) for t in said):
        raise NoInputs("smooth noise could not be used (the network's outputs on it are not finite)")
    return found


def norms_of(model: nn.Module) -> list[str]:
    """The names of batch norms that remember what they saw."""
    return [name for name, m in model.named_modules() if isinstance(m, NORMS) and m.running_mean is not None]


def _image(example: Example | None) -> Tensor:
    if example is None:
        raise NoInputs("no example input was given to make inputs like it")
    if not isinstance(example, Tensor) or not example.is_floating_point() or example.ndim != 4:
        raise NoInputs("the example input is not a batch of images, for which alone inputs can be made")
    return example


def _work(example: Tensor, macs: int | None) -> float:
    """Multiply-adds of one image, forward and backward."""
    if not macs:
        raise NoInputs("nothing is known of the network's multiply-adds")
    return 3 * macs / max(1, len(example))


def _failed(what: str, err: Exception) -> NoInputs:
    first = (str(err).splitlines() or [""])[0].rstrip(".")
    return NoInputs(f"{what} could not be made ({first or type(err).__name__})")


def smooth_noise(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Noise whose amplitude falls with the square of the frequency, variance 1 in each image: mostly large blobs."""
    height, width = shape[-2:]
    waves = torch.fft.rfft2(torch.randn(shape, generator=random))
    down, across = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None]
    frequency = (down.square() + across.square()).sqrt().clamp_min(1 / max(height, width))
    noise = torch.fft.irfft2(waves / frequency.square(), s=(height, width))
    scaled: Tensor = noise / noise.flatten(1).std(dim=1).clamp_min(1e-12).reshape(-1, 1, 1, 1)
    return scaled


def _improve(model: nn.Module, start: Tensor, norms: list[str], steps: int) -> Tensor:
    gaps: list[Tensor] = []

    def look(call: Seen) -> None:
        norm: Any = call.module
        axes = [a for a in range(call.given.ndim) if a != 1]
        mean, variance = call.given.mean(axes), call.given.var(axes, unbiased=False)
        deviation = (norm.running_var + norm.eps).sqrt()
        off = ((mean - norm.running_mean) / deviation).square() + ((variance + 1e-8).sqrt() / deviation - 1).square()
        gaps.append(off.mean())

    with undisturbed(model), torch.enable_grad(), watching(model, dict.fromkeys(norms, look)):
        images = start.clone().requires_grad_()
        optimiser = torch.optim.Adam([images], lr=RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(steps):
            gaps.clear()
            run_example(model, images)  # on a copy: a network may work in place
            if not gaps:
                raise NoInputs("no batch norm is called")
            (images.grad,) = torch.autograd.grad(torch.stack(gaps).mean(), [images])
            optimiser.step()
            schedule.step()
        return images.detach()
