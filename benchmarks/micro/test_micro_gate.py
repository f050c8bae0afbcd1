"""What the gate costs for a cell: nothing beside a launch, however long the baseline has grown."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pytest_pdperf.gate.adapter import judge
from pytest_pdperf.gate.baseline import CellBaseline, Launch, Pin
from pytest_pdperf.gate.fingerprint import CellRef
from pytest_pdperf.gate.verdict import CellVerdict, Verdict
from pytest_pdperf.measure.cell_result import MetricValue
from pytest_pdperf.spec.tolerances import Tolerances
from tests.unit.report.report_data import result

VALUES = {
    "ttft_ms_p50": 120.0,
    "ttft_ms_p95": 180.0,
    "tpot_ms_p50": 13.5,
    "itl_ms_p99": 17.0,
    "e2e_ms_p50": 3600.0,
    "output_tps": 1040.0,
}
START = datetime(2025, 3, 1, 2, tzinfo=UTC)


def baseline(launches: int) -> CellBaseline:
    """A pin whose launches differ by a per mille or so."""
    made = tuple(
        Launch(
            id=f"n{night}",
            date=START + timedelta(days=night),
            values={name: value * (1 + 0.001 * (night % 3)) for name, value in VALUES.items()},
            n=dict.fromkeys(VALUES, 1000),
        )
        for night in range(launches)
    )
    pin = Pin(key="k", workload_digest="d", launches=made, status="current", reason="first", digest="x")
    return CellBaseline(CellRef("fixed-shapes", "in512-out256-c16", "d"), pin)


@pytest.mark.benchmark(group="gate")
@pytest.mark.parametrize("launches", [2, 30])
def test_judging_a_cell(benchmark: BenchmarkFixture, launches: int) -> None:
    """Stage 1 over all gated metrics."""
    stored = baseline(launches)
    metrics = {name: MetricValue(value, 1000) for name, value in VALUES.items()}
    measured = replace(result("in512-out256-c16"), metrics=metrics)
    verdict: CellVerdict = benchmark(
        judge, measured, stored, {}, Tolerances(), taken=START + timedelta(days=launches + 1)
    )
    assert verdict.verdict in (Verdict.PASS, Verdict.NOISY)
    assert {row.metric for row in verdict.rows} >= {"ttft_ms_p50", "output_tps"}
