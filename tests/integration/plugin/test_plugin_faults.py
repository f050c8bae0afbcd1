"""Fault tests as a user runs them, on simulated engines behind the real router."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.plugin_runs import with_fixtures

SUITE = Path(__file__).parents[2] / "perf"
TOPOLOGY = """
kind: pd
roles:
  prefill: {replicas: 1, args: {kv_lease_s: 1}}
  decode: {replicas: 2}
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """The suite's own fault tests and one topology."""
    shutil.copy(SUITE / "test_faults.py", pytester.path / "test_faults.py")
    with_fixtures(pytester, {"topologies/trio.yaml": TOPOLOGY})
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    always = ["--engine", "sim", "--topology", "trio", "-p", "no:cacheprovider", "-rs"]
    return project.runpytest_subprocess(*always, *arguments, timeout=280)


@pytest.mark.timeout(300)
def test_a_dead_decode_engine_is_reported_and_the_stack_serves_again(project: pytest.Pytester) -> None:
    result = run(project, "-m", "fault", "-k", "decode_dies or transfer_fails or bypass")
    assert result.parseoutcomes() == {"passed": 3, "deselected": 4}, result.stdout.str()
    result.stdout.fnmatch_lines(["*decode dies on trio: * x *broken off after * tokens*recovered in*"])
    result.stdout.fnmatch_lines(["*straight to decode on trio: bypassed: 0 of 6*"])
    result.stdout.fnmatch_lines(["*through the router on trio: proven: 6 of 6*"])
    (folder,) = (project.path / "pdperf-results").glob("*/faults")
    dies = json.loads((folder / "trio-decode-dies.json").read_text())
    assert sum(dies["told"].values()) == 4
    assert dies["unharmed"] == 4
    assert dies["meanwhile"]["complete"] == 4, "every second request reaches the replica that lives"
    assert sum(dies["meanwhile"].values()) == 8
    assert dies["problems"] == []
    fails = json.loads((folder / "trio-transfers-fail.json").read_text())
    assert [("error in the stream" in words, count) for words, count in fails["told"].items()] == [(True, 4)]


@pytest.mark.timeout(300)
def test_simulated_sglang_serves_again_too_and_tells_its_clients_in_time(project: pytest.Pytester) -> None:
    (project.path / "fixtures/topologies/pair.yaml").write_text(
        "kind: pd\nroles: {prefill: {replicas: 1}, decode: {replicas: 1}}\n"
    )
    result = run(
        project,
        *("--engine", "sim-sglang", "--topology", "pair", "-m", "fault"),
        *("-k", "prefill_dies or transfer_fails or slow_link"),
    )
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] + outcomes.get("skipped", 0) == 3, result.stdout.str()
    (folder,) = (project.path / "pdperf-results").glob("*/faults")
    for name, told in (("prefill-dies", 8), ("transfers-fail", 4)):
        report = json.loads((folder / f"pair-{name}.json").read_text())
        assert sum(report["told"].values()) == told
        assert report["told_after_s"] < 20, "no leg of a lost request is waited for until its timeout"
        assert report["recovered_s"] is not None
        assert report["problems"] == []
    if outcomes.get("skipped"):
        result.stdout.fnmatch_lines(["*NOT RUN: cannot slow a network down: *"])
        return
    slow = json.loads((folder / "pair-slow-link.json").read_text())
    assert slow["how"].startswith(("netem ", "tbf "))
    assert slow["how"].endswith("of it in transfer")
    assert slow["numbers"]["transfer_slow_s"] > 0.9 > slow["numbers"]["transfer_s"]
    assert slow["numbers"]["ttft_slow_s"] > slow["numbers"]["transfer_slow_s"]


def test_answers_that_are_short_and_end_well_fail_a_fault_test(project: pytest.Pytester) -> None:
    # Half of all answers stay short, so the stack does not recover: that is looked at until the test's time is over.
    project.makeconftest("from pytest_pdperf import breaking\nbreaking.ENDS_S = 20.0")
    result = run(
        project, "-m", "fault", "-k", "leaves_in_decode", "--sim-fault", "decode.short_output=every:2"
    )
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines(["*beside the fault: ended after * tokens as if all were well*"])
    result.stdout.fnmatch_lines(["*not recovered within * s: *"])


def test_nobody_breaks_a_stack_by_asking_for_pd(project: pytest.Pytester) -> None:
    result = run(project, "-m", "pd", "--collect-only", "-q")
    assert result.parseoutcomes() == {"deselected": 7}
    result = project.runpytest_subprocess("-m", "fault", "-p", "no:cacheprovider", "-rs", timeout=60)
    assert result.parseoutcomes() == {"skipped": 7}
    result.stdout.fnmatch_lines(["*performance suite: run it with*"])
