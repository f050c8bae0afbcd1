"""What the nightly limit cannot see: steps too small for one night and slow drift, found in the whole
history.

Change points come from PELT (Killick, Fearnhead and Eckley 2012) with an l2 cost, as `ruptures` implements
it. Each is tested and reported with the commits between which it lies. Nothing here blocks a run.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from pytest_pdperf.errors import UsageProblem

from .catalogue import Catalogue, spec_of
from .fingerprint import BaselineKey, CellRef
from .history import HistoryEntry
from .statistics import log_score, relative_worsening, sample_variance, t_tail
from .verdict import Verdict

MIN_SEGMENT = 3
"""Fewest launches on either side of a change point."""

ALPHA = 1e-4
"""Level of the test of each change point; strict, because the place was chosen where the step is largest."""

MAX_POINTS = 200
"""Newest launches that are looked at: the search grows with the square of their number."""

GAP = timedelta(days=4)
"""Launches further apart leave a hole in which the cause may lie."""

UNUSABLE = frozenset({Verdict.INVALID, Verdict.INCONCLUSIVE})


@dataclass(frozen=True, slots=True)
class Point:
    """One launch of one series."""

    date: datetime
    value: float
    commit: str = "unknown"
    engine_version: str = "unknown"
    launch: str = ""

    @property
    def build(self) -> str:
        """What was under test: the commit, else the engine's version."""
        return self.commit if self.commit != "unknown" else self.engine_version


@dataclass(frozen=True, slots=True)
class Step:
    """A lasting change of level. `change` is relative, + is worse."""

    index: int
    """Position of the first point after the step."""
    before: Point
    after: Point
    change: float
    p: float
    gap: timedelta | None
    """Length of a hole in the history at this place."""

    def line(self) -> str:
        """`+3.1% worse between 3f2a (2025-03-04) and 9c1b (2025-03-05), p=1e-06`."""
        word = "worse" if self.change > 0 else "better"
        hole = f"; no launches for {self.gap.days} days in between" if self.gap else ""
        return (
            f"{abs(self.change):.1%} {word} between {self.before.build} ({self.before.date:%Y-%m-%d}) "
            f"and {self.after.build} ({self.after.date:%Y-%m-%d}), p={self.p:.1g}{hole}"
        )


@dataclass(frozen=True, slots=True)
class Creep:
    """What the history of one series says."""

    points: int
    steps: tuple[Step, ...]
    total: float | None
    """Relative change from the first level to the last, + is worse; None for too short a history."""
    note: str = ""

    def worse_than(self, tau: float) -> bool:
        """Whether small steps have added up to more than the tolerance."""
        return self.total is not None and self.total > tau


def series_of(entries: Iterable[HistoryEntry], key: BaselineKey, ref: CellRef, metric: str) -> list[Point]:
    """The usable launches of one series in the order of their dates. Invalid launches and other keys are
    left out.
    """
    points = [
        Point(
            date=entry.launch.date,
            value=entry.launch.values[metric],
            commit=entry.launch.commit,
            engine_version=entry.launch.engine_version,
            launch=entry.launch_id,
        )
        for entry in entries
        if entry.launch is not None
        and metric in entry.launch.values
        and entry.verdict not in UNUSABLE
        and entry.key == key
        and entry.ref == ref
    ]
    return sorted(points, key=lambda point: (point.date, point.launch))


def find_creep(points: Sequence[Point], direction: int) -> Creep:
    """Lasting changes of level in one series (its newest `MAX_POINTS` launches), oldest first.

    Raises UsageProblem when `ruptures` is not installed, ValueError for values that are not finite and
    positive.
    """
    if len(points) < 2 * MIN_SEGMENT:
        return Creep(len(points), (), None, f"{len(points)} launches, {2 * MIN_SEGMENT} needed")
    points = points[-MAX_POINTS:]
    scores = [log_score(point.value, direction) for point in points]
    cuts = [0, *_breakpoints(scores), len(scores)]
    found = []
    for left, middle, right in zip(cuts, cuts[1:], cuts[2:], strict=False):
        effect, p = _step(scores[left:middle], scores[middle:right])
        if p > ALPHA:
            continue
        before, after = points[middle - 1], points[middle]
        away = after.date - before.date
        change = relative_worsening(effect, direction)
        found.append(Step(middle, before, after, change, p, away if away > GAP else None))
    first = scores[: cuts[1]]
    last = scores[cuts[-2] :]
    total = relative_worsening(fmean(last) - fmean(first), direction) if found else 0.0
    return Creep(len(points), tuple(found), total)


@dataclass(frozen=True, slots=True)
class Finding:
    """A series whose history shows lasting steps."""

    topology: str
    cell: str
    metric: str
    creep: Creep
    beyond: bool
    """The steps add up to more than the metric may lose."""

    def lines(self) -> list[str]:
        """A headline and one line a step."""
        total = self.creep.total or 0.0
        word = "worse" if total > 0 else "better"
        head = f"{self.topology} {self.cell} {self.metric}: {abs(total):.1%} {word} over {self.creep.points} launches"
        return [head + (", more than its tolerance" if self.beyond else "")] + [
            f"  {step.line()}" for step in self.creep.steps
        ]


def findings(entries: Sequence[HistoryEntry], catalogue: Catalogue) -> list[Finding]:
    """Every gated series of a history that shows a step, the largest worsening first."""
    places = {
        (entry.key.digest, entry.ref, metric): entry.key
        for entry in entries
        if entry.launch is not None
        for metric in entry.launch.values
    }
    found = []
    for (_, ref, metric), key in places.items():
        spec = spec_of(metric, catalogue)
        if spec is None or not spec.gated:
            continue
        creep = find_creep(series_of(entries, key, ref, metric), spec.direction)
        if creep.steps:
            beyond = creep.worse_than(relative_worsening(math.log1p(spec.tau or 0.0), spec.direction))
            found.append(Finding(key.topology, ref.id, metric, creep, beyond))
    return sorted(found, key=lambda finding: (-(finding.creep.total or 0.0), finding.cell, finding.metric))


def _breakpoints(scores: Sequence[float]) -> list[int]:
    """Positions at which a new level starts. The penalty is 3 sigma^2 ln(n), sigma from differences of
    neighbours.
    """
    ruptures = _ruptures()
    import numpy as np

    spread = _neighbour_sd(scores)
    if spread == 0:
        spread = max(1e-9, 1e-3 * (max(scores) - min(scores)))
    signal = np.asarray(scores).reshape(-1, 1)
    penalty = 3 * spread**2 * math.log(len(scores))
    ends = ruptures.Pelt(model="l2", min_size=MIN_SEGMENT, jump=1).fit(signal).predict(pen=penalty)
    return [int(end) for end in ends[:-1]]


def _ruptures() -> Any:
    try:
        return importlib.import_module("ruptures")
    except ImportError:
        raise UsageProblem(
            "change-point analysis needs the package 'ruptures': pip install 'pytest-pdperf[report]'"
        ) from None


def _neighbour_sd(scores: Sequence[float]) -> float:
    """Robust noise of single launches: steps and drift hardly change differences of neighbours."""
    steps = [abs(b - a) for a, b in pairwise(scores)]
    return 1.4826 * median(steps) / math.sqrt(2)


def _step(left: Sequence[float], right: Sequence[float]) -> tuple[float, float]:
    """(effect, two-sided p) of Welch's t-test between two neighbouring levels."""
    effect = fmean(right) - fmean(left)
    a, b = sample_variance(left) / len(left), sample_variance(right) / len(right)
    if a + b == 0:
        return effect, 0.0 if effect else 1.0
    freedom = (a + b) ** 2 / (a**2 / (len(left) - 1) + b**2 / (len(right) - 1))
    return effect, 2 * t_tail(abs(effect) / math.sqrt(a + b), freedom)
