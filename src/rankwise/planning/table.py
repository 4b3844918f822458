"""Tables: the spectra of every (layer, fold, groups), computed once for a model and asked many times."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankwise.core.fold import fold_for
from rankwise.core.layer import Coverage, Layer
from rankwise.core.linalg import Array
from rankwise.core.measures import FROM_SPECTRA, RECORDED, Curve, check_measure
from rankwise.core.moments import Moments
from rankwise.core.option import Option, full_rank, options_for
from rankwise.decompositions import clusters, tucker
from rankwise.decompositions.slices import check_finite, cluster_spectra, factors, residual_norm, spectra
from rankwise.errors import RankwiseError
from rankwise.planning.times import Times

Weights = Mapping[str, Tensor]
Progress = Callable[[str, int, int], None]  # layer's name, layers done, layers in all

# Factors kept for `exact`, in float64 entries: 1 << 25 of them are 256 MB.
FACTOR_CACHE = 1 << 25


def fingerprint(coverage: Coverage, weights: Weights) -> str:
    """A hash of the weights that a table was made from: names, shapes, dtypes and every bit."""
    digest = hashlib.sha256()
    for layer in coverage.layers:
        weight = weights[layer.name].detach()
        digest.update(f"{layer.name}\0{tuple(weight.shape)}\0{weight.dtype}\0".encode())
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Table:
    """Spectra of a model's layers, and the error curves that follow from them.

    `spectra[name, option]` has shape (G, k, r + 1), `norms[name, fold]` is ‖W‖₂ of that fold's matrix.
    `given[name, option]` holds curves, by measure, that do not come from spectra. Options with a core have two ranks:
    the option there has no outer rank, and row r − 1 is outer rank r.
    The weights themselves are not part of a table: only `exact` needs them, and finds them in `weights`.
    """

    def __init__(
        self,
        coverage: Coverage,
        spectra: dict[tuple[str, Option], Array],
        norms: dict[tuple[str, str], float],
        fingerprint: str,
        weights: Weights | None = None,
        given: dict[tuple[str, Option], dict[str, Array]] | None = None,
    ) -> None:
        self.coverage, self.spectra, self.norms, self.fingerprint = coverage, spectra, norms, fingerprint
        self.weights, self.given = weights, given or {}
        self.decompositions = tuple(sorted({"svd", *(o.decomposition for _, o in (*self.spectra, *self.given))}))
        self.clustering = ""  # how the clusters of messi were found, if there are any
        self.moments: dict[str, Moments] = {}  # what the data said, by layer, for building what it was asked for
        self.times: Times | None = None  # measured, for budgets in latency; not part of a file
        self.cache: dict[Any, Any] = {}  # curves here, menus in allocate.py: all follow from the above
        self._factors: OrderedDict[tuple[str, Option], tuple[Tensor, Tensor]] = OrderedDict()

    def options(self, layer: Layer) -> list[Option]:
        if "options" not in self.cache:
            index: dict[str, list[Option]] = {}
            for name, option in dict.fromkeys([*self.spectra, *self.given]):
                index.setdefault(name, []).extend(self._ranks_of(name, option))
            self.cache["options"] = index
        return list(self.cache["options"].get(layer.name, []))

    def _ranks_of(self, name: str, option: Option) -> list[Option]:
        if not option.cored:
            return [option]
        rows = len(next(iter(self.given[name, option].values())))
        return [replace(option, outer=r) for r in range(1, rows + 1)]

    def curve(self, layer: Layer, option: Option, measure: str) -> Curve:
        """The error of a layer by rank. `exact` is evaluated entry by entry, only where it is asked for."""
        key = (layer.name, option, check_measure(measure))
        if key not in self.cache:
            values = self._given(layer, option).get(measure)
            if values is not None:
                values = values[option.outer - 1, : full_rank(layer, option) + 1] if option.outer else values
                self.cache[key] = Curve(values, values)
            elif measure == "output" or (layer.name, option) not in self.spectra:
                raise RankwiseError(
                    f"layer {layer.name!r} has no error by {measure!r} for the decomposition {option.decomposition!r}: "
                    f"it has {', '.join(self.measures(layer, option))}; 'output' needs calibration data "
                    f"and error='output' already where the table is built"
                )
            else:
                self.cache[key] = self._exact(layer, option) if measure == "exact" else self._known(*key)
        return self.cache[key]  # type: ignore[no-any-return]

    def _given(self, layer: Layer, option: Option) -> dict[str, Array]:
        return self.given.get((layer.name, replace(option, outer=0) if option.outer else option), {})

    def measures(self, layer: Layer, option: Option) -> tuple[str, ...]:
        """The measures that are at hand for an option without any work."""
        spectral = RECORDED if (layer.name, option) in self.spectra else ()
        return tuple(dict.fromkeys([*spectral, *(m for m in self._given(layer, option) if m != "residual")]))

    def _known(self, name: str, option: Option, measure: str) -> Curve:
        values = FROM_SPECTRA[measure](self.spectra[name, option], self.norms[name, option.fold])
        return Curve(values, values)

    def _exact(self, layer: Layer, option: Option) -> Curve:
        lower = self.curve(layer, option, "max").values().copy()
        upper = np.maximum(self.curve(layer, option, "rss").values(), lower)
        norm = self.norms[layer.name, option.fold]
        return Curve(lower, upper, lambda rank: residual_norm(*self._all_factors(layer, option), rank) / norm)

    def _all_factors(self, layer: Layer, option: Option) -> tuple[Tensor, Tensor]:
        key = (layer.name, option)
        if key not in self._factors:
            if self.weights is None:
                raise RankwiseError(
                    "the measure 'exact' needs the weights, and a table read from a file has none: "
                    "open it with Table.load(path, model)"
                )
            self._factors[key] = factors(self.weights[layer.name], layer, option)
        self._factors.move_to_end(key)
        while len(self._factors) > 1 and sum(u.numel() + v.numel() for u, v in self._factors.values()) > FACTOR_CACHE:
            self._factors.popitem(last=False)
        return self._factors[key]

    def check(self, weights: Weights) -> None:
        """Refuse to serve a model whose weights are not those the table was made from."""
        for layer in self.coverage.layers:
            weight = weights.get(layer.name)
            if weight is None or tuple(weight.shape) != layer.shape:
                found = "has no such layer" if weight is None else f"has {tuple(weight.shape)} there"
                raise RankwiseError(
                    f"the table belongs to another model: it has layer {layer.name!r} with weight {layer.shape}, "
                    f"and the model {found}"
                )
        if fingerprint(self.coverage, weights) != self.fingerprint:
            raise RankwiseError("the table is stale: the model's weights have changed since; build it again")

    def save(self, path: str | Path) -> None:
        """One safetensors file: the curves' numbers, and a JSON header with the layers."""
        from rankwise.planning import table_file

        table_file.write(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, model: Any = None) -> Table:
        """Read a table; with a model, make sure it belongs to that model's present weights."""
        from rankwise.planning import table_file

        table = table_file.read(Path(path))
        if model is not None:
            table.weights = module_weights(model, table.coverage)
            table.check(table.weights)
        return table


def module_weights(model: Any, coverage: Coverage) -> dict[str, Tensor]:
    """The weights of the covered layers that the model has, by name, as they are now."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {la.name: modules[la.name].weight for la in coverage.layers if hasattr(modules.get(la.name), "weight")}


def build(
    coverage: Coverage,
    weights: Weights,
    folds: str | int | Iterable[str | int] = "all",
    groups: str | int | Iterable[int] = "all",
    progress: Progress | None = None,
    decompositions: Iterable[str] = ("svd",),
    clustering: str = "projective",
    seed: int = 0,
    starts: int = 5,
) -> Table:
    """What the weights alone can say, one layer at a time; deterministic. What needs data is added afterwards.

    Where a decomposition has nothing to offer its plain form is: tucker2 of a layer without taps is an svd, and
    a convolution with groups of its own has consecutive slices instead of clusters.
    """
    # Read once for each layer, so a generator must become a list.
    folds = list(folds) if isinstance(folds, Iterable) and not isinstance(folds, str) else folds
    groups = list(groups) if isinstance(groups, Iterable) and not isinstance(groups, str) else groups
    wanted = tuple(decompositions)
    table = Table(coverage, {}, {}, fingerprint(coverage, weights), weights)
    table.decompositions, table.clustering = wanted, clustering if "messi" in wanted else ""
    for done, layer in enumerate(coverage.layers):
        if progress:
            progress(layer.name, done, len(coverage.layers))
        weight = weights[layer.name]
        check_finite(weight, layer.name)
        slices = options_for(layer, folds, groups) if "svd" in wanted else []
        if "tucker2" in wanted:
            if tucker.has_taps(layer):
                table.given[layer.name, tucker.family(layer)] = tucker.curves(weight, layer)
            else:
                slices += [o for o in options_for(layer, 0, 1) if o not in slices]
        if "messi" in wanted and layer.groups > 1:
            slices += [o for o in options_for(layer, 0, groups) if o not in slices]
        clustered = "messi" in wanted and layer.groups == 1
        add_slices_(table, layer, weight, slices, [fold_for(0, layer.dims)] if clustered else [])
        if clustered:
            for k in clusters.cluster_counts(groups, layer):
                for option in clusters.options(weight, layer, k, clustering, seed, starts):
                    table.spectra[layer.name, option] = cluster_spectra(weight, layer, option)
    if progress:
        progress("", len(coverage.layers), len(coverage.layers))
    return table


def add_slices_(table: Table, layer: Layer, weight: Tensor, options: list[Option], folds: list[str]) -> None:
    """The spectra of slices, and ‖W‖₂ of their folds and of those in `folds` (k = 1 holds it)."""
    by_fold: dict[str, list[int]] = {fold: [] for fold in folds}
    for option in options:
        by_fold.setdefault(option.fold, []).append(option.groups)
    for fold, ks in by_fold.items():
        arrays = spectra(weight, layer, fold, sorted({1, *ks}))
        table.norms[layer.name, fold] = float(arrays[1].max())
        table.spectra.update({(layer.name, Option(fold, k)): arrays[k] for k in ks})
