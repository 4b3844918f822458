"""Reading JSON that may have been edited by hand or made by a stranger: every doubt is one sentence."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rankwise.core.disk import make_folder as make_folder
from rankwise.core.disk import why
from rankwise.core.disk import write_together as write_together
from rankwise.core.disk import write_whole as write_whole
from rankwise.errors import RankwiseError

LIMIT = 1 << 28  # bytes of a text file: a plan of 100,000 layers has a tenth of it
DEEPEST = 100  # lists and objects within each other; ours have ten at most, and who walks through them has frames

_NAMES = {dict: "an object", list: "a list", str: "a string", int: "a whole number", float: "a number"}


def parse(text: str | bytes, where: str) -> dict[str, Any]:
    """JSON text → object. What could not be written again (NaN, half a character, absurd numbers) is refused too.

    So is a key that stands twice in an object, where two readers may see two values.
    """
    try:
        data = json.loads(text, parse_int=_whole, object_pairs_hook=_object)
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
        _check_depth(text, data)
    except (ValueError, RecursionError) as err:
        reason = "it is nested too deeply" if isinstance(err, RecursionError) else str(err)
        raise RankwiseError(f"{where} is not readable JSON ({reason}): restore it or write it again") from None
    if not isinstance(data, dict):
        raise RankwiseError(f"{where} must hold a JSON object, and it holds {_name_of(data)}")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {_name_of(twice)} stands twice in one object")
    return found


def _check_depth(text: str | bytes, data: Any) -> None:
    """What is deeper could be read here and still be a traceback wherever it is copied or written."""
    signs: tuple[Any, Any] = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, signs)) <= DEEPEST:
        return  # as in nearly every file: no need to walk
    level = [data]
    for _ in range(DEEPEST):
        inner = [value.values() if isinstance(value, dict) else value for value in level if type(value) in (dict, list)]
        level = [value for values in inner for value in values]
        if not level:
            return
    raise RecursionError


def _whole(digits: str) -> int:
    if len(digits) > 30:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def read(path: Path, limit: int | None = LIMIT) -> bytes:
    """The content of a file; a device or a pipe, which may never end, is none."""
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            return _content(file, limit)
        finally:
            os.close(file)
    except (OSError, ValueError, MemoryError) as err:  # ValueError: also a name that no file can have
        raise RankwiseError(f"{path} could not be read ({why(err)}): check the path") from None


def _content(file: int, limit: int | None) -> bytes:
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is a folder" if stat.S_ISDIR(about.st_mode) else "it is no ordinary file")
    if limit is not None and about.st_size > limit:
        raise ValueError(f"it has {about.st_size:,} bytes, and at most {limit:,} are read")
    with open(file, "rb", closefd=False) as opened:
        return opened.read()


def field(data: dict[str, Any], key: str, kind: type, where: str) -> Any:
    """data[key], which must be there and of that kind; true and false are not numbers."""
    if key not in data:
        raise RankwiseError(f"{where} has no {key!r}")
    return typed(data[key], kind, f"{key!r} of {where}")


def typed(value: object, kind: type, where: str) -> Any:
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise RankwiseError(f"{where} must be {_NAMES.get(kind, kind.__name__)}, and it is {_name_of(value)}")
    if kind is float and isinstance(value, int) and abs(value) > sys.float_info.max:
        raise RankwiseError(f"{where} is a whole number of {value.bit_length():,} bits: give a smaller one")
    return value


def strict(data: dict[str, Any], known: Iterable[str], where: str) -> None:
    """Refuse unknown keys: a misspelt setting must not be silently without effect."""
    known = set(known)
    unknown = sorted(set(data) - known)
    if unknown:
        raise RankwiseError(f"{where} has the unknown key {_name_of(unknown[0])}; known are {', '.join(sorted(known))}")


def whole_numbers(value: object, where: str) -> tuple[int, ...]:
    return tuple(typed(v, int, f"every entry of {where}") for v in typed(value, list, where))


def check_format(data: dict[str, Any], ours: int, where: str) -> None:
    """A reader of a newer format says so instead of guessing."""
    theirs = field(data, "format", int, where)
    if theirs > ours:
        raise RankwiseError(
            f"{where} has format {theirs} and this rankwise reads up to {ours}: upgrade rankwise to open it"
        )
    if theirs < 1:
        raise RankwiseError(f"{where} has format {theirs}, which never existed: restore it or write it again")


def _name_of(value: object) -> str:
    if isinstance(value, str | int | float | bool | None):
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "..."
    return _NAMES.get(type(value), type(value).__name__)
