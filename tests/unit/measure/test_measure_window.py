"""The steady window: where it begins and ends, what is counted in it, and when it does not exist."""

from __future__ import annotations

import pytest

from pytest_pdperf.measure.window import Window, end_of, mean_concurrency, steady_window, tokens_within, wall
from tests.unit.measure.measure_records import at, loop, request


def test_from_all_busy_to_the_last_request_issued() -> None:
    made = loop(12, 4)
    window = steady_window(made, 4)
    assert (window.start_ns, window.end_ns, window.note) == (made[3].sent_ns, made[-1].sent_ns, "")


def test_all_busy_waits_for_the_last_client() -> None:
    made = [
        request([500], sent_ms=0),
        request([520], sent_ms=0, end_ms=60),
        request([900], sent_ms=70),
        request([950], sent_ms=100),
        request([990], sent_ms=700),
    ]
    assert steady_window(made, 3).start_ns == at(100)


def test_a_request_that_follows_at_once_takes_its_predecessors_place() -> None:
    """Ends are counted before sends of the same moment: two clients are never three."""
    made = [
        request([10], sent_ms=0),
        request([10], sent_ms=0),
        request([20], sent_ms=10),
        request([20], sent_ms=10),
    ]
    assert "never busy" in steady_window(made, 3).note


def test_one_wave_has_no_steady_window() -> None:
    window = steady_window(loop(4, 4), 4)
    assert "too short, whole wall time used" in window.note
    assert (window.start_ns, window.end_ns) == (at(0), wall(loop(4, 4)).end_ns)


def test_open_loop_runs_from_first_to_last_send() -> None:
    made = [request([sent + 20], sent_ms=sent) for sent in (0, 30, 60, 90)]
    window = steady_window(made, None)
    assert (window.start_ns, window.end_ns, window.note) == (at(0), at(90), "")


@pytest.mark.parametrize(("steady_ms", "long_enough"), [(49, False), (50, True), (99, True)])
def test_a_window_holds_half_a_usual_request_at_least(steady_ms: float, long_enough: bool) -> None:
    """Usual is the median: the one request of 400 ms does not make the window short."""
    made = [
        request([100], sent_ms=0),
        request([120], sent_ms=20),
        request([steady_ms + 400], sent_ms=steady_ms),
    ]
    window = steady_window(made, None)
    assert (window.note == "") == long_enough
    assert window.end_ns == (made[-1].sent_ns if long_enough else end_of(made[-1]))


def test_requests_without_any_duration_have_no_steady_window() -> None:
    made = [request([], sent_ms=5, count=0), request([], sent_ms=5, count=0)]
    assert "too short" in steady_window(made, None).note


def test_tokens_within_counts_both_bounds() -> None:
    made = [request([10, 20, 30], tokens=[1, 2, 4])]
    assert tokens_within(made, Window(at(10), at(20))) == 3
    assert tokens_within(made, Window(at(10.001), at(29.999))) == 2


def test_unknown_event_counts_spread_a_requests_tokens_evenly() -> None:
    made = [request([10, 20, 30, 40], tokens=[0, 0, 0, 0], count=8)]
    assert tokens_within(made, Window(at(15), at(35))) == 4
    assert tokens_within([request([], count=0)], Window(at(0), at(50))) == 0


def test_steady_throughput_of_a_perfect_loop_is_the_true_one() -> None:
    """Four clients, 10 tokens per 110 ms each: 363.6 tok/s, whatever ramp and tail do to the wall time."""
    made = loop(40, 4)
    window = steady_window(made, 4)
    assert tokens_within(made, window) / window.seconds == pytest.approx(4 * 10 / 0.110, rel=0.01)


def test_mean_concurrency() -> None:
    made = [request([100], sent_ms=0), request([100], sent_ms=50)]
    assert mean_concurrency(made, Window(at(0), at(100))) == pytest.approx(1.5)
    assert mean_concurrency(made, Window(at(0), at(0))) == 0.0
    assert mean_concurrency([*made, request([900], sent_ms=700)], Window(at(0), at(100))) == pytest.approx(
        1.5
    )
    assert mean_concurrency(made, Window(at(-100), at(100))) == pytest.approx(0.75)
    assert mean_concurrency([request([100], sent_ms=0)], Window(at(50), at(100))) == pytest.approx(1)
    made = loop(20, 4, pause=110)
    assert mean_concurrency(made, steady_window(made, 4)) == pytest.approx(2, rel=0.05)


def test_end_of_a_request() -> None:
    assert end_of(request([5], end_ms=9)) == at(9)
    assert end_of(request([5, 8], end_ns=None)) == at(8)
    assert end_of(request([], sent_ms=3, count=0, end_ns=None)) == at(3)
