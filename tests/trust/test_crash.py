"""A sample of the crash states of every writer, and that the search finds the mistakes it is made for."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankwise.core import disk
from rankwise.surgery import checkpoint
from trust import writers
from trust.crash import Recorder, recording, states
from trust.enumerate import explore
from trust.writers import Writer

pytest.importorskip("sklearn")
pytest.importorskip("accelerate")


def name_of(writer: Writer) -> str:
    return writer.name


@pytest.mark.parametrize("writer", writers.QUICK, ids=name_of)
def test_after_a_crash_a_reader_finds_the_old_or_the_new(writer: Writer) -> None:
    most, stride = (4, 5) if writer in (writers.REPORT, writers.SINGLE, writers.OVER_TRAINED) else (32, 1)
    if writer in (writers.REPORT, writers.SINGLE):
        pytest.importorskip("plotly")
    if writer is writers.FIGURES:
        pytest.importorskip("matplotlib")
    found = explore(writer, most, stride)
    assert not found.violations
    assert found.states >= 20


def test_a_folder_for_transformers_is_never_of_two_versions() -> None:
    """One file of weights, then several with an index, then one again: a reader finds the old or the new."""
    pytest.importorskip("transformers")
    found = explore(writers.LANGUAGE, most=2, stride=7)
    assert not found.violations
    assert found.states >= 30


@pytest.mark.parametrize("writer", [writers.TRAIN, writers.RETRAIN], ids=name_of)
def test_after_a_crash_a_training_goes_on(writer: Writer) -> None:
    found = explore(writer, most=4, stride=3, every=30)
    assert not found.violations
    assert found.states >= 30


@pytest.mark.parametrize("writer", [writers.ITERATE, writers.DEMO], ids=name_of)
def test_after_a_crash_of_what_writes_many_files(writer: Writer) -> None:
    pytest.importorskip("plotly")
    found = explore(writer, most=2, stride=9, every=25)
    assert not found.violations
    assert found.states >= 30


def test_after_a_crash_a_study_goes_on() -> None:
    found = explore(writers.STUDY, most=2, stride=31, every=60)
    assert not found.violations
    assert found.states >= 30


def test_an_export_is_old_or_new() -> None:
    found = explore(writers.EXPORTED, most=8, stride=2)
    assert not found.violations
    assert found.states >= 20


def unflushed_files(patch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    patch.setattr(disk.os, "fsync", lambda f: real(f) if stat.S_ISDIR(os.fstat(f).st_mode) else None)


def unflushed_folders(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk, "flush_folder", lambda path: None)


def plan_first(patch: pytest.MonkeyPatch) -> None:
    real = disk.write_together
    patch.setattr(checkpoint.files, "write_together", lambda files: real(dict(reversed(files.items()))))


def no_waiting_plan(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint, "_waiting_plan", lambda folder: None)


def in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk, "part_of", lambda path: path)


@pytest.mark.parametrize(
    ("mistake", "writer"),
    [
        (unflushed_files, writers.PLAN),
        (unflushed_folders, writers.ROW),
        (unflushed_folders, writers.NETWORK),
        (plan_first, writers.NETWORK),
        (no_waiting_plan, writers.NETWORK),
        (in_place, writers.TABLE),
        (unflushed_folders, writers.ITERATE),
    ],
    ids=lambda value: getattr(value, "name", None) or value.__name__,
)
def test_a_mistake_would_be_found(mistake: Any, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of the safeguards taken away some state is wrong."""

    def write(folder: Path, note: Recorder) -> None:
        with pytest.MonkeyPatch.context() as patch:
            mistake(patch)
            writer.write(folder, note)

    check = writer.check
    if mistake is no_waiting_plan:

        def check(folder: Path, state: Any) -> None:
            with pytest.MonkeyPatch.context() as patch:
                mistake(patch)
                writer.check(folder, state)

    assert explore(Writer(writer.name, writer.prepare, write, check), most=32, enough=1).violations


def test_the_states_of_a_rename_without_a_flush(tmp_path: Path) -> None:
    """By hand: two pieces of content and a name, in every combination."""
    (tmp_path / "a").write_bytes(b"old")
    with recording(tmp_path) as note:
        file = os.open(tmp_path / "b", os.O_CREAT | os.O_WRONLY)
        os.write(file, b"xy")
        os.close(file)
        os.replace(tmp_path / "b", tmp_path / "a")
    found = {tuple(state.disk.tree()) for state in states(note)}
    contents = {b"", b"x", b"\0y", b"xy"}
    renamed = {(("a", content),) for content in contents}
    both = {(("a", b"old"), ("b", content)) for content in contents}
    assert found == renamed | both | {(("a", b"old"),)}


SAVE = """
import sys, torch
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from trust import writers
import rankwise as rw
rw.save(*writers.compressed(1), Path(sys.argv[1]))
"""


def test_the_recorder_sees_what_the_system_sees(tmp_path: Path) -> None:
    """The same calls in the same order as strace shows them, where it can be had."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("there is no strace")
    here = Path(__file__).parents[1]
    wanted = "trace=openat,fsync,rename,renameat,renameat2,unlink,ftruncate,write"
    command = [strace, "-f", "-y", "-e", wanted, "-o", str(tmp_path / "log"), sys.executable, "-c", SAVE]
    folders = [str(tmp_path / "out"), str(here), str(Path(disk.__file__).parents[2])]
    done = subprocess.run([*command, *folders], capture_output=True, text=True)
    if "ptrace" in done.stderr or "not permitted" in done.stderr:
        pytest.skip("strace may not look at processes here")
    assert done.returncode == 0, done.stderr
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if str(tmp_path / "out") in line]
    seen = [call for line in lines for call in ("fsync", "rename", "write") if f"{call}(" in line]
    (tmp_path / "again").mkdir()
    with recording(tmp_path / "again") as note:
        checkpoint.save(*writers.compressed(1), tmp_path / "again")
    ours = [op[0] for op in note.ops if op[0] in ("fsync", "rename", "write")]
    assert _runs(seen) == _runs(ours)


def _runs(calls: list[str]) -> list[str]:
    """Writes that follow each other count as one: the recorder cuts them in pieces."""
    return [call for i, call in enumerate(calls) if call != "write" or i == 0 or calls[i - 1] != "write"]
