"""The commands by name: where each of them is, and what it does. Nothing is imported until one is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import typer

from rankwise.errors import Interrupted

# name: (module, function, what it does); the first line of the function's docstring is the same (tests hold it)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "inspect": ("look", "inspect", "Every layer with its shape, params and macs, and whether it can be decomposed."),
    "compress": ("compress", "compress", "Plan, decompose, write a folder, and read it back before saying done."),
    "evaluate": ("look", "evaluate", "Accuracy, or perplexity on text, of a network or folder that `compress` wrote."),
    "train": ("train", "train", "Train a network; DIR can then be compressed and evaluated like any MODEL."),
    "retrain": ("train", "retrain", "Retrain a compressed network by the last epochs of a recipe."),
    "iterate": ("train", "iterate", "Train, then compress, retrain and project back in each round."),
    "run": ("study", "run", "Run the missing cells of a study; kill it at any moment and run it again."),
    "summary": ("study", "summary", "Tables of a study: accuracy by keep, the paper's numbers beside them."),
    "report": ("report", "report", "One HTML file that opens without a network: curves, tables, plans to explore."),
    "bench": ("deploy", "bench_command", "Time, memory and file size of a compressed network against the dense one."),
    "export": ("deploy", "export_command", "Write an ONNX file or a torch.export program, and read it back."),
    "demo": ("look", "demo", "The whole story on handwritten digits: train, compress, retrain, report."),
}


def empty_app() -> typer.Typer:
    return typer.Typer(
        name="rankwise",
        help="Make a trained PyTorch network smaller: decide for every layer how to decompose it, and how far.",
        epilog="rankwise COMMAND --help says more. rankwise --version prints the version.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def app_for(names: list[str]) -> typer.Typer:
    """An application with these commands in full; the others are known by name and for the help only."""
    app = empty_app()
    app.callback()(lambda: None)  # a single command would become the application itself otherwise
    for name, (module, function, about) in COMMANDS.items():
        if name in names:
            app.command(name, short_help=about)(telling(getattr(import_module(f"rankwise.cli.{module}"), function)))
        else:
            app.command(name, short_help=about)(_not_loaded)
    return app


def telling(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which says something when it is interrupted."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt as err:
            raise Interrupted(str(err) or "interrupted") from None

    return run


def _not_loaded() -> None:
    raise AssertionError("only the command that was asked for is loaded, and only that one is called")
