"""The index of weights in several files (`model.safetensors.index.json`), as large networks come.

{"metadata": {"total_size": 4096}, "weight_map": {"a.weight": "model-00001-of-00002.safetensors", …}}
"""

from __future__ import annotations

from safetensors import SafetensorError

from rankwise.core import files
from rankwise.errors import RankwiseError

MOST_FILES = 10_000
# What safetensors, torch and numpy raise for a file that is none: a shape of 2**63 or numbers of an unknown kind, too.
UNREADABLE = (SafetensorError, OSError, ValueError, RuntimeError, TypeError, AttributeError)


def read_index(text: bytes, where: str) -> dict[str, list[str]]:
    """Names of tensors by file. A file is a plain name beside the index: an index leads to no other folder.

    >>> read_index(b'{"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}}', "the index")
    {'1.safetensors': ['a', 'b']}
    """
    data = files.parse(text, where)
    files.strict(data, ["metadata", "weight_map"], where)
    files.typed(data.get("metadata") or {}, dict, f"'metadata' of {where}")
    found: dict[str, list[str]] = {}
    for key, value in files.field(data, "weight_map", dict, where).items():
        name = files.typed(value, str, f"the file of {key!r:.60} in {where}")
        if name not in found:
            _check_name(name, where)
        found.setdefault(name, []).append(key)
    if not 0 < len(found) <= MOST_FILES:
        raise RankwiseError(f"{where} names {len(found):,} files: possible are 1 to {MOST_FILES:,}")
    return found


def _check_name(name: str, where: str) -> None:
    """No folder, no drive, no control characters: what every file system takes as one name."""
    plain = name.isprintable() and not set(name) & set('/\\:*?"<>|') and not name.startswith(".")
    if not plain or not name.endswith(".safetensors") or len(name.encode()) > 255:
        raise RankwiseError(
            f"{where} names the file {name!r:.80}: only files beside it that end in .safetensors are read"
        )
