"""Files of strangers: a sample of the fuzzing, every byte cut off, every bit of a header flipped, and extremes."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

import rankwise as rw
from rankwise.core import files
from rankwise.errors import RankwiseError
from rankwise.planning.plan import Plan
from rankwise.reports.tables import tables
from rankwise.studies.study_file import read_study
from rankwise.training import results, resume
from sentences import check_sentence
from trust import fuzz

EXPECTED = ("training-state", "weights", "block-shelf")  # of another training, of half a network, or of another kind
HEADERS = [name for name, target in fuzz.TARGETS.items() if target.structured is fuzz.mutate_safetensors]


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_mutations_are_read_or_refused(name: str) -> None:
    found = fuzz.mutations(fuzz.TARGETS[name], runs=250)
    assert not found.violations
    assert found.inputs == 250


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_the_seeds_are_good(name: str) -> None:
    """Otherwise mutations would never get far."""
    for data in fuzz.corpus(name):
        with suppress(RankwiseError) if name in EXPECTED else nullcontext():
            fuzz.TARGETS[name].run(data)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.trust)])
@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_cut_off_anywhere(name: str, step: int) -> None:
    target = fuzz.TARGETS[name]
    fuzz.warm(target)
    for data in fuzz.corpus(name):
        for end in range(0, len(data), step):
            fuzz.try_one(target, data[:end])


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.trust)])
@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_every_bit_of_a_header(name: str, step: int) -> None:
    """Of safetensors files only the header: the rest are numbers."""
    target = fuzz.TARGETS[name]
    fuzz.warm(target)
    for data in fuzz.corpus(name):
        size = 8 + struct.unpack("<Q", data[:8])[0] if name in HEADERS else len(data)
        for bit in range(0, 8 * size, step):
            content = bytearray(data)
            content[bit // 8] ^= 1 << bit % 8
            fuzz.try_one(target, bytes(content))


# What fuzzing found, each kept here.


def test_a_study_of_a_billion_cells_is_refused_at_once(tmp_path: Path) -> None:
    study = (fuzz.CORPUS / "study" / "iterate.bin").read_text()
    for text in (
        "keeps = { first = 0.9, last = 0.1, count = 1000000000 }\n" + study.replace("keeps", "#"),
        study.replace("count = 3", "count = 10000000000"),
        study.replace("repeats = 2", "repeats = 1000000000000"),
        study.replace("repeats = 2", "repeats = 2\nseed = " + "9" * 5000),
        study.replace("repeats = 2", "paper = " + "[" * 5000),
        study.replace("retrain = 0.5", "retrain = 0x" + "f" * 400),
        study.replace("alpha = 0.8", "alpha = " + "9" * 80 + ".5"),
        study.replace("resnet20", "x" * 5000),
    ):
        (tmp_path / "s.toml").write_text(text)
        check_sentence(lambda: read_study(tmp_path / "s.toml"))


def test_a_shape_of_texts_in_a_table_is_refused() -> None:
    """Multiplied by a number of filters it would be a text of gigabytes."""
    header = json.loads(fuzz.corpus("table-header")[0])
    header["coverage"]["layers"][0] |= {"kernel": "0x10", "filters": 2147483648}
    with pytest.raises(RankwiseError, match="kernel"):
        fuzz.table_header(json.dumps(header).encode())


@pytest.mark.parametrize("change", [{"repeat": []}, {"retrain": {}}, {"reference": 1e300}, {"seed": {}}, {"keep": [1]}])
def test_rows_that_could_not_be_drawn_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    row = json.loads(fuzz.corpus("row")[0])
    (tmp_path / "a.json").write_text(json.dumps(row | change))
    check_sentence(lambda: results.read_rows(tmp_path))


def test_rounds_without_a_score_have_no_table(tmp_path: Path) -> None:
    row = json.loads(fuzz.corpus("row")[0]) | {"mode": "iterate", "round": 1, "reference": {"top5": None}}
    (tmp_path / "a.json").write_text(json.dumps(row))
    assert tables(results.read_rows(tmp_path), (1.0,), False) == []


def test_a_row_without_a_unit_is_in_params(tmp_path: Path) -> None:
    row = json.loads(fuzz.corpus("row")[0])
    del row["unit"]
    (tmp_path / "a.json").write_text(json.dumps(row))
    assert results.read_rows(tmp_path)[0]["unit"] == "params"


# Extremes: in a process that may have so much memory and so much time.

READ = ("a million layers", "a million names in an index", "spectra of a million layers", "a million published numbers")
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]), int(sys.argv[1])))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
import rankwise as rw
from rankwise.errors import RankwiseError
from rankwise.core.shards import read_index
from rankwise.models.weights import load_weights_
from rankwise.reports import embedded, published
from rankwise.studies.study_file import read_study
from rankwise.training import results, resume
from pathlib import Path
from torch import nn
try:
    path = Path(sys.argv[3])
    readers = {"plan": rw.Plan.load, "table": rw.Table.load, "study": read_study, "row": results._read_row}
    readers |= {"index": lambda p: read_index(resume.files.read(p), str(p))}
    readers |= {"state": lambda p: resume.loads(resume.files.read(p, None), str(p))}
    readers |= {"weights": lambda p: load_weights_(nn.Linear(2, 2), p.rename(p.with_suffix(".safetensors")))}
    readers |= {"published": lambda p: published.points_of([published.read_table(resume.files.read(p), str(p))])}
    readers |= {"spectra": lambda p: embedded.thin(resume.files.parse(resume.files.read(p), str(p)), str(p))}
    readers[sys.argv[2]](path)
except RankwiseError as err:
    print("refused:", str(err)[:300])
else:
    print("read")
"""


def limited(kind: str, path: Path, gigabytes: float = 3) -> str:
    command = [sys.executable, "-c", LIMITED, str(int(gigabytes * 2**30)), kind, str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def with_header(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def layers(texts: list[str]) -> bytes:
    plan = json.loads(fuzz.corpus("plan")[0])
    return json.dumps({**plan, "layers": []}).replace('"layers": []', f'"layers": [{",".join(texts)}]').encode()


def extremes(name: str) -> tuple[str, bytes]:
    metadata = b'{"__metadata__":{"rankwise-table":"' + b"x" * (10**8 - 100) + b'"}}'
    if name == "a header of 100 MB":
        return "table", with_header(metadata)
    if name == "a header of 100 MB that is a state":
        return "state", with_header(metadata.replace(b"rankwise-table", b"rankwise-state"))
    if name == "a header of 100 MB in a file of weights":
        return "weights", with_header(metadata.replace(b"rankwise-table", b"x"))
    if name == "a million tensors":
        entries = ",".join(f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(10**6))
        return "weights", with_header(f"{{{entries}}}".encode())
    if name == "spectra of a million layers":
        return "spectra", f"""{{"layers": {{{",".join(f'"{i}": {{"a": [1]}}' for i in range(10**6))}}}}}""".encode()
    if name == "a million published numbers":
        table = json.loads(fuzz.corpus("published")[0])
        record = json.dumps(table.pop("records")[0])
        return "published", json.dumps(table)[:-1].encode() + f', "records": [{",".join([record] * 10**6)}]}}'.encode()
    if name == "a header that says 2**62 bytes":
        return "table", struct.pack("<Q", 2**62) + b"{}"
    if name == "a number of 200 million digits":
        return "plan", b'{"format": ' + b"9" * (2 * 10**8) + b"}"
    if name == "a file of more than the limit":
        return "plan", b" " * (files.LIMIT + 1)
    if name.startswith("a million layers"):
        number = (10**6 - 1) if name.endswith("alike") else 10**6
        texts = [f'{{"name": "{i % number}", "kind": "a", "params": 1, "reason": "b"}}' for i in range(10**6)]
        return "plan", layers(texts)
    if name == "a million names in an index":
        names = ",".join(f'"{i}": "{i % 9000}.safetensors"' for i in range(10**6))
        return "index", f'{{"weight_map": {{{names}}}}}'.encode()
    if name == "a study of a million networks":
        return "study", b'[[network]]\nmodel = "resnet20"\n' * 10**6
    if name == "a study of 4 MB of methods":
        return "study", b"network = []\nmethods = [" + b'"svd",' * 690_000 + b"]"
    if name == "a row of 200 MB":
        return "row", b'{"format": 1, "kind": "cell", "x": "' + b"x" * (2 * 10**8) + b'"}'
    if name == "a million nested lists":
        return "plan", b'{"format": ' + b"[" * 10**6
    raise AssertionError(name)


@pytest.mark.parametrize(
    "name",
    [
        "a header of 100 MB",
        "a header that says 2**62 bytes",
        "a file of more than the limit",
        "a million nested lists",
        pytest.param("a header of 100 MB that is a state", marks=pytest.mark.trust),
        pytest.param("a header of 100 MB in a file of weights", marks=pytest.mark.trust),
        pytest.param("a million tensors", marks=pytest.mark.trust),
        pytest.param("spectra of a million layers", marks=pytest.mark.trust),
        pytest.param("a million published numbers", marks=pytest.mark.trust),
        pytest.param("a number of 200 million digits", marks=pytest.mark.trust),
        pytest.param("a million layers", marks=pytest.mark.trust),
        pytest.param("a million layers, two alike", marks=pytest.mark.trust),
        pytest.param("a million names in an index", marks=pytest.mark.trust),
        pytest.param("a study of a million networks", marks=pytest.mark.trust),
        pytest.param("a study of 4 MB of methods", marks=pytest.mark.trust),
        pytest.param("a row of 200 MB", marks=pytest.mark.trust),
    ],
)
def test_extremes(name: str, tmp_path: Path) -> None:
    kind, data = extremes(name)
    (tmp_path / "file").write_bytes(data)
    said = limited(kind, tmp_path / "file")
    assert said.startswith("read" if name in READ else "refused:")


@pytest.mark.trust
def test_a_number_of_a_billion_digits(tmp_path: Path) -> None:
    """A gigabyte is refused by its size, before it is read."""
    with (tmp_path / "file").open("wb") as file:
        file.write(b'{"format": ')
        for _ in range(100):
            file.write(b"9" * 10**7)
    for kind in ("plan", "table", "index", "study", "row", "published", "spectra", "state", "weights"):
        assert limited(kind, tmp_path / "file", gigabytes=0.5 if kind != "state" else 3).startswith("refused:"), kind


def test_names_do_not_lead_out_of_a_folder(tmp_path: Path) -> None:
    """Names of layers and cells are texts: nothing is opened or written by them."""
    plan = json.loads(fuzz.corpus("plan")[0])
    for name in ("../../x", "/etc/passwd", "__class__", "a\0b", "\u202e", "e\u0301"):
        plan["layers"][0]["name"] = name
        made = Plan.loads(json.dumps(plan))
        assert made.layers[0].name == name
        check_sentence(lambda made=made: rw.apply_plan(fuzz.pair(), made))
    assert not list(tmp_path.iterdir())


def test_devices_pipes_and_links(tmp_path: Path) -> None:
    (tmp_path / "device").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("device", "pipe", "loop", "."):
        path = tmp_path / name
        check_sentence(lambda p=path: Plan.load(p))
        check_sentence(lambda p=path: rw.Table.load(p))
    os.mkfifo(tmp_path / resume.FILE)
    check_sentence(lambda: resume.read(tmp_path))


def test_a_training_state_may_be_larger_than_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only texts have a limit: a state is as large as the network and its optimiser."""
    data = fuzz.corpus("training-state")[0]
    (tmp_path / resume.FILE).write_bytes(data)
    monkeypatch.setattr(files.read, "__defaults__", (len(data) - 1,))
    with pytest.raises(RankwiseError, match="at most"):
        files.read(tmp_path / resume.FILE)
    assert resume.read(tmp_path) == data


def test_what_lies_at_the_place_of_our_temporary_file_is_not_followed(tmp_path: Path) -> None:
    """A link there, symbolic or hard, would let whoever made the folder overwrite another file."""
    plan = Plan.loads(fuzz.corpus("plan")[0])
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "plan.json.part").symlink_to(tmp_path / "mine")
    plan.save(tmp_path / "plan.json")
    os.link(tmp_path / "mine", tmp_path / "plan.json.part")
    plan.save(tmp_path / "plan.json")
    assert (tmp_path / "mine").read_text() == "mine"
    assert Plan.load(tmp_path / "plan.json") == plan
    assert not (tmp_path / "plan.json.part").exists()


def test_executions_would_be_noticed() -> None:
    def run(data: bytes) -> None:
        os.system("true")

    fuzz.watch_for_executions()
    with pytest.raises(fuzz.Executed):
        fuzz.try_one(fuzz.Target("bad", run, fuzz.mutate_json), b"")
