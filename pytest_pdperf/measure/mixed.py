"""A burst of long prompts stalls a steady stream, or it does not: both streams of one cell put side by side in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_pdperf.spec.workload import Cell

from .records import CellRecords, RequestRecord
from .samples import MS, STALL_FACTOR, percentile, streamed, successes
from .window import Window, tokens_within, wall

Floats = NDArray[np.float64]
Stamps = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps between token events of one population, ms. None where there is none."""

    count: int
    total_ms: float
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    stall_count: int
    stall_ms: float
    """Summed length of the stalls."""

    @property
    def stalled_share(self) -> float | None:
        """Part of the streaming time that was spent in stalls."""
        return self.stall_ms / self.total_ms if self.total_ms > 0 else None


@dataclass(frozen=True, slots=True)
class Rate:
    """Output tokens per second of every stream over one window."""

    window_s: float
    output_tps: dict[str, float]


@dataclass(frozen=True, slots=True)
class Mixed:
    """The main stream of a mixed cell with its gaps told apart: beside a long prefill, and without one.

    A long prefill is the time from sending to first token of a request of another stream whose prompt is longer
    than any of the main stream. A stall is a gap above 5 x the main stream's median gap, on both sides alike.
    """

    stream: str
    prefills: int
    """Long prefills that were seen."""
    prefill_ms: float
    """Time with at least one of them under way."""
    beside: Gaps
    clear: Gaps
    busy: Rate | None
    """Over the time in which every stream had requests; None when there was no such time."""
    whole: Rate
    """First send to last end of the cell."""

    @property
    def worst_ratio(self) -> float | None:
        """Longest gap beside a long prefill over the median gap without one."""
        if self.beside.max_ms is None or not self.clear.p50_ms:
            return None
        return self.beside.max_ms / self.clear.p50_ms

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the derived numbers."""
        return {
            **asdict(self),
            "stalled_share_beside": self.beside.stalled_share,
            "stalled_share_clear": self.clear.stalled_share,
            "worst_ratio": self.worst_ratio,
        }


def compare_streams(records: CellRecords, cell: Cell) -> Mixed | None:
    """Put the streams of a mixed cell side by side; None for a cell with one stream or without a success."""
    measured = [r for r in records.requests if not r.warmup]
    main = cell.main.name
    steady = streamed(successes(r for r in measured if r.stream == main))
    others = [r for r in measured if r.stream != main]
    if len(cell.streams) < 2 or not steady:
        return None
    longest = cell.main.input_tokens[1]
    long = [r for r in others if r.planned_input_tokens > longest and r.event_ns]
    spans = merged([(r.sent_ns, r.event_ns[0]) for r in long])
    gaps, starts, ends = _gaps_of(steady)
    touched = overlaps(starts, ends, spans)
    limit = STALL_FACTOR * float(np.median(gaps)) if gaps.size else 0.0
    return Mixed(
        stream=main,
        prefills=len(long),
        prefill_ms=sum(end - start for start, end in spans) / MS,
        beside=_describe(gaps[touched], limit),
        clear=_describe(gaps[~touched], limit),
        busy=_busy(measured, cell),
        whole=_rate(measured, cell, wall(measured)),
    )


def _gaps_of(requests: Sequence[RequestRecord]) -> tuple[Floats, Stamps, Stamps]:
    """Every gap with the two moments that bound it."""
    stamps = [np.asarray(r.event_ns, dtype=np.int64) for r in requests]
    starts = np.concatenate([s[:-1] for s in stamps])
    ends = np.concatenate([s[1:] for s in stamps])
    return (ends - starts) / MS, starts, ends


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same time without overlaps, ascending."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def overlaps(starts: Stamps, ends: Stamps, spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """For every interval, whether it shares time with one of the spans (disjoint and ascending)."""
    if not spans:
        return np.zeros(starts.size, dtype=np.bool_)
    opens = np.asarray([span[0] for span in spans], dtype=np.int64)
    closes = np.asarray([span[1] for span in spans], dtype=np.int64)
    # The first span that ends after the interval's start is the only one that can tell.
    place = np.searchsorted(closes, starts, side="right")
    inside = place < opens.size
    touched = np.zeros(starts.size, dtype=np.bool_)
    touched[inside] = opens[place[inside]] < ends[inside]
    return touched


def _describe(gaps: Floats, limit: float) -> Gaps:
    stalls = gaps[gaps > limit] if limit > 0 else gaps[:0]
    return Gaps(
        count=int(gaps.size),
        total_ms=float(gaps.sum()),
        p50_ms=percentile(gaps, 50),
        p99_ms=percentile(gaps, 99),
        max_ms=float(gaps.max()) if gaps.size else None,
        stall_count=int(stalls.size),
        stall_ms=float(stalls.sum()),
    )


def _busy(measured: Sequence[RequestRecord], cell: Cell) -> Rate | None:
    walls = [wall(mine) for s in cell.streams if (mine := [r for r in measured if r.stream == s.name])]
    window = Window(max(w.start_ns for w in walls), min(w.end_ns for w in walls))
    if len(walls) < len(cell.streams) or window.end_ns <= window.start_ns:
        return None
    return _rate(measured, cell, window)


def _rate(measured: Sequence[RequestRecord], cell: Cell, window: Window) -> Rate:
    good = successes(measured)
    return Rate(
        window.seconds,
        {
            s.name: tokens_within([r for r in good if r.stream == s.name], window) / window.seconds
            if window.seconds > 0
            else 0.0
            for s in cell.streams
        },
    )
