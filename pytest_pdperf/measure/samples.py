"""Latencies of single requests and percentiles over many: the formulas of the metric table, each in one
function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .records import RequestRecord, Status

MS = 1e6
STALL_FACTOR = 5.0


def percentile(samples: ArrayLike, p: float) -> float | None:
    """Linear-interpolated percentile (numpy's default, Hyndman and Fan type 7); None for no samples."""
    values = np.asarray(samples, dtype=np.float64)
    return float(np.percentile(values, p)) if values.size else None


def nearest_rank(samples: ArrayLike, p: float) -> float | None:
    """The ceil(p/100 * n)-th smallest sample, as some other tools report; None for no samples."""
    values = np.sort(np.asarray(samples, dtype=np.float64))
    if not values.size:
        return None
    return float(values[max(0, int(np.ceil(p / 100 * values.size)) - 1)])


def successes(requests: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Measured requests that ended `ok`: the only ones whose latencies count."""
    return [r for r in requests if not r.warmup and r.status is Status.OK]


def streamed(requests: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Those of them whose tokens were seen one after the other."""
    return [r for r in requests if not r.not_streamed]


def ttft_ms(request: RequestRecord) -> float | None:
    """First token event - send, None without a token."""
    return (request.event_ns[0] - request.sent_ns) / MS if request.event_ns else None


def ttft_from_schedule_ms(request: RequestRecord) -> float | None:
    """First token event - scheduled send, None without a token or a schedule (a closed loop has none)."""
    if request.scheduled_ns is None or not request.event_ns:
        return None
    return (request.event_ns[0] - request.scheduled_ns) / MS


def e2e_ms(request: RequestRecord) -> float | None:
    """Last token event - send, None without a token. What comes after the last token is not counted."""
    return (request.event_ns[-1] - request.sent_ns) / MS if request.event_ns else None


def tokens_of(request: RequestRecord) -> int:
    """Best output count of a request; 0 only when it had none."""
    return request.output_tokens if request.output_tokens is not None else 0


def tpot_ms(request: RequestRecord) -> float | None:
    """(last - first token) / (N - 1); None for N < 2."""
    count = tokens_of(request)
    if count < 2 or not request.event_ns:
        return None
    return (request.event_ns[-1] - request.event_ns[0]) / MS / (count - 1)


def tpot_adjusted_ms(request: RequestRecord) -> float | None:
    """(last - first token) / (N - k), k = tokens of the first event; None when k is unknown or all there is."""
    count = tokens_of(request)
    first = request.event_tokens[0] if request.event_tokens else 0
    if first < 1 or count <= first:
        return None
    return (request.event_ns[-1] - request.event_ns[0]) / MS / (count - first)


def gaps_ms(request: RequestRecord) -> NDArray[np.float64]:
    """Gaps between neighbouring token events, one fewer than events."""
    stamps = np.asarray(request.event_ns, dtype=np.int64)
    return (stamps[1:] - stamps[:-1]) / MS


def itl_quality(request: RequestRecord) -> str:
    """How well single tokens can be told apart: `events` one a token, `split_even` counts known, else
    `unknown`.
    """
    counts = request.event_tokens
    if not counts or min(counts) < 1:
        return "events" if counts and len(counts) == tokens_of(request) else "unknown"
    if sum(counts) != tokens_of(request):
        return "unknown"
    return "events" if max(counts) == 1 else "split_even"


def itl_per_token_ms(request: RequestRecord) -> NDArray[np.float64] | None:
    """Each gap split evenly over the tokens that its event brought; None when those counts are not known.

    The tokens that came along with the first one give no sample, so the sum is last - first token.
    """
    quality = itl_quality(request)
    if quality == "unknown":
        return None
    gaps = gaps_ms(request)
    if quality == "events":
        return gaps
    counts = np.asarray(request.event_tokens[1:], dtype=np.int64)
    return np.repeat(gaps / counts, counts)


def pooled(arrays: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """All samples in one array."""
    return np.concatenate(arrays) if arrays else np.zeros(0)


def stalls_ms(gaps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Gaps longer than 5 x the median gap. With a median of 0 (most events merged) nothing can be called a
    stall.
    """
    if not gaps.size:
        return gaps
    typical = float(np.median(gaps))
    return gaps[gaps > STALL_FACTOR * typical] if typical > 0 else gaps[:0]
