"""The gate's two stages over whole arrays of nights, and rules that others use, on the same data.

`ours` repeats `pytest_pdperf.gate` in numpy so that thousands of nights take seconds; a test holds both
against each other night by night.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit

from pytest_pdperf.gate.confirm import ALPHA
from pytest_pdperf.gate.statistics import CONFIDENCE, MEDIAN_INFLATION, PRIOR_WEIGHT

from .noise import CELLS, CONCURRENCY, METRIC_IDS, Scores, Session, tolerances

Flags = npt.NDArray[np.bool_]
SHAPES = CELLS // len(CONCURRENCY)


@dataclass(frozen=True)
class Stored:
    """Baselines of many nights with what several rules need of them, computed once. Shapes as in `Nights`."""

    launches: Scores
    center: Scores
    """Median over launches."""
    variance: Scores
    """Sample variance over launches (N-1)."""

    @classmethod
    def of(cls, launches: Scores) -> Stored:
        """Summarise the launches of each baseline."""
        center: Scores = np.median(launches, axis=1)
        variance: Scores = launches.var(axis=1, ddof=1)
        return cls(launches, center, variance)


@dataclass(frozen=True)
class Judged:
    """What the gate said of every series of every night."""

    suspect: Flags
    failed: Flags
    noisy: Flags
    launches: float
    """Mean launches a night, stage 2 included."""


def ours(baseline: Stored, session: Session, *, paired: bool) -> Judged:
    """Stage 1 and stage 2 as in section `The gate` of the design; `paired` says whether a reference build
    is at hand.
    """
    nights, count, series = baseline.launches.shape
    allowed = tolerances()
    center, variance = baseline.center, baseline.variance
    by_cell = variance.reshape(nights, CELLS, len(METRIC_IDS))
    everywhere = ((by_cell.sum(axis=1, keepdims=True) - by_cell) / (CELLS - 1)).reshape(nights, series)
    by_level = variance.reshape(nights, SHAPES, len(CONCURRENCY), len(METRIC_IDS))
    v0 = ((by_level.sum(axis=1, keepdims=True) - by_level) / (SHAPES - 1)).reshape(nights, series)
    if (SHAPES - 1) * (count - 1) < PRIOR_WEIGHT:
        v0 = everywhere
    freedom = PRIOR_WEIGHT + count - 1
    s2 = (PRIOR_WEIGHT * v0 + (count - 1) * variance) / freedom
    error = np.sqrt(s2 * (1 + MEDIAN_INFLATION / count))
    noise = stdtrit(freedom, CONFIDENCE) * error
    difference = session.candidate[:, 0] - center
    limit = np.maximum(allowed, noise)
    suspect = difference > limit
    if paired:
        offset = np.minimum(np.median(difference, axis=1, keepdims=True), 0)
        suspect |= difference - offset > limit
        effect, p = _paired(baseline.launches, session, suspect, v0)
        extra = 4
    else:
        effect = session.candidate[:, 1:3].mean(axis=1) - center
        p = stdtr(freedom, -effect / error)
        extra = 2
    failed = _holm(np.where(suspect, p, np.inf)) & (effect > allowed)
    launches = 1 + extra * float(suspect.any(axis=1).mean())
    return Judged(suspect, failed, noise > 2 * allowed, launches)


def _paired(baseline: Scores, session: Session, suspect: Flags, v0: Scores) -> tuple[Scores, Scores]:
    """A B B A: effect and one-sided p, with the share of v0 that is left within a session."""
    nights, _, series = baseline.shape
    shape = (nights, CELLS, len(METRIC_IDS))
    b, a = session.candidate[:, 1:3], session.reference
    effect = b.mean(axis=1) - a.mean(axis=1)
    own = (b.var(axis=1, ddof=1) + a.var(axis=1, ddof=1)) / 2
    residual = (own / v0 * suspect).reshape(shape)
    counted = suspect.reshape(shape)
    others = residual.sum(axis=1, keepdims=True) - residual
    others_freedom = 2 * (counted.sum(axis=1, keepdims=True) - counted)
    stored = (baseline[:, :2].var(axis=1, ddof=1) / v0).reshape(shape).mean(axis=1, keepdims=True)
    share = (2 * others + CELLS * np.minimum(stored, 1)) / (others_freedom + CELLS)
    prior = share.reshape(nights, series) * v0
    variance = (PRIOR_WEIGHT * prior + 2 * own) / (PRIOR_WEIGHT + 2)
    return effect, stdtr(PRIOR_WEIGHT + 2, -effect / np.sqrt(variance))


def _holm(p: Scores) -> Flags:
    """Rejections at ALPHA within each night; infinity marks series that are not tested."""
    tested = np.isfinite(p).sum(axis=1, keepdims=True)
    order = np.argsort(p, axis=1)
    ranks = np.arange(p.shape[1])
    adjusted = np.take_along_axis(p, order, axis=1) * np.maximum(tested - ranks, 1)
    accepted = np.maximum.accumulate(adjusted, axis=1) <= ALPHA
    rejected = np.zeros_like(accepted)
    np.put_along_axis(rejected, order, accepted, axis=1)
    return rejected


@dataclass(frozen=True)
class Rule:
    """A rule that others use: a statistic a series, red where it exceeds 1."""

    name: str
    launches: float


FIXED_5 = Rule("fixed 5 %, single stored run", 1)
FIXED_10 = Rule("fixed 10 %, single stored run", 1)
ENVELOPE = Rule("rolling best of 10, 5 %", 1)
Z_SCORE = Rule("z-score > 3", 1)
WELCH = Rule("Welch 95 % interval and 10 %, 3 launches", 3)
RETRY = Rule("5 % of the median, any of 3 tries passes", 3)
OTHERS = (FIXED_5, FIXED_10, ENVELOPE, Z_SCORE, WELCH, RETRY)


def statistic(rule: Rule, baseline: Stored, session: Session) -> Scores:
    """How far each series is towards the rule's threshold; above 1 is red."""
    found: Scores = STATISTICS[rule.name](baseline, session)
    return found


def _welch(baseline: Stored, fresh: Scores) -> Scores:
    """Change over 10 % where the 95 % interval of the change excludes zero, else 0."""
    effect = fresh.mean(axis=1) - baseline.launches.mean(axis=1)
    count = baseline.launches.shape[1]
    a = fresh.var(axis=1, ddof=1) / fresh.shape[1]
    b = baseline.variance / count
    freedom = (a + b) ** 2 / (a**2 / (fresh.shape[1] - 1) + b**2 / (count - 1))
    sure = stdtr(freedom, effect / np.sqrt(a + b)) > 0.975
    return np.where(sure, effect / np.log(1.10), 0.0)


def _z_score(baseline: Stored, latest: Scores) -> Scores:
    scores: Scores = (latest - baseline.launches.mean(axis=1)) / np.sqrt(baseline.variance)
    return scores


STATISTICS: dict[str, Callable[[Stored, Session], Any]] = {
    FIXED_5.name: lambda b, s: (s.candidate[:, 0] - b.launches[:, -1]) / np.log(1.05),
    FIXED_10.name: lambda b, s: (s.candidate[:, 0] - b.launches[:, -1]) / np.log(1.10),
    ENVELOPE.name: lambda b, s: (s.candidate[:, 0] - b.launches[:, -10:].min(axis=1)) / np.log(1.05),
    Z_SCORE.name: lambda b, s: _z_score(b, s.candidate[:, 0]) / 3,
    WELCH.name: lambda b, s: _welch(b, s.candidate[:, :3]),
    RETRY.name: lambda b, s: (s.candidate[:, :3].min(axis=1) - b.center) / np.log(1.05),
}
