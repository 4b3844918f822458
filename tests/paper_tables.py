"""Reads the result tables out of the TeX source of the paper, to check the numbers that rankwise ships."""

from __future__ import annotations

import re
from typing import Any

METHODS = {
    "ALDS": "alds",
    "ALDS (Ours)": "alds",
    "PCA": "pca",
    "SVD-Energy": "svd-energy",
    "SVD": "svd",
    "L-Rank": "l-rank",
    "FT": "ft",
    "PFP": "pfp",
}
MODELS = {
    "ResNet20": ("resnet20", "cifar10"),
    "VGG16": ("vgg16", "cifar10"),
    "DenseNet22": ("densenet22", "cifar10"),
    "WRN16-8": ("wrn16-8", "cifar10"),
    "ResNet18": ("resnet18", "imagenet"),
    "MobileNetV2": ("mobilenet_v2", "imagenet"),
    "AlexNet": ("alexnet", "imagenet"),
    "DeeplabV3": ("deeplabv3_resnet50", "voc"),
    "DeeplabV3-ResNet50": ("deeplabv3_resnet50", "voc"),
}
BY_DELTA = ("tab-supp:cifar_retrain", "tab-supp:imagenet_retrain", "tab-supp:voc_retrain")
BY_SHARE = ("tab-supp:cifar_retrainsweep", "tab-supp:imagenet_retrainsweep")
BENCHMARKS = ("tab:imagenetbenchmarks", "tab-supp:imagenetbenchmarks")
SETTINGS = ("tab-supp:cifar_hyperparameters", "tab-supp:imagenet_hyperparameters", "tab-supp:voc_hyperparameters")
NUMBER = r"[-+]?\d+(?:\.\d+)?"


def parse(tex: str) -> dict[str, Any]:
    found: dict[str, Any] = {"tab:oneshot": one_shot(rows_of(tex, "tab:oneshot"))}
    for label in BY_DELTA:
        found[label] = grid(rows_of(tex, label), "delta", r"\\delta=([\d.]+)", 1.0)
    for label in BY_SHARE:
        found[label] = grid(rows_of(tex, label), "share", r"r=(\d+)\\%", 0.01)
    for label in BENCHMARKS:
        found[label] = benchmarks(rows_of(tex, label))
    for label in SETTINGS:
        found[label] = settings(rows_of(tex, label))
    return found


def tabular(tex: str, label: str) -> str:
    """The tabular of the table with that label, without comments."""
    at = tex.index(f"\\label{{{label}}}")
    begin = max(tex.rfind(f"\\begin{{{kind}}}", 0, at) for kind in ("table", "wraptable"))
    start = tex.index("\\begin{tabular}", begin)
    body = tex[start : tex.index("\\end{tabular}", start)]
    return re.sub(r"(?<!\\)%.*", "", body)


def rows_of(tex: str, label: str) -> list[list[str]]:
    """Cells of every row, as TeX."""
    body = tabular(tex, label)
    body = re.sub(r"\\shortstack\{([^{}]*)\}", lambda m: m[1].replace("\\\\", " "), body)
    body = re.sub(r"\\(hline|vspace\{[^}]*\}|cline\{[^}]*\})", " ", body)
    return [[cell.strip() for cell in row.split("&")] for row in re.split(r"\\\\", body)]


def number(text: str) -> float | None:
    match = re.search(NUMBER, text)
    return float(match[0]) if match else None


def model_in(text: str) -> tuple[str, dict[str, float]] | None:
    """The network that a cell of the first columns names, and its scores: `ResNet18 Top1: 69.62 Top5: 89.08`."""
    for name in sorted(MODELS, key=len, reverse=True):
        if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
            pairs = re.findall(rf"(Top1|Top5|IoU):\s*({NUMBER})", text)
            scores = {key: float(value) for key, value in pairs}
            twice = re.search(rf"Top1, 5:\s*({NUMBER})\\%, ({NUMBER})\\%", text)
            if twice:
                scores = {"Top1": float(twice[1]), "Top5": float(twice[2])}
            return name, {KEYS[k]: v for k, v in scores.items()}
    return None


KEYS = {"Top1": "top1", "Top5": "top5", "IoU": "miou"}


def head(name: str, reference: dict[str, float], label: str) -> dict[str, Any]:
    model, data = MODELS[name]
    return {"model": model, "data": data, "label": label, "method": METHODS.get(label), "reference": reference}


def bold(**cells: str) -> list[str]:
    return [key.replace("_", "-") for key, text in cells.items() if "textbf" in text]


def grid(rows: list[list[str]], axis: str, pattern: str, scale: float) -> list[dict[str, Any]]:
    """Methods by δ or by share of retraining, three columns for each: change, CR-P, CR-F."""
    found: list[dict[str, Any]] = []
    axes: list[float] = []
    current: tuple[str, dict[str, float]] | None = None
    names: list[str] = []
    for row in rows:
        joined = "&".join(row)
        axes = axes or [round(float(v) * scale, 4) for v in re.findall(pattern, joined)]
        if "Acc." in joined:
            names = [KEYS[n] for n in re.findall(r"Top1|IoU|Top5", row[3].replace("Top1/5", "Top1/Top5"))]
            continue
        current = next((m for m in map(model_in, row[:2]) if m), current)
        if len(row) < 3 or row[2] not in METHODS or current is None:
            continue
        for i, value in enumerate(axes):
            change, params, macs = row[3 + 3 * i : 6 + 3 * i]
            record = {**head(*current, row[2]), axis: value}
            if axis == "share":
                record["delta"] = 1.0
            else:
                record["share"] = 1.0
            parts = change.split("/") if change else [""] * len(names)
            record |= {key: number(part) for key, part in zip(names, parts, strict=True)}
            record |= {"CR-P": number(params), "CR-F": number(macs), "bold": bold(CR_P=params, CR_F=macs)}
            if "inf" in change:
                record["note"] = "-inf in the paper: in some repeats no ratio was good enough, which counts as 0"
            found.append(record)
    return found


def one_shot(rows: list[list[str]]) -> list[dict[str, Any]]:
    """Two rows for each network: changes, then CR-P and CR-F; a column for each method."""
    found: list[dict[str, Any]] = []
    labels = ["ALDS", "PCA", "SVD-Energy", "SVD", "L-Rank", "FT", "PFP"]
    current: tuple[str, dict[str, float]] | None = None
    changes: list[list[float]] = []
    names: list[str] = []
    for row in rows:
        if len(row) < 10:
            continue
        current = next((m for m in map(model_in, row[:2]) if m), current)
        if "Delta" in row[2]:
            names = [KEYS[n] for n in re.findall(r"Top1|Top5|IoU", row[2])]
            changes = [[float(v) for v in re.findall(NUMBER, cell)] for cell in row[3:10]]
        elif "CR-P" in row[2] and current is not None:
            for label, cell, change in zip(labels, row[3:10], changes, strict=True):
                parts = cell.split(",")
                params, macs = (number(part) for part in parts)
                record = {**head(*current, label), "delta": 0.5, "share": 1.0}
                record |= dict(zip(names, change, strict=True)) | {"CR-P": params, "CR-F": macs}
                found.append({**record, "bold": bold(CR_P=parts[0], CR_F=parts[1])})
    return found


def benchmarks(rows: list[list[str]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    current: tuple[str, dict[str, float]] | None = None
    for row in rows:
        current = model_in(row[0]) or current
        if len(row) < 5 or current is None or "Method" in row[1]:
            continue
        label = re.split(r"~|\{\\tiny", row[1])[0].strip()
        keys = ["top1", "top5", "CR-F"] if len(row) == 5 else ["top1", "top5", "CR-P", "CR-F"]
        values = {key: number(cell) for key, cell in zip(keys, row[2:], strict=True)}
        marked = [key for key, cell in zip(keys, row[2:], strict=True) if "textbf" in cell]
        record = head(*current, label)
        record["method"] = "alds" if label.startswith("ALDS") else None  # others are numbers of other papers
        found.append({**record, **values, "bold": marked})
    return found


def settings(rows: list[list[str]]) -> list[dict[str, Any]]:
    """Hyperparameters as they are printed, one record for each network."""
    columns: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if any("Hyperparameters" in cell for cell in row):
            at = next(i for i, cell in enumerate(row) if "Hyperparameters" in cell)
            columns = row[at + 1 :]
            found = {name: {"network": name} for name in columns}
        elif columns and len(row) > len(columns):
            name = re.sub(r"\\text\{(\w+)\}", r"\1", row[-len(columns) - 1]).replace("\\%", "%")
            for column, cell in zip(columns, row[-len(columns) :], strict=True):
                found[column][plain(name)] = plain(cell)
    return list(found.values())


def plain(text: str) -> str:
    signs = {"\\xmark": "no", "\\checkmark": "yes", "\\alpha": "α", "\\ldots": "…", "``": "", "''": ""}
    for tex, sign in signs.items():
        text = text.replace(tex, sign)
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\s+", " ", re.sub(r"[$\\{}]", "", text)).strip()
