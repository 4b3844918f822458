"""Rows and plans in few bytes, for a page that holds ten thousand of them; nothing is lost on the way.

Rows become columns: a value that repeats is written once. Plans share what their layers have in common: of an entry
only the decision is written out, with the number of its layer (`heads`) and of its list of keys (`forms`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

_SAME = ("name", "kind", "shape", "before", "params", "reason")  # of a layer, in all plans of a network


def script_json(value: object) -> str:
    """JSON that may stand inside a <script>: no `<`, `>` or `&`, so that no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def columns(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One column for each key, one level deep; a key that a row does not have is null.

    A column is {"k": path} with "c", a constant, or "v" and "i", values and positions in them, or "d", the data.
    """
    paths = dict.fromkeys(path for row in rows for path, _ in _flat(row))
    table: dict[tuple[str, ...], list[Any]] = {path: [None] * len(rows) for path in paths}
    for at, row in enumerate(rows):
        for path, value in _flat(row):
            table[path][at] = value
    return [{"k": list(path), **_column(values)} for path, values in table.items()]


def _flat(row: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in row.items():
        if isinstance(value, dict) and key != "settings":
            yield from (((key, inner), v) for inner, v in value.items())
        else:
            yield (key,), value


def _column(values: list[Any]) -> dict[str, Any]:
    distinct: dict[str, int] = {}
    places = [distinct.setdefault(json.dumps(v), len(distinct)) for v in values]
    if len(distinct) == 1:
        return {"c": values[0]}
    if len(distinct) > len(values) // 2:
        return {"d": values}
    return {"v": [json.loads(text) for text in distinct], "i": places}


class Book:
    """Plans that share their layers. `add` gives a plan's number; the same plan twice is one."""

    def __init__(self) -> None:
        self.heads: dict[str, int] = {}
        self.forms: dict[str, int] = {}
        self.settings: dict[str, int] = {}
        self.plans: dict[str, int] = {}

    def add(self, plan: dict[str, Any]) -> int:
        layers = [self._entry(entry) for entry in plan["layers"]]
        rest = {k: v for k, v in plan.items() if k not in ("layers", "settings")}
        settings = _number(self.settings, plan.get("settings", {}))
        return _number(self.plans, {"keys": list(plan), "rest": rest, "settings": settings, "layers": layers})

    def _entry(self, entry: dict[str, Any]) -> list[Any]:
        """[number of the layer, number of the form, values …]; a value that is an object is spread out."""
        form, values = [], list[Any]()
        for key, value in entry.items():
            spread = isinstance(value, dict) and key not in _SAME
            form.append([key, list(value) if spread else None])
            if spread:
                values += value.values()
            elif key not in _SAME:
                values.append(value)
        head = _number(self.heads, {k: v for k, v in entry.items() if k in _SAME})
        return [head, _number(self.forms, form), *values]

    def to_json(self) -> dict[str, Any]:
        return {name: [json.loads(text) for text in getattr(self, name)] for name in _BOOK}


_BOOK = ("heads", "forms", "settings", "plans")


def unpack(book: dict[str, Any], number: int) -> dict[str, Any]:
    """The plan with this number as it was added; the page does the same in JavaScript."""
    packed = book["plans"][number]
    layers = []
    for at, form, *values in packed["layers"]:
        head, left = book["heads"][at], iter(values)
        entry = {}
        for key, inner in book["forms"][form]:
            if inner is not None:
                entry[key] = {k: next(left) for k in inner}
            else:
                entry[key] = head[key] if key in head else next(left)
        layers.append(entry)
    whole = {**packed["rest"], "layers": layers, "settings": book["settings"][packed["settings"]]}
    return {key: whole[key] for key in packed["keys"]}


def _number(known: dict[str, int], value: object) -> int:
    return known.setdefault(json.dumps(value, separators=(",", ":")), len(known))


def evenly(count: int, most: int) -> list[int]:
    """`most` of `count` positions, evenly spaced with both ends, or all of them.

    >>> evenly(10, 4)
    [0, 3, 6, 9]
    >>> evenly(3, 4)
    [0, 1, 2]
    """
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(1, most - 1)) for i in range(most)})
