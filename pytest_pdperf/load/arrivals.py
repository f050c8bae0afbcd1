"""When open-loop requests leave: send times decided before the clock starts, the same for every topology."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pytest_pdperf.spec.workload import OpenLoop


def send_times(arrival: OpenLoop, count: int, rng: np.random.Generator) -> tuple[float, ...]:
    """Seconds after the start at which each of `count` requests is due; the first is due at 0.

    Gaps are drawn at unit rate (constant: 1, Poisson: exponential, gamma: shape `burstiness`, mean 1) and
    mapped through the inverse of the expected-arrivals curve, so a ramp bends the schedule and keeps its
    process. A ramp runs linearly from `rate_rps` to `ramp_to_rps` over the time in which it yields `count`
    requests.
    """
    if count <= 0:
        return ()
    gaps = _unit_gaps(arrival, count - 1, rng)
    expected = np.concatenate([[0.0], np.cumsum(gaps)])
    low, high = arrival.rate_rps, arrival.ramp_to_rps or arrival.rate_rps
    if high == low:
        return tuple((expected / low).tolist())
    duration = 2 * count / (low + high)
    slope = (high - low) / duration
    inside = np.minimum(expected, count)
    root = (np.sqrt(low * low + 2 * slope * inside) - low) / slope
    return tuple((root + np.maximum(expected - count, 0.0) / high).tolist())


def _unit_gaps(arrival: OpenLoop, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    if arrival.process == "constant":
        return np.ones(count)
    if arrival.process == "poisson":
        return rng.exponential(1.0, size=count)
    return rng.gamma(arrival.burstiness, 1.0 / arrival.burstiness, size=count)
