"""Where goodput peaks and who is ahead, from cells whose numbers are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_pdperf.measure.cell_result import CellResult, MetricValue
from pytest_pdperf.report.outcomes import CellOutcome
from pytest_pdperf.report.summary_json import json_schema
from pytest_pdperf.report.sweep import Standing, peak_of, peaks_of, standings_of, sweep_lines


def outcome(
    topology: str, clients: int, goodput: float | None, *, verdict: str = "PASS", launch: int = 1
) -> CellOutcome:
    metrics = {} if goodput is None else {"goodput_rps": MetricValue(goodput, 10)}
    cell = f"in512-out256-c{clients}"
    result = CellResult(
        workload="sweep", cell=cell, topology=topology, metrics=metrics, requests=10, ok=10, invalid=()
    )
    return CellOutcome(
        nodeid=f"{topology}-{cell}",
        order=0,
        topology=topology,
        kind="pd" if topology.startswith("pd") else "aggregated",
        engine="sim",
        launch=launch,
        result=result,
        verdict=verdict,
    )


@pytest.mark.parametrize(
    ("points", "peak", "at", "words"),
    [
        ({1: 1.0, 2: 2.0, 4: 3.0, 8: 1.0}, 4, 4, "at concurrency 4 (3.00 req/s)"),
        ({1: 1.0, 2: 2.0, 4: 3.0}, None, 4, "not reached up to concurrency 4, where it is 3.00 req/s"),
        ({1: 1.0, 2: 2.95, 4: 3.0, 8: 2.99}, 2, 4, "at concurrency 2 (2.95 req/s)"),
        ({1: 3.0, 2: 2.0, 4: 1.0}, 1, 1, "at concurrency 1 (3.00 req/s)"),
        ({1: 0.0, 2: 0.0}, None, 1, "no request kept the SLO"),
    ],
)
def test_the_peak_is_the_least_load_that_gives_nearly_all(
    points: dict[int, float], peak: int | None, at: int, words: str
) -> None:
    assert peak_of(points) == (peak, at, words)


def test_launches_are_averaged_and_what_cannot_be_read_is_left_out() -> None:
    cells = [outcome("pd-a", c, g) for c, g in ((1, 1.0), (2, 4.0), (4, 2.0))]
    cells.append(outcome("pd-a", 2, 2.0, launch=2))
    cells.append(outcome("pd-a", 8, 99.0, verdict="INVALID"))
    cells += [outcome("pd-b", 1, 1.0), outcome("pd-b", 2, 2.0), outcome("pd-b", 4, None)]
    (peak,) = peaks_of(cells)
    assert (peak.topology, peak.shape, peak.concurrency, peak.goodput_rps) == ("pd-a", "512/256", 2, 3.0)


def test_who_is_ahead_is_said_by_concurrency() -> None:
    pd = ((1, 1.0), (2, 2.0), (4, 4.0), (8, 6.0))
    plain = ((1, 2.0), (2, 2.01), (4, 3.0), (8, 1.0))
    cells = [outcome("pd-a", c, g) for c, g in pd] + [outcome("pd-b", c, 0.1) for c, _ in pd]
    cells += [outcome("agg", c, g) for c, g in plain]
    assert standings_of(cells) == [Standing("512/256", (4, 8), (1,), (2,), 2.0)]
    assert sweep_lines(cells)[-1] == (
        "512/256: goodput by concurrency: PD ahead at 4, 8, aggregated ahead at 1, neither at 2; "
        "largest of PD / largest of aggregated 2.00"
    )
    assert sweep_lines(cells)[1] == (
        "512/256 pd-b: goodput peaks at concurrency 1 (0.10 req/s); "
        "req/s by concurrency: 1: 0.1, 2: 0.1, 4: 0.1, 8: 0.1"
    )
    nowhere = standings_of(
        [outcome("pd-a", c, 0.0) for c in (1, 2, 4)] + [c for c in cells if c.topology == "agg"]
    )
    assert nowhere[0].line() == (
        "512/256: goodput by concurrency: PD ahead at none, aggregated ahead at 1, 2, 4; "
        "largest of PD / largest of aggregated 0.00"
    )
    assert standings_of([c for c in cells if c.kind == "pd"]) == []
    assert sweep_lines([outcome("pd-a", c, None) for c in (1, 2, 4)]) == []


def test_what_is_left_of_a_collapsed_goodput_puts_nobody_ahead() -> None:
    """Numbers of the simulator's sweep at 4096/128: 0.05 req/s against none is no win of PD's."""
    pd = ((1, 1.1), (8, 5.22), (32, 0.405), (128, 0.104), (256, 0.0522))
    plain = ((1, 1.22), (8, 6.77), (32, 12.3), (128, 3.58), (256, 0.0))
    cells = [outcome("pd-a", c, g) for c, g in pd] + [outcome("agg", c, g) for c, g in plain]
    (standing,) = standings_of(cells)
    assert (standing.pd, standing.aggregated, standing.equal) == ((), (1, 8, 32, 128), (256,))
    below = [outcome("pd-a", c, g) for c, g in ((1, 0.9), (8, 9.0), (32, 12.0))]
    below += [outcome("agg", c, g) for c, g in ((1, 0.5), (8, 9.0), (32, 12.0))]
    assert standings_of(below)[0].pd == (1,), "a small load has little goodput and counts all the same"


def test_both_copies_of_the_schema_are_the_same_and_know_the_sweep() -> None:
    assert "sweep" in json_schema()["properties"]
    docs = Path(__file__).parents[3] / "docs" / "schema" / "summary-1.json"
    package = Path(__file__).parents[3] / "pytest_pdperf" / "report" / "schema" / "summary-1.json"
    assert docs.read_text() == package.read_text()
