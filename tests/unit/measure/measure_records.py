"""Records made by hand, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_pdperf.measure.records import CellRecords, RequestRecord, Status
from pytest_pdperf.spec.workload import Cell, ClosedLoop, OpenLoop, Slo, Stream

START = 1_700_000_000_000_000_000
"""A time of day in ns: large enough that float arithmetic on raw stamps would show."""


def at(ms: float) -> int:
    """Stamp of a moment, ms after START."""
    return START + round(ms * 1e6)


def request(
    events_ms: Sequence[float] = (100.0, 110.0),
    *,
    sent_ms: float = 0.0,
    end_ms: float | None = None,
    tokens: Sequence[int] | None = None,
    count: int | None = -1,
    lag_ms: float = 0.01,
    **changes: Any,
) -> RequestRecord:
    """A successful request with events at absolute times; `count` -1 takes it from `tokens` or the events."""
    if count == -1:
        count = sum(tokens) if tokens is not None else len(events_ms)
    values: dict[str, Any] = {
        "stream": "main",
        "index": 0,
        "warmup": False,
        "status": Status.OK,
        "planned_input_tokens": 8,
        "planned_output_tokens": count or 1,
        "sent_ns": at(sent_ms),
        "end_ns": at(end_ms if end_ms is not None else events_ms[-1] if events_ms else sent_ms),
        "event_ns": tuple(at(e) for e in events_ms),
        "event_lag_ns": (round(lag_ms * 1e6),) * len(events_ms),
        "event_tokens": tuple(tokens) if tokens is not None else (1,) * len(events_ms),
        "prompt_tokens": 8,
        "completion_tokens": count,
        "output_tokens": count,
        "token_count_source": "usage",
        "finish_reason": "length",
        "http_status": 200,
    }
    return RequestRecord(**(values | changes))


def records(requests: Sequence[RequestRecord], **changes: Any) -> CellRecords:
    """A run of these requests with kernel stamps."""
    values: dict[str, Any] = {"stamp_source": "kernel", "started_ns": at(0), "ended_ns": at(1000)}
    return CellRecords(requests=tuple(requests), **(values | changes))


def cell(
    requests: int = 4,
    concurrency: int | None = 1,
    *,
    slo: Slo | None = None,
    think_s: float = 0.0,
) -> Cell:
    """A cell with one stream; `concurrency` None is an open loop."""
    arrival: ClosedLoop | OpenLoop = OpenLoop(rate_rps=10)
    if concurrency is not None:
        arrival = ClosedLoop(concurrency=concurrency, think_s=think_s)
    stream = Stream(input_tokens=(8, 8), output_tokens=2, requests=requests, arrival=arrival)
    return Cell(workload="w", id="c", streams=(stream,), slo=slo or Slo())


def loop(
    count: int, clients: int, *, ttft: float = 20.0, gap: float = 10.0, tokens: int = 10, pause: float = 0.0
) -> list[RequestRecord]:
    """A perfect closed loop: every client sends its next request `pause` ms after its last one ended."""
    made = []
    for i in range(count):
        wave, client = divmod(i, clients)
        sent = wave * (ttft + gap * (tokens - 1) + pause) + 0.001 * client
        made.append(request([sent + ttft + gap * k for k in range(tokens)], sent_ms=sent, index=i))
    return made
