"""Files made up by hand to hurt: absurd shapes, keys that stand twice, deep nesting, pipes, states that never were."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise import __main__ as program
from rankwise.core import files
from rankwise.models import networks
from rankwise.planning.plan import Plan
from rankwise.reports import embedded
from rankwise.studies import runner
from rankwise.studies.study import fill_in
from rankwise.studies.study_file import make_study, parse_study, read_study
from rankwise.surgery.checkpoint import read_plan
from rankwise.training import results, resume
from sentences import check_sentence
from trust import fuzz, writers


def a_plan(**changes: Any) -> dict[str, Any]:
    return {**json.loads(fuzz.corpus("plan-replayed")[0]), **changes}


# ---- JSON ------------------------------------------------------------------------------------------------


def test_a_key_that_stands_twice_is_refused() -> None:
    """Another reader might see the other value."""
    text = json.dumps(a_plan()).replace('"rank":', '"rank": 1, "rank":', 1)
    assert "'rank' stands twice" in check_sentence(lambda: Plan.loads(text))
    assert files.parse('{"a": {"a": 1}, "b": {"a": 1}}', "x") == {"a": {"a": 1}, "b": {"a": 1}}


@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_refused_where_it_is_read(opens: str, closes: str) -> None:
    """Otherwise whoever copies or writes the value again runs out of frames."""
    for depth in (80, 120, 600, 900, 10**5):
        text = json.dumps(a_plan(settings={"x": "@"})).replace('"@"', opens * depth + "1" + closes * depth)
        if depth < 100:
            assert Plan.loads(Plan.loads(text).dumps()) == Plan.loads(text)
        else:
            assert "nested too deeply" in check_sentence(lambda text=text: Plan.loads(text))


def test_many_brackets_side_by_side_are_no_nesting() -> None:
    assert files.parse(json.dumps({"a": [[i] for i in range(5000)]}), "x")["a"][-1] == [4999]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [10**9, 10**9], "rank": 10**9},
        {"rank": 10**9},
        {"slices": 10**9},
        {"outer": 10**9, "decomposition": "tucker2"},
        {"clusters": [[0], [10**9]], "decomposition": "messi"},
        {"heads": ["7"]},
    ],
    ids=str,
)
def test_a_plan_of_absurd_sizes_is_refused_before_anything_is_made(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = a_plan()
    at = next(i for i, entry in enumerate(plan["layers"]) if "rank" in entry)
    plan["layers"][at] |= change
    made = Plan.loads(json.dumps(plan))
    monkeypatch.setattr("rankwise.surgery.replace.build_pair", lambda *_: pytest.fail("modules were made"))
    check_sentence(lambda: rw.apply_plan(fuzz.small_network(), made))


@pytest.mark.parametrize("head", ["model.norm", "model.layers.0.mlp.up_proj", "model.layers.0"])
def test_a_head_that_shares_no_weight_is_refused(head: str) -> None:
    """The plan of a folder for transformers names the heads of an embedding, and they would be replaced with it."""
    pytest.importorskip("transformers")
    from rankwise import hf

    network, _ = writers.language(-1)
    choice = writers.language(0)[1].choices[0]
    made = replace(choice, name="model.embed_tokens", kind="Embedding", shape=(12, 16), heads=(head,))
    assert repr(head) in check_sentence(lambda: hf._described(made, dict(network.named_modules())))
    assert hf._described(replace(made, heads=("lm_head",)), dict(network.named_modules())).heads == ("lm_head",)


# ---- studies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"a" + b".a" * 2_000_000 + b" = 1",
        b"[a" + b".'='" * 1_000_000 + b"]",
        b'x = {"a"' + b'."."' * 1_000_000 + b" = 1}",
        b"[a" + b".a" * 10_000 + b"]\n" + b"".join(b"b%d=1\n" % i for i in range(100_000)),
    ],
    ids=["key", "header", "inline table", "keys below a header"],
)
def test_keys_of_many_parts_are_refused_at_once(text: bytes) -> None:
    """tomllib would take hours for these 4 MB."""
    assert "take too long to read" in check_sentence(lambda: parse_study(text, "s", "s.toml"))


def test_a_long_study_is_read() -> None:
    keeps = [round(0.1 + i / 4000, 5) for i in range(2000)]
    text = f'keeps = {keeps}\nmethods = ["svd"]\n[[network]]\nmodel = "digits-cnn"\ndata = "digits"\n'
    assert len(parse_study(text.encode(), "s", "s.toml").cells()) == 2000


@pytest.mark.parametrize("body", [b"{}", b'{"status": "done"}', b'{"kind": "cell", "format": 1, "status": 5}', b"["])
def test_what_lies_in_the_place_of_a_row_hides_no_cell(body: bytes, tmp_path: Path) -> None:
    network = {"model": "digits-cnn", "data": "digits", "limit": 48, "set": {"epochs": 1, "retrain": 0, "warmup": 0}}
    study = fill_in(make_study({"methods": ["svd"], "keeps": [0.5], "network": [network]}, "s", "s.toml"), [], [])
    (tmp_path / "rows").mkdir()
    path = tmp_path / "rows" / f"{study.cells()[0].name}.json"
    path.write_bytes(body)
    said = check_sentence(lambda: runner.run_study(study, tmp_path, lambda count: pytest.fail("it went on")))
    assert str(path) in said


# ---- tensors ---------------------------------------------------------------------------------------------


def tensors(entries: dict[str, Any], data: bytes) -> bytes:
    about = {"rankwise": '{"same": {}}', "rankwise-table": fuzz.corpus("table-header")[0].decode()}
    about |= {"rankwise-state": json.dumps({"format": 1, "job": {}, "epoch": 0, "history": []})}
    text = json.dumps({"__metadata__": about, **entries}).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("name", ["table-file", "weights", "network-weights", "training-state"])
@pytest.mark.parametrize(
    "entries",
    [
        {"model/a": entry(0, 8, [2]), "model/b": entry(4, 12, [2])},
        {"model/a": entry(0, 8, [2]), "model/b": entry(0, 8, [2])},
        {"model/a": entry(0, 12, [2**62])},
        {"model/a": entry(0, 12, [3]), "model/b": entry(12, 12, [0, 2**63])},
        {"model/a": entry(12, 0, [3])},
    ],
    ids=["overlapping", "the same", "too large", "empty and too large", "backwards"],
)
def test_tensors_that_cannot_be(name: str, entries: dict[str, Any]) -> None:
    check_sentence(lambda: fuzz.TARGETS[name].run(tensors(entries, b"\0" * 12)))


@pytest.mark.parametrize(("dtype", "size"), [("BF16", 2), ("F8_E4M3", 1), ("F8_E5M2", 1), ("F4", 0.5), ("C64", 8)])
def test_a_table_of_numbers_that_numpy_does_not_have(dtype: str, size: float) -> None:
    length = int(8 * size)
    data = tensors({"0": entry(0, length, [8], dtype)}, b"\1" * length)
    check_sentence(lambda: rw.Table.load(fuzz.put("odd.table", data)))


def test_complex_weights_are_not_cut_down_to_real_ones(tmp_path: Path) -> None:
    network = nn.Linear(3, 2)
    torch.save({k: v.to(torch.complex64) for k, v in network.state_dict().items()}, tmp_path / "w.pth")
    assert "complex: weight, bias" in check_sentence(lambda: networks.load_weights_(network, tmp_path / "w.pth"))


# ---- what is no file -------------------------------------------------------------------------------------


def index_beside(folder: Path) -> Path:
    (folder / "m.safetensors.index.json").write_text('{"weight_map": {"weight": "a.safetensors"}}')
    return folder / "m.safetensors.index.json"


@pytest.mark.parametrize("kind", ["pipe", "loop", "device", "folder"])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("plan.json", read_plan),
        ("plan.json", lambda folder: rw.load(folder, nn.Linear(2, 2))),
        ("plan.json", lambda folder: networks.build(str(folder))),
        ("config.json", read_plan),
        ("model.safetensors", lambda folder: networks.build(str(folder))),
        ("w.pth", lambda folder: networks.load_weights_(nn.Linear(2, 2), folder / "w.pth")),
        ("m.safetensors.index.json", lambda folder: networks.load_weights_(nn.Linear(2, 2), next(folder.iterdir()))),
        ("a.json", results.read_rows),
        ("s.toml", lambda folder: read_study(folder / "s.toml")),
        ("t.table", lambda folder: rw.Table.load(folder / "t.table")),
        ("a.safetensors", lambda folder: networks.load_weights_(nn.Linear(2, 2), index_beside(folder))),
        ("p.json", lambda folder: embedded._read_plan(folder, "p.json")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_waits_for_a_pipe(name: str, read: Callable[[Path], object], kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    check_sentence(lambda: read(tmp_path))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a\0b", "x" * 5000, "a/" * 3000, "\ud800"])
def test_a_row_names_files_of_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{}")
    (tmp_path / "rows").mkdir()
    check_sentence(lambda: embedded._read_plan(tmp_path / "rows", name))


# ---- training states -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, resume.State]:
    """A compressed network, and the state of its retraining after one epoch of two."""
    pytest.importorskip("sklearn")
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("begun")
    rw.save(*writers.digits(1), folder / "small")
    kept: list[resume.State] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "write", lambda place, state: kept.append(replace(state)))
        writers.steps.retrain(folder / "small", writers._run(folder, False), base="digits-cnn")
    return folder / "small", kept[1]


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 10**9},
        {"epoch": -1},
        {"epoch": 3, "model": {}},
        {"history": [1]},
        {"notes": {}},
        {"notes": {"compressed": 5}},
        {"notes": {"compressed": {"loss": 1.0}}},
        {"notes": {"compressed": {"top1": "90"}}},
        {"job": {}},
    ],
    ids=str,
)
def test_a_state_that_no_training_wrote(
    change: dict[str, Any], begun: tuple[Path, resume.State], tmp_path: Path
) -> None:
    """One that claims to be finished would pass for a trained network."""
    small, state = begun
    (tmp_path / "out").mkdir()
    resume.write(tmp_path / "out", replace(state, **change))
    again = writers._run(tmp_path, True)
    check_sentence(lambda: writers.steps.retrain(small, again, base="digits-cnn"))
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_rate_and_a_plan_that_are_none() -> None:
    for state in (resume.State({}, 0), resume.State({"recipe": {"lr": "1"}}, 0, notes={"plan": 5})):
        check_sentence(lambda state=state: resume.rate_of(state, "the state"))
        check_sentence(lambda state=state: resume.plan_of(state, "the state"))


def test_a_state_with_a_loss_that_is_none_can_be_gone_on_with() -> None:
    """Of a network that compression ruined."""
    made = replace(
        writers.made_state(1), history=[{"loss": float("nan")}], notes={"compressed": {"loss": float("inf")}}
    )
    found = resume.loads(resume.dumps(made), "the state")
    assert (found.history, found.notes) == ([{"loss": None}], {"compressed": {"loss": None}})


# ---- memory ----------------------------------------------------------------------------------------------


def test_an_import_without_memory_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(text: str) -> Callable[..., None]:
        def call(*_: object) -> None:
            raise SystemError(text)

        return call

    monkeypatch.setattr(program, "app_for", fails("error return without exception set"))
    assert program.main(["inspect", "x"]) == 1
    assert capsys.readouterr().err.startswith("rankwise: there is not enough memory")
    monkeypatch.setattr(program, "app_for", fails("bad argument to internal function"))
    with pytest.raises(SystemError):
        program.main(["inspect", "x"])
