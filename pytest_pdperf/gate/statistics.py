"""The gate's arithmetic: how far a launch may stand from its baseline before it is suspect.

The replicate is a launch, never a request: requests of one run share batches and queues. Everything here is
pure and works on x = s*ln(y) with s = +1 for lower-is-better and -1 for higher-is-better, so a larger x is
always worse and differences of x are relative changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Literal

PRIOR_WEIGHT = 8
"""Degrees of freedom that the variance borrowed from sibling cells is worth."""

CONFIDENCE = 0.95
"""One-sided level of stage 1."""

MEDIAN_INFLATION = 1.57
"""Variance of a median of B normal values is about (pi/2)/B times theirs."""

POWER = 0.80
"""Chance at which a change counts as one that the cell could have detected."""

Binding = Literal["tolerance", "noise", "floor"]


def log_score(value: float, direction: int) -> float:
    """Put a metric on the scale where larger is worse and differences are relative.

    `direction` is +1 (lower is better) or -1 (higher is better). Raises ValueError for a value that is not
    finite and positive: NaN compares false with every limit and would pass.
    """
    if direction not in (1, -1):
        raise ValueError(f"direction must be +1 or -1, got {direction!r}")
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{value!r} is not a finite positive number")
    return direction * math.log(value)


def value_of(score: float, direction: int) -> float:
    """Inverse of `log_score`."""
    return math.exp(direction * score)


def relative_worsening(difference: float, direction: int) -> float:
    """Turn a difference of scores into the change that people quote, signed so that + is worse.

    ttft 100 -> 110 ms is +0.10, output_tps 500 -> 300 is +0.40.
    """
    return math.expm1(difference) if direction == 1 else -math.expm1(-difference)


@dataclass(frozen=True, slots=True)
class Summary:
    """What the B launches of a baseline say about one metric."""

    center: float
    """b: median of the scores."""
    variance: float
    """v: sample variance (N-1); 0.0 for B = 1, where its weight is 0 too."""
    launches: int
    """B."""


def summarise(scores: Sequence[float]) -> Summary:
    """Median and sample variance of the scores of a baseline's launches. Raises ValueError for none."""
    if not scores:
        raise ValueError("a baseline needs at least one launch")
    return Summary(center=median(scores), variance=sample_variance(scores), launches=len(scores))


def sample_variance(scores: Sequence[float]) -> float:
    """Unbiased variance, 0.0 for a single value."""
    count = len(scores)
    if count < 2:
        return 0.0
    mean = math.fsum(scores) / count
    return math.fsum((x - mean) ** 2 for x in scores) / (count - 1)


@dataclass(frozen=True, slots=True)
class Pooled:
    """v0: a metric's launch-to-launch variance over sibling cells, so that a cell with few repeats borrows
    strength.
    """

    variance: float
    freedom: int
    """Degrees of freedom behind it; below `PRIOR_WEIGHT` the metric's shipped prior is used instead."""


@dataclass(frozen=True, slots=True)
class Share:
    """phi: the part of a metric's launch-to-launch variance that is left between launches of one session.

    A paired comparison cancels the rest, which is what nights differ by. Being a ratio, it can be pooled over
    cells that are not equally noisy.
    """

    value: float
    freedom: int
    """Degrees of freedom behind it; below `PRIOR_WEIGHT` no cancelling is assumed."""

    @classmethod
    def of(cls, parts: Iterable[tuple[float, int]]) -> Share:
        """Pool (ratio, degrees of freedom) pairs."""
        known = list(parts)
        freedom = sum(count for _, count in known)
        return cls(sum(ratio * count for ratio, count in known) / freedom if freedom else 1.0, freedom)


def pool(groups: Iterable[Sequence[float]]) -> Pooled:
    """Pool the variances of several cells' scores, each weighted with its B-1."""
    return merged(Pooled(sample_variance(scores), len(scores) - 1) for scores in groups if scores)


def merged(parts: Iterable[Pooled]) -> Pooled:
    """One variance from several, each weighted with its degrees of freedom."""
    known = list(parts)
    freedom = sum(part.freedom for part in known)
    squares = sum(part.variance * part.freedom for part in known)
    return Pooled(variance=squares / freedom if freedom else 0.0, freedom=freedom)


def prior_variance(pooled: Pooled | None, prior_sd: float) -> float:
    """v0 from the siblings once they carry `PRIOR_WEIGHT` degrees of freedom, the shipped prior's until
    then.
    """
    if pooled is not None and pooled.freedom >= PRIOR_WEIGHT:
        return pooled.variance
    return prior_sd**2


def moderated_variance(v0: float, v: float, launches: int, weight: int = PRIOR_WEIGHT) -> float:
    """s2 = (8*v0 + (B-1)*v) / (8 + B-1)."""
    return (weight * v0 + (launches - 1) * v) / (weight + launches - 1)


def standard_error(s2: float, n: float, launches: int) -> float:
    """SE(n) = sqrt(s2) * sqrt(1/n + 1.57/B), for the mean of n fresh launches against the median of B."""
    return math.sqrt(s2) * math.sqrt(1 / n + MEDIAN_INFLATION / launches)


def freedom_of(launches: int, weight: int = PRIOR_WEIGHT) -> int:
    """Degrees of freedom of s2: 8 + B-1."""
    return weight + launches - 1


@lru_cache(maxsize=4096)
def t_quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t. Cached, and from scipy.special alone: importing scipy.stats costs over a
    second.
    """
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


def t_tail(t: float, freedom: float) -> float:
    """P(T > t) of Student's t: the one-sided p-value."""
    from scipy.special import stdtr

    return float(stdtr(freedom, -t))


@dataclass(frozen=True, slots=True)
class Limit:
    """How much worse one launch may be, in score units, and why."""

    limit: float
    binding: Binding
    noise: float
    """t[.95, 8+B-1] * SE(1)."""
    tolerance: float
    """max(ln(1+tau), floor): what the metric is allowed to lose."""
    standard_error: float
    freedom: int
    noisy: bool
    """The noise term is over twice what the metric may lose: a launch inside the limit proves nothing."""

    @property
    def detectable(self) -> float:
        """Smallest true change (score units) that crosses this limit with probability `POWER`."""
        return self.limit + t_quantile(POWER, self.freedom) * self.standard_error


def floor_score(baseline: float, floor: float, direction: int) -> float:
    """The absolute floor as a score difference at this baseline value: ln((y+f)/y), or ln(y/(y-f)) for
    higher-is-better.
    """
    if floor <= 0:
        return 0.0
    if direction == 1:
        return math.log1p(floor / baseline)
    return math.inf if floor >= baseline else -math.log1p(-floor / baseline)


def limit_for(summary: Summary, v0: float, tau: float, floor: float, direction: int) -> Limit:
    """limit = max(ln(1+tau), floor, t[.95, 8+B-1] * SE(1)), with the term that binds.

    `tau` is relative, `floor` in the metric's unit, `v0` a variance of scores. The absolute floor counts as
    tolerance, also when deciding whether the cell is noisy.
    """
    s2 = moderated_variance(v0, summary.variance, summary.launches)
    error = standard_error(s2, 1, summary.launches)
    freedom = freedom_of(summary.launches)
    noise = t_quantile(CONFIDENCE, freedom) * error
    relative = math.log1p(tau)
    absolute = floor_score(value_of(summary.center, direction), floor, direction)
    allowed = max(relative, absolute)
    binding: Binding = "floor" if absolute > relative else "tolerance"
    return Limit(
        limit=max(allowed, noise),
        binding="noise" if noise > allowed else binding,
        noise=noise,
        tolerance=allowed,
        standard_error=error,
        freedom=freedom,
        noisy=noise > 2 * allowed,
    )


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's adjusted p-values, in the order given: reject at alpha where adjusted <= alpha."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = running
    return tuple(adjusted)
