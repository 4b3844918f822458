"""Tables as files: one safetensors file with a JSON header and a checksum over both."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save as to_safetensors

from rankwise.core import files
from rankwise.core.border import SAME
from rankwise.core.disk import why
from rankwise.core.layer import Call, Coverage, Layer, Skipped
from rankwise.core.linalg import Array
from rankwise.core.measures import ALL_MEASURES
from rankwise.core.moments import Moments
from rankwise.core.option import Option
from rankwise.core.shards import UNREADABLE
from rankwise.decompositions import DECOMPOSITIONS, METRIC, PLAIN, check_option, full_rank, of
from rankwise.decompositions.clusters import DECOMPOSITION as CLUSTERS
from rankwise.errors import RankwiseError
from rankwise.planning.table import Table

FORMAT = 1


def _checksum(header: dict[str, Any], tensors: dict[str, Array]) -> str:
    text = json.dumps({k: v for k, v in header.items() if k != "checksum"}, ensure_ascii=False)
    digest = hashlib.sha256(text.encode())
    for key in sorted(tensors):
        digest.update(f"{key} {tensors[key].dtype} {tensors[key].shape}".encode())
        digest.update(np.ascontiguousarray(tensors[key]).data)
    return digest.hexdigest()


def write(table: Table, path: Path) -> None:
    tensors: dict[str, Array] = {}
    header: dict[str, Any] = {
        "format": FORMAT,
        "fingerprint": table.fingerprint,
        "coverage": asdict(table.coverage),
        "spectra": [_key(name, option) for name, option in table.spectra],
        "norms": [[name, fold, norm] for (name, fold), norm in table.norms.items()],
    }
    for i, values in enumerate(table.spectra.values()):
        tensors[str(i)] = np.ascontiguousarray(values)
    if table.given:  # most tables have neither curves of their own nor data behind them
        header["given"] = [
            [_key(name, option), option.decomposition, [*c]] for (name, option), c in table.given.items()
        ]
        for i, curves in enumerate(table.given.values()):
            tensors.update({f"given {i} {m}": np.ascontiguousarray(values) for m, values in curves.items()})
    if table.decompositions != (PLAIN.name,):
        header["decompositions"], header["clustering"] = table.decompositions, table.clustering
    if table.moments:
        header["moments"] = [[name, seen.count] for name, seen in table.moments.items()]
        for i, seen in enumerate(table.moments.values()):
            tensors[f"mean {i}"], tensors[f"scatter {i}"] = seen.mean.numpy(), seen.scatter.contiguous().numpy()
    header["checksum"] = _checksum(header, tensors)
    # One key only: safetensors writes several in random order, and the same table should give the same bytes.
    data = to_safetensors(tensors, metadata={"rankwise-table": json.dumps(header, ensure_ascii=False)})
    files.write_whole(path, data)


def read(path: Path) -> Table:
    where = str(path)
    if not os.path.isfile(path):
        raise RankwiseError(f"{where} is not a file: give the path that Table.save wrote")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except UNREADABLE as err:
        raise RankwiseError(f"{where} is not a whole safetensors file ({why(err)}): build the table again") from None
    if "rankwise-table" not in metadata:
        raise RankwiseError(f"{where} is a safetensors file but not a rankwise table")
    return read_header(files.parse(metadata["rankwise-table"], where), tensors, where)


def read_header(header: dict[str, Any], tensors: dict[str, Array], where: str) -> Table:
    """The table that a header and its tensors describe; every number in it may have been made up."""
    files.check_format(header, FORMAT, where)
    odd = sorted({str(values.dtype) for values in tensors.values() if values.dtype.kind not in "fiub"})
    if odd:
        raise RankwiseError(
            f"{where} holds numbers of a kind that tables do not have ({', '.join(odd)}): build it again"
        )
    if header.get("checksum") != _checksum(header, tensors):
        raise RankwiseError(f"{where} is damaged (its checksum does not fit): build the table again")
    coverage = _read_coverage(files.field(header, "coverage", dict, where), where)
    try:
        return _read_table(header, tensors, coverage, where)
    except RankwiseError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as err:
        raise RankwiseError(f"{where} is damaged ({err}): build the table again") from None


def _key(name: str, option: Option) -> list[Any]:
    return [name, option.fold, option.slices, *([option.clusters] if option.clusters else [])]


def _option(layer: Layer, key: list[Any], decomposition: str | None = None) -> Option:
    _, fold, k, *rest = key
    if type(k) is not int:
        raise ValueError(f"option {fold!r}, {k!r}")
    members = tuple(tuple(int(c) for c in cluster) for cluster in (rest[0] if rest else ()))
    option = Option(fold, k, decomposition or (CLUSTERS.name if members else PLAIN.name), clusters=members)
    # Options with two ranks stand together, without an outer rank.
    two = option.decomposition in DECOMPOSITIONS and of(option).outers(layer)
    check_option(layer, replace(option, outer=1) if two else option, "a layer of the table")
    return option


def _read_table(header: dict[str, Any], tensors: dict[str, Array], coverage: Coverage, where: str) -> Table:
    layers = {layer.name: layer for layer in coverage.layers}
    if any(min(layer.params, layer.macs or 0) < 0 for layer in coverage.layers):
        raise ValueError("a layer of negative size")
    found: dict[tuple[str, Option], Array] = {}
    for i, key in enumerate(header["spectra"]):
        layer = layers[key[0]]
        option = _option(layer, key)
        if tensors[str(i)].shape != (layer.groups, option.slices, full_rank(layer, option) + 1):
            raise ValueError(f"spectra of {key[:3]}")
        found[layer.name, option] = tensors[str(i)]
    norms = {(name, fold): float(norm) for name, fold, norm in header["norms"]}
    if not {(name, option.fold) for name, option in found} <= set(norms):
        raise ValueError("norms")
    table = Table(coverage, found, norms, files.field(header, "fingerprint", str, where))
    for i, (key, decomposition, measures) in enumerate(header.get("given", [])):
        layer = layers[key[0]]
        option = _option(layer, key, decomposition)
        curves = {m: tensors[f"given {i} {m}"] for m in measures if m in ALL_MEASURES}
        shape = _curve_shape(layer, option)
        least = 2 if of(option).needs == METRIC else shape[-1]  # those have ranks that are worth having, no others
        fits = [c.shape[:-1] == shape[:-1] and least <= c.shape[-1] <= shape[-1] for c in curves.values()]
        if not fits or not all(fits):
            raise ValueError(f"curves of {key[:3]}")
        table.given[layer.name, option] = curves
    table.decompositions = tuple(str(d) for d in header.get("decompositions", (PLAIN.name,)))
    table.clustering = str(header.get("clustering", ""))
    for i, (name, count) in enumerate(header.get("moments", [])):
        mean, scatter = (torch.from_numpy(tensors[f"{part} {i}"]) for part in ("mean", "scatter"))
        if name not in layers or scatter.shape != (*mean.shape, mean.shape[-1]):
            raise ValueError(f"moments of {name!r}")
        table.moments[name] = Moments(int(count), mean, scatter)
    return table


def _curve_shape(layer: Layer, option: Option) -> tuple[int, ...]:
    outers = of(option).outers(layer)
    return (outers, layer.group_channels + 1) if outers else (full_rank(layer, option) + 1,)


def _read_coverage(data: dict[str, Any], where: str) -> Coverage:
    """Every value has the type that it has in a network: shapes are multiplied, and a text times a number is a text."""
    layers = [_read_layer(entry, where) for entry in files.field(data, "layers", list, where)]
    skipped = []
    for entry in files.field(data, "skipped", list, where):
        entry = files.typed(entry, dict, f"every entry of 'skipped' of {where}")
        files.strict(entry, Skipped.__dataclass_fields__, f"a skipped layer of {where}")
        texts = {key: files.field(entry, key, str, where) for key in ("name", "kind", "reason")}
        skipped.append(Skipped(**texts, params=files.field(entry, "params", int, where)))
    macs = data.get("macs")
    macs = None if macs is None else files.typed(macs, int, f"'macs' of {where}")
    return Coverage(tuple(layers), tuple(skipped), files.field(data, "params", int, where), macs)


_TEXTS, _COUNTS = ("name", "kind", "padding_mode"), ("filters", "channels", "groups")
_SIZES = ("kernel", "stride", "dilation", "output_padding")
_LARGEST = 1 << 40  # of a number in a shape


def _read_layer(data: Any, where: str) -> Layer:
    data = files.typed(data, dict, f"every layer of {where}")
    files.strict(data, Layer.__dataclass_fields__, f"a layer of {where}")
    calls, padding, border = data.get("calls"), data.get("padding", []), data.get("border", [])
    simple: dict[str, Any] = {key: files.field(data, key, str, where) for key in _TEXTS}
    simple |= {key: files.field(data, key, int, where) for key in _COUNTS}
    simple |= {key: files.whole_numbers(files.field(data, key, list, where), f"{key!r} of {where}") for key in _SIZES}
    layer = Layer(
        **simple,
        padding=padding if isinstance(padding, str) else files.whole_numbers(padding, f"'padding' of {where}"),
        bias=files.field(data, "bias", bool, where),
        calls=None if calls is None else tuple(_read_call(c, where) for c in files.typed(calls, list, "'calls'")),
        aliases=tuple(files.typed(a, str, f"an alias of {where}") for a in files.field(data, "aliases", list, where)),
        border=border if isinstance(border, str) else files.whole_numbers(border, f"'border' of {where}"),
        computed=files.typed(data.get("computed", False), bool, f"'computed' of {where}"),
        gains=files.typed(data.get("gains", 0), int, f"'gains' of {where}"),
    )
    if layer.border not in ((), SAME) and (isinstance(border, str) or len(border) != 2 * layer.dims):
        raise RankwiseError(f"{where} is damaged (the border of a layer is {border}): build the table again")
    numbers = [*layer.kernel, layer.filters, layer.channels, layer.groups]
    if not all(1 <= n <= _LARGEST for n in numbers) or layer.filters % layer.groups or layer.channels % layer.groups:
        raise RankwiseError(f"{where} is damaged (a layer of an impossible shape): build the table again")
    if layer.dims > 3:
        raise RankwiseError(f"{where} is damaged (a kernel of {layer.dims} axes): build the table again")
    return layer


def _read_call(data: Any, where: str) -> Call:
    data = files.typed(data, dict, f"every call of {where}")
    inputs, outputs = (
        files.whole_numbers(files.field(data, key, list, where), f"{key!r} of {where}") for key in ("inputs", "outputs")
    )
    return Call(inputs, outputs, files.field(data, "count", int, where))
