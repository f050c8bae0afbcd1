"""The table at the end of a run: the better of two is marked, and an invalid cell is never the better one."""

from __future__ import annotations

from pytest_pdperf.report.terminal import render_table
from tests.unit.report.report_data import outcome


def rows(text: str) -> dict[str, list[str]]:
    """Topology -> the words of its line."""
    lines = [line.removeprefix("in512-out256-c1").split() for line in text.splitlines()]
    return {words[0]: words[1:] for words in lines if words and words[0] in ("pd-1p2d", "aggregated-3x")}


def test_the_better_value_is_marked_in_either_direction() -> None:
    pd = outcome(ttft_ms_p50=200.0, output_tps=1100.0)
    aggregated = outcome(topology="aggregated-3x", ttft_ms_p50=100.0, output_tps=990.0)
    found = rows(render_table([pd, aggregated]))
    assert found["pd-1p2d"][:5] == ["200.0", "-", "-", "-", "1,100*"]
    assert found["aggregated-3x"][:5] == ["100.0*", "-", "-", "-", "990.0"]


def test_an_invalid_cell_is_never_the_better_one() -> None:
    pd = outcome(verdict="INVALID", ttft_ms_p50=1.0, output_tps=9000.0)
    aggregated = outcome(topology="aggregated-3x", ttft_ms_p50=100.0, output_tps=1000.0)
    text = render_table([pd, aggregated])
    assert rows(text)["pd-1p2d"][-1] == "INVALID"
    assert "1.0" in rows(text)["pd-1p2d"][0] and not any(
        "*" in " ".join(words) for words in rows(text).values()
    )
