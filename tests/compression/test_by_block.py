"""Networks block by block: the same numbers as all at once, and a job that is killed goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
import tiny_language as tiny
from rankwise.__main__ import main
from rankwise.calibration import effect_table
from rankwise.calibration.answers import change_of
from rankwise.calibration.block_sweeps import Sweeps
from rankwise.calibration.blocks import Blocks
from rankwise.calibration.inputs import CALIBRATION, Inputs
from rankwise.calibration.output_metric import influences
from rankwise.calibration.shelf import Shelf
from rankwise.compression import BlockCompression, Compression, Request, block_layers
from rankwise.core import workers
from rankwise.models.mapped import open_mapped

BUDGET = rw.Budget(params=0.8)


def texts(count: int = 6, seed: int = 0) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(tiny.VOCABULARY, (8, 16), generator=random)} for _ in range(count)]


def job(model: nn.Module, place: Path) -> BlockCompression:
    return BlockCompression(model, texts()[0], Request(), texts(), None, place)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_parts_of_a_network_in_a_row_are_the_network(family: str) -> None:
    model = tiny.FAMILIES[family]()
    parts, batch = Blocks(model), texts()[0]
    with torch.no_grad():
        hidden = parts.first(batch)
        for i in range(len(parts)):
            hidden = parts.run(i, parts.block(i), batch, hidden)
        torch.testing.assert_close(parts.last(batch, hidden)[0], model(**batch)[0])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_come_back_as_through_the_whole_network(family: str, tmp_path: Path) -> None:
    """E ‖Σ_p g_p‖² and moments of every layer: v is drawn anew, so gradients are compared on average."""
    model, inputs = tiny.FAMILIES[family](), Inputs(texts(40), CALIBRATION)
    coverage = rw.find_layers(model, texts()[0]).with_embeddings()
    sweeps = Sweeps(Blocks(model), inputs, Shelf(tmp_path))
    sweeps.forward()
    outer = [la for la in coverage.layers if not la.name.startswith(sweeps.parts.name)]
    found = sweeps.behind(outer)
    for i in reversed(range(len(sweeps.parts))):
        mine = [la for la in coverage.layers if la.name.startswith(sweeps.parts.prefix(i))]
        found |= {la.name: one for la, one in sweeps.block(i, mine)}
    found |= sweeps.before()
    whole = influences(model, inputs, list(coverage.layers), 5_000)
    assert set(found) == set(whole)
    for name, one in found.items():
        for ours, theirs in zip(one.halves, whole[name].halves, strict=True):
            if one.tokens is None:
                torch.testing.assert_close(ours.seen.scatter, theirs.seen.scatter, rtol=1e-4, atol=1e-4)
                assert float(ours.metric.diagonal(dim1=1, dim2=2).sum()) == pytest.approx(
                    float(theirs.metric.diagonal(dim1=1, dim2=2).sum()), rel=0.25
                )
        assert one.variance == pytest.approx(whole[name].variance)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_network_block_by_block_is_as_close_as_all_at_once(family: str, tmp_path: Path) -> None:
    model = tiny.FAMILIES[family]()
    small, plan = job(model, tmp_path).run(BUDGET)
    whole, other = Compression(model, texts()[0], Request(), texts()).run(BUDGET)
    new = texts(4, seed=9)
    ours, theirs = (change_of(model, net, new, 32.0) for net in (small, whole))
    assert 0 < ours < 1.3 * theirs
    assert plan.keep() <= 0.8
    assert plan.search.objective == pytest.approx(other.search.objective, rel=0.3)
    assert plan.search.measured == pytest.approx(ours, rel=0.5)
    assert sum(p.numel() for p in small.parameters()) == plan.after.params


KILLED = """
import os, signal, sys
from pathlib import Path
from rankwise.calibration.shelf import Shelf
import test_by_block as t

left = int(sys.argv[1])
put = Shelf.put

def dying(self, name, tensors):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    put(self, name, tensors)

Shelf.put = dying
t.job(t.tiny.llama(), Path(sys.argv[2])).run(t.BUDGET)
"""


@pytest.mark.parametrize("writes", [12, 23])
def test_a_killed_job_goes_on_where_it_was(writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, plan = job(tiny.llama(), tmp_path / "calm").run(BUDGET)
    total = len(list((tmp_path / "calm").rglob("*.safetensors")))
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    command = [sys.executable, "-c", KILLED, str(writes), str(tmp_path / "killed")]
    assert subprocess.run(command, env=where, check=False).returncode == -signal.SIGKILL
    there = len(list((tmp_path / "killed").rglob("*.safetensors")))
    assert 0 < there < total
    written: list[str] = []
    put = Shelf.put
    monkeypatch.setattr(Shelf, "put", lambda self, name, tensors: (written.append(name), put(self, name, tensors)))
    small, again = job(tiny.llama(), tmp_path / "killed").run(BUDGET)
    assert len(written) < total - there + 12  # a block that was begun is begun anew
    assert again == plan
    for ours, theirs in zip(small.state_dict().values(), wanted.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("family", "places"),
    [
        ("llama", [partial(workers.Pool, 1), partial(workers.Pool, 3)]),
        ("gpt2", [partial(workers.Pool, 2)]),
        ("llama", [partial(workers.Ray, "local", 2)]),
    ],
    ids=["llama", "gpt2", "ray"],
)
def test_layers_measured_by_any_workers_give_the_same_network(
    family: str, places: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One plan, one network, and nothing of theirs left behind."""
    if places[0].func is workers.Ray:
        pytest.importorskip("ray")
        monkeypatch.setenv("PYTHONPATH", str(Path(workers.__file__).parents[2]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in every worker: how sums are cut decides how they are rounded
    try:
        wanted, plan = job(tiny.FAMILIES[family](), tmp_path / "here").run(BUDGET)
        for number, make in enumerate(places):
            place = tmp_path / str(number)
            apart = BlockCompression(tiny.FAMILIES[family](), texts()[0], Request(), texts(), None, place, make)
            small, found = apart.run(BUDGET)
            assert not [path for path in place.rglob("*") if path.name.startswith(("seen-", "layer-"))]
            assert found == plan
            ours, theirs = small.state_dict(), wanted.state_dict()
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    finally:
        torch.set_num_threads(threads)


def test_what_goes_wrong_in_a_worker_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise rw.RankwiseError("the disk is full")

    monkeypatch.setattr(block_layers, "measure_apart", broken)
    one = BlockCompression(tiny.llama(), texts()[0], Request(), texts(), None, tmp_path, workers.Here)
    with pytest.raises(rw.RankwiseError, match=r"layer model.layers.1.self_attn.\w+: the disk is full"):
        one.run(BUDGET)


def test_weights_stay_in_their_files_until_they_are_used(tmp_path: Path) -> None:
    network = tiny.llama().to(torch.bfloat16)
    folder = tiny.folder(tmp_path / "net", network, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    mapped = open_mapped(f"hf:{folder}")
    for (name, ours), theirs in zip(mapped.state_dict().items(), network.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    batch = texts()[0]
    torch.testing.assert_close(mapped(**batch)[0], rw.networks.build(f"hf:{folder}")(**batch)[0])
    next(folder.glob("*-00001-*")).unlink()
    with pytest.raises(rw.RankwiseError, match="missing, damaged or cut short"):
        open_mapped(f"hf:{folder}")


def test_the_command_takes_a_folder_block_by_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny.folder(tmp_path / "net", tiny.llama(tie_word_embeddings=False).to(torch.bfloat16))
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("\n".join(tiny.SENTENCE * 3 for _ in range(60)))
    asked = ["compress", f"hf:{folder}", "--keep", "0.8", "--data", f"text:{text}", "--out", str(out), "--json"]
    more = ["--input", "16", "--calibrate", "24", "--no-report"]
    assert main([*asked, *more, "--blocks", "--workers", "2"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["settings"]["slices"] == 1
    assert not (tmp_path / "out.blocks").exists()
    small: Any = rw.load(out)
    assert small.dtype == torch.bfloat16
    assert sum(p.numel() for p in small.parameters()) == plan["after"]["params"]
    for refused, said in (
        (["--recover", "10"], "--recover trains the whole network"),
        (["--method", "svd"], "only method auto"),
        (["--max-drop", "5%"], "--blocks takes"),
        (["--workers", "0"], "give 1 or more"),
        (["--workers", "2", "--no-blocks"], "taken whole: add --blocks"),
    ):
        budget = [] if "--max-drop" in refused else ["--keep", "0.8"]
        ask = ["compress", f"hf:{folder}", *budget, "--data", f"text:{text}", "--out", str(tmp_path / "no"), "--blocks"]
        assert main([*ask, *refused]) == 2
        assert said in capsys.readouterr().err


def test_wide_layers_that_read_tokens_are_fitted_to_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(effect_table, "LARGEST", 8)
    plan = job(tiny.llama(), tmp_path / "wide").plan(BUDGET)
    assert {choice.option.decomposition for choice in plan.choices} <= {"whitened", "embedding"}
    monkeypatch.setattr(effect_table, "LONGEST", 8)
    small, plan = job(tiny.llama(), tmp_path / "too wide").run(BUDGET)
    assert "svd" in {choice.option.decomposition for choice in plan.choices}
    assert any("more than 8 inputs to a filter" in warning for warning in plan.warnings)
    assert sum(p.numel() for p in small.parameters()) == plan.after.params
