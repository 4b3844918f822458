"""Study files: TOML with strict keys → `Study`. docs/studies.md explains every key."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankwise.calibration.distill import read_effort
from rankwise.core import files
from rankwise.errors import RankwiseError
from rankwise.methods import settings_for
from rankwise.models.spec import parse
from rankwise.planning.units import PARAMS, UNITS
from rankwise.studies.study import MODES, Entry, Study, StudyNetwork
from rankwise.timing.clock import read_timing
from rankwise.training.recipes import change, get_recipe

_STUDY = [
    "title",
    "paper",
    "mode",
    "unit",
    "repeats",
    "seed",
    "calibrate",
    "split",
    "timing",
    "keeps",
    "retrain",
    "methods",
    "network",
]
_NETWORK = ["model", "data", "weights", "recipe", "set", "exclude", "size", "limit", "keeps", "teacher", "cpus", "gpus"]
_KEEPS = ["alpha", "first", "last", "count"]
MOST_CELLS = 100_000
LARGEST = 1 << 22  # bytes: TOML is read slowly, a megabyte in a second
MOST_WORK = 2 * 10**7  # steps that keys such as a.b.c may take: a second or two


def read_study(path: str | Path) -> Study:
    """A study from a TOML file; its name is the file's."""
    path = Path(path)
    return parse_study(files.read(path, LARGEST), path.stem, str(path))


def parse_study(text: bytes, name: str, where: str) -> Study:
    """A study out of the content of a file."""
    try:
        _check_dots(text)
        data = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as err:  # ValueError: also a number of 5,000 digits, or half a character
        why = "it is nested too deeply" if isinstance(err, RecursionError) else str(err)
        raise RankwiseError(f"{where} is not readable TOML ({why})") from None
    return make_study(data, name, where)


def _check_dots(text: bytes) -> None:
    """A key of n parts (a.b.c) takes time as n², and every key below such a header takes time as n."""
    dots, keys = text.count(b"."), text.count(b"=")
    if dots * (dots + keys) > MOST_WORK:
        raise ValueError(f"{dots:,} dots and {keys:,} keys take too long to read: make several files of it")


def make_study(data: dict[str, Any], name: str, where: str) -> Study:
    files.strict(data, [*_STUDY, "network"], where)
    mode = files.typed(data.get("mode", "oneshot"), str, f"'mode' of {where}")
    if mode not in MODES:
        raise RankwiseError(f"{where} has the mode {mode!r}: possible are {', '.join(MODES)}")
    unit = files.typed(data.get("unit", PARAMS.name), str, f"'unit' of {where}")
    units = [PARAMS.name] if mode == "iterate" else list(UNITS)
    if unit not in units:
        known = ", ".join(units)
        raise RankwiseError(f"{where} has the unit {unit!r}: possible for {mode} are {known}")
    keeps = _keeps(data["keeps"], where) if "keeps" in data else None
    networks = files.field(data, "network", list, where)
    study = Study(
        name=name,
        title=files.typed(data.get("title", name), str, f"'title' of {where}"),
        mode=mode,
        networks=tuple(_network(files.typed(n, dict, f"every network of {where}"), keeps, where) for n in networks),
        entries=tuple(_entry(e, where) for e in files.field(data, "methods", list, where)),
        retrain=_shares(data.get("retrain", [0]), mode, where),
        paper=_words(data.get("paper", []), f"'paper' of {where}"),
        unit=unit,
        repeats=_count(data, "repeats", 1, where),
        seed=_count(data, "seed", 0, where, least=0),
        calibrate=_count(data, "calibrate", 256, where),
        split=files.typed(data.get("split", "test"), str, f"'split' of {where}"),
        timing=_timing(data.get("timing", ""), where),
    )
    _check(study, where)
    return study


def _check(study: Study, where: str) -> None:
    count = sum(len(n.keeps) for n in study.networks) * study.repeats * len(study.entries) * len(study.retrain)
    if count > MOST_CELLS:
        raise RankwiseError(f"{where} asks for {count:,} cells, and at most {MOST_CELLS:,} are run: make several of it")
    for what, found in (("network", study.networks), ("methods", study.entries)):
        if not found:
            raise RankwiseError(f"{where} has no {what}: name at least one")
    twice = [label for label, times in Counter(entry.label for entry in study.entries).items() if times > 1]
    if twice:
        raise RankwiseError(f"{where} has two methods called {twice[0]!r}: give one of them a label of its own")
    if study.mode == "iterate":
        for network in study.networks:
            if network.alpha is None:
                raise RankwiseError(f"{where} iterates, so its keeps are αⁱ: give keeps = {{alpha = 0.8, count = 5}}")
            if network.teacher:
                raise RankwiseError(f"{where} iterates with a teacher, which only oneshot and sweep have: leave it out")
    names = [cell.name for cell in study.cells()]
    if len(set(names)) < len(names):
        raise RankwiseError(f"{where} asks for the same cell twice: name every network, keep and share once")


def _network(data: dict[str, Any], keeps: tuple[tuple[float, ...], float | None] | None, where: str) -> StudyNetwork:
    files.strict(data, _NETWORK, f"a network of {where}")
    model = files.field(data, "model", str, f"a network of {where}")
    if parse(model).kind == "folder":
        raise RankwiseError(
            f"{where} has the folder {model!r} as a network: name the network itself, and the folder's "
            f"model.safetensors as its weights"
        )
    where = f"the network {model!r} of {where}"
    own = _keeps(data["keeps"], where) if "keeps" in data else keeps
    if own is None:
        raise RankwiseError(f"{where} has no keeps: give a list such as [0.8, 0.5], here or for the whole study")
    recipe = get_recipe(files.typed(data.get("recipe", "fast"), str, f"'recipe' of {where}"))
    recipe = change(recipe, files.typed(data.get("set", {}), dict, f"'set' of {where}"))
    weights = data.get("weights")
    for key in ("size", "limit"):
        _count(data, key, 1, where)
    for key in ("cpus", "gpus"):
        if not files.typed(data.get(key, 0), float, f"{key!r} of {where}") >= 0:
            raise RankwiseError(f"{key} = {data[key]} of {where}: give a number from 0 on")
    return StudyNetwork(
        model=model,
        data=files.field(data, "data", str, where),
        recipe=recipe.to_json(),
        keeps=own[0],
        weights=None if weights is None else files.typed(weights, str, f"'weights' of {where}"),
        exclude=_words(data.get("exclude", []), f"'exclude' of {where}"),
        size=data.get("size"),
        limit=data.get("limit"),
        cpus=data.get("cpus", 1),
        gpus=data.get("gpus", 0),
        alpha=own[1],
        teacher=files.typed(data.get("teacher", False), bool, f"'teacher' of {where}"),
    )


def _keeps(value: object, where: str) -> tuple[tuple[float, ...], float | None]:
    """The keeps, and α where they are αⁱ. {first, last, count} is evenly spaced on a logarithmic scale."""
    if isinstance(value, dict):
        files.strict(value, _KEEPS, f"'keeps' of {where}")
        count = _count(value, "count", 0, f"'keeps' of {where}", most=MOST_CELLS)
        if set(value) == {"alpha", "count"}:
            alpha = float(files.field(value, "alpha", float, f"'keeps' of {where}"))
            found, geometric = [alpha**i for i in range(1, count + 1)] if 0 < alpha <= 1 else [alpha], alpha
        elif set(value) == {"first", "last", "count"} and count > 1:
            first, last = (float(files.field(value, k, float, f"'keeps' of {where}")) for k in ("first", "last"))
            able = 0 < first <= 1 and 0 < last <= 1
            found = [first * (last / first) ** (i / (count - 1)) for i in range(count)] if able else [first, last]
            geometric = None
        else:
            raise RankwiseError(
                f"'keeps' of {where} is a list, {{alpha = 0.8, count = 5}}, or {{first = 0.9, last = 0.1, count = 5}}"
            )
        found = [round(keep, 6) for keep in found]
    else:
        entries = files.typed(value, list, f"'keeps' of {where}")
        found, geometric = [float(files.typed(v, float, f"every keep of {where}")) for v in entries], None
    bad = [keep for keep in found if not 0 < keep <= 1]
    if bad or not found:
        given = f"{bad[0]:g} is among" if bad else "there are none in"
        raise RankwiseError(f"{given} the keeps of {where}: a keep is above 0 and up to 1")
    return tuple(found), geometric


def _entry(value: object, where: str) -> Entry:
    if isinstance(value, str):
        value = {"method": value}
    value = dict(files.typed(value, dict, f"every method of {where}"))
    method = files.typed(value.pop("method", ""), str, f"'method' of {where}")
    label = files.typed(value.pop("label", method), str, f"'label' of {where}")
    recover = value.pop("recover", 0)
    calibrate = _count(value, "calibrate", 0, where, least=0) if "calibrate" in value else None
    value.pop("calibrate", None)
    try:
        settings_for(method, **value)
        read_effort(recover)
    except RankwiseError as err:
        raise RankwiseError(f"the method {label!r} of {where}: {err}") from None
    return Entry(method, label, value, recover, calibrate)


def _timing(value: object, where: str) -> str:
    text: str = files.typed(value, str, f"'timing' of {where}")
    try:
        read_timing(text)
    except RankwiseError as err:
        raise RankwiseError(f"'timing' of {where}: {err}") from None
    return text


def _shares(value: object, mode: str, where: str) -> tuple[float, ...]:
    listed = value if isinstance(value, list) else [value]
    found = tuple(float(files.typed(v, float, f"'retrain' of {where}")) for v in listed)
    if not found or any(not 0 <= v <= 1 for v in found) or (mode == "iterate" and (len(found) > 1 or not found[0])):
        rule = "one share above 0" if mode == "iterate" else "shares of the recipe's epochs from 0 to 1"
        raise RankwiseError(f"retrain = {value} in {where}: give {rule}, such as [1.0]")
    return found


def _words(value: object, where: str) -> tuple[str, ...]:
    return tuple(files.typed(v, str, f"every entry of {where}") for v in files.typed(value, list, where))


def _count(data: Mapping[str, Any], key: str, default: int, where: str, least: int = 1, most: int = 10**18) -> int:
    found: int = files.typed(data.get(key, max(default, least)), int, f"{key!r} of {where}")
    if not least <= found <= most:
        given = str(found) if abs(found) <= 10**18 else "a number of so many digits"
        rule = f"from {least} on" if found < least else f"up to {most:,}"
        raise RankwiseError(f"{key} = {given} in {where}: give a whole number {rule}")
    return found
