"""The Hugging Face hub without a connection: its cache answers at once, not after a minute of retries."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Whatever reads from the hub in here reads the cache alone where the hub's name cannot be found."""
    try:
        constants: Any = import_module("huggingface_hub.constants")
    except ModuleNotFoundError:
        yield  # without the package nothing reads from the hub
        return
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not is_known(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def is_known(address: str) -> bool:
    """Whether the host of an address has a number; behind a proxy only the proxy knows."""
    if any(os.environ.get(name) for name in PROXIES):
        return True
    try:
        return bool(socket.getaddrinfo(urlsplit(address).hostname or "", 443))
    except OSError:
        return False
