"""The house: a file imports its own floor or a lower one, and the two lowest floors know no torch.nn."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rankwise

SOURCE = Path(rankwise.__file__).parent
FLOORS = [
    "errors version jsonio fold layer cost decompose measure moments pca tucker vbmf clusters response whiten cored",
    "times table table_file plan budget menu allocate knapsack unbudgeted search",
    "modules pairs narrow forward coverage surgery fuse layout checkpoint graph trials channels",
    "images sources data probe sensitivity pruning influence effects refit mimic recover dream latency times_file "
    "stopwatch multiple settle merge methods job",
    "zoo spec factory weights vision networks evaluate forecast smallest augment feed recipes engine state teach train "
    "lc material",
    "results pipeline curves embed store study study_file reference cell cluster runner estimate published summary "
    "tabular overview",
    "charts report demo options flags show live train_cli report_cli study_cli export bench deploy_cli "
    "compress_cli cli __main__ __init__",
]
FLOOR = {name: level for level, names in enumerate(FLOORS) for name in names.split()}
FILES = sorted(SOURCE.glob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def test_every_file_has_a_floor() -> None:
    assert {path.stem for path in FILES} == set(FLOOR)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_imports_never_go_up(path: Path) -> None:
    used = {name.split(".")[1] for name in imports(path) if name.startswith("rankwise.")}
    above = {name for name in used & set(FLOOR) if FLOOR[name] > FLOOR[path.stem]}
    assert not above, f"{path.name} imports {sorted(above)} from a floor above its own"


@pytest.mark.parametrize("path", [p for p in FILES if FLOOR[p.stem] <= 1], ids=lambda p: p.stem)
def test_numerics_and_planning_know_no_modules(path: Path) -> None:
    assert not [name for name in imports(path) if name.startswith("torch.nn")]


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
