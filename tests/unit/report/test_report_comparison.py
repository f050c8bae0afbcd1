"""Claims about two topologies: held, broken, or honestly undecided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_pdperf.gate.paired import Expectation, Standing
from pytest_pdperf.measure.cell_result import CellResult, MetricValue
from pytest_pdperf.report.comparison import answers, comparison_lines
from pytest_pdperf.report.outcomes import CellOutcome

CLAIM = Expectation(
    candidate="pd", reference="agg", cell="in*-c16", metric="itl_ms_p99", expect="at least 5x lower"
)


def outcome(
    topology: str, value: float | None, *, cell: str = "in8-c16", launch: int = 1, n: int = 500
) -> CellOutcome:
    result = CellResult(
        topology=topology,
        workload="w",
        cell=cell,
        metrics={"itl_ms_p99": MetricValue(value, n, "" if value else "no gap")},
        requests=10,
        ok=10,
    )
    return CellOutcome(
        nodeid=f"t[{topology}-{cell}]",
        order=0,
        topology=topology,
        kind="pd",
        engine="sim",
        launch=launch,
        result=result,
    )


@pytest.mark.parametrize(
    ("candidate", "reference", "standing"),
    [
        (10.0, 100.0, Standing.HOLDS),
        (30.0, 100.0, Standing.VIOLATED),
        (20.0, 100.0, Standing.UNDECIDED),
        (100.0, 10.0, Standing.VIOLATED),
    ],
)
def test_the_interval_decides_and_the_direction_counts(
    candidate: float, reference: float, standing: Standing
) -> None:
    (found,) = answers(CLAIM, [outcome("pd", candidate), outcome("agg", reference)])
    assert found.standing is standing
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(candidate / reference)
    assert "in8-c16" in found.line()


def test_every_cell_of_the_glob_gets_its_own_answer() -> None:
    rows = [
        outcome(t, v, cell=c)
        for c in ("in8-c16", "in9-c16", "in9-c1")
        for t, v in (("pd", 1.0), ("agg", 9.0))
    ]
    assert [a.expectation.cell for a in answers(CLAIM, rows)] == ["in8-c16", "in9-c16"]


def test_launches_are_the_replicates() -> None:
    rows = [outcome("pd", v, launch=i) for i, v in enumerate((9.0, 10.0, 11.0))]
    rows += [outcome("agg", v, launch=i) for i, v in enumerate((90.0, 110.0))]
    (found,) = answers(CLAIM, rows)
    assert found.ratio is not None
    assert found.ratio.launches == (3, 2)


GOOD = outcome("agg", 100.0)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "no such cell was measured on pd or agg"),
        ([GOOD], "pd: not measured in this run"),
        ([GOOD, outcome("pd", None)], "pd: itl_ms_p99 is not known (no gap)"),
        ([GOOD, outcome("pd", 0.0)], "which has no ratio"),
        ([GOOD, outcome("pd", 10.0, n=298)], "n=298 < 299"),
        ([GOOD, outcome("pd", 10.0, cell="in8-c1")], "pd: not measured in this run"),
    ],
)
def test_a_missing_side_is_undecided_and_says_why(rows: list[CellOutcome], why: str) -> None:
    (found,) = answers(CLAIM, rows)
    assert found.standing is Standing.UNDECIDED
    assert why in found.line()


def test_invalid_and_failed_launches_do_not_count() -> None:
    bad = outcome("pd", 10.0)
    invalid = replace(bad, result=replace(bad.result, invalid=("evidence: bypassed",)))
    (found,) = answers(CLAIM, [GOOD, invalid])
    assert found.standing is Standing.UNDECIDED
    assert "INVALID (evidence: bypassed)" in found.line()
    (found,) = answers(CLAIM, [GOOD, replace(bad, result=replace(bad.result, ok=9))])
    assert "1 of 10 requests failed" in found.line()
    (found,) = answers(CLAIM, [GOOD, invalid, replace(outcome("pd", 10.0), launch=2)])
    assert found.standing is Standing.HOLDS


def test_lines_show_every_gated_metric_of_both() -> None:
    lines = comparison_lines([outcome("pd", 10.0), GOOD], "pd", "agg")
    assert lines[1] == "w/in8-c16"
    assert lines[2].split()[:2] == ["itl_ms_p99", "0.1x"]
