"""Change points of a history: found where they are, quiet where nothing changed, honest about holes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from datetime import timedelta

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.gate.creep import Point, find_creep, findings, series_of
from pytest_pdperf.gate.fingerprint import CellRef
from pytest_pdperf.gate.history import HistoryEntry
from pytest_pdperf.gate.verdict import Verdict
from tests.unit.gate.gate_tables import CATALOGUE, KEY, REF, START, launch


def points(level: Callable[[int], float], count: int = 50, noise: float = 0.01, seed: int = 3) -> list[Point]:
    source = random.Random(seed)
    return [
        Point(START + timedelta(days=day), 100 * level(day) * (1 + source.gauss(0, noise)), commit=f"c{day}")
        for day in range(count)
    ]


def test_a_step_is_found_between_the_right_commits() -> None:
    pytest.importorskip("ruptures")
    found = find_creep(points(lambda day: 1.04 if day >= 30 else 1.0), 1)
    (step,) = found.steps
    assert abs(step.index - 30) <= 1
    assert step.change == pytest.approx(0.04, abs=0.01)
    assert found.total == pytest.approx(0.04, abs=0.01) and found.worse_than(0.02)
    assert f"between c{step.index - 1} (" in step.line() and "worse" in step.line()


def test_direction_turns_a_gain_into_a_gain() -> None:
    pytest.importorskip("ruptures")
    found = find_creep(points(lambda day: 1.06 if day >= 20 else 1.0), -1)
    assert len(found.steps) == 1 and found.steps[0].change < -0.04
    assert not found.worse_than(0.02) and "better" in found.steps[0].line()


def test_nothing_is_found_where_nothing_changed() -> None:
    pytest.importorskip("ruptures")
    quiet = [find_creep(points(lambda day: 1.0, 40, seed=seed), 1) for seed in range(25)]
    assert sum(bool(found.steps) for found in quiet) <= 1
    assert find_creep(points(lambda day: 1.0, noise=0.0), 1).total == 0.0


def test_slow_drift_adds_up() -> None:
    pytest.importorskip("ruptures")
    found = find_creep(points(lambda day: 1.002**day, 60), 1)
    assert found.worse_than(0.05)


def test_a_noiseless_step_is_certain() -> None:
    pytest.importorskip("ruptures")
    found = find_creep(points(lambda day: 1.1 if day >= 10 else 1.0, 20, noise=0.0), 1)
    assert [step.index for step in found.steps] == [10] and found.steps[0].p == 0.0


def test_a_hole_in_the_history_is_named() -> None:
    pytest.importorskip("ruptures")
    series = points(lambda day: 1.1 if day >= 25 else 1.0)
    holed = [point for day, point in enumerate(series) if not 18 <= day < 29]
    (step,) = find_creep(holed, 1).steps
    assert step.gap == timedelta(days=12) and "no launches for 12 days" in step.line()
    assert (step.before.commit, step.after.commit) == ("c17", "c29")


def test_a_short_history_says_nothing() -> None:
    found = find_creep(points(lambda day: 1.0, 5), 1)
    assert found.total is None and "6 needed" in found.note and not found.worse_than(0.0)


def test_a_bad_value_is_no_number() -> None:
    series = [*points(lambda day: 1.0, 10), Point(START, float("nan"))]
    with pytest.raises(ValueError, match="finite"):
        find_creep(series, 1)


def test_without_the_library_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ruptures", None)
    with pytest.raises(UsageProblem, match="pip install"):
        find_creep(points(lambda day: 1.0, 10), 1)


def entry(day: int, verdict: Verdict = Verdict.PASS, ref: CellRef = REF, bare: bool = False) -> HistoryEntry:
    return HistoryEntry(
        key=KEY,
        workload=ref.workload,
        cell=ref.cell,
        workload_digest=ref.digest,
        verdict=verdict,
        launch_id=f"run-{day}",
        launch=None if bare else launch({"output_tps": 1000.0 + day}, day=day),
    )


def test_findings_name_the_series_that_crept_worst_first() -> None:
    pytest.importorskip("ruptures")
    source = random.Random(4)
    entries = []
    for day in range(40):
        level = 1.0 if day < 20 else 1.08
        noise = 1 + source.gauss(0, 0.004)
        values = {
            "output_tps": 1000.0 / level * noise,
            "ttft_ms_p50": 100 * noise,
            "output_tps_wall": 900 / level,
        }
        entries.append(entry(day).model_copy(update={"launch": launch(values, day=day)}))
    (found,) = findings(entries, CATALOGUE)
    assert (found.metric, found.beyond) == ("output_tps", True)
    assert found.lines()[0].startswith("pd-1p2d-tp2 fixed-shapes/in512-out256-c16 output_tps: 7.")
    assert "worse over 40 launches, more than its tolerance" in found.lines()[0]
    assert "2025-03-20" in found.lines()[1] and "2025-03-21" in found.lines()[1]
    assert findings(entries[:4], CATALOGUE) == []


def test_a_series_leaves_out_what_does_not_compare() -> None:
    entries = [
        entry(4),
        entry(1),
        entry(2, Verdict.INVALID),
        entry(3, bare=True),
        entry(5, ref=CellRef("w", "c", "d")),
        entry(6, Verdict.FAIL),
    ]
    found = series_of(entries, KEY, REF, "output_tps")
    assert [point.value for point in found] == [1001.0, 1004.0, 1006.0]
    assert found[0].build == "0.33.0"
    assert series_of(entries, KEY.model_copy(update={"dtype": "fp8"}), REF, "output_tps") == []
    assert series_of(entries, KEY, REF, "ttft_ms_p50") == []
