"""Tables: the spectra of every (layer, fold, groups), computed once for a model and asked many times."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors
from torch import Tensor

from rankwise import jsonio
from rankwise.cost import Option, full_rank, options_for
from rankwise.decompose import Array, check_finite, factors, residual_norm, spectra
from rankwise.errors import RankwiseError
from rankwise.fold import all_folds
from rankwise.layer import Call, Coverage, Layer, Skipped
from rankwise.measure import FROM_SPECTRA, RECORDED, Curve, check_measure

FORMAT = 1
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
    `given[name, option]` holds the curves, by measure, of options that do not come from spectra.
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
        self.moments: dict[str, Any] = {}  # what the data said, by layer, for building what it was asked for
        self.cache: dict[Any, Any] = {}  # curves here, menus in allocate.py: all follow from the above
        self._factors: OrderedDict[tuple[str, Option], tuple[Tensor, Tensor]] = OrderedDict()

    def options(self, layer: Layer) -> list[Option]:
        if "options" not in self.cache:
            index: dict[str, list[Option]] = {}
            for name, option in (*self.spectra, *self.given):
                index.setdefault(name, []).append(option)
            self.cache["options"] = index
        return list(self.cache["options"].get(layer.name, []))

    def curve(self, layer: Layer, option: Option, measure: str) -> Curve:
        """The error of a layer by rank. `exact` is evaluated entry by entry, only where it is asked for."""
        key = (layer.name, option, check_measure(measure))
        if key not in self.cache and (layer.name, option) in self.given:
            values = self.given[layer.name, option].get(measure)
            if values is None:
                raise RankwiseError(
                    f"the decomposition {option.decomposition!r} has no error by {measure!r}: it has "
                    f"{', '.join(self.given[layer.name, option])}"
                )
            self.cache[key] = Curve(values, values)
        if key not in self.cache:
            if measure == "output":
                raise RankwiseError("the measure 'output' is known for the decomposition 'pca' only: use method='pca'")
            self.cache[key] = self._exact(layer, option) if measure == "exact" else self._known(*key)
        return self.cache[key]  # type: ignore[no-any-return]

    def measures(self, layer: Layer, option: Option) -> tuple[str, ...]:
        """The measures that are at hand for an option without any work."""
        return tuple(self.given.get((layer.name, option), RECORDED))

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
        """One safetensors file: the spectra, and a JSON header with the layers."""
        if self.given:
            raise RankwiseError(
                "a table with calibration data cannot be saved: save one built without, and add the data again"
            )
        keys = list(self.spectra)
        header = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "coverage": asdict(self.coverage),
            "spectra": [[name, option.fold, option.groups] for name, option in keys],
            "norms": [[name, fold, norm] for (name, fold), norm in self.norms.items()],
        }
        tensors = {str(i): np.ascontiguousarray(self.spectra[key]) for i, key in enumerate(keys)}
        header["checksum"] = _checksum(header, tensors)
        # One key only: safetensors writes several in random order, and the same table should give the same bytes.
        data = to_safetensors(tensors, metadata={"rankwise-table": json.dumps(header, ensure_ascii=False)})
        jsonio.write_whole(Path(path), data)

    @classmethod
    def load(cls, path: str | Path, model: Any = None) -> Table:
        """Read a table; with a model, make sure it belongs to that model's present weights."""
        where = str(path)
        if not Path(path).is_file():
            raise RankwiseError(f"{where} is not a file: give the path that Table.save wrote")
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as err:
            raise RankwiseError(f"{where} is not a whole safetensors file ({err}): build the table again") from None
        if "rankwise-table" not in metadata:
            raise RankwiseError(f"{where} is a safetensors file but not a rankwise table")
        header = jsonio.parse(metadata["rankwise-table"], where)
        jsonio.check_format(header, FORMAT, where)
        if header.get("checksum") != _checksum(header, tensors):
            raise RankwiseError(f"{where} is damaged (its checksum does not fit): build the table again")
        table = _read_table(header, tensors, where)
        if model is not None:
            table.weights = module_weights(model, table.coverage)
            table.check(table.weights)
        return table


def _checksum(header: dict[str, Any], tensors: dict[str, Array]) -> str:
    text = json.dumps({k: v for k, v in header.items() if k != "checksum"}, ensure_ascii=False)
    digest = hashlib.sha256(text.encode())
    for key in sorted(tensors):
        digest.update(f"{key} {tensors[key].dtype} {tensors[key].shape}".encode())
        digest.update(np.ascontiguousarray(tensors[key]).data)
    return digest.hexdigest()


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
) -> Table:
    """All spectra, one layer at a time; deterministic. Options that need data are added afterwards."""
    # Read once for each layer, so a generator must become a list.
    folds = list(folds) if isinstance(folds, Iterable) and not isinstance(folds, str) else folds
    groups = list(groups) if isinstance(groups, Iterable) and not isinstance(groups, str) else groups
    found: dict[tuple[str, Option], Array] = {}
    norms: dict[tuple[str, str], float] = {}
    for done, layer in enumerate(coverage.layers):
        if progress:
            progress(layer.name, done, len(coverage.layers))
        weight = weights[layer.name]
        check_finite(weight, layer.name)
        wanted: dict[str, list[int]] = {}
        for option in options_for(layer, folds, groups) if "svd" in decompositions else ():
            wanted.setdefault(option.fold, []).append(option.groups)
        for fold, ks in wanted.items():
            arrays = spectra(weight, layer, fold, sorted({1, *ks}))  # k = 1 holds ‖W‖₂
            norms[layer.name, fold] = float(arrays[1].max())
            found.update({(layer.name, Option(fold, k)): arrays[k] for k in ks})
    if progress:
        progress("", len(coverage.layers), len(coverage.layers))
    return Table(coverage, found, norms, fingerprint(coverage, weights), weights)


def _read_table(header: dict[str, Any], tensors: dict[str, Array], where: str) -> Table:
    coverage = _read_coverage(jsonio.field(header, "coverage", dict, where), where)
    found: dict[tuple[str, Option], Array] = {}
    try:
        layers = {layer.name: layer for layer in coverage.layers}
        if any(min(layer.params, layer.macs or 0) < 0 for layer in coverage.layers):
            raise ValueError("a layer of negative size")
        for i, (name, fold, k) in enumerate(header["spectra"]):
            layer, option = layers[name], Option(fold, k)
            if fold not in all_folds(layer.dims) or type(k) is not int or k < 1:
                raise ValueError(f"option {fold!r}, {k!r}")
            if tensors[str(i)].shape != (layer.groups, k, full_rank(layer, option) + 1):
                raise ValueError(f"spectra of {name!r}, {fold}, {k}")
            found[name, option] = tensors[str(i)]
        norms = {(name, fold): float(norm) for name, fold, norm in header["norms"]}
        if not {(name, option.fold) for name, option in found} <= set(norms):
            raise ValueError("norms")
        return Table(coverage, found, norms, jsonio.field(header, "fingerprint", str, where))
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as err:
        if isinstance(err, RankwiseError):
            raise
        raise RankwiseError(f"{where} is damaged ({err}): build the table again") from None


def _read_coverage(data: dict[str, Any], where: str) -> Coverage:
    try:
        layers = []
        for entry in data["layers"]:
            calls = entry["calls"]
            if calls is not None:
                calls = tuple(Call(tuple(c["inputs"]), tuple(c["outputs"]), c["count"]) for c in calls)
            body: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items() if k != "calls"}
            layers.append(Layer(**body, calls=calls))
        skipped = tuple(Skipped(**entry) for entry in data["skipped"])
        return Coverage(tuple(layers), skipped, data["params"], data["macs"])
    except (KeyError, TypeError) as err:
        raise RankwiseError(f"{where} is damaged ({err}): build the table again") from None
