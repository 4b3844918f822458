"""Text for language models and sentence encoders.

    text:FILE        a text file; for encoders every line that is not blank is a sentence
    text:FOLDER      train.txt, val.txt, test.txt …
    jsonl:FILE       one JSON object in a line, its text under "text" (or "content", "sentence")
    parquet:FOLDER   as for images, with a column of that name and none with images

A network that predicts the next token gets windows of equal length: documents one behind the other, the token that ends
a text between them, cut without overlap; a rest that fills no window is left out. An encoder gets sentences, cut at the
length. Only sentences of equal length share a batch, so nothing is ever padded, and padding cannot enter statistics. A
network that reads and then writes (T5) reads the first half of a window and writes the second.

A single file is cut in order: the first 80 % are train (fit, calibration), then come 10 % val (stop) and 10 % test, so
that a network is never judged on what it was calibrated on. `all` is the whole file: what `evaluate` takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankwise.core import files
from rankwise.data.sources import column_of, holds_text, split_of
from rankwise.data.tokens import CAUSAL, ENCODER, Reader
from rankwise.errors import RankwiseError

KINDS = {"text": ".txt", "jsonl": ".jsonl"}
COLUMNS = ("text", "content", "sentence")
ALL = "all"
PIECE = 1 << 20  # characters that are tokenised at a time
# Shares of a single file, in order: where a part begins and ends.
PARTS = {
    **dict.fromkeys(("train", "fit", "calibration"), (0.0, 0.8)),
    **dict.fromkeys(("val", "stop"), (0.8, 0.9)),
    "test": (0.9, 1.0),
    ALL: (0.0, 1.0),
}

Share = tuple[float, float]  # where a part begins and ends
Row = dict[str, Tensor]  # the inputs of one sample, without the axis of a batch


@dataclass(frozen=True, eq=False)
class TextSplit:
    """One split of a text as a network takes it. `predicts`: its targets are tokens, so there is a perplexity."""

    name: str
    split: str
    rows: tuple[Row, ...]
    predicts: bool
    length: int

    def __len__(self) -> int:
        return len(self.rows)

    def batches(self, batch_size: int) -> Iterator[tuple[Row, Tensor]]:
        """(inputs, targets) over every row once; a batch holds rows of one length, so there is no padding.

        Inputs are {"input_ids": int64 B×T} (and "decoder_input_ids"). Targets are int64, one for each position of the
        network's output, -100 where there is none.
        """
        if batch_size < 1:
            raise RankwiseError(f"batch size {batch_size} was given: give 1 or more")
        alike: dict[tuple[int, ...], list[Row]] = {}
        for row in self.rows:
            alike.setdefault(tuple(len(value) for value in row.values()), []).append(row)
        for group in alike.values():
            for start in range(0, len(group), batch_size):
                some = group[start : start + batch_size]
                inputs = {key: torch.stack([row[key] for row in some]) for key in some[0] if key != "labels"}
                yield inputs, torch.stack([_targets(row) for row in some])

    def subset(self, positions: Tensor) -> TextSplit:
        return replace(self, rows=tuple(self.rows[int(i)] for i in positions))

    def thin(self, count: int) -> TextSplit:
        """`count` evenly spaced rows."""
        if count < 1:
            raise RankwiseError(f"{count} inputs were asked for: ask for 1 or more")
        count = min(count, len(self))
        return self.subset(torch.arange(count) * len(self) // count)


def _targets(row: Row) -> Tensor:
    """What should come at every position: given, or the next token, and nothing after the last one."""
    if "labels" in row:
        return row["labels"]
    return torch.cat((row["input_ids"][1:], torch.tensor([-100])))


def is_text(spec: str) -> bool:
    """Whether a specification names text; a parquet folder does if it has a column of text and none of images."""
    kind, _, place = spec.partition(":")
    return kind in KINDS or (kind == "parquet" and holds_text(place, COLUMNS))


def default_split(spec: str) -> str:
    """What is scored unless a split is named: test, or all of a single file."""
    kind, _, place = spec.partition(":")
    return ALL if kind in KINDS and not os.path.isdir(place) else "test"


def load_text(spec: str, split: str, reader: Reader, length: int | None = None) -> TextSplit:
    """A split of the text that `spec` names, as the network of the reader takes it."""
    length = reader.length(length)
    documents, (first, last) = _find(spec, split)
    texts = documents()
    if reader.role == ENCODER:
        lines = (line for text in texts for line in text.splitlines()) if spec.startswith("text:") else texts
        rows = _sentences(lines, reader, length)
    else:
        rows = (_windows if reader.role == CAUSAL else _halves)(texts, reader, length)
    rows = rows[round(first * len(rows)) : round(last * len(rows))]
    if not rows:
        what = "sentences" if reader.role == ENCODER else f"windows of {length} tokens"
        raise RankwiseError(
            f"{spec} is too short: its split {split} has no {what}; give more text, another split, or a smaller length"
        )
    return TextSplit(spec, split, tuple(rows), reader.role != ENCODER, length)


def _find(spec: str, split: str) -> tuple[Callable[[], Iterator[str]], Share]:
    """How to read the documents of a split, and which share of what is read belongs to it."""
    kind, _, place = spec.partition(":")
    path, ending = Path(place), KINDS.get(kind, ".parquet")
    if kind != "parquet" and os.path.isfile(path):
        return lambda: _documents(kind, path), _share(spec, split, ())[1]
    if not os.path.isdir(path):
        raise RankwiseError(f"there is no file {place}: give a {ending} file, or a folder with train{ending}")
    found: dict[str, list[Path]] = {}
    for file in sorted(path.rglob(f"*{ending}")):
        found.setdefault(split_of(file), []).append(file)
    if not found:
        raise RankwiseError(f"{place} holds no {ending} file: give a folder with train{ending}, test{ending}")
    if not set(found) & {"train", "val", "test"}:
        found = {"": [file for some in found.values() for file in some]}
    name, share = _share(spec, split, tuple(found))
    return lambda: (text for file in found[name] for text in _documents(kind, file)), share


def _share(spec: str, split: str, names: tuple[str, ...]) -> tuple[str, Share]:
    """The files that hold a split, and the share of them that it is; `names` are those that a folder has."""
    if len(names) < 2 and split in PARTS:
        return "".join(names), PARTS[split]
    wanted = {"fit": "train", "calibration": "train", "stop": "val"}.get(split, split)
    if wanted == "test" and "test" not in names and "val" in names:
        wanted = "val"
    own_val = "val" in names
    if wanted in names:
        return wanted, (0.0, 0.9) if wanted == "train" and not own_val else (0.0, 1.0)
    if wanted == "val" and "train" in names:
        return "train", (0.9, 1.0)
    known = PARTS if len(names) < 2 else sorted({*names, *(("val", "calibration") if "train" in names else ())})
    raise RankwiseError(f"{spec} has no split {split!r}: it has {', '.join(known)}")


def _documents(kind: str, path: Path) -> Iterator[str]:
    if kind == "parquet":
        yield from column_of(path, COLUMNS)
        return
    try:
        with path.open(encoding="utf-8") as file:
            yield from (_json_lines(path, file) if kind == "jsonl" else [file.read()])
    except (OSError, UnicodeDecodeError) as err:
        raise RankwiseError(f"{path} could not be read ({err}): give a text file in UTF-8") from None


def _json_lines(path: Path, lines: Any) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            found = json.loads(line)
        except ValueError as err:
            raise RankwiseError(f"{where} is not JSON ({err}): give one object in each line") from None
        values = [found[key] for key in COLUMNS if key in found] if isinstance(found, dict) else []
        if not values:
            raise RankwiseError(f'{where} has no text: give objects such as {{"{COLUMNS[0]}": "…"}}')
        yield files.typed(values[0], str, f"the text in {where}")


def _stream(documents: Iterator[str], reader: Reader) -> Tensor:
    """All tokens in a row."""
    found: list[int] = list(reader.first)
    for number, document in enumerate(documents):
        found += reader.between if number else []
        for piece in _pieces(document):
            found += reader.tokens(piece)
    return torch.tensor(found, dtype=torch.int64)


def _pieces(text: str) -> Iterator[str]:
    """Long texts in pieces that end with a line: no tokenizer joins what stands on both sides of a line's end."""
    while len(text) > PIECE:
        cut = text.rfind("\n", 0, PIECE) + 1 or PIECE
        yield text[:cut]
        text = text[cut:]
    yield text


def _windows(documents: Iterator[str], reader: Reader, length: int) -> list[Row]:
    tokens = _stream(documents, reader)
    whole = tokens[: len(tokens) // length * length].reshape(-1, length)
    return [{"input_ids": window} for window in whole]


def _halves(documents: Iterator[str], reader: Reader, length: int) -> list[Row]:
    """The first half of a window is read, and the second written: its tokens, shifted by one, go into the decoder."""
    found = []
    ends = torch.tensor(reader.between, dtype=torch.int64)
    for row in _windows(documents, reader, length):
        reads, writes = row["input_ids"].tensor_split(2)
        shifted = torch.cat((torch.tensor([reader.start]), writes[:-1]))
        found.append({"input_ids": torch.cat((reads, ends)), "decoder_input_ids": shifted, "labels": writes})
    return found


def _sentences(texts: Iterable[str], reader: Reader, length: int) -> list[Row]:
    found = []
    for text in filter(str.strip, texts):
        tokens = reader.tokenizer(text.strip(), truncation=True, max_length=length)["input_ids"]
        found.append({"input_ids": torch.tensor(tokens, dtype=torch.int64)})
    return found
