"""Send times: their mean rate, their spread, their ramp - and that they repeat."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.load.arrivals import send_times
from pytest_pdperf.load.prompts import generator
from pytest_pdperf.spec.workload import OpenLoop


def times(count: int, seed: int = 1, **arrival: object) -> np.ndarray:
    return np.asarray(
        send_times(OpenLoop.model_validate({"rate_rps": 20.0, **arrival}), count, generator(seed))
    )


def test_constant_gaps() -> None:
    assert times(4, process="constant") == pytest.approx([0.0, 0.05, 0.1, 0.15])


@pytest.mark.parametrize(
    ("process", "burstiness", "spread"), [("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)]
)
def test_rate_and_burstiness(process: str, burstiness: float, spread: float) -> None:
    """Coefficient of variation of the gaps is 1 for Poisson, 1/sqrt(shape) for gamma."""
    gaps = np.diff(times(20_000, process=process, burstiness=burstiness))
    assert gaps.mean() == pytest.approx(0.05, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize(("low", "high"), [(10.0, 40.0), (40.0, 10.0)])
def test_ramp_runs_linearly_from_one_rate_to_the_other(low: float, high: float) -> None:
    at = times(1000, rate_rps=low, ramp_to_rps=high, process="constant")
    gaps = np.diff(at)
    assert 1 / gaps[0] == pytest.approx(low, rel=0.02)
    assert 1 / gaps[-1] == pytest.approx(high, rel=0.02)
    assert at[-1] == pytest.approx(2 * 1000 / (low + high), rel=0.01)
    halfway = np.searchsorted(at, at[-1] / 2) / 1000
    assert halfway == pytest.approx((low + (low + high) / 2) / 2 / (low + high), abs=0.01)


@given(
    st.integers(0, 50),
    st.sampled_from(["constant", "poisson", "gamma"]),
    st.none() | st.floats(0.5, 200),
    st.floats(0.05, 10),
)
def test_always_sorted_finite_and_from_zero(
    count: int, process: str, ramp: float | None, burstiness: float
) -> None:
    at = times(count, process=process, ramp_to_rps=ramp, burstiness=burstiness)
    assert len(at) == count
    assert np.isfinite(at).all()
    assert all(a <= b for a, b in pairwise(at))
    assert count == 0 or at[0] == 0


def test_same_seed_same_times() -> None:
    assert (times(50, 3) == times(50, 3)).all()
    assert (times(50, 3)[1:] != times(50, 4)[1:]).all()
