"""What the load process tells while it runs comes from the stamps that it keeps anyway."""

from dataclasses import asdict

import orjson

from pytest_pdperf.load.exchange import End, Exchange
from pytest_pdperf.load.progress import RECENT, Gauge, Progress, ended_well

MS = 1_000_000


def exchange(ttft_ms: int, gaps_ms: int, reads: int, tokens: int = 4) -> Exchange:
    one = Exchange("main", 0, False, 8, tokens, sent_ns=1000 * MS, status=200, end=End.COMPLETE)
    for number in range(reads):
        at = one.sent_ns + (ttft_ms + number * gaps_ms) * MS
        one.mark(at, at + 7 * MS)
    return one


def test_times_are_the_kernels_and_of_requests_that_have_them() -> None:
    gauge = Gauge()
    gauge.finished(exchange(50, 10, 4))
    gauge.finished(exchange(70, 0, 1))
    gauge.finished(exchange(0, 0, 0))
    assert gauge.ttft_ms() == (50.0, 70.0)
    assert gauge.itl_ms() == (10.0,)


def test_tokens_are_planned_ones_when_finished_and_reads_before() -> None:
    gauge = Gauge()
    gauge.finished(exchange(5, 1, 2, tokens=40))
    assert gauge.tokens([]) == 40
    assert gauge.tokens([exchange(5, 1, 3, tokens=40), exchange(5, 1, 50, tokens=40)]) == 40 + 3 + 40


def test_a_new_phase_starts_over_and_only_the_latest_are_told() -> None:
    gauge = Gauge()
    for number in range(RECENT + 5):
        gauge.finished(exchange(number + 1, 1, 2))
    assert gauge.ttft_ms()[0] == 6.0
    assert len(gauge.ttft_ms()) == RECENT
    gauge.restart()
    assert (gauge.ttft_ms(), gauge.itl_ms(), gauge.tokens([])) == ((), (), 0)


def test_a_message_is_one_atomic_write_and_reads_back() -> None:
    times = tuple(123456.789 for _ in range(RECENT))
    told = Progress("measure", 10**6, 10**6, 4096, 10**6, 86400.123, 10**9, times, times)
    line = orjson.dumps(asdict(told))
    assert len(line) < 4096
    assert Progress.from_json(orjson.loads(line)) == told


def test_an_answer_with_an_error_status_has_not_ended_well() -> None:
    one = exchange(5, 1, 2)
    assert ended_well(one)
    one.status = 500
    assert not ended_well(one)
    one.status, one.end = 200, End.RESET
    assert not ended_well(one)
