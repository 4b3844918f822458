"""What the command line's flags mean: text → networks, budgets, folds and slices."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import nn

from rankwise.core.disk import make_folder, only_user
from rankwise.errors import RankwiseError
from rankwise.models import networks
from rankwise.planning.budget import Budget
from rankwise.planning.units import PARAMS, UNITS


def open_model(spec: str, weights: Path | None, base: str | None) -> nn.Module:
    """The network of a specification; of a folder that `iterate` wrote, that of its last round."""
    network = networks.build(last_round(spec), base=base)
    if weights is not None:
        networks.load_weights_(network, weights)
    return network.eval()


def last_round(spec: str) -> str:
    """The folder of the last round that `iterate` finished in this folder; anything else as it is."""
    folder = Path(spec)
    if any((folder / name).exists() for name in ("plan.json", "config.json", networks.WEIGHTS)):
        return spec
    done = [p for p in folder.glob("round-*") if p.name[6:].isdecimal() and (p / "row.json").is_file()]
    return str(max(done, key=lambda p: int(p.name[6:]))) if done else spec


def random_weights(spec: str) -> str:
    """The warning for a specification with random weights; empty for others."""
    if not networks.has_random_weights(spec):
        return ""
    head = spec.partition(":")[0]
    more = {"torchvision": ", or ?weights=DEFAULT behind the name", "timm": ", or ?pretrained behind the name"}
    return f"the weights of {spec} are random: give trained ones with --weights FILE{more.get(head, '')}"


def check_random(said: str, allowed: bool) -> None:
    """Refuse to write a result that comes from random weights, unless that is asked for."""
    if said and not allowed:
        raise RankwiseError(f"{said}; if random weights are meant (to try shapes or speed), add --random-weights")


def check_folder(out: Path, force: bool) -> None:
    """Refuse an --out that holds something already, or that cannot be written; nothing is left behind."""
    try:
        if out.exists() and not out.is_dir():
            raise RankwiseError(f"--out {out} is a file: give a folder")
        if not force:
            _check_empty(out)
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
        try:
            out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=out):
                pass
        finally:
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()
    except (OSError, ValueError) as err:  # ValueError: a name that no folder can have
        if isinstance(err, RankwiseError):
            raise
        why = (err.strerror if isinstance(err, OSError) else None) or err
        raise RankwiseError(f"--out {out} cannot be written ({why}): give another folder") from None


@contextmanager
def reserved(out: Path | None, force: bool) -> Iterator[None]:
    """No other process writes to --out meanwhile, and a folder in which nothing was written is gone again."""
    if out is None:
        yield
        return
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    make_folder(out)
    try:
        with only_user(out):
            if not force:
                _check_empty(out)  # another process may have finished since it was looked at
            yield
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _check_empty(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        raise RankwiseError(f"--out {out} exists and is not empty: give another folder, or --force to overwrite it")


def budget_help() -> str:
    """What --budget takes, from the registry of units."""
    units = [
        f"{unit.name} ({'a fraction' if unit.fraction_of else 'a fraction or a count'})" for unit in UNITS.values()
    ]
    return f"Such as macs=0.5; units: {', '.join(units)}; may be repeated."


def read_budget(keep: float | None, parts: list[str] | None) -> Budget:
    values: dict[str, float] = {} if keep is None else {PARAMS.name: keep}
    for part in parts or []:
        unit, _, text = part.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if unit not in UNITS or value != value:
            known = " or ".join(f"{u}=VALUE" for u in UNITS)
            raise RankwiseError(f"--budget {part} is not understood: give {known}, such as macs=0.5")
        if unit in values:
            raise RankwiseError(f"the budget for {unit} was given twice: give it once")
        values[unit] = value
    if not values:
        raise RankwiseError("no budget was given: add --keep 0.4, or --budget macs=0.5")
    return Budget(**values)


def read_slices(text: str | None) -> str | list[int] | None:
    if text is None or text in ("all", "any"):
        return text
    parts = text.split(",")
    if not all(p.strip().isdigit() for p in parts):
        raise RankwiseError(f"--slices {text} is not understood: give all, any, a number or a list such as 1,2,4")
    return [int(p) for p in parts]


def read_folds(text: str | None) -> str | list[str | int] | None:
    if text is None or text == "all":
        return text
    return [int(p) if p.strip().isdigit() else p.strip() for p in text.split(",")]


def read_multiple(text: str | None) -> int | str | None:
    """`8` or `measured`."""
    if text is None or text == "measured":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise RankwiseError(f"--rank-multiple {text} was given: it is a whole number from 1 on, or measured")
    return int(text)


def read_inputs(text: str) -> int | None:
    """How many calibration inputs; None, for `auto`, is as many as the time allows."""
    if text == "auto":
        return None
    if not text.isdecimal() or not int(text):
        raise RankwiseError(f"--calibrate {text} is not possible: give 1 or more inputs (256), or leave the number out")
    return int(text)


def check_workers(workers: int | None) -> None:
    if workers is not None and workers < 1:
        raise RankwiseError(f"--workers {workers} was given: give 1 or more")
