"""Boils the stamps of a cell down to what a picture can show, one cell in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pytest_pdperf.load.results import read_records
from pytest_pdperf.measure.records import CellRecords, RequestRecord, Status
from pytest_pdperf.measure.samples import MS, STALL_FACTOR, gaps_ms, pooled, streamed, successes, ttft_ms

Floats = NDArray[np.float64]

MAX_LANES = 96
"""Requests that a timeline shows; beyond it failures, the slowest and an even sample of the rest."""
SLOWEST_KEPT = 8


@dataclass(frozen=True, slots=True)
class Lane:
    """One request of a timeline; times are ms since the first request of its cell was sent."""

    index: int
    stream: str
    status: str
    sent_ms: float
    events_ms: Floats
    """Token events, empty when none came."""
    end_ms: float
    tokens: int | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Samples:
    """What the charts of one cell on one launch are drawn from."""

    ttft_ms: dict[str, Floats]
    """Stream -> TTFT of each successful request, sorted."""
    itl_ms: dict[str, Floats]
    """Stream -> all gaps between token events, sorted."""
    lanes: tuple[Lane, ...]
    requests: int
    """Measured requests, also those without a lane."""
    stall_ms: float | None
    """Gaps above this are stalls: 5 x the median gap of the cell, in ms."""
    span_ms: float
    streams: tuple[str, ...] = field(default=())


def read_samples(folder: Path) -> Samples | str:
    """The samples of one cell, or the reason why there are none. Never raises."""
    try:
        return samples_of(read_records(folder))
    except FileNotFoundError:
        return "the records of single requests are not in the run's folder"
    except Exception as problem:  # damaged or newer records: the summary is shown all the same
        return f"the records of single requests cannot be read: {str(problem) or type(problem).__name__}"


def samples_of(records: CellRecords) -> Samples | str:
    """The same from records in memory; a reason when nothing was measured."""
    measured = [r for r in records.requests if not r.warmup]
    if not measured:
        return "no request was measured"
    streams = tuple(dict.fromkeys(r.stream for r in measured))
    start = min(r.sent_ns for r in measured)
    good = streamed(successes(measured))
    gaps = {name: pooled([gaps_ms(r) for r in good if r.stream == name]) for name in streams}
    every = pooled(list(gaps.values()))
    lanes = tuple(_lane(r, start) for r in sorted(_shown(measured), key=lambda r: (r.sent_ns, r.index)))
    return Samples(
        ttft_ms={
            name: _sorted([t for r in good if r.stream == name and (t := ttft_ms(r)) is not None])
            for name in streams
        },
        itl_ms={name: np.sort(values) for name, values in gaps.items()},
        lanes=lanes,
        requests=len(measured),
        stall_ms=STALL_FACTOR * float(np.median(every)) if every.size else None,
        span_ms=max(_end_ns(r) - start for r in measured) / MS,
        streams=streams,
    )


def _shown(requests: Sequence[RequestRecord]) -> list[RequestRecord]:
    """At most MAX_LANES requests: failures first, then the slowest first tokens, then every k-th."""
    if len(requests) <= MAX_LANES:
        return list(requests)
    failed = [r for r in requests if r.status is not Status.OK][: MAX_LANES // 2]
    good = [r for r in requests if r.status is Status.OK]
    slow = sorted(good, key=lambda r: -(ttft_ms(r) or 0.0))[:SLOWEST_KEPT]
    taken = {id(r) for r in (*failed, *slow)}
    rest = [r for r in good if id(r) not in taken]
    room = MAX_LANES - len(failed) - len(slow)
    step = max(1.0, len(rest) / room)
    even = [rest[int(i * step)] for i in range(min(room, len(rest)))]
    return [*failed, *slow, *even]


def _lane(request: RequestRecord, start_ns: int) -> Lane:
    events = (np.asarray(request.event_ns, dtype=np.int64) - start_ns) / MS
    return Lane(
        index=request.index,
        stream=request.stream,
        status=request.status.value,
        sent_ms=(request.sent_ns - start_ns) / MS,
        events_ms=events,
        end_ms=(_end_ns(request) - start_ns) / MS,
        tokens=request.output_tokens,
        error=request.error,
    )


def _end_ns(request: RequestRecord) -> int:
    """Last thing known of a request: its last token, its end, or at least its start."""
    return max(request.sent_ns, request.end_ns or 0, request.event_ns[-1] if request.event_ns else 0)


def _sorted(values: Sequence[float]) -> Floats:
    return np.sort(np.asarray(values, dtype=np.float64))


def thin(values: Floats, points: int = 160) -> tuple[Floats, Floats]:
    """(values, plotting positions) of an ECDF with few points that still shows its tail.

    `values` must be sorted. Positions are Hazen's (i - 0.5) / n. Kept are the ranks that lie evenly on the axis
    -log10(1 - p), so that the decade from p99 to p99.9 gets as many points as that from p0 to p90.
    """
    n = values.size
    positions = (np.arange(1, n + 1) - 0.5) / n
    if n <= points:
        return values, positions
    depth = np.linspace(0.0, np.log10(2 * n), points)
    ranks = np.clip(np.round((1 - 10.0**-depth) * n - 0.5).astype(int), 0, n - 1)
    ranks = np.unique(np.concatenate(([0], ranks, [n - 1])))
    return values[ranks], positions[ranks]
