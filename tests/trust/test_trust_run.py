"""The table of `make trust`: it goes on where it was stopped, joins parts, and no job hangs."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from trust import run


def line(name: str, *violations: str, states: int = 3) -> run.Line:
    return {"name": name, "states": states, "seconds": 1.0, "violations": list(violations)}


def test_lines_are_kept_and_only_what_is_missing_or_wrong_is_done_again(tmp_path: Path) -> None:
    first = run.Lines(tmp_path / "lines")
    for made in (line("fuzz: plan-replayed"), line("crash: report, figures"), line("tests marked trust: 9 passed")):
        first.add(made)
    first.add(line("fuzz: row", "it was a traceback"))
    again = run.Lines(tmp_path / "lines")
    assert again.found == first.found
    wanted = ["fuzz: plan", "crash: report", "fuzz: row"]
    assert [name for name in (*wanted, "fuzz: plan-replayed", "tests marked trust") if again.missing(name)] == wanted
    again.add(line("fuzz: row", states=5))
    assert not run.Lines(tmp_path / "lines").missing("fuzz: row")
    table = run.shown(again.found)
    assert "| all | 14 |" in table
    assert table.splitlines()[2:-3][-1].endswith("| 0 |")
    assert run.commit() in table


def test_what_is_stopped_leaves_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is killed with the run would look like one that failed."""
    lines = tmp_path / "lines"

    def job() -> list[run.Line]:
        return [line("made up", f"status {run.ran(['sleep', '600']).status}")]

    def stop() -> None:
        while not run.RUNNING:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run, "STOPPED", threading.Event())
    monkeypatch.setattr(run, "jobs", lambda *_: [job, job, job])
    monkeypatch.setattr(sys, "argv", ["run.py", "--lines", str(lines)])
    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=stop).start()
    try:
        assert run.main() == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not lines.exists()
    assert not run.RUNNING


def test_a_job_that_hangs_is_ended() -> None:
    script = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert run.ran([sys.executable, "-c", f"{script}; time.sleep(600)"], limit=3).status == -9
    assert not run.RUNNING
