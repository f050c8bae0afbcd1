"""The whole way on simulated engines behind the real router: accept, pass, catch a regression, accept it, pass."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pytest_pdperf.evidence.naming import Fault
from pytest_pdperf.report.outcomes import CellOutcome, load
from tests.integration.plugin_runs import measured_run, with_fixtures

SUITE = """
import pytest

@pytest.mark.pdperf_cells("single")
def test_cell(measure, gate):
    gate.check(measure())
"""

AGGREGATED = """
kind: aggregated
roles:
  server: {replicas: 1}
"""

PD = """
kind: pd
roles:
  prefill: {replicas: 1}
  decode: {replicas: 1}
"""

ONE_CELL = """
shapes: [64/48]
concurrency: [2]
requests: 12
warmups: 1
timeout_s: 30
"""


TOLERANCES = """
overrides:
  - {metric: "ttft_*", tau: 2.0, floor: 50.0, reason: the host of this test}
  - {metric: "itl_*", tau: 2.0, floor: 50.0, reason: the host of this test}
  - {metric: "e2e_*", tau: 0.5, floor: 50.0, reason: the host of this test}
  - {metric: output_tps, tau: 0.5, reason: the host of this test}
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A user's repository with one small cell and two topologies of its own."""
    pytester.makepyfile(test_perf=SUITE)
    with_fixtures(
        pytester,
        {
            "topologies/one.yaml": AGGREGATED,
            "topologies/pair.yaml": PD,
            "workloads/small.yaml": ONE_CELL,
            "tolerances.yaml": TOLERANCES,
        },
    )
    return pytester


def run(project: pytest.Pytester, *arguments: str, topology: str = "one") -> pytest.RunResult:
    always = ["--engine", "sim", "--topology", topology, "--workload", "small", "-p", "no:cacheprovider"]
    return measured_run(project, *always, *arguments, timeout=180)


def started_by(run_folder: Path) -> list[psutil.Process]:
    """Living processes that carry this run's marker."""
    marker = f"PDPERF_RUN_ID={run_folder.name}"
    found = []
    for process in psutil.process_iter():
        try:
            text = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if marker in text and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def only_run(project: pytest.Pytester) -> Path:
    folders = list((project.path / "pdperf-results").iterdir())
    assert len(folders) == 1
    return folders[0]


def newest_cell(project: pytest.Pytester) -> CellOutcome:
    """The one cell of the latest run."""
    newest = max((project.path / "pdperf-results").iterdir(), key=lambda path: path.stat().st_mtime)
    (outcome,), problems = load(newest / "cells")
    assert problems == []
    return outcome


def test_a_slower_decode_fails_is_accepted_with_a_reason_and_passes_again(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    first = run(project)
    assert first.ret == pytest.ExitCode.TESTS_FAILED
    first.stdout.fnmatch_lines(
        ["*NO_BASELINE*no baseline for small/in64-out48-c2*--update-baselines=create*"]
    )

    monkeypatch.delenv("CI")
    created = run(project, "--update-baselines=create")
    assert created.ret == 0
    created.stdout.fnmatch_lines(["*baseline: small/in64-out48-c2: created*", "*tpot_ms_p50: none -> * ms*"])
    stored = list((project.path / "baselines").rglob("one.json"))
    assert len(stored) == 1

    same = run(project, "--require-baseline=yes")
    assert same.ret == 0
    same.stdout.fnmatch_lines(["*SIMULATED*", "*verdicts: 1 *"])
    assert "cause: " not in same.stdout.str() and "noticed: " not in same.stdout.str()
    healthy = newest_cell(project)
    assert healthy.naming is not None and healthy.naming.speeds["server-0"][0].step_s
    assert (healthy.naming.findings, healthy.naming.unknown) == ((), ()), "compared, and nothing named"

    slow = ("--sim-fault", "decode_step=1.15")
    failed = run(project, *slow)
    assert failed.ret == pytest.ExitCode.TESTS_FAILED
    failed.stdout.fnmatch_lines(
        [
            "*suspect series in 1 cells: no reference build, so two more launches, unpaired*",
            "*FAIL*tpot_ms_p50*ms vs * ms*worse*limit*B=1*confirmed by 2 more launches*"
            "cause: decode slowed (server-0): * ms a token against * ms a token in the baseline*",
            "*re-run just this cell:*",
            "*pytest*test_perf.py::*--sim-fault=*",
        ]
    )

    assert failed.parseoutcomes() == {"failed": 1, "suspect": 1}

    refused = run(project, *slow, "--update-baselines", "--confirm=never")
    assert refused.ret == pytest.ExitCode.TESTS_FAILED
    refused.stdout.fnmatch_lines(["*refused*--baseline-reason*"])

    accepted = run(project, *slow, "--update-baselines", "--baseline-reason", "new decode kernel")
    assert (accepted.ret, accepted.parseoutcomes()) == (0, {"passed": 1}), "nothing is left to be decided"
    accepted.stdout.fnmatch_lines(["*new pin*new decode kernel*", "*tpot_ms_p50: * -> * ms*"])
    pins = json.loads(stored[0].read_text())["cells"]["small/in64-out48-c2"]
    assert [pin["status"] for pin in pins] == ["current", "superseded"]

    assert run(project, *slow, "--require-baseline=yes").ret == 0


def test_with_a_reference_build_suspects_are_launched_in_both_builds(project: pytest.Pytester) -> None:
    assert run(project, "--update-baselines=create").ret == 0
    result = run(project, "--sim-fault", "decode_step=1.3", "--reference", sys.prefix)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*FAIL*tpot_ms_p50*confirmed by A B B A: *worse than the reference build*"])
    names = [path.name for path in (project.path / "pdperf-results").glob("*/logs/one-launch*")]
    assert len(names) == 4
    assert len([name for name in names if name.endswith("-reference")]) == 2
    kept, problems = load(next((project.path / "pdperf-results").glob("*/confirmation")))
    assert problems == [] and [one.launch for one in kept] == [1001, 1002, 1003, 1004]
    assert [one.details.get("build") for one in kept] == ["reference", None, None, "reference"]
    slowed = [one.result.metrics["tpot_ms_p50"].value or 0.0 for one in kept]
    assert min(slowed[1:3]) > max(slowed[0], slowed[3])
    result.stdout.fnmatch_lines(["*what the fresh launches measured:*", "*confirmation*launch1001.json*"])


def test_a_budget_that_is_used_up_leaves_suspects_open_and_red(project: pytest.Pytester) -> None:
    assert run(project, "--update-baselines=create").ret == 0
    result = run(project, "--sim-fault", "decode_step=1.3", "--budget", "1s")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*budget is used up*", "*SUSPECT*tpot_ms_p50*not confirmed*"])


def test_a_broken_off_run_is_resumed_without_its_finished_cells(project: pytest.Pytester) -> None:
    workload = project.path / "fixtures" / "workloads" / "small.yaml"
    workload.write_text(ONE_CELL.replace("[64/48]", "[64/48, 32/16]"))
    stop = project.makepyfile(test_zz="def test_in64_out48_c2():\n    raise KeyboardInterrupt\n")
    broken = run(project, "-k", "in64-out48-c2 or in64_out48_c2")
    assert broken.ret == pytest.ExitCode.INTERRUPTED
    stop.unlink()
    first = only_run(project)
    broken.stdout.fnmatch_lines([f"broken off: the same command with --resume={first.name} goes on"])
    (first / "cells" / "one--in32-out16-c2.json").write_text('{"schema": 1, "nodeid": "half a fi')
    rest = run(project, "--resume", first.name)
    assert rest.parseoutcomes() == {"passed": 1, "deselected": 1}
    rest.stdout.fnmatch_lines(
        ["in32-out16-c2*12/12*", "in64-out48-c2*12/12*", "*resumed: 1 cells kept*"], consecutive=False
    )
    assert only_run(project) == first
    names = {path.name for path in first.iterdir()}
    assert {"report.html", "report.md", "summary.json"} <= names


def test_a_resumed_run_is_as_red_as_the_cells_that_it_kept(project: pytest.Pytester) -> None:
    """What was measured before stays red, and nothing left to do is no error by itself."""
    assert run(project, "--update-baselines=create").ret == 0
    first = only_run(project)
    assert run(project, "--resume", first.name).ret == 0, "all is kept, and was accepted"
    (cell,) = (first / "cells").glob("*.json")
    text = cell.read_text()
    assert '"verdict": "NO_BASELINE"' in text
    cell.write_text(text.replace("NO_BASELINE", "FAIL").replace('"accepted": true', '"accepted": false'))
    again = run(project, "--resume", first.name)
    assert again.ret == pytest.ExitCode.TESTS_FAILED
    again.stdout.fnmatch_lines(["*resumed: 1 cells kept*, 1 of them red*"])


def test_a_role_that_dies_fails_its_cell_with_the_reason_and_leaves_nothing(project: pytest.Pytester) -> None:
    result = run(project, "--sim-fault", "server.die_after_tokens=200")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*server-0*"])
    assert "RoleDied" in result.stdout.str()
    result.stdout.fnmatch_lines(["*cause: process died (server-0): *"])
    assert started_by(only_run(project)) == []


def test_failed_requests_fail_their_cell_whatever_its_numbers(project: pytest.Pytester) -> None:
    result = run(project, "--sim-fault", "decode.error_in_stream=0.5", topology="pair")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*INVALID*", "*of 12 requests failed*error_in_stream*"])


def test_recomputed_prompts_are_invalid_however_fast_they_are(project: pytest.Pytester) -> None:
    result = run(project, "--sim-fault", "decode.recompute=1", topology="pair")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*INVALID*", "*evidence: *"])
    assert "recomputed" in result.stdout.str() or "bypassed" in result.stdout.str()
    cause = "cause: decode computed prompts itself although prefill had (decode-0): 832 prompt tokens"
    result.stdout.fnmatch_lines([f"*{cause} computed on decode*"])
    naming = newest_cell(project).naming
    assert naming is not None and [one.fault for one in naming.findings] == [Fault.RECOMPUTED]
    run_folder = only_run(project)
    assert cause in (run_folder / "report.md").read_text()
    assert cause in (run_folder / "report.html").read_text()
    (summary,) = json.loads((run_folder / "summary.json").read_text())["cells"]
    assert [one["fault"] for one in summary["naming"]["findings"]] == ["recomputed"]


PAST_PREFILL = """
from dataclasses import replace

import pytest

@pytest.mark.pdperf_cells("single")
def test_cell(pdperf, stack, measure, gate, monkeypatch):
    straight = replace(pdperf.bench._target(), url=stack.role_urls["decode-0"])
    monkeypatch.setattr(pdperf.bench, "_target", lambda: straight)
    gate.check(measure())
"""


def test_requests_that_go_straight_to_decode_are_named_as_that(project: pytest.Pytester) -> None:
    project.makepyfile(test_perf=PAST_PREFILL)
    result = run(project, topology="pair")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    past = "prompts went past prefill (prefill): 13 of 13 requests never reached it"
    cause = f"cause: {past}; decode-0 computed 832 prompt tokens"
    result.stdout.fnmatch_lines(["*INVALID*bypassed*", cause, f"pair-in64-out48-c2: {cause}"])
    assert result.stdout.str().count("cause: ") == 2, "once in the failure, once in the summary"


def test_an_engine_that_dies_while_loading_shows_its_cause(project: pytest.Pytester) -> None:
    cells = ONE_CELL.replace("concurrency: [2]", "concurrency: [1, 2, 3, 4]")
    (project.path / "fixtures" / "workloads" / "small.yaml").write_text(cells)
    result = run(project, "--engine-arg", "kv_load_failure_policy=none-at-all")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(errors=4)
    text = result.stdout.str()
    assert text.count("bringing up one") == 2, "what fails twice is not tried for every cell"
    ended = r"server-0 ended \d+\.\d s after its start, stage '.*': exit code 2.*none-at-all.*"
    result.stdout.re_match_lines(
        [ended, ended, *[rf"one did not come up in 2 tries and is not tried again; the last: {ended}"] * 2]
    )
    assert "Traceback" not in text and "pytest_pdperf/" not in text, "a cause, not this plugin's insides"
    assert started_by(only_run(project)) == []


def test_plan_prints_commands_and_starts_nothing(project: pytest.Pytester) -> None:
    result = run(project, "--plan", topology="pair")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "*prefill-0*",
            "*router vllm_router*",
            "*in64-out48-c2*",
            "estimated time: *",
            "*nothing was started*",
        ]
    )
    assert not (project.path / "pdperf-results").exists()


def test_killing_pytest_leaves_no_engine_and_no_router(project: pytest.Pytester) -> None:
    slow_cell = project.path / "fixtures" / "workloads" / "small.yaml"
    slow_cell.write_text(ONE_CELL.replace("requests: 12", "requests: 400"))
    arguments = ["--engine", "sim", "--topology", "pair", "--workload", "small", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=project.path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        records = project.path / "pdperf-results"
        while not list(records.glob("*/records/*/*/job.json")):
            assert process.poll() is None, "pytest ended too early"
            assert time.monotonic() < deadline, "no cell began"
            time.sleep(0.1)
        time.sleep(1.0)
        run_folder = only_run(project)
        assert len(started_by(run_folder)) >= 3
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 5
        while left := started_by(run_folder):
            assert time.monotonic() < deadline, f"still there: {[p.cmdline() for p in left]}"
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
