"""kill -9 and Ctrl-C at random moments of real processes: what is left can always be resumed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankwise.training import resume

pytest.importorskip("sklearn")
pytest.importorskip("accelerate")

# Imports take seconds: one process makes them, and forks a child for every attempt, which `main` then runs in.
SERVER = """
import os, sys
import torch
torch.set_num_threads(1)
from rankwise.training import evaluate, steps
from rankwise.__main__ import main
import accelerate, sklearn.datasets
evaluate._torchmetrics()
for line in sys.stdin:
    child = os.fork()
    if not child:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(main(line.split()))
    print("pid", child, flush=True)
    _, status = os.waitpid(child, 0)
    print("end", os.waitstatus_to_exitcode(status), flush=True)
"""
COMMAND = (
    "train digits-cnn --data digits --limit 64 --set epochs=150 --set retrain=0 --set batch_size=32 --resume --out"
)


class Server:
    def __init__(self, errors: Path) -> None:
        self.errors = errors.open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, command: str) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        word, pid = self.process.stdout.readline().split()
        assert word == "pid"
        return int(pid)

    def end(self) -> int:
        assert self.process.stdout is not None
        word, status = self.process.stdout.readline().split()
        assert word == "end"
        return int(status)

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    made = Server(tmp_path_factory.mktemp("server") / "errors.txt")
    yield made
    assert made.process.stdin is not None
    made.process.stdin.close()
    made.process.wait(timeout=600)
    made.errors.close()


def wait_for_a_new_state(out: Path, old: int) -> int:
    """When the state file was last written, as soon as that is later than `old`."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if (out / resume.FILE).exists():
            written = (out / resume.FILE).stat().st_mtime_ns
            if written > old:
                return written
        time.sleep(0.002)
    raise AssertionError("no state was written for ten minutes")


def test_kill_9_at_random_moments(server: Server, tmp_path: Path) -> None:
    draw = random.Random(0)
    out = tmp_path / "killed"
    written, epochs = 0, []
    for attempt in range(14):
        pid = server.start(f"{COMMAND} {out}")
        if attempt:  # the first two are killed while they get ready
            written = wait_for_a_new_state(out, written) if attempt > 1 else written
        time.sleep(draw.uniform(0, 0.04))
        os.kill(pid, signal.SIGKILL)
        status = server.end()
        if status == 0 and len(epochs) >= 5:
            break  # on a busy machine it was done before we came to kill it
        assert status == -signal.SIGKILL, server.said()
        if (out / resume.FILE).exists():
            epochs.append(resume.loads((out / resume.FILE).read_bytes(), "the state").epoch)
            written = (out / resume.FILE).stat().st_mtime_ns
    assert len(epochs) >= 5
    assert epochs == sorted(set(epochs))  # every attempt got further
    for folder in (out, tmp_path / "whole"):
        server.start(f"{COMMAND} {folder}")
        assert server.end() == 0, server.said()
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_control_c_says_how_to_go_on(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "run"
    pid = server.start(f"{COMMAND.replace('epochs=150', 'epochs=5000')} {out}")
    deadline = time.monotonic() + 600
    while not (out / resume.FILE).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(pid, signal.SIGINT)
    assert server.end() == 130, server.said()
    said = server.said()
    assert "--resume" in said
    assert "Traceback" not in said
    assert resume.loads((out / resume.FILE).read_bytes(), "the state").epoch >= 1
