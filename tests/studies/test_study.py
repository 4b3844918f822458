"""Study files: every shipped one loads, keys are strict, cells are told apart by what decides their result."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.errors import RankwiseError
from rankwise.methods import METHODS
from rankwise.studies.study import Study, asks, fill_in
from rankwise.studies.study_file import make_study, read_study
from rankwise.training.recipes import RECIPES

FOLDER = Path(__file__).resolve().parents[2] / "studies"
SHIPPED = sorted(FOLDER.glob("*.toml"))
PLAIN: dict[str, Any] = {
    "methods": ["alds", "svd"],
    "keeps": [0.8, 0.5],
    "network": [{"model": "digits-cnn", "data": "digits"}],
}


def make(**changes: Any) -> Study:
    return make_study({**PLAIN, **changes}, "test", "test.toml")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_shipped_study_loads(path: Path) -> None:
    study = read_study(path)
    cells = study.cells()
    assert len({cell.name for cell in cells}) == len(cells) > 0
    json.dumps(study.to_json(), allow_nan=False)
    if study.paper and "compress-only" not in study.name:
        for network in study.networks:
            assert network.recipe["name"] == f"paper:{network.name}"
        if study.mode != "iterate":
            assert study.repeats == 3  # "Each experiment was repeated 3 times"


def test_the_shipped_studies_are_those_of_the_paper() -> None:
    results = "tab:oneshot fig:cifar_oneshot fig:mobilenet fig:voc tab:imagenetbenchmarks fig:cifar_ablation"
    parts = "cifar_resnet20_prune cifar_resnet20_retrain cifar_resnet20_retrainsweep imagenet_resnet18_prune"
    parts += " imagenet_resnet18_retrain imagenet_resnet18_retrainsweep"
    tables = "cifar_retrain cifar_retrainsweep imagenet_retrain imagenet_retrainsweep voc_retrain imagenetbenchmarks"
    wanted = {*results.split(), "fig-supp:ablation", "fig-supp:extension"}
    wanted |= {f"fig:{part}" for part in parts.split()} | {f"tab-supp:{table}" for table in tables.split()}
    studies = [read_study(path) for path in SHIPPED]
    assert {label for study in studies for label in study.paper} == wanted
    shot = {network.name for study in studies if "tab:oneshot" in study.paper for network in study.networks}
    assert shot <= {name.removeprefix("paper:") for name in RECIPES}
    assert len(shot) == 7


def test_the_compress_only_study_has_every_method() -> None:
    study = read_study(FOLDER / "cifar10-resnet20-compress-only.toml")
    assert set(METHODS) <= {entry.label for entry in study.entries}
    keeps = study.networks[0].keeps
    assert len(keeps) >= 8
    assert (max(keeps), min(keeps)) == (0.9, 0.2)
    assert study.networks[0].weights is not None


def test_published_ratios_are_on_the_grid() -> None:
    """The keeps of the one-shot studies are those that the paper's tables show."""
    published = pytest.importorskip("rankwise.reports.published")
    for name, tables in (
        ("cifar10-oneshot", "tab-supp:cifar_retrain"),
        ("imagenet-oneshot", "tab-supp:imagenet_retrain"),
        ("voc-oneshot", "tab-supp:voc_retrain"),
    ):
        for network in read_study(FOLDER / f"{name}.toml").networks:
            data = network.data.strip("<>")
            records = [r for r in published.records(network.name, data) if r["table"] == tables]
            ratios = [r["CR-P"] for r in records if r["CR-P"] is not None]
            assert len(ratios) >= 10
            away = [min(abs(100 * (1 - keep) - ratio) for keep in network.keeps) for ratio in ratios]
            # Their methods miss what is asked for by some points at times, most of all SVD on DenseNet22.
            assert sum(a < 0.5 for a in away) >= 0.65 * len(away), (network.name, away)


def test_cells_are_the_product() -> None:
    study = make(repeats=3, retrain=[0, 0.5], methods=["alds", {"method": "svd", "label": "plain"}])
    cells = study.cells()
    assert len(cells) == 1 * 2 * 2 * 2 * 3
    assert {cell.seed for cell in cells} == {0, 1, 2}
    assert {cell.entry.label for cell in cells} == {"alds", "plain"}
    assert {cell.epochs for cell in cells} == {0, 10}  # of the 20 epochs of `fast`


@given(st.floats(0.01, 1.0), st.integers(1, 500))
def test_a_share_is_at_least_an_epoch_and_at_most_all(share: float, epochs: int) -> None:
    study = make(retrain=[share], network=[{**PLAIN["network"][0], "set": {"epochs": epochs}}])
    assert 1 <= study.cells()[0].epochs <= epochs


def test_geometric_keeps() -> None:
    assert make(keeps={"alpha": 0.5, "count": 3}).networks[0].keeps == (0.5, 0.25, 0.125)
    keeps = make(keeps={"first": 0.9, "last": 0.1, "count": 5}).networks[0].keeps
    assert keeps[0] == 0.9
    assert keeps[-1] == 0.1
    ratios = [b / a for a, b in pairwise(keeps)]
    assert max(ratios) - min(ratios) < 1e-5


def test_names_say_what_decides_and_nothing_else() -> None:
    """Moving files, or other points of the grid, leave a cell's name alone; everything else changes it."""
    network = PLAIN["network"][0]
    name = make().cells()[0].name
    assert make(keeps=[0.8]).cells()[0].name == name
    assert make(repeats=2).cells()[0].name == name
    assert make(title="another").cells()[0].name == name
    # Rows from before there were `recover` and `calibrate` keep their names.
    assert make().cells()[0].entry.identity == {"method": "alds", "label": "alds", "settings": {}}
    assert "teacher" not in make().cells()[0].network.identity
    for change in (
        {"methods": [{"method": "alds", "error": "max"}]},
        {"methods": [{"method": "alds", "label": "other"}]},
        {"methods": [{"method": "alds", "recover": 3}]},
        {"methods": [{"method": "alds", "calibrate": 0}]},
        {"keeps": [0.81]},
        {"unit": "macs"},
        {"retrain": [0.5]},
        {"seed": 1},
        {"calibrate": 10},
        {"split": "val"},
        {"timing": "batch=2"},
        {"network": [{**network, "recipe": "gentle"}]},
        {"network": [{**network, "set": {"epochs": 3}}]},
        {"network": [{**network, "limit": 10}]},
        {"network": [{**network, "teacher": True}]},
        {"network": [{**network, "exclude": ["fc"]}]},
        {"network": [{**network, "model": "resnet20"}]},
        {"network": [{**network, "data": "hub:digits"}]},
    ):
        assert make(**change).cells()[0].name != name, change


def test_places_are_filled_in(tmp_path: Path) -> None:
    network = {"model": "resnet20", "data": "<cifar10>", "weights": "<resnet20>"}
    study = make(network=[network])
    assert asks(study)
    for here in ("a", "b"):
        (tmp_path / here).mkdir()
        (tmp_path / here / "w.safetensors").write_bytes(b"the same")
    filled = [
        fill_in(study, [f"parquet:{tmp_path / here}"], [f"resnet20={tmp_path / here / 'w.safetensors'}"])
        for here in ("a", "b")
    ]
    assert filled[0].networks[0].source == f"parquet:{tmp_path / 'a'}"
    assert [c.name for c in filled[0].cells()] == [c.name for c in filled[1].cells()]
    (tmp_path / "b" / "w.safetensors").write_bytes(b"other weights")
    other = fill_in(study, [f"cifar10=parquet:{tmp_path / 'b'}"], [str(tmp_path / "b" / "w.safetensors")])
    assert other.cells()[0].name != filled[0].cells()[0].name
    plain = fill_in(make(), [], [])
    assert plain.networks[0].source == "digits"
    moved = fill_in(make(), [f"parquet:{tmp_path}"], [])
    assert moved.cells()[0].name != plain.cells()[0].name


@pytest.mark.parametrize(
    ("data", "weights", "says"),
    [
        ([], [], r"needs the data <cifar10>.*--data cifar10=parquet:FOLDER"),
        (["parquet:nowhere"], [], "nowhere is not a folder"),
        (["imagenet=parquet:."], [], "it has cifar10"),
        (["parquet:.", "cifar10=parquet:."], [], r"needs weights for resnet20.*--weights resnet20=FILE"),
        (["parquet:.", "parquet:."], [], "given twice"),
        (["parquet:."], ["nowhere.pth"], "nowhere.pth for resnet20 are not there"),
        (["parquet:."], ["vgg16=w.pth"], "it has resnet20"),
    ],
)
def test_what_only_the_user_knows(data: list[str], weights: list[str], says: str) -> None:
    study = make(network=[{"model": "resnet20", "data": "<cifar10>", "weights": "<resnet20>"}])
    with pytest.raises(RankwiseError, match=says):
        fill_in(study, data, weights)


def test_bare_values_need_one_meaning() -> None:
    two = make(network=[{"model": "resnet20", "data": "<a>"}, {"model": "vgg16", "data": "<b>"}])
    with pytest.raises(RankwiseError, match="several data sets"):
        fill_in(two, ["parquet:."], [])
    with pytest.raises(RankwiseError, match="for several networks"):
        fill_in(two, [], ["w.pth"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"method": ["alds"]}, "unknown key 'method'; known are"),
        ({"network": [{"model": "digits-cnn", "data": "digits", "epochs": 3}]}, "unknown key 'epochs'"),
        ({"network": [{"model": "digits-cnn", "data": "digits", "set": {"epoch": 3}}]}, "a recipe has no 'epoch'"),
        ({"network": [{"model": "digits-cnn"}]}, "has no 'data'"),
        ({"network": [{"model": "nothing", "data": "digits"}]}, "unknown network"),
        ({"network": [{"model": ".", "data": "digits"}]}, "as a network: name the network itself"),
        ({"network": []}, "has no network"),
        ({"network": {"model": "digits-cnn"}}, "must be a list"),
        ({"network": [{"model": "digits-cnn", "data": "digits", "gpus": -1}]}, "from 0 on"),
        ({"network": [{"model": "digits-cnn", "data": "digits", "limit": 0}]}, "from 1 on"),
        ({"network": [{"model": "digits-cnn", "data": "digits", "teacher": "it"}]}, "'teacher' of .* must be"),
        ({"methods": []}, "has no methods"),
        ({"methods": ["magic"]}, "unknown method 'magic'"),
        ({"methods": [{"method": "alds", "grops": 3}]}, "unknown setting 'grops'"),
        ({"methods": [{"label": "x"}]}, "unknown method ''"),
        ({"methods": [{"method": "alds", "recover": "soon"}]}, "recover='soon' is not understood"),
        ({"methods": [{"method": "alds", "calibrate": -1}]}, "calibrate = -1"),
        ({"methods": ["alds", "alds"]}, "two methods called 'alds'"),
        ({"paper": "tab:oneshot"}, "'paper' of test.toml must be a list"),
        ({"timing": "batch=many"}, "'timing' of test.toml: the timing 'batch=many' is not understood"),
        ({"timing": True}, "'timing' of test.toml"),
        ({"mode": "twice"}, "possible are oneshot, sweep, iterate"),
        ({"unit": "seconds"}, "possible for oneshot are params"),
        ({"keeps": []}, "above 0 and up to 1"),
        ({"keeps": [40]}, "40 is among the keeps"),
        ({"keeps": [0.5, 0.5]}, "the same cell twice"),
        ({"keeps": {"alpha": 0.8}}, "alpha = 0.8, count = 5"),
        ({"keeps": {"beta": 0.8}}, "unknown key 'beta'"),
        ({"keeps": {"first": 0.9, "last": 0, "count": 3}}, "0 is among the keeps"),
        ({"keeps": "all"}, "must be a list"),
        ({"retrain": [2]}, "from 0 to 1"),
        ({"repeats": 0}, "from 1 on"),
        ({"repeats": True}, "a whole number"),
        ({"mode": "iterate", "retrain": [1.0]}, "its keeps are αⁱ"),
        ({"mode": "iterate", "keeps": {"alpha": 0.8, "count": 2}}, "one share above 0"),
        (
            {"mode": "iterate", "keeps": {"alpha": 0.8, "count": 2}, "retrain": 1.0, "unit": "macs"},
            "for iterate are params",
        ),
        (
            {
                "mode": "iterate",
                "keeps": {"alpha": 0.8, "count": 2},
                "retrain": 1.0,
                "network": [{**PLAIN["network"][0], "teacher": True}],
            },
            "iterates with a teacher",
        ),
    ],
)
def test_refusals(change: dict[str, Any], says: str) -> None:
    with pytest.raises(RankwiseError, match=says):
        make(**change)


def test_what_is_no_toml(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("a = ")
    with pytest.raises(RankwiseError, match="not readable TOML"):
        read_study(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RankwiseError, match="not readable TOML"):
        read_study(path)
    with pytest.raises(RankwiseError, match="could not be read"):
        read_study(tmp_path / "none.toml")


def test_rounds_of_an_iteration_are_cells() -> None:
    study = make(mode="iterate", keeps={"alpha": 0.8, "count": 3}, retrain=1.0, methods=["alds"])
    assert [(cell.round, cell.asked) for cell in study.cells()] == [(1, 0.8), (2, 0.64), (3, 0.512)]
    longer = replace(study, networks=make(mode="iterate", keeps={"alpha": 0.8, "count": 5}, retrain=1.0).networks)
    assert [c.name for c in longer.cells()][:3] == [c.name for c in study.cells()]
