"""The option table and its precedence."""

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.option_values import positive_count, positive_seconds
from pytest_pdperf.options import BY_NAME, OPTIONS, Settings, resolve

ROOT = Path(__file__).resolve().parents[2]


def settings(command_line: dict[str, object] | None = None, ini: dict[str, object] | None = None) -> Settings:
    line, file = command_line or {}, ini or {}
    return resolve(line.get, file.get)


def test_command_line_beats_ini_beats_default() -> None:
    assert settings()["topology"] == BY_NAME["topology"].default
    assert settings(ini={"pdperf_topology": "a"})["topology"] == "a"
    assert settings({"pdperf_topology": "b"}, {"pdperf_topology": "a"})["topology"] == "b"


def test_only_some_options_start_the_suite() -> None:
    assert not settings().active
    assert not settings({"pdperf_topology": "a", "pdperf_plan": True}).active
    assert settings({"pdperf_engine": "sim"}).active
    assert settings(ini={"pdperf_gpus": "0-7"}).active


def test_names_are_distinct_and_every_help_names_its_ini_twin() -> None:
    assert len(BY_NAME) == len(OPTIONS)
    assert len({option.flag for option in OPTIONS}) == len({option.ini for option in OPTIONS}) == len(OPTIONS)
    for option in OPTIONS:
        assert option.ini in option.shown_help()
        if isinstance(option.default, str):
            assert option.default in option.shown_help()


def test_a_value_outside_the_choices_names_the_place_and_the_choices() -> None:
    with pytest.raises(UsageProblem, match=r"--update-baselines: 'allways' is not one of auto, create"):
        settings({"pdperf_update_baselines": "allways"})
    with pytest.raises(UsageProblem, match="pdperf_require_baseline"):
        settings(ini={"pdperf_require_baseline": "maybe"})


def test_every_option_is_read_somewhere() -> None:
    """By its name in `settings[...]`; a table of options holds no promise that nothing keeps."""
    code = "".join(
        path.read_text()
        for folder in (ROOT / "pytest_pdperf", ROOT / "tests" / "perf")
        for path in folder.rglob("*.py")
        if path.name != "options.py"
    )
    read = set(re.findall(r"""\[["'](\w+)["']\]""", code))
    assert {option.name for option in OPTIONS} <= read


@pytest.mark.parametrize("script", ["scripts/gpu/suite.sh", "scripts/cpu_vllm/suite.sh"])
def test_scripts_ask_for_options_that_there_are(script: str) -> None:
    """Nobody runs the one for GPUs on a machine without them."""
    text = (ROOT / script).read_text()
    (first, *_) = re.findall(r"(?:-m )?pytest (?:[^\n]*\\\n)*[^\n]*", text.partition("set -")[2])
    asked = set(re.findall(r"(?<=\s)--[a-z][a-z-]*", first))
    assert asked
    assert asked <= {option.flag for option in OPTIONS}


@pytest.mark.parametrize("text", ["0", "-3", "x", "1.5", ""])
def test_launches_must_be_a_positive_count(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        positive_count(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("45m", 2700), ("2h", 7200), ("1.5m", 90)]
)
def test_durations(text: str, seconds: float) -> None:
    assert positive_seconds(text) == seconds


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("gpu_wait", "soon", "want a time such as 90, 90s, 15m or 2h"),
        ("startup_timeout", "m", "want a time such as"),
        ("startup_timeout", "0", "must be more than 0"),
        ("launches", "two", "want a whole number"),
        ("workload_seed", "1.5", "want a whole number"),
        ("client_processes", "many", "must be auto or a number from 1 to 64"),
    ],
)
def test_a_number_that_is_none_is_answered_with_what_is_wanted(name: str, value: str, wanted: str) -> None:
    option = BY_NAME[name]
    with pytest.raises(UsageProblem) as caught:
        settings({option.dest: value})
    assert str(caught.value).startswith(f"{option.flag}: cannot use {value!r}: {wanted}")


@given(st.text(max_size=6))
def test_durations_are_positive_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert positive_seconds(text) > 0
