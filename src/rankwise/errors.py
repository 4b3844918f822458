"""The one error type for everything a user can get wrong."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class RankwiseError(ValueError):
    """What was given, what is possible, what to do: one sentence, ready to be shown to a user."""


class Interrupted(Exception):
    """Ctrl-C, with a sentence on what became of the work. Typer would swallow a KeyboardInterrupt without a word."""


class BudgetError(RankwiseError):
    """A budget that cannot be met, with the least that can."""


def out_of_memory(err: BaseException | None) -> bool:
    """Whether memory ran out, in this error or in those that led to it.

    torch has no exception of its own for memory of the CPU, and oneDNN does not even name it.
    """
    while err is not None:
        text = str(err)
        if isinstance(err, MemoryError) or any(sign in text for sign in ("allocate memory", "out of memory")):
            return True
        if text in ("could not create a primitive", "could not create a memory"):
            return True
        err = err.__cause__ or err.__context__
    return False


def need(package: str, extra: str, purpose: str) -> Any:
    """Import an optional package where it is used, or say which extra brings it.

    >>> need("math", extra="dev", purpose="square roots").sqrt(4)
    2.0
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as err:
        if err.name is None or err.name.split(".")[0] != package.split(".")[0]:
            raise
        raise RankwiseError(
            f"{purpose} needs the package {package.split('.')[0]!r}, which is not installed: "
            f"pip install 'rankwise[{extra}]'"
        ) from err
