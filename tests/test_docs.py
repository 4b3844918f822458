"""Documents: the site builds, links lead somewhere, commands and examples are true, and the prose is easy to read."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import typer

import rankwise
from rankwise.cli.commands import COMMANDS, app_for

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
MODULES = [m.name for m in pkgutil.walk_packages(rankwise.__path__, "rankwise.") if not m.name.endswith("__main__")]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDEST, COLUMNS, SCREENS = 105, 8, 100
DIALECT = ("dreams", "at their word", "lie so", "so often after so many", "nobody knows", "whoever")


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return FENCE.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_site_builds_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the documentation site needs rankwise[docs]")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement
    made = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "WARNING" not in made.stderr
    check = [sys.executable, str(ROOT / "docs" / "site" / "links.py"), str(tmp_path / "site")]
    assert subprocess.run(check, capture_output=True, text=True).stdout == "every link leads somewhere\n"
    pages = {path.name for path in (tmp_path / "site").glob("*.html")}
    assert {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")} <= pages
    text = "".join(path.read_text() for path in (tmp_path / "site").glob("*.html"))
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"https?:", text), "the site needs no network"
    assert "<math" in text
    assert "arithmatex" not in text, "a formula was not translated"
    assert all(name in (tmp_path / "site" / "api.html").read_text() for name in rankwise.__all__ if name[0] != "_")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('<a href="b.html">', "leads to no file"),
        ('<a href="a.html#c">', "has a fragment that the page does not have"),
        ('<a href="#c">', "has a fragment"),
        ('<a href="../a.html">', "leads out of the site"),
        ('<a href="https://nowhere">', "no address of the web"),
        ('<a href="a.html#d"><i id="d"><a href="https://a.org/b">', ""),
    ],
)
def test_a_broken_link_is_found(tmp_path: Path, body: str, says: str) -> None:
    (tmp_path / "a.html").write_text(body)
    check = [sys.executable, str(ROOT / "docs" / "site" / "links.py"), str(tmp_path)]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == bool(says)
    assert says in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_exist(page: Path) -> None:
    """Every command in a block is one of ours with flags that it takes, and every target of make is there."""
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for language, text in blocks(page):
        if language in ("python", "toml", "math"):
            continue
        for line in text.replace("\\\n", " ").splitlines():
            words = line.split("#")[0].replace("[", " ").replace("]", " ").split()
            if words[:1] == ["make"]:
                assert words[1] in targets
            if words[:1] != ["rankwise"]:
                continue
            assert words[1] in COMMANDS, line
            command = typer.main.get_command(app_for([words[1]])).commands[words[1]]  # type: ignore[attr-defined]
            known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
            assert {word.split("=")[0] for word in words if word.startswith("--")} <= known, line


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block that imports rankwise and needs nothing of yours (written in capitals)."""
    monkeypatch.chdir(tmp_path)
    for language, text in blocks(page):
        if language == "python" and re.search(r"import .*rankwise", text) and not re.search(r"\bFOLDER\b", text):
            exec(compile(text, page.name, "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_prose_is_easy_to_read(page: Path) -> None:
    """Lines of about 100 characters, tables of at most eight columns, and the words of the field."""
    lines = FENCE.sub("", page.read_text()).splitlines()
    free = re.compile(r"\s*(\||!\[|\$\$|<)|.*\$\$$|    ")  # tables, pictures, formulas, indented blocks
    assert [line for line in lines if len(line) > WIDEST and not free.match(line)] == []
    assert [line for line in lines if line.startswith("| ") and line.replace("\\|", "").count("|") - 1 > COLUMNS] == []
    assert [word for word in DIALECT if word in "\n".join(lines).lower()] == []


@pytest.mark.parametrize("name", [name for name in rankwise.__all__ if not name.startswith("_")])
def test_docstrings_of_public_names_are_plain(name: str) -> None:
    thing = getattr(rankwise, name)
    text = (getattr(thing, "__doc__", None) or "").lower()
    assert [word for word in DIALECT if word in text] == []


def test_the_readme_fits_on_two_screens() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= SCREENS
    python = [body for language, body in blocks(ROOT / "README.md") if language == "python"]
    assert [len(body.splitlines()) for body in python] == [6]
    tables = [a for a, b in pairwise(text.splitlines()) if b.startswith("| ---")]
    assert len(tables) == 2, "one of results, one of links"
    for name, what in (("CR-P", "parameters"), ("CR-F", "multiply-adds")):
        around = re.split(r"(?<=[.;])\s", text[text.index(name) - 2 :].replace("\n", " "))[0]
        assert f"percentage of {what}" in around, f"{name} is explained where it is first used"


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_versions_agree() -> None:
    version = rankwise.__version__
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_architecture_names_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = [m.name for m in pkgutil.iter_modules(rankwise.__path__) if m.ispkg]
    assert packages
    assert not [name for name in packages if f"`{name}/`" not in text]
