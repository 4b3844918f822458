"""What the flags of `compress` ask for, and what is wrong with them: all of it is said before the work begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankwise.api import Metric
from rankwise.cli.flags import check_folder, read_budget
from rankwise.compression import Request
from rankwise.errors import RankwiseError
from rankwise.methods import needs_budget, settings_for
from rankwise.models.factory import load_function
from rankwise.planning.budget import Budget
from rankwise.training.limits import check_limit


@dataclass(frozen=True)
class Limit:
    """What --max-drop asks for: the smallest network, in a unit, that loses at most so much of a metric."""

    most: float | str
    unit: str
    data: str | None
    metric: Metric | None = None
    lower_is_better: bool = False


def limit_for(
    most: str | None, unit: str, data: str | None, metric: str | None, lower: bool, budget: bool
) -> Limit | None:
    """What --max-drop and its flags ask for; None where a budget is given instead."""
    if lower and metric is None:
        raise RankwiseError("--lower-is-better says how to read --metric, and there is none: leave it out")
    if most is None:
        if metric is not None:
            raise RankwiseError("--metric is what --max-drop measures, and there is none: add --max-drop")
        return None
    if budget:
        raise RankwiseError("a budget and --max-drop were given: drop one, since --max-drop finds the budget")
    if data is None and metric is None:
        raise RankwiseError(
            "--max-drop measures what is lost, and there is nothing to measure it on: add --data, or --metric "
            "FILE.py:FUNCTION"
        )
    check_limit(most, unit)
    if metric is None and not most.endswith("%") and float(most) >= 100:
        raise RankwiseError(f"--max-drop {most} was given: give points of accuracy or perplexity, from 0 to below 100")
    return Limit(most, unit, data, None if metric is None else load_function(metric), lower)


def budget_for(request: Request, limit: Limit | None, keep: float | None, budget: list[str] | None) -> Budget | None:
    """The budget, if one is needed; settings that no method knows are refused on the way."""
    if request.plan is not None:
        return None
    changes = {key: value for key, value in request.changes.items() if value != "measured"}
    settings = settings_for(request.method, **changes)
    if limit is None and (keep is not None or budget or needs_budget(settings)):
        return read_budget(keep, budget)
    return None


def only_with_a_search(keep: float | None, budget: list[str] | None, changes: dict[str, Any]) -> None:
    """Refuse flags that ask for decisions beside --plan, which has made them."""
    every = {"keep": keep, "budget": budget, **changes}
    given = [f"--{name.replace('_', '-')}" for name, value in every.items() if value is not None]
    if given:
        raise RankwiseError(
            f"--plan replays decisions that are made already, and {given[0]} asks for new ones: drop one"
        )


def check_out(model: str, out: Path | None, dry_run: bool, force: bool) -> Path | None:
    """The folder that will be written, which is possible; None where nothing is to be written."""
    if dry_run:
        return None
    if out is None:
        raise RankwiseError("no folder was given to write to: add --out DIR, or --dry-run to see the plan only")
    check_folder(out, force)
    if Path(model).exists() and out.resolve() == Path(model).resolve():
        raise RankwiseError(f"--out {out} is the network that is compressed: give another folder")
    return out
