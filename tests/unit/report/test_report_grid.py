"""Columns, references and the better of two: what stands beside what in a comparison."""

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_pdperf.report.grid import best_of, build_grid, metric_of, worsening
from pytest_pdperf.report.outcomes import CellOutcome
from pytest_pdperf.report.source import Hole, Run
from tests.unit.report.report_data import outcome


def run(name: str, *outcomes: CellOutcome, holes: tuple[Hole, ...] = ()) -> Run:
    return Run(name=name, folder=Path(name), outcomes=outcomes, holes=holes)


def test_cells_keep_their_order_and_holes_are_filled_in() -> None:
    grid = build_grid([run("a", outcome("in512-out256-c4"), outcome("in512-out256-c1", "aggregated-3x"))])
    assert [row.cell for row in grid.rows] == ["in512-out256-c4", "in512-out256-c1"]
    assert [(row.shape, row.concurrency) for row in grid.rows] == [("512/256", 4), ("512/256", 1)]
    missing = [(s.topology, e.reason) for row in grid.rows for s, e in row.entries if isinstance(e, Hole)]
    assert missing == [("aggregated-3x", "not measured in this run"), ("pd-1p2d", "not measured in this run")]
    assert [row.concurrency for row in grid.shapes()["512/256"]] == [1, 4]


@pytest.mark.parametrize(
    ("cell", "shape", "concurrency"),
    [
        ("in4096-8192-out64-c4", "4096-8192/64", 4),
        ("in512-out256-poisson4rps", "", None),
        ("mixed", "", None),
        ("in512-out256-c4-think2s", "", None),
    ],
)
def test_shapes_are_read_from_ids(cell: str, shape: str, concurrency: int | None) -> None:
    (row,) = build_grid([run("a", outcome(cell))]).rows
    assert (row.shape, row.concurrency) == (shape, concurrency)


def test_labels_differ_where_runs_share_topologies_and_launches() -> None:
    runs = [run("a", outcome(), outcome(launch=2)), run("a", outcome()), run("b", outcome(topology="pd-x"))]
    grid = build_grid(runs)
    labels = [series.label for series in grid.series]
    assert labels == ["pd-1p2d (a, 1)", "pd-1p2d (a, 1) #2", "pd-1p2d (a, 2)", "pd-x"]
    assert [series.colour for series in grid.series] == [0, 0, 1, 2]


def served(name: str, engine: str, version: str, *, topology: str = "pd-1p2d") -> Run:
    one = replace(outcome(topology=topology), engine=engine)
    return replace(run(name, one), environments={topology: {"versions": {"engine": version}}})


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        ([served("a", "vllm", "0.26.0"), served("b", "sglang", "0.5.17")], ["vllm", "sglang"]),
        ([served("a", "vllm", "0.26.0"), served("b", "vllm", "0.27.0")], ["vllm 0.26.0", "vllm 0.27.0"]),
        ([served("a", "vllm", "0.26.0"), served("b", "vllm", "0.26.0")], ["a", "b"]),
        ([served("a", "vllm", "0.26.0"), run("b", outcome())], ["a", "b"]),
    ],
)
def test_runs_of_one_topology_are_known_by_the_least_that_tells_them_apart(
    runs: list[Run], labels: list[str]
) -> None:
    elsewhere = served("c", "vllm", "0.26.0", topology="pd-mooncake")
    grid = build_grid([*runs, elsewhere])
    assert [s.label for s in grid.series] == [*(f"pd-1p2d ({name})" for name in labels), "pd-mooncake"]


def test_within_a_run_pd_is_held_against_aggregated() -> None:
    grid = build_grid([run("a", outcome(), outcome(topology="aggregated-3x"))])
    pd, aggregated = grid.series
    assert grid.reference(pd) is aggregated
    assert grid.reference(aggregated) is None


def test_between_runs_a_topology_is_held_against_itself() -> None:
    first = run("a", outcome(), outcome(topology="aggregated-3x"))
    second = run("b", outcome(), outcome(topology="aggregated-3x"), outcome(topology="pd-2p1d"))
    grid = build_grid([first, second])
    by_label = {series.label: series for series in grid.series}
    assert grid.reference(by_label["pd-1p2d (b)"]) is by_label["pd-1p2d (a)"]
    assert grid.reference(by_label["aggregated-3x (b)"]) is by_label["aggregated-3x (a)"]
    assert grid.reference(by_label["pd-2p1d"]) is by_label["aggregated-3x (b)"]


def test_topologies_of_different_runs_are_held_against_the_aggregated_one() -> None:
    for order in (1, -1):
        runs = [run("a", outcome()), run("b", outcome(topology="aggregated-2x"))][::order]
        grid = build_grid(runs)
        by_label = {series.label: series for series in grid.series}
        assert grid.reference(by_label["pd-1p2d"]) is by_label["aggregated-2x"]
        assert grid.reference(by_label["aggregated-2x"]) is None


def test_launches_of_the_reference_are_not_held_against_it() -> None:
    grid = build_grid(
        [run("a", outcome(topology="aggregated-2x"), outcome(topology="aggregated-2x", launch=2))]
    )
    assert [grid.reference(series) for series in grid.series] == [None, None]


def test_the_better_value_follows_the_metrics_direction() -> None:
    a = outcome(ttft_ms_p50=10.0, output_tps=100.0)
    b = outcome(topology="aggregated-3x", ttft_ms_p50=20.0, output_tps=200.0)
    (row,) = build_grid([run("a", a, b)]).rows
    fast, wide = best_of(row, "ttft_ms_p50"), best_of(row, "output_tps")
    assert fast is not None and fast.topology == "pd-1p2d"
    assert wide is not None and wide.topology == "aggregated-3x"


def test_nothing_is_better_when_equal_alone_or_invalid() -> None:
    same = [outcome(ttft_ms_p50=10.0), outcome(topology="aggregated-3x", ttft_ms_p50=10.0)]
    alone = [outcome(ttft_ms_p50=10.0), outcome(ttft_ms_p50=11.0, launch=2)]
    invalid = [
        outcome(ttft_ms_p50=10.0, verdict="INVALID"),
        outcome(topology="aggregated-3x", ttft_ms_p50=20.0),
    ]
    for outcomes in (same, alone, invalid):
        (row,) = build_grid([run("a", *outcomes)]).rows
        assert best_of(row, "ttft_ms_p50") is None


def test_worse_is_positive_in_both_directions() -> None:
    assert worsening("ttft_ms_p50", 110, 100) == pytest.approx(0.1)
    assert worsening("output_tps", 90, 100) == pytest.approx(0.1)
    assert worsening("ttft_ms_p50", 1, 0) is None


def test_a_value_that_was_not_measured_is_none() -> None:
    assert metric_of(outcome(ttft_ms_p50=None), "ttft_ms_p50") is None
    assert metric_of(outcome(ttft_ms_p50=1.0), "tpot_ms_p50") is None
