"""The eight-GPU study rehearsed without GPUs: placed and leased on a recorded machine, measured in calls, resumed."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_pdperf.stack.ports import port_state
from tests.integration.plugin_runs import QWEN3_32B, measured_run, with_fixtures

ROOT = Path(__file__).parents[3]
INVENTORY = ROOT / "tests" / "data" / "inventories" / "hgx-h200-8x.json"
TOPOLOGIES = "aggregated-3x-tp2,pd-1p2d-tp2"
WORKLOAD = """
timeout_s: 60
warmups: 1
shapes: [64/48]
concurrency: [1, 16]
requests: 16
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A user's repository with the suite's fixed shapes and a workload of two cells."""
    source = ROOT / "tests" / "perf" / "test_fixed_shapes.py"
    (pytester.path / "test_fixed_shapes.py").write_text(source.read_text())
    with_fixtures(pytester, {"workloads/short.yaml": WORKLOAD})
    return pytester


def calls(project: pytest.Pytester) -> list[list[str]]:
    """The pytest arguments of each call that `scripts/gpu/calls.py` prints for this workload, one cell a call."""
    wanted = ["--topology", TOPOLOGIES, "--workload", "short", "--limit", "68", "--start-up", "5"]
    printed = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu" / "calls.py", *wanted],
        cwd=project.path,
        env={"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        check=True,
    ).stdout
    lines = [line for line in printed.splitlines() if line.startswith("scripts/gpu/suite.sh")]
    return [shlex.split(line.partition(" --resume ")[0])[4:] for line in lines]


def test_the_published_pair_on_six_virtual_gpus_in_calls_that_resume(project: pytest.Pytester) -> None:
    always = ["--engine", "sim", "--gpu-inventory", str(INVENTORY), "-p", "no:cacheprovider", "-v"]
    first, *rest = calls(project)
    assert len(rest) == 3
    for number, arguments in enumerate([first, *rest]):
        runs = sorted((project.path / "pdperf-results").glob("2*"))
        resume = ["--resume", runs[-1].name] if runs else []
        result = measured_run(project, *always, *arguments, *resume, timeout=120)
        assert result.ret == 0
        result.assert_outcomes(passed=1, deselected=3)
        assert number == 0 or f"resumed: {number} cells kept" in result.stdout.str()
    (run,) = (project.path / "pdperf-results").glob("2*")
    cells = [json.loads(path.read_text()) for path in (run / "cells").glob("*.json")]
    assert sorted((cell["topology"], cell["result"]["cell"]) for cell in cells) == [
        (topology, f"in64-out48-c{c}") for topology in TOPOLOGIES.split(",") for c in (1, 16)
    ]
    pd = [cell for cell in cells if cell["kind"] == "pd"]
    assert {cell["evidence"] for cell in pd} == {"proven"}
    assert {cell["details"]["kv_path"]["connector"] for cell in pd} == {"nixl"}


def plan(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """`--plan` for real engines, whose programs here are empty files."""
    programs = project.path / "engines" / "bin"
    programs.mkdir(parents=True)
    for name in ("vllm", "vllm-router", "sglang", "python3"):
        (programs / name).write_text("#!/bin/sh\nexit 0\n")
        (programs / name).chmod(stat.S_IRWXU)
    model = project.path / "qwen3-32b"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN3_32B))
    where = ["--gpu-inventory", str(INVENTORY), "--model", "qwen3-32b", "--engine-env", "engines"]
    return project.runpytest_subprocess(*where, *arguments, "-p", "no:cacheprovider", timeout=120)


def test_a_plan_for_eight_gpus_shows_placement_and_memory(project: pytest.Pytester) -> None:
    result = plan(project, "--plan", "--engine", "vllm", "--gpus", "0-5", "--topology", TOPOLOGIES)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "server-0: GPU 0, GPU 1 (NVLink (NV18), NUMA node 0)",
            "  server-2 memory: 30.5 of 126.4 GiB on each GPU for weights, room for *(47 requests of 16,384)",
            "prefill-0: GPU 4, GPU 5 (NVLink (NV18), NUMA node 1)",
            "KV path from prefill to decode: NV18",
            "  decode-1 memory: 30.5 of 126.4 GiB*",
            "nothing was started (--plan)",
        ]
    )


FIRST = "first-measurement,first-measurement-aggregated"


def test_the_first_measurement_is_planned_as_it_was_taken(project: pytest.Pytester) -> None:
    """SGLang, four GPUs a role on the two NUMA nodes, the router on port 8000, with the control on the same GPUs."""
    if port_state(8000) == "busy":
        pytest.skip("port 8000 is in use on this machine")
    result = plan(project, "--plan", "--gpus", "0-7", "--topology", FIRST, "--workload", "first-measurement")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "first-measurement: pd, engine sglang, * url http://127.0.0.1:8000",
            "*--tp-size 4*--numa-node 0 0 0 0*--disaggregation-mode prefill*",
            "*CUDA_VISIBLE_DEVICES=0,1,2,3*",
            "*--tp-size 4*--numa-node 1 1 1 1*--disaggregation-mode decode*",
            "*CUDA_VISIBLE_DEVICES=4,5,6,7*",
            "*router sglang_router: http 8000*",
        ]
    )
    result.stdout.fnmatch_lines(
        [
            "first-measurement-aggregated: aggregated, engine sglang, * url http://127.0.0.1:8000",
            "*--tp-size 4*",
            "*CUDA_VISIBLE_DEVICES=0,1,2,3*",
            "*--tp-size 4*",
            "*CUDA_VISIBLE_DEVICES=4,5,6,7*",
            "*router sglang_router: http 8000*",
        ]
    )
    cells = [f"in256-out256-c{c}" for c in (1, 8, 16)]
    assert all(cell in result.stdout.str() for cell in cells)


def test_the_first_measurement_runs_on_simulated_engines(project: pytest.Pytester) -> None:
    """The shipped files but for the port, which another process of this machine may have."""
    text = (ROOT / "fixtures" / "topologies" / "first-measurement.yaml").read_text()
    assert "router: {port: 8000}\n" in text
    with_fixtures(project, {"topologies/first-measurement.yaml": text.replace("router: {port: 8000}\n", "")})
    result = measured_run(
        project,
        *(
            "--engine",
            "sim-sglang",
            "--gpu-inventory",
            str(INVENTORY),
            "--gpus",
            "0-7",
            "-p",
            "no:cacheprovider",
        ),
        *("--topology", "first-measurement", "--workload", "first-measurement", "-k", "c8"),
        timeout=240,
    )
    result.assert_outcomes(passed=1, deselected=2)
    result.stdout.fnmatch_lines(["*in256-out256-c8*first-measurement *24/24*proven*"])


def test_a_model_that_does_not_fit_is_refused_before_anything_starts(project: pytest.Pytester) -> None:
    small = ["--engine-arg", "gpu_memory_utilization=0.2"]
    result = plan(project, "--plan", "--engine", "vllm", "--gpus", "0-5", "--topology", TOPOLOGIES, *small)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*aggregated-3x-tp2: server-0 does not fit its GPUs: 30.5 of 28.1 GiB*more tensor_parallel than 2*"]
    )


def test_gpus_that_are_not_here_run_no_real_engine(project: pytest.Pytester) -> None:
    result = plan(project, "--engine", "vllm", "--gpus", "0-5", "--topology", TOPOLOGIES)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--gpu-inventory *those GPUs are not here*--plan or --engine sim*"])
