"""What a newcomer asks of a report first: where PD wins and loses, and which role is short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_pdperf.evidence.ttft_split import TtftSplit
from pytest_pdperf.measure.cell_result import MetricValue
from pytest_pdperf.report.balance import balance, limit_of
from pytest_pdperf.report.ci import step_summary
from pytest_pdperf.report.contest import contest
from pytest_pdperf.report.grid import Grid, build_grid
from pytest_pdperf.report.html import render as render_html
from pytest_pdperf.report.markdown import render
from pytest_pdperf.report.outcomes import CellOutcome
from pytest_pdperf.report.source import Run
from tests.unit.report.report_data import outcome

FIRST, SECOND = "in512-out256-c1", "in512-out256-c4"


def cell(name: str, topology: str, ttft: float, itl: float, **details: object) -> CellOutcome:
    made = outcome(name, topology)
    metrics = {"ttft_ms_p50": MetricValue(ttft, 64), "itl_ms_p99": MetricValue(itl, 9000)}
    return replace(made, result=replace(made.result, metrics=metrics), details=details)


def grid(*cells: CellOutcome) -> Grid:
    return build_grid([Run(name="r", folder=Path("r"), outcomes=cells)])


def roles(prefill: float | None, decode: float | None) -> dict[str, dict[str, float | None]]:
    return {
        "prefill": {"served": 0.5, "waiting": prefill},
        "decode": {"served": 3.25, "waiting": decode},
    }


PD = (
    cell(FIRST, "pd-1p2d", 200.0, 10.0, limiting="prefill", roles=roles(2.5, 0.1)),
    cell(SECOND, "pd-1p2d", 200.0, 20.0, limiting="prefill", roles=roles(0.05, 0.1)),
)
PLAIN = (cell(FIRST, "aggregated-3x", 100.0, 40.0), cell(SECOND, "aggregated-3x", 100.0, 20.5))


def test_wins_and_losses_are_counted_and_shown_cell_by_cell() -> None:
    found = contest(grid(*PD, *PLAIN))
    assert found is not None
    assert found.lines == (
        "pd-1p2d wins against aggregated-3x: ITL p99 (1 of 2 cells).",
        "pd-1p2d loses against aggregated-3x: TTFT p50 (2 of 2 cells).",
    )
    assert found.rows == (
        (FIRST, "pd-1p2d", "aggregated-3x", "ITL p99 -75%", "TTFT p50 +100%"),
        (SECOND, "pd-1p2d", "aggregated-3x", "–", "TTFT p50 +100%"),
    )


def test_without_two_sides_nobody_wins() -> None:
    assert contest(grid(*PD)) is None
    assert contest(grid(*PLAIN)) is None
    nights = [Run(name=name, folder=Path(name), outcomes=PD) for name in ("one", "two")]
    assert contest(build_grid(nights)) is None, "PD against PD of another night"
    alike = contest(grid(cell(FIRST, "pd-1p2d", 100.0, 40.0), PLAIN[0]))
    assert alike is not None and alike.lines[0].endswith("wins against aggregated-3x: nothing.")
    assert contest(grid(replace(PD[0], verdict="INVALID"), PLAIN[0])) is None


def test_the_role_that_requests_queue_for_limits_and_a_short_queue_limits_nothing() -> None:
    found = balance(grid(*PD, *PLAIN))
    assert found is not None
    assert found.lines == (
        "pd-1p2d: prefill limits: requests queue for a free prefill engine, so more prefill would help first "
        f"(1 of 2 cells: {FIRST}).",
        "pd-1p2d: no role limits: queues are short, so more engines would change little for so many clients "
        f"(1 of 2 cells: {SECOND}).",
    )
    assert found.rows == (
        (FIRST, "pd-1p2d", "0.5 at work, 2.5 waiting", "3.2 at work, 0.1 waiting", "prefill"),
        (SECOND, "pd-1p2d", "0.5 at work, 0.05 waiting", "3.2 at work, 0.1 waiting", "none"),
    )
    load = {"server": {"served": 3.0, "waiting": 2.0}}
    assert balance(grid(replace(PLAIN[0], details={"roles": load, "limiting": "unknown"}))) is None


@pytest.mark.parametrize(
    ("longest", "prefill", "decode", "limit"),
    [
        ("decode", 9.0, 0.6, "decode"),
        ("decode", 9.0, 0.4, "none"),
        ("prefill", None, 9.0, "unknown"),
        ("transfer", 0.0, 0.0, "transfer"),
        ("none", 9.0, 9.0, "none"),
        ("unknown", 9.0, 9.0, "unknown"),
        (None, 9.0, 9.0, "unknown"),
        ("a later word", 9.0, 9.0, "unknown"),
    ],
)
def test_what_is_short(longest: str | None, prefill: float | None, decode: float | None, limit: str) -> None:
    assert limit_of(replace(PD[0], details={"limiting": longest, "roles": roles(prefill, decode)})) == limit


def test_every_format_has_both_parts_and_escapes_them() -> None:
    run = Run(name="r", folder=Path("r"), outcomes=(*PD, *PLAIN))
    for text in ("\n".join(render([run])), "".join(render_html([run])), step_summary(run)):
        assert "Where PD wins and loses" in text and "Balance of prefill and decode" in text
        assert "more prefill would help first" in text
    hostile = replace(PD[0], topology="<b>|x")
    text = "\n".join(render([Run(name="r", folder=Path("r"), outcomes=(hostile, *PLAIN))]))
    assert "<b>" not in text and "&lt;b&gt;\\|x wins" in text


def test_each_engines_pd_is_held_against_its_own_aggregated_servers() -> None:
    def side(name: str, engine: str, *cells: CellOutcome) -> Run:
        return Run(name=name, folder=Path(name), outcomes=tuple(replace(c, engine=engine) for c in cells))

    slow = (cell(FIRST, "pd-1p2d", 300.0, 10.0), cell(FIRST, "aggregated-3x", 100.0, 40.0))
    found = contest(build_grid([side("a", "vllm", PD[0], PLAIN[0]), side("b", "sglang", *slow)]))
    assert found is not None
    assert [row[1:] for row in found.rows] == [
        ("pd-1p2d (vllm)", "aggregated-3x (vllm)", "ITL p99 -75%", "TTFT p50 +100%"),
        ("pd-1p2d (sglang)", "aggregated-3x (sglang)", "ITL p99 -75%", "TTFT p50 +200%"),
    ]


def test_a_limit_that_was_not_known_is_looked_for_in_the_stages() -> None:
    stages = {"prefill_queue": 1.0, "transfer": None, "decode_queue": 80.0, "first_decode_step": 8.0}
    one = replace(PD[0], details={"limiting": "unknown", "roles": roles(0.0, 1.5)})
    assert limit_of(one) == "unknown"
    assert limit_of(replace(one, ttft_split=TtftSplit(100.0, stages, 0.0))) == "transfer or decode"
    found = balance(grid(replace(one, ttft_split=TtftSplit(100.0, stages, 0.0))))
    assert found is not None and "whose connector does not time the transfer" in found.lines[0]
