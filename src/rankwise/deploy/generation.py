"""Tokens per second of networks that write text: one sequence, with a cache of keys and values.

Reading the prompt (prefill) and writing token by token (decode) are timed apart: the first multiplies matrices with
matrices, the second with single vectors, so what helps one may hurt the other. Networks take turns, so that a busy
machine slows all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rankwise.data.tokens import CAUSAL, most_tokens, role_of, takes_text, text_config

PROMPT, WRITTEN = 128, 64  # tokens


@dataclass(frozen=True)
class Speed:
    """Seconds of reading the prompt, and of writing one token; a value for each round."""

    prefill: tuple[float, ...]
    decode: tuple[float, ...]

    def to_json(self, prompt: int) -> dict[str, float]:
        """Tokens per second, by the median round."""
        read, written = statistics.median(self.prefill), statistics.median(self.decode)
        return {"prefill": prompt / read, "decode": 1 / written}


def writes_text(network: nn.Module) -> bool:
    """Whether a network predicts the next token and keeps a cache."""
    can = getattr(network, "can_generate", lambda: False)
    return takes_text(network) and bool(can()) and role_of(network) == CAUSAL


def speeds(networks: Sequence[nn.Module], rounds: int = 9, prompt: int = PROMPT) -> tuple[list[Speed], int, int]:
    """The speed of every network, and how many tokens were read and written in a round; one round is not counted."""
    most = min(most_tokens(network) or PROMPT + WRITTEN for network in networks)
    prompt = max(1, min(prompt, most - most // 3))
    written = min(WRITTEN, most - prompt)
    vocabulary = int(text_config(networks[0]).vocab_size)
    tokens = torch.randint(vocabulary, (1, prompt + written), generator=torch.Generator().manual_seed(0))
    found: list[tuple[list[float], list[float]]] = [([], []) for _ in networks]
    for number in range(rounds + 1):
        for network, (read, wrote) in zip(networks, found, strict=True):
            first, each = _round(network, tokens, prompt)
            if number:
                read.append(first)
                wrote.append(each)
    return [Speed(tuple(read), tuple(wrote)) for read, wrote in found], prompt, written


@torch.inference_mode()
def _round(network: Any, tokens: torch.Tensor, prompt: int) -> tuple[float, float]:
    """Seconds of the prompt, and the median of those of a token. What is written is given: all networks do the same."""
    start = time.perf_counter()
    said = network(input_ids=tokens[:, :prompt], use_cache=True)
    read = time.perf_counter() - start
    steps = []
    for at in range(prompt, tokens.shape[1]):
        start = time.perf_counter()
        said = network(input_ids=tokens[:, at : at + 1], past_key_values=said.past_key_values, use_cache=True)
        steps.append(time.perf_counter() - start)
    return read, statistics.median(steps)


def compared(dense: nn.Module, small: nn.Module, rounds: int) -> dict[str, Any]:
    """Tokens per second of both networks, and the ratio of their times (below 1: the compressed one is faster).

    The ratio is the median over rounds of both, which ran one after the other: what else the machine does cancels.
    """
    (one, other), prompt, written = speeds([dense, small], rounds)
    found: dict[str, Any] = {"prompt": prompt, "written": written, "dense": one.to_json(prompt)}
    found["compressed"] = other.to_json(prompt)
    for part in ("prefill", "decode"):
        pairs = zip(getattr(other, part), getattr(one, part), strict=True)
        found[f"{part}_ratio"] = statistics.median(a / b for a, b in pairs)
    return found
