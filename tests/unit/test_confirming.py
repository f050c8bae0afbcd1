"""Stage 2 on a bench without processes: what it launches and what it then says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_pdperf.confirming import FRESH
from pytest_pdperf.errors import BringUpError, RoleDied
from pytest_pdperf.gate.statistics import Share
from pytest_pdperf.gate.verdict import Verdict
from pytest_pdperf.measuring import TopologyLaunch
from tests.unit.stage2 import (
    BASE,
    FakeJudging,
    Stage2,
    fast,
    note,
    result,
    slow,
)


@pytest.mark.parametrize(
    ("speed", "verdict", "words"),
    [
        (slow, Verdict.SUSPECT, "seen again in 2 more measurements of the same deployment"),
        (fast, Verdict.PASS, "cleared by 2 more measurements of the same deployment"),
    ],
)
def test_a_stack_that_cannot_be_launched_again_is_measured_again_and_never_confirmed(
    speed: Callable[[TopologyLaunch, int], float], verdict: Verdict, words: str
) -> None:
    judging = FakeJudging()
    cell = judging.add("a", "c1", BASE * 1.3)
    stage2 = Stage2(speed, judging)
    stage2.bench.relaunches = False
    stage2.run()
    assert cell.verdict.verdict is verdict
    assert words in note(cell)
    assert len(stage2.bench.launches) == 2
    assert "nothing fresh can be launched" in stage2.said[0]


def test_nothing_suspect_launches_nothing() -> None:
    judging = FakeJudging()
    judging.add("one", "c1", BASE)
    stage = Stage2(slow, judging)
    assert not stage.confirming.pending(judging.cells[0])
    assert stage.run() == [] and stage.bench.launches == []


def test_a_suspect_gets_two_launches_of_its_cell_alone_and_fails() -> None:
    judging = FakeJudging()
    bad, good = judging.add("one", "c1", BASE * 1.3), judging.add("one", "c2", BASE)
    stage = Stage2(slow, judging)
    assert stage.confirming.pending(bad)
    assert stage.run() == [bad]
    assert stage.bench.measured == [("one", "c1"), ("one", "c1")]
    assert [launch.number for launch in stage.bench.launches] == [FRESH + 1, FRESH + 2]
    assert not any(launch.reference for launch in stage.bench.launches)
    assert bad.verdict.verdict is Verdict.FAIL and "confirmed by 2 more launches" in note(bad)
    assert good.verdict.verdict is Verdict.PASS


def test_fresh_launches_alone_clear_a_suspect() -> None:
    judging = FakeJudging()
    cell = judging.add("one", "c1", BASE * 1.3)
    Stage2(fast, judging).run()
    assert cell.verdict.verdict is Verdict.PASS and "cleared" in note(cell)


def test_with_a_reference_the_builds_are_launched_a_b_b_a() -> None:
    judging = FakeJudging()
    cell = judging.add("one", "c1", BASE * 1.3)
    stage = Stage2(slow, judging, reference="/env")
    stage.run()
    assert [launch.reference for launch in stage.bench.launches] == [True, False, False, True]
    assert cell.verdict.verdict is Verdict.FAIL and "A B B A" in note(cell)


def test_a_slow_night_that_hits_both_builds_is_no_regression() -> None:
    judging = FakeJudging()
    cell = judging.add("one", "c1", BASE * 1.3)
    Stage2(lambda launch, number: BASE * 1.3, judging, reference="/env").run()
    assert cell.verdict.verdict is Verdict.PASS


def test_never_leaves_the_first_measurement_the_last_word() -> None:
    judging = FakeJudging()
    cell = judging.add("one", "c1", BASE * 1.3)
    stage = Stage2(fast, judging, confirm="never")
    assert not stage.confirming.enabled and not stage.confirming.pending(cell)
    stage.confirming.settle(cell)
    assert stage.run() == [] and stage.bench.launches == []
    assert cell.verdict.verdict is Verdict.FAIL and "--confirm never" in note(cell)


def test_all_measures_what_passed_again_and_finds_what_one_lucky_launch_hid() -> None:
    judging = FakeJudging()
    cell = judging.add("one", "c1", BASE)
    stage = Stage2(slow, judging, confirm="all")
    assert stage.run() == [cell]
    assert len(stage.bench.launches) == 2 and cell.verdict.verdict is Verdict.FAIL


@pytest.mark.parametrize("problem", [BringUpError("no port"), RoleDied("server-0", "exit code 1")])
def test_a_launch_that_fails_leaves_the_suspect_open_and_is_said(problem: Exception) -> None:
    judging = FakeJudging()
    cell = judging.add("one", "c1", BASE * 1.3)
    stage = Stage2(lambda launch, number: problem if number == 1 else BASE * 1.3, judging)
    assert stage.run() == [cell]
    assert len(stage.bench.launches) == 2, "the next launch is tried all the same"
    assert cell.verdict.verdict is Verdict.SUSPECT and "missing or invalid" in note(cell)
    assert any("fresh launch failed" in line for line in stage.said)


@pytest.mark.parametrize("more", [{"invalid": ("recomputed",)}, {}])
def test_an_invalid_fresh_result_is_no_reading(more: dict[str, Any]) -> None:
    judging = FakeJudging()
    cell = judging.add("one", "c1", BASE * 1.3)
    broken = result("one", "c1", BASE, **more)
    if not more:
        broken = replace(broken, ok=63)
    stage = Stage2(lambda launch, number: broken if number == 2 else BASE, judging)
    stage.run()
    assert cell.verdict.verdict is Verdict.SUSPECT and "missing or invalid" in note(cell)


def test_fresh_launches_leave_their_cells_on_disk_and_say_where() -> None:
    judging = FakeJudging()
    bad, good = judging.add("one", "c1", BASE * 1.3), judging.add("one", "c2", BASE)
    stage = Stage2(slow, judging, reference="/env")
    stage.run()
    launches = [f"one-launch{FRESH + 1}-reference", *(f"one-launch{FRESH + i}" for i in (2, 3))]
    assert stage.confirming.kept(bad)[:3] == tuple(Path(f"{name} c1") for name in launches)
    assert len(stage.confirming.kept(bad)) == 4 and stage.confirming.kept(good) == ()


def test_what_topologies_know_of_a_sessions_share_is_put_together() -> None:
    """Five degrees of freedom each are too few; together they tell that hardly anything is left within a session."""

    def error(freedom: int) -> float:
        judging = FakeJudging()
        cells = [judging.add(name, "c1", BASE * 1.3) for name in ("one", "two")]
        judging.shares = {"tpot_ms_p50": Share(1e-4, freedom)}
        Stage2(slow, judging, reference="/env").run()
        p = cells[0].verdict.rows[0].p
        assert p is not None
        return p

    assert error(5) < error(1) / 10
