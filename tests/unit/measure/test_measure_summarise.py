"""From records to a result: every metric of the table, success-only, with the number of samples behind it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_pdperf.measure.cell_result import CellResult, MetricValue
from pytest_pdperf.measure.records import RequestRecord, Status
from pytest_pdperf.measure.summarise import summarise
from pytest_pdperf.measure.table import METRICS
from pytest_pdperf.measure.window import steady_window, tokens_within
from pytest_pdperf.spec.workload import Cell, ClosedLoop, OpenLoop, Slo, Stream
from tests.unit.measure.measure_records import at, cell, loop, records, request


def metrics(made: list[RequestRecord], of: Cell | None = None) -> dict[str, MetricValue]:
    return summarise(records(made), of or cell(len(made)), "t").metrics


def test_every_metric_of_the_table_is_there_in_its_order() -> None:
    for made in (loop(8, 1), [request(status=Status.TIMEOUT)], loop(1, 1, tokens=1)):
        assert list(metrics(made)) == list(METRICS)


def test_a_perfect_loop() -> None:
    found = metrics(loop(64, 4), cell(64, 4))
    expected = {
        "ttft_ms_p50": 20, "ttft_ms_p95": 20, "ttft_ms_max": 20, "tpot_ms_p50": 10, "tpot_adjusted_ms_p50": 10,
        "itl_ms_p50": 10, "itl_ms_p99": 10, "itl_ms_mean": 10, "itl_per_token_ms_p99": 10, "e2e_ms_p50": 110,
        "output_tps": 4 * 10 / 0.11, "output_tps_wall": 640 / 1.76, "input_tps_wall": 512 / 1.76,
        "request_rate": 64 / 1.76, "stall_count": 0, "stall_total_ms": 0, "stall_longest_ms": 0, "zero_gap_share": 0,
        "client_lag_ms_p50": 0.01, "client_lag_ms_max": 0.01,
    }  # fmt: skip
    for name, value in expected.items():
        assert found[name].value == pytest.approx(value, rel=0.01), name
    assert found["ttft_ms_p50"].n == 64
    assert found["itl_ms_p50"].n == 64 * 9


def test_failures_enter_no_latency_and_no_throughput() -> None:
    """250 of 256 fail: percentiles of the six, their n, and the error rate beside them; never a zero."""
    good = [request([ttft], sent_ms=0) for ttft in (100, 110, 120, 130, 140, 150)]
    bad = [request([1], status=Status.ERROR_IN_STREAM, error="gone")] * 250
    result = summarise(records(good + bad), cell(256), "t")
    assert (result.requests, result.ok) == (256, 6)
    assert result.metrics["ttft_ms_p50"] == MetricValue(125.0, 6)
    assert result.metrics["ttft_ms_p95"].value == pytest.approx(147.5)
    assert result.status_counts == {"error_in_stream": 250, "ok": 6}
    assert result.errors == {"gone": 250}
    assert "250 of 256 requests failed (250 error_in_stream): gone" in result.invalid
    assert result.metrics["request_rate"].value == pytest.approx(6 / 0.15)


def test_warmups_are_left_out() -> None:
    slow = [request([30_000], warmup=True), request([35_000], warmup=True)]
    fast = [request([t]) for t in (120, 118, 121, 119)]
    found = metrics(slow + fast)
    assert (found["ttft_ms_max"].value, found["ttft_ms_max"].n) == (121, 4)
    assert found["output_tps_wall"].value == pytest.approx(4 / 0.121)


def test_nothing_measured_is_null_with_a_reason_never_zero() -> None:
    found = metrics([request(status=Status.RESET)])
    assert {v.value for v in found.values()} == {None}
    assert found["ttft_ms_p50"] == MetricValue(None, 0, "no sample")
    assert found["output_tps"] == MetricValue(None, 0, "no successful request")
    assert {v.n for v in found.values()} == {0}


def test_one_token_requests_do_not_drag_tpot_down() -> None:
    found = metrics([request([70]), request([40, 50, 60])])
    assert (found["tpot_ms_mean"].value, found["tpot_ms_mean"].n) == (10, 1)
    assert metrics([request([70])])["tpot_ms_p50"].value is None


def test_answers_in_one_piece_keep_e2e_and_tokens_only() -> None:
    buffered = request([500, 500, 500], not_streamed=True)
    found = metrics([request([40, 60]), buffered])
    assert (found["ttft_ms_p50"].value, found["ttft_ms_p50"].n) == (40, 1)
    assert "1 requests arrived in one piece" in found["itl_ms_p50"].note
    assert found["e2e_ms_max"].value == 500
    assert found["output_tps_wall"].value == pytest.approx(5 / 0.5)


def test_gaps_are_pooled_over_requests_not_averaged_per_request() -> None:
    """One stall of 500 ms among 209 gaps: pooled p99 is 10, only the maximum and the stalls show it."""
    made = []
    for gaps in ([10.0] * 99 + [500.0], [10.0] * 100, [10.0] * 9):
        events = [100.0]
        for gap in gaps:
            events.append(events[-1] + gap)
        made.append(request(events))
    found = metrics(made)
    assert found["itl_ms_p99"].value == pytest.approx(10)
    assert found["itl_ms_p99"].n == 209
    assert found["itl_ms_max"].value == pytest.approx(500)
    assert found["itl_ms_mean"].value == pytest.approx(12.3445, abs=1e-4)
    assert found["stall_count"].value == 1
    assert found["stall_longest_ms"].value == pytest.approx(500)


def test_p99_of_few_samples_says_so() -> None:
    found = metrics(loop(32, 1))
    assert found["ttft_ms_p95"].note == "n=32 < 59: interpolated towards the maximum"
    assert found["ttft_ms_p99"].note == "n=32 < 299: interpolated towards the maximum"
    assert found["ttft_ms_p50"].note == ""
    assert metrics(loop(59, 1))["ttft_ms_p95"].note == ""


def test_one_request_of_thirty_seconds() -> None:
    """Kept, flagged, and named as what stretches the wall time; p50 and p95 do not see it, p99 interpolates."""
    made = [request([i * 10 + 100], sent_ms=i * 10) for i in range(63)]
    made.append(request([30_600], sent_ms=600))
    result = summarise(records(made), cell(64), "t")
    found = result.metrics
    assert (found["ttft_ms_p50"].value, found["ttft_ms_p95"].value) == (100, 100)
    assert found["ttft_ms_p99"].value == pytest.approx(100 + 0.37 * 29_900)
    assert found["ttft_ms_max"].value == 30_000
    assert found["ttft_ms_mean"].value == pytest.approx(567.1875)
    assert any(line.startswith("outlier: ttft_ms max 30000 is over 20 x p95 100") for line in result.warnings)
    assert found["output_tps_wall"].note == "one straggler stretches the wall time 42.50 x"
    assert any(line.startswith("output_tps_wall: one straggler") for line in result.warnings)


def test_lag_of_the_client_stands_beside_the_numbers() -> None:
    made = [request([100, 110], lag_ms=lag) for lag in range(1, 101)]
    lag = summarise(records(made), cell(100), "t").client_lag_ms
    assert lag["p50"] == pytest.approx(50.5)
    assert lag["p99"] == pytest.approx(99.01, abs=0.02)
    assert lag["max"] == pytest.approx(100)


def test_the_last_of_few_requests_is_no_straggler() -> None:
    made = [request([i * 50 + 130], sent_ms=i * 50) for i in range(8)]
    assert metrics(made)["output_tps_wall"].note == ""


def test_a_straggler_needs_two_others_to_stand_out_from() -> None:
    fast, slow = [request([100]), request([100])], request([500])
    assert metrics([*fast, slow])["output_tps_wall"].note == "one straggler stretches the wall time 5.00 x"
    assert metrics([fast[0], slow])["output_tps_wall"].note == ""


@pytest.mark.parametrize(
    ("end_ms", "note"), [(1100, ""), (1200, "one straggler stretches the wall time 1.20 x")]
)
def test_a_straggler_stretches_by_more_than_a_tenth(end_ms: float, note: str) -> None:
    made = [request([100 * i + 100], sent_ms=100 * i) for i in range(10)]
    assert metrics([*made, request([end_ms], sent_ms=0)])["output_tps_wall"].note == note


@pytest.mark.parametrize(
    ("end_ms", "note"), [(400, ""), (410, "one straggler stretches the wall time 1.37 x")]
)
def test_a_straggler_takes_over_twice_the_usual_time(end_ms: float, note: str) -> None:
    made = [request([100 * i + 100], sent_ms=100 * i) for i in range(3)]
    assert metrics([*made, request([end_ms], sent_ms=200)])["output_tps_wall"].note == note


def test_share_of_events_that_came_together() -> None:
    found = metrics([request([40, 60, 60, 80, 80])])
    assert (found["zero_gap_share"].value, found["stall_longest_ms"].value) == (0.5, 0.0)


def test_goodput_needs_every_bound() -> None:
    slo = Slo(ttft_ms=100, tpot_ms=12, e2e_ms=300)
    made = [
        request([100, 112]),
        request([101, 112]),
        request([100, 113]),
        request([100.0 + 11 * i for i in range(20)]),
        request([90]),
        request([50, 50], not_streamed=True),
        request([50, 60], status=Status.SHORT),
    ]
    found = metrics(made, cell(7, slo=slo))
    assert found["goodput_share"] == MetricValue(pytest.approx(2 / 7), 7)  # type: ignore[arg-type]
    assert found["goodput_rps"].value == pytest.approx(2 / 0.309)
    assert metrics(made)["goodput_share"] == MetricValue(None, 0, "the workload has no SLO")


def test_send_lag_of_an_open_loop() -> None:
    made = [request([100], sent_ms=i, scheduled_ns=at(i - 2)) for i in (10, 20, 30)]
    assert metrics(made, cell(3, None))["send_lag_ms_p50"].value == pytest.approx(2)


def test_several_streams() -> None:
    shape = {"input_tokens": (8, 8), "output_tokens": 10, "requests": 8, "arrival": ClosedLoop(concurrency=1)}
    burst = Stream.model_validate(shape | {"name": "burst", "arrival": OpenLoop(rate_rps=1)})
    both = Cell(workload="w", id="c", streams=(Stream.model_validate(shape), burst))
    other = [replace(r, stream="burst") for r in loop(8, 1, ttft=70)]
    result = summarise(records(loop(8, 1) + other), both, "t")
    assert result.metrics["ttft_ms_p50"].value == pytest.approx(20)
    assert result.metrics["burst.ttft_ms_p50"].value == pytest.approx(70)
    assert result.streams["burst"]["ttft_ms_p50"] == result.metrics["burst.ttft_ms_p50"]
    assert result.requests == 16


def test_a_stream_without_requests_is_invalid() -> None:
    assert "stream 'main': no request was measured" in summarise(records([]), cell(), "t").invalid


@given(
    st.lists(
        st.tuples(
            st.floats(0, 5000),
            st.lists(st.floats(0, 500), max_size=12),
            st.sampled_from(list(Status)),
            st.booleans(),
            st.none() | st.integers(0, 30),
        ),
        max_size=12,
    ),
    st.sampled_from([1, 3, None]),
)
@settings(max_examples=150, deadline=None)
def test_any_records_give_finite_numbers_that_survive_json(
    made: list[tuple[float, list[float], Status, bool, int | None]], clients: int | None
) -> None:
    requests = []
    for i, (sent, steps, status, hidden, count) in enumerate(made):
        events = [sent]
        for step in steps:
            events.append(events[-1] + step)
        requests.append(
            request(events[1:], sent_ms=sent, status=status, not_streamed=hidden, count=count, index=i)
        )
    result = summarise(records(requests), cell(max(3, len(made)), clients, slo=Slo(ttft_ms=50)), "t")
    text = json.dumps(result.to_json(), allow_nan=False)
    assert CellResult.from_json(json.loads(text)) == result
    for name, value in result.metrics.items():
        assert value.value is None or value.n > 0, name
        assert value.value is None or value.value >= 0 or name.startswith("send_lag"), name


def test_results_that_are_not_finite_become_null_with_a_reason() -> None:
    for bad in (float("nan"), float("inf")):
        made = MetricValue(bad, 3, "odd").to_json()
        assert made == {"value": None, "n": 3, "note": f"odd; not finite: {bad}"}


def test_foreign_or_torn_results_are_refused() -> None:
    good = summarise(records(loop(4, 1)), cell(), "t").to_json()
    for change, message in (
        ({"schema": 99}, "schema 99"),
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"metrics": {"ttft_ms_p50": {"n": 1}}}, "not whole"),
        ({"metrics": None}, "not whole"),
    ):
        with pytest.raises(ValueError, match=message):
            CellResult.from_json(good | change)
    del good["requests"]
    with pytest.raises(ValueError, match="not whole"):
        CellResult.from_json(good)


def test_events_of_unknown_size_are_named_where_single_tokens_are_reported() -> None:
    found = metrics([request([10, 20], tokens=[0, 0], count=7), request([10, 30])])
    assert found["itl_per_token_ms_p50"] == MetricValue(
        20.0, 1, "1 requests do not say how many tokens an event has"
    )
    assert found["itl_ms_p50"] == MetricValue(15.0, 2)


def test_what_is_said_of_the_whole_cell() -> None:
    """Tokens count for failed requests too, as the server did the work; times are seconds."""
    made = [request([100, 110], prompt_tokens=9), request([100, 120], prompt_tokens=9)]
    made.append(request([50], status=Status.SHORT, prompt_tokens=7))
    result = summarise(records(made), cell(3), "t")
    assert (result.requests, result.ok) == (3, 2)
    assert (result.prompt_tokens, result.completion_tokens) == (25, 5)
    assert result.wall_s == pytest.approx(0.12)
    assert result.steady_window_s is None, "one wave has no steady window"
    assert result.metrics["input_tps_wall"].value == pytest.approx(18 / 0.12)
    assert result.metrics["output_tps_wall"].value == pytest.approx(4 / 0.12)
    steady = summarise(records(loop(64, 4)), cell(64, 4), "t").steady_window_s
    assert steady == pytest.approx(15 * 0.11, rel=0.001)


def test_failed_requests_take_part_in_the_window_and_give_no_tokens() -> None:
    made = loop(16, 2)
    made[7] = replace(made[7], status=Status.SHORT)
    window = steady_window(made, 2)
    good = [r for r in made if r.status is Status.OK]
    found = metrics(made, cell(16, 2))
    assert found["output_tps"].value == pytest.approx(tokens_within(good, window) / window.seconds)
    made[-1] = replace(made[-1], status=Status.SHORT)
    made[-2] = replace(made[-2], status=Status.SHORT)
    good = [r for r in made if r.status is Status.OK]
    found = metrics(made, cell(16, 2))
    assert found["output_tps"].value == pytest.approx(tokens_within(good, window) / window.seconds)


def test_stalls_are_counted_summed_and_their_longest_named() -> None:
    events = [100.0]
    for gap in [*[10.0] * 20, 100.0, 200.0]:
        events.append(events[-1] + gap)
    found = metrics([request(events)])
    assert (found["stall_count"].value, found["stall_total_ms"].value) == (2, 300)
    assert found["stall_longest_ms"].value == 200


def test_send_lag_is_positive_for_what_left_late() -> None:
    made = [request([100, 110], scheduled_ns=request(sent_ms=-2).sent_ns)]
    assert metrics(made)["send_lag_ms_p99"].value == pytest.approx(2)


def test_client_lag_is_known_with_kernel_stamps_only() -> None:
    made = [request([100, 110], lag_ms=3)]
    assert summarise(records(made), cell(1), "t").metrics["client_lag_ms_p50"].value == pytest.approx(3)
    other = summarise(records(made, stamp_source="user"), cell(1), "t").metrics
    assert other["client_lag_ms_p50"].value is None


def test_lag_is_that_of_good_answers() -> None:
    made = [request([100, 110], lag_ms=1), request([100, 110], lag_ms=50, status=Status.SHORT)]
    assert summarise(records(made), cell(2), "t").client_lag_ms["max"] == pytest.approx(1)


def test_bounds_of_an_slo_may_be_met_exactly() -> None:
    made = [request([100, 110])]
    slo = Slo(ttft_ms=100, tpot_ms=10, e2e_ms=110)
    found = metrics(made, cell(1, slo=slo))
    assert found["goodput_share"].value == 1
    assert found["goodput_rps"].value == pytest.approx(1 / 0.11)


def test_a_first_token_that_nobody_saw_keeps_no_bound() -> None:
    found = metrics([request([50, 50], not_streamed=True)], cell(1, slo=Slo(ttft_ms=100)))
    assert found["goodput_share"].value == 0


def test_no_more_clients_than_requests_were_ever_there() -> None:
    made = [request([i * 50 + 40], sent_ms=i * 50) for i in range(8)]
    assert metrics(made, cell(16, 16))["output_tps"].note.startswith("8 clients were never busy")


def test_the_mean_is_no_median_and_the_maximum_is_one() -> None:
    found = metrics([request([100]), request([100]), request([400])])
    assert (found["ttft_ms_mean"].value, found["ttft_ms_max"].value) == (200, 400)
