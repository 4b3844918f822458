"""Block by block: a crash, a failing operation or a file of a stranger in what was put aside."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from rankwise.calibration.block_fit import factors_for
from rankwise.compression import BlockCompression
from rankwise.errors import RankwiseError
from rankwise.models.mapped import open_mapped
from rankwise.planning.table import Table
from sentences import check_sentence
from trust import fuzz

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

from trust import blocks, faults, writers
from trust.enumerate import SHARED_MEMORY, explore


@pytest.fixture
def place() -> Iterator[Path]:
    """In memory, where flushing takes no time."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def put_aside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the result and everything that was put aside on the way to it."""
    folder = tmp_path_factory.mktemp("whole") / "at" / "disk"
    folder.mkdir(parents=True)
    blocks.WRITER.prepare(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockCompression, "forget", lambda self: None)
        blocks.run(folder)
    return folder


def files_in(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in (folder / "out.blocks").rglob("*.safetensors"))


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    shutil.rmtree(to / "out")
    return to


def test_after_a_crash_it_goes_on() -> None:
    found = explore(blocks.WRITER, most=2, stride=9, every=40)
    assert not found.violations
    assert found.states >= 100


def test_what_fails_is_one_sentence_and_loses_nothing() -> None:
    with faults.shortened():
        found = faults.explore(blocks.COMMAND, faults.Search(("EIO",), lasting=(), stride=29, allocations=1))
    assert not found.violations
    assert found.failures >= 7


def test_it_goes_on_from_any_one_file(put_aside: Path, place: Path) -> None:
    """A crash while all of them are removed may leave any of them."""
    names = files_in(put_aside)
    assert {name.name.split("-")[0] for name in names} == {"given", "pull", "factors", "table", "ours", "pairs"}
    for i, kept in enumerate(names):
        folder = copied(put_aside, place / str(i))
        for name in names:
            if name != kept:
                (folder / name).unlink()
        blocks.WRITER.go_on(folder)


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("given-0", "given-1 given-2"),
        ("pull-2", "table"),
        ("factors", "ours pairs"),
        ("table-block-0", ""),
        ("ours-0", "pairs"),
        ("pairs-0", ""),
    ],
)
def test_a_file_of_another_job_is_refused_by_its_name(kind: str, without: str, put_aside: Path, place: Path) -> None:
    """What would be read next, after a kill, is of another network, or holds numbers of another kind."""
    (name,) = [name for name in files_in(put_aside) if name.name.startswith(kind)][:1]
    for i, tensors in enumerate(({"0": torch.ones(2, 2)}, {"a": torch.ones(2).to(torch.float8_e4m3fn)})):
        folder = copied(put_aside, place / str(i))
        for other in files_in(folder):
            if other.name.startswith(tuple(without.split())):
                (folder / other).unlink()
        (folder / name).write_bytes(save(tensors))
        with pytest.raises(RankwiseError, match=name.name):
            blocks.run(folder)
        check_sentence(lambda folder=folder: blocks.run(folder))
        assert not (folder / "out").exists()


def test_a_table_of_other_layers_is_refused(put_aside: Path, place: Path) -> None:
    folder = copied(put_aside, place / "a")
    for name in files_in(folder):
        if name.name == "table-block-1.safetensors":
            writers.table(0).save(folder / name)
            assert Table.load(folder / name)
    with pytest.raises(RankwiseError, match="a table of other layers"):
        blocks.run(folder)


def test_the_seeds_of_the_shelf_are_good() -> None:
    """Each is read by one of its readers: otherwise mutations would never get far."""
    shelf, pair, layer = fuzz.shelf_of_inputs()
    for name, read in {
        "given": lambda: shelf.get_list("a", [(2, 3), (1, 3)]),
        "pair": lambda: shelf.get("a", fuzz.SHELF),
        "factors": lambda: factors_for(shelf, pair, layer, 2),
        "lookup": lambda: factors_for(shelf, pair, layer, 2),
    }.items():
        data = (fuzz.CORPUS / "block-shelf" / f"{name}.bin").read_bytes()
        for file in ("a", "factors-a"):
            fuzz.put(f"{file}.safetensors", data)
        assert read()


def with_change(tensors: dict[str, Tensor], key: str, dtype: torch.dtype) -> bytes:
    return save({**tensors, key: tensors[key].to(dtype)})


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_numbers_that_no_network_computes_with_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    blocks.network().save_pretrained(tmp_path)
    tensors = {name: value.contiguous() for name, value in blocks.network().state_dict().items()}
    (tmp_path / "model.safetensors").write_bytes(with_change(tensors, "model.norm.weight", dtype))
    with pytest.raises(RankwiseError, match=r"model\.norm\.weight"):
        open_mapped(f"hf:{tmp_path}")


def test_a_dry_run_leaves_nothing_in_the_folder_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks.COMMAND.prepare(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    asked = blocks.COMMAND.first(tmp_path)
    at = asked.index("--out")
    status, said = faults.run([*asked[:at], *asked[at + 2 :], "--dry-run"])
    assert (status, said) == (0, "")
    assert not list((tmp_path / "here").iterdir())
