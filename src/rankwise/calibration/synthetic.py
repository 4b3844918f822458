"""Inputs without data: images that give every batch norm the statistics it remembers from training.

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

from rankwise.surgery.forward import tensors_of, undisturbed
from rankwise.surgery.hooks import Seen, watching

STEPS = 50
MOST = 128  # images
BATCH = 64
WORK = 2e12  # multiply-adds to spend; larger networks get fewer images and steps
RATE = 0.2
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def imagine(model: nn.Module, example: Any, macs: int | None, seed: int = 0) -> list[Tensor] | None:
    """Batches of inputs in the shape of the example; None where a network has no batch norm to remember anything."""
    norms = _norms(model)
    if not norms or not _is_image(example) or not macs:
        return None
    each = 3 * macs / max(1, len(example))  # forward and backward
    steps = STEPS if WORK / each >= STEPS * 32 else STEPS // 2
    count = int(min(MOST, max(8, WORK // (each * steps))))
    random = torch.Generator().manual_seed(seed)
    like = next(model.parameters())
    found = []
    for size in [BATCH] * (count // BATCH) + ([count % BATCH] if count % BATCH else []):
        start = smooth_noise((size, *example.shape[1:]), random).to(like)
        try:
            found.append(_improve(model, start, norms, steps))
        except Exception:  # nobody asked for images: the weights will do
            return None
    return found if all(bool(torch.isfinite(x).all()) for x in found) else None


def noise(model: nn.Module, example: Any, macs: int | None, seed: int = 0) -> list[Tensor] | None:
    """Smooth noise in the shape of the example, for networks without batch norm; None for others, or if it fails."""
    if _norms(model) or not _is_image(example) or not macs:
        return None
    count = int(min(MOST, max(8, WORK // (3 * macs / max(1, len(example))))))
    random = torch.Generator().manual_seed(seed)
    whole = smooth_noise((count, *example.shape[1:]), random).to(next(model.parameters()))
    found = list(torch.split(whole, BATCH))
    try:
        with undisturbed(model):
            said = [t for x in found for t in tensors_of(model(x.clone()))]
    except Exception:  # nobody asked for images: the weights will do
        return None
    return found if all(bool(torch.isfinite(t).all()) for t in said) else None


def _norms(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, NORMS) and m.running_mean is not None]


def _is_image(example: Any) -> bool:
    return isinstance(example, Tensor) and example.is_floating_point() and example.ndim == 4


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
            model(images.clone())  # a network may work in place
            if not gaps:
                return start
            (images.grad,) = torch.autograd.grad(torch.stack(gaps).mean(), [images])
            optimiser.step()
            schedule.step()
        return images.detach()
