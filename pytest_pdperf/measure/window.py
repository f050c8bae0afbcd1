"""The steady window of a stream: after every client is busy, before the first one runs out of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .records import RequestRecord
from .samples import tokens_of

SHORT_WINDOW = 0.5
"""A window shorter than this many median request durations says little: the whole wall time is used and
noted.
"""


@dataclass(frozen=True, slots=True)
class Window:
    """Bounds in ns, with a note when it is not the steady window proper."""

    start_ns: int
    end_ns: int
    note: str = ""

    @property
    def seconds(self) -> float:
        """Length."""
        return (self.end_ns - self.start_ns) / 1e9


def end_of(request: RequestRecord) -> int:
    """When a request was over: the end of its stream, else its last token, else its sending."""
    if request.end_ns is not None:
        return request.end_ns
    return request.event_ns[-1] if request.event_ns else request.sent_ns


def wall(requests: Sequence[RequestRecord]) -> Window:
    """First send to last end."""
    return Window(min(r.sent_ns for r in requests), max(end_of(r) for r in requests))


def steady_window(requests: Sequence[RequestRecord], clients: int | None) -> Window:
    """First moment all clients are busy .. last request issued; for an open loop first .. last request
    issued.

    Falls back to the wall time, with a note, when that is too short to hold a throughput.
    """
    everything = wall(requests)
    sends = sorted(r.sent_ns for r in requests)
    start = _all_busy(requests, clients) if clients is not None else sends[0]
    if start is None:
        return Window(
            everything.start_ns, everything.end_ns, f"{clients} clients were never busy at once; wall time"
        )
    window = Window(start, sends[-1])
    typical = float(np.median([end_of(r) - r.sent_ns for r in requests])) / 1e9
    if window.seconds < SHORT_WINDOW * typical or window.seconds <= 0:
        note = f"steady window of {window.seconds:.3g} s is too short, whole wall time used"
        return Window(everything.start_ns, everything.end_ns, note)
    return window


def _all_busy(requests: Sequence[RequestRecord], clients: int) -> int | None:
    """First moment with `clients` requests in flight; a client's next request counts from its predecessor's
    end.
    """
    steps = sorted([(r.sent_ns, 1) for r in requests] + [(end_of(r), -1) for r in requests])
    busy = 0
    for when, step in steps:
        busy += step
        if busy >= clients:
            return when
    return None


def tokens_within(requests: Sequence[RequestRecord], window: Window) -> float:
    """Output tokens that arrived in the window. Where an event's own count is unknown, a request's tokens are
    spread evenly over its events.
    """
    total = 0.0
    for request in requests:
        stamps = np.asarray(request.event_ns, dtype=np.int64)
        if not stamps.size:
            continue
        inside = (stamps >= window.start_ns) & (stamps <= window.end_ns)
        counts = np.asarray(request.event_tokens, dtype=np.float64)
        if counts.sum() != tokens_of(request):
            counts = np.full(stamps.size, tokens_of(request) / stamps.size)
        total += float(counts[inside].sum())
    return total


def mean_concurrency(requests: Sequence[RequestRecord], window: Window) -> float:
    """Average number of requests in flight inside the window."""
    if window.seconds <= 0:
        return 0.0
    busy = sum(max(0, min(end_of(r), window.end_ns) - max(r.sent_ns, window.start_ns)) for r in requests)
    return busy / (window.end_ns - window.start_ns)
