"""Pictures say what the numbers say: scales, thinning, lanes and stages, whatever the data."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from pytest_pdperf.evidence.ttft_split import STAGES
from pytest_pdperf.measure.records import RequestRecord, Status
from pytest_pdperf.report.cell_view import _stages
from pytest_pdperf.report.charts import Curve, Point, ecdf, lanes, over_concurrency, stage_bars
from pytest_pdperf.report.knee import knee_of
from pytest_pdperf.report.samples import MAX_LANES, Samples, samples_of, thin
from pytest_pdperf.report.svg import Scale, element, linear_ticks, log_ticks, polyline, short, spread
from tests.unit.report.report_data import records, request, split

CURVE = Curve("pd", 0)
finite = st.floats(min_value=1e-6, max_value=1e9, allow_nan=False)


def parsed(picture: Markup) -> ElementTree.Element:
    return ElementTree.fromstring(str(picture).replace("viewBox", "viewbox"))


def sampled(*requests: RequestRecord) -> Samples:
    found = samples_of(records(requests))
    assert isinstance(found, Samples)
    return found


def test_elements_escape_all_that_they_hold() -> None:
    made = element("g", '<script>"&', element("title", "a<b"), data_x='"><x', class_="c")
    assert str(made) == (
        '<g data-x="&#34;&gt;&lt;x" class="c">&lt;script&gt;&#34;&amp;<title>a&lt;b</title></g>'
    )


@given(st.lists(finite, min_size=1, max_size=50))
def test_every_value_lies_inside_its_axis(values: list[float]) -> None:
    scale = spread(values, start=40, end=400)
    assert all(39.9 <= scale(v) <= 400.1 for v in values)
    assert all(scale.low * 0.99 <= tick <= scale.high * 1.01 for tick in scale.ticks())


@given(finite, finite)
def test_scales_rise(low: float, high: float) -> None:
    if high <= low * 1.0001:
        return
    for log in (False, True):
        scale = Scale(low, high, 0, 100, log)
        assert scale(low) == pytest.approx(0) and scale(high) == pytest.approx(100)
        assert 0 < scale((low + high) / 2) < 100.0001


def test_ticks_are_round() -> None:
    assert linear_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert linear_ticks(0.37, 0.52, 3) == [0.4, 0.45, 0.5]
    assert log_ticks(9, 110) == [10, 20, 50, 100]
    assert log_ticks(1, 100000) == [1, 10, 100, 1000, 10000, 100000]


def test_short_numbers() -> None:
    assert [short(v) for v in (0, 0.05, 5, 1500, 25000, 2e6)] == ["0", "0.05", "5", "1,500", "25k", "2M"]


def test_a_path_comes_back_to_its_points() -> None:
    points = [(0.0, 0.0), (10.04, 5.0), (10.04, 5.0), (10.0, 9.0), (20.0, 9.0)]
    assert polyline(points) == "M0 0l10 5v4h10"
    assert polyline([]) == ""


@given(st.lists(finite, min_size=1, max_size=3000))
def test_thinning_keeps_ends_order_and_positions(values: list[float]) -> None:
    samples = np.sort(np.asarray(values))
    kept, positions = thin(samples, 50)
    assert kept.size <= 52
    assert kept[0] == samples[0] and kept[-1] == samples[-1]
    assert positions[-1] == pytest.approx((samples.size - 0.5) / samples.size)
    assert (np.diff(kept) >= 0).all() and (np.diff(positions) > 0).all()
    ranks = np.rint(positions * samples.size - 0.5).astype(int)
    assert (samples[ranks] == kept).all()


def test_thinning_spends_as_many_points_on_the_tail_as_on_the_body() -> None:
    _, positions = thin(np.arange(100_000, dtype=float), 160)
    body, tail = (positions < 0.9).sum(), ((positions >= 0.99) & (positions < 0.999)).sum()
    assert 20 < tail < 60 and 20 < body < 60


def test_the_distribution_says_count_and_percentiles() -> None:
    picture = ecdf([(CURVE, np.arange(1.0, 101.0))], "TTFT")
    (title,) = parsed(picture).iter("title")
    assert title.text is not None
    assert "n=100; p50 50.5, p90 90.1, p99 99, largest 100 ms" in title.text


def test_a_percentile_that_few_samples_cannot_have_is_not_named() -> None:
    picture = str(ecdf([(CURVE, np.arange(1.0, 9.0))], "TTFT"))
    assert "p50" in picture and "p99" not in picture


def test_no_sample_is_said_not_drawn() -> None:
    picture = ecdf([(CURVE, np.zeros(0))], "TTFT")
    assert "no sample of TTFT" in picture and "<svg" not in picture


def test_zero_gaps_can_be_drawn() -> None:
    assert "nan" not in str(ecdf([(CURVE, np.asarray([0.0, 0.0, 1.0, 100.0]))], "gap")).lower()
    assert "nan" not in str(ecdf([(CURVE, np.zeros(5))], "gap")).lower()


def test_a_few_merged_events_do_not_stretch_the_axis() -> None:
    gaps = np.sort(np.concatenate([np.full(5, 1e-4), np.linspace(9.0, 12.0, 995)]))
    labels = [
        float(t.text or 0)
        for t in parsed(ecdf([(CURVE, gaps)], "gap")).iter("text")
        if t.get("class") == "tick mid"
    ]
    assert labels and min(labels) > 5


def test_a_lane_shows_wait_marks_and_stalls() -> None:
    slow = request(1, sent_ms=100.0, ttft_ms=50.0, gaps_ms=(10, 10, 90, 10))
    found = sampled(request(0), slow)
    assert found.stall_ms == pytest.approx(50.0)
    tree = parsed(lanes(found, CURVE, found.span_ms))
    groups = list(tree.iter("g"))
    assert len(groups) == 2
    assert [p.get("class") for p in groups[0].iter("path")] == ["wait", "mark"]
    assert [p.get("class") for p in groups[1].iter("path")] == ["wait", "mark", "stall"]
    (words,) = [t.text for t in groups[1].iter("title")]
    assert words == "request 1, TTFT 50 ms, 5 token events, longest gap 90 ms, 1 stalls"


def test_a_failure_shows_its_status_and_error() -> None:
    bad = request(1, status=Status.RESET, gaps_ms=(), error="peer <closed>")
    tree = parsed(lanes(sampled(request(0), bad), CURVE, 1000))
    (mark,) = [t for t in tree.iter("text") if "✕ reset" in (t.text or "")]
    assert float(mark.get("x") or 0) == pytest.approx(Scale(0.0, 1000.0, 34, 952)(50.0) + 2, abs=0.1)
    assert any("reset: peer <closed>" in (t.text or "") for t in tree.iter("title"))


def test_lanes_are_capped_and_keep_failures_and_the_slowest() -> None:
    requests = [request(i, sent_ms=float(i), ttft_ms=50 + i % 7) for i in range(500)]
    requests[250] = request(250, sent_ms=250.0, ttft_ms=5000.0)
    requests[251] = request(251, sent_ms=251.0, status=Status.TIMEOUT)
    found = sampled(*requests)
    assert len(found.lanes) == MAX_LANES and found.requests == 500
    assert {250, 251} <= {lane.index for lane in found.lanes}
    assert [lane.sent_ms for lane in found.lanes] == sorted(lane.sent_ms for lane in found.lanes)


def test_marks_cover_every_token_to_a_pixel() -> None:
    found = sampled(request(0, gaps_ms=(1.0, 2.0, 50.0, 0.1, 0.1, 0.35, 0.35, 30.0)))
    (mark,) = [p for p in parsed(lanes(found, CURVE, found.span_ms)).iter("path") if p.get("class") == "mark"]
    x, covered = 0.0, set()
    for code, number in re.findall(r"([Mmh])(-?[\d.]+)", mark.get("d") or ""):
        start = float(number) if code == "M" else x + float(number)
        if code == "h":
            covered |= set(range(round(x), round(start)))
        x = start
    scale = Scale(0.0, found.span_ms, 34, 952)
    assert covered == {round(scale(float(t))) for t in found.lanes[0].events_ms}


def test_the_size_of_a_timeline_does_not_grow_with_its_tokens() -> None:
    few, many = (sampled(request(0, gaps_ms=(5.0,) * n)) for n in (100, 20_000))
    assert len(lanes(many, CURVE, many.span_ms)) < 2 * len(lanes(few, CURVE, few.span_ms)) + 200


def test_warm_ups_are_no_part_of_any_picture() -> None:
    found = sampled(request(0, warmup=True, ttft_ms=999), request(1))
    assert found.requests == 1 and found.ttft_ms["main"].tolist() == [50.0]
    assert samples_of(records([request(0, warmup=True)])) == "no request was measured"


def test_streams_keep_their_own_distribution() -> None:
    found = sampled(request(0, stream="steady"), request(1, stream="burst", ttft_ms=500))
    assert found.ttft_ms["steady"].tolist() == [50.0] and found.ttft_ms["burst"].tolist() == [500.0]


def test_points_over_concurrency_carry_their_words_and_the_knee_its_ring() -> None:
    points = [Point(1, 10.0, "one"), Point(4, 20.0, "four"), Point(16, 90.0, "sixteen")]
    tree = parsed(over_concurrency([(CURVE, points)], "TTFT", {"pd": 4}))
    assert [t.text for t in tree.iter("title")] == ["one", "four", "sixteen"]
    (ring,) = [c for c in tree.iter("circle") if c.get("class") == "knee"]
    four = [c for c in tree.iter("circle") if c.get("class") == "dot"][1]
    assert ring.get("cx") == four.get("cx")


@pytest.mark.parametrize(
    ("points", "knee", "words"),
    [
        ([(1, 100, 10), (2, 190, 11), (4, 210, 25)], 2, "at 2"),
        ([(4, 210, 25), (1, 100, 10), (2, 190, 11)], 2, "at 2"),
        ([(1, 100, 10), (2, 200, 10), (4, 400, 10)], None, "not reached up to 4"),
        ([(1, 100, 10), (2, 101, 20), (4, 102, 40)], None, "below 2"),
        ([(1, 100, 10), (2, 200, 10)], None, "unknown"),
        ([(1, 100, 10), (2, 200, 0), (4, 300, 20)], None, "unknown"),
    ],
)
def test_the_knee_is_where_power_peaks(
    points: list[tuple[float, float, float]], knee: float | None, words: str
) -> None:
    found = knee_of(points)
    assert found.concurrency == knee and found.words.startswith(words)


def test_stage_bars_are_as_long_as_their_stages_and_show_what_is_unexplained() -> None:
    found = split(100.0, prefill=60.0, transfer=20.0)
    stages = _stages(found)
    assert [(name, ms) for name, ms, _ in stages] == [
        ("prefill", 60.0),
        ("transfer", 20.0),
        ("unexplained", 20.0),
    ]
    tree = parsed(stage_bars([("pd", stages)], STAGES))
    widths = [float(r.get("width") or 0) for r in tree.iter("rect")]
    assert widths[0] / widths[1] == pytest.approx(3.0, rel=0.01)
    assert math.isclose(widths[1], widths[2], rel_tol=0.01)


def test_a_stage_below_zero_is_not_drawn() -> None:
    found = split(50.0, prefill=60.0, router=-4.0)
    assert [name for name, _, _ in _stages(found)] == ["prefill"]


def test_stages_that_overlap_leave_nothing_unexplained() -> None:
    assert [name for name, _, _ in _stages(split(50.0, prefill=60.0))] == ["prefill"]
    assert "no stage" in stage_bars([("pd", [])], STAGES)
