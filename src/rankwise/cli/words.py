"""Names that help texts list, without the registries that hold them: those import torch, which takes seconds.

A test compares every line with its registry, so it cannot be out of date.
"""

from __future__ import annotations

METHODS = (
    "alds, alds+, alds-error, alds-simple, svd-error, svd, l-rank, svd-energy, pca, messi, tucker2, cp, ft, pfp, auto"
)
MEASURES = "bound, rss, max, energy, residual, exact, convex, output, effect"
DECOMPOSITIONS = "svd, pca, messi, tucker2, whitened, whitened-tucker2, cp, whitened-cp, embedding"
CLUSTERINGS = "consecutive, kmeans, projective, projective-robust"
SEARCHES = "alternate, minimax, sum, penalty, product, constant"
FILTER_SEARCHES = "sampling or minimax"
UNITS = "params, macs, latency"
BUDGET = (
    "Such as macs=0.5; units: params (a fraction or a count), macs (a fraction or a count), latency (a fraction); "
    "may be repeated."
)
ENGINES = "eager, compiled, onnx"
TARGETS = "onnx or exported"
LAYOUTS = "contiguous or channels-last"
