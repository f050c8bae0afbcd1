"""A fast night hides a loss; looking behind it costs launches and changes no other verdict."""

from __future__ import annotations

import math

import pytest

from pytest_pdperf.gate.mask import MIN_SERIES, score_difference, session_offset, unmask
from pytest_pdperf.gate.statistics import relative_worsening
from pytest_pdperf.gate.verdict import CellVerdict, Verdict
from tests.unit.gate.gate_tables import baseline, judged

STORED = baseline({"ttft_ms_p50": [100.0] * 5, "tpot_ms_p50": [20.0] * 5, "output_tps": [1000.0] * 5})


def session(factor: float, lost: float, cells: int = 6) -> dict[str, CellVerdict]:
    """Every cell costs `factor` times its baseline; the first loses `lost` of its throughput on top."""
    return {
        f"w/c{i}": judged(
            {
                "ttft_ms_p50": 100 * factor,
                "tpot_ms_p50": 20 * factor,
                "output_tps": 1000 / factor * (1 - lost if i == 0 else 1),
            },
            STORED,
        )
        for i in range(cells)
    }


@pytest.mark.parametrize("direction", [1, -1])
def test_changes_turn_back_into_scores(direction: int) -> None:
    assert score_difference(relative_worsening(0.07, direction), direction) == pytest.approx(0.07)


def test_the_session_is_read_from_its_median() -> None:
    rows = [row for verdict in session(0.97, 0.06).values() for row in verdict.rows]
    assert session_offset(rows) == pytest.approx(math.log(0.97))
    assert session_offset(rows[: MIN_SERIES - 1]) is None
    assert session_offset(rows[:MIN_SERIES]) is not None


def test_a_loss_behind_a_fast_night_is_looked_at() -> None:
    before = session(0.97, 0.06)
    assert before["w/c0"].verdict is Verdict.PASS
    after = unmask(before)
    assert after["w/c0"].verdict is Verdict.SUSPECT
    (row,) = after["w/c0"].suspects
    assert row.metric == "output_tps" and "3.0% faster" in row.note
    assert {cell: verdict for cell, verdict in after.items() if cell != "w/c0"} == {
        cell: verdict for cell, verdict in before.items() if cell != "w/c0"
    }


@pytest.mark.parametrize(("factor", "lost"), [(0.97, 0.03), (1.0, 0.04), (1.03, 0.0)])
def test_nothing_else_changes(factor: float, lost: float) -> None:
    before = session(factor, lost)
    assert unmask(before) == before


def test_a_slow_night_excuses_nobody() -> None:
    before = session(1.08, 0.0)
    assert before["w/c1"].verdict is Verdict.SUSPECT
    assert unmask(before) == before


def test_few_series_say_nothing_about_the_machine() -> None:
    before = session(0.97, 0.06, cells=3)
    assert unmask(before) == before


def test_what_is_red_or_was_not_compared_stays() -> None:
    before = session(0.97, 0.06)
    before["w/bad"] = judged({"output_tps": None}, STORED)
    before["w/new"] = judged({"output_tps": 1.0}, None)
    after = unmask(before)
    assert after["w/bad"].verdict is Verdict.INVALID and after["w/new"].verdict is Verdict.NO_BASELINE
