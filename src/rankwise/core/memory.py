"""Memory that is free goes back to the system."""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(None) if hasattr(ctypes, "CDLL") and os.name == "posix" else None


def give_back() -> None:
    """The C library keeps what was freed, in a heap for each thread; after much work in pieces it would keep it all."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
