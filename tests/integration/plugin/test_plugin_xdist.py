"""pytest's own switches on a real run: -n, --lf, -x, Ctrl-C with workers, and no terminal at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from tests.integration.plugin.accepted import accepted
from tests.integration.plugin_runs import SPARED, with_fixtures

SUITE = """
import pytest

@pytest.mark.pdperf_cells("single")
def test_cell(measure, gate):
    gate.check(measure())
"""
SERVER = "kind: aggregated\nroles: {server: {replicas: 1}}\n"
WORKLOAD = "shapes: [64/16]\nconcurrency: [2]\nrequests: 8\nwarmups: 1\ntimeout_s: 30\n"
CELL = "in64-out16-c2"
TOLERANCES = """
overrides:
  - {metric: "tpot_*", tau: 0.5, reason: the host of this test}
"""
RUN = {"engine": "sim", "workload": "small"}
ALWAYS = (*(f"--{name}={value}" for name, value in RUN.items()), *SPARED)
SLOW = "server.decode_step=8"
"""Tokens that are 40 ms apart: a client that waits for a core still has a stamp for each."""
BASELINE_MS = 10.0
"""What the one topology with a baseline took for a token before."""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A repository with one cell on two topologies."""
    pytester.makepyfile(test_perf=SUITE)
    files = {"topologies/one.yaml": SERVER, "topologies/other.yaml": SERVER, "workloads/small.yaml": WORKLOAD}
    return with_fixtures(pytester, {**files, "tolerances.yaml": TOLERANCES})


INVENTORY = Path(__file__).parents[2] / "data" / "inventories" / "recorded-h200-2x.json"


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return project.runpytest_subprocess(*ALWAYS, "--topology", "one,other", *arguments, timeout=240)


def newest_run(project: pytest.Pytester) -> Path:
    return max((project.path / "pdperf-results").iterdir(), key=lambda path: path.stat().st_mtime)


def not_at_once(logs: Path, *launches: str) -> bool:
    """Whether the log lines of launches, which begin with their time, do not overlap."""
    spans = []
    for launch in launches:
        lines = [line for log in (logs / launch).glob("*.log") for line in log.read_text().splitlines()]
        stamps = sorted(line.split()[0] for line in lines if line[:2] == "20")
        spans.append((stamps[0], stamps[-1]))
    first, second = sorted(spans)
    return first[1] <= second[0]


def test_two_workers_measure_and_one_decides(project: pytest.Pytester) -> None:
    """On one virtual GPU, where the workers take turns; one topology has a baseline, the other gets one."""
    speeds = json.dumps({"server-0": [{"step_s": BASELINE_MS / 1e3}] * 2})
    accepted(
        project, RUN | {"topology": "one"}, CELL, {"tpot_ms_p50": BASELINE_MS}, environment={"speeds": speeds}
    )
    slow = run(
        project,
        *("--gpus", "0", f"--gpu-inventory={INVENTORY}", "-n", "2"),
        "--sim-fault",
        SLOW,
        "--update-baselines=create",
        "--junit-xml=j.xml",
    )
    assert slow.parseoutcomes()["suspect"] == 1
    slow.stdout.fnmatch_lines(["*one * 8/8 *", "*other * 8/8 *"], consecutive=False)
    slow.stdout.fnmatch_lines(
        ["*suspect series in 1 cells*", "*FAIL*tpot_ms_p50*confirmed by 2 more launches*", "*1 FAIL*"]
    )
    assert slow.stdout.str().count(f"small/{CELL}: created") == 1
    folder = newest_run(project)
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [
        "one", "one-launch1001", "one-launch1002", "other",
    ]  # fmt: skip
    assert not_at_once(folder / "logs", "one", "other")
    summary = json.loads((folder / "summary.json").read_text())
    verdicts = {cell["topology"]: cell["verdict"] for cell in summary["cells"]}
    assert verdicts == {"one": "FAIL", "other": "NO_BASELINE"}
    assert (folder / "report.html").exists()

    cases = list(ElementTree.parse(project.path / "j.xml").iter("testcase"))
    assert len(cases) == 2, "a suspect and its decision are one test"
    failed = next(case for case in cases if "[one-" in case.attrib["name"])
    assert failed.find("failure") is not None
    properties = {one.attrib["name"]: one.attrib["value"] for one in failed.iter("property")}
    assert properties["pdperf_verdict"] == "FAIL"
    assert float(properties["tpot_ms_p50"]) > 0
    assert properties["pdperf_cause"].startswith("decode slowed (server-0): ")

    again = run(project, "--lf", "--collect-only", "-q")
    assert "[one-in64-out16-c2]" in again.stdout.str()
    assert "[other-in64-out16-c2]" not in again.stdout.str()


def test_the_first_failure_ends_the_run_under_x_and_reports_need_no_terminal(
    project: pytest.Pytester,
) -> None:
    broken = ("--sim-fault", "server.error_in_stream=every:4", "-p", "no:terminal", "-x")
    assert run(project, *broken).ret == pytest.ExitCode.TESTS_FAILED
    folder = newest_run(project)
    summary = json.loads((folder / "summary.json").read_text())
    assert [(cell["topology"], cell["verdict"]) for cell in summary["cells"]] == [("one", "INVALID")]
    assert {"report.html", "report.md"} <= {path.name for path in folder.iterdir()}


def test_ctrl_c_ends_the_workers_and_all_that_they_started(project: pytest.Pytester) -> None:
    many = WORKLOAD.replace("requests: 8", "requests: 400")
    (project.path / "fixtures/workloads/small.yaml").write_text(many)
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *ALWAYS, "--topology", "one,other", "-n", "2"],
        cwd=project.path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while len(list(project.path.glob("pdperf-results/*/records/*/*/job.json"))) < 2:
        assert time.monotonic() < deadline, "the cells did not begin"
        assert process.poll() is None
        time.sleep(0.1)
    marker = newest_run(project).name.encode()
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, output
    deadline = time.monotonic() + 30
    while left := [found for found in psutil.process_iter() if _marked(found, marker)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _marked(process: psutil.Process, run: bytes) -> bool:
    try:
        environ = Path(f"/proc/{process.pid}/environ").read_bytes()
        return b"PDPERF_RUN_ID=" + run in environ and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False
