"""A metrics page is taken whole or not at all."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.evidence import exposition
from pytest_pdperf.evidence.deltas import _counts
from pytest_pdperf.evidence.exposition import MAX_PAGE_BYTES, Snapshot, Unknown, parse_exposition

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


def reason(text: str | bytes, max_bytes: int = MAX_PAGE_BYTES) -> str:
    page = parse_exposition(text, max_bytes=max_bytes)
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


REAL = sorted((Path(__file__).parents[2] / "data" / "evidence").glob("*.prom"))


def plain(page: Snapshot) -> dict[str, dict[exposition.Labels, str]]:
    """Values as text, because NaN is not equal to itself."""
    return {name: {row.labels: repr(row.value) for row in rows} for name, rows in page.series.items()}


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_the_quick_reader_sees_in_pages_of_engines_what_the_library_sees(path: Path) -> None:
    text = path.read_text()
    quick, slow = exposition._plain(text, None), exposition._collect(text, None)
    assert quick is not None and isinstance(slow, Snapshot)
    assert plain(quick) == plain(slow)
    assert dict(quick.types) == dict(slow.types)


LINES = st.sampled_from(
    [
        *(
            "# TYPE a counter",
            "# TYPE a gauge",
            "# TYPE a_total counter",
            "# TYPE h histogram",
            "# HELP a text",
        ),
        *(
            "a 1",
            "a_total 2",
            'a{x="1"} 3',
            'a{x="1",} 4',
            'a{x="2", y="z"} 5',
            'a{x="q\\"}"} 6',
            "a NaN",
            "a 1_0",
        ),
        *(
            'h_bucket{le="1"} 1',
            "h_count 1",
            "h_sum 0.5",
            "a 1 1795965966000",
            "a  7",
            "a +Inf",
            "a{} 8",
            "a",
            "<p>",
        ),
        *("# TYPE u untyped", "u 1", 'a{x="1",x="2"} 9', " a 1", "a 0x10", "# EOF", "", "a 1e3", "a -2.5E-3"),
    ]
)


@given(st.lists(LINES, min_size=1, max_size=6))
def test_the_quick_reader_agrees_with_the_library_or_leaves_the_page_to_it(lines: list[str]) -> None:
    text = "\n".join(lines) + "\n"
    quick = exposition._plain(text, None)
    if quick is not None:
        slow = exposition._collect(text, None)
        assert isinstance(slow, Snapshot), slow
        assert plain(quick) == plain(slow)
        # Types of families without a sample may differ: nobody can ask for them.
        assert {n for n in quick.series if _counts(n, quick)} == {n for n in slow.series if _counts(n, slow)}


def test_a_look_keeps_the_series_that_it_wants_and_says_the_same_of_bad_pages() -> None:
    page = parse_exposition(PAGE, only={"vllm:kv_cache_usage_perc"})
    assert isinstance(page, Snapshot)
    assert list(page.series) == ["vllm:kv_cache_usage_perc"]
    assert page.types["vllm:kv_cache_usage_perc"] == "gauge"
    other = parse_exposition(PAGE, only={"sglang:token_usage"})
    assert isinstance(other, Snapshot), "a page without any of them is kept whole: it may be a renamed one"
    assert other.has("vllm:kv_cache_usage_perc")
    cut = parse_exposition(PAGE[:-3], only={"vllm:kv_cache_usage_perc"})
    assert isinstance(cut, Unknown)
    assert "cut off" in cut.reason
