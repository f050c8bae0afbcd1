"""What changed in a window, without counting anything twice and without reading a restart as work."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.evidence.deltas import (
    HistogramDelta,
    combine,
    counter_delta,
    gauge,
    histogram_delta,
    restarted,
)
from pytest_pdperf.evidence.exposition import Sample, Snapshot, Unknown, parse_exposition


def snap(text: str) -> Snapshot:
    page = parse_exposition(text)
    assert isinstance(page, Snapshot), page
    return page


def why(value: object) -> str:
    assert isinstance(value, Unknown), value
    return value.reason


def sample(value: float, **labels: str) -> Sample:
    return Sample(tuple(sorted(labels.items())), value)


def test_ranks_of_one_scheduler_are_copies() -> None:
    rows = [sample(7, tp_rank="0", pp_rank="0"), sample(7, tp_rank="1", pp_rank="0")]
    assert combine(rows) == 7
    assert combine(rows, ranks="shards") == 14


def test_schedulers_add_up_and_their_ranks_do_not() -> None:
    rows = [sample(3, dp_rank=d, tp_rank=t) for d in "01" for t in "0123"]
    assert combine(rows) == 6
    assert combine([sample(2, engine="0"), sample(5, engine="1")]) == 7
    assert combine([sample(0.2, engine="0"), sample(0.5, engine="1")], join="max") == 0.5


def test_priority_totals_are_not_added_to_their_parts() -> None:
    rows = [sample(5, priority=""), sample(2, priority="0"), sample(3, priority="9")]
    assert combine(rows) == 5
    assert combine(rows[1:]) == 5


def test_nothing_and_nan_are_unknown_not_zero() -> None:
    assert why(combine([])) == "no such series"
    assert "not finite" in why(combine([sample(math.nan), sample(1, a="b")]))
    assert "not finite" in why(gauge(snap("g NaN\n"), "g"))


def test_counter_delta_is_the_increase_over_all_kinds() -> None:
    before = snap('c_total{r="a"} 10\nc_total{r="b"} 1\n')
    after = snap('c_total{r="a"} 12\nc_total{r="b"} 4\n')
    assert counter_delta(before, after, "c_total") == 5
    assert counter_delta(before, after, "c_total", {"r": "b"}) == 3


def test_a_new_label_value_starts_at_zero_and_a_lost_one_is_unknown() -> None:
    before, after = snap('c_total{r="a"} 10\n'), snap('c_total{r="a"} 10\nc_total{r="b"} 4\n')
    assert counter_delta(before, after, "c_total") == 4
    assert "gone" in why(counter_delta(after, before, "c_total"))


def test_a_family_missing_before_is_unknown_unless_it_is_printed_late() -> None:
    before, after = snap("x 1\n"), snap("x 1\nc_total 4\n")
    assert "missing on the page before" in why(counter_delta(before, after, "c_total"))
    assert counter_delta(before, after, "c_total", lazy=True) == 4
    assert "not on the page" in why(counter_delta(after, before, "c_total", lazy=True))


def test_a_decrease_is_a_restart_even_when_the_sum_grew() -> None:
    before = snap('c_total{r="a"} 10\nc_total{r="b"} 1\n')
    after = snap('c_total{r="a"} 2\nc_total{r="b"} 100\n')
    assert "restarted" in why(counter_delta(before, after, "c_total"))
    assert "went down from 10 to 2" in str(restarted(before, after))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("process_start_time_seconds 100\n", "process_start_time_seconds 200.5\n", "100.000 to 200.500"),
        ("c_created 100\n", "c_created 150\n", "c_created changed"),
        (
            "# TYPE h histogram\nh_count 5\nh_sum 1\n",
            "# TYPE h histogram\nh_count 4\nh_sum 1\n",
            "h_count went down",
        ),
    ],
)
def test_restart_is_seen(before: str, after: str, words: str) -> None:
    assert words in str(restarted(snap(before), snap(after)))
    assert restarted(snap(before), snap(before)) is None


def test_gauges_may_fall_without_a_restart() -> None:
    assert restarted(snap("# TYPE g gauge\ng 5\n"), snap("# TYPE g gauge\ng 4\n")) is None
    assert (
        restarted(snap("# TYPE kv_count gauge\nkv_count 5\n"), snap("# TYPE kv_count gauge\nkv_count 4\n"))
        is None
    )


HISTOGRAM = """# TYPE h histogram
h_bucket{{tp_rank="{rank}",le="1.0"}} {a}
h_bucket{{tp_rank="{rank}",le="3.0"}} {b}
h_bucket{{tp_rank="{rank}",le="+Inf"}} {c}
h_count{{tp_rank="{rank}"}} {c}
h_sum{{tp_rank="{rank}"}} {s}
"""


def test_histogram_delta_ignores_what_was_before() -> None:
    before = snap(HISTOGRAM.format(rank=0, a=100, b=100, c=100, s=50))
    after = snap(HISTOGRAM.format(rank=0, a=102, b=104, c=104, s=56))
    delta = histogram_delta(before, after, "h")
    assert isinstance(delta, HistogramDelta)
    assert (delta.count, delta.total, delta.mean) == (4, 6, 1.5)
    assert delta.buckets == ((1.0, 2.0), (3.0, 4.0), (math.inf, 4.0))
    assert delta.quantile(0.5) == 1.0
    assert delta.quantile(0.75) == 2.0
    assert delta.quantile(0.25) == 0.5


def test_buckets_that_changed_their_bounds_are_no_counts() -> None:
    """A bound that is on the later page alone would count from the engine's start: more than fell into the window."""
    before = snap(HISTOGRAM.format(rank=0, a=100, b=100, c=100, s=50).replace('"3.0"', '"2.0"'))
    after = snap(HISTOGRAM.format(rank=0, a=102, b=104, c=104, s=56))
    delta = histogram_delta(before, after, "h")
    assert delta == HistogramDelta(4.0, 6.0)
    assert delta.quantile(0.5) is None


def test_histogram_ranks_are_copies_too() -> None:
    one = HISTOGRAM.format(rank=0, a=2, b=4, c=4, s=6) + "".join(
        line + "\n" for line in HISTOGRAM.format(rank=1, a=2, b=4, c=4, s=6).splitlines()[1:]
    )
    delta = histogram_delta(snap("x 1\n"), snap(one), "h", lazy=True)
    assert isinstance(delta, HistogramDelta)
    assert (delta.count, delta.total) == (4, 6)


def test_quantile_says_nothing_rather_than_guess() -> None:
    assert HistogramDelta(0, 0, ((1.0, 0.0), (math.inf, 0.0))).quantile(0.5) is None
    assert HistogramDelta(2, 9, ((1.0, 0.0), (math.inf, 2.0))).quantile(0.5) is None
    assert HistogramDelta(2, 9).quantile(0.5) is None
    assert HistogramDelta(4, 9, ((1.0, 2.0), (math.inf, 4.0))).quantile(0.5) == 1.0
    assert HistogramDelta(0, 0).mean is None
    with pytest.raises(ValueError, match="quantile"):
        HistogramDelta(1, 1).quantile(1.5)


@given(
    counts=st.lists(st.integers(min_value=0, max_value=50), min_size=1, max_size=8).filter(sum),
    qs=st.lists(st.floats(min_value=0, max_value=1), min_size=2, max_size=2),
)
def test_quantile_grows_with_q_and_stays_inside_the_bounds(counts: list[int], qs: list[float]) -> None:
    running, buckets = 0, []
    for index, count in enumerate(counts):
        running += count
        buckets.append((float(index + 1), float(running)))
    delta = HistogramDelta(float(running), 1.0, (*buckets, (math.inf, float(running))))
    low, high = (delta.quantile(q) for q in sorted(qs))
    assert low is not None
    assert high is not None
    assert 0 <= low <= high <= len(counts)
