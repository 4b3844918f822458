"""A sample of failing operations for commands that write, and that the search finds what it is made for."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from rankwise.core import disk
from rankwise.timing.cache import Store
from trust import faults, writers
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


def test_measured_times_that_cannot_be_written_cost_time_and_nothing_else(tmp_path: Path) -> None:
    """The n-th operation fails, with every error: what was known is known, and nothing lies about."""
    tried = 0
    for name, error in faults.ERRORS.items():
        for nth in range(1, 100):
            root = tmp_path / f"{name}-{nth}"
            root.mkdir()
            writers._times(root, 1)
            fault = faults.Fault(root, nth, error)
            with faults.failing(fault), suppress(MemoryError):
                writers._times(root, 2)
            if not fault.where:
                break
            assert "network 1" in Store(root / "times.json").known, fault.where
            assert [p.name for p in root.iterdir()] == ["times.json"], fault.where
            writers._times(root, 2)
            assert set(Store(root / "times.json").known) == {"network 1", "network 2"}
            tried += 1
    assert tried >= 20


def test_what_is_left_among_temporary_files_would_be_found(tmp_path: Path) -> None:
    def leave(folder: Path) -> list[str]:
        tempfile.mkstemp()
        return faults._report(folder)

    found = faults.Found("report")
    ready = tmp_path / "ready"
    ready.mkdir()
    faults._prepare_report(ready)
    with faults.temporary_files(tmp_path / faults.TEMPORARY):
        old = faults._page(ready)
        status, said = faults.run(leave(ready))
        known = (ready, tmp_path / "at", old, faults._page(ready))
        faults._judge(faults.REPORT, ready, known, found, "made up", status, said, tidy=True)
    assert [text.split(":")[0] for text in found.violations] == ["made up"]
    assert "left behind" in found.violations[0]
