"""Where more launches decide most: a night has a fixed number of minutes, and not every series deserves
them alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .statistics import standard_error


@dataclass(frozen=True, slots=True)
class Series:
    """One gated series of a topology as it stands, in score units."""

    cell: str
    metric: str
    difference: float
    """x - b; 0 when tonight's value is not known yet."""
    tolerance: float
    s2: float
    launches: int
    """B."""


@dataclass(frozen=True, slots=True)
class Spend:
    """One more launch of a topology, and what it is expected to settle."""

    topology: str
    launch: int
    """1 for the first extra launch."""
    seconds: float
    gain: float
    """Expected number of series called wrongly without this launch and rightly with it."""


def chance_of_error(series: Series, n: int) -> float:
    """Chance that the mean of n launches puts this series on the wrong side of its tolerance, if it truly
    stands where it seems to.

    Phi(-|distance to the tolerance| / SE(n)). 0.5 is a coin toss, near 0 is decided: a launch spent there
    is wasted.
    """
    if series.s2 <= 0:
        return 0.0
    distance = abs(series.difference - series.tolerance)
    return 0.5 * math.erfc(distance / standard_error(series.s2, n, series.launches) / math.sqrt(2))


def spend(
    series: Mapping[str, Sequence[Series]],
    cost_s: Mapping[str, float],
    budget_s: float,
    *,
    have: int = 1,
    most: int = 4,
) -> tuple[Spend, ...]:
    """Choose extra launches, topology by topology, greedily by errors avoided per second.

    `series` and `cost_s` (seconds of one launch with its cells) are keyed by topology; `have` launches
    exist, at most `most` extra ones are bought for each. Stops at the budget or when nothing would be
    settled. The gain of further launches falls, so greedy is optimal up to the last one that does not fit.
    """
    for topology, seconds in cost_s.items():
        if not seconds > 0:
            raise ValueError(f"a launch of {topology} must cost more than 0 s, got {seconds}")
    bought: dict[str, int] = dict.fromkeys(series, 0)
    left, chosen = budget_s, list[Spend]()
    while True:
        offers = []
        for topology, rows in series.items():
            extra = bought[topology]
            if extra >= most or cost_s[topology] > left:
                continue
            gain = sum(chance_of_error(r, have + extra) - chance_of_error(r, have + extra + 1) for r in rows)
            if gain > 1e-3:
                offers.append(Spend(topology, extra + 1, cost_s[topology], gain))
        if not offers:
            return tuple(chosen)
        best = max(offers, key=lambda offer: (offer.gain / offer.seconds, offer.topology))
        bought[best.topology] += 1
        left -= best.seconds
        chosen.append(best)
