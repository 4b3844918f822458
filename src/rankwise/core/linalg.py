"""Linear algebra: the one place that decides where, how precisely and by which route we compute.

All numerics run in float64, on the CPU unless `computing_on` says otherwise. Singular values and vectors come from the
smaller Gram matrix, several times faster than an SVD and right to about 1e-8 of the largest one (docs/math.md,
"Spectra"). Where a solver fails another driver is tried, and vectors get canonical signs, so that the same weights give
the same factors everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from rankwise.errors import RankwiseError

__all__ = ["Array", "Ints", "LinAlgError"]

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

OWN = "network"  # the device that the weights are on
# Matrices from this size on go to LAPACK one by one: it works on a copy.
LARGE = 128
WIDE = 512  # moments of so many dimensions are computed with in float32
LARGEST = 1e140  # float64 ends at 1.8e308, and Gram matrices hold sums of squares
JITTERS = (1.0, 10.0, 100.0, 1000.0)

_DEVICE: ContextVar[str] = ContextVar("device", default="cpu")


@contextmanager
def computing_on(device: str | torch.device | None) -> Iterator[None]:
    """Numerics run there: "cpu" (None as well), "cuda", "cuda:1" …, or "network" for wherever the weights are."""
    name = "cpu" if device is None else str(device)
    if name != OWN:
        try:
            torch.empty(1, dtype=torch.float64, device=name)
        except (RuntimeError, TypeError, AssertionError, NotImplementedError) as err:
            why = (str(err).splitlines() or [""])[0]
            raise RankwiseError(
                f"device={name!r} cannot compute in float64 here ({why}): give 'cpu', 'network', or a device of torch"
            ) from None
    token = _DEVICE.set(name)
    try:
        yield
    finally:
        _DEVICE.reset(token)


def precise(tensor: Tensor) -> Tensor:
    """The tensor in float64, where numerics run; no gradients."""
    name = _DEVICE.get()
    return tensor.detach().to(tensor.device if name == OWN else name, torch.float64)


def working(tensor: Tensor) -> Tensor:
    """For moments of samples: in float64, but large matrices in float32, far below the noise of sampling."""
    found = precise(tensor) if tensor.shape[-1] < WIDE or tensor.dtype == torch.float64 else tensor.detach()
    return found if found.dtype in (torch.float32, torch.float64) else found.float()


def zeros(*shape: int) -> Tensor:
    """Zeros in float64, where numerics run; on the CPU where that depends on a network."""
    name = _DEVICE.get()
    return torch.zeros(*shape, dtype=torch.float64, device="cpu" if name == OWN else name)


def eye_like(matrix: Tensor) -> Tensor:
    """The identity of the size, type and place of a square matrix (or of the last two axes of a batch)."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def array(tensor: Tensor) -> Array:
    """As numpy: planning computes with arrays."""
    return tensor.detach().cpu().numpy()


def check_finite(weight: Tensor, name: str) -> None:
    """Refuse NaN, infinity and what would overflow, with the layer's name."""
    weight = weight.detach()
    if not bool(torch.isfinite(weight).all()):
        bad = int((~torch.isfinite(weight)).sum())
        raise RankwiseError(
            f"layer {name!r} has {bad} weights that are NaN or infinite: mend the checkpoint, or leave the "
            f"layer alone with --exclude {name} (in Python: exclude={name!r})"
        )
    if weight.numel() and float(weight.abs().max()) > LARGEST:
        raise RankwiseError(f"layer {name!r} has weights above {LARGEST:g}, whose squares overflow: rescale them")


def smaller_gram(matrix: Tensor) -> Tensor:
    """AAᵀ or AᵀA, whichever is smaller; (…, n, n)."""
    return matrix @ matrix.mT if matrix.shape[-2] < matrix.shape[-1] else matrix.mT @ matrix


def eigenvalues(matrices: Tensor) -> Tensor:
    """Eigenvalues of positive semi-definite matrices (n, m, m), largest first, never negative."""
    if matrices.shape[-1] >= LARGE and len(matrices) > 1:
        return torch.cat([eigenvalues(m) for m in torch.split(matrices, 1)])
    try:
        values: Tensor = torch.linalg.eigvalsh(matrices).flip(-1)
    except LinAlgError:
        values = torch.linalg.svdvals(matrices)  # another driver; the same numbers for such matrices
    return values.clamp_min(0)


def eigenvectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, largest first, and eigenvectors as columns, of symmetric positive semi-definite matrices."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
        return values.flip(-1), vectors.flip(-1)
    except LinAlgError:
        vectors, values, _ = torch.linalg.svd(matrix)
        return values, vectors


def singular(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ and Vᵀ of each of (…, n, m), strongest first, by the SVD itself: for many small matrices."""
    left, sizes, right = torch.linalg.svd(matrices, full_matrices=False)
    return left, sizes, right


def signs(vectors: Tensor) -> Tensor:
    """For every column the sign that makes its largest entry positive."""
    peak = vectors.gather(-2, vectors.abs().argmax(dim=-2, keepdim=True)).squeeze(-2)
    return torch.where(peak < 0, -1.0, 1.0).to(vectors)


def leading(matrix: Tensor, rank: int | None = None) -> Tensor:
    """Orthonormal eigenvectors of A Aᵀ, strongest first, with canonical signs."""
    vectors = eigenvectors(matrix @ matrix.t())[1][:, :rank]
    return vectors * signs(vectors)


def factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A = U V with orthonormal columns in U and V = ΣVᵀ, strongest first, signs made canonical."""
    matrix = precise(matrix)
    wide = matrix.shape[0] < matrix.shape[1]
    vectors = eigenvectors(smaller_gram(matrix))[1]
    if wide:
        left, right = vectors, vectors.t() @ matrix
    else:
        left = matrix @ vectors
        sigma = left.norm(dim=0)
        # A direction with σ = 0 has no left vector; zeros there leave the product as it is.
        left = left / sigma.where(sigma > 0, torch.ones_like(sigma))
        right = sigma[:, None] * vectors.t()
    sign = signs(left)
    return left * sign, right * sign[:, None]


def cholesky(square: Tensor, jitter: float) -> Tensor:
    """L with L Lᵀ = A + a little of the identity: `jitter`, and more where that is not enough."""
    jitter = jitter if square.dtype == torch.float64 else 1e3 * jitter
    *first, last = JITTERS
    for more in first:
        root: Tensor
        root, info = torch.linalg.cholesky_ex(square + more * jitter * eye_like(square))
        if not int(info):
            return root
    root = torch.linalg.cholesky(square + last * jitter * eye_like(square))
    return root


def tail(parts: Array) -> Array:
    """Entry j is the sum of what lies beyond the first j parts; the last entry is 0."""
    return np.append(np.cumsum(parts[::-1])[::-1], 0.0)
