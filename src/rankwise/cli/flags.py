"""What the command line's flags mean: text → networks, budgets, folds and slices."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from rankwise.errors import RankwiseError
from rankwise.models import networks
from rankwise.planning.budget import Budget
from rankwise.planning.units import PARAMS, UNITS


def open_model(spec: str, weights: Path | None, base: str | None) -> nn.Module:
    network = networks.build(spec, base=base)
    if weights is not None:
        networks.load_weights_(network, weights)
    return network.eval()


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
