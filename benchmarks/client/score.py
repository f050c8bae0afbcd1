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
    event_p50: float | None
    event_p99: float | None
    event_max: float | None
    ttft_true_p50: float
    ttft_p50: float
    ttft_p99: float
    """Errors of single requests' TTFT: percentiles of |reported - true|."""
    itl_true_p99: float
    itl_p99_error: float | None
    """(reported p99 - true p99) / true p99 of the pooled gaps; None for a client that reports no gaps."""
    lag_p50: float | None
    lag_p99: float | None
    lag_max: float | None
    """User-space receive lag, where the client measures it."""
    cpu_us_per_event: float
    bytes_per_event: float | None
    merged_share: float | None
    """Segments known to be merged / events: above 0.5 % the suite calls a cell invalid."""
    waited_ms: float | None
    """How long the client could have run and another process had its core."""
    server_late_p99: float
    """How far behind its schedule the server sent: no fault of a client, and a burst for it."""


def score(load: Load, report: Report, truth: dict[str, list[int]]) -> Score:
    """Match events by request id and position. Raises ValueError when a client lost or invented requests or events."""
    known = [name for name in (report.rows or report.ttft_ms) if name in truth]
    if len(known) != load.requests:
        raise ValueError(f"{len(known)} of {load.requests} requests are known to both client and server")
    real = {name: np.asarray(truth[name], dtype=np.int64) for name in known}
    true_ttft = {name: float(stamps[1] - stamps[0]) / 1e6 for name, stamps in real.items()}
    true_gaps = np.concatenate([np.diff(stamps[1:]) / 1e6 for stamps in real.values()])
    errors = np.zeros(0)
    if report.rows:
        seen = {name: np.asarray(report.rows[name], dtype=np.int64) for name in known}
        for name in known:
            if seen[name].size != real[name].size:
                raise ValueError(
                    f"request {name}: {seen[name].size - 1} events, {real[name].size - 1} were sent"
                )
        errors = np.concatenate([(seen[name][1:] - real[name][1:]) / 1e6 for name in known])
        ttft = {name: float(stamps[1] - stamps[0]) / 1e6 for name, stamps in seen.items()}
        gaps = np.concatenate([np.diff(stamps[1:]) / 1e6 for stamps in seen.values()])
    else:
        ttft = report.ttft_ms
        gaps = np.concatenate([np.asarray(report.gaps_ms.get(name, [])) for name in known])
    ttft_errors = np.asarray([abs(ttft[name] - true_ttft[name]) for name in known])
    reported99, true99 = _percentile(gaps, 99), float(np.percentile(true_gaps, 99))
    lag = np.asarray(report.lag_ns, dtype=np.float64) / 1e6
    return Score(
        events=int(sum(stamps.size - 1 for stamps in real.values())),
        event_p50=_percentile(errors, 50),
        event_p99=_percentile(errors, 99),
        event_max=_percentile(errors, 100),
        ttft_true_p50=float(np.median(list(true_ttft.values()))),
        ttft_p50=float(np.percentile(ttft_errors, 50)),
        ttft_p99=float(np.percentile(ttft_errors, 99)),
        itl_true_p99=true99,
        itl_p99_error=None if reported99 is None else (reported99 - true99) / true99,
        lag_p50=_percentile(lag, 50),
        lag_p99=_percentile(lag, 99),
        lag_max=_percentile(lag, 100),
        cpu_us_per_event=report.cpu_s * 1e6 / (load.requests * load.tokens),
        bytes_per_event=report.bytes_per_event,
        merged_share=None
        if report.merged is None
        else report.merged / sum(s.size - 1 for s in real.values()),
        waited_ms=None if report.waited_s is None else report.waited_s * 1e3,
        server_late_p99=float(
            np.percentile(np.concatenate([_behind_ms(s[1:], load) for s in real.values()]), 99)
        ),
    )


def _behind_ms(sends: NDArray[np.int64], load: Load) -> Floats:
    """How much later than its most punctual event, by its stream's schedule, each event was sent."""
    offsets = sends / 1e6 - np.arange(sends.size) * load.itl_ms
    behind: Floats = offsets - offsets.min()
    return behind


def _percentile(values: Floats, p: float) -> float | None:
    return float(np.percentile(values, p)) if values.size else None
