"""A sample of failing operations for commands that write, and that the search finds what it is made for."""

from __future__ import annotations

import pytest

from rankwise.core import disk
from trust import faults

pytest.importorskip("sklearn")
pytest.importorskip("accelerate")


@pytest.mark.parametrize(
    ("command", "once", "lasting", "stride"),
    [
        (faults.COMPRESS, ("EIO", "MemoryError"), ("ENOSPC",), 3),
        (faults.TRAIN, ("ENOSPC",), (), 7),
        (faults.RETRAIN, ("EIO",), (), 11),
        (faults.RUN, ("EACCES",), (), 41),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_fails_is_one_sentence_and_loses_nothing(
    command: faults.Command, once: tuple[str, ...], lasting: tuple[str, ...], stride: int
) -> None:
    with faults.shortened():
        found = faults.explore(command, once, lasting, stride)
    assert not found.violations
    assert found.failures >= 3


def test_a_full_disk_does_not_end_the_process_of_an_export() -> None:
    """torch itself would: its writer throws where nobody can catch it."""
    found = faults.explore(faults.EXPORTED, (), ())
    assert not found.violations
    assert found.failures == 5


@pytest.mark.parametrize("safeguard", ["remove", "_replace"])
def test_a_mistake_would_be_found(safeguard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if safeguard == "remove":
        monkeypatch.setattr(disk, "_discard", lambda part, renamed: None)  # what fails leaves its files
    else:
        real = disk._replace
        monkeypatch.setattr(disk, "_replace", lambda part, path, tries: real(part, path, 1))  # never tried again
    with faults.shortened():
        assert faults.explore(faults.COMPRESS, ("EIO",), ()).violations
