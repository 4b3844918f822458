"""The whole story on data that ships with scikit-learn: train, compress, retrain, report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from rankwise import checkpoint, data, networks
from rankwise.budget import Budget
from rankwise.errors import RankwiseError
from rankwise.evaluate import evaluate
from rankwise.methods import allocate, build_table
from rankwise.plan import Plan
from rankwise.report import write_report
from rankwise.results import provenance, write_row
from rankwise.surgery import apply_plan
from rankwise.table import Progress, Table
from rankwise.train import fit_

MODEL = "digits-cnn"
METHODS = ("auto", "alds+", "alds", "svd-energy", "svd")
KEEPS = (0.6, 0.4, 0.25, 0.15, 0.1)
EPOCHS, RETRAIN = 12, 4
SHOWN = ("auto", 0.25)  # the plan that the report explains


def run_demo(out: Path, seed: int = 0, progress: Progress | None = None) -> dict[str, Any]:
    """Train once, then one row for each method and keep; writes rows/, a compressed folder and report.html."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise RankwiseError(f"the folder {out} could not be made ({err.strerror or err}): give another --out") from None
    say = progress or (lambda name, done, total: None)
    cells = [(method, keep) for keep in KEEPS for method in METHODS]
    say("training", 0, len(cells) + 1)
    train, test = data.load("digits", "train"), data.load("digits", "test")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = networks.build(MODEL)
    fit_(model, train, epochs=EPOCHS, seed=seed)
    model.eval()
    reference = evaluate(model, test).to_json()
    example = torch.zeros(1, 1, 8, 8)
    table = build_table(model, example, groups="all")
    rows = []
    for done, (method, keep) in enumerate(cells, start=1):
        say(f"{method} at keep {keep:g}", done, len(cells) + 1)
        row, plan, small = _cell(model, table, train, test, method, keep, seed)
        row["reference"] = reference
        rows.append(row)
        write_row(out / "rows" / f"{method}-{keep:g}.json", row)
        if (method, keep) == SHOWN:
            checkpoint.save(small, plan, out / "compressed")
            shown = plan
    about = ", ".join(f"{k} {v}" for k, v in provenance().items())
    intro = (
        f"A small convolutional network, trained for {EPOCHS} epochs on scikit-learn's handwritten digits, has "
        f"{table.coverage.params:,} parameters and gets {reference['top1']:.2f} % of {reference['n']} test images. "
        f"Each method makes it smaller; then every result is trained for {RETRAIN} more epochs. "
        f"One image is {100 / len(test):.2f} points."
    )
    write_report(out / "report.html", "rankwise: digits, smaller", intro, rows, shown, about)
    say("", len(cells) + 1, len(cells) + 1)
    return {"report": str(out / "report.html"), "reference": reference, "rows": rows}


def _cell(
    model: torch.nn.Module,
    table: Table,
    train: data.Split,
    test: data.Split,
    method: str,
    keep: float,
    seed: int,
) -> tuple[dict[str, Any], Plan, torch.nn.Module]:
    start = time.perf_counter()
    plan = allocate(table, Budget(params=keep), method=method, model=MODEL, seed=seed)
    small = apply_plan(model, plan)
    seconds = {"compress": time.perf_counter() - start}
    compressed = evaluate(small, test).to_json()
    start = time.perf_counter()
    fit_(small, train, epochs=RETRAIN, lr=0.03, seed=seed)
    seconds["retrain"] = time.perf_counter() - start
    row = {
        "status": "done",
        "model": MODEL,
        "data": "digits",
        "method": method,
        "asked": keep,
        "seed": seed,
        "keep": {"params": plan.keep("params"), "macs": plan.keep("macs")},
        "compressed": compressed,
        "retrained": evaluate(small, test).to_json(),
        "seconds": seconds,
        "provenance": provenance(),
    }
    return row, plan, small
