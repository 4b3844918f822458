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

from rankwise.core.layer import Coverage, Layer
from rankwise.core.linalg import Array, check_finite
from rankwise.core.measures import DERIVED, FROM_SPECTRA, RECORDED, Curve, check_measure
from rankwise.core.moments import Moments
from rankwise.core.option import Option
from rankwise.decompositions import DECOMPOSITIONS, NOTHING, PLAIN, Scores, Selection, Target, full_rank
from rankwise.decompositions.base import without_outer
from rankwise.decompositions.clusters import DEFAULT
from rankwise.decompositions.slices import factors, residual_norm
from rankwise.errors import RankwiseError
from rankwise.planning.times import Times

Weights = Mapping[str, Tensor]
Progress = Callable[[str, int, int], None]  # layer's name, layers done, layers in all

# Factors kept for `exact`, in float64 entries: 1 << 25 of them are 256 MB.
FACTOR_CACHE = 1 << 25


def read_weight(module: Any) -> Tensor:
    """The weight of a module. Planning knows no modules: surgery/effective.py puts its own reader here."""
    weight: Tensor = module.weight
    return weight


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
    `given[name, option]` holds curves, by measure, that do not come from spectra. Where a decomposition has two ranks,
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
        self.decompositions = tuple(sorted({PLAIN.name, *(o.decomposition for _, o in (*self.spectra, *self.given))}))
        self.clustering = ""  # how the clusters of messi were found, if there are any
        self.moments: dict[str, Moments] = {}  # what the data said, by layer, for building what it was asked for
        self.times: Times | None = None  # measured, for budgets in latency; not part of a file
        self.cache: dict[Any, Any] = {}  # curves here, menus in allocate.py: all follow from the above
        self._factors: OrderedDict[tuple[str, Option], tuple[Tensor, Tensor]] = OrderedDict()

    def add(self, layer: Layer, scores: Scores) -> None:
        """What a decomposition says of the options of a layer."""
        self.norms.update({(layer.name, fold): norm for fold, norm in scores.norms.items()})
        self.spectra.update({(layer.name, option): values for option, values in scores.spectra.items()})
        self.given.update({(layer.name, option): curves for option, curves in scores.given.items()})

    def __repr__(self) -> str:
        options = len({*self.spectra, *self.given})
        return f"<Table of {len(self.coverage.layers)} layers with {options} options>"

    def options(self, layer: Layer) -> list[Option]:
        if "options" not in self.cache:
            index: dict[str, list[Option]] = {}
            for name, option in dict.fromkeys([*self.spectra, *self.given]):
                index.setdefault(name, []).extend(self._ranks_of(name, option))
            self.cache["options"] = index
        return list(self.cache["options"].get(layer.name, []))

    def _ranks_of(self, name: str, option: Option) -> list[Option]:
        curve = next(iter(self.given.get((name, option), {}).values()), None)
        if curve is None or curve.ndim == 1:
            return [option]
        return [replace(option, outer=r) for r in range(1, len(curve) + 1)]

    def curve(self, layer: Layer, option: Option, measure: str) -> Curve:
        """The error of a layer by rank. `exact` is evaluated entry by entry, only where it is asked for."""
        key = (layer.name, option, check_measure(measure))
        if key not in self.cache and measure in DERIVED:
            base, derive = DERIVED[measure]
            derived = derive(self.curve(layer, option, base).values())
            self.cache[key] = Curve(derived, derived)
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
        return self.given.get((layer.name, without_outer(option)), {})

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

    def scaled(self, measure: str, factors: Mapping[str, float]) -> Table:
        """A table with curves of one measure, which is given and not from spectra, times a factor for each layer."""

        def times(name: str, curves: dict[str, Array]) -> dict[str, Array]:
            return {
                key: values * factors.get(name, 1.0) if key == measure else values for key, values in curves.items()
            }

        given = {key: times(key[0], curves) for key, curves in self.given.items()}
        found = Table(self.coverage, self.spectra, self.norms, self.fingerprint, self.weights, given)
        found.decompositions, found.clustering = self.decompositions, self.clustering
        found.moments, found.times = self.moments, self.times
        return found

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
    found = {la.name: modules.get(la.name) for la in coverage.layers}
    return {name: read_weight(module) for name, module in found.items() if hasattr(module, "weight")}


def build(
    coverage: Coverage,
    weights: Weights,
    selection: Selection | None = None,
    decompositions: Iterable[str] = (PLAIN.name,),
    progress: Progress | None = None,
) -> Table:
    """What the weights alone can say, one layer at a time; deterministic. What needs data is added afterwards.

    Where a decomposition has nothing to offer its plain form is: tucker2 of a layer without taps is an svd, and
    a convolution with groups of its own has consecutive slices instead of clusters.
    """
    selection = selection or Selection()
    table = Table(coverage, {}, {}, fingerprint(coverage, weights), weights)
    table.decompositions = tuple(decompositions)
    for done, layer in enumerate(coverage.layers):
        if progress:
            progress(layer.name, done, len(coverage.layers))
        check_finite(weights[layer.name], layer.name)
        for name in table.decompositions:
            if DECOMPOSITIONS[name].needs == NOTHING:
                table.add(layer, DECOMPOSITIONS[name].score(Target(layer, weights[layer.name]), selection))
    if any(option.clusters for _, option in table.spectra):
        table.clustering = selection.clustering or DEFAULT
    if progress:
        progress("", len(coverage.layers), len(coverage.layers))
    return table
