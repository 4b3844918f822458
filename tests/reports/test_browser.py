"""The report in a real browser without a network: every part of it is used as a reader would, and nothing complains."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise as rw
from made_rows import failed, row, with_plans, write
from rankwise.__main__ import main
from rankwise.cli import outcome
from rankwise.models import networks
from rankwise.reports import html, single

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
EVIL = "<img src=x onerror=document.title='hacked'></script><script>document.title='hacked'</script>"
PAPER = [
    {"network": "Digits-CNN", "data": "test data", "method": "ALDS", "delta_top1": -0.5, "CR-P": 50.0, "CR-F": 40.0}
    | {"table": "test data, not from any paper"},
    {"network": "Digits-CNN", "data": "test data", "method": "auto", "delta_top1": -1.5, "CR-P": 70.0, "CR-F": 60.0}
    | {"table": "test data, not from any paper", "share": 1.0},
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as play:
        running = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


class Reader:
    """A page without a network, and all that went wrong on it."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.context = browser.new_context(offline=True, **context)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def text(self, place: str) -> str:
        return str(self.page.locator(place).first.inner_text())

    def close_and_check(self) -> None:
        self.context.close()
        assert self.complaints == []
        assert all(url.startswith(("file:", "data:", "blob:")) for url in self.requests)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_plans(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def written(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    html.write_report(results, path, paper=PAPER)
    return path


@pytest.fixture
def reader(browser: Any, written: Path) -> Iterator[Reader]:
    found = Reader(browser, written)
    yield found
    found.close_and_check()


def layer_of(page: Any, name: str) -> Any:
    return page.locator(".layer-group", has=page.locator(".layer-name", has_text=re.compile(f"^{re.escape(name)}$")))


def plan_of(results: Path, method: str, keep: float) -> rw.Plan:
    return rw.Plan.load(results / f"plans/{method}-{keep:g}.json")


def test_slider_and_method_show_the_plan_that_is_in_the_data(reader: Reader, results: Path) -> None:
    page = reader.page
    page.locator("#shelf").select_option(label="auto")
    slider = page.locator("#budget")
    slider.focus()
    page.keyboard.press("Home")
    for keep in (0.2, 0.4, 0.6):
        plan = plan_of(results, "auto", keep)
        assert slider.get_attribute("aria-valuetext") == f"keep {100 * keep:.1f} % of params"
        totals = reader.text("#totals")
        assert f"{plan.after.params:,} of {plan.before.params:,}" in totals.replace("\n", " ").replace("  ", " ")
        assert f"{plan.after.macs:,}" in totals
        for choice in plan.choices:
            group = layer_of(page, choice.name)
            shown = group.inner_text()
            assert choice.fold in shown
            assert f"{choice.after.params:,} of {choice.before.params:,}" in shown
            assert group.locator(".rank").inner_text() == str(choice.rank)
            assert group.locator(".slices").inner_text() == str(choice.slices)
            share = page.evaluate("(node) => node.style.width", group.locator(".fill").first.element_handle())
            assert float(share[:-1]) == pytest.approx(100 * choice.after.params / choice.before.params, abs=0.01)
        page.keyboard.press("ArrowRight")
    page.locator("#shelf").select_option(label="svd")
    assert "keep 60.0 % of params" in reader.text("#budget-text"), "the budget stays where it was"
    assert f"{plan_of(results, 'svd', 0.6).after.params:,}" in reader.text("#totals")


def test_the_plan_is_downloaded_and_compressed_with(
    reader: Reader, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader.page.locator("#shelf").select_option(label="auto")
    reader.page.locator("#budget").fill("1")
    with reader.page.expect_download() as waiting:
        reader.page.locator("#download").click()
    assert waiting.value.suggested_filename == "plan.json"
    waiting.value.save_as(tmp_path / "plan.json")
    assert rw.Plan.load(tmp_path / "plan.json") == plan_of(results, "auto", 0.4)
    arguments = [
        "compress",
        "digits-cnn",
        "--random-weights",
        "--plan",
        str(tmp_path / "plan.json"),
        "--out",
        str(tmp_path / "o"),
    ]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["after"] == plan_of(results, "auto", 0.4).to_json()["after"]


def test_tables_are_sorted_by_keyboard(reader: Reader, results: Path) -> None:
    page = reader.page
    heads, body = page.locator("#runs-table thead th"), page.locator("#runs-table tbody tr")
    names = [head.inner_text().split()[0] for head in heads.all()]
    column = names.index("CR-P")
    for way in ("descending", "ascending"):
        heads.nth(column).locator("button").focus()
        page.keyboard.press("Enter")
        assert heads.nth(column).get_attribute("aria-sort") == way
        shown = [line.locator("th, td").nth(column).inner_text() for line in body.all()]
        numbers = [float(text) for text in shown if text != "–"]
        assert numbers == sorted(numbers, reverse=way == "descending")
        assert len(shown) == 13
        assert shown[-1] == "–", "what has no value is last in both directions"
        assert page.evaluate("document.activeElement.closest('th').getAttribute('aria-sort')") == way
    page.locator("#delta thead button").first.click()
    lines = [row.locator("th").inner_text() for row in page.locator("#delta tbody tr").all()]
    assert lines == sorted(lines)


def test_delta_cells_and_rows_lead_to_their_provenance(reader: Reader) -> None:
    page = reader.page
    page.locator("#delta .cell").first.click()
    assert "over 2 runs" in reader.text("#dialog-body")
    page.locator("#dialog-body summary").first.click()
    assert all(word in reader.text("#dialog-body") for word in ("a made-up machine", "0123abc", "2.13.0"))
    page.keyboard.press("Escape")
    page.locator("#find").fill("svd-0.6-2")
    page.locator("#runs-table:not(:has(tbody tr + tr))").wait_for()
    assert "failed: the loss became nan" in reader.text("#runs-table")
    page.locator("#runs-table .link").click()
    assert "the loss became nan" in reader.text("#dialog-body")
    page.locator("#dialog-close").click()
    page.locator("#measured").click()
    assert all(word in reader.text("#dialog-body") for word in ("seed", "Seconds", "commit"))


def test_charts_show_lines_bands_and_published_points(reader: Reader) -> None:
    page = reader.page
    count = "document.querySelectorAll('#chart-params .scatterlayer .trace').length"
    assert page.evaluate(count) == 6, "two lines with a band each, two published"
    page.locator("#stage button", has_text="compressed").click()
    assert page.evaluate(count) == 5, "one of them was retrained, and is not drawn here"
    page.locator("#stage button", has_text="retrained").click()
    page.locator("#published").select_option("")
    assert page.evaluate(count) == 4
    page.locator("#legend .chip", has_text="svd").focus()
    page.keyboard.press("Space")
    assert page.evaluate(count) == 2
    hover = page.evaluate("document.getElementById('chart-params').data.at(-1).hovertext[0]")
    assert "<b>auto</b>" in hover
    assert "± " in hover
    page.locator("#stage button", has_text="compressed").click()
    assert page.evaluate("document.getElementById('chart-macs').data.at(-1).y.length") == 3
    page.locator("#points summary").click()
    page.locator("#points tbody tr").first.wait_for()
    assert page.locator("#points tbody tr").count() == 6


def test_units_of_budgets_are_told_apart(browser: Any, tmp_path: Path) -> None:
    rows = [
        row(),
        row("alds"),
        row(unit="macs", top1=80.0),
        row("alds", unit="macs", top1=80.0),
        row("svd", unit="macs"),
    ]
    html.write_report(write(tmp_path / "r", rows), tmp_path / "report.html")
    reader = Reader(browser, tmp_path / "report.html")
    found = {}
    for unit in ("params", "macs", "any"):
        reader.page.locator("#asked button", has_text=unit).click()
        found[unit] = reader.text("#legend").split("\n")[:-1]
        assert reader.page.locator("#delta tbody tr").count() == len(found[unit])
    assert {k: len(v) for k, v in found.items()} == {"params": 2, "macs": 3, "any": 5}
    assert set(found["macs"]) == {"auto", "alds", "svd"}
    assert "alds, macs budget" in found["any"]
    reader.close_and_check()


def until(page: Any, true: Callable[[], bool]) -> bool:
    """Waits for it, ten seconds at most; the page's policy does not let the browser do that."""
    for _ in range(100):
        if true():
            return True
        page.wait_for_timeout(100)
    return False


SLOW = 600  # milliseconds: what comes later is a click of its own and not the second of two
UPRIGHT = "[...document.getElementById('chart-params').layout.yaxis.range]"
OPACITY = "document.getElementById('chart-params').data.map((trace) => [trace.meta, trace.opacity ?? 1])"


def test_a_method_is_lit_under_the_pointer_and_alone_after_a_double_click(reader: Reader) -> None:
    page = reader.page
    page.locator("#published").select_option("")
    chip = page.locator("#legend .chip", has_text="svd")
    chip.hover()
    assert {(name, value < 0.5) for name, value in page.evaluate(OPACITY)} == {("svd", False), ("auto", True)}
    page.locator("h1").hover()
    assert {value for _, value in page.evaluate(OPACITY)} == {1}
    chip.dblclick()
    assert {name for name, _ in page.evaluate(OPACITY)} == {"svd"}
    pressed = [c.get_attribute("aria-pressed") for c in page.locator("#legend [data-name]").all()]
    assert sorted(pressed) == ["false", "true"]
    chip.dblclick()
    assert {name for name, _ in page.evaluate(OPACITY)} == {"svd", "auto"}
    page.locator("#chart-params .points .point").first.hover(force=True)
    assert until(page, lambda: any(value < 0.5 for _, value in page.evaluate(OPACITY)))


def test_a_click_on_a_point_opens_its_runs_and_a_double_click_isolates(reader: Reader) -> None:
    page = reader.page
    page.locator("#published").select_option("")
    page.locator("#legend .chip", has_text="svd").click()  # hidden: what is clicked is auto
    point = page.locator("#chart-params .points .point").first
    point.click(force=True)
    page.locator("#dialog[open]").wait_for()
    assert "auto, asked to keep" in reader.text("#dialog-title")
    page.keyboard.press("Escape")
    page.locator("#legend .chip", has_text="svd").click()
    page.wait_for_timeout(SLOW)
    height = page.evaluate(UPRIGHT)
    point.dblclick(force=True)
    assert until(page, lambda: len({name for name, _ in page.evaluate(OPACITY)}) == 1)
    assert page.evaluate(UPRIGHT) == height, "the points stay under the pointer"
    assert page.locator("#dialog[open]").count() == 0


def test_a_double_click_beside_the_points_undoes_a_zoom(reader: Reader) -> None:
    page = reader.page
    spans = "[...document.getElementById('chart-params').layout.xaxis.range]"
    whole = page.evaluate(spans)
    page.evaluate(f"Plotly.relayout('chart-params', {{'xaxis.range': [{whole[0]}, {whole[1] / 2}]}})")
    page.wait_for_timeout(SLOW)
    area = page.locator("#chart-params .nsewdrag").bounding_box()
    page.mouse.dblclick(area["x"] + 4, area["y"] + 4)
    assert until(page, lambda: page.evaluate(spans) == whole)


def test_the_first_view_is_the_change_down_to_five_points(reader: Reader) -> None:
    page = reader.page
    assert reader.text("#vertical [aria-pressed=true]") == "Change"
    assert page.locator("#floor").input_value() == "5"
    low, high = page.evaluate("document.getElementById('chart-params').layout.yaxis.range")
    assert -5.5 < low < -5
    assert 0 < high < 1
    assert page.evaluate("(document.getElementById('chart-params').layout.annotations ?? []).length") == 0
    assert "1 network, 2 seeds" in reader.text("#facts")
    assert "predicted" not in reader.text("#totals")
    heads = [reader.text(f"{table} thead th") for table in ("#delta", "#runs-table")]
    assert heads[0].startswith("method")
    assert page.locator("#runs-table thead", has_text="method").count() == 1


def test_bands_stay_between_0_and_100(browser: Any, tmp_path: Path) -> None:
    rows = [row(asked=k, top1=t, repeat=r) for k, pair in ((0.5, (100, 97)), (0.2, (9, 0))) for r, t in enumerate(pair)]
    html.write_report(write(tmp_path / "r", rows), tmp_path / "report.html")
    reader = Reader(browser, tmp_path / "report.html")
    band = "document.getElementById('chart-params').data[0].y"
    for vertical, base in (("Change", 91.0), ("Accuracy", 0.0)):
        reader.page.locator("#vertical button", has_text=vertical).click()
        values = [base + value for value in reader.page.evaluate(band)]
        assert len(values) == 4
        assert (min(values), max(values)) == (pytest.approx(0), pytest.approx(100))
    reader.close_and_check()


def saved(page: Any, button: Any) -> list[list[str]]:
    with page.expect_download() as waiting:
        button.click()
    assert waiting.value.suggested_filename.endswith(".csv")
    return list(csv.reader(Path(waiting.value.path()).read_text().splitlines()))


def test_every_chart_and_table_is_a_csv_file_and_has_a_link(reader: Reader, results: Path) -> None:
    page = reader.page
    page.locator("#points summary").click()
    page.locator(".layer-name", has_text="conv2").click()
    for chart in page.locator(".chart").all():
        if chart.is_visible():
            assert chart.locator("xpath=ancestor::*[.//*[contains(@class, 'csv')]][1]").locator("a.mini").count() >= 1
    for table in page.locator("table").all():
        assert table.locator("xpath=ancestor::*[.//*[contains(@class, 'csv')]][1]").count() == 1
    points = saved(page, page.locator("#figure-params .csv"))
    assert len(points) == 1 + 6
    assert points[0][:3] == ["method", "budget in", "asked to keep"]
    assert {line[0] for line in points[1:]} == {"auto", "svd"}
    runs = saved(page, page.locator("#runs .csv"))
    assert len(runs) == 1 + 13
    page.locator("#shelf").select_option(label="auto")
    page.locator("#budget").fill("1")
    layers = saved(page, page.locator("#explorer .take .csv"))
    plan = plan_of(results, "auto", 0.4)
    assert [line[0] for line in layers[1:]] == [entry.name for entry in plan.layers]
    spectrum = saved(page, page.locator(".spectrum .csv"))
    assert spectrum[1] == ["conv2", "f│chw", "1", "1"]


def test_a_link_brings_back_what_was_chosen(reader: Reader, browser: Any, written: Path) -> None:
    page = reader.page
    page.locator("#stage button", has_text="compressed").click()
    page.locator("#vertical button", has_text="Accuracy").click()
    page.locator("#delta-unit button", has_text="CR-F").click()
    page.locator("#floor").select_option("0")
    page.locator("#legend .chip", has_text="svd").click()
    page.locator("#shelf").select_option(label="svd")
    page.locator("#budget").fill("2")
    page.locator(".layer-name", has_text="conv2").click()
    chosen = "[...document.querySelectorAll('[aria-pressed=true]')].map((n) => n.textContent).join()"
    shown = [page.evaluate(chosen), reader.text("#totals"), reader.text("#delta"), page.locator("#floor").input_value()]
    page.locator("#explorer h2 a").click()
    address = page.url
    assert "#explorer?" in address
    other = Reader(browser, written)
    other.page.goto("about:blank")
    other.page.goto(address)
    again = [other.page.evaluate(chosen), other.text("#totals"), other.text("#delta")]
    assert [*again, other.page.locator("#floor").input_value()] == shown
    assert other.page.locator(".layer-name[aria-expanded=true]").inner_text() == "conv2"
    assert other.page.evaluate("scrollY") > 300
    other.page.goto(address.split("#")[0] + "#within?panel=99&stage=x&hidden={&unit=constructor&method=-1")
    assert other.page.locator("#delta tbody tr").count() == 2, "an address that somebody changed is harmless"
    other.close_and_check()


def test_a_spreadsheet_computes_nothing(browser: Any, tmp_path: Path) -> None:
    html.write_report(write(tmp_path / "r", [row("=1+1"), row('a,"b')]), tmp_path / "report.html")
    reader = Reader(browser, tmp_path / "report.html")
    assert {line[0] for line in saved(reader.page, reader.page.locator("#figure-macs .csv"))[1:]} == {"'=1+1", 'a,"b'}
    reader.close_and_check()


def test_provenance_is_for_people(browser: Any, tmp_path: Path) -> None:
    one = row(**{"CR-P": 80.00088980505853, "settings": {"never_slower": True, "folds": ["a", "b"]}})
    html.write_report(write(tmp_path / "r", [one]), tmp_path / "report.html")
    reader = Reader(browser, tmp_path / "report.html")
    reader.page.locator("#runs-table .link").click()
    said = reader.text("#dialog-body")
    assert not re.search(r"\d\.\d{5,}", said)
    assert not re.search(r"\w·|_|\[|\{|top1", said)
    assert "original: top-1 (%)" in said
    assert "never slower\nyes" in said
    assert "a, b" in said
    reader.close_and_check()


def test_time_is_a_chart_where_it_was_measured(browser: Any, reader: Reader, tmp_path: Path) -> None:
    assert not reader.page.locator("#figure-latency").is_visible()
    rows = [row(asked=k, time={"ratio": k + 0.2, "measured": True}) for k in (0.3, 0.5)]
    html.write_report(write(tmp_path / "r", [*rows, row("svd")]), tmp_path / "report.html")
    timed = Reader(browser, tmp_path / "report.html")
    assert timed.page.locator("#figure-latency").is_visible()
    tops = timed.page.evaluate("[...document.querySelectorAll('figure')].map((figure) => figure.offsetTop)")
    assert len(tops) == 3
    assert len(set(tops)) == 1, "no hole beside the third chart"
    x = timed.page.evaluate("document.getElementById('chart-latency').data[0].x")
    assert sorted(x) == [pytest.approx(30), pytest.approx(50)]
    assert len(saved(timed.page, timed.page.locator("#figure-latency .csv"))) == 1 + 2
    timed.close_and_check()


def test_filters_are_no_ranks_and_whole_layers_have_their_macs(browser: Any, results: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch_pruning")
    model = networks.build("digits-cnn").eval()
    _, plan = rw.compress(model, torch.zeros(1, 1, 8, 8), method="ft", keep=0.5)
    folder = write(tmp_path / "r", [row("ft") | {"plan": "ft.json"}, row("auto") | {"plan": "auto.json"}])
    plan.save(folder / "ft.json")
    whole = plan_of(results, "auto", 0.6)
    whole.save(folder / "auto.json")
    html.write_report(folder, tmp_path / "report.html")
    reader = Reader(browser, tmp_path / "report.html")
    reader.page.locator("#shelf").select_option(label="ft")
    narrow = next(e for e in plan.pruned if e.filters is not None and len(e.shape) > 1)
    group = layer_of(reader.page, narrow.name)
    assert f"keeps {len(narrow.filters or ())} of {narrow.wide[0]} filters" in group.inner_text()
    assert group.locator(".rank").inner_text() == ""
    reader.page.locator("#shelf").select_option(label="auto")
    kept = [s for s in whole.kept if s.macs]
    assert kept
    for layer in kept:
        group = layer_of(reader.page, layer.name)
        assert f"{layer.macs:,}" in group.locator(".bars").nth(1).inner_text()
    reader.close_and_check()


def test_the_command_carries_weights_and_data(browser: Any, results: Path, tmp_path: Path) -> None:
    body = json.loads((results / "plans/auto-0.4.json").read_text())
    body["search"]["inputs"] = "calibration"
    fitted = row("fitted") | {"plan": "fitted.json", "weights": "weights/0.safetensors", "calibrate": 99}
    folder = write(tmp_path / "r", [fitted, row("plain") | {"plan": "plain.json"}])
    (folder / "fitted.json").write_text(json.dumps(body))
    (folder / "plain.json").write_text((results / "plans/svd-0.4.json").read_text())
    html.write_report(folder, tmp_path / "report.html")
    reader = Reader(browser, tmp_path / "report.html")
    reader.page.locator("#shelf").select_option(label="fitted")
    asked = "--weights r/weights/0.safetensors --plan plan.json --data digits --calibrate 99 --out out/"
    assert reader.text("#command") == f"rankwise compress digits-cnn {asked}"
    reader.page.locator("#shelf").select_option(label="plain")
    assert reader.text("#command") == "rankwise compress digits-cnn --weights FILE --plan plan.json --out out/"
    assert "FILE holds the weights" in reader.text("#command-note")
    reader.close_and_check()


def test_a_phone_shows_that_a_table_goes_on(browser: Any, written: Path) -> None:
    reader = Reader(browser, written, viewport={"width": 420, "height": 800}, has_touch=True)
    page = reader.page
    frame, region = page.locator("#runs-table .frame"), page.locator("#runs-table .scroll")
    assert "more-right" in str(frame.get_attribute("class"))
    assert page.locator("#runs-table .cue").is_visible()
    region.evaluate("(node) => node.scrollTo(node.scrollWidth, 0)")
    page.locator("#runs-table .frame:not(.more-right)").wait_for()
    assert "more-left" in str(frame.get_attribute("class"))
    widths = page.evaluate(
        """[...document.querySelectorAll(".controls > *, .tools > *")].filter((node) => node.checkVisibility())
        .map((node) => node.offsetWidth / node.parentElement.clientWidth)"""
    )
    assert all(width > 0.85 for width in widths), "no control leaves a hole beside it"
    reader.close_and_check()


def test_a_layer_shows_its_spectra(reader: Reader) -> None:
    name = reader.page.locator(".layer-name", has_text="conv2")
    name.focus()
    reader.page.keyboard.press("Enter")
    assert name.get_attribute("aria-expanded") == "true"
    data = reader.page.evaluate("document.querySelector('.spectrum .chart').data.map((t) => [t.name, t.y])")
    assert data == [["f│chw", [1, 0.5, 0.25]], ["fhw│c", [1, 0.1]]]
    reader.page.keyboard.press("Enter")
    assert reader.page.locator(".spectrum .chart").count() == 0


def test_everything_can_be_reached_and_has_a_name(reader: Reader) -> None:
    """Every control takes the focus and says what it is."""
    nameless = reader.page.evaluate(
        """[...document.querySelectorAll("button, select, input")].filter((node) => node.checkVisibility())
        .filter((n) => n.tabIndex < 0 || !(n.textContent.trim() || n.getAttribute("aria-label") ||
                       n.getAttribute("aria-labelledby") || n.labels?.length)).map((n) => n.outerHTML)"""
    )
    assert nameless == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_button(browser: Any, written: Path, scheme: str) -> None:
    reader = Reader(browser, written, color_scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    line = "document.getElementById('chart-params').data.at(-1).line.color"
    first = [reader.page.evaluate(paper), reader.page.evaluate(line)]
    assert (sum(map(int, first[0][4:-1].split(","))) < 200) == (scheme == "dark")
    reader.page.locator("#theme").click()
    second = [reader.page.evaluate(paper), reader.page.evaluate(line)]
    assert all(a != b for a, b in zip(first, second, strict=True))
    reader.page.reload()
    assert reader.page.evaluate(paper) == second[0], "the choice is remembered"
    reader.close_and_check()


def test_a_page_never_scrolls_sideways(browser: Any, results: Path, tmp_path: Path) -> None:
    long = row(label="a-very-long-label-without-any-space-" * 4, model="m" * 200, cell="c" * 200)
    folder = shutil.copytree(results, tmp_path / "r")
    (folder / "rows" / "long.json").write_text(json.dumps(long))
    html.write_report(folder, tmp_path / "report.html", title="t" * 200, paper=PAPER)
    reader = Reader(browser, tmp_path / "report.html", viewport={"width": 390, "height": 800}, has_touch=True)
    page = reader.page
    page.locator(".layer-name").first.click()
    page.locator("#points summary").click()
    for width in (390, 320, 760, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        for panel in ("0", "1"):
            page.locator("#panel").select_option(panel)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
    reader.close_and_check()


def test_names_are_never_run(browser: Any, results: Path, tmp_path: Path) -> None:
    """A network whose layer, label, file and everything else is called like a tag."""
    folder = shutil.copytree(results, tmp_path / "r")
    body = json.loads((folder / "plans/auto-0.4.json").read_text())
    first = next(e for e in body["layers"] if "fold" in e)
    first["name"] = body["model"] = EVIL
    (folder / "plans/evil.json").write_text(json.dumps(body))
    (folder / "spectra/evil.json").write_text(json.dumps({"model": EVIL, "layers": {EVIL: {EVIL: [1.0, 0.5]}}}))
    evil = dict.fromkeys(("study", "cell", "model", "data", "label", "method", "split"), EVIL)
    files = {"plan": "plans/evil.json", "spectra": "spectra/evil.json"}
    shutil.rmtree(folder / "rows")
    write(folder, [row() | evil | files | {EVIL: {EVIL: EVIL}, "provenance": {EVIL: EVIL}}, failed(EVIL, EVIL)])
    paper = [{**PAPER[0], "network": EVIL, "data": EVIL, "method": EVIL, "table": EVIL}]
    html.write_report(folder, tmp_path / "report.html", title=EVIL, paper=paper)
    reader = Reader(browser, tmp_path / "report.html")
    page = reader.page
    page.locator("#published").select_option(index=1)
    page.locator(".layer-name", has_text="onerror").click()
    page.locator("#points summary").click()
    point = page.locator("#chart-params .point").first
    point.hover(force=True)
    page.locator("#runs-table .link").first.click()
    assert EVIL in reader.text("#dialog")
    assert page.locator("img").count() == 0
    assert page.title() == EVIL
    assert EVIL in reader.text("h1")
    assert EVIL in reader.text("#legend")
    reader.close_and_check()


def test_only_failed_runs(browser: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "r", [failed("a", "no space left"), failed("b", "no space left")])
    html.write_report(folder, tmp_path / "report.html")
    reader = Reader(browser, tmp_path / "report.html")
    assert "No run has finished" in reader.text("header")
    assert reader.text("#runs-table").count("no space left") == 2
    reader.close_and_check()


def test_the_report_of_one_compression(browser: Any, results: Path, tmp_path: Path) -> None:
    model = networks.build("digits-cnn").eval()
    body = json.loads(plan_of(results, "auto", 0.4).dumps())
    body["warnings"] = [EVIL]
    body["search"]["latency"] = {"before": 0.002, "after": 0.001, "keep": 0.5, "layers": {"conv2": [0.001, 0.0005]}}
    scores = {"before": {"top1": 97.0, "n": 355}, "after": {"top1": 95.5, "n": 355}}
    trials = [{"asked": 0.5, "keep": 0.5, "drop": 0.5, "within": True}]
    trials += [{"asked": 0.01, "keep": None, "drop": None, "within": False}]
    found = {"plan": body, "scores": scores, "trials": trials, "time": {"dense": 0.002, "small": 0.001, "ratio": 0.5}}
    single.write_report(tmp_path / "report.html", found | {"out": EVIL}, model, single.About("digits", weights=EVIL))
    for width, scheme in ((1400, "light"), (420, "dark")):
        reader = Reader(
            browser, tmp_path / "report.html", viewport={"width": width, "height": 800}, color_scheme=scheme
        )
        page = reader.page
        assert "−1.50 points" in reader.text("#headline")
        after, before = body["after"]["params"], body["before"]["params"]
        assert f"{after:,} of {before:,}" in reader.text("#totals").replace("\n", " ")
        assert EVIL in reader.text("#warnings")
        assert "predicted" not in reader.text("#totals")
        assert page.locator("#comparisons tbody tr").count() == 2
        assert page.locator("#trials tbody tr").count() == 2
        page.locator(".layer-name", has_text="conv2").click()
        assert page.locator(".spectrum .chart .scatterlayer .trace").count() == 4
        assert "0.50 ms of 1.00 ms" in layer_of(page, "conv2").inner_text()
        layers = saved(page, page.locator("#every-layer .take .csv"))
        assert [line[0] for line in layers[1:]] == [entry["name"] for entry in body["layers"]]
        assert len(saved(page, page.locator("#before-after .csv"))) == 1 + 4
        with page.expect_download() as waiting:
            page.locator("#download").click()
        assert json.loads(Path(waiting.value.path()).read_text()) == body
        assert page.locator("section h2 a").count() == 6
        assert f"--weights '{EVIL}'".replace("'hacked'", "'\\''hacked'\\''") in reader.text("#commands dd:last-child")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("img").count() == 0
        reader.close_and_check()
    bare = tmp_path / "bare.html"
    single.write_report(bare, {"plan": json.loads(plan_of(results, "svd", 0.4).dumps())})
    reader = Reader(browser, bare)
    assert not reader.page.locator("#predicted, #tried").first.is_visible()
    reader.page.locator(".layer-name").first.click()
    assert "no spectra" in reader.text(".spectrum")
    assert "rankwise compress digits-cnn --weights FILE --plan plan.json" in reader.text("#commands")
    reader.close_and_check()


def test_commands_of_a_report_run_as_they_stand(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a network from a file: they carry its factory, its weights and the shape of an input."""
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(
        "from torch import nn\n\ndef own():\n"
        "    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval()\n"
    )
    flags = ["--input", "1,3,8,8", "--keep", "0.6", "--out", "small"]
    monkeypatch.setattr(outcome, "SECONDS", (0.0, 0.0))
    assert main(["compress", "net.py:own", *flags]) == 0
    reader = Reader(browser, tmp_path / "small" / "report.html")
    said = [shlex.split(text) for text in reader.page.locator("#commands dd").all_inner_texts()]
    commands = {words[1]: words[1:] for words in said if words[0] == "rankwise"}
    assert set(commands) == {"export", "bench", "retrain", "compress"}
    assert main(commands["export"]) == 0
    assert main(commands["compress"]) == 0
    assert (tmp_path / "again" / "plan.json").is_file()
    assert main([*commands["bench"], "--engines", "eager", "--batch", "1", "--threads", "1", "--repeats", "2"]) == 0
    assert commands["retrain"][-4:] == ["--base", "net.py:own", "--out", "retrained/"]
    reader.close_and_check()


def test_slower_is_said_as_such(browser: Any, results: Path, tmp_path: Path) -> None:
    body = json.loads(plan_of(results, "svd", 0.4).dumps())
    found = {"plan": body, "time": {"dense": 0.001, "small": 0.002, "ratio": 2.0}}
    single.write_report(tmp_path / "report.html", found, networks.build("digits-cnn"))
    reader = Reader(browser, tmp_path / "report.html")
    assert "2.00 ms, was 1.00 ms" in reader.text("#totals").replace("\n", " ")
    assert "2.00 times the original" in reader.text("#totals")
    assert "+100.00 %" in reader.text("#before-after")
    reader.close_and_check()
    html.write_report(write(tmp_path / "r", [row(time={"ratio": 1.5})]), tmp_path / "study.html")
    reader = Reader(browser, tmp_path / "study.html")
    assert "slower than the original" in reader.text("#bands")
    reader.close_and_check()
