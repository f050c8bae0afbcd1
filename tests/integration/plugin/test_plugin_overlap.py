"""`--overlap-start`: the next topology comes up beside the measured one, and nothing of either stays behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_pdperf.stack import procfs
from tests.integration.plugin_runs import with_fixtures

INVENTORY = Path(__file__).parents[2] / "data" / "inventories" / "pcie-l40s-4x.json"

SUITE = """
import pytest

@pytest.mark.pdperf_cells("single")
def test_cell(measure):
    measure()
"""
SERVER = "kind: aggregated\nroles:\n  server: {replicas: 1}\n"
PAIR = "kind: pd\nroles:\n  prefill: {replicas: 1}\n  decode: {replicas: 1}\n"
FILES = {
    "topologies/one.yaml": SERVER,
    "topologies/pair.yaml": PAIR,
    "topologies/broken.yaml": SERVER + "engine_args: {kv_load_failure_policy: none-at-all}\n",
    "topologies/wide.yaml": SERVER.replace("1", "3"),
    "workloads/small.yaml": "shapes: [64/48]\nconcurrency: [2]\nrequests: 12\nwarmups: 1\ntimeout_s: 30\n",
    "workloads/long.yaml": "shapes: [64/48]\nconcurrency: [2]\nrequests: 2000\nwarmups: 1\ntimeout_s: 30\n",
}

VIRTUAL_GPUS = """
from pathlib import Path

import pytest_pdperf.sites
import pytest_pdperf.inputs
from pytest_pdperf.gpus.grammar import parse_gpus
from pytest_pdperf.gpus.inventory import load_recorded

pytest_pdperf.inputs._gpus = lambda *asked: parse_gpus("all")
pytest_pdperf.sites.read_inventory = lambda: load_recorded(Path({inventory!r}))


def emptied(before):
    with open("emptied.txt", "a") as file:
        print(len(before), file=file)
    return ()


pytest_pdperf.sites.wait_emptied = emptied
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PDPERF_LEASE_DIR", str(pytester.path / "leases"))
    pytester.makepyfile(test_perf=SUITE)
    with_fixtures(pytester, FILES)
    return pytester


def asked(topology: str, workload: str = "small") -> list[str]:
    always = ["--engine", "sim", "--topology", topology, "--workload", workload, "--model", "fast"]
    return [*always, "-p", "no:cacheprovider", "--overlap-start"]


def warnings(run: Path, topology: str) -> list[str]:
    found = json.loads((run / "cells" / f"{topology}--in64-out48-c2.json").read_text())
    return [text for text in found["result"]["warnings"] if "--overlap-start" in text]


def test_each_comes_up_beside_the_one_before_on_gpus_of_its_own(project: pytest.Pytester) -> None:
    project.makeconftest(VIRTUAL_GPUS.format(inventory=str(INVENTORY)))
    result = project.runpytest_subprocess(*asked("one,pair,broken"), timeout=180)
    assert result.parseoutcomes() == {"passed": 2, "errors": 1}
    result.stdout.fnmatch_lines(
        [
            "*one up in*",
            "*bringing up pair meanwhile (--overlap-start)*",
            "*pair up * s after its turn had come*",
            "*bringing up broken meanwhile (--overlap-start)*",
            "*ERROR at setup of test_cell*broken*",
            "server-0 ended*exit code 2*",
        ]
    )
    (run,) = (project.path / "pdperf-results").iterdir()
    # The start-up may or may not be over when the cell begins; that another stack was there is told either way.
    assert len(warnings(run, "one")) == 1 and "measured while pair " in warnings(run, "one")[0]
    assert len(warnings(run, "pair")) == 1 and "measured while broken " in warnings(run, "pair")[0]
    # Of four GPUs, those of the next topology need not be empty when one has gone.
    assert (project.path / "emptied.txt").read_text().split() == ["2", "3", "4"]
    assert procfs.marked(run.name) == []


def test_the_plan_says_what_would_overlap(project: pytest.Pytester) -> None:
    gpus = ["--gpus", "all", "--gpu-inventory", str(INVENTORY)]
    result = project.runpytest_subprocess(*asked("one,pair,wide"), *gpus, "--plan", timeout=180)
    result.stdout.fnmatch_lines(
        [
            "--overlap-start: pair starts while one is measured",
            "--overlap-start: wide starts after pair has ended: both use GPU *",
        ]
    )


def test_a_ctrl_c_in_the_middle_leaves_neither(project: pytest.Pytester) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *asked("one,pair", "long")],
        cwd=project.path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        results = project.path / "pdperf-results"
        deadline = time.monotonic() + 120
        while not list(results.glob("*/logs/pair/*.log")):
            assert process.poll() is None, "pytest ended too early"
            assert time.monotonic() < deadline, "nothing came up beside the first"
            time.sleep(0.05)
        (run,) = results.iterdir()
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == pytest.ExitCode.INTERRUPTED
        assert procfs.marked(run.name) == []
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
