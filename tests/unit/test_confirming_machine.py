"""Stage 2 on a machine that changes: which fresh launches count."""

from __future__ import annotations

import pytest

from pytest_pdperf.confirming import FRESH
from pytest_pdperf.gate.verdict import Verdict
from tests.unit.stage2 import (
    BASE,
    FakeJudging,
    Stage2,
    machine,
    note,
    slow,
)


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
