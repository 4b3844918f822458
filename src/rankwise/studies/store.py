"""A store of what cells share: STORE/<hash of what it is>/, made once by the first process, whole or not at all.

While it is made it is called <hash>.work; the last step is a rename. What a killed process left there can be gone on
with, so an interrupted training loses one epoch at most. A lock keeps others waiting, and dies with its process.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankwise.core import files
from rankwise.core.disk import alone, rename

KEY = "key.json"


def digest(value: object) -> str:
    """20 hexadecimal digits of what a value of plain JSON says; the order of keys says nothing."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:20]


def entry(store: Path, key: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """The folder of what `key` describes. If there is none yet, `make` fills one, which others see only when whole."""
    final = store / digest(key)
    if final.is_dir():
        return final
    with lock(final.with_suffix(".lock")):
        if not final.is_dir():
            work = final.with_suffix(".work")
            files.make_folder(work)
            make(work)
            files.write_whole(work / KEY, (json.dumps(key, indent=1, ensure_ascii=False) + "\n").encode())
            try:
                rename(work, final)
            except OSError:
                if not final.is_dir():  # a file system without locks: somebody else was faster, with the same
                    raise
                shutil.rmtree(work, ignore_errors=True)
    return final


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock at `path`. A killed process holds nothing."""
    files.make_folder(path.parent)
    with alone(path):
        yield
