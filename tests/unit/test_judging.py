"""Launches on a machine that is not the baseline's: neither pass nor fail, and never stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_pdperf.evidence.canary import AFTER, BEFORE, Canary
from pytest_pdperf.gate.verdict import Verdict
from pytest_pdperf.inputs import read_inputs
from pytest_pdperf.judging import JudgedCell, Judging
from pytest_pdperf.measure.cell_result import CellResult, MetricValue
from pytest_pdperf.options import resolve
from pytest_pdperf.provenance import Hardware, LaunchRecord

CELL = "in64-out48-c2"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in {
        "topologies/one.yaml": "kind: aggregated\nroles:\n  server: {replicas: 1}\n",
        "workloads/small.yaml": "shapes: [64/48]\nconcurrency: [2]\nrequests: 12\nwarmups: 1\n",
    }.items():
        path = tmp_path / "fixtures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def judging(root: Path, run: str, **more: str) -> Judging:
    given = {"engine": "sim", "topology": "one", "workload": "small"} | more
    settings = resolve({f"pdperf_{name}": value for name, value in given.items()}.get, lambda name: None)
    return Judging(settings, read_inputs(settings, root), root, run)


def judge(gate: Judging, before: float | None, tpot: float = 20.0, ok: int = 12) -> JudgedCell:
    result = CellResult("one", "small", CELL, {"tpot_ms_p50": MetricValue(tpot, 12)}, requests=12, ok=ok)
    machine = {BEFORE: text(before)} if before else {}
    record = replace(LaunchRecord(Hardware("simulated", 0, "loopback")), environment=machine)
    return gate.judge(gate._inputs.topologies[0], result, record, 1)


def text(ms: float) -> str:
    return Canary({"gemm": ms}).to_text()


@pytest.fixture
def accepted(project: Path) -> Path:
    """A project whose baseline was made at 10 ms before and 11 ms after its launch."""
    gate = judging(project, "first", update_baselines="create")
    cell = judge(gate, 10.0)
    assert not gate.recheck(cell, {BEFORE: text(10.0), AFTER: text(11.0)})
    assert gate.update_baselines()
    return project


def test_a_machine_that_differs_before_the_launch_makes_it_inconclusive(accepted: Path) -> None:
    gate = judging(accepted, "second", update_baselines="auto", baseline_reason="slower")
    cell = judge(gate, 10.5, tpot=30.0)
    assert cell.verdict.verdict is Verdict.INCONCLUSIVE and not cell.accepted
    assert "canary gemm before the launch" in gate.problem(cell) and gate.suspects(cell) == ()
    assert all("refused" in line for line in gate.update_baselines()[:1])


def test_the_same_machine_is_judged_as_ever(accepted: Path) -> None:
    gate = judging(accepted, "second")
    assert judge(gate, 10.1).verdict.verdict is not Verdict.INCONCLUSIVE
    assert judge(gate, 10.1, tpot=30.0).verdict.verdict is Verdict.SUSPECT
    assert judge(gate, None).verdict.verdict is not Verdict.INCONCLUSIVE, (
        "without a canary nothing is compared"
    )


def test_failed_requests_fail_whatever_the_machine(accepted: Path) -> None:
    gate = judging(accepted, "second")
    cell = judge(gate, 99.0, ok=11)
    assert cell.verdict.verdict is Verdict.INVALID
    assert not gate.recheck(cell, {AFTER: text(99.0)})
    assert cell.verdict.verdict is Verdict.INVALID


@pytest.mark.parametrize(
    ("share", "mhz", "why"),
    [("0.60", "1980", "throttled"), ("0.00", "1600", "clocks off"), ("0.02", "1960", "")],
)
def test_gpus_that_ran_slower_than_the_baselines_make_it_inconclusive(
    project: Path, share: str, mhz: str, why: str
) -> None:
    def judge_at(gate: Judging, tpot: float, **gpus: str) -> JudgedCell:
        result = CellResult("one", "small", CELL, {"tpot_ms_p50": MetricValue(tpot, 12)}, requests=12, ok=12)
        record = LaunchRecord(Hardware("simulated", 0, "loopback"), environment=gpus)
        return gate.judge(gate._inputs.topologies[0], result, record, 1)

    first = judging(project, "first", update_baselines="create")
    judge_at(first, 20.0, throttled_share="0.00", sm_mhz="1980")
    assert first.update_baselines()
    gate = judging(project, "second")
    cell = judge_at(gate, 30.0, throttled_share=share, sm_mhz=mhz)
    assert cell.verdict.verdict is (Verdict.INCONCLUSIVE if why else Verdict.SUSPECT)
    assert why in gate.problem(cell) and bool(gate.suspects(cell)) is not bool(why)


def test_a_machine_that_changed_during_the_launch_is_found_after_it(accepted: Path) -> None:
    gate = judging(accepted, "second", update_baselines="auto", baseline_reason="new engine")
    cell = judge(gate, 10.0)
    assert cell.accepted and not gate.problem(cell)
    assert gate.recheck(cell, {BEFORE: text(10.0), AFTER: text(12.0)})
    assert cell.verdict.verdict is Verdict.INCONCLUSIVE
    assert "after the launch" in gate.problem(cell)
    assert cell.stored is not None and Canary.from_text(cell.stored.environment[AFTER]).ms == {"gemm": 12.0}
    (line, *_) = gate.update_baselines()
    assert "refused" in line and "INCONCLUSIVE" in line


def test_no_baseline_names_the_folder_as_the_project_does(project: Path) -> None:
    cell = judge(judging(project, "first"), None)
    assert cell.verdict.verdict is Verdict.NO_BASELINE
    assert "in baselines;" in cell.verdict.rows[0].note and str(project) not in cell.verdict.rows[0].note
