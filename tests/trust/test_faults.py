"""A sample of failing operations for commands that write, and that the search finds what it is made for."""

from __future__ import annotations

import pytest

from rankwise.core import disk
from trust import faults
from trust.faults import Search

pytest.importorskip("sklearn")
pytest.importorskip("accelerate")


@pytest.mark.parametrize(
    ("command", "search"),
    [
        (faults.COMPRESS, Search(("EIO", "MemoryError"), stride=5, allocations=3)),
        (faults.TRAIN, Search(("ENOSPC",), lasting=(), stride=7, allocations=1)),
        (faults.RETRAIN, Search(("EIO",), lasting=(), stride=11)),
        (faults.RUN, Search(("EACCES",), lasting=(), stride=41, allocations=1)),
        (faults.EXPORTED, Search(("EIO",), lasting=(), stride=3)),  # and a full disk: torch would end the process
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_fails_is_one_sentence_and_loses_nothing(command: faults.Command, search: Search) -> None:
    with faults.shortened():
        found = faults.explore(command, search)
    assert not found.violations
    assert found.failures >= 3


@pytest.mark.parametrize("safeguard", ["remove", "_replace"])
def test_a_mistake_would_be_found(safeguard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if safeguard == "remove":
        monkeypatch.setattr(disk, "_discard", lambda part, renamed: None)  # what fails leaves its files
    else:
        real = disk._replace
        monkeypatch.setattr(disk, "_replace", lambda part, path, tries: real(part, path, 1))  # never tried again
    with faults.shortened():
        assert faults.explore(faults.COMPRESS, Search(("EIO",), lasting=(), enough=1)).violations
