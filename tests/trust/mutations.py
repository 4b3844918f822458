"""Mutations of the files that a stranger may give us. They know the form: JSON, TOML, headers of safetensors files.

A seed is taken apart once (where its values, keys and entries stand); a mutation then puts other bytes in some of these
places. So a mutation takes microseconds, and the time goes to the readers.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Mutate = Callable[[random.Random, bytes], bytes]
Change = tuple[int, int, bytes]  # from, to, what stands there instead

DEEP: Any = []
for _ in range(60):
    DEEP = [DEEP]
HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 10**9, -(10**9), 2**31, 2**63, 2**64, 10**29, 10**40, 0.0, -0.0, 0.5, 1e-300, 1e300,
    5e-324, "", "a", "x" * 300, "../../x", "/etc/passwd", "__class__", "__dict__", "con", "nul\0", "a\nb", "\u202eevil",
    "ﬀ", "e\u0301", "‮", "\ud800", "{}", "%s%n", "<script>alert(1)</script>", "$(id)", "f│chw", "svd", "params", [], {},
    [[]], [0], [-1], [10**9] * 3, {"": 0}, {"__class__": 1}, DEEP, [1, 2, 3, 4, 5, 6, 7, 8], "1e5", "NaN", "0x10",
    "file.py:factory", "hub:a", "\u200d", "\ufeff", "A\u0300" * 50, "١٢٣", "model-00001-of-00002.safetensors",
    "BF16", "F8_E4M3", "F4", "C64", "U64", "BOOL", "I8", [0, 2**63],
]  # fmt: skip


def _texts(value: Any) -> list[bytes]:
    """As JSON, with escapes and without."""
    return [json.dumps(value, ensure_ascii=e).encode(errors="surrogatepass") for e in (True, False)]


VALUES = [text for value in HOSTILE for text in _texts(value)]
VALUES += [b"[" * 600 + b"]" * 600, b'{"a":' * 600 + b"1" + b"}" * 600]  # what copies or writes it has frames for each
VALUES += [b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"-0", b"1E400", b"00", b"'a'", b"0.1e-400", b"\xff", b'"\\u00"']
KEYS = [text for value in HOSTILE if isinstance(value, str) for text in _texts(value)]
TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.S)
BYTES = [b"\0", b"\xff", b'"', b"{", b"[" * 50, b"9" * 50, b"\\ud800", b"1e999", b"]", b"\xed\xa0\x80", b"\xef\xbb\xbf"]


@dataclass(frozen=True)
class Form:
    """Where values, keys (with the value behind it) and whole entries of a container stand in a text."""

    values: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int], ...]
    entries: tuple[tuple[int, int], ...]


@lru_cache(20_000)
def form_of(data: bytes) -> Form:
    """In one pass over the tokens; what is no JSON has the places that look like it."""
    values, keys, entries = [], [], []
    stack: list[int] = []
    begins: list[int] = [0]  # of the entry under way in each open container
    last: tuple[int, int] | None = None
    for token in TOKENS.finditer(data):
        start, end, first = token.start(), token.end(), token[0][:1]
        if first in (b"{", b"["):
            stack.append(start)
            begins.append(end)
            last = None
        elif first in (b"}", b"]"):
            if len(begins) > 1 and start > begins[-1]:
                entries.append((begins[-1], start))
            if stack:
                begins.pop()
                values.append((stack.pop(), end))
        elif first == b",":
            entries.append((begins[-1], end))
            begins[-1] = end
        elif first == b":":
            if last is not None and values and values[-1] == last:
                keys.append(values.pop())
        else:
            last = (start, end)
            values.append(last)
    return Form(tuple(values), tuple(keys), tuple(entries))


def _number(draw: random.Random, text: bytes) -> bytes:
    try:
        value = json.loads(text)
        return json.dumps(value * draw.choice([-1, 0, 2, 0.5, 1e9]) + draw.choice([-1, 0, 1])).encode()
    except (ValueError, TypeError, OverflowError):
        return text


def _change(draw: random.Random, data: bytes, form: Form) -> Change:
    """One place: another value, away, twice, renamed, or what stands elsewhere."""
    kind = draw.random()
    if kind < 0.15 and form.keys:
        a, b = draw.choice(form.keys)
        return a, b, draw.choice(KEYS)
    if kind < 0.35 and form.entries:
        a, b = draw.choice(form.entries)
        piece = data[a:b]
        if kind < 0.25:
            return a, b, b""
        return a, a, piece if piece.endswith(b",") else piece + b","
    if not form.values:
        return 0, len(data), draw.choice(VALUES)
    a, b = draw.choice(form.values)
    if kind < 0.5 and b - a < 20:
        return a, b, _number(draw, data[a:b])
    if kind < 0.65:
        c, d = draw.choice(form.values)
        return a, b, data[c:d]
    return a, b, draw.choice(VALUES)


def mutate_json(draw: random.Random, data: bytes) -> bytes:
    form = form_of(data)
    changes = sorted(_change(draw, data, form) for _ in range(1 if draw.random() < 0.6 else draw.randrange(2, 5)))
    for a, b, piece in reversed(changes):  # where two overlap, the later one is of what is left
        data = data[:a] + piece + data[b:]
    return data


def mutate_bytes(draw: random.Random, data: bytes) -> bytes:
    content = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at, kind = int(draw.random() * (len(content) + 1)), int(5 * draw.random())
        if kind == 0 and content:
            content[at % len(content)] ^= 1 << int(8 * draw.random())
        elif kind == 1:
            del content[at : at + 1 + int(15 * draw.random())]
        elif kind == 2:
            content[at:at] = draw.randbytes(1 + int(7 * draw.random()))
        elif kind == 3:
            content[at:at] = content[at : at + 1 + int(39 * draw.random())]
        else:
            content[at:at] = draw.choice(BYTES)
    return bytes(content)


@dataclass(frozen=True)
class Parts:
    """A safetensors file taken apart: its header, what follows, and the texts in the header that are JSON."""

    header: bytes
    rest: bytes
    inner: tuple[tuple[int, int, bytes], ...]


@lru_cache(20_000)
def parts_of(data: bytes) -> Parts | None:
    if len(data) < 8:
        return None
    (size,) = struct.unpack("<Q", data[:8])
    if size > len(data) - 8:
        return None
    header = data[8 : 8 + size]
    inner = []
    for a, b in form_of(header).values:
        if header[a : a + 2] == b'"{':
            try:
                inner.append((a, b, json.loads(header[a:b]).encode(errors="surrogatepass")))
            except ValueError:
                continue
    return Parts(header, data[8 + size :], tuple(inner))


LENGTHS = (0, 1, 7, 2**31, 2**63, 2**64 - 1, 10**8, 10**8 + 1)


def mutate_safetensors(draw: random.Random, data: bytes) -> bytes:
    """The header as JSON, or the JSON that our own metadata hold as text; its length fits again, mostly."""
    parts = parts_of(data)
    if parts is None:
        return mutate_bytes(draw, data)
    if parts.inner and draw.random() < 0.7:
        a, b, text = draw.choice(parts.inner)
        changed = mutate_json(draw, text) if draw.random() < 0.8 else mutate_bytes(draw, text)
        header = parts.header[:a] + json.dumps(changed.decode(errors="replace")).encode() + parts.header[b:]
    else:
        header = mutate_json(draw, parts.header)
    length = len(header) if draw.random() < 0.9 else draw.choice((*LENGTHS, len(header) + 1, len(header) - 1))
    return struct.pack("<Q", max(0, length)) + header + parts.rest


WORDS = [
    b"nan", b"inf", b"-1", b"1e400", b"9" * 5000, b"[[", b"{", b'"""', b"'", b"1979-05-27", b"true", b"= =",
    b"[" * 200, b"0x" + b"f" * 400, b"[[network]]\n", b"keeps = {first = 0.9, last = 0.1, count = 1000000000}\n",
    b"keeps = {alpha = 0.9, count = 10000000000}\n", b"repeats = 1000000000000\n", b'methods = ["../../x"]\n', b"\0",
    b'model = "__class__"\n', b'weights = "/etc/passwd"\n', b"seed = 99999999999999999999999\n", b'data = "\\ud800"\n',
    b'"' + b"x" * 300 + b'"', b'"../../x"', b'"\\u202e"', b"0.5", b"[0.5]", b'["svd"]', b'{method = "svd"}', b"[]",
    b"{}", b'"file.py:factory"', b"2", b"0", b'"digits"', b'"timm:a"', b"[1, [2]]", b'{ epochs = 1e300 }', b"12:00:00",
    b"a" + b".a" * 300 + b" = 1\n", b"[a" + b".'='" * 300 + b"]\n",
]  # fmt: skip


def mutate_toml(draw: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    for _ in range(1 if draw.random() < 0.7 else 3):
        at, kind = draw.randrange(len(lines) or 1), draw.randrange(5)
        if not lines:
            lines = [draw.choice(WORDS)]
        elif kind == 0:
            lines.insert(at, draw.choice(lines))
        elif kind <= 2 and b"=" in lines[at]:
            key, _, value = lines[at].partition(b"=")
            rename = draw.random() < 0.2
            lines[at] = draw.choice(WORDS) + b" =" + value if rename else key + b"= " + draw.choice(WORDS)
        elif kind == 3:
            del lines[at]
        else:
            lines.insert(at, draw.choice(WORDS))
    return b"\n".join(lines)
