"""Errors of the library in the words of the command line, and texts of strangers as a terminal may see them."""

from __future__ import annotations

import re

# (in Python: …), with one pair of parentheses in it at most
_PYTHON = re.compile(r" ?\(in Python\b[^()]*(?:\([^()]*\)[^()]*)*\)")
_BOTH = re.compile(r"pass (?:\w+=|one|an example) \(on the command line: ([^()]+)\)")
# Control characters, half characters, and what turns the direction of a text or is not seen.
UNSEEN = re.compile(
    "[\0-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def in_flags(sentence: str) -> str:
    """The sentence in one line, without advice for Python.

    >>> in_flags("no data was given: pass data= (on the command line: --data)")
    'no data was given: give --data'
    >>> in_flags("it needs data: give some with --data (in Python: compress(..., data=...))")
    'it needs data: give some with --data'
    """
    return printable(_BOTH.sub(r"give \1", _PYTHON.sub("", " ".join(sentence.split()))))


def printable(text: str) -> str:
    """The text with \\x1b and its like spelt out: a name in somebody's file says nothing to the terminal.

    >>> print(printable("conv1\\x1b[2J"))
    conv1\\x1b[2J
    """
    return UNSEEN.sub(lambda found: repr(found[0])[1:-1], text)
