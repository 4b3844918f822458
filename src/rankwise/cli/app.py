"""The command line: thin functions around the library, a table for people or --json for machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankwise.cli import compress, deploy, report, show, study, train
from rankwise.cli.flags import open_model
from rankwise.cli.options import (
    BaseOpt,
    ExcludeOpt,
    InputOpt,
    JsonOpt,
    ModelArg,
    SplitOpt,
    WeightsOpt,
)
from rankwise.data.splits import load as load_data
from rankwise.models.inputs import example_for
from rankwise.surgery.coverage import find_layers
from rankwise.training.evaluate import evaluate as score

app = typer.Typer(
    name="rankwise",
    help="Make a trained PyTorch network smaller: decide for every layer how to decompose it, and how far.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def inspect(
    model: ModelArg,
    weights: WeightsOpt = None,
    input: InputOpt = None,
    exclude: ExcludeOpt = None,
    base: BaseOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Every layer with its shape, params and macs, and whether it can be decomposed or why not."""
    network = open_model(model, weights, base)
    coverage = find_layers(network, example_for(model, input, network), exclude or ())
    if as_json:
        show.print_json({"model": model, **show.coverage_json(coverage)})
        return
    out = show.console()
    out.print(show.coverage_grid(coverage, model))
    able = sum(layer.params for layer in coverage.layers)
    macs = "" if coverage.macs is None else f", {coverage.macs:,} macs"
    out.print(
        f"{coverage.params:,} params{macs}; {len(coverage.layers)} layers with "
        f"{show.percent(able, coverage.params)} of the params can be decomposed"
    )


@app.command()
def evaluate(
    model: ModelArg,
    data: Annotated[str, typer.Option("--data", metavar="D", help="digits, parquet:FOLDER, imagefolder:FOLDER …")],
    split: SplitOpt = "test",
    weights: WeightsOpt = None,
    base: BaseOpt = None,
    size: Annotated[int | None, typer.Option("--size", help="Side of the images that the network takes.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Only so many images, evenly spaced.")] = None,
    as_json: JsonOpt = False,
) -> None:
    """Accuracy of a network, or of a folder that `compress` wrote."""
    network = open_model(model, weights, base)
    found = score(network, load_data(data, split, size=size), limit=limit)
    if as_json:
        show.print_json({"model": model, "data": data, "split": split, **found.to_json()})
        return
    top5 = "" if found.top5 is None else f", top-5 {found.top5:.2f} %"
    top5 += "" if found.miou is None else f", mean IoU {found.miou:.2f} %"
    show.console().print(
        f"top-1 {found.top1:.2f} %{top5}, loss {found.loss:.4f} on {found.n:,} images ({data}, {split})"
    )


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the report.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option("--seed", help="Seed of the training.")] = 0,
    as_json: JsonOpt = False,
) -> None:
    """The whole story on handwritten digits: train, compress with several methods, retrain, report."""
    from rankwise.cli.demo import run_demo

    with show.progress("demo") as report:
        result = run_demo(out, seed, report)
    if as_json:
        show.print_json(result)
        return
    terminal = show.console()
    terminal.print(show.rows_grid(result["rows"]))
    terminal.print(f"done: open {result['report']} in a browser")


compress.register(app)
train.register(app)
report.register(app)
study.register(app)
deploy.register(app)
