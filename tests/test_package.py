"""What an index would serve: source archive and wheel, built and installed without a download."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import rankwise

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, from a copy of the tree: a build leaves files behind."""
    pytest.importorskip("build")
    place = tmp_path_factory.mktemp("package")
    place.joinpath("tree").mkdir()
    for name in ("src", "tests", "docs", "examples", "studies"):
        shutil.copytree(ROOT / name, place / "tree" / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, place / "tree")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place / "dist"), str(place / "tree")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return place / "dist"


def test_the_wheel_has_its_data_licence_and_metadata(built: Path) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        info = f"rankwise-{rankwise.__version__}.dist-info"
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    source = ROOT / "src"
    wanted = {p.relative_to(source).as_posix() for p in (source / "rankwise").rglob("*") if p.is_file()}
    assert {name for name in wanted if "__pycache__" not in name} <= names
    assert f"{info}/licenses/LICENSE" in names
    assert not [name for name in names if name.startswith(("tests", "examples", "docs"))]
    assert metadata["Version"] == rankwise.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "report" in metadata.get_all("Provides-Extra", [])
    assert "rankwise takes a trained PyTorch network" in str(metadata.get_payload())


def test_the_source_archive_can_be_built_and_tested_from(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = (
        "LICENSE README.md CHANGELOG.md CITATION.cff SECURITY.md pyproject.toml constraints.txt mkdocs.yml Makefile"
    )
    more = (
        "docs/index.md",
        "docs/site/hooks.py",
        "examples/new_user.sh",
        "studies/smoke.toml",
        "tests/test_package.py",
    )
    assert {*wanted.split(), *more} <= names


def test_the_wheel_works_where_it_is_installed(built: Path, tmp_path: Path) -> None:
    """Installed into an empty folder, with nothing of this tree on the path."""
    (wheel,) = built.glob("*.whl")
    place = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(place)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    code = (
        "import rankwise as rw; from rankwise.reports import assemble, published;"
        "print(rw.__file__, rw.__version__, len(published.load()), len(assemble.make_page("
        "{'title': 't'}, 'single.html', ('base.js', 'single.js'), '')))"
    )
    environment = {**os.environ, "PYTHONPATH": str(place)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file, version, tables, size = done.stdout.split()
    assert Path(file).is_relative_to(place)
    assert version == rankwise.__version__
    assert int(tables) > 5
    assert int(size) > 10_000
    script = place / "bin" / "rankwise"
    shown = subprocess.run([sys.executable, script, "--version"], env=environment, capture_output=True, text=True)
    assert rankwise.__version__ in shown.stdout
