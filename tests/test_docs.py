"""Documents: links lead somewhere, docstring examples are true, and no page speaks of a machine."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import rankwise

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
MODULES = [m.name for m in pkgutil.walk_packages(rankwise.__path__, "rankwise.") if not m.name.endswith("__main__")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_changelog_knows_this_version() -> None:
    assert f"## {rankwise.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_architecture_names_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = [m.name for m in pkgutil.iter_modules(rankwise.__path__) if m.ispkg]
    assert packages
    assert not [name for name in packages if f"`{name}/`" not in text]
