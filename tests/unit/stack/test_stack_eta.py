"""Time left: open cells at the pace of the finished ones, bring-ups that are still to come, the running cell."""

import pytest

from pytest_pdperf.stack.eta import Remaining

CELLS = {("a", "x"): 10.0, ("a", "y"): 30.0, ("b", "x"): 10.0, ("b", "y"): 30.0}


def remaining() -> Remaining:
    return Remaining(CELLS, {"a": 60.0, "b": 40.0})


def test_before_anything_is_known_the_guesses_are_added_up() -> None:
    assert remaining().seconds() == pytest.approx(80 + 100)


def test_finished_cells_and_bring_ups_correct_what_is_open() -> None:
    left = remaining()
    left.came_up("a", 30.0)
    assert left.seconds() == pytest.approx(80 + 20)
    left.finished(("a", "x"), 20.0)
    assert left.seconds() == pytest.approx(2 * 70 + 20)
    left.finished(("a", "y"), 20.0)
    assert left.seconds() == pytest.approx(40 * 40 / 40 + 20)


def test_a_running_cell_counts_down_but_never_below_nothing() -> None:
    left = remaining()
    assert left.seconds(("a", "y"), 12.0) == pytest.approx(180 - 12)
    assert left.seconds(("a", "y"), 1e6) == pytest.approx(180 - 30)
    left.finished(("a", "y"), 30.0)
    assert left.seconds(("a", "y"), 12.0) == pytest.approx(150)


def test_launches_of_which_nothing_is_open_and_fresh_launches_do_not_count() -> None:
    left = remaining()
    left.finished(("b", "x"), 10.0)
    left.finished(("b", "y"), 30.0)
    left.came_up("a-launch1001", 500.0)
    left.finished(("a-launch1001", "x"), 500.0)
    assert left.seconds() == pytest.approx(40 + 60)
