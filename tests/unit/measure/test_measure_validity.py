"""When numbers may not be read: each reason alone, at its bound and just beyond it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_pdperf.measure.cell_result import CellResult
from pytest_pdperf.measure.records import CellRecords, Status
from pytest_pdperf.measure.summarise import summarise
from pytest_pdperf.spec.workload import Cell, ClosedLoop, Stream
from tests.unit.measure.measure_records import at, cell, loop, records, request


def invalid(
    made: CellRecords, requests: int, concurrency: int | None, *, think_s: float = 0.0
) -> tuple[str, ...]:
    return summarise(made, cell(requests, concurrency, think_s=think_s), "t").invalid


def test_a_perfect_loop_is_valid() -> None:
    assert invalid(records(loop(16, 4), reached_concurrency={"main": 4}), 16, 4) == ()


def test_any_failed_request() -> None:
    made = loop(16, 4)
    made[3] = replace(made[3], status=Status.SHORT, error="9 output tokens, planned 10")
    made[5] = replace(made[5], status=Status.TIMEOUT, error="late")
    (reason,) = invalid(records(made), 16, 4)
    assert reason.startswith("2 of 16 requests failed (1 short, 1 timeout): ")


@pytest.mark.parametrize(
    ("lag_ms", "gap_ms", "source", "valid"),
    [
        (0.99, 5, "user", True),
        (1.01, 5, "user", False),
        (1.9, 20, "user", True),
        (2.1, 20, "user", False),
        (30, 5, "kernel", True),
    ],
)
def test_user_space_stamps_must_not_be_late(lag_ms: float, gap_ms: float, source: str, valid: bool) -> None:
    """At most max(1 ms, 10 % of the median gap); kernel stamps do not care when they are read."""
    lag = (round(lag_ms * 1e6),) * 10
    made = [replace(r, event_lag_ns=lag) for r in loop(16, 4, gap=gap_ms)]
    reasons = invalid(records(made, stamp_source=source), 16, 4)
    assert (reasons == ()) == valid
    assert valid or "client lag p99" in reasons[0]


def test_user_space_stamps_report_no_kernel_lag_metric() -> None:
    result = summarise(records(loop(4, 1), stamp_source="user"), cell(), "t")
    assert result.metrics["client_lag_ms_p99"].value is None
    assert result.client_lag_ms["p99"] is not None


def test_a_clock_that_was_set_during_the_run() -> None:
    """Stamps are of the system clock: a step makes one gap negative or far too long."""
    (reason,) = invalid(records(loop(16, 4), clock_step_ms=-250.0), 16, 4)
    assert reason == "the system clock was set -250.0 ms during the run: times across it are wrong"


def test_concurrency_that_was_never_reached() -> None:
    (reason,) = invalid(records(loop(16, 3), reached_concurrency={"main": 3}), 16, 4)
    assert reason == "stream 'main': 3 of 4 clients were busy at once"


@pytest.mark.parametrize(("pause", "valid"), [(5.0, True), (30.0, False)])
def test_concurrency_that_was_not_kept(pause: float, valid: bool) -> None:
    """110 ms requests: 5 ms between them keeps 96 % of the clients busy, 30 ms keeps 79 %."""
    made = records(loop(40, 4, pause=pause), reached_concurrency={"main": 4})
    assert (invalid(made, 40, 4) == ()) == valid
    assert invalid(made, 40, 4, think_s=0.03) == ()


@pytest.mark.parametrize(("late_ms", "valid"), [(4.9, True), (5.2, False)])
def test_open_loop_must_be_sent_on_time(late_ms: float, valid: bool) -> None:
    made = [
        request([i * 100 + 20, i * 100 + 30], sent_ms=i * 100, scheduled_ns=at(i * 100 - late_ms))
        for i in range(10)
    ]
    reasons = invalid(records(made), 10, None)
    assert (reasons == ()) == valid
    assert valid or "behind schedule" in reasons[0]


def test_a_measurement_of_an_instant() -> None:
    (reason,) = invalid(records([request([20, 30])]), 1, 1)
    assert reason == "measured for 30.0 ms only, want 50 ms"


def test_warnings_stand_beside_valid_numbers() -> None:
    made = [replace(r, prompt_tokens=None) for r in loop(16, 4)]
    made[0] = replace(made[0], not_streamed=True)
    result = summarise(records(made, warnings=("from the worker",)), cell(16, 4), "t")
    assert result.invalid == ()
    assert result.warnings == (
        "from the worker",
        "16 answers have no prompt token count: their prompt lengths are unverified",
        "1 answers arrived in one piece: something between buffers the stream",
    )


def test_one_event_in_two_hundred_does_not_decide() -> None:
    """The lag and schedule rules look at p99, not at the worst single event."""
    made = loop(20, 4)
    made[7] = replace(made[7], event_lag_ns=(round(50e6), *made[7].event_lag_ns[1:]))
    assert invalid(records(made, stamp_source="user"), 20, 4) == ()
    result = summarise(records(made), cell(20, 4), "t")
    assert result.warnings == ()
    late = [
        request([i * 10 + 20, i * 10 + 30], sent_ms=i * 10, scheduled_ns=at(i * 10 - (50 if i == 7 else 0)))
        for i in range(200)
    ]
    assert invalid(records(late), 200, None) == ()


def both() -> Cell:
    """Two streams."""
    shape = {
        "input_tokens": (8, 8),
        "output_tokens": 10,
        "requests": 30,
        "arrival": ClosedLoop(concurrency=1),
    }
    return Cell(
        workload="w",
        id="c",
        streams=(Stream.model_validate(shape), Stream.model_validate(shape | {"name": "burst"})),
    )


def test_reasons_and_warnings_name_their_stream() -> None:
    burst = [replace(r, stream="burst") for r in loop(30, 1)]
    burst[3] = replace(burst[3], status=Status.RESET, error="gone")
    burst[9] = replace(burst[9], event_ns=tuple(stamp + 2_000_000_000 for stamp in burst[9].event_ns))
    result = summarise(records(loop(30, 1) + burst), both(), "t")
    assert result.invalid == ("stream 'burst': 1 of 30 requests failed (1 reset): gone",)
    assert [line.partition(" is over")[0] for line in result.warnings] == ["outlier: burst.ttft_ms max 2020"]


def test_counts_that_are_no_counts_of_single_tokens_are_told() -> None:
    made = loop(16, 4)
    made[0] = replace(made[0], token_count_source="chunks")
    made[1] = replace(made[1], output_tokens=40, event_tokens=(4,) * 10)
    made[2] = replace(made[2], output_tokens=20, event_tokens=(2,) * 10)
    made[3] = replace(made[3], output_tokens=9, event_tokens=(0,) * 10)
    assert summarise(records(made), cell(16, 4), "t").warnings == (
        "1 answers have no usage and no token ids: their events are counted as tokens",
        "1 answers have more events with content than tokens by the server's count: one is wrong",
        "2 answers bring 3 tokens an event: itl_ms are gaps between events, tpot_ms and itl_per_token_ms are per token",
    )


@pytest.mark.parametrize(
    ("requests", "merged", "valid"),
    [(20, 0, True), (20, 5, True), (20, 6, False), (32, 1, True), (32, 2, False)],
)
def test_segments_merged_under_one_stamp(requests: int, merged: int, valid: bool) -> None:
    """A client kept from reading sees several events arrive together. Of 200 events only the p95 is gated, which 2.5 %
    of them can move; of 320 the p99, which 0.5 % can.
    """
    made = loop(requests, 4)
    assert sum(len(r.event_ns) for r in made) == 10 * requests
    result = summarise(records(made, merged_segments=merged), cell(requests, 4), "t")
    assert (result.invalid == ()) == valid
    assert len(result.warnings) == (merged > 0)


def test_on_shared_cores_a_late_client_makes_a_cell_inconclusive_and_failures_stay_invalid() -> None:
    good = records([request([10.0 + 10 * i for i in range(20)])])
    late = replace(good, merged_segments=5)
    alone, shared = (
        summarise(late, cell(1, 1), "t", shared_cores=shared_cores) for shared_cores in (False, True)
    )
    assert any("too little CPU" in reason for reason in alone.invalid)
    assert not alone.inconclusive
    assert shared.inconclusive == alone.invalid
    assert not shared.invalid
    assert CellResult.from_json(shared.to_json()) == shared
    failed = replace(records([request([10.0], status=Status.RESET)]), merged_segments=5)
    assert any("failed" in reason for reason in summarise(failed, cell(1, 1), "t", shared_cores=True).invalid)
