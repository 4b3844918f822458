"""Several decompositions in one search: more to choose from is never worse, on tables, files and the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save_file
from test_laws import macs_of, numel
from torch import Tensor, nn

import rankwise as rw
from rankwise.__main__ import main
from rankwise.core.option import Cost
from rankwise.data.splits import load as load_data
from rankwise.planning.table_file import _checksum
from sentences import check_sentence

ALL = ("svd", "pca", "tucker2", "messi")
SUBSETS = [names for n in range(1, len(ALL) + 1) for names in combinations(ALL, n)]


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(8, 10, (3, 2), padding=1), nn.ReLU()),
            *(nn.Conv2d(10, 12, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(12, 6, 2, stride=2), nn.ReLU()),
            *(nn.Conv2d(6, 8, 1), nn.Flatten(), nn.Linear(8 * 12 * 14, 10)),
        ).double()


def inputs(n: int = 24) -> Tensor:
    return torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return network()


@pytest.fixture(scope="module")
def table(model: nn.Module) -> rw.Table:
    """Everything that there is, measured on data as well."""
    x = inputs()
    return rw.build_table(
        model, x[:1], groups=(1, 2, 3), data=[x], decompositions=ALL, error="output", starts=2, clustering="kmeans"
    )


def budgets() -> Iterator[rw.Budget]:
    yield rw.Budget(params=0.4)
    yield rw.Budget(macs=0.6)


# ---- more options are never worse ------------------------------------------------------------------------


@pytest.mark.parametrize("search", ["minimax", "sum"])
@pytest.mark.parametrize("error", ["energy", "output"])
def test_more_options_are_never_worse(model: nn.Module, table: rw.Table, error: str, search: str) -> None:
    """Over all subsets of the decompositions, folds and numbers of slices, under one measure."""
    for budget in budgets():
        (unit,) = budget.units
        found: dict[tuple[str, ...], float] = {}
        for names in SUBSETS:
            plan = rw.allocate(table, budget, decompositions=names, error=error, search=search, groups=(1, 2, 3))
            assert plan.keep(unit) <= getattr(budget, unit)
            assert {c.decomposition for c in plan.choices} <= {*names, "svd"}
            found[names] = plan.search.objective - (plan.search.gap or 0.0) * plan.search.objective
            whole = plan.search.objective
            for fewer, value in found.items():
                # the plain form stands in where a decomposition has nothing to offer, so compare with svd in both
                if set(fewer) < set(names) and ("svd" in fewer or "svd" not in names):
                    assert value >= found[names] - 1e-9, (fewer, names)
            assert whole >= found[names]
        few = rw.allocate(table, budget, error=error, search=search, folds=0, groups=1).search.objective
        more = rw.allocate(table, budget, error=error, search=search, folds=0, groups=(1, 2, 3)).search.objective
        most = rw.allocate(table, budget, error=error, search=search, folds="all", groups=(1, 2, 3))
        assert few >= more - 1e-9
        assert more >= most.search.objective - 1e-9
        assert {c.decomposition for c in most.choices} == {"svd"}, "folds and slices only: what alds+ chooses among"


@pytest.mark.parametrize("search", ["minimax", "sum", "alternate", "constant", "product", "penalty"])
@pytest.mark.parametrize("budget", [{"params": 0.5}, {"macs": 0.6}, {"params": 0.6, "macs": 0.7}], ids=str)
def test_every_search_takes_every_decomposition(
    model: nn.Module, table: rw.Table, search: str, budget: dict[str, float]
) -> None:
    x = inputs(1)
    for error in ("energy", "output"):
        limit = rw.Budget(**budget)
        plan = rw.allocate(table, limit, decompositions=ALL, error=error, search=search, groups=(1, 2, 3))
        small = rw.apply_plan(model, plan, table.moments)
        assert plan.after == Cost(numel(small), macs_of(small, x))
        assert all(plan.keep(unit) <= value for unit, value in budget.items())
        assert small(x).shape == model(x).shape
        torch.testing.assert_close(rw.densify(small)(x), small(x), rtol=1e-8, atol=1e-10)
        assert rw.Plan.loads(plan.dumps()) == plan


@settings(max_examples=15)
@given(data=st.data())
def test_two_budgets_are_never_worse_with_more_options(table: rw.Table, data: st.DataObject) -> None:
    limit = rw.Budget(params=data.draw(st.floats(0.35, 0.9)), macs=data.draw(st.floats(0.6, 1)))
    error = data.draw(st.sampled_from(["energy", "output"]))
    rest: dict[str, Any] = {"error": error, "search": "minimax", "groups": (1, 2, 3)}
    few = rw.allocate(table, limit, decompositions=("svd",), **rest)
    more = rw.allocate(table, limit, decompositions=ALL, **rest)
    assert more.search.objective <= few.search.objective + 1e-9


class Planted(nn.Module):
    """Four layers side by side, each made so that one decomposition is the smallest one without error."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, dtype=torch.float64)

        self.both = nn.Conv2d(12, 10, 3, bias=False)  # few directions of filters and of channels
        self.fold = nn.Conv2d(12, 10, 3, bias=False)  # rank 2 if the kernel goes with the filters
        self.clusters = nn.Linear(30, 18, bias=False)  # every other channel in one plane, the rest in another
        self.outputs = nn.Linear(20, 20)  # of full rank, on inputs from three dimensions around a mean
        self.double()
        self.both.weight.data = torch.einsum("fi,ijhw,cj->fchw", draw(10, 2), draw(2, 3, 3, 3), draw(12, 3))
        self.fold.weight.data = torch.einsum("fhwi,ci->fchw", draw(10, 3, 3, 2), draw(12, 2))
        for half in range(2):
            self.clusters.weight.data[:, half::2] = draw(18, 2) @ draw(2, 15)
        self.outputs.weight.data = draw(20, 20)
        self.x = draw(40, 12, 5, 5), draw(40, 30), draw(40, 3) @ draw(3, 20) + draw(20)

    def forward(self, image: Tensor, row: Tensor, flat: Tensor) -> tuple[Tensor, ...]:
        return self.both(image), self.fold(image), self.clusters(row), self.outputs(flat)


def test_each_layer_gets_the_decomposition_it_was_made_for() -> None:
    """Room for the four smallest choices without error, and nothing more: the search must mix them."""
    model = Planted()
    sizes = {
        "both": 12 * 3 + 3 * 2 * 9 + 2 * 10,
        "fold": 2 * (12 + 9 * 10),
        "clusters": 30 * 2 + 2 * 2 * 18,
        "outputs": 3 * 40,
    }
    table = rw.build_table(model, model.x, groups=(1, 2), data=[model.x], decompositions=ALL, error="output", starts=30)
    limit = rw.Budget(params=sum(sizes.values()) + 20)  # and the one bias that there is
    for search in ("sum", "minimax"):
        plan = rw.allocate(table, limit, decompositions=ALL, error="output", search=search, groups=(1, 2))
        assert plan.search.objective == pytest.approx(0, abs=1e-9)
        assert {c.name: c.decomposition for c in plan.choices} == {
            "both": "tucker2",
            "fold": "svd",
            "clusters": "messi",
            "outputs": "pca",
        }
        small = rw.apply_plan(model, plan, table.moments)
        for got, wanted in zip(small(*model.x), model(*model.x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_the_chosen_errors_are_those_of_the_table(model: nn.Module, table: rw.Table) -> None:
    plan = rw.allocate(table, rw.Budget(params=0.5), decompositions=ALL, error="output", search="sum", groups=(1, 2, 3))
    layers = {la.name: la for la in table.coverage.layers}
    total = 0.0
    for c in plan.choices:
        assert {"energy", "output"} <= set(c.error)
        for measure in c.error:
            assert c.error[measure] == table.curve(layers[c.name], c.option, measure)[c.rank]
        total += c.error["output"]
    assert plan.search.objective == pytest.approx(total)


# ---- what is missing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (("tucker2",), "bound"),
        (("svd", "tucker2"), "max"),
        (("svd", "pca"), "rss"),
        (("pca",), "exact"),
        (("svd", "messi", "tucker2"), "exact"),
    ],
    ids=str,
)
def test_a_measure_that_an_option_lacks_is_one_sentence(
    model: nn.Module, table: rw.Table, names: tuple[str, ...], error: str
) -> None:
    message = check_sentence(
        lambda: rw.allocate(table, rw.Budget(params=0.5), decompositions=names, error=error, groups=(1, 2, 3))
    )
    assert f"has no error by {error!r}" in message
    assert "energy" in message
    x = inputs()
    rest: dict[str, Any] = {"decompositions": names, "error": error, "groups": (1, 2), "starts": 1}
    check_sentence(lambda: rw.compress(model, x[:1], keep=0.5, data=[x], **rest))


def test_what_a_table_does_not_have_is_one_sentence(model: nn.Module) -> None:
    x = inputs()
    plain = rw.build_table(model, x[:1], groups=(1, 2))
    for names in (("pca",), ("messi",), ("tucker2",), ALL, ("svd", "tucker2")):
        message = check_sentence(lambda n=names: rw.allocate(plain, rw.Budget(params=0.5), decompositions=n, groups=1))
        assert "decompositions=" in message
    assert "output" in check_sentence(lambda: rw.allocate(plain, rw.Budget(params=0.5), error="output", groups=1))
    for bad in ((), ("svd", "parafac"), "svd", ("SVD",)):
        assert "possible are" in check_sentence(lambda b=bad: rw.build_table(model, x[:1], decompositions=b))
        assert "possible are" in check_sentence(lambda b=bad: rw.compress(model, x[:1], keep=0.5, decompositions=b))


def test_a_plan_with_components_needs_the_moments(model: nn.Module, table: rw.Table) -> None:
    plan = rw.allocate(table, rw.Budget(params=0.5), method="pca", error="output")
    assert "calibration data" in check_sentence(lambda: rw.apply_plan(model, plan))
    x = inputs(1)
    small = rw.apply_plan(model, plan, table.moments)
    assert small(x).shape == model(x).shape


# ---- files -----------------------------------------------------------------------------------------------


def test_a_table_with_data_comes_back_from_its_file(model: nn.Module, table: rw.Table, tmp_path: Path) -> None:
    """Equal curves, equal plans, and the same network from the moments in the file."""
    path = tmp_path / "t.safetensors"
    table.save(path)
    again = rw.Table.load(path, model)
    for layer in table.coverage.layers:
        assert again.options(layer) == table.options(layer)
        for option in table.options(layer):
            assert again.measures(layer, option) == table.measures(layer, option)
            for measure in table.measures(layer, option):
                np.testing.assert_array_equal(
                    again.curve(layer, option, measure).values(), table.curve(layer, option, measure).values()
                )
    x = inputs(3)
    for names in SUBSETS:
        for error in ("energy", "output"):
            rest: dict[str, Any] = {"decompositions": names, "error": error, "groups": (1, 2, 3)}
            plan = rw.allocate(table, rw.Budget(params=0.5), **rest)
            assert rw.allocate(again, rw.Budget(params=0.5), **rest) == plan
            small = rw.apply_plan(model, plan, table.moments)
            assert torch.equal(rw.apply_plan(model, plan, again.moments)(x), small(x))
    rw.save(small, plan, tmp_path / "o")
    assert torch.equal(rw.load(tmp_path / "o", model)(x), small(x))
    again.save(tmp_path / "u.safetensors")
    assert (tmp_path / "u.safetensors").read_bytes() == path.read_bytes()


def test_a_layer_that_was_not_reached_is_saved_too(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(20, 20), nn.Linear(20, 20)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    torch.manual_seed(0)
    model, x = Two(), torch.randn(30, 20)
    table = rw.build_table(model, x[:1], data=[x], error="output", groups=1)
    table.save(tmp_path / "t.safetensors")
    again = rw.Table.load(tmp_path / "t.safetensors", model)
    for method in ("auto", "pca"):
        plan = rw.allocate(again, rw.Budget(params=0.9), method, error="output", groups=1)
        assert plan == rw.allocate(table, rw.Budget(params=0.9), method, error="output", groups=1)
        assert {c.name for c in plan.choices} == {"used"}


def rewrite(path: Path, to: Path, change: Any) -> None:
    """Change header and tensors of a table file, and make its checksum fit again."""
    raw = path.read_bytes()
    tensors = load(raw)
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["rankwise-table"])
    change(header, tensors)
    header["checksum"] = _checksum(header, tensors)
    save_file(tensors, to, metadata={"rankwise-table": json.dumps(header, ensure_ascii=False)})


def spoiled(header: dict[str, Any], tensors: dict[str, Any], what: str) -> None:
    tucker = next(i for i, entry in enumerate(header["given"]) if entry[1] == "tucker2")
    messi = next(i for i, entry in enumerate(header["spectra"]) if len(entry) > 3 and entry[2] > 1)
    match what:
        case "no tensor":
            del tensors[f"given {tucker} energy"]
        case "another shape":
            tensors[f"given {tucker} energy"] = tensors[f"given {tucker} energy"][:, :-1].copy()
        case "another measure":
            header["given"][tucker][2] = ["luck"]
        case "another decomposition":
            header["given"][tucker][1] = "tucker3"
        case "no layer":
            header["given"][tucker][0][0] = "nowhere"
        case "no partition":
            header["spectra"][messi][3][0] = header["spectra"][messi][3][1]
        case "text in clusters":
            header["spectra"][messi][3] = "everything"
        case "moments of nobody":
            header["moments"][0][0] = "nowhere"
        case "moments without a mean":
            del tensors["mean 0"]
        case "moments of another size":
            tensors["scatter 1"] = tensors["scatter 1"][:, :-1].copy()
        case "moments without a count":
            header["moments"][0][1] = "many"
        case "short entries":
            header["given"][0] = header["given"][0][:2]


@pytest.mark.parametrize(
    "what",
    [
        *("no tensor", "another shape", "another measure", "another decomposition", "no layer", "no partition"),
        *("text in clusters", "moments of nobody", "moments without a mean"),
        *("moments of another size", "moments without a count", "short entries"),
    ],
)
def test_a_damaged_file_is_one_sentence(table: rw.Table, tmp_path: Path, what: str) -> None:
    path, other = tmp_path / "t.safetensors", tmp_path / "bad.safetensors"
    table.save(path)
    rewrite(path, other, lambda *_: None)
    assert rw.Table.load(other).fingerprint == table.fingerprint
    rewrite(path, other, lambda header, tensors: spoiled(header, tensors, what))
    check_sentence(lambda: rw.Table.load(other))


@settings(max_examples=30)
@given(place=st.floats(0, 1), bit=st.integers(0, 7))
def test_every_bit_counts(table: rw.Table, tmp_path_factory: pytest.TempPathFactory, place: float, bit: int) -> None:
    path = tmp_path_factory.mktemp("bits") / "t.safetensors"
    table.save(path)
    raw = bytearray(path.read_bytes())
    raw[int(place * (len(raw) - 1))] ^= 1 << bit
    path.write_bytes(raw)
    check_sentence(lambda: rw.Table.load(path))


# ---- a specification instead of tensors ------------------------------------------------------------------


def test_calibration_data_may_be_a_specification() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 16, 3, stride=2), nn.ReLU(), nn.Flatten()),
        nn.Linear(144, 10),
    )
    x = torch.randn(1, 1, 8, 8)
    for method in ("auto", "messi", "tucker2", "pca"):
        small, plan = rw.compress(model, x, method=method, error="output", keep=0.5, data="digits")
        assert plan.keep() <= 0.5
        assert all("output" in c.error for c in plan.choices)
        assert small(x).shape == (1, 10)
    table = rw.build_table(model, x, data="digits", groups=1)
    assert table.moments["0"].count == len(load_data("digits", "calibration").thin(256)) * 64
    any_size = nn.Sequential(nn.Conv2d(1, 12, 3))
    assert "8×8" in check_sentence(lambda: rw.build_table(any_size, torch.randn(1, 1, 12, 12), data="digits"))
    assert "unknown data" in check_sentence(lambda: rw.build_table(model, x, data="letters"))


# ---- the command line ------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        (["--method", "messi", "--keep", 0.6], {"messi"}),
        (["--method", "messi", "--keep", 0.6, "--clustering", "kmeans"], {"messi"}),
        (["--method", "messi", "--keep", 0.6, "--groups", 2], {"messi"}),
        (["--method", "tucker2", "--keep", 0.6], {"svd", "tucker2"}),
        (["--method", "tucker2"], {"svd", "tucker2"}),
        (["--method", "tucker2", "--budget", "macs=0.5"], {"svd", "tucker2"}),
        (["--decompositions", "svd,tucker2", "--keep", 0.5], {"svd", "tucker2"}),
        (["--decompositions", "svd,tucker2,messi,pca", "--keep", 0.5, "--groups", "1,2"], {*ALL}),
        (["--decompositions", "svd,pca", "--error", "output", "--keep", 0.5, "--calibrate", 64], {"svd", "pca"}),
    ],
    ids=lambda value: "" if isinstance(value, set) else " ".join(map(str, value)),
)
def test_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[object], chosen: set[str]
) -> None:
    common = ["compress", "digits-cnn", "--random-weights", "--data", "digits", "--out", tmp_path / "o", "--json"]
    status, out, err = run(capsys, *common, *flags)
    assert status == 0, err
    found = json.loads(out)
    plan = rw.Plan.load(tmp_path / "o" / "plan.json")
    assert plan.to_json() == rw.Plan.loads(json.dumps(found["plan"])).to_json()
    assert found["verified"] == "it gives the same outputs"
    assert found["scores"]["after"]["n"] == found["scores"]["before"]["n"]
    assert {c.decomposition for c in plan.choices} <= chosen
    assert plan.choices
    assert plan.after.params < plan.before.params
    if "--keep" in flags:
        assert plan.keep() <= float(str(flags[flags.index("--keep") + 1]))
    if "--clustering" in flags:
        assert plan.settings["clustering"] == "kmeans"


def test_command_line_for_people_and_replay(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The printed plan names what was chosen, and plan.json of both kinds can be replayed."""
    weights = tmp_path / "w.safetensors"
    save_file({k: v.numpy() for k, v in rw.networks.build("digits-cnn").state_dict().items()}, weights)
    for method in ("messi", "tucker2"):
        first, second = tmp_path / f"{method}1", tmp_path / f"{method}2"
        status, out, _ = run(
            capsys, "compress", "digits-cnn", "--weights", weights, "--method", method, "--keep", 0.5, "--out", first
        )
        assert status == 0
        assert method in out
        status, _, err = run(
            capsys, "compress", "digits-cnn", "--weights", weights, "--plan", first / "plan.json", "--out", second
        )
        assert status == 0, err
        assert (second / "plan.json").read_text() == (first / "plan.json").read_text()
        status, out, _ = run(capsys, "evaluate", first, "--data", "digits", "--json")
        assert status == 0
        assert json.loads(out)["n"] == 355


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--keep", "0.5", "--decompositions", "parafac"], "tucker2"),
        (["--keep", "0.5", "--decompositions", "svd,,tucker2"], "possible are"),
        (["--keep", "0.5", "--decompositions", "svd,parafac"], "possible are"),
        (["--keep", "0.5", "--method", "messi", "--clustering", "spectral"], "projective-robust"),
        (["--keep", "0.5", "--method", "messy"], "messi"),
        (["--keep", "0.5", "--method", "messi", "--groups", "0"], "from 1 on"),
        (["--keep", "0.5", "--method", "messi", "--seed", "-1"], "seed"),
        (["--keep", "0.5", "--method", "tucker2", "--error", "bound"], "bound"),
        (["--keep", "0.5", "--method", "tucker2", "--error", "output"], "--data"),
        (["--keep", "0.5", "--decompositions", "svd,pca"], "--data"),
        (["--decompositions", "svd,tucker2"], "--keep"),
        (["--method", "messi"], "--keep"),
        (["--keep", "0.0001", "--method", "tucker2"], "least possible"),
        (["--keep", "0.0001", "--method", "messi"], "least possible"),
        (["--keep", "0.5", "--method", "messi", "--error", "output", "--data", "digits", "--calibrate", "0"], "1 or"),
        (["--clustering", "kmeans", "--plan", "p.json"], "--clustering"),
        (["--decompositions", "messi", "--plan", "p.json"], "--decompositions"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "compress", "digits-cnn", "--random-weights", *flags, "--out", "o")
    assert status == 2
    assert out == ""
    assert err.startswith("rankwise: ")
    assert err.count("\n") == 1
    assert says in err
    assert not list(tmp_path.iterdir()), "nothing is half-written"
