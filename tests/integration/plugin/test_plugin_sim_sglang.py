"""The whole way on simulated SGLang engines behind the real sglang-router: `pytest -m pd --engine sim-sglang`."""

from pathlib import Path

import pytest

from pytest_pdperf.engines.registry import get_engine
from pytest_pdperf.probing import exact_form
from pytest_pdperf.routers.registry import get_router
from tests.integration.plugin_runs import measured_run, with_fixtures

SUITE = """
import pytest

@pytest.mark.pdperf_cells("single")
def test_cell(measure, gate):
    gate.check(measure())

@pytest.mark.pdperf_cells("none")
def test_greedy(pdperf, stack):
    answers = pdperf.greedy_answers(64)
    assert set(answers) == {"through the router", "prefill-0 to decode-0 directly"}
    again = pdperf.greedy_answers(64)
    assert again["through the router, earlier in this launch"] == answers["through the router"]
    assert len(set(answers.values())) == 1
"""
PD = "kind: pd\nroles: {prefill: {replicas: 1}, decode: {replicas: 1}}\n"
CELL = "shapes: [64/48]\nconcurrency: [2]\nrequests: 12\nwarmups: 1\ntimeout_s: 30\n"


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A user's repository with one small cell and one topology of its own."""
    pytester.makepyfile(test_perf=SUITE)
    with_fixtures(pytester, {"topologies/pair.yaml": PD, "workloads/small.yaml": CELL})
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    always = ["-m", "pd", "--engine", "sim-sglang", "--topology", "pair", "--workload", "small"]
    return measured_run(project, *always, "-p", "no:cacheprovider", *arguments, timeout=180)


def test_a_cell_is_measured_and_proven_on_generate(project: pytest.Pytester) -> None:
    result = run(project)
    assert result.ret == 0
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*SIMULATED*", "*in64-out48-c2*pair*12/12*proven*NO_BASELINE*"])
    (log,) = Path(project.path).rglob("decode-0.log")
    assert '"POST /generate HTTP/1.1" 200' in log.read_text()


def test_a_router_through_which_no_exact_prompt_gets_is_refused_before_anything_starts(
    project: pytest.Pytester,
) -> None:
    (project.path / "fixtures/topologies/pair.yaml").write_text(PD + "router: {name: smg}\n")
    result = run(project, "--engine", "sim")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*token-id prompts*do not get through router smg to engine sim*"])


def test_the_rules_for_exact_prompts_know_every_pair() -> None:
    forms = {
        (engine, router): exact_form(
            get_engine(engine).supported_prompts() & get_router(router).supported_prompts()
        )
        for engine in ("vllm", "sglang")
        for router in ("vllm_router", "sglang_router", "smg")
    }
    assert forms == {
        ("vllm", "vllm_router"): "token_ids",
        ("vllm", "sglang_router"): None,
        ("vllm", "smg"): None,
        ("sglang", "vllm_router"): None,
        ("sglang", "sglang_router"): "generate_ids",
        ("sglang", "smg"): "generate_ids",
    }
