"""Examples in docstrings become blocks of code on the API page; without this they would be read as prose."""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    """Every run of lines from `>>>` to a blank line, in a fence.

    >>> print(fenced("Adds.").replace("`", "'"))
    Adds.
    """
    out: list[str] = []
    inside = False
    for line in text.split("\n"):
        if not inside and line.startswith(">>>"):
            out.append("```pycon")
            inside = True
        elif inside and not line.strip():
            out.append("```")
            inside = False
        out.append(line)
    return "\n".join([*out, "```"] if inside else out)


class Doctests(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
