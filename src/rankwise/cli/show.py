"""Tables and sentences for people: layers, plans, scores, times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table as Grid

from rankwise.cli.output import count, new_grid, percent
from rankwise.core.layer import Coverage, Skipped
from rankwise.planning.plan import Plan, listed
from rankwise.planning.times import Conditions
from rankwise.planning.units import UNITS
from rankwise.reports.curves import panels
from rankwise.training.limits import Trial
from rankwise.training.perplexity import TextScore


def coverage_grid(coverage: Coverage, title: str) -> Grid:
    """Every layer that can be decomposed: what it is, and what it costs."""
    grid = new_grid(title)
    grid.add_column("layer", overflow="fold")
    for name in ("kind", "weight"):
        grid.add_column(name, overflow="fold")
    for name in ("params", "share", "macs"):
        grid.add_column(name, justify="right", no_wrap=True)
    for layer in coverage.layers:
        also = f" (also {', '.join(layer.aliases)})" if layer.aliases else ""
        grid.add_row(
            layer.name + also,
            layer.kind,
            "×".join(map(str, layer.shape)),
            count(layer.params),
            percent(layer.params, coverage.params),
            count(layer.macs),
        )
    return grid


def by_reason(whole: Iterable[Skipped], params: int) -> list[str]:
    """One line for all modules that stay as they are for the same reason."""
    reasons: dict[str, list[Skipped]] = {}
    for skipped in whole:
        reasons.setdefault(skipped.reason, []).append(skipped)
    said = []
    for reason, group in reasons.items():
        share = percent(sum(s.params for s in group), params)
        kinds = ", ".join(sorted({s.kind for s in group}))
        said.append(f"{reason} ({kinds}; {share} of the params): {listed([s.name or 'the model' for s in group])}")
    return said


def coverage_json(coverage: Coverage) -> dict[str, Any]:
    return {
        "params": coverage.params,
        "macs": coverage.macs,
        "layers": [
            {"name": la.name, "kind": la.kind, "shape": la.shape, "params": la.params, "macs": la.macs}
            for la in coverage.layers
        ],
        "skipped": [{"name": s.name, "kind": s.kind, "params": s.params, "reason": s.reason} for s in coverage.skipped],
    }


def plan_grid(plan: Plan, measure: str) -> Grid:
    """One line for each layer that was up for decision."""
    if plan.pruned:
        return _pruned_grid(plan)
    grid = new_grid(f"plan by {plan.method} for {plan.budget}; error: {measure}; params and macs: what is kept of them")
    for name in ("layer", "by"):
        grid.add_column(name, overflow="fold")
    grid.add_column("fold", no_wrap=True)
    for name in ("slices", "rank", "error", "params", "macs"):
        grid.add_column(name, justify="right", no_wrap=True)
    for entry in plan.choices:
        before, after = entry.before, entry.after
        grid.add_row(
            entry.name,
            entry.decomposition,
            entry.fold,
            str(entry.slices),
            f"{entry.outer}×{entry.rank}" if entry.outer else str(entry.rank),
            f"{entry.error.get(measure, float('nan')):.4f}",
            percent(after.params, before.params),
            percent(after.macs, before.macs),
        )
    return grid


def remarks(plan: Plan) -> list[str]:
    """What the search says about itself that a reader should know."""
    looked = {
        "synthetic": "no data was given: fitted on synthetic inputs, made from the statistics of batch norms",
        "noise": "no data was given, and there is no batch norm to make inputs from: planned on smooth noise",
        "calibration": "fitted on calibration inputs, without labels",
    }
    said = [looked.get(plan.inputs or "", "")]
    latency = plan.search.latency
    if latency is not None and latency.measured is not None:
        said.append(f"time measured for the plan: {latency.measured:.3f} of the dense network")
    return [text for text in said if text]


def measured_time(time: dict[str, float]) -> str:
    """The compressed network against the dense one, and what to do if it is slower or the machine was busy."""
    said = (
        f"time: {1e3 * time['small']:.2f} ms, {time['ratio']:.2f} of the dense network's {1e3 * time['dense']:.2f} ms"
    )
    slower = "; it is slower: add --never-slower, or a budget in time (--budget latency=0.8)"
    said += slower if time["ratio"] > 1 else ""
    if not time.get("busy"):
        return said
    seen = Conditions(time.get("load"), int(time["cores"]), time["spread"])
    return f"{said}; {seen.sentence}: time it again when it is quiet (rankwise bench)"


def perplexity(found: TextScore) -> str:
    """The score of a text in a sentence, with standard errors."""
    loss, whole = (
        "" if error is None else f" ± {error:.{digits}f}"
        for error, digits in ((found.loss_error, 4), (found.perplexity_error, 3))
    )
    return (
        f"perplexity {found.perplexity:.3f}{whole}, loss {found.loss:.4f}{loss} on {found.tokens:,} tokens in "
        f"{found.n:,} windows of {found.length}"
    )


def expectation(expected: dict[str, Any], split: str) -> str:
    """A forecast in a sentence."""
    return (
        f"expected on {split}: {-expected['drop']:+.2f} points of top-1, between {-expected['high']:+.2f} and "
        f"{-expected['low']:+.2f}; {expected['turned']:.1f} % of the answers change (on {expected['n']:,} inputs)"
    )


def trial(tried: Trial, unit: str) -> str:
    """One size that was tried for --max-drop."""
    if tried.drop is None or tried.keep is None:
        return f"{unit} {tried.asked:.3f}: no plan is that small"
    return f"{unit} {tried.keep:.3f}: {-tried.drop:+.2f} points"


def _pruned_grid(plan: Plan) -> Grid:
    """One line for each narrowed module: what is left of its filters and of its channels."""
    grid = new_grid(f"plan by {plan.method} for {plan.budget}")
    grid.add_column("layer", overflow="fold")
    for name in ("filters kept", "channels kept", "params", "keep", "macs"):
        grid.add_column(name, justify="right", no_wrap=name != "filters kept")
    for entry in plan.pruned:
        before, after = entry.before, entry.after
        outputs, inputs = entry.wide
        grid.add_row(
            entry.name,
            _of(entry.filters, outputs),
            "" if len(entry.shape) == 1 else _of(entry.channels, inputs),
            count(after.params),
            percent(after.params, before.params),
            percent(after.macs, before.macs),
        )
    return grid


def _of(kept: tuple[int, ...] | None, wide: int) -> str:
    return f"{wide if kept is None else len(kept)} of {wide}"


def held_filters(plan: Plan) -> list[str]:
    """Filters that must stay and why, as the search of a plan says."""
    said = []
    for group in plan.search.whole or ():
        if group.layers:
            more = f" and {len(group.layers) - 1} more" if len(group.layers) > 1 else ""
            said.append(f"{group.channels} filters of {group.layers[0]}{more} ({group.reason})")
    return said


def before_after_grid(plan: Plan, scores: dict[str, Any] | None = None) -> Grid:
    """The network before and after, and what was removed (CR-P, CR-F)."""
    grid = new_grid()
    grid.add_column("")
    for name in ("before", "after", "keep", "removed"):
        grid.add_column(name, justify="right")
    for unit in UNITS.values():
        counts = plan.change(unit.name)
        if counts is not None and counts[0]:
            before, after = counts
            cut = f"{unit.removed} {100 * (1 - after / before):.1f} %".lstrip()
            shown = [unit.recorded(before), unit.recorded(after)]
            grid.add_row(unit.title or unit.name, *shown, f"{after / before:.4f}", cut)
    if scores and "perplexity" in scores["before"]:
        for name in ("perplexity", "loss"):
            before, after = scores["before"][name], scores["after"][name]
            grid.add_row(name, f"{before:.4g}", f"{after:.4g}", "", f"{after - before:+.4g}")
    elif scores:
        before, after = scores["before"]["top1"], scores["after"]["top1"]
        grid.add_row("top-1", f"{before:.2f} %", f"{after:.2f} %", "", f"{after - before:+.2f}")
    return grid


def rows_grid(rows: list[dict[str, Any]]) -> Grid:
    """Top-1 of every label at every keep, means over repeats: compressed → retrained, where it was."""
    panel = panels(rows)[0]
    grid = new_grid(f"top-1 on {panel.n} images; before: {panel.reference[0]:.2f} %")
    grid.add_column("keep", justify="right")
    lines = {line.label: line for line in panel.stages[0].lines}
    for label in lines:
        grid.add_column(label, justify="right")
    means = {
        (stage.when, line.label, point.asked): point.score[0]
        for stage in panel.stages
        for line in stage.lines
        for point in line.points
    }
    for keep in dict.fromkeys(row["asked"] for row in rows):
        found = [[means.get((when, label, keep)) for when in ("compressed", "retrained")] for label in lines]
        grid.add_row(f"{keep:g}", *(" → ".join(f"{v:.2f}" for v in pair if v is not None) for pair in found))
    return grid


def times_grid(found: dict[str, Any]) -> Grid:
    """One line for each engine, number of threads and batch size."""
    title = f"time per batch, median; {found['layout']}{', fused' if found['fuse'] else ''}; {found['machine']}"
    grid = new_grid(title)
    grid.add_column("engine")
    for name in ("threads", "batch", "dense", "spread", "compressed", "spread", "ratio"):
        grid.add_column(name, justify="right", overflow="fold")
    for row in found["times"]:
        if "error" in row:
            continue
        where = (row["engine"], str(row["threads"]), str(row["batch"]))
        cells = [c for s in ("dense", "compressed") for c in (f"{1e3 * row[s]['median']:.2f} ms", _share(row[s]))]
        grid.add_row(*where, *cells, f"{row['ratio']:.2f}")
    return grid


def tokens_grid(found: dict[str, Any]) -> Grid:
    """Tokens per second of one sequence with a cache: reading a prompt, and writing."""
    rows = found["tokens"]
    known = next((row for row in rows if "error" not in row), None)
    said = "" if known is None else f": {known['prompt']} tokens read, {known['written']} written"
    grid = new_grid(f"tokens per second, one sequence{said}")
    for name in ("", "threads", "dense", "compressed", "time, ratio"):
        grid.add_column(name, justify="right" if name else "left")
    for row in rows:
        if "error" in row:
            grid.add_row("not measured", str(row["threads"]), row["error"], "", "")
            continue
        for part in ("prefill", "decode"):
            both = [f"{row[side][part]:,.1f}" for side in ("dense", "compressed")]
            grid.add_row(part, str(row["threads"]), *both, f"{row[f'{part}_ratio']:.2f}")
    return grid


def not_timed(found: dict[str, Any]) -> list[str]:
    """Engines that could not be timed and why, each reason once."""
    errors = dict.fromkeys((row["engine"], row["error"]) for row in found["times"] if "error" in row)
    return [f"{engine} was not timed: {error}" for engine, error in errors]


def _share(measured: dict[str, Any]) -> str:
    return f"±{50 * measured['spread']:.0f} %"


def sizes_grid(found: dict[str, Any]) -> Grid:
    grid = new_grid()
    grid.add_column("")
    for name in ("dense", "compressed", "ratio"):
        grid.add_column(name, justify="right")
    rows = [("params", found["params"]), ("macs", found["macs"]), ("bytes of weights", found["bytes"])]
    for batch in found["memory"]["dense"]:
        rows.append((f"peak memory, batch {batch}", {side: found["memory"][side][batch] for side in found["memory"]}))
    for name, pair in rows:
        dense, small = pair["dense"], pair["compressed"]
        ratio = f"{small / dense:.2f}" if dense and small else ""
        grid.add_row(name, count(dense), count(small), ratio)
    return grid
