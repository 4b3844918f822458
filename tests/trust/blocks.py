"""A network that is compressed block by block, with what it puts aside beside its folder: `out.blocks`.

After a crash the result is not there or whole, and the same command goes on from what was put aside, whichever of its
files are there: it gives the same network, and leaves nothing behind.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

import rankwise as rw
from rankwise.cli.outcome import Wanted, compressed
from rankwise.compression import BlockCompression, Request
from rankwise.errors import RankwiseError
from rankwise.planning.table import Table
from rankwise.surgery import checkpoint
from trust.crash import Recorder, State
from trust.faults import Command, plain
from trust.writers import Violation, Writer, once, tensors

VOCABULARY = 32
LEFT_WHOLE = ("*self_attn*", "*gate_proj", "*up_proj", "lm_head", "model.embed_tokens")


@cache
def network() -> Any:
    """Two blocks; one layer of each is decomposed, so that few files are written."""
    import tiny_language as tiny

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 16}
    return tiny.llama(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False)


def texts() -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(VOCABULARY, (2, 6), generator=random)} for _ in range(4)]


def run(folder: Path) -> None:
    """What the command does behind its flags."""
    request = Request(exclude=LEFT_WHOLE)
    job = BlockCompression(network(), texts()[0], request, texts(), None, folder / "out.blocks")
    compressed(job, rw.Budget(params=0.9), None, Wanted(None, "test", False, False, folder / "out"))


def outcome(folder: Path) -> tuple[list[tuple[str, bytes]], str]:
    return tensors(rw.load(folder / "out", network())), checkpoint.read_plan(folder / "out").dumps()


_known: dict[str, object] = {}


def _prepare(folder: Path) -> None:
    other = folder.parent / "whole"
    other.mkdir()
    run(other)
    _known["outcome"] = outcome(other)


def _write(folder: Path, note: Recorder) -> None:
    run(folder)
    note.mark("done")


def _check_shelf(folder: Path) -> None:
    """A file that has its name is whole."""
    for path in folder.glob("*.safetensors"):
        if path.name.startswith("table-"):
            Table.load(path)
        else:
            load(path.read_bytes())


_whole = once(_check_shelf)


def _check(folder: Path, state: State) -> None:
    try:
        for place in [p for p in (folder / "out.blocks").rglob("*") if p.is_dir()]:
            _whole(place)
        there = (folder / "out" / "config.json").is_file() or (folder / "out" / "config.json.part").is_file()
        found = outcome(folder) if there else None
    except RankwiseError as err:
        if "done" in state.marks:
            raise Violation(f"it was written, and the reader says: {err}") from err
        return
    except Exception as err:
        raise Violation(f"a file has its name and is not whole: {type(err).__name__}: {err}") from err
    if found is None and "done" in state.marks:
        raise Violation("it was written, and it is gone")
    if found is not None and found != _known["outcome"]:
        raise Violation("it is another network")


def _go_on(folder: Path) -> None:
    run(folder)
    if outcome(folder) != _known["outcome"]:
        raise Violation("run again after the crash, it is another network")
    left = [p.name for p in folder.rglob("*") if ".part" in p.name or ".blocks" in p.name]
    if left:
        raise Violation(f"run again after the crash, {left} are left")


WRITER = Writer("compress, block by block", _prepare, _write, _check, _go_on)


# ---- failing operations ----------------------------------------------------------------------------------


def _folder(folder: Path) -> None:
    import tiny_language as tiny

    tiny.folder(folder / "net", network())
    (folder / "text.txt").write_text("\n".join(tiny.SENTENCE for _ in range(6)))


def _compress(*more: str) -> Any:
    how = ["--keep", "0.9", "--input", "6", "--calibrate", "4", "--no-report", "--blocks", *more]
    how += [word for name in LEFT_WHOLE for word in ("--exclude", name)]

    def arguments(folder: Path) -> list[str]:
        data = ["--data", f"text:{folder / 'text.txt'}", "--out", str(folder / "out")]
        return ["compress", f"hf:{folder / 'net'}", *how, *data]

    return arguments


def _outcome(folder: Path) -> object:
    """The network; None before. What was put aside may stay where nothing can be removed; the next run removes it."""
    if not (folder / "out").is_dir() or not any((folder / "out").iterdir()):
        return None
    weights, plan = outcome(folder)
    return weights, plain(plan, folder)


COMMAND = Command("compress, block by block", _folder, _compress(), _compress("--force"), _outcome)
