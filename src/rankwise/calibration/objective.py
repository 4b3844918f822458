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

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.surgery.forward import Example, tensors_of

TOP = 256
AT_ONCE = 1 << 20  # logits whose probabilities are computed together: what stays in a cache


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


@dataclass(frozen=True, eq=False)
class Pull:
    """v at some positions: the entries that are not zero (positions, TOP), and which tokens they are of."""

    values: Tensor
    places: Tensor
    shape: torch.Size  # of the logits

    def dense(self) -> Tensor:
        found: Tensor = self.values.new_zeros(len(self.values), self.shape[-1]).scatter_(-1, self.places, self.values)
        return found.reshape(self.shape)

    def squares(self) -> Tensor:
        """Σ v² over positions, for each token."""
        found = self.values.new_zeros(self.shape[-1])
        return found.index_add_(0, self.places.flatten(), self.values.square().flatten())

    def behind(self, weight: Tensor) -> Tensor:
        """vᵀW: the gradient at what a head with this weight gets."""
        found = F.embedding_bag(self.places, weight.float(), per_sample_weights=self.values, mode="sum")
        return found.reshape(*self.shape[:-1], -1)


def draw(logits: Tensor, random: torch.Generator) -> Pull:
    """v with E[v vᵀ] = F at every position."""
    rows = logits.detach().flatten(0, -2)
    found = [_largest(some) for some in torch.split(rows, max(1, AT_ONCE // rows.shape[-1]))]
    p, places = (torch.cat(parts) for parts in zip(*found, strict=True))
    share = p.sum(-1, keepdim=True)
    q = p / share
    root = q.sqrt() * torch.randn(q.shape, generator=random).to(q)
    return Pull(share.sqrt() * (root - q * root.sum(-1, keepdim=True)), places, logits.shape)


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, places = logits.float().log_softmax(-1).topk(min(TOP, logits.shape[-1]), dim=-1)
    return values.exp(), places


def pull_of_probabilities(logits: Tensor, random: torch.Generator) -> Tensor:
    """v of the shape of the logits."""
    return draw(logits, random).dense().to(logits)


def divergence(wanted: Tensor, given: Tensor) -> float:
    """Σ over positions of KL(p ‖ p̂), in nats."""
    size = max(1, AT_ONCE // wanted.shape[-1])
    both = zip(*(torch.split(t.to(wanted.device).flatten(0, -2), size) for t in (wanted, given)), strict=True)
    return sum(_divergence(p.float().log_softmax(-1), q.float().log_softmax(-1)) for p, q in both)


def _divergence(p: Tensor, q: Tensor) -> float:
    return float(F.kl_div(q, p, reduction="none", log_target=True).sum(-1).double().sum())
