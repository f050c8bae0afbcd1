"""A short soak: nothing leaks over several bring-ups, and a leak would be seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lifecycle.soak import soak, summary
from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.launch import Stack, launch
from pytest_pdperf.stack.ports import PortRegistry
from tests.integration.stack.stack_fakes import FakeRouter, plan, topology

READY = '[{"prefill": {"healthy": 1, "total": 1}, "decode": {"healthy": 1, "total": 1}}]'


def start(folder: Path, ports: PortRegistry, run_id: str) -> Stack:
    top = topology(router={"env": {"FAKE_READINESS": READY}})
    return launch(plan(top, folder, ports, run_id=run_id, router=FakeRouter()), deadline_s=60)


@pytest.fixture
def leaked() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_nothing_leaks() -> None:
    said: list[str] = []
    cycles = soak(3, start, run_id=f"soak-{os.getpid()}-clean", say=said.append)
    assert [c.leaked for c in cycles] == [{}, {}, {}]
    assert all(c.busy_ports == () for c in cycles)
    assert len(said) == 3
    assert "leaked: nothing" in summary(cycles)[-1]


def test_leaks_are_seen(leaked: list[subprocess.Popen[bytes]]) -> None:
    run_id = f"soak-{os.getpid()}-dirty"
    files: list[int] = []

    def careless(folder: Path, ports: PortRegistry, run_id: str) -> Stack:
        leaked.append(subprocess.Popen(["/bin/sleep", "600"], env={procfs.RUN_ID: run_id}))
        path = Path(os.environ["TMPDIR"], f"left-{len(files)}")
        files.append(os.open(path, os.O_CREAT | os.O_WRONLY))
        ports.reserve("forgotten")
        return start(folder, ports, run_id)

    try:
        cycles = soak(2, careless, run_id=run_id, say=lambda text: None)
    finally:
        for file in files:
            os.close(file)
    assert cycles[0].leaked == {"processes": 2, "file_descriptors": 2, "lock_files": 1, "temp_entries": 1}
    assert cycles[1].leaked["processes"] == 4
    assert "processes" in summary(cycles)[-1]


def test_the_benchmark_runs_as_a_module() -> None:
    root = Path(__file__).parents[3]
    argv = [sys.executable, "-m", "benchmarks.lifecycle", "--help"]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert "--kill-owner" in done.stdout
