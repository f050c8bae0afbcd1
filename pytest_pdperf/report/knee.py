"""Finds the concurrency from which more load buys latency instead of throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .grid import Row, Series, metric_of, usable

MIN_POINTS = 3

KNEE_DEFINITION = (
    "the concurrency with the largest output throughput / E2E p50 (Kleinrock's power): below it throughput grows "
    "faster than latency, above it latency grows faster; ringed in the charts"
)


@dataclass(frozen=True, slots=True)
class Knee:
    """The knee of one topology on one shape, or why there is none."""

    concurrency: float | None
    words: str


def knee_of(points: Sequence[tuple[float, float, float]]) -> Knee:
    """Knee of (concurrency, throughput, latency): the concurrency with the largest power = throughput / latency.

    Power as in L. Kleinrock, "Power and deterministic rules of thumb for probabilistic problems in computer
    communications", ICC 1979: below the knee throughput grows faster than latency, above it slower. A largest
    power at either end of the range is no knee: it lies outside of what was measured.
    """
    known = sorted(point for point in points if point[1] > 0 and point[2] > 0)
    if len(known) < MIN_POINTS:
        return Knee(None, f"unknown ({len(known)} concurrencies with an E2E latency, {MIN_POINTS} needed)")
    power = [throughput / latency for _, throughput, latency in known]
    best = power.index(max(power))
    if best == len(known) - 1:
        return Knee(None, f"not reached up to {known[-1][0]:g}")
    if best == 0:
        return Knee(None, f"below {known[1][0]:g}")
    return Knee(known[best][0], f"at {known[best][0]:g}")


def knee_of_series(rows: Sequence[Row], series: Series, throughput: str, latency: str = "e2e_ms_p50") -> Knee:
    """The knee of one column over the rows of one shape."""
    points = []
    for row in rows:
        for one, outcome in row.outcomes():
            if one is not series or row.concurrency is None or not usable(outcome):
                continue
            rate, wait = metric_of(outcome, throughput), metric_of(outcome, latency)
            if rate is not None and wait is not None and rate.value is not None and wait.value is not None:
                points.append((float(row.concurrency), rate.value, wait.value))
    return knee_of(points)
