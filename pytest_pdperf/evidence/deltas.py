"""What changed between two pages of one process, with restarts and duplicate series taken care of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .exposition import RANK_LABELS, Labels, Sample, Snapshot, Unknown

Ranks = Literal["copies", "shards"]
"""`copies`: every rank reports the same requests, the largest stands for all. `shards`: ranks add up."""

Join = Literal["sum", "max"]


def combine(samples: Iterable[Sample], *, ranks: Ranks = "copies", join: Join = "sum") -> float | Unknown:
    """One number for several samples of a name, without counting a request twice.

    `priority=""` is the total over the other priorities (SGLang), so those are left out when it is there.
    Samples that differ in rank labels only are copies of each other. What remains (`engine`, `dp_rank`,
    `finished_reason`, ...) are different schedulers or disjoint kinds and is joined by `join`.
    """
    rows = list(samples)
    if not rows:
        return Unknown("no such series")
    if any(row.label("priority") == "" for row in rows):
        rows = [row for row in rows if row.label("priority") in ("", None)]
    groups: dict[Labels, list[float]] = {}
    for row in rows:
        key = tuple((name, value) for name, value in row.labels if name not in RANK_LABELS)
        groups.setdefault(key, []).append(row.value)
    if not all(math.isfinite(value) for values in groups.values() for value in values):
        return Unknown("series holds a value that is not finite")
    per_group = [sum(values) if ranks == "shards" else max(values) for values in groups.values()]
    return math.fsum(per_group) if join == "sum" else max(per_group)


def gauge(
    snapshot: Snapshot, name: str, where: Mapping[str, str] | None = None, *, join: Join = "sum"
) -> float | Unknown:
    """Present value of a gauge over all schedulers of one process, in the gauge's own unit."""
    value = combine(snapshot.select(name, where), join=join)
    return Unknown(f"{name}: {value.reason}") if isinstance(value, Unknown) else value


def restarted(before: Snapshot, after: Snapshot) -> str | None:
    """Reason to believe that the process behind two pages is not the same one, or None.

    Looks at process_start_time_seconds, at creation stamps, and at counters that went down.
    """
    start = "process_start_time_seconds"
    if before.has(start) and after.has(start):
        a, b = combine(before.select(start)), combine(after.select(start))
        if isinstance(a, float) and isinstance(b, float) and a != b:
            return f"{start} changed from {a:.3f} to {b:.3f}"
    for name, rows in before.series.items():
        later = {row.labels: row.value for row in after.series.get(name, ())}
        for row in rows:
            new = later.get(row.labels)
            if new is None:
                continue
            if name.endswith("_created") and new > row.value:
                return f"{name} changed from {row.value:.3f} to {new:.3f}"
            if _counts(name, after) and new < row.value:
                return f"{name} went down from {row.value:g} to {new:g}"
    return None


def _counts(name: str, snapshot: Snapshot) -> bool:
    if name.endswith("_total"):
        return (
            snapshot.types.get(name, "unknown") != "gauge"
            and snapshot.types.get(name[:-6], "counter") == "counter"
        )
    base, _, suffix = name.rpartition("_")
    return suffix in ("count", "bucket") and snapshot.types.get(base) == "histogram"


def counter_delta(
    before: Snapshot,
    after: Snapshot,
    name: str,
    where: Mapping[str, str] | None = None,
    *,
    ranks: Ranks = "copies",
    lazy: bool = False,
) -> float | Unknown:
    """Increase of a counter between two pages of one process.

    A family that is on no page, or only on the later one, is Unknown unless it is `lazy`: printed from its
    first increment on, so that absence before means zero. A decrease is Unknown: the process was restarted.
    """
    rows = after.select(name, where)
    if not after.has(name):
        return Unknown(f"{name} is not on the page")
    if not before.has(name) and not lazy:
        return Unknown(f"{name} is missing on the page before the window")
    old = {row.labels: row.value for row in before.select(name, where)}
    lost = set(old) - {row.labels for row in rows}
    if lost:
        return Unknown(f"{name}: a series of the page before the window is gone after it")
    steps: list[Sample] = []
    for row in rows:
        step = row.value - old.get(row.labels, 0.0)
        if step < 0:
            return Unknown(
                f"{name} went down from {old[row.labels]:g} to {row.value:g}: the process was restarted"
            )
        steps.append(Sample(row.labels, step))
    if not steps:
        return 0.0
    total = combine(steps, ranks=ranks)
    return Unknown(f"{name}: {total.reason}") if isinstance(total, Unknown) else total


@dataclass(frozen=True, slots=True)
class HistogramDelta:
    """Observations that fell into a window. `buckets` are (upper bound, observations up to it), ascending."""

    count: float
    total: float
    """Sum of the observed values, in the metric's own unit."""
    buckets: tuple[tuple[float, float], ...] = ()

    @property
    def mean(self) -> float | None:
        """Mean observation, or None for an empty window."""
        return self.total / self.count if self.count > 0 else None

    def quantile(self, q: float) -> float | None:
        """Estimate of a quantile by linear interpolation inside its bucket (Prometheus' histogram_quantile).

        None when there is nothing to estimate from. A quantile in the open last bucket is None too: all that
        is known is that it lies above the largest bound. Raises ValueError for q outside 0..1.
        """
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"quantile must be 0..1, got {q}")
        if self.count <= 0 or not self.buckets:
            return None
        rank = q * self.buckets[-1][1]
        lower, seen = 0.0, 0.0
        for upper, cumulative in self.buckets:
            if cumulative >= rank and cumulative > seen:
                if math.isinf(upper):
                    return None
                return lower + (upper - lower) * (rank - seen) / (cumulative - seen)
            lower, seen = upper, cumulative
        return None


def histogram_delta(
    before: Snapshot,
    after: Snapshot,
    base: str,
    where: Mapping[str, str] | None = None,
    *,
    ranks: Ranks = "copies",
    lazy: bool = False,
) -> HistogramDelta | Unknown:
    """Observations of histogram `base` between two pages; needs `_count` and `_sum`, buckets are optional.

    Buckets whose bounds are not the same on both pages are left out: differences between them would not be counts.
    """
    parts: dict[str, float] = {}
    for suffix in ("count", "sum"):
        part = counter_delta(before, after, f"{base}_{suffix}", where, ranks=ranks, lazy=lazy)
        if isinstance(part, Unknown):
            return part
        parts[suffix] = part
    known, earlier = _bounds(after, base, where), _bounds(before, base, where)
    bounds = sorted(known, key=float) if known == earlier or not earlier else []
    buckets: list[tuple[float, float]] = []
    for bound in bounds:
        edge = {**(where or {}), "le": bound}
        part = counter_delta(before, after, f"{base}_bucket", edge, ranks=ranks, lazy=lazy)
        if isinstance(part, Unknown):
            return part
        buckets.append((float(bound), part))
    return HistogramDelta(count=parts["count"], total=parts["sum"], buckets=tuple(buckets))


def _bounds(page: Snapshot, base: str, where: Mapping[str, str] | None) -> set[str]:
    return {label for row in page.select(f"{base}_bucket", where) if (label := row.label("le"))}
