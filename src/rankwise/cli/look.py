"""The commands `inspect`, `evaluate` and `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankwise.cli import output
from rankwise.cli.options import BaseOpt, ExcludeOpt, InputOpt, JsonOpt, ModelArg, WeightsOpt


def inspect(
    model: ModelArg,
    weights: WeightsOpt = None,
    input: InputOpt = None,
    exclude: ExcludeOpt = None,
    base: BaseOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Every layer with its shape, params and macs, and whether it can be decomposed.

    Layers that cannot be are listed by the reason.
    """
    from rankwise.cli import show
    from rankwise.cli.flags import open_model
    from rankwise.models.inputs import example_for
    from rankwise.surgery.coverage import find_layers

    network = open_model(model, weights, base)
    coverage = find_layers(network, example_for(model, input, network), exclude or ())
    if as_json:
        output.print_json({"model": model, **show.coverage_json(coverage)})
        return
    out = output.console()
    out.print(show.coverage_grid(coverage, model))
    for line in show.by_reason(coverage.skipped, coverage.params):
        out.print(f"whole, {line}")
    able = sum(layer.params for layer in coverage.layers)
    macs = "" if coverage.macs is None else f", {coverage.macs:,} macs"
    out.print(
        f"{coverage.params:,} params{macs}; {len(coverage.layers)} layers with "
        f"{output.percent(able, coverage.params)} of the params can be decomposed"
    )


def evaluate(
    model: ModelArg,
    data: Annotated[str, typer.Option("--data", metavar="D", help="digits, imagefolder:FOLDER, text:FILE …")],
    split: Annotated[
        str | None, typer.Option("--split", help="Split of the data: test, or all of a text file, unless given.")
    ] = None,
    weights: WeightsOpt = None,
    base: BaseOpt = None,
    size: Annotated[
        int | None,
        typer.Option("--size", "--input", help="Side of the images, or tokens of the windows, that the network takes."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Only so many images or windows, evenly spaced.")] = None,
    as_json: JsonOpt = False,
) -> None:
    """Accuracy, or perplexity on text, of a network or folder that `compress` wrote.

    Of a folder that `iterate` wrote, the network of its last round is scored.
    """
    from rankwise.cli import show
    from rankwise.cli.flags import open_model, random_weights
    from rankwise.data.named import load_for
    from rankwise.data.splits import load as load_data
    from rankwise.data.text import default_split, is_text
    from rankwise.training.perplexity import TextScore
    from rankwise.training.scores import score_of

    split = split or default_split(data)
    images = None if is_text(data) else load_data(data, split, size=size)  # said before the network is opened
    network = open_model(model, weights, base)
    with output.progress("evaluating"):
        found = score_of(network, images or load_for(network, data, split, size), limit)
    random = random_weights(model) if weights is None else ""
    if random:
        output.warn(random)
    if as_json:
        said = {"random_weights": True} if random else {}
        output.print_json({"model": model, "data": data, "split": split, **found.to_json(), **said})
        return
    if isinstance(found, TextScore):
        output.console().print(f"{show.perplexity(found)} ({data}, {split})")
        return
    top5 = "" if found.top5 is None else f", top-5 {found.top5:.2f} %"
    top5 += "" if found.miou is None else f", mean IoU {found.miou:.2f} %"
    output.console().print(
        f"top-1 {found.top1:.2f} %{top5}, loss {found.loss:.4f} on {found.n:,} images ({data}, {split})"
    )


def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the report.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option("--seed", help="Seed of the training.")] = 0,
    as_json: JsonOpt = False,
) -> None:
    """The whole story on handwritten digits: train, compress, retrain, report."""
    from rankwise.cli import show
    from rankwise.cli.demo import run_demo

    with output.progress("demo") as report:
        result = run_demo(out, seed, report)
    if as_json:
        output.print_json(result)
        return
    terminal = output.console()
    terminal.print(show.rows_grid(result["rows"]))
    terminal.print(f"done: open {result['report']} in a browser")
