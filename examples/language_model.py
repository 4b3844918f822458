"""Tutorial 2: the smallest language model within a loss of perplexity. Calibrated on batches of tokens, no labels.

    python examples/language_model.py

A small GPT-2 learns the source of a Python module, letter by letter. A model of yours is used in the same way:
`AutoModelForCausalLM.from_pretrained(FOLDER)` in place of `trained()`, and batches from its tokenizer.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

import rankwise as rw

LENGTH = 64


def windows() -> tuple[Tensor, int]:
    """Windows of tokens of a text that every Python has, and the size of its alphabet."""
    text = inspect.getsource(argparse)
    letters = sorted(set(text))
    tokens = torch.tensor([letters.index(letter) for letter in text])
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH), len(letters)


def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
    """Cross entropy of every next token."""
    logits = net(input_ids=tokens).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def trained(tokens: Tensor, letters: int, steps: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        loss_type="ForCausalLMLoss", vocab_size=letters, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4
    )
    model = GPT2LMHeadModel(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = tokens[torch.randint(len(tokens), (24,))]
        optimiser.zero_grad()
        loss_of(model, batch).backward()
        optimiser.step()
    return model.eval()


def perplexity_on(tokens: Tensor) -> Callable[[nn.Module], float]:
    """The metric: from a network to a number. Lower is better, and `smallest` is told so."""

    @torch.no_grad()
    def perplexity(net: nn.Module) -> float:
        return float(loss_of(net, tokens).exp())

    return perplexity


def main(steps: int = 150) -> dict[str, float]:
    tokens, letters = windows()
    held_out, tokens = tokens[::10], torch.cat([tokens[i::10] for i in range(1, 10)])
    model = trained(tokens, letters, steps)
    metric = perplexity_on(held_out)
    batches = [{"input_ids": batch} for batch in tokens[:64].split(16)]  # what a data collator yields
    small, plan = rw.smallest(
        model,
        {"input_ids": tokens[:1]},
        metric,
        max_drop=0.5,
        higher_is_better=False,
        data=batches,
        exclude="lm_head",  # it is tied to the embedding
    )
    found = {"before": metric(model), "after": metric(small), "keep": plan.keep()}
    print(f"perplexity {found['before']:.2f} -> {found['after']:.2f}, {100 * found['keep']:.1f} % of the parameters")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    main(parser.parse_args().steps)
