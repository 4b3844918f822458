"""No network unless asked for, nothing of the machine in what is written, no dependency without a pin."""

from __future__ import annotations

import getpass
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trust import audit

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"

ALONE = """
import sys
def audit(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        host = arguments[1] if event == "socket.connect" else arguments[0]
        if not (isinstance(host, (str, bytes)) and event == "socket.connect"):  # a path is a socket of this machine
            print("NETWORK", event, arguments, flush=True)
            raise SystemExit(9)
sys.addaudithook(audit)
import rankwise
from rankwise.__main__ import main
sys.exit(main(sys.argv[1:]) if len(sys.argv) > 1 else 0)
"""
SECRET = "hunter2-in-the-environment"
SHORT = ["--limit", "48", "--set", "epochs=1", "--set", "retrain=1", "--set", "warmup=0"]


def alone(folder: Path, *arguments: str) -> str:
    """A command without a network, in `folder`, with a secret in its environment."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE), "MY_TOKEN": SECRET}
    command = [sys.executable, "-c", ALONE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=600)
    assert "NETWORK" not in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_import_asks_for_no_network(tmp_path: Path) -> None:
    alone(tmp_path)


@pytest.mark.trust
def test_nothing_of_the_machine_is_written(tmp_path: Path) -> None:
    """Train, compress, a study and its report, by relative names: no absolute path, user, host or environment."""
    pytest.importorskip("sklearn")
    pytest.importorskip("accelerate")
    pytest.importorskip("plotly")
    folder = tmp_path / "a-private-place"
    folder.mkdir()
    (folder / "s.toml").write_text(
        'methods = ["svd"]\nkeeps = [0.5]\n[[network]]\nmodel = "digits-cnn"\ndata = "digits"\nlimit = 48\n'
        "set = { epochs = 1, retrain = 0, warmup = 0 }\n"
    )
    alone(folder, "train", "digits-cnn", "--data", "digits", *SHORT, "--out", "trained")
    alone(folder, "compress", "trained", "--keep", "0.5", "--method", "svd", "--out", "small")
    alone(folder, "run", "s.toml", "--workers", "1", "--out", "r")
    alone(folder, "report", "r", "-o", "r.html")
    alone(folder, "export", "small", "--to", "exported", "--input", "1,1,8,8")
    alone(folder, "evaluate", "small", "--data", "digits", "--limit", "48")
    words = [str(tmp_path), "a-private-place", SECRET, "MY_TOKEN", str(Path.home()) + "/"]
    words += [word for word in (socket.gethostname(), getpass.getuser()) if len(word) > 5]  # "vm" is in every page
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert {"plan.json", "row.json", "study.json", "r.html", "model.safetensors"} <= {p.name for p in written}
    for path in written:
        content = path.read_bytes()
        for word in words:
            assert word.encode() not in content, f"{path.name} holds {word!r}"


def test_withdrawn_releases_and_missing_data_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit of `make trust`: no answer is not taken for a good one."""
    known = {"a": {"releases": {"1": [{"yanked": True}], "2": [{"yanked": False}]}}, "b": None}
    monkeypatch.setattr(audit, "pins", lambda: [("a", "1"), ("a", "2"), ("b", "1")])
    monkeypatch.setattr(audit, "fetch", known.get)
    found = audit.audit()
    assert found.wrong == ["a==1 was withdrawn by its authors"]
    assert found.asked == 2
    assert [text.split(":")[0] for text in found.unknown] == [
        "1 pins are not in the index that can be reached",
        "known vulnerabilities",
    ]
    known["/".join(audit.CONTROL)] = {"vulnerabilities": [{"id": "CVE-1"}]}
    known["a/2"] = {"vulnerabilities": [{"id": "CVE-2"}]}
    found = audit.audit()
    assert found.wrong == ["a==1 was withdrawn by its authors", "a==2: CVE-2"]
    assert len(found.unknown) == 1


def test_every_dependency_has_a_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    wanted = {re.split(r"[<>=\[;! ]", name)[0].lower().replace("_", "-") for name in named} - {"rankwise"}
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][^ ]*", line) for line in pins)
    assert wanted <= {line.split("==")[0].lower().replace("_", "-") for line in pins}
