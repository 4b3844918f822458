"""The store: made once, whole or not at all, also with several processes and after a kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from rankwise.studies import store

pytest.importorskip("filelock")


def fill(work: Path) -> None:
    with (work.parent.parent / "made.txt").open("a") as log:
        log.write("made\n")
    time.sleep(0.2)
    (work / "value").write_text("42")


def many(folder: str) -> None:
    found = store.entry(Path(folder) / "store", {"what": "same"}, fill)
    assert (found / "value").read_text() == "42"


def dies(folder: str) -> None:
    def half(work: Path) -> None:
        (work / "half").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    store.entry(Path(folder) / "store", {"what": "same"}, half)


def test_the_key_alone_decides(tmp_path: Path) -> None:
    one = store.entry(tmp_path, {"a": 1, "b": [2]}, lambda work: None)
    same = store.entry(tmp_path, {"b": [2], "a": 1}, lambda work: pytest.fail("it is there"))
    other = store.entry(tmp_path, {"a": 1, "b": [3]}, lambda work: None)
    assert one == same != other
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([one.name, other.name])


def test_what_fails_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    def fails(work: Path) -> None:
        (work / "half").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        store.entry(tmp_path, {"a": 1}, fails)
    assert not (tmp_path / store.digest({"a": 1})).exists()
    found = store.entry(tmp_path, {"a": 1}, lambda work: (work / "whole").write_text("whole") and None)
    assert (found / "whole").exists()


def test_several_processes_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    crowd = [context.Process(target=many, args=(str(tmp_path),)) for _ in range(5)]
    for process in crowd:
        process.start()
    for process in crowd:
        process.join(60)
    assert [process.exitcode for process in crowd] == [0] * 5
    assert (tmp_path / "made.txt").read_text() == "made\n"


def test_a_killed_maker_blocks_nobody(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=dies, args=(str(tmp_path),))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not [p for p in (tmp_path / "store").iterdir() if p.is_dir() and p.suffix == ""]
    many(str(tmp_path))
    names = [p.name for p in (tmp_path / "store").iterdir()]
    assert names == [store.digest({"what": "same"})]
