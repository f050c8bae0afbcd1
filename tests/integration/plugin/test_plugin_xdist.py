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

FILES = {
    "test_perf.py": """
import pytest

@pytest.mark.pdperf_cells("single")
def test_cell(measure, gate):
    gate.check(measure())
""",
    "fixtures/topologies/one.yaml": "kind: aggregated\nroles:\n  server: {replicas: 1}\n",
    "fixtures/topologies/pair.yaml": "kind: pd\nroles:\n  prefill: {replicas: 1}\n  decode: {replicas: 1}\n",
    "fixtures/topologies/other.yaml": "kind: aggregated\nroles:\n  server: {replicas: 1}\n",
    "fixtures/workloads/small.yaml": (
        "shapes: [64/16]\nconcurrency: [2]\nrequests: 12\nwarmups: 1\ntimeout_s: 30\n"
    ),
    "fixtures/tolerances.yaml": """
overrides:
  - {metric: "ttft_*", tau: 2.0, floor: 50.0, reason: the host of this test}
  - {metric: "itl_*", tau: 2.0, floor: 50.0, reason: the host of this test}
  - {metric: "e2e_*", tau: 2.0, floor: 500.0, reason: the host of this test}
  - {metric: output_tps, tau: 2.0, reason: the host of this test}
  - {metric: "tpot_*", tau: 0.5, reason: the host of this test}
""",
}
ALWAYS = ("--engine", "sim", "--workload", "small", "-p", "no:hypothesispytest")
"""Without the plugin of hypothesis, which costs each of these processes more than this one does."""
STEP = "server.decode_step={}"
"""Times 5 ms. Tokens that are 20 ms apart: a client that waits for a core still has a stamp for each."""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A repository with one cell on two topologies."""
    for name, text in FILES.items():
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return pytester


INVENTORY = Path(__file__).parents[2] / "data" / "inventories" / "recorded-h200-2x.json"


def run(project: pytest.Pytester, *arguments: str, topology: str = "one,other") -> pytest.RunResult:
    return project.runpytest_subprocess(*ALWAYS, "--topology", topology, *arguments, timeout=240)


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
    gpus = ("--gpus", "0", f"--gpu-inventory={INVENTORY}")
    known = run(project, *gpus, "--sim-fault", STEP.format(4), "--update-baselines=create", topology="one")
    assert known.ret == 0
    slow = run(
        project,
        *gpus,
        "-n",
        "2",
        "--sim-fault",
        STEP.format(12),
        "--update-baselines=create",
        "--junit-xml=j.xml",
    )
    assert slow.parseoutcomes()["suspect"] == 1
    slow.stdout.fnmatch_lines(["*one * 12/12 *", "*other * 12/12 *"], consecutive=False)
    slow.stdout.fnmatch_lines(
        ["*suspect series in 1 cells*", "*FAIL*tpot_ms_p50*confirmed by 2 more launches*", "*1 FAIL*"]
    )
    assert slow.stdout.str().count("small/in64-out16-c2: created") == 1
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
    broken = ("--sim-fault", "decode.error_in_stream=0.5", "-p", "no:terminal", "-x")
    assert run(project, *broken, topology="pair,one").ret == pytest.ExitCode.TESTS_FAILED
    folder = newest_run(project)
    summary = json.loads((folder / "summary.json").read_text())
    assert [(cell["topology"], cell["verdict"]) for cell in summary["cells"]] == [("pair", "INVALID")]
    assert {"report.html", "report.md"} <= {path.name for path in folder.iterdir()}


def test_ctrl_c_ends_the_workers_and_all_that_they_started(project: pytest.Pytester) -> None:
    many = FILES["fixtures/workloads/small.yaml"].replace("requests: 12", "requests: 400")
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
