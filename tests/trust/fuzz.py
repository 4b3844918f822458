"""Files that a stranger may give us, as functions from bytes: each refuses with one sentence or reads a sound value.

    python tests/trust/fuzz.py NAME --runs 1000000 [--seed 0]

A tenth of the inputs follow the coverage of our readers (atheris) and leave a corpus of what reached something new.
The others are mutations of that corpus, in a process without the cost of looking. Without atheris they are mutations of
the seeds alone. Half of the mutations know the structure (`mutations.py`), so that they get past the parsers.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from trust.mutations import (
    Mutate,
    mutate_bytes,
    mutate_json,
    mutate_safetensors,
    mutate_toml,
)

CORPUS = Path(__file__).parent / "corpus"
LARGEST = 4096  # bytes of an input
SLOW = 5.0  # seconds of the processor; no input of this size may take as long
MUCH = 500  # MB; all inputs of this size together may not take as much more memory
COVERED = 0.1  # of the inputs follow the coverage
SCRATCH = "RANKWISE_FUZZ_SCRATCH"


@dataclass(frozen=True)
class Target:
    """`run` raises nothing for any input. `structured` is a mutation that keeps the form of the file."""

    name: str
    run: Callable[[bytes], None]
    structured: Mutate


class Executed(BaseException):
    """An input made us run, load or connect to something."""


FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
)
FORBIDDEN += ("exec", "compile", "import", "ctypes.dlopen")
_watching = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event in FORBIDDEN:
        raise Executed(f"{event} {arguments!r:.200}")
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        raise Executed(f"open for writing: {arguments[0]!r:.200}")


@cache
def watch_for_executions() -> None:
    sys.addaudithook(_audit)


def in_memory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None, prefix="rankwise-fuzz-")


@cache
def scratch() -> Path:
    """For files of inputs. A process that atheris ends tidies nothing up, so its parent gives it a place."""
    if SCRATCH in os.environ:
        return Path(os.environ[SCRATCH])
    _holders.append(in_memory())
    return Path(_holders[-1].name)


_holders: list[Any] = []


@cache
def opened(name: str) -> tuple[Path, int]:
    path = scratch() / name
    return path, os.open(path, os.O_RDWR | os.O_CREAT)


def put(name: str, data: bytes) -> Path:
    """The input as a file in memory, always the same one."""
    path, file = opened(name)
    os.ftruncate(file, len(data))
    os.pwrite(file, data, 0)
    return path


# ---- targets ---------------------------------------------------------------------------------------------


def plan(data: bytes) -> None:
    from rankwise.planning.plan import Plan

    made = Plan.loads(data)
    made.keep()
    if len(data) % 4 == 0:  # writing takes longer than reading
        assert Plan.loads(made.dumps()) == made, "what is read is written back"


def replay(data: bytes) -> None:
    """A plan that somebody made up, put into a network."""
    from rankwise.planning.plan import Plan
    from rankwise.surgery.fuse import fuse_norms_
    from rankwise.surgery.replace import match_layers, replace_layers_

    made = Plan.loads(data)
    layers = match_layers(small_network(), made, coverage_of_network())
    if len(data) % 16 == 0:  # making modules takes longer than reading
        network = copy.deepcopy(small_network())
        replace_layers_(network, made, fill=False, layers=None if len(data) % 64 == 0 else layers)
        fuse_norms_(network, made.fused, fill=False)
        made.summary()


@cache
def small_network() -> Any:
    from torch import nn

    layers = [nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10)).eval()


@cache
def coverage_of_network() -> Any:
    from rankwise.surgery.coverage import find_layers

    return find_layers(small_network())


def table_file(data: bytes) -> None:
    from rankwise.planning import table_file as reader

    reader.read(put("t.table", data))


def table_header(data: bytes) -> None:
    """A header whose checksum fits: made by somebody who knows how."""
    from rankwise.core import files
    from rankwise.planning import table_file as reader

    header = files.parse(data, "header")
    header["checksum"] = reader._checksum(header, tensors_of_table())
    reader.read_header(header, tensors_of_table(), "the table")


@cache
def tensors_of_table() -> dict[str, Any]:
    from safetensors.numpy import load

    return dict(load((CORPUS / "table-file" / "real.bin").read_bytes()))


def weights(data: bytes) -> None:
    from rankwise.models import networks
    from rankwise.surgery import checkpoint

    path = put("model.safetensors", data)
    refused(lambda: networks._trained_network(path))
    tensors, header = checkpoint.read_tensors(path)
    checkpoint._load_state_(pair(), tensors, header, path)


@cache
def pair() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def network_weights(data: bytes) -> None:
    from rankwise.models.weights import load_weights_

    load_weights_(pair(), put("w.safetensors", data))


def config(data: bytes) -> None:
    """The plan in config.json of a folder for transformers."""
    from rankwise.surgery.pretrained_folder import plan_in

    plan_in(put("config.json", data).parent)


def index(data: bytes) -> None:
    from rankwise.core.shards import read_index

    for name in read_index(data, "the index"):
        assert (scratch() / name).parent == scratch(), f"{name!r} leads elsewhere"
        assert os.path.basename(name) == name, f"{name!r} leads elsewhere"


def sharded(data: bytes) -> None:
    """An index whose files are there."""
    from rankwise.models.weights import load_weights_

    shard()
    load_weights_(pair(), put("m.safetensors.index.json", data))


@cache
def shard() -> Path:
    """The file that indexes of weights name; nobody writes to it."""
    return put("a.safetensors", corpus_of("network-weights")[1])


SHELF = {"a.weight": (2, 3), "a.bias": (2,)}  # shapes of a pair, and of what blocks get


def block_shelf(data: bytes) -> None:
    """What is put aside block by block: what blocks get, pairs, and factors."""
    from rankwise.calibration.block_fit import factors_for

    put("factors-a.safetensors", data)
    shelf, pair, layer = shelf_of_inputs()
    refused(lambda: shelf.get_list("factors-a", [(2, 3), (1, 3)], gaps=True))
    refused(lambda: shelf.get("factors-a", SHELF))
    factors_for(shelf, pair, layer, 2)


@cache
def shelf_of_inputs() -> tuple[Any, Any, Any]:
    from torch import nn

    from rankwise.calibration.shelf import Shelf
    from rankwise.core.option import Option
    from rankwise.surgery.coverage import find_layers
    from rankwise.surgery.pairs import build_pair

    network = nn.Sequential(OrderedDict(a=nn.Linear(5, 4)))
    (layer,) = find_layers(network).layers
    return Shelf(scratch()), build_pair(layer, Option("f│c", 1), 2, network.a), layer


def mapped_weights(data: bytes) -> None:
    """Weights of a folder for transformers that stay in their file."""
    from rankwise.models import mapped

    mapped._fill_(mapped_network(), mapped._tensors(put("model.safetensors", data).parent))


@cache
def mapped_network() -> Any:
    return copy.deepcopy(pair())


def training_state(data: bytes) -> None:
    from rankwise.training import resume

    state = resume.loads(data, "the state")
    refused(lambda: resume.check_progress(state, 0, 3, True, "the state"))
    refused(lambda: resume.plan_of(state, "the state"))
    refused(lambda: resume.rate_of(state, "the state"))
    resume.check_job(state, {"kind": "train"}, "the state")


def study(data: bytes) -> None:
    from rankwise.studies.study_file import parse_study

    parse_study(data, "s", "s.toml")


def row(data: bytes) -> None:
    from rankwise.reports import curves
    from rankwise.reports.tables import tables
    from rankwise.training import results

    found = results.parse_row(data, "row.json")
    if found is not None:
        curves.panels([found])
        tables([found], (1.0,), False)


def spectra(data: bytes) -> None:
    """What a report draws of a network's layers."""
    from rankwise.core import files
    from rankwise.reports.embedded import thin

    thin(files.parse(data, "the spectra"), "the spectra")


def published(data: bytes) -> None:
    from rankwise.reports import published as tables

    tables.points_of([tables.read_table(data, "the table")])


def measured_times(data: bytes) -> None:
    from rankwise.timing.cache import Store

    for value in Store(put("times.json", data)).known.values():
        from rankwise.timing import cost_model

        cost_model._samples(value["forms"])


def refused(call: Callable[[], Any]) -> None:
    from rankwise.errors import RankwiseError

    try:
        call()
    except RankwiseError as err:
        check_sentence(err)


def check_sentence(err: Exception) -> None:
    text = str(err)
    assert text.strip(), "a refusal says something"
    assert len(text) < 3 * LARGEST, f"a sentence of {len(text)} characters"


TARGETS = {
    target.name: target
    for target in (
        Target("plan", plan, mutate_json),
        Target("plan-replayed", replay, mutate_json),
        Target("table-file", table_file, mutate_safetensors),
        Target("table-header", table_header, mutate_json),
        Target("weights", weights, mutate_safetensors),
        Target("network-weights", network_weights, mutate_safetensors),
        Target("config", config, mutate_json),
        Target("sharded-index", index, mutate_json),
        Target("sharded-weights", sharded, mutate_json),
        Target("block-shelf", block_shelf, mutate_safetensors),
        Target("mapped-weights", mapped_weights, mutate_safetensors),
        Target("training-state", training_state, mutate_safetensors),
        Target("study", study, mutate_toml),
        Target("row", row, mutate_json),
        Target("spectra", spectra, mutate_json),
        Target("published", published, mutate_json),
        Target("measured-times", measured_times, mutate_json),
    )
}


def corpus(name: str) -> list[bytes]:
    found = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    assert found, f"there is no corpus for {name}"
    return found


def try_one(target: Target, data: bytes) -> None:
    """One input: a value, or one sentence; everything else is raised."""
    global _watching
    _watching = True
    start = time.process_time()
    try:
        refused(lambda: target.run(data))
    finally:
        _watching = False
    assert time.process_time() - start < SLOW, "an input that takes too long"


def warm(target: Target) -> None:
    """Imports happen before anybody watches: json looks for the encoding of bytes, too."""
    for encoding in ("utf-8-sig", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "utf-16", "utf-32"):
        "a".encode(encoding).decode(encoding)
    draw = random.Random(0)
    for data in [*corpus(target.name), *(mutated(target, draw) for _ in range(300))]:
        with suppress(Exception):  # it comes again, watched
            target.run(data)
    watch_for_executions()
    gc.collect()
    gc.freeze()  # what was imported is never garbage, and need not be looked at again and again
    gc.set_threshold(20_000)


def mutated(target: Target, draw: random.Random, data: bytes | None = None) -> bytes:
    data = draw.choice(corpus_of(target.name)) if data is None else data
    return (target.structured if draw.random() < 0.5 else mutate_bytes)(draw, data)


@cache
def corpus_of(name: str) -> tuple[bytes, ...]:
    return tuple(corpus(name))


@dataclass
class Tried:
    inputs: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


def tell(target: Target, data: bytes, err: BaseException) -> str:
    import traceback

    last = traceback.extract_tb(err.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return f"{target.name}: {type(err).__name__}: {err!s:.200} ({where}) for {data[:400]!r}"


def mutations(
    target: Target, runs: int, seed: int = 0, seconds: float = 1e9, seeds: tuple[bytes, ...] | None = None
) -> Tried:
    """Mutations of the seeds, one in four of them mutated again."""
    found, draw, start = Tried(), random.Random(f"{target.name} {seed}"), time.perf_counter()
    warm(target)
    known, before = seeds or corpus_of(target.name), megabytes()
    while found.inputs < runs and time.perf_counter() - start < seconds:
        data = mutated(target, draw, draw.choice(known))
        if draw.random() < 0.25:
            data = mutate_bytes(draw, data)
        found.inputs += 1
        try:
            try_one(target, data)
        except (Exception, Executed) as err:
            found.violations.append(tell(target, data, err))
            if len(found.violations) >= 20:
                break
    if megabytes() - before > MUCH:
        found.violations.append(f"{target.name}: some input took {megabytes() - before:.0f} MB")
    found.seconds = time.perf_counter() - start
    return found


def megabytes() -> float:
    """The most that this process has ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def covered(target: Target, runs: int, seed: int, folder: Path) -> None:
    """With atheris, in a process of its own, which it ends. What reached something new is in `folder` afterwards."""
    import atheris

    with atheris.instrument_imports(include=["rankwise"]):
        import rankwise.models.networks
        import rankwise.reports.curves
        import rankwise.reports.published
        import rankwise.studies.study_file
        import rankwise.timing.cost_model  # noqa: F401
    warm(target)
    draw = random.Random()

    def one(data: bytes) -> None:
        try:
            try_one(target, data)
        except (Exception, Executed) as err:
            print("VIOLATION", tell(target, data, err), flush=True)
            raise

    def mutate(data: bytes, largest: int, number: int) -> bytes:
        draw.seed(number)
        if draw.random() < 0.5:
            return bytes(atheris.Mutate(data, largest))
        return target.structured(draw, data)[:largest]

    for i, data in enumerate(corpus(target.name)):
        (folder / f"seed-{i}").write_bytes(data)
    limits = [f"-runs={runs}", f"-seed={seed + 1}", f"-max_len={LARGEST}", "-rss_limit_mb=4096", "-timeout=60"]
    limits += [
        "-mutate_depth=1",
        "-reload=0",
        "-verbosity=0",
        "-print_final_stats=1",
        f"-artifact_prefix={folder}/bad-",
    ]
    atheris.Setup([sys.argv[0], *limits, str(folder)], one, custom_mutator=mutate)
    atheris.Fuzz()


def explored(name: str, runs: int, seed: int, folder: Path) -> tuple[tuple[bytes, ...], list[str], int]:
    """The corpus that atheris finds, what was wrong, and how many inputs it tried; only the seeds without atheris."""
    try:
        import atheris  # noqa: F401
    except ImportError:
        return corpus_of(name), [], 0
    command = [sys.executable, __file__, name, "--runs", str(runs), "--seed", str(seed), "--covered", str(folder)]
    with in_memory() as place:
        environment = {**os.environ, SCRATCH: place}
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=folder, env=environment)
    said = done.stdout + done.stderr
    wrong = [line for line in said.splitlines() if line.startswith("VIOLATION") or "ERROR: libFuzzer" in line]
    units = [line.split()[-1] for line in said.splitlines() if "number_of_executed_units" in line]
    if not units:
        wrong.append(f"atheris ended with status {done.returncode}: {said[-500:]}")
    found = tuple(path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith("bad-"))
    return found, wrong, int(units[0]) if units else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TARGETS)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--plain", action="store_true", help="without atheris")
    parser.add_argument("--covered", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    target = TARGETS[given.name]
    if given.covered:
        covered(target, given.runs, given.seed, given.covered)
        return
    seeds, wrong, tried = corpus_of(given.name), list[str](), 0
    with tempfile.TemporaryDirectory() as work:
        if not given.plain:
            seeds, wrong, tried = explored(given.name, int(COVERED * given.runs), given.seed, Path(work))
    found = mutations(target, given.runs - tried, given.seed, given.seconds, seeds)
    for text in wrong + [f"VIOLATION {text}" for text in found.violations]:
        print(text)
    print(f"SEEDS {len(seeds)}, COVERED {tried}")
    print(f"TRIED {tried + found.inputs} {found.seconds:.1f}")
    sys.exit(1 if wrong or found.violations else 0)


if __name__ == "__main__":
    main()
