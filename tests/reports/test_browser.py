"""The report in a real browser without a network: every part of it is used as a reader would, and nothing complains."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rankwise as rw
from made_rows import failed, row, with_plans, write
from rankwise.__main__ import main
from rankwise.reports import html

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
            group = page.locator(".layer-group", has_text=choice.name)
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
