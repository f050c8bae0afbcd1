"""Each formula of the metric table against numbers worked out by hand, and against the ways others got it wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.measure import samples
from pytest_pdperf.measure.records import Status
from tests.unit.measure.measure_records import request


def test_latencies_of_one_request() -> None:
    made = request([100, 130, 140, 190], sent_ms=10, end_ms=400)
    assert samples.ttft_ms(made) == pytest.approx(90)
    assert samples.e2e_ms(made) == pytest.approx(180), "what comes after the last token is not latency"
    assert samples.tpot_ms(made) == pytest.approx(30)
    assert samples.gaps_ms(made).tolist() == pytest.approx([30, 10, 50])


def test_latency_counts_from_the_sending_also_where_it_was_due_earlier() -> None:
    """How late a request was sent is a metric of its own, `send_lag_ms`."""
    made = request([100, 130], sent_ms=10, scheduled_ns=request(sent_ms=4).sent_ns)
    assert samples.ttft_ms(made) == pytest.approx(90)
    assert samples.e2e_ms(made) == pytest.approx(120)


def test_nothing_is_measured_without_a_token() -> None:
    made = request([], count=0)
    assert (samples.ttft_ms(made), samples.e2e_ms(made), samples.tpot_ms(made)) == (None, None, None)
    assert samples.gaps_ms(made).size == 0


def test_one_token_has_no_tpot_and_no_gap() -> None:
    made = request([70])
    assert samples.tpot_ms(made) is None
    assert samples.tpot_adjusted_ms(made) is None
    assert samples.gaps_ms(made).size == 0
    split = samples.itl_per_token_ms(made)
    assert split is not None and split.size == 0


def test_tpot_counts_the_servers_tokens_not_events() -> None:
    """Four events, ten tokens: 100 ms over nine steps; the raw gaps must not pass for it."""
    made = request([60, 90, 120, 160], tokens=[1, 3, 2, 4])
    assert samples.tpot_ms(made) == pytest.approx(100 / 9)
    split = samples.itl_per_token_ms(made)
    assert split is not None
    assert split.tolist() == pytest.approx([10, 10, 10, 15, 15, 10, 10, 10, 10])
    assert split.mean() == pytest.approx(samples.tpot_ms(made))
    assert samples.itl_quality(made) == "split_even"


def test_first_event_of_several_tokens() -> None:
    """Ten tokens came inside the 100 ms: 10 ms each; (last - first) / (N - 1) says 7.14."""
    made = request([100, 150, 200], tokens=[5, 5, 5])
    assert samples.tpot_ms(made) == pytest.approx(100 / 14)
    assert samples.tpot_adjusted_ms(made) == pytest.approx(10)
    split = samples.itl_per_token_ms(made)
    assert split is not None and split.tolist() == pytest.approx([10] * 10)


def test_adjusted_tpot_takes_the_first_events_count_and_no_other() -> None:
    assert samples.tpot_adjusted_ms(request([100, 200], tokens=[2, 5])) == pytest.approx(100 / 5)


def test_an_unknown_count_is_not_guessed() -> None:
    unknown = request([100, 200], count=None)
    assert samples.tokens_of(unknown) == 0
    assert samples.tpot_ms(unknown) is None
    assert samples.tpot_adjusted_ms(replace(unknown, event_tokens=())) is None
    assert samples.tpot_adjusted_ms(request([100, 200], tokens=[], count=4)) is None


def test_adjusted_tpot_needs_the_first_events_count() -> None:
    assert samples.tpot_adjusted_ms(request([1, 2], tokens=[0, 0], count=4)) is None
    assert samples.tpot_adjusted_ms(request([1, 1], tokens=[4], count=4)) is None


@pytest.mark.parametrize(
    ("tokens", "count", "quality"),
    [
        ([1, 1, 1], 3, "events"),
        ([1, 2, 1], 4, "split_even"),
        ([1, 2, 1], 5, "unknown"),
        ([0, 0, 0], 5, "unknown"),
        ([0, 0, 0], 3, "events"),
    ],
)
def test_quality_of_token_times(tokens: list[int], count: int, quality: str) -> None:
    made = request([10, 20, 30], tokens=tokens, count=count)
    assert samples.itl_quality(made) == quality
    assert (samples.itl_per_token_ms(made) is None) == (quality == "unknown")


def test_stamps_keep_their_nanoseconds() -> None:
    """A time of day in ns does not fit a float: differences are taken before it becomes one."""
    assert samples.gaps_ms(request([100.000001, 100.000002])).tolist() == [1e-6]


@given(
    st.lists(st.floats(0.001, 1e4), min_size=1, max_size=60),
    st.lists(st.integers(1, 6), min_size=61, max_size=61),
)
def test_split_gaps_add_up_to_the_decode_time(steps: list[float], counts: list[int]) -> None:
    made = request(np.cumsum([5.0, *steps]).tolist(), tokens=counts[: len(steps) + 1])
    split = samples.itl_per_token_ms(made)
    assert split is not None
    assert split.size == sum(counts[1 : len(steps) + 1])
    assert split.sum() == pytest.approx((made.event_ns[-1] - made.event_ns[0]) / 1e6)


def test_percentile_is_linear() -> None:
    assert samples.percentile([10, 20, 30], 50) == 20
    assert samples.percentile([10, 20, 30], 99) == pytest.approx(29.8)
    assert samples.percentile(range(1, 101), 50) == pytest.approx(50.5)
    assert samples.percentile(range(1, 101), 95) == pytest.approx(95.05)
    assert samples.percentile(range(1, 101), 99) == pytest.approx(99.01)
    assert samples.percentile([5], 99) == 5
    assert samples.percentile([], 99) is None


def test_nearest_rank_is_another_number() -> None:
    assert samples.nearest_rank([10, 20, 30], 99) == 30
    assert [samples.nearest_rank(range(1, 101), p) for p in (50, 95, 99)] == [50, 95, 99]
    assert samples.nearest_rank([], 50) is None
    assert samples.nearest_rank([7, 3], 0) == 3


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_lie_within_the_sample(values: list[float], p: float) -> None:
    for method in (samples.percentile, samples.nearest_rank):
        found = method(values, p)
        assert found is not None
        assert min(values) - 1e-6 <= found <= max(values) + 1e-6


def test_only_measured_successes_count() -> None:
    made = [request(), request(warmup=True), *(request(status=s) for s in Status if s is not Status.OK)]
    assert samples.successes(made) == [made[0]]


def test_stalls_are_gaps_over_five_medians() -> None:
    gaps = np.asarray([10.0] * 98 + [50.0, 50.1])
    assert samples.stalls_ms(gaps).tolist() == [50.1]
    assert samples.stalls_ms(np.asarray([0.0, 0.0, 0.0, 9.0])).size == 0
    assert samples.stalls_ms(np.asarray([0.5, 0.5, 0.5, 9.0])).tolist() == [9.0]
    assert samples.stalls_ms(np.zeros(0)).size == 0
