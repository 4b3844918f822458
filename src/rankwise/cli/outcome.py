"""What `compress` does around the job itself: scores, the folder, and what is printed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.api import Metric, smallest_for
from rankwise.cli import output, show
from rankwise.cli.asked import Limit
from rankwise.compression import BlockCompression, Compression
from rankwise.data.named import load_for
from rankwise.data.splits import Split
from rankwise.data.text import TextSplit
from rankwise.errors import RankwiseError
from rankwise.models import networks
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Plan
from rankwise.planning.planner import Settings
from rankwise.pruning.filters import Filters
from rankwise.pruning.trials import OUTPUT
from rankwise.surgery import checkpoint
from rankwise.surgery.coverage import EXCLUDED, OTHER_KIND
from rankwise.surgery.forward import Example, run_example, side_of, tensors_of, undisturbed
from rankwise.surgery.weights_file import read_tensors, weights_in
from rankwise.timing.clock import Timing
from rankwise.timing.load import compare
from rankwise.training.forecast import can_forecast, forecast
from rankwise.training.limits import ROUNDS, Trial
from rankwise.training.scores import has_score, score_of

FILE = 10**9  # bytes of a file of weights that are written block by block
SECONDS = (1.0, 4.0)  # to time the networks for: at least, and when three runs must do


@dataclass(frozen=True)
class Wanted:
    """What is done around the job itself: data to score on, --strict, --dry-run, and the folder to write."""

    data: str | None
    split: str
    strict: bool
    dry_run: bool
    out: Path | None


@dataclass(frozen=True)
class Finished:
    """What became of it, to be printed."""

    plan: Plan
    trials: list[Trial] | None = None
    expected: dict[str, Any] | None = None
    scores: dict[str, Any] | None = None
    time: dict[str, Any] | None = None
    verified: str | None = None
    out: Path | None = None

    def to_json(self) -> dict[str, Any]:
        trials = None if self.trials is None else [t.to_json() for t in self.trials]
        written = None if self.verified is None else str(self.out)
        more = {"expected": self.expected, "trials": trials, "time": self.time}
        found = {"out": written, "verified": self.verified, "scores": self.scores}
        return {**found, **more, "plan": self.plan.to_json()}


@contextmanager
def interruptible(out: Path | None) -> Iterator[None]:
    """Ctrl-C says what became of the folder."""
    try:
        yield
    except KeyboardInterrupt:
        whole = out is not None and checkpoint.is_compressed(out)
        what = f"{out} is as it was, or written whole" if whole else "nothing was written"
        raise KeyboardInterrupt(f"interrupted; {what}") from None


def compressed(job: Compression, asked: Budget | None, limit: Limit | None, wanted: Wanted) -> Finished:
    """Plan, build, recover, finish, score, write: what the flags ask for."""
    if isinstance(job, BlockCompression):
        return _by_block(job, asked, wanted)
    test: Split | TextSplit | None = None
    before = None
    if wanted.data is not None:  # read and scored first: what does not fit is said before anything is planned
        found = load_for(job.model, wanted.data, wanted.split, side_of(job.example))
        test = found if has_score(found) else None
        before = None if test is None else score_of(job.model, test).to_json()
    trials = None
    if limit is None:
        plan = job.plan(asked)
        if wanted.strict:
            check_pruned(plan)
        if wanted.dry_run and isinstance(test, Split) and can_forecast(plan, job.seen(plan)):
            return Finished(plan, expected=forecast(job.model, plan, job.seen(plan), test).to_json())
        small, plan = job.build(plan)
        plan = job.recover_(small, plan)
        small, plan = job.finish(small, plan)
    else:
        small, plan, trials = _within(job, limit)
        if wanted.strict:
            check_pruned(plan)
    scores = None if test is None else {"before": before, "after": score_of(small, test).to_json()}
    if wanted.dry_run or wanted.out is None:
        return Finished(plan, trials, None, scores)
    checkpoint.save(small, plan, wanted.out)
    verified = verify(wanted.out, small, job.model, job.example)
    return Finished(plan, trials, None, scores, _timed(job, small), verified, wanted.out)


def _by_block(job: BlockCompression, asked: Budget | None, wanted: Wanted) -> Finished:
    """Without scores and times: those need the whole network (rankwise evaluate, rankwise bench)."""
    plan = job.plan(asked)
    if wanted.dry_run or wanted.out is None:
        if wanted.out is None:
            job.forget()  # no other run would go on from it
        return Finished(plan)
    small, plan = job.finish(*job.build(plan))
    checkpoint.save(small, plan, wanted.out, FILE)
    tensors, _ = read_tensors(weights_in(wanted.out))
    state = small.state_dict()
    if not all(torch.equal(state[name], value) for name, value in tensors.items()):
        raise RankwiseError(f"{wanted.out} was written, but read back it has other weights: do not use it")
    job.forget()
    return Finished(plan, verified="it has the same weights", out=wanted.out)


def _timed(job: Compression, small: nn.Module) -> dict[str, Any] | None:
    """What both networks take; None where no input is known."""
    if job.example is None:
        return None
    return compare(job.model, small, job.example, job.request.timing or Timing(), *SECONDS)


def check_strict(job: Compression) -> None:
    """--strict for methods that decompose: every linear layer and convolution must be free for it."""
    job.check()
    if isinstance(job.settings, Filters):
        return  # which filters can be removed is another question, and the plan answers it
    gaps = [s for s in job.coverage.skipped if s.reason not in (OTHER_KIND, EXCLUDED)]
    if gaps:
        first = "; ".join(f"{s.name}: {s.reason}" for s in gaps[:3])
        raise RankwiseError(
            f"--strict was given and {len(gaps)} layers cannot be decomposed ({first}): exclude them by name, "
            f"or leave --strict out"
        )


def check_pruned(plan: Plan) -> None:
    """--strict for methods that remove filters: every filter must be free to go, but for the network's output."""
    whole = plan.search.whole or ()
    held = [group for group in whole if group.reason != OUTPUT and not group.reason.endswith(EXCLUDED)]
    if held:
        first = "; ".join(f"{group.layers[0]}: {group.reason}" for group in held[:3])
        raise RankwiseError(
            f"--strict was given and the filters of {len(held)} groups of layers cannot be removed ({first}): exclude "
            f"them by name, or leave --strict out"
        )


def verify(folder: Path, small: nn.Module, original: nn.Module, example: Example | None) -> str:
    """Read the folder back and compare with what was written; says what was compared.

    A folder for transformers is opened by transformers.
    """
    alone = networks.is_folder_for_transformers(str(folder))
    again = networks.load(folder, None if alone else original)
    pairs = zip(again.state_dict().values(), small.state_dict().values(), strict=True)
    if not all(torch.equal(a, b) for a, b in pairs):
        raise RankwiseError(f"{folder} was written, but read back it has other weights: do not use it")
    if example is None:
        return "it has the same weights (give --input to compare outputs too)"
    with undisturbed(again), undisturbed(small):
        ours, theirs = tensors_of(run_example(small, example)), tensors_of(run_example(again, example))
    if len(ours) != len(theirs) or not all(_alike(a, b) for a, b in zip(ours, theirs, strict=True)):
        raise RankwiseError(f"{folder} was written, but read back it gives other outputs: do not use it")
    return "it gives the same outputs"


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    """Equal but for rounding: where weights lie in memory decides in which order torch adds."""
    if torch.equal(ours, theirs):
        return True
    digits = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0
    return ours.shape == theirs.shape and bool(
        (ours.double() - theirs.double()).abs().max() <= 64 * digits * ours.double().abs().max()
    )


def _within(job: Compression, limit: Limit) -> tuple[nn.Module, Plan, list[Trial]]:
    """The smallest network that loses at most so much of the metric, or of its score on the validation split."""
    metric, higher = limit.metric, not limit.lower_is_better
    if metric is None:
        held_out = load_for(job.model, limit.data or "", "val", side_of(job.example))
        metric, higher = _score(held_out), isinstance(held_out, Split)
    if isinstance(job.settings, Settings):
        job.check()
        job.basis(Budget(**{limit.unit: 1.0}))  # before the bar of the search is shown
    with output.progress("looking for the smallest") as report:
        tried: list[Trial] = []

        def tell(trial: Trial) -> None:
            tried.append(trial)
            report(show.trial(trial, limit.unit), len(tried), ROUNDS)

        report("", 0, ROUNDS)
        return smallest_for(job, metric, limit.most, limit.unit, higher, tell)


def _score(held_out: Split | TextSplit) -> Metric:
    return lambda network: score_of(network, held_out).main


def print_outcome(done: Finished, split: str) -> None:
    plan, terminal = done.plan, output.console()
    terminal.print(show.plan_grid(plan, str(plan.settings.get("error", "energy"))))
    kept = [s for s in plan.kept if s.reason not in (OTHER_KIND, EXCLUDED)]
    for line in show.held_filters(plan) if plan.pruned else show.by_reason(kept, plan.before.params):
        terminal.print(f"left whole: {line}")
    for note in show.remarks(plan):
        terminal.print(note)
    for warning in plan.warnings:
        terminal.print(f"warning: {warning}")
    terminal.print(show.before_after_grid(plan, done.scores))
    if done.time is not None:
        terminal.print(show.measured_time(done.time))
    if done.expected is not None:
        terminal.print(show.expectation(done.expected, split))
    if done.verified is not None:
        terminal.print(f"done: {done.out} was written and read back; {done.verified}")
