"""Stage 1: what a value earns, and everything that must never end in a PASS."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.gate.judge import (
    Measurement,
    drift_from_anchor,
    judge_series,
    pooled_sessions,
    pooled_siblings,
)
from pytest_pdperf.gate.statistics import Pooled
from pytest_pdperf.gate.verdict import VERDICTS, Blocks, Verdict, VerdictRow, blocks, number, worst
from tests.unit.gate.gate_tables import CATALOGUE, START, Tolerance, baseline, judged, launch, measured

STEADY = {"ttft_ms_p50": [100.0] * 5, "output_tps": [1000.0] * 5}
GOODNESS = [Verdict.IMPROVED, Verdict.PASS, Verdict.NOISY, Verdict.SUSPECT]


def row_of(
    values: dict[str, float | None], metric: str, series: dict[str, list[float]] | None = None
) -> VerdictRow:
    verdict = judged(values, baseline(series or STEADY))
    return next(row for row in verdict.rows if row.metric == metric)


def test_a_value_within_the_limit_passes_and_shows_its_working() -> None:
    row = row_of({"ttft_ms_p50": 104.0, "output_tps": 990.0}, "ttft_ms_p50")
    assert row.verdict is Verdict.PASS
    assert (row.value, row.n, row.launches, row.binding, row.unit) == (104.0, 64, 5, "tolerance", "ms")
    assert row.baseline == pytest.approx(100.0)
    assert row.change == pytest.approx(0.04)
    assert row.limit == pytest.approx(0.10)
    assert row.detectable is not None and row.detectable > 0.10
    assert not row.provisional
    line = row.line()
    for part in (
        "PASS",
        "ttft_ms_p50",
        "104.0 ms vs 100.0 ms",
        "+4.0% (worse)",
        "limit 10.0% (tolerance)",
        "B=5",
        "n=64",
    ):
        assert part in line


def test_direction_decides_what_is_worse() -> None:
    assert row_of({"ttft_ms_p50": 100.0, "output_tps": 900.0}, "output_tps").verdict is Verdict.SUSPECT
    better = row_of({"ttft_ms_p50": 100.0, "output_tps": 1100.0}, "output_tps")
    assert better.verdict is Verdict.IMPROVED
    assert better.change == pytest.approx(-0.10)
    assert "+10.0% (better)" in better.line()


def test_the_limit_of_a_higher_is_better_metric_is_a_loss() -> None:
    row = row_of({"ttft_ms_p50": 100.0, "output_tps": 1000 / 1.049}, "output_tps")
    assert row.verdict is Verdict.PASS
    assert row.limit == pytest.approx(1 - 1 / 1.05)
    assert row_of({"ttft_ms_p50": 100.0, "output_tps": 1000 / 1.051}, "output_tps").verdict is Verdict.SUSPECT


def test_few_launches_are_called_provisional() -> None:
    row = row_of({"output_tps": 1000.0}, "output_tps", {"output_tps": [1000.0, 1001.0]})
    assert row.provisional and "provisional (B=2)" in row.line()


def test_noise_is_never_a_pass() -> None:
    spread = {"output_tps": [1000.0, 700.0, 1300.0, 800.0, 1200.0]}
    row = row_of({"output_tps": 1000.0}, "output_tps", spread)
    assert row.verdict is Verdict.NOISY and row.binding == "noise"
    assert judged({"output_tps": 1000.0}, baseline(spread)).verdict is Verdict.NOISY


def test_siblings_variance_replaces_the_shipped_prior() -> None:
    quiet = judged(
        {"output_tps": 1000.0}, baseline({"output_tps": [1000.0] * 5}), {"output_tps": Pooled(0.1**2, 60)}
    )
    assert quiet.verdict is Verdict.NOISY


def test_suspiciously_fast_is_said() -> None:
    row = row_of({"ttft_ms_p50": 60.0, "output_tps": 1000.0}, "ttft_ms_p50")
    assert row.verdict is Verdict.IMPROVED and row.suspicious and "did the work shrink" in row.note
    usual = row_of({"ttft_ms_p50": 85.0, "output_tps": 1000.0}, "ttft_ms_p50")
    assert usual.verdict is Verdict.IMPROVED and not usual.suspicious


def test_a_stale_baseline_demands_a_refresh() -> None:
    row = row_of({"ttft_ms_p50": 12.2, "output_tps": 1000.0}, "ttft_ms_p50")
    assert row.verdict is Verdict.IMPROVED and "baseline stale: cost ratio 0.122" in row.note


@pytest.mark.parametrize(("metric", "stored", "now"), [
    ("ttft_ms_p50", 150.0, 0.12),
    ("ttft_ms_p50", 3.1, 3100.0),
    ("output_tps", 500.0, 5.0),
    ("output_tps", 500.0, 500_000.0),
])  # fmt: skip
def test_an_implausible_ratio_is_a_unit_error_and_no_gain(metric: str, stored: float, now: float) -> None:
    row = row_of({metric: now}, metric, {metric: [stored] * 5})
    assert row.verdict is Verdict.INVALID and "implausible" in row.note


def invalid_cases() -> dict[str, Measurement]:
    good = measured({"ttft_ms_p50": 100.0, "output_tps": 1000.0})
    return {
        "nothing completed": replace(good, ok=0),
        "nothing sent": replace(good, requests=0, ok=0),
        "one request failed": replace(good, ok=63),
        "reason from the measurement": replace(good, invalid=("decode recomputed 512 prompt tokens",)),
        "no metric at all": replace(good, metrics={}),
        "metric missing": measured({"ttft_ms_p50": 100.0}),
        "metric is None": measured({"ttft_ms_p50": 100.0, "output_tps": None}),
        "NaN": measured({"ttft_ms_p50": math.nan, "output_tps": 1000.0}),
        "infinite": measured({"ttft_ms_p50": 100.0, "output_tps": math.inf}),
        "zero": measured({"ttft_ms_p50": 0.0, "output_tps": 1000.0}),
        "negative, as from a clock set back": measured({"ttft_ms_p50": -3.0, "output_tps": 1000.0}),
        "measured before its baseline": replace(good, taken=START - timedelta(days=3)),
        "surroundings differ": replace(good, inconclusive=("throttled share 0.67, baseline 0.0",)),
    }


@pytest.mark.parametrize("case", sorted(invalid_cases()))
@pytest.mark.parametrize("stored", [True, False])
def test_what_cannot_be_trusted_never_passes(case: str, stored: bool) -> None:
    verdict = judged(invalid_cases()[case], baseline(STEADY) if stored else None).verdict
    assert verdict in (Verdict.INVALID, Verdict.INCONCLUSIVE, Verdict.NO_BASELINE)
    if stored:
        assert VERDICTS[verdict].blocks is Blocks.ALWAYS
    else:
        assert blocks(verdict, require_baseline=True)


def test_invalid_is_decided_before_any_number_is_read() -> None:
    bad = replace(measured({"ttft_ms_p50": 500.0, "output_tps": 10.0}), ok=60)
    verdict = judged(bad, baseline(STEADY))
    assert [row.metric for row in verdict.rows] == ["cell"]
    assert "4 of 64 requests failed" in verdict.rows[0].note


def test_what_is_invalid_stays_so_on_a_machine_that_differs() -> None:
    broken = replace(measured({"ttft_ms_p50": math.nan, "output_tps": 1000.0}), inconclusive=("clocks off",))
    verdict = judged(broken, baseline(STEADY))
    assert {row.metric: row.verdict for row in verdict.rows} == {
        "ttft_ms_p50": Verdict.INVALID,
        "output_tps": Verdict.INCONCLUSIVE,
    }
    assert verdict.verdict is Verdict.INVALID


def test_a_renamed_metric_names_its_likely_successor() -> None:
    stored = baseline({"ttft_p50_ms": [100.0] * 5, "output_tps": [1000.0] * 5})
    verdict = judged({"ttft_ms_p50": 100.0, "output_tps": 1000.0}, stored)
    assert verdict.verdict is Verdict.INVALID
    assert any("renamed to 'ttft_ms_p50'" in row.note for row in verdict.rows)
    assert any(row.metric == "ttft_ms_p50" and row.verdict is Verdict.NO_BASELINE for row in verdict.rows)


def test_too_few_samples_for_a_tail_that_the_baseline_has() -> None:
    stored = baseline({"ttft_ms_p95": [100.0] * 5})
    short = measured({"ttft_ms_p95": 100.0}, n=32, requests=32, ok=32)
    assert judged(short, stored).verdict is Verdict.INVALID
    assert judged(measured({"ttft_ms_p95": 100.0}, n=58), stored).verdict is Verdict.INVALID
    assert judged(measured({"ttft_ms_p95": 100.0}, n=59), stored).verdict is Verdict.PASS


def test_metrics_that_are_not_gated_do_not_decide() -> None:
    series = {"output_tps": [1000.0] * 5, "output_tps_wall": [900.0] * 5}
    verdict = judged({"output_tps": 1000.0, "output_tps_wall": 300.0}, baseline(series))
    assert verdict.verdict is Verdict.PASS
    assert [row.metric for row in verdict.rows] == ["output_tps"]


def test_a_stream_metric_is_judged_as_its_metric() -> None:
    stored = baseline({"steady.ttft_ms_p50": [100.0] * 5, "burst.ttft_ms_p50": [500.0] * 5})
    verdict = judged({"steady.ttft_ms_p50": 120.0, "burst.ttft_ms_p50": 500.0}, stored)
    assert {row.metric: row.verdict for row in verdict.rows} == {
        "steady.ttft_ms_p50": Verdict.SUSPECT,
        "burst.ttft_ms_p50": Verdict.PASS,
    }


def test_no_baseline_says_what_comes_nearest() -> None:
    verdict = judged(replace(measured({"output_tps": 1000.0}), absent="nearest: h200x6"), None)
    assert verdict.verdict is Verdict.NO_BASELINE and "h200x6" in verdict.rows[0].line()


@given(
    st.lists(st.floats(500, 2000), min_size=1, max_size=12),
    st.floats(200, 4000),
    st.floats(1.0, 3.0),
    st.sampled_from(["ttft_ms_p50", "output_tps", "tpot_ms_p50"]),
)
def test_a_worse_value_never_gets_a_better_verdict(
    series: list[float], value: float, factor: float, metric: str
) -> None:
    worse = value * factor if CATALOGUE[metric].direction == 1 else value / factor
    first = row_of({metric: value}, metric, {metric: series})
    second = row_of({metric: worse}, metric, {metric: series})
    if Verdict.INVALID in (first.verdict, second.verdict):
        return
    assert GOODNESS.index(second.verdict) >= GOODNESS.index(first.verdict)


def test_slow_creep_of_accepted_launches_is_said() -> None:
    series = {"output_tps": [1000 / 1.01**day for day in range(12)]}
    row = row_of({"output_tps": series["output_tps"][6]}, "output_tps", series)
    assert row.verdict is Verdict.PASS and "crept 6.7% worse" in row.note
    flat = row_of({"output_tps": 1000.0}, "output_tps", {"output_tps": [1000.0] * 12})
    assert flat.note == ""


def test_ten_launches_are_enough_to_see_a_creep_and_nine_are_not() -> None:
    crept = [1000.0] * 5 + [900.0] * 5
    assert drift_from_anchor([-math.log(value) for value in crept]) == pytest.approx(math.log(1000 / 900))
    assert drift_from_anchor([-math.log(value) for value in crept[:9]]) == 0.0


def test_a_value_at_its_limit_is_within_it() -> None:
    """Without tolerance and noise the limit is 0: the baseline's own value must not be worse than that."""
    row = VerdictRow("ttft_ms_p50", Verdict.INVALID, unit="ms", direction=1, value=100.0, n=64)
    still, exact = Pooled(0.0, 60), Tolerance(0.0, 0.0)
    assert judge_series(row, [100.0] * 5, still, 0.0, exact).verdict is Verdict.PASS
    worse = replace(row, value=100.0001)
    assert judge_series(worse, [100.0] * 5, still, 0.0, exact).verdict is Verdict.SUSPECT


@pytest.mark.parametrize(("minutes", "verdict"), [(9, Verdict.PASS), (11, Verdict.INVALID)])
def test_clocks_of_hosts_may_disagree_by_a_few_minutes(minutes: int, verdict: Verdict) -> None:
    stored = baseline(STEADY)
    assert stored.last_date == START + timedelta(days=4), "the newest launch's"
    taken = stored.last_date - timedelta(minutes=minutes)
    good = measured({"ttft_ms_p50": 100.0, "output_tps": 1000.0})
    assert judged(replace(good, taken=taken), stored).verdict is verdict


def test_siblings_leave_the_cell_itself_out() -> None:
    cells = {
        "a": baseline({"output_tps": [100.0, 200.0]}),
        "b": baseline({"output_tps": [100.0, 110.0, 121.0]}),
    }
    pooled = pooled_siblings(cells, "a", CATALOGUE)["output_tps"]
    assert pooled.freedom == 2
    assert pooled.variance == pytest.approx(math.log(1.1) ** 2, rel=1e-3)


def test_within_session_variance_ignores_what_changes_between_nights() -> None:
    stored = baseline({"output_tps": [100.0]})
    launches = (
        launch({"output_tps": 100.0}, id="a1", session="a"),
        launch({"output_tps": 110.0}, id="a2", session="a"),
        launch({"output_tps": 300.0}, id="b1", session="b"),
        launch({"output_tps": 330.0}, id="b2", session="b"),
        launch({"output_tps": 900.0}, id="c1", session="c"),
        launch({"output_tps": 50.0}, id="d1"),
    )
    stored.pin = stored.pin.model_copy(update={"launches": launches})
    share = pooled_sessions({"x": stored}, CATALOGUE)["output_tps"]
    assert share.freedom == 2
    prior = CATALOGUE["output_tps"].prior_sd ** 2
    assert share.value == pytest.approx(math.log(1.1) ** 2 / 2 / prior), (
        "alone, it is held to the shipped prior"
    )


def test_every_verdict_is_in_the_table_and_only_there() -> None:
    assert set(VERDICTS) == set(Verdict)
    assert len({meaning.rank for meaning in VERDICTS.values()}) == len(Verdict)
    for verdict, meaning in VERDICTS.items():
        assert meaning.exit_status == (0 if meaning.blocks is Blocks.NEVER else 1), verdict
    assert blocks(Verdict.NO_BASELINE, True) and not blocks(Verdict.NO_BASELINE, False)
    assert blocks(Verdict.SUSPECT, False) and not blocks(Verdict.NOISY, True)


def test_a_cell_takes_its_worst_verdict_and_an_empty_one_is_invalid() -> None:
    assert worst([Verdict.PASS, Verdict.IMPROVED]) is Verdict.IMPROVED
    assert worst([Verdict.IMPROVED, Verdict.NOISY]) is Verdict.NOISY
    assert worst([Verdict.FAIL, Verdict.INVALID, Verdict.PASS]) is Verdict.INVALID
    assert worst([]) is Verdict.INVALID


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234.567, "1,235"),
        (13.532, "13.53"),
        (0.2, "0.2000"),
        (99.996, "100.00"),
        (0.0, "0"),
        (2.5e-5, "2.500e-05"),
        (math.inf, "inf"),
    ],
)
def test_numbers_are_shown_with_four_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_lines_put_the_worst_first() -> None:
    verdict = judged({"ttft_ms_p50": 100.0, "output_tps": 900.0}, baseline(STEADY))
    assert verdict.lines()[0].startswith("SUSPECT")
    assert [row.metric for row in verdict.blocking] == ["output_tps"]
