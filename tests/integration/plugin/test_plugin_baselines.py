"""A baseline that cannot be trusted is a usage error before anything starts: no launch is spent on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pytest_pdperf.session  # noqa: F401 - pytester forgets what a run in this process imports; numpy loads only once
from tests.integration.plugin.accepted import accepted
from tests.integration.plugin.test_plugin_sim import AGGREGATED, ONE_CELL, SUITE
from tests.integration.plugin_runs import SPARED, with_fixtures

ARGUMENTS = {"engine": "sim", "topology": "one", "workload": "small"}
CELL = "in64-out48-c2"


@pytest.fixture
def stored(pytester: pytest.Pytester) -> Path:
    """The baseline file of a user's project, accepted from numbers that no launch had to produce."""
    pytester.makepyfile(test_perf=SUITE)
    with_fixtures(pytester, {"topologies/one.yaml": AGGREGATED, "workloads/small.yaml": ONE_CELL})
    return accepted(pytester, ARGUMENTS, CELL, {"tpot_ms_p50": 5.0, "output_tps": 400.0})


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        data = json.loads(text)
        change(data)
        return json.dumps(data)

    return edit


def pin(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["cells"][f"small/{CELL}"][0]
    return found


def number(data: dict[str, Any], value: Any) -> None:
    pin(data)["launches"][0]["values"]["tpot_ms_p50"] = value


BAD: dict[str, tuple[Callable[[str], str], str]] = {
    "truncated": (lambda text: text[: len(text) // 2], "not strict JSON"),
    "slower by hand": (edited(lambda data: number(data, 50.0)), "edited by hand or merged"),
    "newer schema": (edited(lambda data: data.update(schema=2)), "schema 2 is newer than 1"),
    "no number": (
        lambda text: text.replace('"tpot_ms_p50": 5.0', '"tpot_ms_p50": NaN'),
        "NaN is not a finite",
    ),
    "launch twice": (
        edited(lambda data: pin(data)["launches"].append(pin(data)["launches"][0])),
        "listed twice",
    ),
    "cell twice": (edited(lambda data: data["cells"][f"small/{CELL}"].append(pin(data))), "duplicated cell"),
}
"""One of each kind; the gate's unit tests have many more."""


def run(pytester: pytest.Pytester, *more: str) -> pytest.RunResult:
    given = [f"--{name}={value}" for name, value in ARGUMENTS.items()]
    return pytester.runpytest_inprocess(*SPARED, *given, "-p", "no:cacheprovider", *more)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_baseline_is_a_usage_error_and_nothing_starts(
    pytester: pytest.Pytester, stored: Path, name: str
) -> None:
    spoil, message = BAD[name]
    before = stored.read_text()
    stored.write_text(spoil(before))
    assert stored.read_text() != before
    result = run(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = result.stderr.str() + result.stdout.str()
    assert message in said and "way out: " in said
    assert f"baseline {stored.relative_to(pytester.path)}: " in said, "the path is the project's own"
    assert "bringing up" not in said
    assert not list(pytester.path.glob("pdperf-results/*/logs"))


def test_the_same_file_unspoilt_is_accepted(pytester: pytest.Pytester, stored: Path) -> None:
    assert run(pytester, "--plan").ret == 0


def test_a_bad_baseline_of_another_topology_does_not_stop_this_one(
    pytester: pytest.Pytester, stored: Path
) -> None:
    stored.with_name("two.json").write_text("{")
    assert run(pytester, "--plan").ret == 0
