"""The metric table: complete, consistent, and what the design asks of it."""

from __future__ import annotations

import re

import pytest

from pytest_pdperf.measure.table import HIGHER, LOWER, METRICS, P95_MIN_N, P99_MIN_N


def test_ids_are_their_keys_and_well_formed() -> None:
    for name, row in METRICS.items():
        assert row.id == name
        assert re.fullmatch(r"[a-z0-9_]+", name)
        assert row.label and row.definition and row.unit
        assert row.direction in (LOWER, HIGHER)


def test_direction_follows_the_unit() -> None:
    """TPOT listed as higher-is-better is a mistake that has been shipped elsewhere."""
    for row in METRICS.values():
        assert row.direction == (
            HIGHER if row.unit in ("tok/s", "req/s") or row.id == "goodput_share" else LOWER
        )


def test_only_gated_metrics_have_a_tolerance() -> None:
    for row in METRICS.values():
        assert row.gated == (row.tau is not None)
        assert row.prior_sd > 0


@pytest.mark.parametrize(
    ("name", "tau", "floor", "prior_sd"),
    [
        ("output_tps", 0.05, 0.0, 0.015),
        ("tpot_ms_p50", 0.05, 0.2, 0.01),
        ("e2e_ms_p50", 0.05, 1.0, 0.015),
        ("ttft_ms_p50", 0.10, 1.0, 0.07),
        ("itl_ms_p99", 0.10, 0.2, 0.04),
        ("ttft_ms_p95", 0.20, 1.0, 0.07),
    ],
)
def test_shipped_tolerances(name: str, tau: float, floor: float, prior_sd: float) -> None:
    row = METRICS[name]
    assert (row.tau, row.floor, row.prior_sd, row.gated) == (tau, floor, prior_sd, True)


def test_wall_throughput_is_never_gated() -> None:
    assert not METRICS["output_tps_wall"].gated


def test_smallest_sample_whose_maximum_bounds_the_percentile() -> None:
    assert 0.95**P95_MIN_N < 0.05 < 0.95 ** (P95_MIN_N - 1)
    assert 0.99**P99_MIN_N < 0.05 < 0.99 ** (P99_MIN_N - 1)
    for row in METRICS.values():
        expected = {95.0: P95_MIN_N, 99.0: P99_MIN_N}.get(row.percentile or 0.0, 1)
        assert row.min_n == expected, row.id
