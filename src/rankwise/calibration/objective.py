"""Which change of a network's outputs counts: numbers as they are, or the probabilities of the next token.

*Outputs.* E ‖Δ out‖² relative to the variance of the outputs over inputs. v ~ N(0, 1) makes E (v · Δ out)² of it.

*Nats.* A network that ends in a vocabulary gives logits, and most of its 32,000 numbers do not matter: what changes is
the distribution p = softmax(logits) at every position. To second order its Kullback–Leibler divergence is

    KL(p ‖ p + Δp) ≈ ½ δᵀ F δ,   F = diag(p) − p pᵀ,

for a change δ of the logits. Of p only the TOP largest entries are taken, p = S q with Σ q = 1 among them, and
v = √S (√q ⊙ z − q (√q · z)) with z ~ N(0, 1) has E[v vᵀ] = F. So the same gradients serve both: v is drawn otherwise,
and the unit is nats for each position, which is what is added to the loss (log-perplexity) of a well-trained network.

A network ends in a vocabulary if the last axis of its first output is as long as its largest embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rankwise.surgery.forward import Example, tensors_of

TOP = 256


def vocabulary(model: nn.Module) -> int:
    """How many tokens the largest embedding of a network has; 0 where there is none."""
    return max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)


def logits_in(model: nn.Module, answer: list[Tensor]) -> Tensor | None:
    """The logits (…, vocabulary) among a network's outputs, if it ends in its vocabulary."""
    first = next((t for t in answer if t.ndim > 1 and t.is_floating_point()), None)
    return first if first is not None and first.shape[-1] == vocabulary(model) else None


def is_text(batch: Example) -> bool:
    """Whether a network gets nothing but whole numbers: tokens, their types, masks."""
    found = tensors_of(batch)
    return bool(found) and not any(t.is_floating_point() for t in found)


def by_token(batch: Example, answer: list[Tensor]) -> bool:
    """Whether a network answers to each token of a text: nothing averages over positions behind its layers."""
    first = next((t for t in answer if t.is_floating_point()), None)
    if first is None or first.ndim < 3 or not is_text(batch):
        return False
    return any(t.shape == first.shape[:2] for t in tensors_of(batch))


def pull_of_probabilities(logits: Tensor, random: torch.Generator) -> Tensor:
    """v of the shape of the logits, with E[v vᵀ] = F at every position."""
    given = logits.detach().float()
    values, places = given.topk(min(TOP, given.shape[-1]), dim=-1)
    share = (values.logsumexp(-1, keepdim=True) - given.logsumexp(-1, keepdim=True)).exp()
    q = values.softmax(-1)
    root = q.sqrt() * torch.randn(q.shape, generator=random).to(q)
    drawn = share.sqrt() * (root - q * root.sum(-1, keepdim=True))
    found: Tensor = torch.zeros_like(given).scatter_(-1, places, drawn)
    return found.to(logits)


def divergence(wanted: Tensor, given: Tensor) -> float:
    """Σ over positions of KL(p ‖ p̂), in nats."""
    p, q = wanted.float().log_softmax(-1), given.to(wanted.device).float().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).double().sum())
