"""A random Llama of a given shape, block by block: CPU seconds, time and memory from a folder to a folder.

    python benchmarks/large.py FOLDER --text FILE --tokenizer DIR [--shape tinyllama|7b] [--layers N] [--windows N]
        [--length N] [--keep K] [--workers N] [--kill-after S]

Writes the network (bfloat16, several files) to FOLDER/net, if it is not there, and runs `rankwise compress --blocks` in
a process of its own. With fewer layers than the shape has, seconds of a block and of the rest are told apart by when
the parts of the table were written, and all layers are extrapolated. Weights are random: what this measures is the
cost, not the quality. DIR has the tokenizer, of at most 32,000 tokens. Memory is the peak of all processes of the job:
all of it, and of that what is not pages of mapped files, which the system may forget. With --kill-after the process is
killed (kill -9) once it has taken S CPU seconds, and the same command is run again: what is said of both is their sum.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from common import machine, say
from safetensors.torch import save_file
from transformers import LlamaConfig

SHAPES = {
    "tinyllama": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_key_value_heads": 32},
}
VOCABULARY = 32_000
BESIDE = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model")


def make(folder: Path, shape: str, layers: int, tokenizer: Path) -> None:
    """One file for each block, and one for what surrounds them."""
    folder.mkdir(parents=True)
    config = LlamaConfig(
        **{**SHAPES[shape], "num_hidden_layers": layers},
        vocab_size=VOCABULARY,
        num_attention_heads=32,
        max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    d, m = config.hidden_size, config.intermediate_size
    kv = d // 32 * config.num_key_value_heads
    sizes = {"self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d)}
    sizes |= {"self_attn.o_proj": (d, d), "mlp.gate_proj": (m, d), "mlp.up_proj": (m, d), "mlp.down_proj": (d, m)}
    random, places = torch.Generator().manual_seed(0), {}

    def drawn(*size: int) -> torch.Tensor:
        return (0.02 * torch.randn(size, generator=random)).to(torch.bfloat16)

    for i in range(layers + 1):
        prefix, ones = f"model.layers.{i}.", torch.ones(d, dtype=torch.bfloat16)
        if i < layers:
            part = {f"{prefix}{name}.weight": drawn(*size) for name, size in sizes.items()}
            part |= {f"{prefix}{name}.weight": ones.clone() for name in ("input_layernorm", "post_attention_layernorm")}
        else:
            part = {name: drawn(VOCABULARY, d) for name in ("model.embed_tokens.weight", "lm_head.weight")}
            part["model.norm.weight"] = ones
        name = f"model-{i + 1:05}-of-{layers + 1:05}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for name in BESIDE:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder / name)


def processes(pid: int) -> list[Path]:
    """A process and those that it started, in /proc."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{pid}"), *(found for child in children for found in processes(int(child)))]


def memory(process: Path) -> dict[str, float]:
    """GiB in memory now, by kind; pages that several processes share are shared out among them."""
    lines = (process / "smaps_rollup").read_text().splitlines()[1:]
    found = dict(line.split(":", 1) for line in lines)
    return {key: int(found[key].split()[0]) / 2**20 for key in ("Pss", "Pss_Anon")}


def seconds(process: Path) -> float:
    """CPU seconds of a process so far, and of those that it started and that have ended."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--windows", default="16")
    parser.add_argument("--length", default="128")
    parser.add_argument("--keep", default="0.8")
    parser.add_argument("--workers")
    parser.add_argument("--kill-after", type=float, default=math.inf, metavar="S")
    args = parser.parse_args()
    layers = args.layers or SHAPES[args.shape]["num_hidden_layers"]
    net, out = args.folder / "net", args.folder / "out"
    if not net.exists():
        make(net, args.shape, layers, args.tokenizer)
    size = sum(path.stat().st_size for path in net.glob("*.safetensors"))
    say(f"{args.shape}, {layers} layers, {size / 1e9:.2f} GB; {machine()}")
    command = [sys.executable, "-m", "rankwise", "compress", f"hf:{net}", "--blocks", "--keep", args.keep]
    command += ["--data", f"text:{args.text}", "--calibrate", args.windows, "--input", args.length]
    command += ["--workers", args.workers] if args.workers else []
    watch = Watch(out.with_name(f"{out.name}.blocks"))
    status = watch.run([*command, "--out", str(out), "--no-report"], args.kill_after)
    if status == -signal.SIGKILL:
        say(f"killed after {watch.spent:.0f} CPU s, with {len(watch.seen)} parts done; the same command again:")
        status = watch.run([*command, "--out", str(out), "--no-report"])
    watch.tell(status, layers, SHAPES[args.shape]["num_hidden_layers"])


@dataclass
class Watch:
    """What a job takes, looked up once a second; and after how many CPU seconds each part was `seen` on disk."""

    folder: Path
    begin: float = field(default_factory=time.time)
    spent: float = 0.0
    peak: dict[str, float] = field(default_factory=lambda: {"Pss": 0.0, "Pss_Anon": 0.0})
    seen: dict[str, float] = field(default_factory=dict)

    def run(self, command: list[str], kill_after: float = math.inf) -> int:
        before = self.spent
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                self.look(process.pid, before)
                if self.spent - before > kill_after:
                    process.kill()
                time.sleep(1)
        return process.returncode

    def look(self, pid: int, before: float) -> None:
        try:
            every = processes(pid)
            self.spent = max(self.spent, before + sum(map(seconds, every)))
            found = [memory(process) for process in every]
        except OSError:
            return  # one has just ended
        self.peak = {key: max(most, sum(one[key] for one in found)) for key, most in self.peak.items()}
        for path in self.folder.rglob("*.safetensors"):
            if path.name.startswith(("table-", "pairs-", "given-", "ours-")):
                self.seen.setdefault(path.stem, self.spent)

    def tell(self, status: int, layers: int, every: int) -> None:
        say(f"exit status {status}, {time.time() - self.begin:.0f} s, {self.spent:.0f} CPU s")
        say(f"peak of memory {self.peak['Pss']:.2f} GiB, without mapped files {self.peak['Pss_Anon']:.2f} GiB")
        starts = ("given-", "table-block", "pairs-")
        kinds = [[t for name, t in self.seen.items() if name.startswith(start)] for start in starts]
        block = sum((max(times) - min(times)) / max(1, len(times) - 1) for times in kinds if times)
        say(f"a block takes {block:.1f} CPU s; with {every} of them {self.spent + (every - layers) * block:.0f} CPU s")


if __name__ == "__main__":
    main()
