"""The gate's arithmetic against values worked out by hand and against scipy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.gate.statistics import (
    Pooled,
    Summary,
    floor_score,
    holm,
    limit_for,
    log_score,
    moderated_variance,
    pool,
    prior_variance,
    relative_worsening,
    sample_variance,
    standard_error,
    summarise,
    t_quantile,
    t_tail,
    value_of,
)

positive = st.floats(min_value=1e-3, max_value=1e6)
directions = st.sampled_from([1, -1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_a_value_that_is_not_finite_and_positive_has_no_score(bad: float) -> None:
    with pytest.raises(ValueError, match="finite positive"):
        log_score(bad, 1)


def test_a_direction_is_one_of_two() -> None:
    with pytest.raises(ValueError, match="direction"):
        log_score(1.0, 0)


@given(positive, positive, directions)
def test_larger_scores_are_worse(one: float, other: float, direction: int) -> None:
    worse = max(one, other) if direction == 1 else min(one, other)
    better = min(one, other) if direction == 1 else max(one, other)
    assert log_score(worse, direction) >= log_score(better, direction)
    assert math.isclose(value_of(log_score(one, direction), direction), one, rel_tol=1e-9)


def test_changes_are_quoted_as_people_do() -> None:
    assert relative_worsening(math.log(110 / 100), 1) == pytest.approx(0.10)
    assert relative_worsening(log_score(300, -1) - log_score(500, -1), -1) == pytest.approx(0.40)
    assert relative_worsening(log_score(500, -1) - log_score(300, -1), -1) == pytest.approx(-2 / 3)


def test_variance_divides_by_one_less_than_the_launches() -> None:
    assert sample_variance([1.0, 2.0, 3.0, 6.0]) == pytest.approx(14 / 3)
    assert sample_variance([5.0]) == 0.0
    summary = summarise([3.0, 1.0, 2.0, 10.0])
    assert (summary.center, summary.launches) == (2.5, 4)
    assert summary.variance == pytest.approx(50 / 3)


def test_nothing_to_summarise_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        summarise([])


def test_pooling_weights_with_degrees_of_freedom() -> None:
    pooled = pool([[1.0, 3.0], [1.0, 2.0, 3.0], [7.0]])
    assert pooled.freedom == 3
    assert pooled.variance == pytest.approx((2.0 + 2.0) / 3)
    assert pool([]) == Pooled(0.0, 0)


def test_the_shipped_prior_stands_in_until_siblings_carry_eight_degrees_of_freedom() -> None:
    assert prior_variance(None, 0.02) == pytest.approx(0.0004)
    assert prior_variance(Pooled(1e-6, 7), 0.02) == pytest.approx(0.0004)
    assert prior_variance(Pooled(1e-6, 8), 0.02) == pytest.approx(1e-6)


def test_limit_by_hand() -> None:
    # B = 5, v0 = 0.02^2, v = 0.01^2: s2 = (8*0.0004 + 4*0.0001)/12 = 0.0003
    assert moderated_variance(0.0004, 0.0001, 5) == pytest.approx(0.0003)
    # SE(1) = 0.0173205 * sqrt(1 + 0.314) = 0.0198545; t[.95, 12] = 1.782288
    assert standard_error(0.0003, 1, 5) == pytest.approx(0.0198545, rel=1e-5)
    assert standard_error(0.0003, 2, 5) == pytest.approx(0.0173205 * math.sqrt(0.814), rel=1e-5)
    limit = limit_for(Summary(0.0, 0.0001, 5), 0.0004, tau=0.05, floor=0, direction=1)
    assert limit.noise == pytest.approx(1.782288 * 0.0198545, rel=1e-4)
    assert limit.limit == pytest.approx(math.log(1.05))
    assert (limit.binding, limit.freedom, limit.noisy) == ("tolerance", 12, False)
    tight = limit_for(Summary(0.0, 0.0001, 5), 0.0004, tau=0.01, floor=0, direction=1)
    assert tight.limit == pytest.approx(0.035387, rel=1e-3)
    assert (tight.binding, tight.noisy) == ("noise", True)


@pytest.mark.parametrize(("tau", "noisy"), [(0.0165, True), (0.0190, False)])
def test_noisy_starts_at_twice_the_tolerance(tau: float, noisy: bool) -> None:
    # noise 0.035387 as above; 2*ln(1.0165) = 0.0327, 2*ln(1.019) = 0.0376
    assert limit_for(Summary(0.0, 0.0001, 5), 0.0004, tau=tau, floor=0, direction=1).noisy is noisy


def test_quantiles_and_tails_agree_with_scipy() -> None:
    from scipy import stats

    for freedom in (1, 8, 12, 17.5, 200):
        for probability in (0.01, 0.5, 0.8, 0.95, 0.99):
            assert t_quantile(probability, freedom) == pytest.approx(
                stats.t.ppf(probability, freedom), abs=1e-9
            )
        for t in (-3.0, 0.0, 1.7, 8.0):
            assert t_tail(t, freedom) == pytest.approx(stats.t.sf(t, freedom), rel=1e-9)


@pytest.mark.parametrize(
    ("baseline", "floor", "direction", "expected"),
    [
        (2.0, 0.2, 1, math.log(1.1)),
        (100.0, 10.0, -1, math.log(100 / 90)),
        (10.0, 10.0, -1, math.inf),
        (5.0, 0.0, 1, 0.0),
    ],
)
def test_absolute_floors(baseline: float, floor: float, direction: int, expected: float) -> None:
    assert floor_score(baseline, floor, direction) == pytest.approx(expected)


def test_a_floor_binds_and_counts_when_deciding_what_is_noisy() -> None:
    center = log_score(1.0, 1)
    limit = limit_for(Summary(center, 0.0, 5), 0.04**2, tau=0.01, floor=0.2, direction=1)
    assert (limit.binding, limit.noisy) == ("floor", False)
    assert limit.limit == pytest.approx(math.log(1.2))


@given(
    st.integers(2, 30),
    st.floats(1e-8, 0.05),
    st.floats(1e-8, 0.05),
    st.floats(0.001, 0.5),
    directions,
)
def test_more_launches_never_widen_the_limit(b: int, v0: float, v: float, tau: float, direction: int) -> None:
    # at equal variance; with v != v0 more launches may also say that the cell is noisier than its siblings
    few = limit_for(Summary(0.0, v0, b), v0, tau, 0.0, direction)
    many = limit_for(Summary(0.0, v0, b + 1), v0, tau, 0.0, direction)
    assert many.limit <= few.limit * (1 + 1e-12)
    assert few.detectable > few.limit
    noisier = limit_for(Summary(0.0, v0 + v, b), v0, tau, 0.0, direction)
    assert noisier.limit >= few.limit * (1 - 1e-12)


@given(st.integers(1, 30), st.floats(1e-8, 0.05), st.floats(0.001, 0.5), st.floats(0.0, 0.5))
def test_a_larger_tolerance_never_narrows_the_limit(b: int, v: float, tau: float, more: float) -> None:
    one = limit_for(Summary(0.0, v, b), v, tau, 0.0, 1)
    two = limit_for(Summary(0.0, v, b), v, tau + more, 0.0, 1)
    assert two.limit >= one.limit
    assert one.noisy or not two.noisy


def test_detectable_change_is_flagged_four_times_in_five() -> None:
    import random

    limit = limit_for(Summary(0.0, 0.0004, 10), 0.0004, tau=0.03, floor=0, direction=1)
    source = random.Random(7)
    hits, rounds = 0, 4000
    for _ in range(rounds):
        launches = [source.gauss(0, 0.02) for _ in range(10)]
        summary = summarise(launches)
        own = limit_for(Summary(summary.center, 0.0004, 10), 0.0004, tau=0.03, floor=0, direction=1)
        hits += source.gauss(limit.detectable, 0.02) - summary.center > own.limit
    assert hits / rounds == pytest.approx(0.80, abs=0.04)


def test_holm_by_hand() -> None:
    # sorted .01 .02 .04 .30 -> *4 *3 *2 *1 = .04 .06 .08 .30
    assert holm([0.04, 0.01, 0.30, 0.02]) == pytest.approx((0.08, 0.04, 0.30, 0.06))
    assert holm([0.5, 0.6]) == (1.0, 1.0)
    assert holm([]) == ()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_holm_is_between_raw_and_bonferroni_and_keeps_the_order(raw: list[float]) -> None:
    adjusted = holm(raw)
    for p, q in zip(raw, adjusted, strict=True):
        assert p <= q <= min(1.0, p * len(raw))
    order = sorted(range(len(raw)), key=raw.__getitem__)
    assert [adjusted[i] for i in order] == sorted(adjusted)
