"""`auto` on a small Llama and on a sentence encoder, beside uniform SVD-LLM at the same number of parameters.

    python benchmarks/language.py stories15m|gpt2|llama|minilm --networks DIR --text DIR [--keep K ...]
        [--recover EFFORT] [--blocks] [--euclidean] [--tokens N] [--held-out] [--threads N]

DIR of networks holds the Hugging Face folders stories15m and minilm, and what small_language.py made (gpt2, llama); DIR
of text tinystories-{calibration,test}.txt and stsb-en-{train,dev}.csv. A language model is calibrated on 64 windows of
256 tokens and scored by perplexity on the first N tokens of the test text in windows of 256; MiniLM is calibrated on
256 sentences of the training pairs and scored by the Spearman correlation of cosines of mean-pooled states with the
given scores on the dev pairs. With --held-out the scores are on text behind the calibration text instead, for choices
between methods: nothing is chosen by the test text. Each row is one job from the model to the network, in CPU seconds
of one thread. --blocks adds a row of the same network, taken block by block. --euclidean adds one that minimises the
change of logits as they are, instead of probabilities.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import machine, say
from scipy.stats import spearmanr
from svd_llm import linear_layers, second_moments, svd_llm
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import rankwise as rw
from rankwise.compression import BlockCompression, Compression, Request

WINDOWS, LENGTH = 64, 256
SENTENCES = 256
BATCH = 8

Batch = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """A network, its calibration batches, and its score; `lost` is how the change of the score is stated."""

    model: nn.Module
    data: list[Batch]
    score: Callable[[nn.Module], float]
    lost: Callable[[float, float], float]
    said: str


def run(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(**batch)[0]
    return found


def language_model(args: argparse.Namespace) -> Task:
    folder = args.networks / args.network
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.config.use_cache = False
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def windows(name: str) -> Tensor:
        ids = torch.tensor(tokenizer((args.text / name).read_text())["input_ids"])
        return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)

    seen = windows("tinystories-calibration.txt")
    test = seen[WINDOWS:] if args.held_out else windows("tinystories-test.txt")
    test = test[: args.tokens // LENGTH]

    @torch.no_grad()
    def perplexity(network: nn.Module) -> float:
        lost = 0.0
        for part in test.split(BATCH):
            logits = run(network, {"input_ids": part})
            lost += float(F.cross_entropy(logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
        return math.exp(lost / (len(test) * (LENGTH - 1)))

    data = [{"input_ids": part} for part in seen[:WINDOWS].split(BATCH)]
    return Task(model, data, perplexity, lambda a, b: math.log(b / a), f"perplexity on {test.numel():,} tokens")


def minilm(args: argparse.Namespace) -> Task:
    folder = args.networks / "minilm"
    model = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    train = pairs(args.text / "stsb-en-train.csv")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    seen = [train[i][0] for i in order[:SENTENCES]]
    test = [train[i] for i in order[SENTENCES:][:1500]] if args.held_out else pairs(args.text / "stsb-en-dev.csv")

    def tokens(texts: list[str]) -> Batch:
        return dict(tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=128))

    @torch.no_grad()
    def encoded(network: nn.Module, texts: list[str]) -> Tensor:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        found: dict[int, Tensor] = {}
        for start in range(0, len(order), 32):
            some = order[start : start + 32]
            batch = tokens([texts[i] for i in some])
            mask = batch["attention_mask"][..., None].float()
            pooled = (run(network, batch) * mask).sum(1) / mask.sum(1)
            found.update(zip(some, pooled, strict=True))
        return torch.stack([found[i] for i in range(len(texts))])

    def spearman(network: nn.Module) -> float:
        one, other = (encoded(network, [pair[i] for pair in test]) for i in (0, 1))
        return float(spearmanr(F.cosine_similarity(one, other).numpy(), [pair[2] for pair in test])[0])

    by_length: dict[int, list[str]] = {}  # no padding: outputs there say nothing
    for text in seen:
        by_length.setdefault(len(tokenizer(text)["input_ids"]), []).append(text)
    data = [tokens(texts) for _, texts in sorted(by_length.items())]
    return Task(model, data, spearman, lambda a, b: a - b, f"Spearman on {len(test):,} pairs")


def pairs(path: Path) -> list[tuple[str, str, float]]:
    with path.open(newline="") as file:
        return [(one, other, float(score)) for one, other, score in csv.reader(file)]


TASKS = {**dict.fromkeys(("stories15m", "gpt2", "llama"), language_model), "minilm": minilm}


class Euclidean(nn.Module):
    """A language model whose answer is one number longer than its vocabulary: a zero, which no error can change.

    So nothing takes what it gives for the logits of a vocabulary, and `auto` minimises ‖Δ logits‖².
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        return (F.pad(run(self.network, {"input_ids": input_ids}), (0, 1)),)


def common_arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("network", choices=TASKS)
    parser.add_argument("--networks", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=10_240)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def main() -> None:
    parser = common_arguments()
    parser.add_argument("--keep", type=float, action="append")
    parser.add_argument("--recover", default="0")
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--euclidean", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    task = TASKS[args.network](args)
    before = task.score(task.model)
    say(f"{task.said}, before: {before:.4f}; {machine()}\n")
    say("| keep | method | params | score | lost | ÷ SVD-LLM's | stated | measured | CPU s |")
    say("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for keep in args.keep or [0.9, 0.8]:
        rows(task, before, keep, args)


def rows(task: Task, before: float, keep: float, args: argparse.Namespace) -> None:
    start, reference = time.process_time(), None
    total = sum(p.numel() for p in task.model.parameters())
    if linear_layers(task.model):  # GPT-2 has none
        small: nn.Module = svd_llm(task.model, second_moments(task.model, task.data, run), int(keep * total))
        reference = show(task, before, keep, "SVD-LLM", small, time.process_time() - start)
    for effort in dict.fromkeys(["0", args.recover]):
        start = time.process_time()
        job = Compression(task.model, task.data[0], Request(recover=effort), task.data)
        small, plan = job.run(rw.Budget(params=keep))
        spent = time.process_time() - start
        name = "auto" if effort == "0" else f"auto, recover {effort}"
        show(task, before, keep, name, small, spent, reference, plan)
    if args.euclidean:
        start = time.process_time()
        euclidean = Compression(Euclidean(task.model), task.data[0], Request(), task.data)
        whole, plan = euclidean.run(rw.Budget(params=keep))
        small = whole.get_submodule("network")
        show(task, before, keep, "auto, Euclidean logits", small, time.process_time() - start, reference, plan)
    if args.blocks:
        start = time.process_time()
        with TemporaryDirectory() as place:
            apart = BlockCompression(task.model, task.data[0], Request(), task.data, None, Path(place))
            small, plan = apart.run(rw.Budget(params=keep))
            show(task, before, keep, "auto, block by block", small, time.process_time() - start, reference, plan)


def show(
    task: Task,
    before: float,
    keep: float,
    name: str,
    small: nn.Module,
    spent: float,
    reference: float | None = None,
    plan: rw.Plan | None = None,
) -> float:
    score = task.score(small)
    lost = task.lost(before, score)
    share = "" if not reference else f"{lost / reference:.3f}"
    stated, measured = ("", "") if plan is None else (number(plan.search.stated), number(plan.search.measured))
    params = sum(p.numel() for p in small.parameters())
    say(f"| {keep} | {name} | {params:,} | {score:.4f} | {lost:.4f} | {share} | {stated} | {measured} | {spent:.1f} |")
    return lost


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    main()
