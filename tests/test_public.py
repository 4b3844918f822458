"""What others rely on: the public names, and the README's own example."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import rankwise as rw

ROOT = Path(__file__).resolve().parents[1]


def test_all_is_complete() -> None:
    """Every public class, function and constant in the namespace is in __all__, and the other way round."""
    every = {name: getattr(rw, name) for name in dir(rw) if not name.startswith("_")}
    modules = {name for name, value in every.items() if inspect.ismodule(value)}
    public = set(every) - modules - {"Any", "TYPE_CHECKING", "import_module"} | {"networks"}
    assert public | {"__version__"} == set(rw.__all__)
    assert len(rw.__all__) == len(set(rw.__all__))


def test_the_contract_is_there() -> None:
    contract = (
        "compress find_layers build_table Table allocate Budget apply_plan apply_plan_ densify save load METHODS "
        "RankwiseError Plan smallest evaluate retrain export bench forecast"
    )
    assert set(contract.split()) <= set(rw.__all__)
    assert {"alds", "alds+", "alds-error", "alds-simple", "svd-error", "svd", "svd-energy", "auto"} <= set(rw.METHODS)


@pytest.mark.parametrize("name", [n for n in rw.__all__ if inspect.isclass(getattr(rw, n)) or callable(getattr(rw, n))])
def test_public_things_are_explained(name: str) -> None:
    assert (inspect.getdoc(getattr(rw, name)) or "").strip()


@pytest.mark.parametrize("name", [n for n in rw.__all__ if inspect.isfunction(getattr(rw, n))])
def test_functions_say_what_they_take_and_give_with_an_example(name: str) -> None:
    """tests/test_docs.py runs the examples."""
    said = inspect.getdoc(getattr(rw, name)) or ""
    assert "Args:" in said
    assert "Returns:" in said
    assert ">>>" in said
    for parameter in inspect.signature(getattr(rw, name)).parameters:
        assert parameter in said, parameter


def test_a_plan_is_readable() -> None:
    """Its repr is a line, its summary fits 80 columns and names every layer that changes."""
    model = rw.networks.build("resnet20")
    for method in ("svd", "alds+", "ft"):
        _, plan = rw.compress(model, torch.zeros(1, 3, 32, 32), method, keep=0.7, name="resnet20")
        assert repr(plan).startswith(f"<Plan of resnet20 by {method} for params 0.7: ")
        assert "\n" not in repr(plan)
        text = plan.summary()
        rows = [line for line in text.splitlines() if not line.startswith(("whole,", "warning:"))]
        assert max(map(len, rows)) <= 80
        assert all(any(row.startswith(f"{c.name} ") for row in rows) for c in (*plan.choices, *plan.pruned))
        assert f"keep {plan.keep():.4f}" in text


def test_readme_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Python block of the README, as it stands there."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert blocks
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    exec(compile(blocks[0], "README.md", "exec"), space)
    small, plan = space["small"], space["plan"]
    assert isinstance(small, torch.nn.Module)
    assert isinstance(plan, rw.Plan)
    assert sum(p.numel() for p in small.parameters()) == plan.after.params <= 0.4 * plan.before.params
    assert (tmp_path / "out" / "plan.json").is_file()


def test_a_compressed_network_exports() -> None:
    """Plain modules: torch.export takes them, the grouped linear layer included."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 32)).eval()
    x = torch.randn(2, 4, 8, 8)
    small, plan = rw.compress(model, x, method="alds-error", groups=4, keep=0.6)
    assert any(isinstance(m, rw.GroupedLinear) for m in small.modules())
    assert plan.choices
    program = torch.export.export(small, (x,))
    torch.testing.assert_close(program.module()(x), small(x))
