"""Call what makes a network, be it ours, a library's or a function in the user's own file."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from torch import nn

from rankwise.errors import RankwiseError
from rankwise.models.spec import Spec, near


def call(make: Callable[..., Any], spec: Spec) -> nn.Module:
    """`make(**spec.options)`, and one sentence for whatever goes wrong in it."""
    try:
        model = make(**spec.options)
    except RankwiseError:
        raise
    except Exception as err:  # foreign code may raise anything
        raise _failed(spec, err) from err
    if not isinstance(model, nn.Module):
        raise RankwiseError(f"{spec.text!r} returned a {type(model).__name__}: it has to return a torch.nn.Module")
    return model


def call_from_file(spec: Spec) -> nn.Module:
    """Run `file.py` and return what its function `factory` returns."""
    file, _, name = spec.name.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise RankwiseError(f"{spec.text!r} names no function: give file.py:factory")
    path = Path(file).resolve()
    if not os.path.isfile(path):
        raise RankwiseError(f"there is no file {file}: give an existing one as file.py:factory")
    with _importable(path.parent):
        module = _import_file(path, spec)
        factory = getattr(module, name, None)
        if not callable(factory):
            raise RankwiseError(f"{file} has no function {name!r}: {near(name, _functions(module))}")
        return call(factory, spec)


def load_function(text: str) -> Callable[..., Any]:
    """The function that FILE.py:NAME names; the file is run."""
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise RankwiseError(f"{text!r} names no function: give FILE.py:FUNCTION")
    path = Path(file).resolve()
    if not os.path.isfile(path):
        raise RankwiseError(f"there is no file {file}: give an existing one as FILE.py:FUNCTION")
    with _importable(path.parent):
        module = _import_file(path, Spec(text, "file", text, {}))
    function = getattr(module, name, None)
    if not callable(function):
        raise RankwiseError(f"{file} has no function {name!r}: {near(name, _functions(module))}")

    def called(*args: Any) -> Any:
        with _importable(path.parent):  # it may import its neighbours where it is called
            return function(*args)

    return called


def _functions(module: ModuleType) -> list[str]:
    own = module.__name__
    return [name for name, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == own]


def _import_file(path: Path, spec: Spec) -> ModuleType:
    # A name of its own, so that a user's data.py neither hides nor is hidden by any other module.
    private = f"_rankwise_{path.stem}_{sha256(str(path).encode()).hexdigest()[:12]}"
    found = spec_from_file_location(private, path)
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    sys.modules[private] = module  # dataclasses and pickle look a class's module up there
    try:
        found.loader.exec_module(module)
    except Exception as err:
        del sys.modules[private]
        raise _failed(spec, err) from err
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let a factory's file import its neighbours, after everything that is installed."""
    sys.path.append(str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _failed(spec: Spec, err: Exception) -> RankwiseError:
    """One sentence for an exception in foreign code, with the line of the user's file where it arose."""
    file = spec.name.rpartition(":")[0]
    frames = extract_tb(err.__traceback__)
    lines = [f.lineno for f in frames if file and f.filename == str(Path(file).resolve())]
    where = f" in line {lines[-1]}" if lines else ""
    message = str(err).strip().split("\n")[0]
    return RankwiseError(f"{spec.text!r} could not be built: {type(err).__name__}{where}: {message}")
