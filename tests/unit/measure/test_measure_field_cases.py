"""Latencies and validity, held to public bug reports: every input of a kind, with the answer that it must get."""

from __future__ import annotations

import heapq

import pytest

from pytest_pdperf.measure.records import RequestRecord
from pytest_pdperf.measure.samples import ttft_from_schedule_ms, ttft_ms
from pytest_pdperf.measure.summarise import summarise
from pytest_pdperf.measure.table import METRICS
from pytest_pdperf.measure.validity import cold_starts
from tests.field_cases import FieldCase, field_case
from tests.unit.measure.measure_records import at, cell, records, request


@field_case("020")
def test_020_one_request_that_waits_for_ever(case: FieldCase) -> None:
    *usual, late = case.given["ttft_ms"]
    tokens = case.given["output_tokens_each"]
    whole, short = case.given["wall_s_with"] * 1e3, case.given["wall_s_without"] * 1e3
    took = min(0.1 * short, late / 10) + usual[0]
    made = []
    for i, ttft in enumerate(usual):
        sent = (short - took) * i / (len(usual) - 1)
        made.append(request([sent + ttft, sent + took], sent_ms=sent, tokens=[1, tokens - 1], index=i))
    sent = whole - late - 1000
    made.append(request([sent + late, whole], sent_ms=sent, tokens=[1, tokens - 1], index=len(usual)))
    found = summarise(records(made), cell(len(made), None), "t")
    for name in ("p50", "p95", "p99", "max", "mean"):
        assert found.metrics[f"ttft_ms_{name}"].value == pytest.approx(case.want[f"{name}_ms"], rel=1e-6)
    rate = found.metrics["output_tps_wall"]
    assert rate.value == pytest.approx(case.want["throughput_tok_s_with"], rel=1e-6)
    assert "straggler" in rate.note and not METRICS["output_tps_wall"].gated, "no arm is called faster on it"
    flags = [line for line in found.warnings if line.startswith("outlier: ttft_ms max")]
    assert len(flags) == 1 and flags[0].endswith("repeat the cell")
    assert found.requests == len(made), "nothing is dropped in silence"
    rest = summarise(records(made[:-1]), cell(len(made) - 1, None), "t")
    assert rest.metrics["output_tps_wall"].value == pytest.approx(
        case.want["throughput_tok_s_without_outlier_req_and_time"], rel=1e-6
    )


def waves(requests: int, limit: int, first_ms: float, total_ms: float) -> list[RequestRecord]:
    """All due at 0, sent as a client's pool of `limit` connections lets them, to a server that never queues."""
    free = [0.0] * min(limit, requests)
    made = []
    for i in range(requests):
        sent = heapq.heappop(free)
        heapq.heappush(free, sent + total_ms)
        made.append(request([sent + first_ms, sent + total_ms], sent_ms=sent, index=i, scheduled_ns=at(0)))
    return made


def peak_of(made: list[RequestRecord]) -> int:
    moments = [(r.sent_ns, 1) for r in made] + [(r.end_ns or 0, -1) for r in made]
    open_now, peak = 0, 0
    for _, step in sorted(moments):
        open_now += step
        peak = max(peak, open_now)
    return peak


@field_case("029")
def test_029_what_waits_in_the_client_is_shown_and_not_judged(case: FieldCase) -> None:
    server, count = case.given["server"], case.given["requests"]
    for limit in case.given["client_pool_limit"]:
        want = case.want[f"limit_{limit}" if limit else "no_limit"]
        made = waves(count, limit or count, server["first_token_ms"], server["total_ms"])
        assert peak_of(made) == want["server_peak_in_flight"]
        found = summarise(records(made), cell(count, None), "t")
        assert found.metrics["ttft_from_schedule_ms_max"].value == want["max_ttft_from_schedule_ms"]
        assert found.metrics["ttft_ms_max"].value == want.get(
            "max_ttft_from_send_ms", server["first_token_ms"]
        )
        late = [line for line in found.invalid if "behind schedule, want 5 ms" in line]
        assert bool(late) == (limit is not None), "a client that was late is client-bound"
        closed = summarise(
            records(made, reached_concurrency={"main": peak_of(made)}),
            cell(count, case.given["concurrency"]),
            "t",
        )
        busy = [line for line in closed.invalid if "clients were busy at once" in line]
        assert bool(busy) == (limit is not None), "nor did it keep the concurrency that was asked for"


def test_a_closed_loop_has_no_schedule() -> None:
    assert ttft_from_schedule_ms(request()) is None
    assert ttft_from_schedule_ms(request([], scheduled_ns=at(0))) is None
    late = request([100.0, 110.0], sent_ms=40.0, scheduled_ns=at(0))
    assert (ttft_ms(late), ttft_from_schedule_ms(late)) == (60.0, 100.0)


def one_after_another(ttfts: list[float]) -> list[RequestRecord]:
    made, now = [], 0.0
    for i, ttft in enumerate(ttfts):
        made.append(request([now + ttft, now + ttft + 10], sent_ms=now, index=i))
        now += ttft + 10
    return made


@field_case("044")
def test_044_connections_are_paid_for_outside_of_the_cell(case: FieldCase) -> None:
    needed = case.want["needed_warmups"]
    for warmups in case.given["warmup_requests"]:
        left = case.given["ttft_ms"][warmups:]
        assert left == case.want["measured_from"][str(warmups)]
        made = one_after_another(left)
        assert list(cold_starts(made)) == left[: max(0, needed - warmups)]
        said = summarise(records(made), cell(len(made), 1), "t").warnings
        cold = [line for line in said if line.startswith("cold start: ")]
        assert bool(cold) == (warmups < needed)
        assert all(f"the first {needed - warmups} requests waited" in line for line in cold)


@pytest.mark.parametrize(
    ("ttfts", "cold"),
    [
        ([], 0),
        ([9000.0], 0),
        ([9000.0, 100.0], 1),
        ([100.0, 9000.0, 100.0, 100.0], 0),
        ([1999.0, 100.0, 100.0], 0),
        ([2001.0, 100.0, 100.0], 1),
        ([1000.0, 1.0, 1.0], 0),
        ([1001.1, 1.0, 1.0], 1),
        ([3000.0, 3000.0, 200.0, 200.0], 0),
        ([9000.0, 9000.0, 9000.0, 100.0], 0),
    ],
    ids=["none", "alone", "one", "not the first", "19.99 x", "20.01 x", "under a second more", "a second more",
         "15 x", "most of them"],
)  # fmt: skip
def test_what_a_cold_start_is(ttfts: list[float], cold: int) -> None:
    assert len(cold_starts(one_after_another(ttfts))) == cold


def test_the_order_of_sending_decides_and_answers_in_one_piece_say_nothing() -> None:
    made = one_after_another([9000.0, 100.0, 100.0])
    assert cold_starts(made[::-1]) == (9000.0,)
    hidden = [request([9000.0, 9000.0], not_streamed=True), *made[1:]]
    assert cold_starts(hidden) == ()
