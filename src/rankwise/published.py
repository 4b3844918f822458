"""Every number in the tables of Liebenwein et al. (2021), as data, to stand beside ours.

The files in published/ are copied from the source of the paper, and a test compares them with it. `CR-P` and `CR-F`
are in percent, `top1`, `top5` and `miou` changes in points; None stands for a field that the paper leaves blank.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from rankwise import jsonio
from rankwise.errors import RankwiseError

FOLDER = Path(__file__).parent / "published"
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
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        table = jsonio.parse(jsonio.read(path), str(path))
        jsonio.check_format(table, FORMAT, str(path))
        found[str(table["table"])] = table
    if not found:
        raise RankwiseError(f"the published numbers are not in {FOLDER}: install rankwise again")
    return found


def records(model: str, data: str, tables: str = "tab-supp:") -> list[dict[str, Any]]:
    """The results for one network on one data set, from tables whose label begins like that."""
    return [
        {**record, "table": label}
        for label, table in load().items()
        if label.startswith(tables)
        for record in table["records"]
        if (record.get("model"), record.get("data")) == (model, data)
    ]
