"""Tables: the right numbers, the same after a round trip, and one sentence for every file that is not one."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save_file
from torch import Tensor, nn

import rankwise as rw
from rankwise.core import files
from rankwise.core.fold import all_folds, fold_for, kernel_sides
from rankwise.core.measures import FROM_SPECTRA, MEASURES
from rankwise.core.option import Option
from rankwise.core.slicing import divisors, real_slices, slice_width, slices_for
from rankwise.planning.table_file import _checksum
from sentences import check_sentence

FIXTURE_OK = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """One layer of each kind: plain, grouped, transposed and 1-D convolutions, linear."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(6, 8, (3, 2), padding=1), nn.Conv2d(8, 12, 3, groups=2), nn.ConvTranspose2d(12, 4, 2)),
            *(nn.Flatten(2), nn.Conv1d(4, 5, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(5, 10)),
        ).to(dtype)


EXAMPLE = torch.zeros(2, 6, 5, 5)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return network()


@pytest.fixture(scope="module")
def table(model: nn.Module) -> rw.Table:
    return rw.build_table(model, EXAMPLE)


def reference_slices(weight: Tensor, layer: rw.Layer, option: Option) -> list[list[np.ndarray]]:
    """The matrices of every group and slice, by plain loops over channels and axes."""
    w = weight.detach().double().numpy()
    if layer.kind == "Linear":
        blocks = [w]
    elif layer.transposed:
        blocks = [b.swapaxes(0, 1) for b in np.split(w, layer.groups)]
    else:
        blocks = np.split(w, layer.groups)
    left, right = kernel_sides(option.fold)
    width = slice_width(layer.group_channels, option.slices)
    found = []
    for block in blocks:
        cuts = [block[:, i : i + width] for i in range(0, block.shape[1], width)]
        order = [0, *(2 + a for a in left), 1, *(2 + a for a in right)]
        rows = block.shape[0] * int(np.prod([layer.kernel[a] for a in left]))
        found.append([cut.transpose(order).reshape(rows, -1) for cut in cuts])
    return found


# ---- the numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", ["all", "any", [1, 4]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_spectra_are_singular_values(dtype: torch.dtype, groups: Any) -> None:
    model = network(dtype)
    table = rw.build_table(model, groups=groups)
    modules = dict(model.named_modules())
    assert len(table.spectra) > 10
    for (name, option), found in table.spectra.items():
        layer = next(la for la in table.coverage.layers if la.name == name)
        for g, slices in enumerate(reference_slices(modules[name].weight, layer, option)):
            assert len(slices) == option.slices == found.shape[1]
            whole = np.linalg.norm(np.concatenate(slices, axis=1), 2)
            assert whole <= table.norms[name, option.fold] * (1 + 1e-9)
            for i, matrix in enumerate(slices):
                sigma = np.linalg.svd(matrix, compute_uv=False)
                expected = np.zeros(found.shape[2])
                expected[: len(sigma)] = sigma  # a narrower last slice has fewer; the others are 0
                np.testing.assert_allclose(found[g, i], expected, atol=1e-6 * sigma[0])
                assert found[g, i, -1] == 0


def test_two_builds_are_identical(model: nn.Module, table: rw.Table) -> None:
    again = rw.build_table(copy.deepcopy(model), EXAMPLE)
    assert again.fingerprint == table.fingerprint
    assert again.coverage == table.coverage
    assert again.norms == table.norms
    assert list(again.spectra) == list(table.spectra)
    assert all(np.array_equal(again.spectra[k], table.spectra[k]) for k in table.spectra)


def test_building_leaves_the_model_alone() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    rw.build_table(model, EXAMPLE)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


def test_progress_counts_every_layer(model: nn.Module) -> None:
    seen: list[tuple[str, int, int]] = []
    table = rw.build_table(model, progress=lambda *a: seen.append(a))
    names = [la.name for la in table.coverage.layers]
    assert seen == [*((n, i, len(names)) for i, n in enumerate(names)), ("", len(names), len(names))]


@pytest.mark.parametrize("broken", ["eigvalsh", "eigh", "both"])
def test_another_driver_gives_the_same_numbers(
    model: nn.Module, table: rw.Table, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eigenvalue solvers do fail to converge on real weights; the fallback must not change the plan."""
    budget = rw.Budget(params=0.6)
    expected = rw.allocate(table, budget, search="minimax", error="exact")
    small = rw.apply_plan(model, expected)
    failed = []

    def refuse(*_: Any, **__: Any) -> None:
        failed.append(1)
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    for name in ("eigvalsh", "eigh") if broken == "both" else (broken,):
        monkeypatch.setattr(torch.linalg, name, refuse)
    other = rw.build_table(model, EXAMPLE)
    for key, found in table.spectra.items():
        np.testing.assert_allclose(other.spectra[key], found, atol=1e-6 * found.max())
    plan = rw.allocate(other, budget, search="minimax", error="exact")
    assert [(c.name, c.option, c.rank) for c in plan.choices] == [(c.name, c.option, c.rank) for c in expected.choices]
    x = torch.randn(EXAMPLE.shape)
    torch.testing.assert_close(rw.apply_plan(model, plan)(x), small(x), atol=1e-5, rtol=1e-4)
    assert failed


# ---- which options ---------------------------------------------------------------------------------------


def options(table: rw.Table, name: str) -> set[tuple[str, int]]:
    return {(o.fold, o.slices) for n, o in table.spectra if n == name}


def test_all_is_every_fold_and_every_divisor(table: rw.Table) -> None:
    assert options(table, "0") == {(f, k) for f in all_folds(2) for k in (1, 2, 3, 6)}
    assert options(table, "1") == {(f, k) for f in all_folds(2) for k in (1, 2, 4)}  # 8 channels in 2 groups
    assert options(table, "4") == {(f, k) for f in ("f│cw", "fw│c") for k in (1, 2, 4)}
    assert options(table, "7") == {("f│c", 1), ("f│c", 5)}


@pytest.mark.parametrize(
    ("asked", "plain", "grouped"),
    [
        (1, {1}, {1}),
        (4, {3}, {4}),  # 6 channels "in 4" are slices of 2, so 3 of them
        (5, {3}, {4}),  # a grouped layer takes the largest divisor below
        (3, {3}, {2}),
        (100, {6}, {4}),
        ([1, 2], {1, 2}, {1, 2}),
        ([5, 1], {1, 3}, {1, 4}),
        ((k for k in (1, 2)), {1, 2}, {1, 2}),
        ("any", {1, 2, 3, 6}, {1, 2, 4}),
    ],
)
def test_explicit_groups(model: nn.Module, asked: Any, plain: set[int], grouped: set[int]) -> None:
    table = rw.build_table(model, folds=0, groups=asked)
    assert {k for _, k in options(table, "0")} == plain
    assert {k for _, k in options(table, "1")} == grouped


@given(channels=st.integers(1, 60), k=st.integers(1, 80))
def test_slices_are_as_many_as_fit(channels: int, k: int) -> None:
    """The paper's rule: slices of at most ⌈c/k⌉ channels, none empty, never more than asked for."""
    width, real = slice_width(channels, k), real_slices(channels, k)
    assert (real - 1) * width < channels <= real * width
    assert real <= k
    assert real_slices(channels, real) == real
    layer = rw.Layer("x", "Conv2d", 4, 2 * channels, (1, 1), groups=2)
    assert slices_for(k, layer) == [max(d for d in divisors(channels) if d <= k)]
    assert slices_for(k, rw.Layer("x", "Linear", 4, channels)) == [real]


@pytest.mark.parametrize(
    ("asked", "two", "one"),
    [
        (0, {"f│chw"}, {"f│cw"}),
        (3, {"fhw│c"}, {"fw│c"}),
        ("fh│cw", {"fh│cw"}, {"f│cw"}),
        ("fh|cw", {"fh│cw"}, {"f│cw"}),
        ([0, "fhw|c", 3], {"f│chw", "fhw│c"}, {"f│cw", "fw│c"}),
        ("all", set(all_folds(2)), {"f│cw", "fw│c"}),
    ],
)
def test_folds_by_scheme_by_name_and_with_an_ascii_bar(
    model: nn.Module, asked: Any, two: set[str], one: set[str]
) -> None:
    table = rw.build_table(model, folds=asked, groups=1)
    assert {f for f, _ in options(table, "0")} == two
    assert {f for f, _ in options(table, "4")} == one


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_every_fold_is_its_own_name(dims: int) -> None:
    assert len(all_folds(dims)) == 2**dims
    for fold in all_folds(dims):
        assert fold_for(fold, dims) == fold_for(fold.replace("│", "|"), dims) == fold


@pytest.mark.parametrize(
    "asked", [4, -1, True, "x", "f", "fhw", "c│f", "f│c│h", "fhh│c", "fx│c", "f│cf", "", None, 1.0, [], [[0]], object()]
)
def test_unknown_folds_are_refused(model: nn.Module, asked: Any) -> None:
    assert "fold" in check_sentence(lambda: rw.build_table(model, folds=asked))


@pytest.mark.parametrize("asked", [0, -1, True, "x", "", None, 1.0, [], [0], [1, None], ["1"], [[1]], object()])
def test_unknown_groups_are_refused(model: nn.Module, asked: Any) -> None:
    assert "slices" in check_sentence(lambda: rw.build_table(model, slices=asked))


def test_a_table_says_what_it_does_not_have(model: nn.Module) -> None:
    narrow = rw.build_table(model, EXAMPLE, folds=0, groups=[1, 2])
    budget = rw.Budget(params=0.8)
    assert "fhw│c" in check_sentence(lambda: rw.allocate(narrow, budget, folds=3))
    assert "slices" in check_sentence(lambda: rw.allocate(narrow, budget, groups=6))
    assert "slices='any'" in check_sentence(lambda: rw.allocate(narrow, budget, groups="any"))
    assert rw.allocate(narrow, budget, folds=0, groups=2).choices


# ---- files -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(table: rw.Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "spectra.safetensors"
    table.save(path)
    return path


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The safetensors header as an object, and the tensors' bytes."""
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(header: dict[str, Any], tensors: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors


def edited(data: bytes, change: Callable[[dict[str, Any]], Any], sealed: bool = False) -> bytes:
    """The same file with the table's own JSON changed; `sealed`: by somebody who knows the checksum."""
    header, tensors = header_of(data)
    body = json.loads(header["__metadata__"]["rankwise-table"])
    changed = change(body)
    body = body if changed is None else changed
    if sealed and isinstance(body, dict):
        with suppress(ValueError):  # half a character has no checksum
            body["checksum"] = _checksum(body, load(data))
    header["__metadata__"]["rankwise-table"] = json.dumps(body)
    return with_header(header, tensors)


@pytest.mark.parametrize("measure", MEASURES)
def test_a_saved_table_is_the_same_table(model: nn.Module, table: rw.Table, saved: Path, measure: str) -> None:
    again = rw.Table.load(saved, model)
    assert again.coverage == table.coverage
    assert again.fingerprint == table.fingerprint
    assert again.norms == table.norms
    assert list(again.spectra) == list(table.spectra)
    for layer in table.coverage.layers:
        for option in table.options(layer):
            before, after = (t.curve(layer, option, measure).values() for t in (table, again))
            assert before.tobytes() == after.tobytes()
    for search in ("minimax", "alternate", "sum", "constant"):
        for budget in (rw.Budget(params=0.7), rw.Budget(macs=0.7)):
            plans = [rw.allocate(t, budget, search=search, error=measure) for t in (table, again)]
            assert plans[0] == plans[1]


def test_saving_twice_gives_the_same_bytes(table: rw.Table, saved: Path, tmp_path: Path) -> None:
    rw.Table.load(saved).save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == saved.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["again"]


def test_a_table_from_a_file_needs_the_model_for_exact(model: nn.Module, saved: Path) -> None:
    alone = rw.Table.load(saved)
    assert rw.allocate(alone, rw.Budget(params=0.7), error="rss").choices
    message = check_sentence(lambda: rw.allocate(alone, rw.Budget(params=0.7), error="exact", search="minimax"))
    assert "Table.load(path, model)" in message
    assert rw.allocate(rw.Table.load(saved, model), rw.Budget(params=0.7), error="exact").choices


def test_one_changed_weight_makes_a_table_stale(saved: Path) -> None:
    model = network()
    with torch.no_grad():
        model[1].weight.view(-1)[7] = torch.nextafter(model[1].weight.view(-1)[7], torch.tensor(9.0))
    assert "stale" in check_sentence(lambda: rw.Table.load(saved, model))


def test_a_changed_bias_does_not(saved: Path) -> None:
    model = network()
    with torch.no_grad():
        model[1].bias += 1
    assert rw.Table.load(saved, model).spectra


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (network(torch.float64), "stale"),
        (nn.Sequential(nn.Linear(3, 3)), "another model"),
        (network()[:-1], "'7'"),
        (nn.Sequential(nn.Conv2d(6, 9, (3, 2)), *network()[1:]), "(9, 6, 3, 2)"),
        (nn.Sequential(nn.ReLU(), *network()[1:]), "no such layer"),
        (nn.Sequential(nn.BatchNorm2d(6, affine=False), *network()[1:]), "no such layer"),
    ],
    ids=["dtype", "architecture", "missing", "width", "no weight", "weight None"],
)
def test_a_table_of_another_model_is_refused(saved: Path, other: nn.Module, named: str) -> None:
    assert named in check_sentence(lambda: rw.Table.load(saved, other))


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.3, 0.9, 0.9999])
def test_a_truncated_table_is_refused(saved: Path, tmp_path: Path, share: float) -> None:
    data = saved.read_bytes()
    (tmp_path / "part").write_bytes(data[: int(share * len(data))])
    assert "part" in check_sentence(lambda: rw.Table.load(tmp_path / "part"))


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 8, b"\xff" * 64, b"{}", b"PK\x03\x04" + b"\0" * 100, b"\x80\x04N.", struct.pack("<Q", 2**62) + b"{}"],
)
def test_garbage_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "junk").write_bytes(content)
    assert "junk" in check_sentence(lambda: rw.Table.load(tmp_path / "junk"))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "not a file" in check_sentence(lambda: rw.Table.load(tmp_path))
    assert "not a file" in check_sentence(lambda: rw.Table.load(tmp_path / "absent"))


def test_another_safetensors_file_is_no_table(tmp_path: Path) -> None:
    save_file({"0": np.zeros(3)}, tmp_path / "a")
    save_file({"0": np.zeros(3)}, tmp_path / "b", metadata={"format": "pt"})
    for name in ("a", "b"):
        assert "not a rankwise table" in check_sentence(lambda n=name: rw.Table.load(tmp_path / n))


def test_a_newer_format_says_so(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(edited(saved.read_bytes(), lambda body: body.update(format=2)))
    assert "upgrade" in check_sentence(lambda: rw.Table.load(tmp_path / "new"))


def test_a_table_cannot_be_saved_where_there_is_no_folder(table: rw.Table, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "absent" / "t", tmp_path / "file" / "t", tmp_path, tmp_path / ("n" * 300), Path(".")):
        assert "could not be written" in check_sentence(lambda p=path: table.save(p))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# Damage: whatever is changed, either nothing of meaning was, or it is one sentence.


def check_same_or_refused(path: Path, table: rw.Table) -> None:
    try:
        again = rw.Table.load(path)
    except rw.RankwiseError as err:
        assert "\n" not in str(err)  # noqa: PT017
        return
    assert again.coverage == table.coverage
    assert again.norms == table.norms
    assert again.fingerprint == table.fingerprint
    assert all(np.array_equal(again.spectra[k], v) for k, v in table.spectra.items())


@settings(deadline=None, max_examples=300, suppress_health_check=FIXTURE_OK)
@given(data=st.data())
def test_a_flipped_byte_is_noticed(data: st.DataObject, table: rw.Table, saved: Path, tmp_path: Path) -> None:
    content = bytearray(saved.read_bytes())
    size = 8 + struct.unpack("<Q", content[:8])[0]
    where = data.draw(st.one_of(st.integers(0, size - 1), st.integers(0, len(content) - 1)))
    content[where] = data.draw(st.integers(0, 255))
    (tmp_path / "damaged").write_bytes(content)
    check_same_or_refused(tmp_path / "damaged", table)


json_values = st.recursive(
    st.one_of(
        *(
            st.none(),
            st.booleans(),
            st.integers(-3, 9),
            st.integers(-(10**30), 10**30),
            st.floats(),
            st.text(max_size=3),
        ),
        *(st.just(""), st.just([]), st.just({}), st.sampled_from(["f│chw", "Conv2d", "0", "\ud800", "a\nb"])),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, child in inner for p in places(child, (*path, key)))]


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    inside = value
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = new
    return None


@st.composite
def damage(draw: st.DrawFn, body: dict[str, Any]) -> Any:
    """Another value somewhere in the header, or a key less; what is not None replaces the whole."""
    found = places(body)
    # Deep places outnumber the shallow ones a hundred to one.
    path = draw(st.one_of(st.sampled_from([p for p in found if len(p) <= 4]), st.sampled_from(found)))
    if path and isinstance(path[-1], str) and draw(st.booleans()):
        for key in path[:-1]:
            body = body[key]
        del body[path[-1]]
        return None
    return put(body, path, draw(json_values))


@settings(deadline=None, max_examples=150, suppress_health_check=FIXTURE_OK)
@given(data=st.data())
def test_a_damaged_header_is_refused(data: st.DataObject, table: rw.Table, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "damaged").write_bytes(edited(saved.read_bytes(), lambda body: data.draw(damage(body))))
    check_same_or_refused(tmp_path / "damaged", table)


@pytest.mark.parametrize("value", [{}, [], None, 0, -1, "x", 2.5, 10**25, "\ud800"], ids=repr)
@pytest.mark.parametrize("field", ["name", "kind", "filters", "channels", "kernel", "groups", "calls"])
def test_a_forged_layer_is_a_table_or_refused(saved: Path, tmp_path: Path, field: str, value: Any) -> None:
    def change(body: dict[str, Any]) -> None:
        body["coverage"]["layers"][0][field] = value

    (tmp_path / "forged").write_bytes(edited(saved.read_bytes(), change, sealed=True))
    try:
        rw.Table.load(tmp_path / "forged", network())
    except rw.RankwiseError as err:
        assert "\n" not in str(err)  # noqa: PT017


@settings(deadline=None, max_examples=300, suppress_health_check=FIXTURE_OK)
@given(data=st.data())
def test_a_forged_header_is_a_table_or_refused(data: st.DataObject, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "forged").write_bytes(edited(saved.read_bytes(), lambda body: data.draw(damage(body)), sealed=True))
    try:
        rw.Table.load(tmp_path / "forged")
    except rw.RankwiseError as err:
        assert "\n" not in str(err)  # noqa: PT017


def test_measures_from_spectra_need_no_weights(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rw.Table, "_all_factors", lambda *_: pytest.fail("spectra were enough"))
    table = rw.Table.load(saved)
    for measure in FROM_SPECTRA:
        assert rw.allocate(table, rw.Budget(params=0.7), error=measure).choices


def test_a_write_that_fails_leaves_the_old_table(
    table: rw.Table, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    path.write_bytes(saved.read_bytes())
    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, name, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            assert "No space left" in check_sentence(lambda: table.save(path))
        assert path.read_bytes() == saved.read_bytes()
        assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_exact_refuses_weights_that_were_trained_since() -> None:
    """The other measures live from the spectra; `exact` would mix the new weights with the old norms."""
    model = network()
    table = rw.build_table(model, folds=(0,), groups=[1, 2])
    assert rw.allocate(table, rw.Budget(params=0.7), method="alds", groups=[1, 2], error="exact").choices
    with torch.no_grad():
        model[0].weight += 0.1
    assert "stale" in check_sentence(
        lambda: rw.allocate(table, rw.Budget(params=0.6), method="alds", groups=[1, 2], error="exact")
    )


@pytest.mark.parametrize("decomposition", ["svd", "messi", "tucker2", "cp"])
def test_convex_follows_from_energy(decomposition: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 8, 3), nn.Conv2d(8, 8, 3))
    table = rw.build_table(model, decompositions=(decomposition,))
    for layer in table.coverage.layers:
        for option in table.options(layer):
            energy, convex = (table.curve(layer, option, m).values() for m in ("energy", "convex"))
            lost = np.clip(energy[1:], 0, 1)
            np.testing.assert_allclose(convex[1:] * (1 - lost) ** 2, lost, atol=1e-9)
            assert np.isfinite(convex).all()
            assert (np.diff(convex) <= 1e-9).all()


def test_convex_does_not_give_up_the_largest_layer() -> None:
    """Where one layer has most of the params, least Σ energy takes nearly all of it; this measure does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), *(nn.Linear(512, 64), nn.Linear(64, 64)), nn.Linear(64, 64))
    table = rw.build_table(model)
    plans = {m: rw.allocate(table, rw.Budget(params=0.35), "auto", error=m) for m in ("energy", "convex")}
    worst = {m: max(choice.error["energy"] for choice in plan.choices) for m, plan in plans.items()}
    assert worst["convex"] < worst["energy"]
    assert rw.allocate(table, rw.Budget(params=0.35)) == plans["convex"]
    assert rw.Plan.loads(plans["convex"].dumps()) == plans["convex"]
