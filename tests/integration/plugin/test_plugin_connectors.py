"""Every KV path of vLLM through the whole suite on simulated engines: what is proven, and by what."""

import json
from typing import Any

import pytest

from tests.integration.plugin_runs import measured_run, with_fixtures

SUITE = """
import pytest

@pytest.mark.pdperf_cells("single")
def test_cell(measure, gate):
    gate.check(measure())
"""
CELL = "shapes: [72/16]\nconcurrency: [2]\nrequests: 8\nwarmups: 1\ntimeout_s: 60\n"
RANKS = """
kind: pd
roles: {prefill: {tensor_parallel: 2}, decode: {}}
kv_transfer: {connector: mooncake, transport: tcp}
"""
TOPOLOGIES = ("ranks", "pd-1p1d-example")


def test_each_path_is_proven_in_its_own_way(pytester: pytest.Pytester) -> None:
    """Mooncake between roles that differ in tensor parallelism, and the shipped topology of files."""
    pytester.makepyfile(test_perf=SUITE)
    with_fixtures(pytester, {"workloads/small.yaml": CELL, "topologies/ranks.yaml": RANKS})
    result = measured_run(
        pytester,
        *("-m", "pd", "--engine", "sim", "--topology", ",".join(TOPOLOGIES), "--workload", "small"),
        *("-p", "no:cacheprovider"),
        timeout=240,
    )
    result.assert_outcomes(passed=2)
    found: dict[str, Any] = {}
    for cell in pytester.path.rglob("cells/*.json"):
        data = json.loads(cell.read_text())
        found[cell.name.partition("--")[0]] = data
    assert set(found) == set(TOPOLOGIES)
    assert {data["evidence"] for data in found.values()} == {"proven"}
    mooncake, example = (found[name]["details"] for name in TOPOLOGIES)
    assert (mooncake["transport"]["used"], mooncake["transport"]["as_asked"]) == ("tcp", True)
    assert mooncake["evidence"]["transfers"] is None, "Mooncake prints no metric of its transfers"
    # Blocks of 16: of 72 tokens 64 are in files, and decode computes 8 of each of the nine requests.
    assert example["evidence"]["recomputed_tokens"] == 9 * 8
    assert example["evidence"]["transferred_tokens"] == 9 * 64
    assert example["transport"]["used"] == "unknown"
    assert mooncake["evidence"]["recomputed_tokens"] == 0
    assert not list(pytester.path.rglob("shared-kv")), "KV in files is gone with its stack"
    (log,) = (path for path in pytester.path.rglob("decode-0.log") if "example" in str(path))
    assert "External Cache Hit" in log.read_text()
