"""Errors of the library, which speaks to Python and to the command line, in the words of the command line."""

from __future__ import annotations

import re

# (in Python: …), with one pair of parentheses in it at most
_PYTHON = re.compile(r" ?\(in Python\b[^()]*(?:\([^()]*\)[^()]*)*\)")
_BOTH = re.compile(r"pass (?:\w+=|one|an example) \(on the command line: ([^()]+)\)")


def in_flags(sentence: str) -> str:
    """The sentence in one line, without advice for Python.

    >>> in_flags("no data was given: pass data= (on the command line: --data)")
    'no data was given: give --data'
    >>> in_flags("it needs data: give some with --data (in Python: compress(..., data=...))")
    'it needs data: give some with --data'
    """
    return _BOTH.sub(r"give \1", _PYTHON.sub("", " ".join(sentence.split())))
