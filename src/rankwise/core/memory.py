"""Memory: what is free goes back to the system, and what a limit leaves is known before the work."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from rankwise.errors import RankwiseError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_LIBC = ctypes.CDLL(None) if hasattr(ctypes, "CDLL") and os.name == "posix" else None
_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def give_back() -> None:
    """The C library keeps what was freed, in a heap for each thread; after much work in pieces it would keep it all."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)


def room() -> int | None:
    """Bytes that this process can take at most under the limits it has (ulimit -v and -d, its control group)."""
    found = list(_left())
    return max(0, min(found)) if found else None


def check_room(needed: float, what: str) -> None:
    """Refuse work that is certain to exceed a limit."""
    left = room()
    if left is not None and needed > left:
        raise RankwiseError(
            f"{what} take at least {needed / 1e6:,.0f} MB, and the limit of memory of this process leaves "
            f"{left / 1e6:,.0f} MB: raise it (ulimit -v, that of the container), or --exclude large layers"
        )


def _left() -> Iterator[int]:
    """What each limit leaves; none where the system does not say."""
    try:
        pages = [int(n) for n in Path("/proc/self/statm").read_text().split()]
    except (OSError, ValueError):
        return
    if resource is None:
        return
    size = resource.getpagesize()
    for kind, used in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            yield limit - used * size
    for limit in _groups():
        yield limit - (pages[1] - pages[2]) * size  # what is shared may be counted elsewhere


def _groups() -> Iterator[int]:
    """Limits of the control group of this process and of those above it; both versions of them."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, name = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        top, file = (_GROUPS, "memory.max") if not kinds else (_GROUPS / "memory", "memory.limit_in_bytes")
        place = top / name.lstrip("/")
        for folder in (place, *place.parents):
            if not folder.is_relative_to(top):
                break
            try:
                text = (folder / file).read_text().strip()
            except OSError:
                continue
            if text.isdecimal():
                yield int(text)
