"""The estimate adds up, prefers what was measured, and says which of the two it is."""

from __future__ import annotations

import pytest

from pytest_pdperf.spec.workload import Cell, ClosedLoop, OpenLoop, Stream
from pytest_pdperf.stack.estimate import (
    CELL_EXTRA_S,
    DECODE_TPS,
    OTHER_START_UP_S,
    PREFILL_TPS,
    START_UP_S,
    estimate,
    guess,
)


def stream(arrival: ClosedLoop | OpenLoop, requests: int = 32, name: str = "main") -> Stream:
    return Stream(name=name, input_tokens=(1000, 3000), output_tokens=80, requests=requests, arrival=arrival)


def cell(id: str, *streams: Stream) -> Cell:
    return Cell(id=id, workload="w", streams=streams)


ONE_S = 2000 / PREFILL_TPS + 80 / DECODE_TPS
CLOSED = cell("a", stream(ClosedLoop(concurrency=5)))


def test_a_closed_loop_takes_its_rounds() -> None:
    assert guess(CLOSED) == pytest.approx(7 * ONE_S)
    thinking = cell("b", stream(ClosedLoop(concurrency=32, think_s=2.0)))
    assert guess(thinking) == pytest.approx(ONE_S + 2.0)


def test_an_open_loop_takes_its_schedule_and_the_longest_stream_counts() -> None:
    open_loop = stream(OpenLoop(rate_rps=2.0), requests=100, name="steady")
    assert guess(cell("c", open_loop)) == pytest.approx(50 + ONE_S)
    ramp = stream(OpenLoop(rate_rps=1.0, ramp_to_rps=3.0), requests=100, name="ramp")
    assert guess(cell("d", stream(ClosedLoop(concurrency=32)), ramp)) == pytest.approx(50 + ONE_S)


def test_measured_cells_are_preferred_and_counted() -> None:
    other = cell("b", stream(ClosedLoop(concurrency=32)))
    launches = [("vllm", "pd"), ("toy", "pd")]
    found = estimate(
        launches, [CLOSED, other], {("vllm", "pd", "a"): 100.0, ("vllm", "x", "b"): 1e9}, "run-1"
    )
    assert found.start_up_s == START_UP_S["vllm"] + OTHER_START_UP_S
    assert found.cells_s == pytest.approx(4 * CELL_EXTRA_S + 100.0 + 7 * ONE_S + 2 * ONE_S)
    assert (found.known, found.cells, found.bring_ups) == (1, 4, 2)
    assert "1 of 4 cells as in run run-1, the rest a rough guess" in found.describe()


def test_the_line_says_where_the_numbers_come_from() -> None:
    nothing = estimate([("sim", "pd")], [CLOSED], {})
    assert nothing.describe().endswith("; all a rough guess)")
    everything = estimate([("sim", "pd")], [CLOSED], {("sim", "pd", "a"): 7200.0}, "run-1")
    assert (
        "estimated time: 2.0 h (1 bring-ups 5 s, 1 cells 2.0 h; cells as in run run-1; start-up a rough guess)"
        in (everything.describe())
    )
