"""Reports without a browser: what is embedded is what was read, no text becomes code, bad input is refused."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rankwise as rw
from made_rows import failed, row, with_plans, write
from rankwise.__main__ import main
from rankwise.reports import charts, embedded, html, looks
from rankwise.reports.pack import Book, columns, evenly, script_json, unpack

EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&\u2028 $x_1$ '\""
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def content_of(page: Path) -> Any:
    """What a browser would find in the page's data element."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(text)


def cell(column: dict[str, Any], at: int) -> Any:
    if "c" in column:
        return column["c"]
    return column["v"][column["i"][at]] if "i" in column else column["d"][at]


class TestEmbedding:
    @given(values)
    def test_json_in_a_script_is_the_same_value_and_cannot_end_the_script(self, value: Any) -> None:
        text = script_json({"x": value, "evil": EVIL})
        assert json.loads(text) == {"x": value, "evil": EVIL}
        assert not set("<>&\u2028\u2029") & set(text)

    @given(st.lists(st.dictionaries(st.sampled_from("abcd"), values, max_size=4), min_size=1, max_size=12))
    def test_columns_lose_nothing(self, rows: list[dict[str, Any]]) -> None:
        table = columns(rows)
        for at, one in enumerate(rows):
            again: dict[str, Any] = {}
            for column in table:
                found, (key, *inner) = cell(column, at), column["k"]
                if found is not None:
                    if inner:
                        again.setdefault(key, {})[inner[0]] = found
                    else:
                        again[key] = found
            assert again == _without_nulls(one)

    def test_plans_lose_nothing_and_are_stored_once(self, tmp_path: Path) -> None:
        folder = with_plans(tmp_path)
        plans = [json.loads(p.read_text()) for p in sorted((folder / "plans").iterdir())]
        pruned = json.loads(json.dumps(plans[0]))
        pruned["layers"][1] = {
            "name": "conv2",
            "kind": "Conv2d",
            "shape": [64, 32, 3, 3],
            "filters": [0, 5],
            "channels": None,
            "before": {"params": 18432, "macs": None},
            "after": {"params": 576, "macs": None},
        }
        plans.append(json.loads(rw.Plan.loads(json.dumps(pruned)).dumps()))
        book = Book()
        numbers = [book.add(plan) for plan in plans]
        assert [book.add(plan) for plan in plans] == numbers
        stored = json.loads(json.dumps(book.to_json()))
        for number, plan in zip(numbers, plans, strict=True):
            assert json.dumps(unpack(stored, number)) == json.dumps(plan), "order of keys included"

    @given(st.integers(0, 200), st.integers(1, 50))
    def test_evenly_keeps_both_ends(self, count: int, most: int) -> None:
        found = evenly(count, most)
        assert len(found) == min(count, most)
        assert found == sorted(set(found))
        if 2 <= most < count:
            assert (found[0], found[-1]) == (0, count - 1)
            gaps = [b - a for a, b in pairwise(found)]
            assert max(gaps) - min(gaps) <= 1


def _without_nulls(one: dict[str, Any]) -> dict[str, Any]:
    """Null and absent are the same in a column, and an empty object has no columns."""
    kept = {k: {i: v for i, v in x.items() if v is not None} if isinstance(x, dict) else x for k, x in one.items()}
    return {k: x for k, x in kept.items() if x is not None and x != {}}


class TestPage:
    def test_holds_the_rows_and_the_plans(self, tmp_path: Path) -> None:
        folder = with_plans(tmp_path / "r")
        said = html.write_report(folder, tmp_path / "report.html")
        content = content_of(tmp_path / "report.html")
        assert (said["rows"], said["failed"], said["plans"]["embedded"]) == (13, 1, 6)
        assert content["rows"]["n"] == 13
        for shelf in content["panels"][0]["shelves"]:
            for number, at in zip(shelf["plans"], shelf["rows"], strict=True):
                name = next(cell(c, at) for c in content["rows"]["columns"] if c["k"] == ["plan"])
                assert unpack(content["book"], number) == json.loads((folder / name).read_text())

    def test_needs_no_network(self, tmp_path: Path) -> None:
        html.write_report(with_plans(tmp_path / "r"), tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        head = page[: page.index('id="data"')]
        assert "default-src 'none'" in head
        assert not re.search(r"(src|href)=[\"']?(https?:)?//", head)
        assert "<link" not in head

    def test_names_are_never_markup(self, tmp_path: Path) -> None:
        """Every text that a stranger can choose, as a tag and as the end of a script."""
        folder = with_plans(tmp_path / "r")
        body = json.loads((folder / "plans/auto-0.4.json").read_text())
        body["layers"][0]["name"] = body["model"] = EVIL
        (folder / "plans/evil.json").write_text(json.dumps(body))
        evil = dict.fromkeys(("study", "cell", "model", "data", "label", "method"), EVIL)
        rows = [row() | evil | {"plan": "plans/evil.json", EVIL: EVIL, "provenance": {EVIL: EVIL}}, failed(EVIL, EVIL)]
        write(folder, rows)
        said = html.write_report(folder, tmp_path / "report.html", title=EVIL, png=tmp_path / "png")
        page = (tmp_path / "report.html").read_text()
        assert "<img" not in page[: page.index('id="data"')]
        assert page.count("</script>") == 3
        assert content_of(tmp_path / "report.html")["title"] == EVIL
        assert len(said["figures"]) == len(list((tmp_path / "png").iterdir())) > 0

    def test_few_plans_where_many_would_be_large(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = with_plans(tmp_path / "r", keeps=tuple(k / 20 for k in range(3, 19)))
        monkeypatch.setattr(embedded, "MOST_PLANS", 8)
        monkeypatch.setattr(embedded, "PLAN_BYTES", 5000)
        said = html.write_report(folder, tmp_path / "report.html")
        shelves = content_of(tmp_path / "report.html")["panels"][0]["shelves"]
        assert 0 < said["plans"]["embedded"] < 16
        assert all(len(s["plans"]) == said["plans"]["at_most"] < s["of"] == 16 for s in shelves)

    def test_rows_without_plans_macs_or_scores(self, tmp_path: Path) -> None:
        rows = [row(**{"CR-F": None, "macs": None, "keep": {"params": 0.5, "macs": None}}), failed("b", "why")]
        html.write_report(write(tmp_path / "r", rows), tmp_path / "a.html", png=tmp_path / "png")
        html.write_report(write(tmp_path / "f", [failed("b", "why")]), tmp_path / "b.html", png=tmp_path / "png")
        assert content_of(tmp_path / "b.html")["panels"] == []

    def test_published_points_are_embedded(self, tmp_path: Path) -> None:
        entry = {"network": "Test", "data": "made up", "method": "ALDS", "delta_top1": -1.0, "CR-P": 50.0, "CR-F": 40.0}
        paper = [{**entry, "table": "test data"}, {**entry, "method": "PFP", "table": "test data"}]
        html.write_report(write(tmp_path / "r", [row()]), tmp_path / "a.html", paper=paper)
        assert content_of(tmp_path / "a.html")["paper"] == paper
        with pytest.raises(rw.RankwiseError, match="unknown key 'delta'"):
            html.write_report(tmp_path / "r", tmp_path / "b.html", paper=[{**entry, "delta": 1}])


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"format": 9}, "reads up to 1"),
            ({"status": "perhaps"}, "must be done or failed"),
            ({"asked": "half"}, "'asked' of"),
            ({"compressed": {"top1": "good"}}, "'top1' in 'compressed'"),
            ({"compressed": 91}, "must be an object"),
            ({"label": 3}, "must be a string"),
            ({"plan": "plans/none.json"}, "could not be read"),
            ({"plan": "../outside.json"}, "outside of the folder"),
            ({"plan": "/etc/hostname"}, "outside of the folder"),
            ({"spectra": "../outside.json"}, "outside of the folder"),
        ],
    )
    def test_one_sentence_and_no_page(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], says: str
    ) -> None:
        (tmp_path / "outside.json").write_text('{"secret": 1}')
        folder = write(tmp_path / "r", [row() | change])
        assert main(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert says in err
        assert err.count("\n") == 1
        assert not (tmp_path / "page.html").exists()

    @pytest.mark.parametrize("place", ["missing", "empty", "file"])
    def test_no_results(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
        (tmp_path / "empty" / "rows").mkdir(parents=True)
        (tmp_path / "file").write_text("")
        assert main(["report", str(tmp_path / place), "-o", str(tmp_path / "page.html")]) == 2
        assert "rankwise demo" in capsys.readouterr().err
        assert main(["report", str(tmp_path / place), "-o", str(tmp_path)]) == 2
        assert "is a folder" in capsys.readouterr().err

    def test_other_kinds_of_rows_are_passed_over(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = write(tmp_path / "r", [row(), {"format": 1, "status": "done", "model": "x"}])
        assert main(["report", str(folder), "-o", str(tmp_path / "page.html"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["rows"] == 1


class TestLooks:
    def test_every_method_has_its_own_colour_and_marker(self) -> None:
        numbers = looks.look_numbers(rw.METHODS)
        assert max(numbers.values()) < len(looks.COLOURS)
        found = [looks.look(number) for number in numbers.values()]
        for part in ("light", "dark", "marker"):
            assert len({getattr(one, part) for one in found}) == len(rw.METHODS)

    @given(st.lists(st.sampled_from([*rw.METHODS, "mine", "alds, max", "alds-max", "other"]), unique=True))
    def test_a_method_looks_the_same_in_every_report(self, labels: list[str]) -> None:
        alone = {label: looks.look_numbers([label])[label] for label in labels}
        together = looks.look_numbers(labels)
        assert list(together) == labels
        same = [label for label in labels if label != "alds-max"]  # another name of "alds, max" in a shipped study
        assert len({together[label] for label in same}) == len(same)
        assert all(together[label] == alone[label] for label in labels if label in rw.METHODS)

    def test_no_two_labels_look_the_same(self) -> None:
        found = [looks.look(n) for n in looks.look_numbers([*rw.METHODS, *(f"mine-{i}" for i in range(500))]).values()]
        assert len({(s.light, s.marker) for s in found}) == len({(s.dark, s.marker) for s in found}) == len(found)

    @pytest.mark.parametrize("side", [0, 1], ids=["light", "dark"])
    def test_colours_stand_out_from_the_paper(self, side: int) -> None:
        """WCAG asks for 3 : 1 for graphics."""
        css = (Path(charts.__file__).parent / "page" / "report.css").read_text()
        papers = [_linear(c) for c in re.findall(r"--surface: (#\w+)", css)]
        paper = _brightness(papers[0] if side == 0 else papers[1])
        for pair in looks.COLOURS:
            high, low = sorted((_brightness(_linear(pair[side])), paper), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 3

    @pytest.mark.parametrize("side", [0, 1], ids=["light", "dark"])
    @pytest.mark.parametrize(("eye", "least"), [("normal", 23), ("protan", 13), ("deutan", 13)])
    def test_colours_differ_for_colour_blind_eyes(self, side: int, eye: str, least: float) -> None:
        """ΔE (CIE 1976) between any two, as normal eyes and dichromats see them; 25 for seven of the methods."""
        far = set(looks.look_numbers(["auto", "alds", "alds+", "svd", "svd-energy", "pca", "cp"]).values())
        seen = [_lab(_dichromat(_linear(pair[side]), eye)) for pair in looks.COLOURS]
        for i, a in enumerate(seen):
            for j, b in enumerate(seen[:i]):
                apart = sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5
                assert apart >= (25 if {i, j} <= far else least)


def _linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def _brightness(rgb: list[float]) -> float:
    return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]


# Viénot, Brettel and Mollon (1999), on linear RGB.
_EYES = {
    "normal": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "protan": [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]],
    "deutan": [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]],
}


def _dichromat(rgb: list[float], eye: str) -> list[float]:
    return [min(1.0, max(0.0, sum(m * v for m, v in zip(line, rgb, strict=True)))) for line in _EYES[eye]]


def _lab(rgb: list[float]) -> tuple[float, float, float]:
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    white = (0.9505, 1.0, 1.089)
    xyz = [sum(m * v for m, v in zip(line, rgb, strict=True)) / w for line, w in zip(to_xyz, white, strict=True)]
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)
