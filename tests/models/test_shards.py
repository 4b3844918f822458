"""Weights in several files behind an index: read whole, or refused in one sentence; an index leads nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rankwise.errors import RankwiseError
from rankwise.models.networks import load_weights_
from sentences import check_sentence


def write(folder: Path, model: nn.Module, **changes: str) -> Path:
    """Two files and their index; `changes` are other files for some tensors."""
    state = model.state_dict()
    where = {name: f"m-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(state)}
    for file in set(where.values()):
        save_file({name: state[name] for name in state if where[name] == file}, folder / file)
    path = folder / "m.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": {**where, **changes}}))
    return path


def test_every_tensor_arrives(tmp_path: Path) -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    load_weights_(target, write(tmp_path, source))
    for name, value in source.state_dict().items():
        assert torch.equal(value, target.state_dict()[name])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("../m.safetensors", "only files beside it"),
        ("/etc/m.safetensors", "only files beside it"),
        ("..\\m.safetensors", "only files beside it"),
        ("a\0.safetensors", "only files beside it"),
        ("m.bin", "only files beside it"),
        ("x" * 300 + ".safetensors", "only files beside it"),
        ("other.safetensors", "not beside it"),
        ("m-00002-of-00002.safetensors", "no such tensor"),
    ],
)
def test_an_index_that_is_wrong(tmp_path: Path, name: str, says: str) -> None:
    target = nn.Linear(3, 2)
    before = target.weight.clone()
    path = write(tmp_path, nn.Linear(3, 2), weight=name)
    check_sentence(lambda: load_weights_(target, path))
    with pytest.raises(RankwiseError, match=says):
        load_weights_(target, path)
    assert torch.equal(before, target.weight)


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path, nn.Linear(3, 2))
    shard = tmp_path / "m-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(RankwiseError, match="damaged or cut short"):
        load_weights_(nn.Linear(3, 2), path)
