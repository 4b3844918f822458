"""Every number in the tables of Liebenwein et al. (2021), as data, to stand beside ours.

The files in published_tables/ are copied from the source of the paper, and a test compares them with it. `CR-P` and
`CR-F` are in percent, `top1`, `top5` and `miou` changes in points; None stands for a field that the paper leaves blank.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from rankwise.core import files
from rankwise.errors import RankwiseError

FOLDER = Path(__file__).parent / "published_tables"
FORMAT = 1


@cache
def load() -> dict[str, dict[str, Any]]:
    """Tables by their label in the paper, such as "tab:oneshot".

    A table is {"table": label, "title": text, "notes": [text], "records": [record]}. A record of a result table is
    {"model": "resnet20", "data": "cifar10", "label": "ALDS", "method": "alds" or None, "reference": {"top1": 91.39},
    "delta": 0.5, "share": 1.0, "top1": -0.47, "CR-P": 74.91, "CR-F": 67.86, "bold": ["CR-P", "CR-F"]}, where `delta` is
    the drop that was allowed and `share` the share of epochs that was retrained; benchmarks have neither. The records
    of hyperparameters are {"network": name, parameter: text}.
    """
    tables = [read_table(files.read(path), str(path)) for path in sorted(FOLDER.glob("*.json"))]
    found: dict[str, dict[str, Any]] = {table["table"]: table for table in tables}
    if not found:
        raise RankwiseError(f"the published numbers are not in {FOLDER}: install rankwise again")
    return found


def read_table(text: bytes, where: str) -> dict[str, Any]:
    """A table out of the content of a file, with everything in it that is read later."""
    table = files.parse(text, where)
    files.check_format(table, FORMAT, where)
    label = files.field(table, "table", str, where)
    for record in files.field(table, "records", list, where):
        record = files.typed(record, dict, f"a record of {where}")
        for key in () if label.endswith("hyperparameters") else ("model", "data", "label"):
            files.field(record, key, str, f"a record of {where}")
        for key in ("top1", "top5", "miou", "CR-P", "CR-F", "share", "delta"):
            if record.get(key) is not None:
                files.typed(record[key], float, f"{key!r} in a record of {where}")
    return table


def records(model: str, data: str, tables: str = "tab-supp:") -> list[dict[str, Any]]:
    """The results for one network on one data set, from tables whose label begins like that."""
    return [
        {**record, "table": label}
        for label, table in load().items()
        if label.startswith(tables)
        for record in table["records"]
        if (record.get("model"), record.get("data")) == (model, data)
    ]


def points() -> list[dict[str, Any]]:
    """Results of the supplement as points beside our curves: what was removed, and the change in points.

    {"network", "data", "method": as the paper calls it, "delta_top1" (of mean IoU for segmentation), "CR-P", "CR-F",
    "table", "share"}; a ratio of 0 stands for no network at all in the paper, and is no point.
    """
    return points_of(list(load().values()))


def points_of(tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for table in tables:
        label = table["table"]
        if not label.startswith("tab-supp:") or label.endswith("hyperparameters"):
            continue
        for record in table["records"]:
            change = record.get("miou") if record.get("miou") is not None else record.get("top1")
            if change is not None and record.get("CR-P"):
                names = {"network": record["model"], "data": record["data"], "method": record["label"], "table": label}
                cut = {unit: record.get(unit) for unit in ("CR-P", "CR-F")}
                found.append({**names, "delta_top1": change, **cut, "share": record.get("share")})
    return found
