"""The report of one compression: before and after, every layer, what was predicted and what was measured.

It shows what `rankwise compress --json` prints, in one HTML file with the policy of all reports (assemble.py). Only the
plan must be there; whatever else is missing is not shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rankwise.core import files
from rankwise.core.fold import BAR, all_folds, kernel_axes
from rankwise.core.layer import Layer
from rankwise.decompositions.spectra import spectra
from rankwise.planning.findings import NATS
from rankwise.planning.plan import Choice, Plan
from rankwise.planning.table import Progress
from rankwise.reports import looks
from rankwise.reports.assemble import make_page, plotly_source
from rankwise.reports.embedded import thin
from rankwise.reports.html import appearance
from rankwise.surgery.coverage import OTHER_KIND
from rankwise.surgery.effective import weight_of
from rankwise.surgery.modules import describe, kind_of
from rankwise.training import results

SCRIPTS = ("base.js", "table.js", "layers.js", "single.js")
WORK = 5e10  # multiply-adds for spectra: a few seconds; what is beyond is left out, the cheapest come first


@dataclass(frozen=True)
class About:
    """What the numbers of a compression do not say themselves. `split` and `data` are what it was scored on.

    `model` is the network as it was named, a folder perhaps, `weights` the file that was given beside it, and `input`
    the shape of an input. `base` is the factory of a network from a file.py, which commands on the folder must name.
    """

    data: str | None = None
    split: str = "test"
    weights: str | None = None
    command: str | None = None
    model: str | None = None
    input: str | None = None
    base: str | None = None


def write_report(
    out: Path,
    found: dict[str, Any],
    model: nn.Module | None = None,
    about: About | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """One HTML file about one compression. Returns where it is and how large.

    `found` is what `rankwise compress --json` prints: `plan`, and where they are known `scores`, `expected`, `trials`,
    `time` and `out`. `model` is the network before compression: with it, the layers have their spectra.
    """
    plotly = plotly_source()
    page = make_page(page_content(found, model, about or About(), progress), "single.html", SCRIPTS, plotly)
    files.write_whole(out, page)
    return {"report": str(out), "bytes": len(page)}


def page_content(
    found: dict[str, Any], model: nn.Module | None, about: About, progress: Progress | None = None
) -> dict[str, Any]:
    """Everything that the page shows, as one JSON value."""
    plan = Plan.loads(json.dumps(found["plan"]), "the plan of the report")
    title = f"{plan.model or 'a network'}: {100 * plan.keep():.3g} % of the parameters, by {plan.method}"
    folder = found.get("out")
    weights = layer_spectra(model, plan, progress) if model is not None else {}
    return {
        "title": title,
        "made": results.provenance(),
        **appearance(looks.look_numbers([plan.method])),
        "plan": found["plan"],
        "scores": found.get("scores"),
        "trials": found.get("trials"),
        "time": found.get("time"),
        "bytes": _sizes(model, folder),
        "comparisons": comparisons(plan, found),
        "spectra": thin({"layers": weights}, "the spectra of the report") if weights else None,
        "about": {**vars(about), "folder": folder, "verified": found.get("verified")},
    }


def comparisons(plan: Plan, found: dict[str, Any]) -> list[dict[str, Any]]:
    """What was predicted beside what was measured: {"what", "predicted", "low", "high", "measured", "unit", "on"}.

    Exact counts are in none of them: they need no prediction.
    """
    return [one for one in (_outputs(plan), _accuracy(found), _time(plan, found)) if one is not None]


def _outputs(plan: Plan) -> dict[str, Any] | None:
    """The change of the network's outputs relative to their variance, for plans that predict it.

    `measured` is of inputs that nothing was fitted to; `expected` is a better prediction than what the search saw.
    """
    search = plan.search.to_json()
    known = {key: value for key, value in search.items() if isinstance(value, int | float)}
    seen = known.get("objective") if plan.settings.get("error") == "effect" else None
    predicted, measured = known.get("expected", seen), known.get("measured")
    if predicted is None and measured is None:
        return None
    on = search.get("inputs") if measured is None else "held-out inputs"
    nats = plan.search.unit == NATS
    what = "change of probabilities, nats a position" if nats else "change of the outputs, relative to their variance"
    return _compared(what, predicted, measured, "", on)


def _accuracy(found: dict[str, Any]) -> dict[str, Any] | None:
    expected, scores = found.get("expected") or {}, found.get("scores") or {}
    before, after = (_main(scores.get(when)) for when in ("before", "after"))
    measured = None if before is None or after is None else after - before
    if not expected and measured is None:
        return None
    low, high, drop = (expected.get(key) for key in ("high", "low", "drop"))  # a large drop is a low change
    one = _compared("change in accuracy", None if drop is None else -drop, measured, "points", "the scored split")
    return {**one, "low": None if low is None else -low, "high": None if high is None else -high}


def _main(score: dict[str, Any] | None) -> float | None:
    """The metric that counts: mean IoU of a segmentation, otherwise top-1."""
    score = score or {}
    value = score.get("miou") if score.get("miou") is not None else score.get("top1")
    return None if value is None else float(value)


def _time(plan: Plan, found: dict[str, Any]) -> dict[str, Any] | None:
    latency, time = plan.search.latency, found.get("time") or {}
    measured = time.get("ratio")
    if measured is None and latency is not None:
        measured = latency.measured
    if latency is None or measured is None:
        return None
    return _compared("time, compressed ÷ original", latency.keep, measured, "", "this machine")


def _compared(what: str, predicted: Any, measured: Any, unit: str, on: str | None) -> dict[str, Any]:
    return {"what": what, "predicted": predicted, "measured": measured, "unit": unit, "on": on}


def _sizes(model: nn.Module | None, folder: str | None) -> dict[str, int] | None:
    """Bytes of all tensors of the network before, and of the file with those after."""
    path = None if folder is None else Path(folder) / "model.safetensors"
    if model is None or path is None or not path.is_file():
        return None
    return {
        "before": sum(t.numel() * t.element_size() for t in model.state_dict().values()),
        "after": path.stat().st_size,
    }


def layer_spectra(model: nn.Module, plan: Plan, progress: Progress | None = None) -> dict[str, dict[str, list[float]]]:
    """σᵢ/σ₁ of the layers of a plan by fold, without slices: of the chosen folds first, then of others within WORK."""
    say = progress or (lambda name, done, total: None)
    jobs = sorted(_jobs(model, plan), key=lambda job: job[:2])
    spent, found = 0.0, dict[str, dict[str, list[float]]]()
    for at, (_, cost, fold, layer, weight) in enumerate(jobs):
        say("spectra", at, len(jobs))
        spent += cost
        if spent > WORK:
            break
        values = sorted(spectra(weight, layer, fold, [1])[1][..., :-1].ravel().tolist(), reverse=True)
        found.setdefault(layer.name, {})[fold] = [v / (values[0] or 1.0) for v in values]
    return found


def _jobs(model: nn.Module, plan: Plan) -> Iterator[tuple[bool, float, str, Layer, Tensor]]:
    """(whether the fold was not chosen, multiply-adds, fold, layer, weight) for every fold of every layer."""
    modules = dict(model.named_modules())
    for entry in plan.layers:
        module = modules.get(entry.name)
        if module is None or kind_of(module) is None or getattr(entry, "reason", None) == OTHER_KIND:
            continue
        layer, weight = describe(module, entry.name), weight_of(module)
        chosen = entry.fold if isinstance(entry, Choice) else all_folds(layer.dims)[0]
        for fold in all_folds(layer.dims):
            yield fold != chosen, _work(layer, fold), fold, layer, weight


def _work(layer: Layer, fold: str) -> float:
    """Multiply-adds of the smaller Gram matrix and of its eigenvalues, roughly."""
    rows = layer.group_filters
    columns = layer.group_channels
    left = fold.split(BAR)[0]
    for axis, size in zip(kernel_axes(layer.dims), layer.kernel, strict=True):
        rows, columns = (rows * size, columns) if axis in left else (rows, columns * size)
    small, large = sorted((rows, columns))
    return layer.groups * (small * small * large + 10.0 * small**3)
