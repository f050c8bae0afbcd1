"""Stage 2 with a budget: which suspects get their launches, and what is said of the others."""

from __future__ import annotations

from pytest_pdperf.gate.verdict import Verdict
from tests.unit.stage2 import (
    BASE,
    FakeJudging,
    Stage2,
    note,
    slow,
    two_topologies,
)


def test_without_a_budget_everything_is_launched_most_suspects_first() -> None:
    stage = Stage2(slow, two_topologies())
    assert {cell.verdict.verdict for cell in stage.run()} == {Verdict.FAIL}
    assert stage.names == ["blatant"] * 2 + ["doubtful"] * 2


def test_a_budget_goes_first_to_what_is_in_doubt_and_says_what_it_leaves() -> None:
    judging = two_topologies()
    stage = Stage2(slow, judging, budget=200.0)
    stage.bench.bring_ups = {"blatant": 40.0, "doubtful": 40.0}
    assert stage.run() == judging.cells
    assert stage.names == ["doubtful", "doubtful"]
    assert stage.bench.now <= 200
    blatant, second, doubtful = judging.cells
    assert doubtful.verdict.verdict is Verdict.FAIL
    assert blatant.verdict.verdict is second.verdict.verdict is Verdict.SUSPECT
    assert "budget is used up" in note(blatant) and "budget" not in note(doubtful)
    (line,) = [line for line in stage.said if "budget is used up" in line]
    assert "80 s left" in line and "take about 160 s" in line
    assert "c1 tpot_ms_p50" in line and "c2 tpot_ms_p50" in line


def test_a_budget_that_fits_decides_everything() -> None:
    stage = Stage2(slow, two_topologies(), budget=1000.0)
    stage.bench.bring_ups = {"blatant": 40.0, "doubtful": 40.0}
    assert {cell.verdict.verdict for cell in stage.run()} == {Verdict.FAIL}
    assert not any("budget" in line for line in stage.said)


def test_launches_that_take_longer_than_thought_end_at_the_budget() -> None:
    judging = FakeJudging()
    cell = judging.add("one", "c1", BASE * 1.3)
    stage = Stage2(slow, judging, budget=100.0)  # bring-ups unknown: 2 x 20 s expected, 2 x 60 s needed
    stage.run()
    assert len(stage.bench.launches) == 1
    assert cell.verdict.verdict is Verdict.SUSPECT and "budget is used up" in note(cell)


def test_time_before_stage_2_counts_against_the_budget() -> None:
    judging = FakeJudging()
    judging.add("one", "c1", BASE * 1.3)
    stage = Stage2(slow, judging, budget=200.0)
    stage.bench.now = 190.0
    stage.run()
    assert stage.bench.launches == []


def test_of_two_clear_topologies_the_one_that_decides_more_a_second_is_first() -> None:
    judging = FakeJudging()
    for cell in ("c1", "c2", "c3"):
        judging.add("costly", cell, BASE * 1.5)
    judging.add("cheap", "c1", BASE * 1.5)
    stage = Stage2(slow, judging, budget=10_000.0)
    stage.bench.bring_ups = {"costly": 900.0, "cheap": 40.0}
    stage.run()
    assert stage.names == ["cheap"] * 2 + ["costly"] * 2
