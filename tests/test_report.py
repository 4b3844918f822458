"""The demo and its report, looked at in a real browser where there is one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankwise import demo, networks
from rankwise.evaluate import evaluate

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A short demo: two methods, two keeps."""
    patch = pytest.MonkeyPatch()
    patch.setattr(demo, "METHODS", ("auto", "svd"))
    patch.setattr(demo, "KEEPS", (0.6, 0.25))
    patch.setattr(demo, "RETRAIN", 2)
    out = tmp_path_factory.mktemp("demo")
    yield out, demo.run_demo(out)
    patch.undo()


def test_rows_are_files_with_their_provenance(story: tuple[Path, dict[str, Any]]) -> None:
    out, result = story
    rows = [json.loads(p.read_text()) for p in sorted((out / "rows").iterdir())]
    assert len(rows) == len(result["rows"]) == 4
    assert all(row["keep"]["params"] <= row["asked"] for row in rows)
    assert all({"torch", "python", "machine", "rankwise"} <= set(row["provenance"]) for row in rows)


def test_the_story_holds(story: tuple[Path, dict[str, Any]]) -> None:
    """Trained well; retraining brings `auto` back; `auto` beats `svd` without retraining."""
    _, result = story
    rows = {(r["method"], r["asked"]): r for r in result["rows"]}
    assert result["reference"]["top1"] > 95
    assert rows["auto", 0.6]["retrained"]["top1"] > 95
    assert rows["auto", 0.6]["compressed"]["top1"] > rows["svd", 0.6]["compressed"]["top1"]


def test_the_compressed_folder_opens(story: tuple[Path, dict[str, Any]]) -> None:
    from rankwise import data

    out, result = story
    shown = next(r for r in result["rows"] if (r["method"], r["asked"]) == demo.SHOWN)
    score = evaluate(networks.build(str(out / "compressed")), data.load("digits", "test"))
    assert score.top1 == shown["retrained"]["top1"]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_page_draws_its_charts_offline(story: tuple[Path, dict[str, Any]]) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    out, _ = story
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        complaints: list[str] = []
        requests: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto((out / "report.html").as_uri())
        page.wait_for_selector(".js-plotly-plot .main-svg")
        assert page.locator(".js-plotly-plot").count() == 4
        assert page.locator("table").count() == 2
        assert page.locator("table").first.locator("tbody tr").count() == 4
        browser.close()
    assert complaints == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requests)
