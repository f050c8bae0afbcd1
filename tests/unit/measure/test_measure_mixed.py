"""A burst stalls the steady stream: a number that is right, and that can say no."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.measure.mixed import Mixed, compare_streams, merged, overlaps
from pytest_pdperf.measure.records import RequestRecord, Status
from pytest_pdperf.spec.workload import Cell, ClosedLoop, Stream
from tests.unit.measure.measure_records import records, request


def stream(name: str, low: int, high: int) -> Stream:
    return Stream(
        name=name,
        input_tokens=(low, high),
        output_tokens=4,
        requests=4,
        arrival=ClosedLoop(concurrency=1),
    )


CELL = Cell(workload="w", id="c", streams=(stream("steady", 8, 8), stream("burst", 100, 200)))


def steady(*events: float, sent: float = 0.0) -> RequestRecord:
    return request(events, sent_ms=sent, stream="steady", planned_input_tokens=8)


def burst(sent: float, first: float, tokens: int = 150) -> RequestRecord:
    return request([first, first + 5], sent_ms=sent, stream="burst", planned_input_tokens=tokens)


def compared(requests: Sequence[RequestRecord]) -> Mixed:
    found = compare_streams(records(requests), CELL)
    assert found is not None
    return found


def test_the_gap_under_a_long_prefill_is_the_stall() -> None:
    """Tokens every 10 ms, one gap of 100 ms from 150 to 250, a prefill from 160 to 250."""
    events = [100.0, 110, 120, 130, 140, 150, 250, 260, 270, 280]
    found = compared([steady(*events), burst(160, 250)])
    assert (found.prefills, found.prefill_ms) == (1, 90.0)
    assert (found.beside.count, found.beside.max_ms, found.beside.stall_count) == (1, 100.0, 1)
    assert (found.clear.count, found.clear.max_ms, found.clear.stall_count) == (8, 10.0, 0)
    assert found.beside.stalled_share == 1.0
    assert found.clear.stalled_share == 0.0
    assert found.worst_ratio == pytest.approx(10.0)


def test_a_long_gap_without_a_prefill_is_not_blamed_on_one() -> None:
    events = [100.0, 110, 120, 130, 140, 150, 250, 260, 270, 280]
    found = compared([steady(*events), burst(255, 275)])
    assert found.clear.stall_count == 1
    assert (found.beside.count, found.beside.stall_count, found.beside.stalled_share) == (3, 0, 0.0)


def test_short_failed_and_warm_up_requests_are_no_long_prefills() -> None:
    events = [100.0, 110, 120, 130]
    none = [
        burst(100, 130, tokens=8),
        request((), sent_ms=100, stream="burst", planned_input_tokens=150, status=Status.TIMEOUT),
        request([130.0], sent_ms=100, stream="burst", planned_input_tokens=150, warmup=True),
    ]
    found = compared([steady(*events), *none])
    assert (found.prefills, found.beside.count) == (0, 0)
    assert found.worst_ratio is None


def test_rates_over_the_busy_and_the_whole_window() -> None:
    """Steady from 0 to 1000, burst from 500 to 1505: busy is 500..1000 with 6 of 11 steady tokens in it."""
    found = compared([steady(*range(0, 1001, 100)), burst(500, 1500)])
    assert found.whole.window_s == pytest.approx(1.505)
    assert found.whole.output_tps == pytest.approx({"steady": 11 / 1.505, "burst": 2 / 1.505})
    assert found.busy is not None
    assert found.busy.window_s == pytest.approx(0.5)
    assert found.busy.output_tps == pytest.approx({"steady": 12.0, "burst": 0.0})
    assert compared([steady(0, 100), burst(200, 300)]).busy is None
    json.dumps(found.to_json(), allow_nan=False)


def test_a_cell_with_one_stream_or_without_a_token_has_nothing_to_compare() -> None:
    alone = Cell(workload="w", id="c", streams=(stream("steady", 8, 8),))
    assert compare_streams(records([steady(0, 10)]), alone) is None
    assert compare_streams(records([burst(0, 10)]), CELL) is None


spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda p: (p[0], p[0] + p[1])), max_size=8
)


@given(spans, spans)
def test_overlap_is_what_counting_single_moments_finds(
    gaps: list[tuple[int, int]], busy: list[tuple[int, int]]
) -> None:
    found = overlaps(
        np.asarray([g[0] for g in gaps], dtype=np.int64),
        np.asarray([g[1] for g in gaps], dtype=np.int64),
        merged(busy),
    )
    moments = {t for start, end in busy for t in range(start, end)}
    assert found.tolist() == [bool(moments & set(range(*gap))) for gap in gaps]
