"""The published numbers: complete, and those of the paper."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import paper_tables
from rankwise.reports import published
from rankwise.training.recipes import RECIPES

SOURCE = Path(__file__).resolve().parents[3] / "shared" / "paper" / "alds.tex"
RESULTS = [label for label in published.load() if "hyper" not in label]


@pytest.fixture(scope="module")
def tex() -> str:
    if not SOURCE.is_file():
        pytest.skip("the source of the paper is not here")
    return SOURCE.read_text()


def test_every_table_is_there() -> None:
    sizes = {label: len(table["records"]) for label, table in published.load().items()}
    assert sizes == {
        "tab:oneshot": 7 * 7,
        "tab-supp:cifar_retrain": 4 * 7 * 5,
        "tab-supp:imagenet_retrain": 2 * 7 * 5,
        "tab-supp:voc_retrain": 7 * 5,
        "tab-supp:cifar_retrainsweep": 7 * 6,
        "tab-supp:imagenet_retrainsweep": 7 * 6,
        "tab:imagenetbenchmarks": 17 + 10,
        "tab-supp:imagenetbenchmarks": 19 + 11,
        "tab-supp:cifar_hyperparameters": 4,
        "tab-supp:imagenet_hyperparameters": 3,
        "tab-supp:voc_hyperparameters": 1,
    }


def test_they_are_those_of_the_paper(tex: str) -> None:
    parsed = paper_tables.parse(tex)
    ours = {label: table["records"] for label, table in published.load().items()}
    assert ours == parsed


def numbers_in(record: dict[str, Any]) -> list[float]:
    return [record[k] for k in ("top1", "top5", "miou", "CR-P", "CR-F") if record.get(k) is not None]


@pytest.mark.parametrize("label", RESULTS)
def test_no_number_is_lost(tex: str, label: str) -> None:
    """Counted without taking the table apart: every decimal number in its cells is in the data, as often as there."""
    body = paper_tables.tabular(tex, label)
    body = re.sub(r"\\(multirow|multicolumn|cline|rotatebox|citep|citeyear)\{[^}]*\}(\{[^}]*\})?", " ", body)
    body = re.sub(r"(Top1|Top5|IoU|Top1, 5): [\d., \\%]+|delta=[\d.]+|r=\d+", " ", body)
    found = Counter(float(n) for n in re.findall(r"[-+]?\d+\.\d+", body))
    ours = Counter(float(n) for r in published.load()[label]["records"] for n in numbers_in(r))
    assert not found - ours
    assert not ours - found


def test_a_few_by_hand() -> None:
    alds = [r for r in published.records("resnet20", "cifar10") if r["method"] == "alds" and r.get("delta") == 0.5]
    assert [(r["top1"], r["CR-P"], r["CR-F"]) for r in alds] == [(-0.47, 74.91, 67.86)]
    lost = [r for r in published.records("resnet18", "imagenet") if "note" in r]
    assert [r["CR-P"] for r in lost if r["method"] == "pca"] == [3.33, 6.65]
    assert all(r["top1"] is None for r in lost)


def test_hyperparameters_are_those_of_the_recipes() -> None:
    names = {"Resnet20": "resnet20", "VGG16": "vgg16", "DenseNet22": "densenet22", "WRN-16-8": "wrn16-8"}
    names |= {"ResNet18": "resnet18", "AlexNet": "alexnet", "MobileNetV2": "mobilenet_v2"}
    names |= {"DeeplabV3-ResNet50": "deeplabv3_resnet50"}
    tables = [t for label, t in published.load().items() if "hyper" in label]
    for record in (r for table in tables for r in table["records"]):
        recipe = RECIPES[f"paper:{names[record['network']]}"]
        assert recipe.epochs == int(record["Epochs"])
        assert recipe.batch_size == int(record["Batch size"])
        assert recipe.lr == float(record["LR"].split()[0])
        assert recipe.warmup == float(record["Warm-up"])
        assert recipe.weight_decay == float(record["Weight decay"])
        assert recipe.nesterov == (record["Nesterov"] == "yes")
        assert recipe.optimizer == record["Optimizer"].lower()
        assert recipe.alpha == float(record["α"])
        assert recipe.starts == int(record["n_seed"])
