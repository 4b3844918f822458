"""Two small language models, trained on a text in some minutes, with a tokenizer of their own: folders for language.py.

    python benchmarks/small_language.py gpt2|llama --networks DIR --text DIR [--epochs N]

`gpt2` has learned positions, Conv1D and a tied head; `llama` has grouped queries and a head of its own. The text is
tinystories-calibration.txt without the windows that language.py --held-out scores.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from common import machine, say
from language import LENGTH, WINDOWS
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, WIDTH, LAYERS, HEADS = 2048, 192, 4, 6
SCORED = 40  # windows
BATCH, RATE = 16, 2e-3


def gpt2() -> Any:
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, bos_token_id=0, eos_token_id=0))


def llama() -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, bos_token_id=0, eos_token_id=0)
    config.tie_word_embeddings = False
    return LlamaForCausalLM(config)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train_(model: Any, tokens: Tensor, epochs: int) -> None:
    """AdamW, the rate up in a twentieth of the steps and down again as a cosine."""
    steps = epochs * (len(tokens) // BATCH)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, betas=(0.9, 0.95))
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda i: min(1.0, 20 * (i + 1) / steps) * 0.5 * (1 + math.cos(math.pi * i / steps))
    )
    for step in range(steps):
        if step % (len(tokens) // BATCH) == 0:
            order = torch.randperm(len(tokens))
        batch = tokens[order[step % (len(tokens) // BATCH) * BATCH :][:BATCH]]
        optimiser.zero_grad()
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        rates.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("network", choices=("gpt2", "llama"))
    parser.add_argument("--networks", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = (args.text / "tinystories-calibration.txt").read_text()
    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator(text.splitlines(), VOCABULARY, special_tokens=["<end>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learned, eos_token="<end>", bos_token="<end>")
    ids = torch.tensor(tokenizer(text)["input_ids"])
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    held = windows[WINDOWS : WINDOWS + SCORED]
    model = {"gpt2": gpt2, "llama": llama}[args.network]()
    start = time.process_time()
    train_(model, torch.cat([windows[:WINDOWS], windows[WINDOWS + SCORED :]]), args.epochs)
    model.eval()
    with torch.no_grad():
        perplexity = math.exp(sum(float(loss_of(model, part)) for part in held.split(8)) / len(held.split(8)))
    size = sum(p.numel() for p in model.parameters())
    say(f"{args.network}: {size:,} parameters, {len(windows)} windows; {machine()}")
    say(f"perplexity on held-out text {perplexity:.2f}, {time.process_time() - start:.0f} CPU s")
    model.save_pretrained(args.networks / args.network)
    tokenizer.save_pretrained(args.networks / args.network)


if __name__ == "__main__":
    main()
