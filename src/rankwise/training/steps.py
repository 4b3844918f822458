"""Train, compress, retrain, repeat: each step a folder that `rankwise evaluate` and `compress` can open.

    train      OUT/model.safetensors, whose header names the network, and OUT/row.json
    retrain    OUT/plan.json, OUT/model.safetensors and OUT/row.json
    iterate    OUT/train (where the network had no weights), OUT/round-1, OUT/round-2 …, each as above;
               by learning–compression OUT/lc in place of all rounds but the last

While a folder is being worked on it holds state.safetensors; row.json is written last, so it says that all is there.
With several processes the first one plans and writes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import nn

from rankwise.compression import Compression, Request
from rankwise.core import files
from rankwise.core.disk import only_user, remove
from rankwise.errors import RankwiseError
from rankwise.methods import get_method, settings_for
from rankwise.models import networks
from rankwise.models.spec import parse
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Plan
from rankwise.planning.planner import Settings
from rankwise.surgery import checkpoint
from rankwise.surgery.coverage import find_layers
from rankwise.surgery.modules import mark_of
from rankwise.surgery.replace import copy_model, densify, replace_layers_
from rankwise.training import penalties
from rankwise.training import resume as states
from rankwise.training.choices import describe
from rankwise.training.dataset import Material, open_material
from rankwise.training.evaluate import evaluate
from rankwise.training.loop import Hooks, Penalty, Told, TrainingJob, TrainingWatch, retraining, train_, training
from rankwise.training.precision import settle
from rankwise.training.processes import Engine, make_engine
from rankwise.training.range_test import find_rate
from rankwise.training.recipes import Recipe
from rankwise.training.results import provenance, write_row
from rankwise.training.resume import State
from rankwise.training.teacher import ready

ROW = "row.json"
LOOPS = ("rounds", "lc")
_WHOLE = {"keep": {"params": 1.0, "macs": 1.0}, "CR-P": 0.0, "CR-F": 0.0}


@dataclass(frozen=True)
class Run:
    """What all steps share. `split` is scored once, at the end; `limit` trains on so many images only.

    `teacher` holds the weights of the network before it was compressed, a file or a folder, for retraining (`teach`).
    """

    data: str
    recipe: Recipe
    out: Path
    seed: int = 0
    resume: bool = False
    split: str = "test"
    limit: int | None = None
    size: int | None = None
    watch: TrainingWatch | None = None
    teacher: Path | None = None


@dataclass(frozen=True)
class _Session:
    """A step at work: what was asked for, by which processes, on what data."""

    run: Run
    engine: Engine
    material: Material

    def score(self, model: nn.Module) -> dict[str, Any]:
        """On the split that is scored at the end."""
        engine = self.engine
        return evaluate(model, self.material.split(self.run.split), share=(engine.rank, engine.world)).to_json()


def _settled(run: Run) -> Run:
    """With the precision that `auto` stands for on this machine."""
    return replace(run, recipe=replace(run.recipe, precision=settle(run.recipe.precision)))


def _open(run: Run, name: str, engine: Engine) -> _Session:
    """With the data that a network of this architecture can read, and the augmentation that fits it."""
    material = open_material(run.data, name, run.recipe.augment, run.size, run.limit)
    return _Session(replace(run, recipe=replace(run.recipe, augment=material.augment)), engine, material)


def train(
    spec: str, run: Run, weights: Path | None = None, target: penalties.SizeTarget | None = None
) -> dict[str, Any]:
    """Train the network `spec` from random weights, or from those in a file or a folder; returns the row.

    With a `target`, by learning–compression: the network ends near one of that size.
    """
    run = _settled(run)
    engine = make_engine(run.recipe.precision)
    with _claim(run, engine) as done:
        return _train(spec, run, engine, weights, target) if done is None else done


def _train(
    spec: str, run: Run, engine: Engine, weights: Path | None, target: penalties.SizeTarget | None
) -> dict[str, Any]:
    session = _open(run, networks.architecture(spec), engine)
    run = session.run
    spec = networks.fit_spec(spec, *session.material.form)
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(run.seed)
        model = networks.build(spec)
    if weights is not None:
        networks.load_weights_(model, weights)
    if any(mark_of(module) is not None for module in model.modules()):
        raise RankwiseError(f"{spec} is compressed: use `rankwise retrain`")
    name = networks.architecture(spec)
    job = training(run.recipe, run.seed)
    what: dict[str, Any] = {"kind": "train", "model": name, "weights": None if weights is None else str(weights)}
    pulled = None
    if target is not None:
        what |= {"kind": "lc", "method": target.method, "target": target.params}
        pulled = penalties.pull(model, target, run.recipe, engine)
    state = _work(model, None, job, what, session, pulled)
    if engine.writes:
        header = {"rankwise": json.dumps({"network": name})}
        files.write_whole(run.out / networks.WEIGHTS, to_safetensors(states.model_tensors(model), metadata=header))
    return _finish(model, what, _WHOLE, state, session)


def retrain(folder: Path, run: Run, base: str | None = None) -> dict[str, Any]:
    """Retrain a compressed folder by the last epochs of the recipe; returns the row."""
    run = _settled(run)
    engine = make_engine(run.recipe.precision)
    with _claim(run, engine) as done:
        if done is not None:
            return done
        plan = checkpoint.read_plan(folder)
        small = networks.build(str(folder), base=base)
        name = base or networks.architecture(str(folder))
        session = _open(run, name, engine)
        teacher = None if run.teacher is None else _teacher(run.teacher, name, session)
        return _retrain(small, plan, None, session, teacher)


def _teacher(weights: Path, spec: str, session: _Session) -> nn.Module:
    """The original network, with its weights from a file or from a folder that `train` wrote."""
    teacher = networks.build(spec)
    networks.load_weights_(teacher, weights / networks.WEIGHTS if weights.is_dir() else weights)
    example = torch.zeros(1, *session.material.shape)
    return ready(teacher.eval(), example, session.run.recipe.layers).to(session.engine.device)


@dataclass(frozen=True)
class Rounds:
    """Iterative compression: keep αⁱ of the parameters after round i = 1 … count, by one method and changes to it.

    `calibrate` images are looked at, none for 0; `recover` as for `Request`, before each retraining.
    """

    count: int = 3
    method: str = "auto"
    exclude: tuple[str, ...] = ()
    calibrate: int = 256
    loop: str = "rounds"
    changes: Mapping[str, Any] = field(default_factory=dict)
    recover: int | str = 0

    def __post_init__(self) -> None:
        if self.loop not in LOOPS:
            raise RankwiseError(f"--loop {self.loop} was given: possible are {', '.join(LOOPS)}")
        if self.count < 1:
            raise RankwiseError(f"{self.count} rounds were asked for: ask for 1 or more")
        settings_for(self.method, **self.changes)


def iterate(spec: str, run: Run, rounds: Rounds, weights: Path | None = None) -> list[dict[str, Any]]:
    """Train if there are no weights yet, then compress, retrain and project back in each round; returns the rows.

    Every round compresses the network of the round before after its pairs were multiplied out, so that no pair is
    decomposed again, and its budget is a fraction αⁱ of the network at the start. With the loop `lc` one training by
    learning–compression takes the place of all rounds but the last.
    """
    rows = []
    if weights is None and parse(spec).kind != "folder":
        rows.append(train(spec, replace(run, out=run.out / "train")))
        spec = str(run.out / "train")
    run = _settled(run)
    engine = make_engine(run.recipe.precision)
    session = _open(run, networks.architecture(spec), engine)
    run, material = session.run, session.material
    spec = networks.fit_spec(spec, *material.form)
    name = networks.architecture(spec)
    model = networks.build(spec)
    if weights is not None:
        networks.load_weights_(model, weights)
    whole = find_layers(model, torch.zeros(1, *material.shape))
    reference = session.score(model)
    if rounds.loop == "lc":
        target = penalties.SizeTarget(int(run.recipe.alpha**rounds.count * whole.params), rounds.method, rounds.exclude)
        rows.append(train(spec, replace(run, out=run.out / "lc"), weights, target))
        model = networks.build(str(run.out / "lc"))
    for i in range(rounds.count if rounds.loop == "lc" else 1, rounds.count + 1):
        this = replace(run, out=run.out / f"round-{i}")
        with _claim(this, engine) as row:
            if row is None:
                keep = run.recipe.alpha**i
                now = replace(session, run=this)
                small, plan = _compressed(model, name, int(keep * whole.params), rounds, now)
                about = {"round": i, "asked": keep, "reference": reference, **_cuts(plan, whole.params, whole.macs)}
                row = _retrain(small, plan, about, now)
        rows.append(row)
        engine.wait()
        model = densify(checkpoint.load(this.out, model))
    return rows


def _cuts(plan: Plan, params: int, macs: int | None) -> dict[str, Any]:
    """What a plan leaves of a network that had so many parameters and multiply-adds."""
    keep = plan.after.params / params
    moves = plan.after.macs / macs if macs and plan.after.macs is not None else None
    return {
        "keep": {"params": keep, "macs": moves},
        "CR-P": 100 * (1 - keep),
        "CR-F": None if moves is None else 100 * (1 - moves),
    }


def _compressed(model: nn.Module, name: str, params: int, rounds: Rounds, session: _Session) -> tuple[nn.Module, Plan]:
    """The plan is made by the first process, or comes from the state of an interrupted round; all follow it."""
    run, engine, material = session.run, session.engine, session.material
    text, small = None, None
    if engine.writes:
        kept = states.read(run.out)
        if kept is not None:
            where = str(run.out / states.FILE)
            text = states.plan_of(states.loads(kept, where), where)
        else:
            searched = isinstance(get_method(rounds.method).settings, Settings)
            changes: dict[str, Any] = {"starts": run.recipe.starts, "seed": run.seed} if searched else {}
            changes |= rounds.changes
            request = Request(rounds.method, changes, rounds.exclude, rounds.recover, name=name)
            used = request.looks_at_data and rounds.calibrate
            images = material.split("calibration").thin(rounds.calibrate) if used else None
            job = Compression(model, torch.zeros(1, *material.shape), request, images)
            small, plan = job.run(Budget(params=params))
            text = plan.dumps().encode()
    plan = Plan.loads(engine.from_first(text) or b"", f"the plan of {run.out}")
    if small is None:
        small = copy_model(model)
        replace_layers_(small, plan, fill=False)  # the weights come from the first process, or from the state
    return small, plan


def _retrain(
    small: nn.Module,
    plan: Plan,
    about: dict[str, Any] | None,
    session: _Session,
    teacher: nn.Module | None = None,
) -> dict[str, Any]:
    session, tried = _with_rate(small, session, teacher)
    run = session.run
    if session.engine.writes and isinstance(run.watch, Told):
        run.watch.chosen(describe(small, run.recipe, tested=tried is not None))
    job = retraining(run.recipe, run.seed)
    what = {"kind": "retrain", "model": plan.model, "method": plan.method, "plan": checkpoint.plan_hash(plan)}
    what |= {} if run.teacher is None else {"teacher": str(run.teacher)}
    state = _work(small, plan, job, what, session, teacher=teacher)
    if session.engine.writes:
        checkpoint.save(small, plan, run.out)
    facts = {
        "method": plan.method,
        "asked": next(iter(plan.budget.to_json().values())),
        "budget": plan.budget.to_json(),
        **_cuts(plan, plan.before.params, plan.before.macs),
        "params": plan.after.params,
        "macs": plan.after.macs,
        **({"range_test": tried} if tried else {}),
        **({"warnings": list(plan.warnings)} if plan.warnings else {}),
        **(about or {}),
    }
    return _finish(small, what, facts, state, session)


def _with_rate(
    small: nn.Module, session: _Session, teacher: nn.Module | None
) -> tuple[_Session, dict[str, Any] | None]:
    """Where the recipe wants it, with the learning rate of a range test by the first process.

    A retraining that goes on keeps the rate that it began with. Returns what the test saw, None where there was none.
    """
    run, engine = session.run, session.engine
    if not run.recipe.find_lr:
        return session, None
    text = None
    if engine.writes:
        kept = states.read(run.out)
        if kept is not None:
            where = str(run.out / states.FILE)
            text = json.dumps({"lr": states.rate_of(states.loads(kept, where), where)}).encode()
        else:
            found = find_rate(small, session.material.fit, run.recipe, teacher, run.seed)
            text = json.dumps(found.to_json()).encode()
    tried = files.parse(engine.from_first(text) or b"", "the range test")
    return replace(session, run=replace(run, recipe=replace(run.recipe, lr=tried["lr"]))), tried


@contextmanager
def _claim(run: Run, engine: Engine) -> Iterator[dict[str, Any] | None]:
    """The row of a folder that is finished already; a folder in use is refused unless it is to be resumed.

    Two processes that train in one folder are refused, too: each would overwrite the other's state.
    """
    if not engine.writes:
        yield _done_row(engine.from_first(None), run)
        return
    files.make_folder(run.out)
    with only_user(run.out):
        path, begun = run.out / ROW, (run.out / states.FILE).exists()
        content = files.read(path) if path.exists() else None
        if not run.resume and (content is not None or begun):
            unfinished = begun and _done_row(content, run) is None
            what = "a training that was interrupted" if unfinished else "a finished training"
            raise RankwiseError(f"{run.out} holds {what}: add --resume to go on with it, or give another --out")
        yield _done_row(engine.from_first(content), run)


def _done_row(content: bytes | None, run: Run) -> dict[str, Any] | None:
    row = None if content is None else files.parse(content, str(run.out / ROW))
    return row if row is not None and row.get("status") == "done" else None


def _work(
    model: nn.Module,
    plan: Plan | None,
    job: TrainingJob,
    what: dict[str, Any],
    session: _Session,
    penalty: Penalty | None = None,
    teacher: nn.Module | None = None,
) -> State:
    """Train from where the folder's state stands, and keep the state there."""
    run, engine, material = session.run, session.engine, session.material
    identity = {**what, "data": run.data, "limit": run.limit, "seed": run.seed, "recipe": run.recipe.to_json()}

    def save(now: State) -> None:
        if engine.writes:
            states.write(run.out, now)

    kept = engine.from_first(states.read(run.out) if engine.writes else None)
    if kept is None:
        state = _first_state(model, plan, State(identity, job.first), session)
        if plan is not None:
            save(state)  # the plan is made once, also when the first epoch is interrupted
    else:
        where = str(run.out / states.FILE)
        state = states.loads(kept, where)
        states.check_job(state, identity, where)
        states.check_progress(state, job.first, job.last, plan is not None, where)
    watch = run.watch if engine.writes else None
    hooks = Hooks(material.stop, watch, save, penalty, teacher, material.side, state)
    try:
        return train_(model, material.fit, job, engine, hooks)
    except RankwiseError as err:
        if engine.writes:
            write_row(run.out / ROW, {"status": "failed", "error": str(err), **identity, "provenance": provenance()})
        raise


def _first_state(model: nn.Module, plan: Plan | None, state: State, session: _Session) -> State:
    """Where nothing was trained yet: of a compressed network with its weights, its plan and its score."""
    if plan is None:
        return state
    engine, where = session.engine, str(session.run.out / states.FILE)
    state.model = states.model_tensors(model)
    if engine.world > 1:  # only the first process has filled the pairs
        state = states.loads(engine.from_first(states.dumps(state)) or b"", where)
        states.load_model_(model, state.model, where)
    state.notes = {"plan": plan.dumps(), "compressed": session.score(model)}
    return state


def _finish(
    model: nn.Module, what: dict[str, Any], facts: dict[str, Any], state: State, session: _Session
) -> dict[str, Any]:
    """Score once, write the row last, and drop the state, which is no longer needed."""
    run, engine = session.run, session.engine
    start = time.perf_counter()
    score = session.score(model)
    scores = {"compressed": state.notes["compressed"]} if "compressed" in state.notes else {}
    row = {
        "status": "done",
        **what,
        **facts,
        "data": run.data,
        "split": run.split,
        "seed": run.seed,
        **scores,
        "retrained" if scores else "trained": score,
        "best_epoch": state.best_epoch,
        "history": state.history,
        "seconds": {"train": state.seconds, "score": time.perf_counter() - start},
        "processes": engine.world,
        "recipe": run.recipe.to_json(),
        "provenance": provenance(),
    }
    if engine.writes:
        write_row(run.out / ROW, row)
        remove(run.out / states.FILE)
    engine.wait()
    return row
