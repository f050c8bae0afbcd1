"""Every KV path of vLLM through the whole suite on simulated engines: what is proven, and by what."""

import json
from typing import Any

import pytest

from tests.integration.plugin_runs import measured_run

SUITE = """
import pytest

@pytest.mark.pdperf_cells("single")
def test_cell(measure, gate):
    gate.check(measure())
"""
CELL = "shapes: [72/16]\nconcurrency: [2]\nrequests: 8\nwarmups: 1\ntimeout_s: 60\n"
TOPOLOGIES = ("pd-1p1d-mooncake-tcp", "pd-1p1d-example", "pd-1p1d-tp2-tp1")


def test_each_shipped_path_is_proven_in_its_own_way(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_perf=SUITE)
    path = pytester.path / "fixtures/workloads/small.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(CELL)
    result = measured_run(
        pytester,
        *("-m", "pd", "--engine", "sim", "--topology", ",".join(TOPOLOGIES), "--workload", "small"),
        *("-p", "no:cacheprovider", "--keep-logs"),
        timeout=240,
    )
    result.assert_outcomes(passed=3)
    found: dict[str, Any] = {}
    for cell in pytester.path.rglob("cells/*.json"):
        data = json.loads(cell.read_text())
        found[cell.name.partition("--")[0]] = data
    assert set(found) == set(TOPOLOGIES)
    assert {data["evidence"] for data in found.values()} == {"proven"}
    mooncake, example, ranks = (found[name]["details"] for name in TOPOLOGIES)
    assert (mooncake["transport"]["used"], mooncake["transport"]["as_asked"]) == ("tcp", True)
    assert mooncake["evidence"]["transfers"] is None, "Mooncake prints no metric of its transfers"
    # Blocks of 16: of 72 tokens 64 are in files, and decode computes 8 of each of the nine requests.
    assert example["evidence"]["recomputed_tokens"] == 9 * 8
    assert example["evidence"]["transferred_tokens"] == 9 * 64
    assert example["transport"]["used"] == "unknown"
    assert ranks["evidence"]["recomputed_tokens"] == 0
    assert not list(pytester.path.rglob("shared-kv")), "KV in files is gone with its stack"
    (log,) = (path for path in pytester.path.rglob("decode-0.log") if "example" in str(path))
    assert "External Cache Hit" in log.read_text()
