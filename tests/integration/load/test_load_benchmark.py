"""The client comparison runs, and finds this client's stamps where the server's truth is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.client.__main__ import Cores, Field, cores, measure
from benchmarks.client.clients import CLIENTS
from benchmarks.client.load import Load

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("client", CLIENTS)
def test_each_client_against_the_truth(client: str, tmp_path: Path) -> None:
    """Bounds that hold on any machine: no stamp before its send; ours is right for most events however busy it is."""
    load = Load(streams=4, requests=8, tokens=20, ttft_ms=30, itl_ms=10)
    found = measure(client, load, tmp_path, cores(), Field((client,)))
    assert found.events == 160
    assert found.ttft_true_p50 >= 30
    assert found.event_p50 is not None and found.event_p50 >= 0
    assert (found.lag_p50 is not None) == (client == "pdperf")
    assert found.server_late_p99 >= 0
    assert found.waited_ms is None or found.waited_ms >= 0
    assert (found.merged_share is not None) == (client == "pdperf")
    if client == "pdperf":
        assert found.event_p50 < 0.5
        assert found.bytes_per_event is not None and found.bytes_per_event < 64


def test_cores_are_ones_that_may_be_used() -> None:
    where = cores()
    assert isinstance(where, Cores)
    assert where.server <= where.client


def test_unknown_names_are_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.client", "--loads", "64 x 50"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 2
    assert "no load '64 x 50'" in made.stderr
