"""Where and how numbers are computed: one place, and the same numbers wherever it is."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.linalg import LinAlgError

import rankwise as rw
from rankwise.core import linalg
from sentences import check_sentence


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 99))
def test_factors_are_those_of_an_svd(rows: int, columns: int, seed: int) -> None:
    a = matrix(rows, columns, seed)
    left, right = linalg.factor(a)
    torch.testing.assert_close(left @ right, a)
    sigma = np.linalg.svd(a.numpy(), compute_uv=False)
    np.testing.assert_allclose(right.norm(dim=1)[: len(sigma)].numpy(), sigma, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(left.mT @ left, torch.eye(left.shape[1], dtype=a.dtype), rtol=0, atol=1e-6)


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 99))
def test_signs_do_not_depend_on_the_solver(rows: int, columns: int, seed: int) -> None:
    """A matrix and its negative have the same left vectors."""
    a = matrix(rows, columns, seed)
    torch.testing.assert_close(linalg.factor(a)[0], linalg.factor(-a)[0], rtol=1e-4, atol=1e-6)


def test_another_driver_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    a = matrix(5, 9)
    wanted, energies = linalg.factor(a), linalg.eigenvalues((a @ a.mT)[None])

    def diverge(*_: Tensor) -> Tensor:
        raise LinAlgError("no")

    monkeypatch.setattr(torch.linalg, "eigh", diverge)
    monkeypatch.setattr(torch.linalg, "eigvalsh", diverge)
    for got, known in zip(linalg.factor(a), wanted, strict=True):
        torch.testing.assert_close(got, known, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(linalg.eigenvalues((a @ a.mT)[None]), energies)


def test_a_matrix_that_is_not_positive_definite_gets_a_root() -> None:
    flat = torch.ones(4, 4, dtype=torch.float64)
    root = linalg.cholesky(flat, 1e-9)
    torch.testing.assert_close(root @ root.mT, flat, rtol=0, atol=1e-5)
    with pytest.raises(LinAlgError):
        linalg.cholesky(-flat, 1e-9)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)).eval()


@pytest.mark.parametrize("method", ["auto", "alds", "pca", "messi", "tucker2", "cp", "ft"])
def test_the_device_changes_nothing(method: str) -> None:
    """The CPU is where the network is, so all three are one; a device without float64 is refused before any work."""
    model, x = network(), torch.randn(16, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    found = [
        rw.compress(model, x[:1], method=method, keep=0.6, data=[x], device=device)
        for device in (None, "cpu", "network", torch.device("cpu"))
    ]
    for small, plan in found[1:]:
        assert plan == found[0][1]
        assert torch.equal(small(x), found[0][0](x))


@pytest.mark.parametrize("device", ["nowhere", "meta:x", "cuda:99"])
def test_a_device_that_is_not_there_is_one_sentence(device: str) -> None:
    said = check_sentence(lambda: rw.compress(network(), torch.zeros(1, 3, 6, 6), keep=0.6, device=device))
    assert device in said
    assert "network" in said


def test_one_place_names_the_precision() -> None:
    """No other file brings tensors to the CPU in float64, or asks torch for eigenvectors."""
    source = Path(rw.__file__).parent
    pattern = re.compile(r'"cpu", torch\.float64|torch\.linalg\.(eigh|svd)\(')
    found = [p.name for p in source.rglob("*.py") if pattern.search(p.read_text())]
    assert found == ["linalg.py"]
