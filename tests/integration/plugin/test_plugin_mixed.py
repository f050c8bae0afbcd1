"""Mixed load and the comparison of topologies as a user runs them, on simulated engines."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from pytest_pdperf.measure.mixed import Gaps, Mixed, Rate
from pytest_pdperf.spec.topology import Kind
from tests.integration.plugin_runs import measured_run, with_fixtures
from tests.perf.test_mixed_load import stalls as stalls_of

SUITE = Path(__file__).parents[2] / "perf"

PD = """
kind: pd
roles:
  prefill: {replicas: 1}
  decode: {replicas: 1}
"""

AGGREGATED = """
kind: aggregated
roles:
  server: {replicas: 1}
"""

WORKLOAD = """
streams:
  steady: {shape: 64/48, concurrency: 2, requests: 16}
  burst: {shape: 2048-4096/8, concurrency: 2, requests: 8, think_s: 0.2}
warmups: 2
timeout_s: 60
"""

CLAIMS = """
expectations:
  - {candidate: pair, reference: one, metric: itl_ms_max, expect: lower}
  - {candidate: pair, reference: one, metric: itl_ms_max, expect: at least 1000x higher}
  - {candidate: pair, reference: one, metric: burst.itl_ms_p99, expect: lower}
  - {candidate: pair, reference: one, metric: itl_ms_p99, expect: lower, workload: other}
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A user's repository with the suite's own mixed-load and comparison tests."""
    for name in ("test_mixed_load.py", "test_pd_vs_aggregated.py"):
        shutil.copy(SUITE / name, pytester.path / name)
    with_fixtures(
        pytester,
        {
            "topologies/one.yaml": AGGREGATED,
            "topologies/pair.yaml": PD,
            "workloads/storm.yaml": WORKLOAD,
            "expectations.yaml": CLAIMS,
        },
    )
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    always = ["--engine", "sim", "--workload", "storm", "-p", "no:cacheprovider", "-rs", "-v"]
    return measured_run(project, *always, *arguments, timeout=240)


def cells(project: pytest.Pytester) -> dict[str, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in project.path.glob("pdperf-results/*/cells/*.json")]
    return {row["topology"]: row for row in found}


def test_bursts_stall_the_steady_stream_when_aggregated_and_claims_are_held_to_it(
    project: pytest.Pytester,
) -> None:
    result = run(project, "--topology", "pair,one")
    result.stdout.fnmatch_lines(
        [
            "*test_mixed_load[[]pair-storm[]] PASSED*",
            "*test_mixed_load[[]one-storm[]] PASSED*",
            "*pair-vs-one-itl_ms_max-any* PASSED*",
            "*FAILED*",
        ]
    )
    text = result.stdout.str()
    assert "violated  itl_ms_max of pair at least 1000x higher than one at storm" in text
    assert (
        "undecided burst.itl_ms_p99 of pair lower than one at storm: pair: fewer samples than the metric"
        in text
    )
    result.assert_outcomes(passed=3, failed=1, skipped=1)
    found = cells(project)
    pair, one = found["pair"]["details"]["mixed"], found["one"]["details"]["mixed"]
    assert pair["prefills"] == one["prefills"] == 8
    assert one["stalled_share_beside"] > 0.2
    assert pair["stalled_share_beside"] < one["stalled_share_beside"]
    assert pair["busy"]["output_tps"]["steady"] > 0
    lengths = {name: found[name]["result"]["prompt_tokens"] for name in found}
    assert lengths["pair"] == lengths["one"]
    assert found["pair"]["evidence"] == "proven"
    details = found["pair"]["details"]
    assert details["transport"]["used"] == "unknown"
    assert details["role_counts"]["status"] == "pd"
    assert details["router_ms"] is not None
    split = found["pair"]["ttft_split"]
    known = sum(ms for ms in split["stages"].values() if ms is not None)
    assert known + split["closure_error_ms"] == pytest.approx(split["measured_ms"])
    assert found["one"]["ttft_split"]["stages"]["transfer"] is None


def test_a_side_that_is_invalid_or_not_measured_is_no_comparison(project: pytest.Pytester) -> None:
    """Decode recomputes every prompt, and the aggregated side is not selected: nothing may pass."""
    result = run(project, "--topology", "pair,one", "-m", "pd", "--sim-fault", "decode.recompute=1")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=1, skipped=3, deselected=1)
    text = result.stdout.str()
    assert "INVALID" in text
    assert "pair: INVALID (evidence: " in text


def mixed(stalls: float, kind_gaps: int = 100) -> Mixed:
    beside = Gaps(kind_gaps, 1000.0, 5.0, 5.0, 90.0, int(stalls > 0), stalls)
    clear = Gaps(500, 2500.0, 5.0, 6.0, 7.0, 0, 0.0)
    return Mixed("steady", 8, 900.0, beside, clear, None, Rate(3.5, {"steady": 100.0}))


def test_a_steady_stream_may_stall_when_aggregated_and_not_under_pd() -> None:
    assert stalls_of(mixed(499.0), Kind.PD) == []
    (problem,) = stalls_of(mixed(501.0), Kind.PD)
    assert problem.startswith(
        "a burst stalls steady: 1 stalls, 501 of 1000 ms beside long prefills (50%, limit 50%)"
    )
    assert stalls_of(mixed(900.0), Kind.AGGREGATED) == []


@pytest.mark.parametrize("kind", list(Kind))
def test_streams_that_never_met_show_nothing(kind: Kind) -> None:
    assert "never met" in stalls_of(mixed(0.0, kind_gaps=0), kind)[0]
    assert "cannot be told apart" in stalls_of(None, kind)[0]


LONG_PROMPTS = """
shapes: [6144/8]
concurrency: [1]
requests: 8
warmups: 1
timeout_s: 60
"""


def test_a_slower_first_token_names_the_stage_that_moved(project: pytest.Pytester) -> None:
    shutil.copy(SUITE / "test_fixed_shapes.py", project.path / "test_fixed_shapes.py")
    (project.path / "fixtures" / "workloads" / "storm.yaml").write_text(LONG_PROMPTS)
    arguments = ["test_fixed_shapes.py", "--topology", "pair", "--confirm", "never"]
    assert run(project, *arguments, "--update-baselines=create").ret == 0
    (stored,) = project.path.glob("baselines/**/pair.json")
    (launch,) = next(iter(json.loads(stored.read_text())["cells"].values()))[0]["launches"]
    assert "ttft_split" in launch["environment"]
    speeds = json.loads(launch["environment"]["speeds"])
    assert {name: len(windows) for name, windows in speeds.items()} == {"prefill-0": 3, "decode-0": 3}
    assert speeds["decode-0"][0].keys() == {"step_s", "link_rate"}
    slow = run(project, *arguments, "--sim-fault", "prefill.prefill=2")
    assert slow.ret == pytest.ExitCode.TESTS_FAILED
    slow.stdout.re_match_lines(
        [
            r".*FAIL.*ttft_ms_p50.*TTFT stages: prefill moved by \+\d+\.\d ms.*of the change.*"
            r"; cause: prefill slowed \(prefill-0\): \d+.* ms a prompt against \d+.* ms a prompt in the baseline.*"
        ]
    )
    slow = run(project, *arguments, "--sim-fault", "prefill.link=0.1")
    assert slow.ret == pytest.ExitCode.TESTS_FAILED
    slow.stdout.re_match_lines(
        [
            r".*FAIL.*ttft_ms_p50.*TTFT stages: transfer moved by \+\d+\.\d ms.*of the change.*"
            r"; cause: KV transfer slowed \(decode-0\): \d.* [kMG]B/s against \d.* [MG]B/s in the baseline.*"
        ]
    )
    assert not re.search("cause: .*(decode|prefill) slowed", slow.stdout.str())
