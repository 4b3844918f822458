"""What precision=auto stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankwise.training import precision


def test_other_precisions_stay() -> None:
    assert [precision.settle(name) for name in ("no", "bf16", "fp16")] == ["no", "bf16", "fp16"]


@pytest.mark.parametrize(
    ("text", "says"),
    [("flags : fpu avx512_bf16 sse", True), ("flags : amx_bf16", True), ("flags : avx512f xavx512_bf16", False)],
)
def test_a_processor_promises_bf16(tmp_path: Path, text: str, says: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert precision.promises_bf16(tmp_path / "cpuinfo") is says
    assert not precision.promises_bf16(tmp_path / "nothing")


def test_a_promise_that_kills_the_process_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert not precision._keeps_it()
    monkeypatch.setattr(precision, "_TRIAL", "print(144.0)")
    assert precision._keeps_it()
