"""The commands `train`, `retrain` and `iterate`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from rankwise.cli import live, output, words
from rankwise.cli.options import JsonOpt
from rankwise.errors import RankwiseError
from rankwise.training.recipes import RECIPES, Recipe, change, get_recipe, read_changes

DataArg = Annotated[
    str, typer.Option("--data", metavar="D", help="digits, parquet:FOLDER, imagefolder:FOLDER, voc:FOLDER or hub:NAME.")
]
OutOpt = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write.")]
RecipeOpt = Annotated[str, typer.Option("--recipe", metavar="R", help=f"One of {', '.join(RECIPES)}.")]
SetOpt = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Replace a field of the recipe, such as epochs=3; repeatable."),
]
ResumeOpt = Annotated[bool, typer.Option("--resume", help="Go on with what DIR holds, from its last epoch.")]
SeedOpt = Annotated[int, typer.Option("--seed", help="Seed of weights, order and augmentation.")]
SplitOpt = Annotated[str, typer.Option("--split", help="Split that is scored at the end.")]
LimitOpt = Annotated[int | None, typer.Option("--limit", help="Train on so many images only.")]
SizeOpt = Annotated[int | None, typer.Option("--size", help="Side of the images that the network takes.")]
BoardOpt = Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard event files into DIR/tensorboard.")]
WeightsOpt = Annotated[
    Path | None, typer.Option("--weights", metavar="FILE", help="Start from these weights: .safetensors, or .pth/.th.")
]
NetworkArg = Annotated[
    str, typer.Argument(metavar="NETWORK", help="resnet20, torchvision:NAME, timm:NAME, file.py:factory, or a folder.")
]


def train(
    network: NetworkArg,
    data: DataArg,
    out: OutOpt,
    recipe: RecipeOpt = "fast",
    changes: SetOpt = None,
    weights: WeightsOpt = None,
    resume: ResumeOpt = False,
    seed: SeedOpt = 0,
    split: SplitOpt = "test",
    limit: LimitOpt = None,
    size: SizeOpt = None,
    tensorboard: BoardOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Train a network; DIR can then be compressed and evaluated like any MODEL."""
    from rankwise.training import steps

    chosen = change(get_recipe(recipe), read_fields(changes))
    with _watched(chosen, out, tensorboard, as_json) as watch:
        run = steps.Run(data, chosen, out, seed, resume, split, limit, size, watch)
        row = steps.train(network, run, weights)
    _print([row], out, as_json)


def retrain(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `rankwise compress` wrote.")],
    data: DataArg,
    out: OutOpt,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", metavar="R", help=f"gentle, or taught with --teacher, unless given: {', '.join(RECIPES)}."
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option("--epochs", metavar="N", help="So many in all; with --teacher by the recipe distilled."),
    ] = None,
    changes: SetOpt = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="MODEL", help="The network to rebuild (needed for file.py:factory)."),
    ] = None,
    teacher: Annotated[
        Path | None,
        typer.Option(
            "--teacher", metavar="FILE", help="Weights of the original network, to learn from beside the labels."
        ),
    ] = None,
    resume: ResumeOpt = False,
    seed: SeedOpt = 0,
    split: SplitOpt = "test",
    limit: LimitOpt = None,
    size: SizeOpt = None,
    tensorboard: BoardOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Retrain a compressed network by the last epochs of a recipe.

    The learning rate starts where the recipe has it at that time (rewinding).
    """
    from rankwise.training import steps

    usual = "gentle" if teacher is None else "taught" if epochs is None else "distilled"
    chosen = lasting(change(get_recipe(recipe or usual), read_fields(changes, "retrain")), epochs)
    if out.resolve() == folder.resolve():
        raise RankwiseError(f"--out {out} is the folder that is retrained: give another one, so that both remain")
    with _watched(chosen, out, tensorboard, as_json) as watch:
        run = steps.Run(data, chosen, out, seed, resume, split, limit, size, watch, teacher)
        row = steps.retrain(folder, run, base)
    _print([row], out, as_json)


def iterate(
    network: NetworkArg,
    data: DataArg,
    out: OutOpt,
    rounds: Annotated[int, typer.Option("--rounds", help="How often to compress and retrain.")] = 3,
    method: Annotated[str, typer.Option("--method", help=f"One of {words.METHODS}.")] = "auto",
    recipe: RecipeOpt = "fast",
    changes: SetOpt = None,
    weights: WeightsOpt = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Leave these layers alone; repeatable.")
    ] = None,
    calibrate: Annotated[
        int, typer.Option("--calibrate", metavar="N", help="Images for methods that look at activations.")
    ] = 256,
    loop: Annotated[
        str, typer.Option("--loop", help="rounds, or lc: learning–compression, then one round at α^ROUNDS.")
    ] = "rounds",
    resume: ResumeOpt = False,
    seed: SeedOpt = 0,
    split: SplitOpt = "test",
    limit: LimitOpt = None,
    size: SizeOpt = None,
    tensorboard: BoardOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Train, then compress, retrain and project back in each round.

    Where there are weights it is not trained first. Round i keeps αⁱ of the parameters.
    """
    from rankwise.training import steps

    chosen = change(get_recipe(recipe), read_fields(changes))
    plan = steps.Rounds(rounds, method, tuple(exclude or ()), calibrate, loop)
    with _watched(chosen, out, tensorboard, as_json) as watch:
        run = steps.Run(data, chosen, out, seed, resume, split, limit, size, watch)
        rows = steps.iterate(network, run, plan, weights)
    _print(rows, out, as_json)


@contextmanager
def _watched(recipe: Recipe, out: Path, tensorboard: bool, as_json: bool) -> Iterator[live.Live]:
    folder = out / "tensorboard" if tensorboard else None
    with live.Live(recipe, folder, sys.stderr if as_json else None) as watch:
        try:
            yield watch
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; add --resume to go on with {out} where it stands") from None


def read_fields(changes: list[str] | None, needed: str = "epochs") -> dict[str, Any]:
    """What --set says; a training of no epochs would only copy weights, and look like one."""
    found = read_changes(changes or ())
    for name in dict.fromkeys(("epochs", needed)):
        if found.get(name) == 0:
            raise RankwiseError(f"--set {name}=0 was given, which trains nothing: give 1 or more")
    return found


def lasting(recipe: Recipe, epochs: int | None) -> Recipe:
    """Ours are stretched to so many epochs; the paper's end with so many of theirs (rewinding)."""
    if epochs is None:
        return recipe
    if epochs < 1:
        raise RankwiseError(f"--epochs {epochs} was given: give 1 or more")
    if recipe.name.startswith("paper:"):
        return change(recipe, {"retrain": epochs})
    return change(recipe, {"epochs": epochs, "retrain": epochs})


def _print(rows: list[dict[str, Any]], out: Path, as_json: bool) -> None:
    if not live.first_process():
        return
    if as_json:
        output.print_json(rows[0] if len(rows) == 1 else rows)
        return
    terminal = output.console()
    for row in rows:
        for warning in row.get("warnings", ()):
            terminal.print(f"warning: {warning}")
        score = row.get("retrained") or row["trained"]
        found = [f"top-1 {score['top1']:.2f} %"]
        if score.get("top5") is not None:
            found.append(f"top-5 {score['top5']:.2f} %")
        if score.get("miou") is not None:
            found.append(f"mean IoU {score['miou']:.2f} %")
        cut = f"CR-P {row['CR-P']:.1f} %" + ("" if row["CR-F"] is None else f", CR-F {row['CR-F']:.1f} %")
        before = f" (compressed only: {row['compressed']['top1']:.2f} %)" if "compressed" in row else ""
        terminal.print(
            f"{', '.join(found)}{before}, loss {score['loss']:.4f} on {score['n']:,} images ({row['data']}, "
            f"{row['split']}); {cut}; {row['seconds']['train']:.0f} s"
        )
    terminal.print(f"done: {out}")
