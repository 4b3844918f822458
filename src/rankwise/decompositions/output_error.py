"""What the measure `output` is relative to: how much a layer's outputs vary over calibration data.

With M = E[x xᵀ] of the patches a layer sees, an approximation Ŵ changes the outputs by

    E ‖(W − Ŵ) x‖² = Σ_f δ_f M δ_fᵀ,   δ_f the rows of W − Ŵ,

given relative to the outputs' variance (to their energy, where they never vary). `pca` is measured the same way
(pca.py), so all decompositions can be compared. Truncation is not optimal in this norm, so the error may rise a
little where a rank is added; a curve holds the largest error from each rank on. Of a transposed convolution, whose
taps overlap in the output, every tap is counted on its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rankwise.core.layer import canonical
from rankwise.core.linalg import precise
from rankwise.decompositions.base import Target, patch_moment


def variance(target: Target) -> float:
    """Σ_f Var(y_f) over the calibration data, or Σ_f E[y_f²] where nothing varies.

    From `target.outputs` where they are known: the patches of a transposed convolution do not say where they overlap.
    """
    seen, outputs = target.inputs, target.outputs
    assert seen is not None, "whoever asks has seen inputs"
    if outputs is not None:
        each = float(outputs.covariance.diagonal(dim1=1, dim2=2).sum())
        whole = each * outputs.count / max(1, seen.count)  # taps are counted for each input position
    else:
        whole = _through(target, seen.covariance)
    energy = _through(target, seen.second_moment)
    return whole if whole > 1e-12 * energy else energy


def _through(target: Target, moment: Tensor) -> float:
    rows = precise(canonical(target.weight.detach(), target.layer).flatten(2))
    return float(torch.einsum("gfa,gab,gfb->", rows, patch_moment(target.layer, moment), rows))
