"""What the commands do, from Python: score, retrain, export, time and forecast a network, or find the smallest one."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import nn

from rankwise.compression import Compression, Request
from rankwise.compression.one_call import split_options
from rankwise.compression.request import CompressOptions
from rankwise.data.named import load_for
from rankwise.data.splits import Split
from rankwise.data.splits import load as load_data
from rankwise.data.text import TextSplit, default_split
from rankwise.deploy.bench import BenchJob
from rankwise.deploy.bench import bench as run_bench
from rankwise.deploy.export import export
from rankwise.errors import RankwiseError
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Plan
from rankwise.planning.units import MACS, PARAMS
from rankwise.surgery.forward import Example, side_of
from rankwise.surgery.replace import need_module
from rankwise.training import limits, steps
from rankwise.training.evaluate import Score
from rankwise.training.forecast import Forecast
from rankwise.training.forecast import forecast as make_forecast
from rankwise.training.loop import TrainingWatch
from rankwise.training.perplexity import TextScore
from rankwise.training.recipes import change, get_recipe
from rankwise.training.scores import score_of

__all__ = ["bench", "evaluate", "export", "forecast", "retrain", "smallest"]

Metric = Callable[[nn.Module], float]  # from a network, in eval mode, to a number


def evaluate(
    model: nn.Module,
    data: Split | TextSplit | str,
    split: str | None = None,
    limit: int | None = None,
    size: int | None = None,
) -> Score | TextScore:
    """How often a classifier is right on labelled images, or the perplexity of a language model on a text.

    Args:
        model: the network; it is scored in eval mode, on its device, and left as it was.
        data: the name of a data set ("digits", "imagefolder:FOLDER", "text:FILE" …), or a split that was loaded.
        split: which part of the data set; "test" unless given, and "all" of a single text file.
        limit: only so many images or windows of text, evenly spaced.
        size: the side of the images, or the tokens of the windows, that the network takes.

    Returns:
        A `Score` with n, top1, top5 (percent) and loss; for text perplexity and loss with their standard errors.

    >>> import rankwise as rw
    >>> found = rw.evaluate(rw.networks.build("digits-cnn"), "digits", limit=100)
    >>> found.n, 0 <= found.top1 <= 100
    (100, True)
    """
    need_module(model)
    if isinstance(data, str):
        data = load_for(model, data, split or default_split(data), size)
    return score_of(model, data, limit)


class RetrainOptions(TypedDict, total=False):
    """What `retrain` takes beside a folder, data, where to write and a recipe."""

    changes: dict[str, Any]  # fields of the recipe to replace: {"epochs": 3}
    base: str | None  # the network to rebuild, for a folder that was made from file.py:factory
    teacher: str | Path | None  # weights of the original network, to learn from beside the labels
    resume: bool  # go on with what the folder holds
    seed: int
    split: str  # scored at the end
    limit: int | None  # train on so many images only
    size: int | None  # side of the images
    watch: TrainingWatch | None  # sees every step and epoch


def retrain(
    folder: str | Path, data: str, out: str | Path, recipe: str | None = None, **options: Unpack[RetrainOptions]
) -> dict[str, Any]:
    """Retrain a compressed network, in a folder that `save` wrote, by the last epochs of a recipe.

    Args:
        folder: what `rankwise.save` or `rankwise compress` wrote.
        data: the name of a data set.
        out: the folder to write: plan.json, model.safetensors and row.json.
        recipe: "gentle" unless given, or "taught" with `teacher=`.
        options: see `RetrainOptions`.

    Returns:
        The row that is written: scores before and after, seconds, history. `rankwise.networks.build(out)` opens the
        network.

    >>> import tempfile, rankwise as rw
    >>> folder, out = tempfile.mkdtemp(), tempfile.mkdtemp()
    >>> rw.save(*rw.compress(rw.networks.build("digits-cnn"), method="svd", keep=0.6, name="digits-cnn"), folder)
    >>> row = rw.retrain(folder, "digits", out, changes={"epochs": 1, "retrain": 1}, limit=64)
    >>> row["status"], sorted(row["retrained"])
    ('done', ['loss', 'n', 'top1', 'top5'])
    """
    given = cast(dict[str, Any], dict(options))
    known = RetrainOptions.__annotations__
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise RankwiseError(f"unknown keyword {unknown[0]!r}: retrain takes {', '.join(known)}")
    teacher, base, changes = given.pop("teacher", None), given.pop("base", None), given.pop("changes", {})
    chosen = change(get_recipe(recipe or ("taught" if teacher else "gentle")), changes)
    if Path(out).resolve() == Path(folder).resolve():
        raise RankwiseError(f"{out} is the folder that is retrained: give another one, so that both remain")
    run = steps.Run(data, chosen, Path(out), **given, teacher=None if teacher is None else Path(teacher))
    return steps.retrain(Path(folder), run, base)


class BenchOptions(TypedDict, total=False):
    """What `bench` takes beside a folder."""

    base: str | None  # the network to rebuild, for a folder that was made from file.py:factory
    input: str | None  # shape of an input, such as "1,3,224,224"
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    engines: tuple[str, ...]  # of eager, compiled, onnx
    layout: str  # contiguous or channels-last
    fuse: bool  # fold batch norms into the layers before them
    repeats: int  # runs that count, at most


def bench(folder: str | Path, **options: Unpack[BenchOptions]) -> dict[str, Any]:
    """Time, memory and file size of a compressed network against the dense one.

    Args:
        folder: what `rankwise.save` or `rankwise compress` wrote.
        options: batches=, threads=, engines= (eager, compiled, onnx), layout=, fuse=, repeats= …; see `BenchOptions`.

    Returns:
        One dict: "times" with a row for each engine, number of threads and batch; params, macs, bytes and memory.

    >>> import tempfile, rankwise as rw
    >>> folder = tempfile.mkdtemp()
    >>> rw.save(*rw.compress(rw.networks.build("digits-cnn"), method="svd", keep=0.6, name="digits-cnn"), folder)
    >>> found = rw.bench(folder, batches=(1,), threads=(1,), engines=("eager",), repeats=3)
    >>> found["params"]["compressed"] < found["params"]["dense"], found["times"][0]["ratio"] > 0
    (True, True)
    """
    known = BenchOptions.__annotations__
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise RankwiseError(f"unknown keyword {unknown[0]!r}: bench takes {', '.join(known)}")
    return run_bench(BenchJob(str(folder), **options))


class PlanOptions(CompressOptions, total=False):
    """What `forecast` and `smallest` pass on: all that `compress` takes."""

    method: str  # "auto" unless given


def forecast(
    model: nn.Module,
    example: Example,
    labelled: str,
    keep: float | None = None,
    macs: float | None = None,
    split: str = "test",
    **options: Unpack[PlanOptions],
) -> Forecast:
    """What a plan of `auto` will cost in accuracy, before a network is fitted.

    Args:
        model: the network, as for `compress`.
        example: an input, as for `compress`.
        keep: the fraction of all parameters that may remain.
        macs: the fraction of all multiply-adds that may remain.
        labelled: the name of a labelled data set; its training images calibrate the plan unless `data=` is given.
        split: where the loss is forecast; it must be new to the network.
        options: as for `compress`.

    Returns:
        A `Forecast`: drop in points of top-1 with low and high, and the percentage of answers that change.

    >>> import torch, rankwise as rw
    >>> model = rw.networks.build("digits-cnn").eval()
    >>> found = rw.forecast(model, torch.zeros(1, 1, 8, 8), "digits", keep=0.6)
    >>> found.low <= found.drop <= found.high
    True
    """
    job, units = _job(model, example, cast(dict[str, Any], {"data": labelled, **options}))
    images = load_data(labelled, split, size=side_of(example))
    sizes = {PARAMS.name: keep, MACS.name: macs, **units}
    plan = job.plan(Budget(**sizes))
    return make_forecast(model, plan, job.seen(plan), images)


def smallest(
    model: nn.Module,
    example: Example | None,
    metric: Metric,
    max_drop: float | str = 1.0,
    unit: str = PARAMS.name,
    higher_is_better: bool = True,
    **options: Unpack[PlanOptions],
) -> tuple[nn.Module, Plan]:
    """The smallest network that loses at most `max_drop` of your metric, by bisection over budgets.

    Args:
        model: the network; its own score is what losses are counted from.
        example: an input, as for `compress`; None where the budget does not need one.
        metric: any function from a network, in eval mode, to a number: top-1, mIoU, Spearman, perplexity, your own.
        max_drop: how much of the metric may be lost, in its own unit; "5%" is a share of what the model has.
        unit: of what the network is smallest: params, macs, latency.
        higher_is_better: False for a loss or a perplexity.
        options: as for `compress`: method=, data=, exclude=, recover= …

    Returns:
        The network and its plan. It was measured as it is returned. The metric is called at most 8 times.

    >>> import torch, rankwise as rw
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(), torch.randn(256, 64)
    >>> target = model(x).detach()
    >>> def error(net):
    ...     return float((net(x) - target).square().mean() / target.square().mean())
    >>> small, plan = rw.smallest(model, x[:1], error, max_drop=0.2, higher_is_better=False, method="svd-energy")
    >>> error(small) <= 0.2, plan.keep() < 0.9
    (True, True)
    """
    job, units = _job(model, example, cast(dict[str, Any], dict(options)))
    if units:
        raise RankwiseError(f"{next(iter(units))}= and max_drop= were given: drop one, since max_drop finds the budget")
    small, plan, _ = smallest_for(job, metric, max_drop, unit, higher_is_better)
    return small, plan


def smallest_for(
    job: Compression,
    metric: Metric,
    max_drop: float | str,
    unit: str,
    higher_is_better: bool = True,
    tell: limits.Tell | None = None,
) -> tuple[nn.Module, Plan, list[limits.Trial]]:
    """`smallest` for a job; gives all that was tried, too. Networks are scored as they are shipped."""
    limits.check_limit(max_drop, unit)
    sign = 1.0 if higher_is_better else -1.0

    def measured(network: nn.Module) -> float:
        with torch.no_grad():
            return sign * number(metric(network.eval()))

    training = job.model.training
    try:
        whole = measured(job.model)
    finally:
        job.model.train(training)
    if not math.isfinite(whole):
        raise RankwiseError(
            f"the metric of the network as it is, is {whole}: a finite number is needed to compare with"
        )
    return limits.smallest(job.run, measured, whole, limits.allowed(max_drop, whole), unit, tell)


def number(value: object) -> float:
    """What a metric gave: a number, or what can be made one, such as a tensor with one entry."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise RankwiseError(
            f"the metric gave a {type(value).__name__}, and one number is needed: return float(...)"
        ) from None


def _job(model: nn.Module, example: Example | None, given: dict[str, Any]) -> tuple[Compression, dict[str, Any]]:
    """The job of these options, and budgets among them."""
    method = given.pop("method", "auto")
    units, kept, asked = split_options(given)
    request = Request(method, given, **asked)
    progress = kept["progress"]
    watch = None if progress is None else lambda _: nullcontext(progress)
    return Compression(model, example, request, kept["data"], watch), units
