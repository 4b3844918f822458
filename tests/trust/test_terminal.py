"""Names in the files of strangers say nothing to the terminal: no control characters, no turned direction, no lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import made_rows
from rankwise.__main__ import main
from rankwise.cli import output
from rankwise.cli.wording import printable
from trust import writers

EVIL = "\x1b]0;hacked\x07\x1b[2J[bold]x[/nope]\n\u202e\x9b31m\ufeff"
SEEN = "\\x1b]0;hacked\\x07\\x1b[2J[bold]x[/nope]\\n\\u202e\\x9b31m\\ufeff"


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(list(arguments)) == status
    found = capsys.readouterr()
    text = found.out + found.err
    assert printable(text.replace("\n", "")) == text.replace("\n", "")
    return text


def test_every_kind_is_spelt_out() -> None:
    assert printable(EVIL) == SEEN
    for sign in ("\0", "\r", "\t", "\x7f", "\x85", "\xad", "\u200d", "\u2028", "\u2066", "\ud800", "\U000e0041"):
        assert printable(f"a{sign}b").isascii()
    for text in ("σ₁ ≤ 10⁻³⁰⁰ − f│chw", "naïve café", "日本語", "a\xa0b", "1\u202f024"):
        assert printable(text) == text


def test_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Replayed: its method and its warnings are shown."""
    plan = json.loads(writers.digits(1)[1].dumps()) | {"warnings": [EVIL], "method": EVIL}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    command = ["compress", "digits-cnn", "--random-weights", "--plan", str(tmp_path / "plan.json"), "--no-report"]
    text = said(capsys, *command, "--input", "1,1,8,8", "--out", str(tmp_path / "out"))
    assert f"warning: {SEEN}" in text


def test_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "w.safetensors").write_bytes(save({EVIL: torch.ones(2)}))
    text = said(capsys, "inspect", "digits-cnn", "--weights", str(tmp_path / "w.safetensors"), status=2)
    assert text.count("\n") == 1
    assert "unexpected: \\x1b]0;hacked" in text


@pytest.mark.parametrize("to", ["text", "md", "csv", "latex"])
def test_rows(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    row = made_rows.row() | dict.fromkeys(("study", "cell", "model", "data", "label", "method", "split"), EVIL)
    made_rows.write(tmp_path, [row, made_rows.failed(EVIL, EVIL)])
    assert "hacked" in said(capsys, "summary", str(tmp_path), "--to", to)


def test_json_is_the_same_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    value = {EVIL: [EVIL, "\ud800", "σ"]}
    output.print_json(value)
    text = capsys.readouterr().out
    assert json.loads(text) == value
    assert "σ" in text
    assert not set("\x1b\x9b\u202e\ufeff") & set(text)


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    grid = output.new_grid(EVIL)
    grid.add_column("layer")
    grid.add_row(EVIL)
    output.console().print(grid)
    text = capsys.readouterr().out
    assert text.count("hacked") == 2
    assert not set("\x1b\x07\x9b\u202e\ufeff") & set(text)


def test_a_name_of_a_file_that_is_no_text(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """Bytes that are no UTF-8 come as half characters, which cannot be printed."""
    rows = made_rows.write(tmp_path / "rows", [made_rows.row()])
    pytest.importorskip("plotly")
    out = str(tmp_path / "r\udcff.html")
    assert main(["report", str(rows), "-o", out]) == 0
    assert b"r\\udcff.html" in capsysbinary.readouterr().out
