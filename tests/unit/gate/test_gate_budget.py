"""Extra launches go where they settle most, within the minutes there are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.gate.budget import Series, chance_of_error, spend

TOLERANCE = math.log(1.05)


def series(difference: float, sd: float = 0.02) -> Series:
    return Series("cell", "output_tps", difference, TOLERANCE, sd**2, 10)


def test_a_series_on_the_line_is_a_coin_toss_and_a_far_one_is_decided() -> None:
    assert chance_of_error(series(TOLERANCE), 1) == pytest.approx(0.5)
    assert chance_of_error(series(0.30), 1) < 1e-6
    assert chance_of_error(series(0.03, sd=0.0), 1) == 0.0
    # distance 0.5 SE: Phi(-0.5) = 0.3085
    error = 0.02 * math.sqrt(1 + 0.157)
    assert chance_of_error(series(TOLERANCE - error / 2), 1) == pytest.approx(0.3085, abs=1e-3)


@given(st.floats(-0.2, 0.3), st.integers(1, 8))
def test_more_launches_never_add_doubt(difference: float, n: int) -> None:
    assert chance_of_error(series(difference), n + 1) <= chance_of_error(series(difference), n)


def test_launches_go_to_the_topology_in_doubt() -> None:
    doubtful = [series(TOLERANCE - 0.02), series(TOLERANCE + 0.02)]
    settled = [series(-0.1), series(0.4)]
    chosen = spend({"pd": doubtful, "agg": settled}, {"pd": 100.0, "agg": 100.0}, 1000.0)
    assert [one.topology for one in chosen] == ["pd"] * len(chosen) and chosen
    assert [one.launch for one in chosen] == list(range(1, len(chosen) + 1))
    gains = [one.gain for one in chosen]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_the_cheaper_of_two_equals_comes_first(first: str, second: str) -> None:
    rows = [series(TOLERANCE - 0.02)]
    chosen = spend({"a": rows, "b": rows}, {first: 100.0, second: 300.0}, 400.0, most=1)
    assert [one.topology for one in chosen] == [first, second]


@pytest.mark.parametrize("budget", [0.0, 99.0, 250.0, 450.0])
def test_the_budget_is_kept(budget: float) -> None:
    rows = [series(TOLERANCE - 0.02)]
    chosen = spend({"a": rows, "b": rows}, {"a": 100.0, "b": 150.0}, budget, most=3)
    assert sum(one.seconds for one in chosen) <= budget
    assert bool(chosen) == (budget >= 100)


def test_a_free_launch_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="more than 0 s"):
        spend({"a": []}, {"a": 0.0}, 10.0)
