"""A report of ten thousand rows: seconds to write it, its size, and seconds until a browser has drawn it.

    python benchmarks/report.py --out FOLDER

The rows are made up (their scores mean nothing) and the plans are real: four networks with random weights, fourteen
labels, two units, thirty budgets, three repeats.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import machine, say
from plotly.offline import get_plotlyjs

import rankwise as rw
from rankwise.models import networks
from rankwise.reports import html
from rankwise.training import results

NETWORKS = ("resnet20", "resnet56", "densenet22", "vgg16")
KEEPS = [round(0.2 + 0.025 * i, 3) for i in range(30)]
REPEATS, TURNS = 3, 5
PLANNED = ("svd-energy", "svd-error", "alds-error")  # quick ones; the labels below stand for any method
LABELS = (*rw.METHODS,)[:14]
# What the reports are waited for, on a page that has nothing to draw.
_DRAWN = '<div id="chart-macs"><svg class="main-svg" width="9"></svg></div><table id="runs-table"><tr><td>x</table>'


def generate(out: Path) -> int:
    """A RESULTS folder; returns how many rows it has."""
    for name in ("rows", "plans", "spectra"):
        (out / name).mkdir(parents=True)
    count = 0
    about = results.provenance()
    for network in NETWORKS:
        torch.manual_seed(0)
        model = networks.build(network).eval()
        shape = networks.default_input(network)
        table = rw.build_table(model, torch.zeros(shape), slices=[1, 3], folds=[0])
        spectra = {
            name: {option.fold: (array.flatten() / array.max()).tolist()}
            for (name, option), array in table.spectra.items()
            if option.slices == 1
        }
        (out / f"spectra/{network}.json").write_text(json.dumps({"model": network, "layers": spectra}))
        for at, label in enumerate(LABELS):
            for unit in ("params", "macs"):
                for keep in KEEPS:
                    # A little apart for each label, so that no two plans are the same.
                    budget = rw.Budget(**{unit: keep + 0.001 * at})
                    plan = rw.allocate(table, budget, method=PLANNED[at % 3], model=network)
                    for repeat in range(REPEATS):
                        write_row(out, network, label, unit, keep, repeat, plan, at, about)
                        count += 1
    return count


def write_row(
    out: Path, network: str, label: str, unit: str, keep: float, repeat: int, plan: rw.Plan, at: int, about: Any
) -> None:
    cell = f"{network}-{label}-{unit}-{keep:g}-{repeat}"
    if not repeat:
        plan.save(out / f"plans/{cell}.json")
    loss = (1 + at / 3) * math.exp(3 * (1 - keep)) / 4 + 0.1 * repeat
    reference = {"n": 10_000, "top1": 91.73 + repeat / 100, "top5": 99.7, "loss": 0.31}
    kept = {u: plan.keep(u) for u in ("params", "macs")}
    row = {
        "format": 1,
        "status": "done",
        "kind": "cell",
        "study": "made up",
        "cell": cell,
        "mode": "oneshot",
        "model": network,
        "data": "parquet:cifar10",
        "split": "test",
        "method": label,
        "label": label,
        "settings": plan.settings,
        "unit": unit,
        "asked": keep,
        "keep": kept,
        "CR-P": 100 * (1 - kept["params"]),
        "CR-F": 100 * (1 - kept["macs"]),
        "params": plan.after.params,
        "macs": plan.after.macs,
        "reference": reference,
        "compressed": {**reference, "top1": reference["top1"] - loss * 1.234567890123, "loss": loss / 7},
        "retrained": {**reference, "top1": reference["top1"] - loss / 9.87654321, "loss": loss / 70},
        "retrain": {"share": 1.0, "epochs": 182},
        "repeat": repeat,
        "seed": repeat,
        "seconds": {"compress": loss / 3.3, "train": 1000 * loss / 7},
        "plan": f"plans/{network}-{label}-{unit}-{keep:g}-0.json",
        "spectra": f"spectra/{network}.json",
        "provenance": about,
    }
    (out / f"rows/{cell}.json").write_text(json.dumps(row))


def opened(page_file: Path) -> tuple[list[float], list[float]]:
    """Seconds from going to the page until charts and tables are there, and processor seconds of the browser.

    TURNS times, each in a fresh browser. On a busy machine only the processor seconds tell something.
    """
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    waited, worked = [], []
    with sync_playwright() as play:
        for _ in range(TURNS):
            browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_context(offline=True).new_page()
            before, start = _processor_seconds(browser), time.perf_counter()
            page.goto(page_file.as_uri())
            page.locator("#chart-macs .main-svg").first.wait_for()
            page.locator("#runs-table tbody tr").first.wait_for()
            waited.append(time.perf_counter() - start)
            worked.append(_processor_seconds(browser) - before)
            browser.close()
    return waited, worked


def _processor_seconds(browser: Any) -> float:
    found = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    return float(sum(process["cpuTime"] for process in found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="A folder that does not exist yet.")
    parser.add_argument("--reuse", action="store_true", help="The folder was made by an earlier run.")
    args = parser.parse_args()
    count = len(list((args.out / "rows").iterdir())) if args.reuse else generate(args.out)
    start = time.perf_counter()
    said = html.write_report(args.out, args.out / "report.html")
    wrote = time.perf_counter() - start
    bare = args.out / "plotly.html"
    bare.write_text(f"<meta charset=utf-8><body><script>{get_plotlyjs()}</script>{_DRAWN}")
    pages = {"the report": args.out / "report.html", "a page with nothing but plotly": bare}
    found = {name: opened(path) for name, path in pages.items()}
    plans = f"{said['plans']['embedded']:,} plans (at most {said['plans']['at_most']} of a line)"
    say(f"{count:,} rows of {len(NETWORKS)} networks and {len(LABELS)} labels, {plans}: {said['bytes'] / 1e6:.1f} MB, ")
    say(f"written in {wrote:.1f} s; n = {TURNS} openings; {machine()}, load {os.getloadavg()[0]:.1f}\n")
    say("| page | seconds to open: median | least | worst | processor seconds |\n| --- | ---: | ---: | ---: | ---: |")
    for name, (waited, worked) in found.items():
        say(f"| {name} | {median(waited):.2f} | {min(waited):.2f} | {max(waited):.2f} | {median(worked):.2f} |")


if __name__ == "__main__":
    main()
