"""Everything that is written, each with its reader: what a crash may leave is old and whole or new and whole.

A writer prepares a folder, then writes versions 1, 2, … into it; its reader gives the version that it finds, 0 for what
was prepared. After a crash the version is at least the last one whose writing had returned, and at most one more.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import made_rows
import rankwise as rw
from rankwise.cli import demo
from rankwise.core import workers
from rankwise.deploy.export import TARGETS, export, open_exported
from rankwise.errors import RankwiseError
from rankwise.models import networks
from rankwise.reports import charts, curves
from rankwise.reports.html import write_report
from rankwise.reports.single import write_report as write_single
from rankwise.studies import runner, store
from rankwise.studies.study import fill_in
from rankwise.studies.study_file import make_study
from rankwise.surgery import checkpoint
from rankwise.timing.cache import Store
from rankwise.training import results, resume, steps
from rankwise.training.recipes import RECIPES, Recipe, change
from trust.crash import Recorder, State


class Violation(AssertionError):
    """A state that nobody should ever see."""


@dataclass(frozen=True)
class Writer:
    """`prepare(folder)`, then `write(folder, note)` while it is recorded; `check(folder, state)` raises `Violation`.

    `go_on(folder)` does the work again after a crash and checks what comes of it.
    """

    name: str
    prepare: Callable[[Path], None]
    write: Callable[[Path, Recorder], None]
    check: Callable[[Path, State], None]
    go_on: Callable[[Path], None] | None = None


def versions(
    name: str,
    write: Callable[[Path, int], None],
    read: Callable[[Path], object],
    count: int = 3,
    prepared: bool = True,
) -> Writer:
    """Versions 1 … count over version 0, or over nothing: then a sentence that nothing is there is version 0."""
    known: dict[int, object] = {}

    def prepare(folder: Path) -> None:
        for i in range(count + 1):
            made = folder.parent / f"{name}-{i}"
            made.mkdir(exist_ok=True)
            write(made, i)
            known[i] = read(made)
        assert len({repr(v) for v in known.values()}) == count + 1, "versions differ, or the test could not fail"
        if prepared:
            write(folder, 0)

    def write_all(folder: Path, note: Recorder) -> None:
        for i in range(1, count + 1):
            write(folder, i)
            note.mark(i)

    def check(folder: Path, state: State) -> None:
        done = max(state.marks, default=0)
        try:
            found = read(folder)
        except RankwiseError as err:
            if done or prepared:
                raise Violation(f"version {done} was there, and the reader says: {err}") from err
            return
        allowed = [i for i in (done, done + 1) if i in known and (i or prepared)]
        if found not in [known[i] for i in allowed]:
            raise Violation(f"version {done} or {done + 1} was expected, and another was found")

    return Writer(name, prepare, write_all, check)


def once(check: Callable[[Path], None]) -> Callable[[Path], None]:
    """`check` of a folder, unless one with the same contents has passed: most states differ elsewhere."""
    passed: set[tuple[tuple[str, bytes], ...]] = set()

    def call(folder: Path) -> None:
        held = tuple((p.name, p.read_bytes()) for p in sorted(folder.iterdir()) if p.is_file())
        if held not in passed:
            check(folder)
            passed.add(held)

    return call


# ---- plans, tables, networks -----------------------------------------------------------------------------


def small_net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 10))


@cache
def compressed(i: int) -> tuple[nn.Module, rw.Plan]:
    return rw.compress(small_net(i), keep=0.75 - 0.1 * i, method="alds")


@cache
def table(i: int) -> rw.Table:
    return rw.build_table(small_net(i), torch.zeros(1, 12), folds="all", groups=1)


def tensors(model: nn.Module) -> list[tuple[str, bytes]]:
    return [(name, value.numpy().tobytes()) for name, value in model.state_dict().items()]


def read_network(folder: Path) -> object:
    return tensors(rw.load(folder / "out", small_net())), rw.Plan.dumps(rw.surgery.checkpoint.read_plan(folder / "out"))


PLAN = versions(
    "plan",
    lambda folder, i: compressed(i)[1].save(folder / "plan.json"),
    lambda folder: rw.Plan.load(folder / "plan.json").dumps(),
)
TABLE = versions(
    "table",
    lambda folder, i: table(i).save(folder / "t.table"),
    lambda folder: rw.Table.load(folder / "t.table").fingerprint,
)
NETWORK = versions("network", lambda folder, i: rw.save(*compressed(i), folder / "out"), read_network)
NEW_NETWORK = versions(
    "network, new folder",
    lambda folder, i: rw.save(*compressed(i), folder / "a" / "out"),
    lambda folder: read_network(folder / "a"),
    2,
    prepared=False,
)


@cache
def digits(i: int) -> tuple[nn.Module, rw.Plan]:
    model = networks.build("digits-cnn")
    small, plan = rw.compress(model, torch.zeros(1, 1, 8, 8), keep=0.3 + 0.1 * i, method="svd")
    return small, replace(plan, model="digits-cnn")


def over_trained(folder: Path, i: int) -> None:
    """What `train` wrote, then `compress` into the same folder."""
    from safetensors.torch import save

    if i:
        rw.save(*digits(i), folder / "out")
    else:
        (folder / "out").mkdir(exist_ok=True)
        state = {name: value.contiguous() for name, value in networks.build("digits-cnn").state_dict().items()}
        text = json.dumps({"network": "digits-cnn"})
        (folder / "out" / "model.safetensors").write_bytes(save(state, metadata={"rankwise": text}))


OVER_TRAINED = versions(
    "network over a trained one",
    over_trained,
    lambda folder: [name for name, _ in tensors(networks.build(str(folder / "out")))] + [
        p.shape for p in networks.build(str(folder / "out")).parameters()
    ],
    2,
)  # fmt: skip


@cache
def language(i: int) -> tuple[nn.Module, rw.Plan]:
    """A network of transformers, and its plan."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=12,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(i)
        network = transformers.LlamaForCausalLM(config).eval()
    return rw.compress(network, keep=0.85 - 0.1 * i, method="svd") if i >= 0 else (network, None)


def save_language(folder: Path, i: int) -> None:
    """Versions 1 and 2 are several files with an index, the others one."""
    before = checkpoint.LARGEST
    checkpoint.LARGEST = 3000 if i in (1, 2) else before
    try:
        rw.save(*language(i), folder / "out")
    finally:
        checkpoint.LARGEST = before


def read_language(folder: Path) -> tuple[list[tuple[str, bytes]], str]:
    made = rw.load(folder / "out", language(-1)[0])
    return tensors(made), checkpoint.read_plan(folder / "out").dumps()


LANGUAGE = versions("folder for transformers", save_language, read_language)


# ---- training --------------------------------------------------------------------------------------------


def made_state(i: int) -> resume.State:
    weights = {"weight": torch.full((40, 3), float(i)), "bias": torch.arange(3.0)}
    return resume.State({"kind": "train"}, i, [{"epoch": i}], model=weights, optimizer={"0/exp": weights["weight"]})


def read_state(folder: Path) -> object:
    content = resume.read(folder)
    if content is None:
        raise RankwiseError("there is none")
    state = resume.loads(content, "the state")
    return state.epoch, state.history, float(state.model["weight"][0, 0]), float(state.optimizer["0/exp"][0, 0])


STATE = versions("training state", lambda folder, i: resume.write(folder, made_state(i)), read_state, 4)


@cache
def short() -> Recipe:
    return change(RECIPES["fast"], {"epochs": 3, "retrain": 2, "warmup": 0, "batch_size": 32, "every": 1})


class Marks:
    """Marks the epochs whose state is written, as `steps` goes on."""

    def __init__(self, note: Recorder) -> None:
        self.note, self.real = note, resume.write

    def __enter__(self) -> None:
        def write(folder: Path, state: resume.State) -> None:
            self.real(folder, state)
            self.note.mark(("epoch", state.epoch))

        resume.write = write

    def __exit__(self, *_: object) -> None:
        resume.write = self.real


def training(name: str, prepare: Callable[[Path], None], work: Callable[[Path, bool], Any]) -> Writer:
    """A whole training: after a crash there is the network, or the state from which it goes on."""
    known: dict[str, bytes] = {}

    def prepared(folder: Path) -> None:
        prepare(folder)
        other = folder.parent / "whole"
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(folder, other)
        work(other, False)
        known["weights"] = (other / "out" / "model.safetensors").read_bytes()

    def write(folder: Path, note: Recorder) -> None:
        with Marks(note):
            work(folder, False)
        note.mark("done")

    def check(folder: Path, state: State) -> None:
        out, epochs = folder / "out", [m[1] for m in state.marks if m != "done"]
        try:
            row = out / steps.ROW
            if row.is_file() and results.files.parse(row.read_bytes(), "row").get("status") == "done":
                if (out / "model.safetensors").read_bytes() != known["weights"]:
                    raise Violation("the row says done, and the network is another one")
                networks.build(str(out))
                return
            content = resume.read(out) if out.is_dir() else None
            epoch = -1 if content is None else resume.loads(content, "the state").epoch
        except (RankwiseError, OSError) as err:
            raise Violation(f"{type(err).__name__}: {err}") from err
        if "done" in state.marks or epoch < max(epochs, default=-1):
            raise Violation(f"epoch {max(epochs, default=-1)} was written, and epoch {epoch} is there")

    def go_on(folder: Path) -> None:
        work(folder, True)
        if (folder / "out" / "model.safetensors").read_bytes() != known["weights"]:
            raise Violation("resumed after the crash, it is another network")
        left = sorted(p.name for p in (folder / "out").iterdir() if p.suffix == ".part" or p.name == resume.FILE)
        if left:
            raise Violation(f"resumed after the crash, {left} are left")

    return Writer(name, prepared, write, check, go_on)


def _run(folder: Path, again: bool) -> steps.Run:
    return steps.Run("digits", short(), folder / "out", 0, again, limit=48)


TRAIN = training("train", lambda folder: None, lambda folder, again: steps.train("digits-cnn", _run(folder, again)))
RETRAIN = training(
    "retrain",
    lambda folder: rw.save(*digits(1), folder / "small"),
    lambda folder, again: steps.retrain(folder / "small", _run(folder, again), base="digits-cnn"),
)


def _iterate(folder: Path, again: bool) -> Any:
    rounds = steps.Rounds(2, "svd", calibrate=0)
    return steps.iterate("digits-cnn", _run(folder, again), rounds, folder.parent / "out" / "model.safetensors")


def iterating() -> Writer:
    """Two rounds: after a crash each is done and whole, or can be gone on with."""
    known: dict[int, bytes] = {}

    def prepare(folder: Path) -> None:
        over_trained(folder.parent, 0)
        other = folder.parent / "whole"
        other.mkdir(exist_ok=True)
        _iterate(other, False)
        known.update({i: (other / "out" / f"round-{i}" / "model.safetensors").read_bytes() for i in (1, 2)})

    def write(folder: Path, note: Recorder) -> None:
        with Marks(note):
            _iterate(folder, False)
        note.mark("done")

    def is_done(out: Path) -> bool:
        row = out / steps.ROW
        return row.is_file() and results.files.parse(row.read_bytes(), "row").get("status") == "done"

    def check_round(out: Path) -> None:
        try:
            if is_done(out):
                if (out / "model.safetensors").read_bytes() != known[int(out.name[-1])]:
                    raise Violation(f"the row of {out.name} says done, and the network is another one")
                checkpoint.load(out, networks.build("digits-cnn"))
            elif (content := resume.read(out)) is not None:
                resume.plan_of(resume.loads(content, "the state"), "the state")
        except (RankwiseError, OSError) as err:
            raise Violation(f"{out.name}: {type(err).__name__}: {err}") from err

    checked = once(check_round)

    def check(folder: Path, state: State) -> None:
        rounds = [out for i in (1, 2) if (out := folder / "out" / f"round-{i}").is_dir()]
        for out in rounds:
            checked(out)
        if "done" in state.marks and not (len(rounds) == 2 and all(map(is_done, rounds))):
            raise Violation("both rounds were done, and one is not")

    def go_on(folder: Path) -> None:
        _iterate(folder, True)
        if (folder / "out" / "round-2" / "model.safetensors").read_bytes() != known[2]:
            raise Violation("resumed after the crash, it is another network")

    return Writer("iterate", prepare, write, check, go_on)


ITERATE = iterating()


# ---- rows, stores, studies -------------------------------------------------------------------------------

ROW = versions(
    "study row",
    lambda folder, i: results.write_row(folder / "r" / "rows" / "a.json", made_rows.row(top1=float(i))),
    lambda folder: [row["compressed"]["top1"] for row in results.read_rows(folder / "r")] or _nothing(),
    prepared=False,
)


def _nothing() -> None:
    raise RankwiseError("there is none")


def _fill(work: Path) -> None:
    table(1).save(work / "table.safetensors")


def _write_entry(folder: Path, note: Recorder) -> None:
    for i in range(3):
        store.entry(folder / "store", {"number": i}, _fill)
        note.mark(i)


def _check_entry(folder: Path, state: State) -> None:
    for i in range(3):
        path = folder / "store" / store.digest({"number": i})
        if path.is_dir():
            try:
                rw.Table.load(path / "table.safetensors")
                results.files.parse((path / store.KEY).read_bytes(), "key")
            except (RankwiseError, OSError) as err:
                raise Violation(f"an entry has its name and is not whole: {err}") from err
        elif i in state.marks:
            raise Violation(f"entry {i} was made, and it is gone")


STORE = Writer("store", lambda folder: None, _write_entry, _check_entry)


@cache
def study(weights: str) -> Any:
    grid = {
        "methods": ["svd"],
        "keeps": [0.5, 0.3],
        "retrain": [0, 0.5],
        "network": [
            {
                "model": "digits-cnn",
                "data": "digits",
                "limit": 48,
                "weights": "<digits-cnn>",
                "set": {"epochs": 2, "retrain": 1, "warmup": 0},
            }
        ],
    }
    return fill_in(make_study(grid, "crash", "crash.toml"), [], [f"digits-cnn={weights}"])


def _prepare_study(folder: Path) -> None:
    over_trained(folder.parent, 0)
    study.cache_clear()
    study(str(folder.parent / "out" / "model.safetensors"))


def _study_of(folder: Path) -> Any:
    return study(str(folder.parent / "out" / "model.safetensors"))


def _write_study(folder: Path, note: Recorder) -> None:
    runner.run_study(
        _study_of(folder), folder / "r", lambda count: workers.Here(), lambda row, *_: note.mark(row["cell"])
    )


def _check_study(folder: Path, state: State) -> None:
    out = folder / "r"
    try:
        rows = results.read_rows(out) if out.is_dir() else []
        for row in rows:
            rw.Plan.load(out / row["plan"])
            results.files.parse((out / row["spectra"]).read_bytes(), "spectra")
        for entry in (out / "store").glob("*/about.json") if (out / "store").is_dir() else ():
            if not entry.parent.suffix:
                networks.load_weights_(networks.build("digits-cnn"), entry.parent / "model.safetensors")
    except (RankwiseError, OSError) as err:
        raise Violation(f"{type(err).__name__}: {err}") from err
    lost = set(state.marks) - {row["cell"] for row in rows}
    if lost or any(row["status"] != "done" for row in rows):
        raise Violation(f"rows that were written are gone: {sorted(lost)}")


def _go_on_study(folder: Path) -> None:
    asked = _study_of(folder)
    outcome = runner.run_study(asked, folder / "r", lambda count: workers.Here())
    rows = results.read_rows(folder / "r")
    left = [str(p) for p in (folder / "r").rglob("*.part")]
    if outcome.failed or {row["cell"] for row in rows} != {cell.name for cell in asked.cells()} or left:
        raise Violation(f"run again after the crash: {outcome.failed} failed, {len(rows)} rows, {left} are left")


STUDY = Writer("study", _prepare_study, _write_study, _check_study, _go_on_study)


# ---- reports, exports, times -----------------------------------------------------------------------------


def _report(folder: Path, i: int) -> None:
    rows = folder.parent / f"rows-{i}"
    if not rows.exists():
        made_rows.write(rows, [made_rows.row(top1=80.0 + i)])
    write_report(rows, folder / "report.html", title=f"version {i}")


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise RankwiseError(str(err)) from err


REPORT = versions("report", _report, lambda folder: _read_bytes(folder / "report.html"), 2)
SINGLE = versions(
    "report of one compression",
    lambda folder, i: write_single(folder / "report.html", {"plan": compressed(i)[1].to_json()}),
    lambda folder: _read_bytes(folder / "report.html"),
    2,
)


@cache
def _panels(i: int) -> Any:
    return curves.panels([made_rows.row(top1=80.0 + i, retrained={"top1": 85.0 + i, "n": 3})])


def _figures(folder: Path, i: int) -> dict[str, bytes]:
    labels = {line.label: 0 for panel in _panels(i) for stage in panel.stages for line in stage.lines}
    return {path.name: path.read_bytes() for path in charts.write_figures(folder / "new" / "png", _panels(i), labels)}


def figures() -> Writer:
    """Each is whole, old or new; which of them are new is not said."""
    known: dict[int, dict[str, bytes]] = {}

    def prepare(folder: Path) -> None:
        known.update({i: _figures(folder.parent / "made", i) for i in (1, 2)})
        assert len(known[1]) > 1, "there are several, or the test could not fail"

    def write(folder: Path, note: Recorder) -> None:
        for i in (1, 2):
            _figures(folder, i)
            note.mark(i)

    def check(folder: Path, state: State) -> None:
        done = max(state.marks, default=0)
        for name in known[1]:
            path = folder / "new" / "png" / name
            content = path.read_bytes() if path.exists() else None
            allowed = [known[i][name] for i in (done, done + 1) if i in known] + ([] if done else [None])
            if content not in allowed:
                raise Violation(f"{name} is neither old nor new after {done}")

    return Writer("report, figures", prepare, write, check)


FIGURES = figures()


def _export(to: str) -> Callable[[Path, int], None]:
    def write(folder: Path, i: int) -> None:
        export(small_net(i), torch.zeros(2, 12), folder / TARGETS[to], to)

    return write


def _read_export(to: str) -> Callable[[Path], object]:
    """Loading a program takes long, so bytes that were loaded once are remembered."""
    loaded: dict[bytes, object] = {}

    def read(folder: Path) -> object:
        content = _read_bytes(folder / TARGETS[to])
        if content not in loaded:
            outputs = open_exported(folder / TARGETS[to], to)((torch.ones(2, 12),), {})
            loaded[content] = [t.tolist() for t in outputs]
        return loaded[content]

    return read


EXPORTED = versions("export, torch", _export("exported"), _read_export("exported"), 2)
ONNX = versions("export, ONNX", _export("onnx"), _read_export("onnx"), 2)


def _times(folder: Path, i: int) -> None:
    made = Store(folder / "times.json")
    made.known[f"network {i}"] = {
        "whole": 1.0 + i,
        "layout": None,
        "beside": 1.0,
        "layers": {"a": 1.0},
        "forms": {"a": {"pair/f│chw/1/0": [[1, 0.5]]}},
        "conditions": {"cores": 2, "spread": 0.1, "busy": False},
    }
    made.save()


def _read_times(folder: Path) -> object:
    known = Store(folder / "times.json").known
    if not known:
        raise RankwiseError("nothing is known")
    return max(known)


TIMES = versions("measured times", _times, _read_times)


# ---- the demo --------------------------------------------------------------------------------------------


def _write_demo(folder: Path, note: Recorder) -> None:
    """One method, one keep, one epoch: what is written is the same as in the long one."""
    short = {"METHODS": ("svd",), "KEEPS": (0.5,), "RETRAINED": (), "REPEATS": 1, "EPOCHS": 1, "SHOWN": ("svd", 0.5)}
    before = {name: getattr(demo, name) for name in short}
    try:
        for name, value in short.items():
            setattr(demo, name, value)
        demo.run_demo(folder / "d")
    finally:
        for name, value in before.items():
            setattr(demo, name, value)
    note.mark("done")


_loaded = once(lambda folder: rw.load(folder, networks.build("digits-cnn")) and None)


def _check_demo(folder: Path, state: State) -> None:
    out = folder / "d"
    try:
        rows = results.read_rows(out) if (out / "rows").is_dir() else []
        for row in rows:
            rw.Plan.load(out / row["plan"])
            results.files.parse((out / row["spectra"]).read_bytes(), "spectra")
            networks.load_weights_(networks.build("digits-cnn"), out / row["weights"])
            _loaded(out / "compressed")
    except (RankwiseError, OSError) as err:
        raise Violation(f"{type(err).__name__}: {err}") from err
    if "done" in state.marks and not (rows and (out / "report.html").read_bytes().rstrip().endswith(b"</html>")):
        raise Violation("the demo was over, and its row or its report is gone")


DEMO = Writer("demo", lambda folder: None, _write_demo, _check_demo)

QUICK = (PLAN, TABLE, NETWORK, NEW_NETWORK, OVER_TRAINED, STATE, ROW, STORE, REPORT, SINGLE, FIGURES, TIMES)
SLOW = (TRAIN, RETRAIN, ITERATE, STUDY, DEMO, LANGUAGE, EXPORTED, ONNX)
WRITERS = QUICK + SLOW
