"""A metrics page is taken whole or not at all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.evidence.exposition import Snapshot, Unknown, parse_exposition

PAGE = """# HELP vllm:request_success_total Count of requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 10.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.005"} 3.0
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="+Inf"} 4.0
vllm:nixl_xfer_time_seconds_count{engine="0"} 4.0
vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.02
"""


def snapshot(text: str) -> Snapshot:
    page = parse_exposition(text)
    assert isinstance(page, Snapshot), page
    return page


def reason(text: str | bytes, **limits: int) -> str:
    page = parse_exposition(text, **limits)
    assert isinstance(page, Unknown), page
    return page.reason


def test_names_labels_and_types_are_kept_as_on_the_wire() -> None:
    page = snapshot(PAGE)
    assert [s.value for s in page.select("vllm:request_success_total", {"finished_reason": "length"})] == [
        10.0
    ]
    assert len(page.select("vllm:request_success_total")) == 2
    assert page.select("vllm:request_success_total", {"finished_reason": "nope"}) == ()
    assert page.types["vllm:kv_cache_usage_perc"] == "gauge"
    assert page.types["vllm:nixl_xfer_time_seconds"] == "histogram"
    assert page.has("vllm:nixl_xfer_time_seconds_bucket")


def test_timestamps_are_dropped_and_odd_values_are_kept() -> None:
    page = snapshot('a{x="1",} 3 1795965966000\nb NaN\nc -Inf\nd -1\n')
    assert page.series["a"][0].value == 3.0
    assert math.isnan(page.series["b"][0].value)
    assert page.series["c"][0].value == -math.inf
    assert page.series["d"][0].value == -1.0


def test_a_snapshot_cannot_be_changed() -> None:
    page = snapshot(PAGE)
    with pytest.raises(TypeError):
        page.series["new"] = ()  # type: ignore[index]
    with pytest.raises(AttributeError):
        page.series = {}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("   \n\n", "empty"),
        ("# only a comment\n", "no samples"),
        ("<!doctype html>\n<html><body>502</body></html>\n", "not Prometheus text"),
        ('{"error": "unauthorized"}\n', "not Prometheus text"),
        ("Internal Server Error\n", "not Prometheus text"),
        ('a{x="1"} 12', "cut off"),
        (PAGE[: PAGE.index('finished_reason="abort"') + 8], "cut off"),
        (PAGE[: PAGE.index("vllm:nixl_xfer_time_seconds_count")], "has buckets and no count"),
        ("a 1\na 2\n", "two values for a"),
        (b"a 1\n\xff\xfe\n", "not UTF-8"),
    ],
)
def test_a_page_in_doubt_is_unknown_with_its_reason(text: str | bytes, words: str) -> None:
    assert words in reason(text)


def test_the_same_series_twice_with_one_value_is_harmless() -> None:
    assert snapshot("a 1\na 1\n").series["a"][0].value == 1.0
    assert math.isnan(snapshot("a NaN\na NaN\n").series["a"][0].value)


def test_size_limit_is_exact() -> None:
    text = "a 1\n"
    assert isinstance(parse_exposition(text, max_bytes=4), Snapshot)
    assert "larger than the limit of 3" in reason(text, max_bytes=3)


@given(cut=st.integers(min_value=0, max_value=len(PAGE) - 1))
def test_a_cut_page_never_counts_differently(cut: int) -> None:
    """Where a cut cannot be seen, the series that are left must read as on the whole page."""
    page = parse_exposition(PAGE[:cut])
    if isinstance(page, Snapshot):
        whole = snapshot(PAGE)
        for name, rows in page.series.items():
            assert set(rows) <= set(whole.series[name])


@given(st.one_of(st.text(max_size=200), st.binary(max_size=200)))
def test_no_input_raises(text: str | bytes) -> None:
    page = parse_exposition(text)
    assert isinstance(page, Snapshot) or page.reason
