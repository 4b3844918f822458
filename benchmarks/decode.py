"""Decode of a language model, dense beside compressed beside int8: tokens per second, bytes, perplexity, in one run.

    python benchmarks/decode.py hf:FOLDER DIR --data text:FILE [--windows 40] [--rounds 9]

FOLDER is the network as it was and DIR what `rankwise compress` made of it. int8 is torch's dynamic quantisation:
linear layers keep int8 weights and quantise what they get, row by row; the embedding stays as it is. All networks take
turns in every round on one thread, so a busy machine slows them alike; ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import copy
import io
import statistics
import warnings

import torch
from common import machine, say
from torch import nn

import rankwise as rw
from rankwise.deploy.generation import speeds


def int8(network: nn.Module) -> nn.Module:
    """Dynamic quantisation; an output layer that is tied to the embedding gets a weight of its own first."""
    own = copy.deepcopy(network)
    for module in own.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(own, {nn.Linear}, dtype=torch.qint8)


def size(network: nn.Module) -> int:
    """Bytes of its weights as torch writes them, tied ones once."""
    content = io.BytesIO()
    torch.save(network.state_dict(), content)
    return content.tell()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network")
    parser.add_argument("compressed")
    parser.add_argument("--data", required=True)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dense, small = rw.networks.build(given.network).eval(), rw.load(given.compressed).eval()
    every = {"dense": dense, "compressed": small, "int8": int8(dense), "compressed, int8": int8(small)}
    found, prompt, written = speeds(list(every.values()), given.rounds)
    say(f"{machine()}; one thread, {prompt} tokens read, {written} written, median of {given.rounds} rounds")
    say(f"{'':18}{'MB':>8}{'prefill/s':>12}{'decode/s':>10}{'decode time':>13}  perplexity")
    for (name, network), speed in zip(every.items(), found, strict=True):
        ratio = statistics.median(a / b for a, b in zip(speed.decode, found[0].decode, strict=True))
        rates, score = speed.to_json(prompt), rw.evaluate(network, given.data, limit=given.windows)
        say(
            f"{name:18}{size(network) / 1e6:8.1f}{rates['prefill']:12.0f}{rates['decode']:10.1f}{ratio:12.2f}×  "
            f"{score.perplexity:.2f} ± {score.perplexity_error:.2f}"
        )


if __name__ == "__main__":
    main()
