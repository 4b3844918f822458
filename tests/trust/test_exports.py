"""Exports: two processes at one file, and nothing of the machine in it."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.deploy import export as exports
from trust import writers

FORK = multiprocessing.get_context("fork")
CONTENTS = [bytes([65 + i]) * (2_000_000 + 1_000_000 * i) for i in range(2)]
OWN = """
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 4)

    def forward(self, x):
        return self.linear(x).relu()  # my own idea
"""


def export_often(path: str, i: int, times: int) -> None:
    """What is written is made up, and looked at in no time: the race is for the file."""
    exports.CONTENTS["exported"] = lambda *_: CONTENTS[i]
    exports._compare = lambda model, example, part, *_: 0.0 if Path(part).read_bytes() == CONTENTS[i] else 1 / 0
    for _ in range(times):
        exports.export(writers.small_net(i), torch.zeros(2, 12), path, "exported")


def test_two_exports_to_one_file_wait_for_each_other(tmp_path: Path) -> None:
    """Each looks at what it wrote itself; a reader sees one of them whole."""
    path = tmp_path / "m.pt2"
    crowd = [FORK.Process(target=export_often, args=(str(path), i, 40)) for i in range(2)]
    for process in crowd:
        process.start()
    while any(process.is_alive() for process in crowd):
        assert not path.exists() or path.read_bytes() in CONTENTS
    assert [process.exitcode for process in crowd] == [0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt2"]


def own_network(folder: Path) -> Any:
    (folder / "own.py").write_text(OWN)
    spec = importlib.util.spec_from_file_location("own", folder / "own.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Own().eval()


@pytest.mark.parametrize("to", exports.TARGETS)
def test_an_export_holds_no_code_and_no_place_of_it(to: str, tmp_path: Path) -> None:
    """torch would write down each line of the network's file, and where that file is."""
    if to == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    folder = tmp_path / "a-private-place"
    folder.mkdir()
    path = folder / exports.TARGETS[to]
    exports.export(own_network(folder), torch.zeros(2, 12), path, to)
    content = path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            content = b"".join(archive.read(name) for name in archive.namelist())
    assert b"linear" in content
    for word in ("a-private-place", "my own idea", "own.py", os.path.dirname(torch.__file__)):
        assert word.encode() not in content, word
