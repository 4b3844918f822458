"""Curves and δ-tables: laws that hold for any rows, against the definitions written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_rows import failed, row
from rankwise.reports import summary
from rankwise.reports.curves import DELTAS, UNITS, delta_table, panels

many_rows = st.lists(
    st.builds(
        row,
        st.sampled_from(["auto", "alds", "svd"]),
        st.sampled_from([0.1, 0.25, 0.5, 0.8]),
        st.floats(0, 100).map(lambda v: round(v, 2)),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=40,
    unique_by=lambda r: (r["label"], r["asked"], r["repeat"]),
)


def only_stage(rows: list[dict[str, Any]]) -> Any:
    (panel,) = panels(rows)
    (stage,) = panel.stages
    return stage


@given(many_rows)
def test_every_row_is_in_one_point_and_points_are_means(rows: list[dict[str, Any]]) -> None:
    points = [point for line in only_stage(rows).lines for point in line.points]
    assert sorted(i for point in points for i in point.rows) == list(range(len(rows)))
    for point in points:
        scores = [rows[i]["compressed"]["top1"] for i in point.rows]
        mean = sum(scores) / len(scores)
        assert point.score[0] == pytest.approx(mean, abs=1e-9)
        assert point.change[0] == pytest.approx(mean - 91.0, abs=1e-9)
        if len(scores) == 1:
            assert point.score[1] is None
        else:
            spread = math.sqrt(sum((s - mean) ** 2 for s in scores) / (len(scores) - 1))
            assert point.score[1] == pytest.approx(spread, abs=1e-9)


@given(many_rows, st.sampled_from(UNITS))
def test_the_delta_table_is_the_largest_cut_within_delta(rows: list[dict[str, Any]], unit: str) -> None:
    stage = only_stage(rows)
    table = delta_table(stage, unit)
    for line, cells in zip(stage.lines, table, strict=True):
        for delta, at in zip(DELTAS, cells, strict=True):
            allowed = [p.cut[unit][0] for p in line.points if p.change[0] >= -delta - 1e-9]
            assert (at is None) == (not allowed)
            if at is not None:
                assert line.points[at].cut[unit][0] == max(allowed)
                assert line.points[at].change[0] >= -delta - 1e-9


def test_a_loss_of_exactly_delta_counts() -> None:
    before, after = 70.4, 70.1
    assert after - before < -0.3, "binary fractions make it a little more than 0.3"
    rows = [row(top1=after, reference={"top1": before, "n": 10})]
    assert delta_table(only_stage(rows), "params", (0.0, 0.3 - 1e-6, 0.3)) == [[None, None, 0]]


def test_every_repeat_is_compared_with_its_own_reference() -> None:
    """Two networks, 90 and 80 %, that both lose one point: the change has no spread, the score has."""
    rows = [row(top1=s - 1, repeat=i, reference={"top1": s, "n": 9}) for i, s in enumerate((90.0, 80.0))]
    point = only_stage(rows).lines[0].points[0]
    assert point.change == (-1.0, 0.0)
    assert point.score[0] == 84.0
    assert point.score[1] > 7
    assert panels(rows)[0].reference[0] == 85.0


def test_a_sweep_over_retraining_counts_the_compressed_network_once() -> None:
    shares = (0.0, 0.25, 1.0)
    rows = [
        row(top1=80, mode="sweep", retrain={"share": s, "epochs": 4}, retrained={"top1": 80 + 10 * s}) for s in shares
    ]
    (panel,) = panels(rows)
    assert [s.share for s in panel.stages] == [None, 0.0, 0.25, 1.0]
    assert [len(s.lines[0].points[0].rows) for s in panel.stages] == [1, 1, 1, 1]
    assert [s.lines[0].points[0].score[0] for s in panel.stages] == [80, 80, 82.5, 90]


def test_lines_and_panels_never_mix() -> None:
    rows = [
        row(),
        row(unit="macs"),
        row(mode="iterate"),
        row(model="resnet20"),
        row(split="val"),
        row(study="another"),
        row(data="parquet:x"),
        row(data="parquet:y", dataset="y"),
    ]
    found = panels(rows)
    assert [p.data for p in found] == ["digits", "digits", "digits", "digits", "parquet:x", "y"]
    assert [len(p.stages[0].lines) for p in found] == [2, 1, 1, 1, 1, 1]


def test_iterations_are_lines_of_their_own_and_only_retrained() -> None:
    """What a round compresses was retrained before: it is no result of compressing alone."""
    again = {"retrained": {"top1": 85.0}, "retrain": {"share": 1.0, "epochs": 4}}
    (panel,) = panels([row(**again), row(mode="sweep", repeat=1, **again), row(mode="iterate", **again)])
    assert [s.when for s in panel.stages] == ["compressed", "retrained"]
    assert [[(la.mode, len(la.points[0].rows)) for la in s.lines] for s in panel.stages] == [
        [("oneshot", 2)],
        [("oneshot", 2), ("iterate", 1)],
    ]


def test_what_is_missing_is_left_out() -> None:
    rows = [
        failed("a", "why"),
        row("no macs", **{"CR-F": None, "macs": None}),
        row("no score", compressed=None),
        row("no reference", reference=None),
        row("no repeat", repeat=None, seed=None, retrain=None),
        row("no budget", asked=0.5) | {"asked": None},
    ]
    stage = only_stage(rows)
    assert {line.label for line in stage.lines} == {"no macs", "no repeat", "no budget"}
    assert stage.lines[0].points[0].cut == {"params": (50.0, None), "macs": None, "latency": None}
    assert delta_table(stage, "macs")[0] == [None] * 5
    assert panels([failed("a", "why")]) == []
    assert panels([]) == []


def test_segmentation_is_compared_by_mean_iou() -> None:
    body = {"top1": 99.0, "n": 4}
    rows = [row(reference={**body, "miou": 70.0}, compressed={**body, "miou": 65.0})]
    assert panels(rows)[0].metric == "miou"
    assert only_stage(rows).lines[0].points[0].change == (-5.0, None)


@given(many_rows)
def test_the_summary_writes_down_what_the_page_draws(rows: list[dict[str, Any]]) -> None:
    """Both are made from the same panels: a summary must lose no line, no point and no cell on the way."""
    stage = only_stage(rows)
    drawn = {
        (line.label, delta): None if at is None else line.points[at].cut["params"][0]  # type: ignore[index]
        for line, cells in zip(stage.lines, delta_table(stage, "params"), strict=True)
        for delta, at in zip(DELTAS, cells, strict=True)
    }
    told = {(entry["label"], entry["delta"]): entry["CR-P"] for entry in summary.delta_table(rows)}
    assert drawn == told
    lines = {line.label: [point.score[0] for point in line.points] for line in stage.lines}
    assert lines == {c["label"]: [p["final"]["mean"] for p in c["points"]] for c in summary.curves(rows)}


def test_a_network_that_was_not_retrained_is_measured_and_not_derived() -> None:
    again = {"retrained": {"top1": 85.0}, "retrain": {"share": 1.0, "epochs": 4}}
    both = [row(top1=80.0, **again), row(top1=81.0)]
    for rows in (both, both[::-1]):
        assert panels(rows)[0].stages[0].lines[0].points[0].score == (81.0, None)
