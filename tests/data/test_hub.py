"""Without a connection the hub's cache is looked at, and nobody waits for retries."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from rankwise.data import hub

constants = pytest.importorskip("huggingface_hub.constants")


def nowhere(*_: Any) -> None:
    raise socket.gaierror(-2, "Name or service not known")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hub.PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_the_hub_is_off_for_as_long_as_it_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", nowhere)

    def read() -> None:
        with hub.hub_or_cache():
            assert constants.is_offline_mode()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()
    assert not constants.is_offline_mode()


def test_the_hub_is_asked_where_it_may_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as found:
        found.setattr(socket, "getaddrinfo", lambda *_: [("somewhere",)])
        with hub.hub_or_cache():
            assert not constants.is_offline_mode()
    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    with hub.hub_or_cache():
        assert not constants.is_offline_mode()


def test_who_asked_to_stay_offline_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [("somewhere",)])
    with hub.hub_or_cache():
        assert constants.is_offline_mode()
    assert constants.is_offline_mode()
