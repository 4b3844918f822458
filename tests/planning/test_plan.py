"""Plans: values that survive JSON, and files from strangers that are either a plan or one sentence."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import rankwise as rw
from rankwise.core.fold import all_folds
from rankwise.core.measures import MEASURES
from rankwise.core.option import Cost
from rankwise.planning.findings import INPUTS, CutGroup, Findings, Latency, WholeGroup
from sentences import check_sentence

KEYS = [key for key in Findings.__dataclass_fields__ if key != "other"]
FIXTURE_OK = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 12)),
        )


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return network()


@pytest.fixture(scope="module")
def plan(model: nn.Module) -> rw.Plan:
    """Every layer decomposed: the least budget."""
    found = rw.allocate(rw.build_table(model, torch.zeros(1, 3, 7, 7)), rw.Budget(params=0.5, macs=0.6), "alds+")
    assert [c.name for c in found.choices] == ["0", "2", "6"]
    return found


def body_of(plan: rw.Plan) -> dict[str, Any]:
    return json.loads(plan.dumps())


def entry(body: dict[str, Any], name: str = "0") -> dict[str, Any]:
    return next(e for e in body["layers"] if e["name"] == name)


def text_of(body: Any) -> str:
    return json.dumps(body)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, child in inner for p in places(child, (*path, key)))]


# ---- there and back --------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
counts = st.integers(0, 10**15)
costs = st.builds(Cost, counts, st.none() | counts)
finite = st.floats(allow_nan=False, allow_infinity=False)
choices = st.builds(
    rw.Choice,
    name=names,
    kind=names,
    shape=st.lists(counts, max_size=5).map(tuple),
    fold=st.sampled_from([f for dims in range(4) for f in all_folds(dims)]),
    slices=counts,
    rank=counts,
    error=st.dictionaries(st.sampled_from(MEASURES), finite),
    before=costs,
    after=costs,
)
kept = st.builds(rw.Skipped, name=names, kind=names, params=counts, reason=names)
amounts = st.one_of(st.floats(0, 1, exclude_min=True), st.integers(1, 10**15))
budgets = st.builds(rw.Budget, params=amounts, macs=st.none() | amounts)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**15), 10**15) | finite | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)
seconds = st.tuples(finite, finite)
latencies = st.builds(
    Latency,
    before=finite,
    after=finite,
    keep=finite,
    layers=st.dictionaries(names, seconds, max_size=2),
    slower=st.lists(names, max_size=2).map(tuple),
    timing=st.dictionaries(names, plain, max_size=2),
    measured=st.none() | finite,
    rounds=st.none() | st.lists(st.tuples(finite, finite, finite), max_size=2).map(tuple),
)
makers = st.lists(names, max_size=2).map(tuple)
findings = st.builds(
    Findings,
    objective=st.none() | finite,
    gap=st.none() | finite,
    price=st.none() | finite,
    trace=st.none() | st.lists(finite, max_size=3).map(tuple),
    ranks=st.none() | names,
    latency=st.none() | latencies,
    inputs=st.none() | st.sampled_from(INPUTS),
    variance=st.none() | finite,
    draws=st.none() | finite,
    groups=st.none() | st.lists(st.builds(CutGroup, makers, counts, counts), max_size=2).map(tuple),
    whole=st.none() | st.lists(st.builds(WholeGroup, makers, counts, names), max_size=2).map(tuple),
    other=st.dictionaries(names.filter(lambda key: key not in {*KEYS, "warning"}), plain, max_size=2),
)
plans = st.builds(
    rw.Plan,
    model=names,
    method=names,
    budget=budgets,
    before=costs,
    after=costs,
    layers=st.lists(choices | kept, max_size=4, unique_by=lambda e: e.name).map(tuple),
    settings=st.dictionaries(names, plain, max_size=3),
    search=findings,
)


@settings(deadline=None, max_examples=200, suppress_health_check=FIXTURE_OK)
@given(plan=plans)
def test_a_plan_survives_json(plan: rw.Plan, tmp_path: Path) -> None:
    assert rw.Plan.loads(plan.dumps()) == plan
    plan.save(tmp_path / "plan.json")
    assert rw.Plan.load(tmp_path / "plan.json") == plan
    assert rw.Plan.load(tmp_path / "plan.json").dumps() == plan.dumps()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_what_the_search_finds_survives_json(plan: rw.Plan) -> None:
    assert rw.Plan.loads(plan.dumps()) == plan
    assert rw.Plan.loads(plan.dumps().encode()) == plan
    assert rw.Plan.loads(plan.dumps().encode("utf-16")) == plan


def test_a_plan_read_back_gives_the_same_network(model: nn.Module, plan: rw.Plan) -> None:
    one, two = rw.apply_plan(model, plan), rw.apply_plan(model, rw.Plan.loads(plan.dumps()))
    assert list(one.state_dict()) == list(two.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_what_is_left_out_has_a_default(plan: rw.Plan) -> None:
    """`settings` and `search` are not needed to replay a plan."""
    body = body_of(plan)
    del body["settings"], body["search"]
    assert rw.Plan.loads(text_of(body)) == replace(plan, settings={}, search=Findings())


def test_keep_needs_macs_to_speak_of_macs(plan: rw.Plan) -> None:
    assert plan.keep() == plan.after.params / plan.before.params
    assert "example" in check_sentence(lambda: replace(plan, before=Cost(10, None)).keep("macs"))


FOUND = {  # as it was written before it had a type, every key in its place
    "objective": 0.25,
    "gap": 1e-05,
    "price": 3.0,
    "trace": [0.5, 0.25],
    "ranks": "vbmf",
    "latency": {
        "before": 0.002,
        "after": 0.001,
        "keep": 0.5,
        "layers": {"0": [0.001, 0.0005]},
        "slower": ["6"],
        "timing": {"batch": None, "threads": 2, "layout": "contiguous"},
        "measured": 0.52,
        "rounds": [[0.5, 0.49, 0.52]],
    },
    "inputs": "calibration",
    "variance": 2.5,
    "unit": "nats",
    "expected": 0.25,
    "measured": 0.5,
    "fitted": 0.25,
    "uncorrected": 0.125,
    "draws": 64.0,
    "groups": [{"layers": ["0", "2"], "channels": 8, "kept": 4}],
    "whole": [{"layers": [], "channels": 12, "reason": "its filters are what the network gives out"}],
}


def test_what_was_found_is_written_as_it_was(plan: rw.Plan) -> None:
    """To the byte: the weights beside a plan know the hash of its text."""
    text = json.dumps(body_of(plan) | {"search": FOUND}, indent=1, ensure_ascii=False) + "\n"
    found = rw.Plan.loads(text)
    assert found.dumps() == text
    assert set(KEYS) == set(FOUND)
    assert None not in [getattr(found.search, key) for key in KEYS]
    assert found.keep("latency") == 0.5
    assert found.inputs == "calibration"


def test_what_nobody_reads_any_more_is_kept(plan: rw.Plan) -> None:
    found = rw.Plan.loads(text_of(body_of(plan) | {"search": {"objective": 1, "starts": [3, {"x": None}]}}))
    assert found.search == Findings(objective=1, other={"starts": [3, {"x": None}]})
    assert body_of(found)["search"] == {"objective": 1, "starts": [3, {"x": None}]}


@pytest.mark.parametrize("path", [p for p in places(FOUND) if p and p[:2] != ("latency", "timing")], ids=str)
def test_what_was_found_has_its_type(plan: rw.Plan, path: tuple[Any, ...]) -> None:
    for wrong in (None, True, {"x": 1}, [[1]], "" if path[-1] == "inputs" else 2.5):
        body = copy.deepcopy(body_of(plan) | {"search": FOUND})
        parent = body["search"]
        for key in path[:-1]:
            parent = parent[key]
        if wrong == 2.5 and isinstance(parent[path[-1]], float):
            continue
        parent[path[-1]] = wrong
        message = check_sentence(lambda: rw.Plan.loads(text_of(body)))  # noqa: B023
        assert all(repr(key) in message for key in path if isinstance(key, str))


# ---- what is no plan -------------------------------------------------------------------------------------

REQUIRED = ["format", "model", "method", "budget", "before", "after", "layers"]
OF_A_CHOICE = ["name", "kind", "shape", "fold", "slices", "rank", "error", "before", "after"]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(plan: rw.Plan, key: str) -> None:
    body = body_of(plan)
    del body[key]
    assert repr(key) in check_sentence(lambda: rw.Plan.loads(text_of(body)))


@pytest.mark.parametrize("key", OF_A_CHOICE)
def test_a_missing_key_of_a_layer_is_named(plan: rw.Plan, key: str) -> None:
    body = body_of(plan)
    del entry(body)[key]
    assert repr(key) in check_sentence(lambda: rw.Plan.loads(text_of(body)))


@pytest.mark.parametrize(
    "where",
    [
        lambda b: b,
        lambda b: b["budget"],
        lambda b: b["before"],
        lambda b: entry(b),
        lambda b: entry(b, "1"),
        lambda b: entry(b)["error"],
        lambda b: entry(b)["after"],
    ],
    ids=["plan", "budget", "before", "choice", "kept", "error", "cost"],
)
def test_an_unknown_key_is_refused_everywhere(plan: rw.Plan, where: Callable[[Any], dict[str, Any]]) -> None:
    body = body_of(plan)
    where(body)["ranks"] = 1
    assert "'ranks'" in check_sentence(lambda: rw.Plan.loads(text_of(body)))


@pytest.mark.parametrize("key", ["slices", "rank"])
@pytest.mark.parametrize("value", ["3", 3.0, 2.5, True, None, [3], {"a": 1}], ids=repr)
def test_a_rank_is_a_whole_number(plan: rw.Plan, key: str, value: Any) -> None:
    body = body_of(plan)
    entry(body)[key] = value
    assert "a whole number" in check_sentence(lambda: rw.Plan.loads(text_of(body)))


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("0", {"rank": 0}, "rank 0"),
        ("0", {"rank": -1}, "rank -1"),
        ("0", {"fold": "f│chw", "slices": 1, "rank": 9}, "1 to 8"),
        ("0", {"rank": 10**20}, "possible are"),
        ("0", {"fold": "f|chw"}, "f│chw"),
        ("0", {"fold": "chw"}, "chw"),
        ("0", {"fold": ""}, "f│chw"),
        ("0", {"fold": "f│c"}, "f│chw"),
        ("0", {"fold": "f│cdhw"}, "f│chw"),
        ("6", {"fold": "f│chw"}, "f│c"),
        ("0", {"slices": 0}, "slices"),
        ("0", {"slices": -1}, "slices"),
        ("0", {"slices": 4}, "slices"),
        ("0", {"slices": 10**20}, "slices"),
        ("6", {"slices": 5}, "slices"),  # 8 channels in slices of ⌈8/5⌉ = 2 are 4
        ("2", {"slices": 3}, "slices"),
        ("2", {"slices": 8}, "slices"),
        ("0", {"kind": "Linear"}, "another model"),
        ("0", {"kind": "Conv2d\n"}, "another model"),
        ("0", {"shape": [8, 3, 3]}, "another model"),
        ("0", {"shape": []}, "another model"),
        ("0", {"name": "9"}, "'9'"),
        ("0", {"name": ""}, "another model"),
        ("0", {"name": "0.weight"}, "'0.weight'"),
        ("0", {"name": "1\n2"}, "another model"),
        ("0", {"name": "3"}, "ReLU"),
    ],
)
def test_a_decision_that_does_not_fit_is_refused(
    model: nn.Module, plan: rw.Plan, name: str, changes: dict[str, Any], named: str
) -> None:
    body = body_of(plan)
    entry(body, name).update(changes)
    before = copy.deepcopy(model.state_dict())
    modules = list(model)
    wrong = rw.Plan.loads(text_of(body))
    assert named in check_sentence(lambda: rw.apply_plan_(model, wrong))
    assert list(model) == modules
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_layer_named_twice_is_refused(plan: rw.Plan) -> None:
    body = body_of(plan)
    body["layers"].append(entry(body))
    assert "more than once" in check_sentence(lambda: rw.Plan.loads(text_of(body)))


@pytest.mark.parametrize("value", [None, [], "x", 3, 0.5, True])
def test_a_plan_is_an_object(value: Any) -> None:
    assert "object" in check_sentence(lambda: rw.Plan.loads(text_of(value)))


@pytest.mark.parametrize("key", [*REQUIRED, "settings", "search"])
@pytest.mark.parametrize("value", [None, True, 1.5, "x", [1], {"x": 1}], ids=repr)
def test_every_key_has_its_type(plan: rw.Plan, key: str, value: Any) -> None:
    body = body_of(plan)
    if type(value) is type(body[key]) and key in ("model", "method", "settings", "search"):
        body[key] = value
        assert rw.Plan.loads(text_of(body))
    else:
        body[key] = value
        check_sentence(lambda: rw.Plan.loads(text_of(body)))


@pytest.mark.parametrize(("value", "named"), [(3, "upgrade"), (0, "never existed"), (-1, "never existed")])
def test_another_format_says_so(plan: rw.Plan, value: int, named: str) -> None:
    assert named in check_sentence(lambda: rw.Plan.loads(text_of(body_of(plan) | {"format": value})))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["error", "settings", "budget"])
def test_numbers_are_finite(plan: rw.Plan, where: str, value: float) -> None:
    body = body_of(plan)
    (entry(body) if where == "error" else body)[where] = {"energy": value} if where == "error" else {"params": value}
    check_sentence(lambda: rw.Plan.loads(text_of(body)))


def test_a_number_that_overflows_is_not_finite_either(plan: rw.Plan) -> None:
    text = text_of(body_of(plan) | {"search": {"objective": 12345.5}}).replace("12345.5", "1e999")
    check_sentence(lambda: rw.Plan.loads(text))


@pytest.mark.parametrize("digits", [31, 400, 4300, 5000])
@pytest.mark.parametrize("where", ["budget", "rank", "shape", "error", "format", "before"])
def test_huge_whole_numbers_are_refused(plan: rw.Plan, where: str, digits: int) -> None:
    body, huge = body_of(plan), 987654321987654321
    if where == "budget":
        body["budget"] = {"params": huge}
    elif where == "before":
        body["before"]["params"] = huge
    elif where == "format":
        body["format"] = huge
    else:
        entry(body)[where] = {"rank": huge, "shape": [huge], "error": {"max": huge}}[where]
    check_sentence(lambda: rw.Plan.loads(text_of(body).replace(str(huge), "9" * digits)))


@pytest.mark.parametrize("deep", ["[" * 10_000 + "]" * 10_000, '{"a":' * 10_000 + "1" + "}" * 10_000, "[" * 10_000])
def test_deep_nesting_is_refused(plan: rw.Plan, deep: str) -> None:
    check_sentence(lambda: rw.Plan.loads(deep))
    check_sentence(lambda: rw.Plan.loads(text_of(body_of(plan) | {"settings": "HERE"}).replace('"HERE"', deep)))


@pytest.mark.parametrize("half", ["\ud800", "a\udfff"])
@pytest.mark.parametrize("where", ["model", "name", "kind", "key", "settings"])
def test_half_characters_are_refused(plan: rw.Plan, where: str, half: str) -> None:
    """They could be read, and neither printed nor written again."""
    body = body_of(plan)
    if where == "settings":
        body["settings"] = {"x": [half]}
    elif where in ("name", "kind"):
        entry(body)[where] = half
    else:
        body[half if where == "key" else where] = half
    check_sentence(lambda: rw.Plan.loads(text_of(body)))


@pytest.mark.parametrize(
    "content", [b"", b" ", b"\xff\xfe\x00", b"\x80abc", b"{", b'{"format": 1,}', b"\0" * 20, b"nul"]
)
def test_files_that_are_not_json_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert "plan.json" in check_sentence(lambda: rw.Plan.load(path))


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "file" / "plan.json", tmp_path / "nul\0"):
        assert "could not be read" in check_sentence(lambda p=path: rw.Plan.load(p))


def test_a_plan_cannot_be_saved_where_there_is_no_folder(plan: rw.Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    bad = [
        tmp_path,
        tmp_path / "absent" / "p",
        tmp_path / "file" / "p",
        tmp_path / ("n" * 300),
        tmp_path / "nul\0",
        ".",
    ]
    for path in bad:
        assert "could not be written" in check_sentence(lambda p=path: plan.save(p))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("wrong", [None, "plan.json", {}, 3])
def test_what_is_no_plan_is_not_applied(model: nn.Module, wrong: Any) -> None:
    assert "Plan" in check_sentence(lambda: rw.apply_plan(model, wrong))


@pytest.mark.parametrize("wrong", [None, "resnet18", {}])
def test_a_plan_is_not_applied_to_what_is_no_network(plan: rw.Plan, wrong: Any) -> None:
    assert "Module" in check_sentence(lambda: rw.apply_plan(wrong, plan))


def test_a_plan_of_another_network_says_what_differs(plan: rw.Plan) -> None:
    wide = network()
    wide[0] = nn.Conv2d(3, 10, 3)
    assert "(10, 3, 3, 3)" in check_sentence(lambda: rw.apply_plan(wide, plan))
    assert "'2'" in check_sentence(lambda: rw.apply_plan(network()[:2], plan))


# ---- anything at all -------------------------------------------------------------------------------------

anything = st.recursive(
    st.one_of(
        *(
            st.none(),
            st.booleans(),
            st.integers(-3, 20),
            st.integers(-(10**40), 10**40),
            st.floats(),
            st.text(max_size=3),
        ),
        st.sampled_from(["0", "2", "6", "f│chw", "fhw│c", "f│c", "Conv2d", "Linear", "\ud800", "a\nb", "reason"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def mutated(draw: st.DrawFn, body: Any) -> Any:
    """One to three changes: another value, a key less, a key more, two values exchanged."""
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(body)))
        if not path:
            continue
        parent = body
        for key in path[:-1]:
            parent = parent[key]
        what = draw(st.sampled_from(["value", "value", "value", "drop", "add", "copy"]))
        if what == "value":
            parent[path[-1]] = draw(anything)
        elif what == "drop":
            del parent[path[-1]]
        elif what == "copy":
            other = body
            for key in draw(st.sampled_from(places(body))):
                other = other[key]
            parent[path[-1]] = copy.deepcopy(other)
        elif isinstance(parent, dict):
            parent[draw(st.text(max_size=4))] = draw(anything)
        else:
            parent.append(draw(anything))
    return body


def obeys(call: Callable[[], Any]) -> Any:
    """The result, or None for a RankwiseError of one line; every other exception is a bug."""
    try:
        return call()
    except rw.RankwiseError as err:
        assert str(err).strip()  # noqa: PT017
        assert "\n" not in str(err)  # noqa: PT017
        return None


@settings(deadline=None, max_examples=500, suppress_health_check=FIXTURE_OK)
@given(data=st.data())
def test_a_mutated_plan_is_a_plan_or_one_sentence(data: st.DataObject, model: nn.Module, plan: rw.Plan) -> None:
    text = text_of(data.draw(mutated(body_of(plan))))
    found = obeys(lambda: rw.Plan.loads(text))
    if found is None:
        return
    assert rw.Plan.loads(found.dumps()) == found
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modules = list(model)
    small = obeys(lambda: rw.apply_plan(model, found))
    if small is not None:
        assert small(torch.zeros(1, 3, 7, 7)).shape == (1, 12)
    copied = copy.deepcopy(model)
    kept = list(copied)
    if obeys(lambda: rw.apply_plan_(copied, found) or True) is None:
        assert list(copied) == kept  # refused as a whole
    assert list(model) == modules
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@settings(deadline=None, max_examples=300, suppress_health_check=FIXTURE_OK)
@given(data=st.data())
def test_flipped_bytes_are_a_plan_or_one_sentence(data: st.DataObject, plan: rw.Plan) -> None:
    content = bytearray(plan.dumps().encode())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    found = obeys(lambda: rw.Plan.loads(bytes(content)))
    assert found is None or isinstance(found, rw.Plan)
