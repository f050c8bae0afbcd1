"""The benchmark's own arithmetic: a yardstick that is wrong would praise anything."""

from __future__ import annotations

import pytest

from benchmarks.client.load import Load, Report
from benchmarks.client.score import score

MS = 1_000_000
LOAD = Load(streams=1, requests=2, tokens=3, ttft_ms=50, itl_ms=10)
TRUTH = {"a": [0, 50 * MS, 60 * MS, 70 * MS], "b": [100 * MS, 150 * MS, 160 * MS, 180 * MS], "probe": [0, 1]}


def test_a_perfect_client() -> None:
    rows = {name: TRUTH[name] for name in ("a", "b")}
    found = score(LOAD, Report(rows, 6e-6, []), TRUTH)
    assert (found.events, found.event_max, found.ttft_p99, found.itl_p99_error) == (6, 0, 0, 0)
    assert found.ttft_true_p50 == 50
    assert found.cpu_us_per_event == pytest.approx(1)
    assert (found.lag_p50, found.bytes_per_event) == (None, None)


def test_a_late_client() -> None:
    rows = {"a": [0, 51 * MS, 61 * MS, 71 * MS], "b": [98 * MS, 151 * MS, 161 * MS, 191 * MS]}
    found = score(LOAD, Report(rows, 0.0, [2 * MS]), TRUTH)
    assert (found.event_p50, found.event_max) == (1, 11)
    assert (found.ttft_p50, found.lag_p50) == (2, 2)
    assert found.itl_p99_error == pytest.approx((30 - 0.03 * 20) / (20 - 0.03 * 10) - 1, abs=1e-3)


def test_what_server_and_scheduler_did_stands_apart() -> None:
    """The server's second gap in `b` is twice its schedule: ten ms behind, whatever the client reports."""
    rows = {name: TRUTH[name] for name in ("a", "b")}
    found = score(LOAD, Report(rows, 0.0, [], waited_s=0.003), TRUTH)
    assert found.server_late_p99 == pytest.approx(0.95 * 10)
    assert found.waited_ms == 3
    assert score(LOAD, Report(rows, 0.0, []), TRUTH).waited_ms is None


def test_a_program_that_reports_durations() -> None:
    report = Report({}, 0.0, [], ttft_ms={"a": 53.0, "b": 49.0}, gaps_ms={"a": [10, 10], "b": [10, 20]})
    found = score(LOAD, report, TRUTH)
    assert (found.ttft_p50, found.itl_p99_error, found.event_p50) == (2, 0, None)


@pytest.mark.parametrize(
    "rows",
    [
        {"a": TRUTH["a"]},
        {"a": TRUTH["a"], "x": TRUTH["b"]},
        {"a": TRUTH["a"], "b": TRUTH["b"][:-1]},
        {"a": [*TRUTH["a"], 5], "b": TRUTH["b"]},
    ],
)
def test_lost_and_invented_events_are_refused(rows: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match=r"requests are known|events, \d were sent"):
        score(LOAD, Report(rows, 0.0, []), TRUTH)
