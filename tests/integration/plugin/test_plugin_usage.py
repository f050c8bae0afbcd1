"""What a user sees who types something wrong, or nothing: every case ends before anything starts."""

import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
import pytest

@pytest.mark.pdperf_cells("single")
def test_cell(measure, gate):
    gate.check(measure())
"""

UNRELATED = """
import pytest

@pytest.fixture
def cell():
    return "mine"

@pytest.fixture
def topology():
    return "mine too"

def test_other(cell, topology):
    assert (cell, topology) == ("mine", "mine too")
"""


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *args)


def test_without_options_the_suite_is_skipped_with_one_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    for arguments in ((), ("-m", "pd"), ("-m", "aggregated")):
        result = run(pytester, *arguments)
        result.assert_outcomes(skipped=1)
        said = [line for line in result.outlines if "run it with --gpus LIST, or with --engine sim" in line]
        assert len(said) == 1


def test_where_the_suite_is_missing_it_is_said_how_to_get_it(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--engine", "sim")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(
        ["no performance test lies here: pdperf init puts the suite into this folder*"]
    )


def test_another_project_with_fixtures_of_the_same_names_is_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(UNRELATED)
    run(pytester).assert_outcomes(passed=1)


BAD = {
    "unknown engine": (["--engine", "vlm"], ["*vlm*", "*vllm*"]),
    "unknown topology": (["--engine", "sim", "--topology", "pd-1p2"], ["*pd-1p2*", "*pd-1p2d*"]),
    "topology named twice": (["--engine", "sim", "--topology", "pd-1p2d,pd-1p2d"], ["*named twice*"]),
    "unknown workload": (["--engine", "sim", "--workload", "quik"], ["*quik*", "*quick*"]),
    "malformed gpus": (["--gpus", "0-", "--model", "m"], ["*--gpus*0-*"]),
    "gpu named twice": (["--gpus", "0-3,2", "--model", "m"], ["*--gpus*2*"]),
    "gpus with the simulator": (["--engine", "sim", "--gpus", "0"], ["*simulated engines use no GPU*"]),
    "no gpus": (["--engine", "vllm"], ["*--gpus is missing*"]),
    "no model": (["--gpus", "cpu"], ["*--model is missing*"]),
    "no such gpu and no model": (["--gpus", "1023"], ["*--gpus 1023: *"]),
    "engine environment": (
        ["--gpus", "cpu", "--model", "m", "--engine-env", "nowhere"],
        ["*no virtual environment there*"],
    ),
    "fault on a real engine": (
        ["--gpus", "cpu", "--model", "m", "--sim-fault", "leak=1"],
        ["*add --engine sim*"],
    ),
    "unknown role": (
        ["--engine", "sim", "--engine-arg", "decoder.x=1"],
        ["*decoder.x=1*prefill, decode, server*"],
    ),
    "reason without update": (
        ["--engine", "sim", "--baseline-reason", "x"],
        ["*does nothing without --update-baselines*"],
    ),
    "context overflow": (
        ["--engine", "sim", "--engine-arg", "max_model_len=1000"],
        ["*in1024-out32-c1*1056 tokens*1000*raise max_model_len*"],
    ),
    "unknown run": (["--engine", "sim", "--resume", "20260101-1"], ["*--resume 20260101-1: no such run*"]),
    "reference": (
        ["--engine", "sim", "--reference", "nowhere"],
        ["*--reference nowhere: no virtual environment*"],
    ),
    "compare one": (["--engine", "sim", "--compare", "pd-1p2d"], ["*--compare*want two topologies*"]),
    "compare another": (
        ["--engine", "sim", "--compare", "pd-1p2d:x"],
        ["*--compare: topology 'x' is not in this run*"],
    ),
    "bad duration": (["--engine", "sim", "--startup-timeout", "soon"], ["*--startup-timeout*soon*"]),
}


@pytest.mark.parametrize(("arguments", "lines"), BAD.values(), ids=BAD)
def test_bad_input_is_a_usage_error_in_few_lines(
    pytester: pytest.Pytester, arguments: list[str], lines: list[str]
) -> None:
    pytester.makepyfile(SUITE)
    result = run(pytester, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    message = [line for line in result.errlines + result.outlines if line.strip()]
    assert any(line.startswith("ERROR:") for line in message)
    assert len(message) <= 8, "\n".join(message)
    text = pytest.LineMatcher(message)
    for line in lines:
        text.fnmatch_lines([line])
    assert not list(Path(pytester.path).glob("pdperf-results/*/logs")), "something was started"


def test_gpus_without_a_driver_name_the_simulator(pytester: pytest.Pytester) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    pytester.makepyfile(SUITE)
    result = run(pytester, "--gpus", "0-7", "--model", str(pytester.path))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    pytest.LineMatcher(result.errlines + result.outlines).fnmatch_lines(["*--engine sim*"])


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    heavy = (
        "numpy",
        "scipy",
        "httpx",
        "pydantic",
        "pynvml",
        "rich",
        "yaml",
        "torch",
        "prometheus_client",
        "uvicorn",
    )
    code = f"import pytest_pdperf.plugin, sys; print([name for name in {heavy!r} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
