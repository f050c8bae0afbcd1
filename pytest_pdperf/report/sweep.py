"""How far a topology can be loaded before its service objective breaks, and where PD beats aggregated serving."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from .grid import metric_of, shape_of, usable
from .outcomes import CellOutcome

METRIC = "goodput_rps"
MIN_POINTS = 3
"""Concurrencies that make a sweep."""
PLATEAU = 0.97
"""From this share of the largest goodput on more load buys nothing: the smallest concurrency that reaches it counts."""
EQUAL = 0.02
"""Relative difference below which neither topology is ahead."""
COLLAPSED = 0.1
"""Beyond both peaks, with less than this share of the largest goodput left, neither is ahead: nobody loads it so."""

SWEEP_DEFINITION = (
    f"the smallest concurrency with at least {PLATEAU:.0%} of the largest goodput, which is the requests a second that "
    "kept every bound of the workload's SLO"
)


@dataclass(frozen=True, slots=True)
class Peak:
    """Where the goodput of one topology on one shape peaks."""

    shape: str
    topology: str
    kind: str
    concurrency: int | None
    """None when there is no peak inside of what was measured."""
    goodput_rps: float
    """The largest that was measured."""
    at: int
    """Where that was."""
    words: str


@dataclass(frozen=True, slots=True)
class Standing:
    """Who has more goodput on one shape, concurrency by concurrency: the best topology of either kind."""

    shape: str
    pd: tuple[int, ...]
    aggregated: tuple[int, ...]
    equal: tuple[int, ...]
    peak_ratio: float | None
    """Largest goodput of PD over that of aggregated; None when the latter is 0."""

    def line(self) -> str:
        """For people; a side that is ahead nowhere is said to be."""
        parts = [
            f"{who} at {', '.join(map(str, where)) or 'none'}"
            for who, where in (("PD ahead", self.pd), ("aggregated ahead", self.aggregated))
        ]
        if self.equal:
            parts.append(f"neither at {', '.join(map(str, self.equal))}")
        ratio = (
            ""
            if self.peak_ratio is None
            else f"; largest of PD / largest of aggregated {self.peak_ratio:.2f}"
        )
        return f"{self.shape}: goodput by concurrency: {', '.join(parts)}{ratio}"


def peak_of(points: Mapping[int, float]) -> tuple[int | None, int, str]:
    """(peak, concurrency of the largest goodput, words) of concurrency -> goodput in requests a second.

    A peak at the last concurrency is none: what lies beyond was not measured. Raises ValueError without a point.
    """
    order = sorted(points)
    largest = max(points.values())
    at = next(c for c in order if points[c] == largest)
    if largest <= 0:
        return None, at, "no request kept the SLO"
    first = next(c for c in order if points[c] >= PLATEAU * largest)
    if first == order[-1]:
        return None, at, f"not reached up to concurrency {order[-1]}, where it is {largest:.2f} req/s"
    return first, at, f"at concurrency {first} ({points[first]:.2f} req/s)"


def peaks_of(outcomes: Iterable[CellOutcome]) -> list[Peak]:
    """One row a shape and topology with at least three concurrencies; launches are averaged."""
    found = []
    for (shape, topology, kind), points in _points(outcomes).items():
        if len(points) >= MIN_POINTS:
            peak, at, words = peak_of(points)
            found.append(Peak(shape, topology, kind, peak, points[at], at, words))
    return found


def standings_of(outcomes: Iterable[CellOutcome]) -> list[Standing]:
    """One row a shape that both kinds were swept over."""
    best: dict[str, dict[str, dict[int, float]]] = {}
    for (shape, _, kind), points in _points(outcomes).items():
        here = best.setdefault(shape, {}).setdefault(kind, {})
        for clients, value in points.items():
            here[clients] = max(value, here.get(clients, 0.0))
    found = []
    for shape, kinds in best.items():
        pd, plain = kinds.get("pd", {}), kinds.get("aggregated", {})
        shared = sorted(pd.keys() & plain.keys())
        if len(shared) < MIN_POINTS:
            continue
        largest = max(plain[c] for c in shared)
        floor = COLLAPSED * max(largest, *(pd[c] for c in shared))
        peaks = max(max(shared, key=points.__getitem__) for points in (pd, plain))
        ahead = {
            c: 0 if c > peaks and max(pd[c], plain[c]) < floor else _ahead(pd[c], plain[c]) for c in shared
        }
        where = {sign: tuple(c for c in shared if ahead[c] == sign) for sign in (1, -1, 0)}
        ratio = max(pd[c] for c in shared) / largest if largest > 0 else None
        found.append(Standing(shape, where[1], where[-1], where[0], ratio))
    return found


def sweep_lines(outcomes: Sequence[CellOutcome]) -> list[str]:
    """Peaks and standings for people, a line each; nothing when nothing was swept under an SLO."""
    swept = _points(outcomes)
    lines = []
    for peak in peaks_of(outcomes):
        points = swept[(peak.shape, peak.topology, peak.kind)]
        by_load = ", ".join(f"{clients}: {points[clients]:.3g}" for clients in sorted(points))
        says = "goodput peaks" if peak.concurrency else "goodput peak"
        lines.append(f"{peak.shape} {peak.topology}: {says} {peak.words}; req/s by concurrency: {by_load}")
    return lines + [standing.line() for standing in standings_of(outcomes)]


def _ahead(a: float, b: float) -> int:
    larger = max(a, b)
    return 0 if larger <= 0 or abs(a - b) <= EQUAL * larger else (1 if a > b else -1)


def _points(outcomes: Iterable[CellOutcome]) -> dict[tuple[str, str, str], dict[int, float]]:
    """(shape, topology, kind) -> concurrency -> mean goodput over the launches that may be read."""
    values: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    for outcome in outcomes:
        shape, clients = shape_of(outcome.result.cell)
        value = metric_of(outcome, METRIC)
        if not shape or clients is None or not usable(outcome) or value is None or value.value is None:
            continue
        key = (shape, outcome.topology, outcome.kind)
        values.setdefault(key, {}).setdefault(clients, []).append(value.value)
    return {key: {c: fmean(v) for c, v in points.items()} for key, points in values.items()}
