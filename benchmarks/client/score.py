"""A client's report against the server's truth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.client.load import Load, Report

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Score:
    """Errors in ms; an event's error is reported arrival - the moment before its send."""

    events: int
    event_p50: float
    event_p99: float
    event_max: float
    ttft_true_p50: float
    ttft_p50: float
    ttft_p99: float
    """Errors of single requests' TTFT: percentiles of |reported - true|."""
    itl_true_p99: float
    itl_p99_error: float
    """(reported p99 - true p99) / true p99 of the pooled gaps."""
    lag_p50: float | None
    lag_p99: float | None
    lag_max: float | None
    """User-space receive lag, where the client measures it."""
    cpu_us_per_event: float
    bytes_per_event: float | None


def score(load: Load, report: Report, truth: dict[str, list[int]]) -> Score:
    """Match events by request id and position. Raises ValueError when a client lost or invented events."""
    errors, ttft_errors, true_ttft, gaps, true_gaps = [], [], [], [], []
    for name, (sent, *events) in report.rows.items():
        received, *sends = truth[name]
        if len(events) != len(sends):
            raise ValueError(f"request {name}: {len(events)} events reported, {len(sends)} sent")
        seen, real = np.asarray(events, dtype=np.int64), np.asarray(sends, dtype=np.int64)
        errors.append((seen - real) / 1e6)
        true_ttft.append((real[0] - received) / 1e6)
        ttft_errors.append(abs((seen[0] - sent) / 1e6 - true_ttft[-1]))
        gaps.append(np.diff(seen) / 1e6)
        true_gaps.append(np.diff(real) / 1e6)
    pooled = np.concatenate(errors)
    reported99, true99 = (float(np.percentile(np.concatenate(g), 99)) for g in (gaps, true_gaps))
    lag = np.asarray(report.lag_ns, dtype=np.float64) / 1e6
    return Score(
        events=pooled.size,
        event_p50=float(np.percentile(pooled, 50)),
        event_p99=float(np.percentile(pooled, 99)),
        event_max=float(pooled.max()),
        ttft_true_p50=float(np.median(true_ttft)),
        ttft_p50=float(np.percentile(ttft_errors, 50)),
        ttft_p99=float(np.percentile(ttft_errors, 99)),
        itl_true_p99=true99,
        itl_p99_error=(reported99 - true99) / true99,
        lag_p50=_percentile(lag, 50),
        lag_p99=_percentile(lag, 99),
        lag_max=_percentile(lag, 100),
        cpu_us_per_event=report.cpu_s * 1e6 / (load.requests * load.tokens),
        bytes_per_event=report.bytes_per_event,
    )


def _percentile(values: Floats, p: float) -> float | None:
    return float(np.percentile(values, p)) if values.size else None
