"""The house: a package imports those above it in ORDER, never one below or beside it; planning knows no torch.nn."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import rankwise

SOURCE = Path(rankwise.__file__).parent
# Packages and single modules, from the ground up. What stands on one line does not import each other.
ORDER = [
    "errors version torchvision_import",
    "core",
    "decompositions",
    "planning",
    "surgery data",
    "hf",
    "calibration timing",
    "pruning",
    "methods",
    "compression",
    "models",
    "training",
    "reports",
    "studies",
    "deploy",
    "api",
    "networks",
    "cli",
    "__init__ __main__",
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names.split()}
FILES = sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    """The package of a file, or the name of a module that stands alone."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def test_every_room_is_in_the_order() -> None:
    assert {room(path) for path in FILES} == set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    mine = room(path)
    used = {name.split(".")[1] for name in imports(path) if name.startswith("rankwise.")} & set(LEVEL)
    wrong = {other for other in used - {mine} if LEVEL[other] >= LEVEL[mine]}
    assert not wrong, f"{path.name} imports {sorted(wrong)}, which stand above or beside {mine}"


@pytest.mark.parametrize("package", ["core", "decompositions", "planning"])
def test_planning_knows_no_modules(package: str) -> None:
    for path in (SOURCE / package).glob("*.py"):
        assert not [name for name in imports(path) if name.startswith("torch.nn")], path


def test_core_import_needs_little(tmp_path: Path) -> None:
    """`import rankwise` must not pull in any package of an extra."""
    import subprocess
    import sys

    extras = "torchvision timm datasets sklearn transformers plotly PIL pandas scipy onnx ray accelerate torch_pruning"
    extras += " matplotlib"
    code = f"import rankwise, sys; print([m for m in '{extras}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_only_weights_only_pickle() -> None:
    """No pickle but torch.load(weights_only=True), no eval or exec of text."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in ("eval", "exec", "pickle.load", "pickle.loads", "torch.save"), path.name
                if name == "torch.load":
                    assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)


def test_hooks_are_hung_in_one_place() -> None:
    """Everybody else says what to look at: surgery/hooks.py hangs hooks and takes them down, forward.py stops early.

    Passes of lockstep.py wait for each other in threads, and are ended by an exception, too.
    """
    hangs, takes_down, stops = set(), set(), set()
    for path in FILES:
        name = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.fullmatch(r"register_\w*hook", node.attr):
                hangs.add(name)
            if isinstance(node, ast.Attribute) and re.fullmatch(r"_\w*forward_(pre_)?hooks\w*", node.attr):
                hangs.add(name)
            if isinstance(node, ast.Call) and ast.unparse(node).endswith(".remove()"):
                takes_down.add(name)
            if isinstance(node, ast.ClassDef) and "BaseException" in map(ast.unparse, node.bases):
                stops.add(name)
    assert hangs == {"surgery/hooks.py"}
    assert not takes_down
    assert stops == {"surgery/forward.py", "calibration/lockstep.py"}


WRITES = re.compile(r"(?:.*\.)?(?:write_text|write_bytes|save_file|save_pretrained|copyfile|copytree|tofile)")


def test_files_are_written_in_one_place() -> None:
    """What core/disk.py writes is flushed, and gets its name when it is whole; others hand it their bytes."""
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            modes = [ast.unparse(mode) for mode in [*node.args, *(k.value for k in node.keywords if k.arg == "mode")]]
            opens = name.split(".")[-1] == "open" and any(
                re.fullmatch(r"'[rbt]*[wax+][wax+bt]*'", mode) for mode in modes
            )
            moves = name in ("os.write", "os.replace", "os.rename", "os.truncate", "shutil.move", "os.fdopen")
            if opens or moves or WRITES.fullmatch(name):
                found.add((str(path.relative_to(SOURCE)), name))
    assert {path for path, _ in found} == {"core/disk.py"}, found


# ---- names -----------------------------------------------------------------------------------------------

MOST = 7  # parameters of a function, self not counted


def commands() -> set[tuple[str, str]]:
    """File and name of every function behind a command: its parameters are the flags."""
    from rankwise.cli.app import app

    found = [inspect.unwrap(info.callback) for info in app.registered_commands if info.callback is not None]
    return {(str(Path(inspect.getfile(f)).relative_to(SOURCE)), f.__name__) for f in found}


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [one.arg for one in every if one is not None and one.arg not in ("self", "cls")]


def test_no_function_takes_many_parameters() -> None:
    """Things that travel together are one value; only the flags of a command may be many."""
    long = {
        (str(path.relative_to(SOURCE)), node.name)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(parameters(node)) > MOST
    }
    assert long <= commands(), sorted(long - commands())


def test_keywords_are_typed_one_by_one() -> None:
    """Every setting of a method is a keyword that an editor can complete, and every keyword is a setting."""
    from rankwise.api import BenchOptions
    from rankwise.compression import Request
    from rankwise.compression.request import CompressOptions
    from rankwise.deploy.bench import BenchJob
    from rankwise.methods import SettingChanges
    from rankwise.planning.planner import Settings
    from rankwise.pruning.filters import Filters

    settings = {*Settings.__dataclass_fields__, *Filters.__dataclass_fields__, "groups"}
    assert settings == set(SettingChanges.__annotations__)
    assert {*BenchOptions.__annotations__, "folder"} == set(BenchJob.__dataclass_fields__)
    job = set(CompressOptions.__annotations__) - settings
    assert job <= {*Request.__dataclass_fields__, "latency", "data", "progress"}
    typed = (rankwise.compress, rankwise.allocate, rankwise.build_table, rankwise.measure_times)
    for function in (*typed, rankwise.bench, rankwise.retrain, rankwise.smallest, rankwise.forecast):
        rest = [p for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD]
        assert [str(p.annotation).startswith("Unpack[") for p in rest] == [True], function


def test_the_name_of_a_class_says_which() -> None:
    """One class for a name in the whole house, whether it is private or not."""
    where: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name.strip("_"), []).append(str(path.relative_to(SOURCE)))
    assert not {name: files for name, files in where.items() if len(files) > 1}


def bound(path: Path) -> dict[str, str]:
    """Names that a file defines at its top, with what each of them is."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = f"defined in {path.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            found |= dict.fromkeys(names, f"assigned in {path.name}")
    return found


@pytest.mark.parametrize("package", sorted({path.parent for path in FILES}), ids=lambda p: p.name)
def test_no_name_hides_a_module(package: Path) -> None:
    """`rankwise.x.y` is the module y of the package x, whatever was imported before."""
    name = ".".join(("rankwise", *package.relative_to(SOURCE).parts))
    modules = {p.stem for p in package.glob("*.py")} | {p.parent.name for p in package.glob("*/__init__.py")}
    hidden = {n: what for n, what in bound(package / "__init__.py").items() if n in modules and what != f"{name}.{n}"}
    assert not hidden
