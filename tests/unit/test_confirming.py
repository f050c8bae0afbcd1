"""Stage 2 on a bench without processes: what it launches, in which order, within which budget, what it then says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_pdperf.confirming import FRESH, Confirming, Kept
from pytest_pdperf.errors import BringUpError, RoleDied
from pytest_pdperf.evidence.canary import BEFORE, Canary, differences
from pytest_pdperf.gate.adapter import judge, suspects_of
from pytest_pdperf.gate.baseline import CellBaseline, Launch, Pin
from pytest_pdperf.gate.confirm import Suspect
from pytest_pdperf.gate.fingerprint import CellRef
from pytest_pdperf.gate.judge import set_aside
from pytest_pdperf.gate.statistics import Share
from pytest_pdperf.gate.verdict import Verdict
from pytest_pdperf.judging import JudgedCell, Judging
from pytest_pdperf.measure.cell_result import CellResult, MetricValue
from pytest_pdperf.measuring import Measured, TopologyLaunch
from pytest_pdperf.options import OPTIONS, Settings
from pytest_pdperf.spec.tolerances import Tolerances
from pytest_pdperf.spec.topology import Kind, Role, RoleSpec, Topology
from tests.unit.gate.gate_tables import KEY, START

BASE = 20.0
"""Stored tpot_ms_p50 of every cell, in ms; the tolerance is 5 %."""


def topology(name: str) -> Topology:
    return Topology(name=name, kind=Kind.AGGREGATED, roles={Role.SERVER: RoleSpec()})


def result(name: str, cell: str, tpot: float, **more: Any) -> CellResult:
    return CellResult(
        name, "w", cell, {"tpot_ms_p50": MetricValue(tpot, 64)}, requests=64, ok=64, wall_s=20.0, **more
    )


def baseline(cell: str, canary_ms: float | None = None, **machine: str) -> CellBaseline:
    machine |= {BEFORE: Canary({"gemm": canary_ms}).to_text()} if canary_ms else {}
    launches = tuple(
        Launch(
            id=f"l{i}",
            date=START,
            values={"tpot_ms_p50": BASE * (1 + 0.001 * (i - 3))},
            n={"tpot_ms_p50": 64},
            environment=machine,
        )
        for i in range(7)
    )
    return CellBaseline(
        CellRef("w", cell, "d"), Pin(key="k", workload_digest="d", reason="r", launches=launches)
    )


class FakeJudging:
    """The session's cells, judged by the real gate against baselines in memory."""

    def __init__(self) -> None:
        self.cells: list[JudgedCell] = []
        self.store = self
        self.after: dict[str, tuple[str, ...]] = {}
        self.shares: dict[str, Share] = {}

    def add(
        self, name: str, cell: str, tpot: float, canary_ms: float | None = None, **machine: str
    ) -> JudgedCell:
        stored, measured = baseline(cell, canary_ms, **machine), result(name, cell, tpot)
        verdict = judge(measured, stored, {}, Tolerances())
        judged = JudgedCell(topology(name), 1, measured, KEY, stored.ref, stored, verdict, None, False)
        self.cells.append(judged)
        return judged

    def suspects(self, cell: JudgedCell) -> tuple[Suspect, ...]:
        assert cell.baseline is not None
        return suspects_of(cell.result, cell.verdict, cell.baseline, {}, Tolerances(), cell=cell.id)

    def sessions(self, key: object) -> dict[str, Share]:
        return self.shares

    def recheck(self, cell: JudgedCell, environment: Mapping[str, str]) -> bool:
        assert cell.baseline is not None
        why = differences(environment, [launch.environment for launch in cell.baseline.launches])
        cell.verdict = set_aside(cell.verdict, why)
        return bool(why)


class FakeBench:
    """Launches take a minute; `speed` says what the n-th fresh launch measures of a cell."""

    relaunches = True

    def __init__(self, speed: Callable[[TopologyLaunch, int], float | Exception | CellResult]) -> None:
        self.speed = speed
        self.now = 0.0
        self.launches: list[TopologyLaunch] = []
        self.measured: list[tuple[str, str]] = []
        self.up: TopologyLaunch | None = None
        self.drops = 0
        self.machines: dict[str, dict[str, str]] = {}
        self.bring_ups: dict[str, float] = {}

    def begin(self, launch_: TopologyLaunch) -> None:
        assert self.up is None, "two launches at a time"
        self.up = launch_
        self.launches.append(launch_)
        self.now += 40.0

    def measure_cell(self, cell_id: str, workload: str) -> Measured:
        assert self.up is not None
        assert workload == "w"
        self.now += 20.0
        self.measured.append((self.up.topology.name, cell_id))
        found = self.speed(self.up, len(self.launches))
        if isinstance(found, Exception):
            raise found
        if not isinstance(found, CellResult):
            found = result(self.up.topology.name, cell_id, found)
        return cast(Measured, SimpleNamespace(result=found))

    def drop(self) -> None:
        self.drops += 1
        self.up = None

    def surroundings(self, launch_id: str) -> Mapping[str, str]:
        return self.machines.get(launch_id, {})

    def bring_up_s(self, topology: str) -> float | None:
        return self.bring_ups.get(topology)


class Stage2:
    """A confirming with its fakes."""

    def __init__(
        self, speed: Callable[[TopologyLaunch, int], Any], judging: FakeJudging, **settings: Any
    ) -> None:
        values = {option.name: None for option in OPTIONS} | {"confirm": "suspects"} | settings
        self.bench = FakeBench(speed)
        self.judging = judging
        self.said: list[str] = []
        self.clocks: dict[str, dict[str, str]] = {}
        """`<launch> <cell>` -> what its GPUs did."""
        self.confirming = Confirming(
            Settings(values, frozenset()),
            self.bench,
            cast(Judging, judging),
            "w",
            lambda text, detail=False: self.said.append(text),
            self.keep,
            clock=lambda: self.bench.now,
        )

    def keep(self, launch: TopologyLaunch, measured: Measured) -> Kept:
        name = f"{launch.id} {measured.result.cell}"
        return Kept(Path(name), self.clocks.get(name, {}))

    def run(self) -> list[JudgedCell]:
        settled = self.confirming.run()
        assert self.bench.up is None, "a launch was left behind"
        assert self.bench.drops == len(self.bench.launches)
        return settled

    @property
    def names(self) -> list[str]:
        return [launch.topology.name for launch in self.bench.launches]


def slow(launch: TopologyLaunch, number: int) -> float:
    """The build under test is 30 % slower, the reference is not."""
    return BASE if launch.reference else BASE * 1.3


def fast(launch: TopologyLaunch, number: int) -> float:
    return BASE


def note(cell: JudgedCell) -> str:
    return cell.verdict.rows[0].note


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


# -- the budget --------------------------------------------------------------------------------------------


def two_topologies() -> FakeJudging:
    judging = FakeJudging()
    judging.add("blatant", "c1", BASE * 1.5)
    judging.add("blatant", "c2", BASE * 1.5)
    judging.add("doubtful", "c1", BASE * 1.07)
    return judging


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


# -- the machine -------------------------------------------------------------------------------------------


def machine(ms: float) -> dict[str, str]:
    return {BEFORE: Canary({"gemm": ms}).to_text()}


def test_a_fresh_launch_on_a_slower_machine_does_not_count() -> None:
    judging = FakeJudging()
    cell = judging.add("one", "c1", BASE * 1.3, canary_ms=10.0)
    stage = Stage2(slow, judging)
    stage.bench.machines = {f"one-launch{FRESH + 1}": machine(10.1), f"one-launch{FRESH + 2}": machine(11.0)}
    stage.run()
    assert cell.verdict.verdict is Verdict.SUSPECT
    assert any("does not count: canary gemm" in line for line in stage.said)


@pytest.mark.parametrize(("last", "verdict"), [(11.0, Verdict.FAIL), (12.0, Verdict.SUSPECT)])
def test_paired_launches_need_one_machine_but_not_the_baselines(last: float, verdict: Verdict) -> None:
    judging = FakeJudging()
    cell = judging.add("one", "c1", BASE * 1.3, canary_ms=10.0)
    stage = Stage2(slow, judging, reference="/env")
    names = [f"one-launch{FRESH + 1}-reference", *(f"one-launch{FRESH + i}" for i in (2, 3))]
    stage.bench.machines = {name: machine(11.0) for name in names}
    stage.bench.machines[f"one-launch{FRESH + 4}-reference"] = machine(last)
    stage.run()
    assert cell.verdict.verdict is verdict


def test_fresh_launches_leave_their_cells_on_disk_and_say_where() -> None:
    judging = FakeJudging()
    bad, good = judging.add("one", "c1", BASE * 1.3), judging.add("one", "c2", BASE)
    stage = Stage2(slow, judging, reference="/env")
    stage.run()
    launches = [f"one-launch{FRESH + 1}-reference", *(f"one-launch{FRESH + i}" for i in (2, 3))]
    assert stage.confirming.kept(bad)[:3] == tuple(Path(f"{name} c1") for name in launches)
    assert len(stage.confirming.kept(bad)) == 4 and stage.confirming.kept(good) == ()


def test_a_fresh_launch_at_lower_clocks_than_the_baselines_does_not_count_for_that_cell() -> None:
    judging = FakeJudging()
    cells = [
        judging.add("one", name, BASE * 1.3, throttled_share="0.00", sm_mhz="1980") for name in ("c1", "c2")
    ]
    stage = Stage2(slow, judging)
    stage.clocks = {f"one-launch{FRESH + 2} c1": {"throttled_share": "0.00", "sm_mhz": "1600"}}
    stage.run()
    assert [cell.verdict.verdict for cell in cells] == [Verdict.SUSPECT, Verdict.FAIL]
    assert "a fresh launch met another machine: clocks off: 1600 MHz" in note(cells[0])
    assert any("does not count: clocks off" in line for line in stage.said)


@pytest.mark.parametrize(("last", "verdict"), [("0.61", Verdict.FAIL), ("0.00", Verdict.SUSPECT)])
def test_paired_launches_need_one_state_of_power_but_not_the_baselines(last: str, verdict: Verdict) -> None:
    judging = FakeJudging()
    cell = judging.add("one", "c1", BASE * 1.3, throttled_share="0.00", sm_mhz="1980")
    stage = Stage2(slow, judging, reference="/env")
    names = [f"one-launch{FRESH + 1}-reference", *(f"one-launch{FRESH + i}" for i in (2, 3))]
    capped = {"throttled_share": "0.60", "sm_mhz": "1600"}
    stage.clocks = {f"{name} c1": capped for name in names}
    later = {"throttled_share": last, "sm_mhz": "1600" if last != "0.00" else "1500"}
    stage.clocks[f"one-launch{FRESH + 4}-reference c1"] = later
    stage.run()
    assert cell.verdict.verdict is verdict


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


@pytest.mark.parametrize("confirm", ["suspects", "never"])
def test_a_cell_whose_launch_ended_on_another_machine_is_inconclusive_and_not_confirmed(confirm: str) -> None:
    judging = FakeJudging()
    passed = judging.add("one", "c1", BASE, canary_ms=10.0)
    suspect = judging.add("one", "c2", BASE * 1.3, canary_ms=10.0)
    stage = Stage2(slow, judging, confirm=confirm)
    stage.bench.machines = {"one": machine(11.0)}
    assert stage.run() == [passed, suspect] and stage.bench.launches == []
    assert passed.verdict.verdict is suspect.verdict.verdict is Verdict.INCONCLUSIVE
    assert "+10.0%" in note(passed)
