"""Stage 2: fresh launches decide, once, and a suspect that could not be looked at stays one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.gate.confirm import (
    ALPHA,
    Confirmation,
    Design,
    Readings,
    Suspect,
    apply_confirmations,
    decide,
    find_suspects,
    plan,
)
from pytest_pdperf.gate.statistics import CONFIDENCE, Share, t_quantile, t_tail
from pytest_pdperf.gate.verdict import CellVerdict, Verdict, VerdictRow
from tests.unit.gate.gate_tables import CATALOGUE, baseline, judged, tolerance_of

CELL = "fixed-shapes/in512-out256-c16"
SUSPECT = Suspect(
    cell=CELL,
    metric="output_tps",
    direction=-1,
    tolerance=math.log(1.05),
    center=-math.log(1000.0),
    launches=10,
    variance=0.02**2,
    prior=0.02**2,
)
QUIET = {"output_tps": Share(0.16, 30)}
"""Two fifths of the spread between nights is left within a session: a standard deviation of 0.008."""


def one(
    readings: Readings, design: Design = Design.PAIRED, within: dict[str, Share] | None = None
) -> Confirmation:
    (found,) = decide(design, [SUSPECT], {(CELL, "output_tps"): readings}, within)
    return found


def test_a_real_loss_is_confirmed() -> None:
    found = one(Readings((918.0, 922.0), (1001.0, 999.0)), within=QUIET)
    assert found.failed and found.complete
    assert found.effect == pytest.approx(math.log(1000 / 920), rel=1e-3)
    assert "confirmed by A B B A: 8.0% worse than the reference build" in found.text()


def test_a_slow_machine_clears_the_candidate() -> None:
    found = one(Readings((900.0, 905.0), (902.0, 899.0)), within=QUIET)
    assert not found.failed and not found.noisy
    assert "cleared by A B B A" in found.text()


def test_a_drift_within_the_session_cancels() -> None:
    # every launch 4 % slower than the one before: A B B A = 1, .96, .96^2, .96^3
    a1, b1, b2, a2 = (1000 * 0.96**i for i in range(4))
    found = one(Readings((b1, b2), (a1, a2)), within=QUIET)
    assert found.effect == pytest.approx(0.0, abs=1e-9) and not found.failed


def test_the_effect_must_exceed_the_tolerance_however_sure_it_is() -> None:
    found = one(Readings((960.0, 960.0), (1000.0, 1000.0)), within={"output_tps": Share(0.0025, 80)})
    assert found.adjusted < 1e-6 and not found.failed


def test_the_direction_is_respected() -> None:
    faster = one(Readings((1090.0, 1090.0), (1000.0, 1000.0)), within=QUIET)
    assert not faster.failed and faster.p > 0.99
    assert "better than the reference" in faster.text()
    latency = replace(SUSPECT, metric="ttft_ms_p50", direction=1)
    reading = {(CELL, "ttft_ms_p50"): Readings((1090.0, 1090.0), (1000.0, 1000.0))}
    (slower,) = decide(Design.PAIRED, [latency], reading, {"ttft_ms_p50": QUIET["output_tps"]})
    assert slower.failed


def test_paired_numbers_by_hand() -> None:
    found = one(Readings((900.0, 920.0), (1000.0, 990.0)), within=QUIET)
    rb, ra = math.log(920 / 900) ** 2 / 2, math.log(1000 / 990) ** 2 / 2
    variance = (8 * 0.008**2 + 2 * ((rb + ra) / 2)) / 10
    effect = math.log(1000 * 990) / 2 - math.log(900 * 920) / 2
    assert found.standard_error == pytest.approx(math.sqrt(variance))
    assert found.freedom == 10
    assert found.p == pytest.approx(t_tail(effect / math.sqrt(variance), 10))


def test_without_a_measured_spread_the_baselines_larger_one_is_used() -> None:
    readings = Readings((920.0, 920.0), (1000.0, 1000.0))
    assert one(readings).p > 10 * one(readings, within=QUIET).p
    few = {"output_tps": Share(1e-6, 7)}
    assert one(readings, within=few).standard_error == one(readings).standard_error


def test_nothing_known_means_that_nothing_cancels() -> None:
    assert Share.of([]) == Share(1.0, 0)
    pooled = Share.of([(0.5, 2), (0.1, 6)])
    assert pooled.value == pytest.approx(0.2) and pooled.freedom == 8


def test_other_suspects_of_the_metric_lend_their_spread() -> None:
    suspects = [replace(SUSPECT, cell=f"w/c{i}") for i in range(6)]
    readings = {(s.cell, s.metric): Readings((920.0, 921.0), (1000.0, 1001.0)) for s in suspects}
    many = decide(Design.PAIRED, suspects, readings)
    (alone,) = decide(Design.PAIRED, suspects[:1], readings)
    assert many[0].standard_error < alone.standard_error / 3
    assert all(found.failed for found in many)


def test_another_metric_lends_nothing() -> None:
    tails = [replace(SUSPECT, cell=f"w/c{i}", metric="itl_ms_p99", direction=1) for i in range(6)]
    readings = {(s.cell, s.metric): Readings((19.0, 40.0), (19.0, 40.0)) for s in tails}
    readings[CELL, "output_tps"] = Readings((920.0, 920.0), (1000.0, 1000.0))
    beside = decide(Design.PAIRED, [SUSPECT, *tails], readings, QUIET)[0]
    assert beside.standard_error == one(readings[CELL, "output_tps"], within=QUIET).standard_error


def test_spreads_are_lent_in_proportion_to_how_noisy_each_series_is() -> None:
    """A loud cell whose launches agree to half its usual spread says the same of a quiet one."""
    quiet, loud = replace(SUSPECT, prior=0.01**2), replace(SUSPECT, cell="w/loud", prior=0.1**2)
    step = 0.05 * math.sqrt(2)  # two launches this far apart have a variance of (step^2)/2 = 0.05^2
    readings = {
        (CELL, "output_tps"): Readings((920.0, 920.0), (1000.0, 1000.0)),
        ("w/loud", "output_tps"): Readings(
            (900.0, 900.0 * math.exp(step)), (1000.0, 1000.0 * math.exp(step))
        ),
    }
    found, _ = decide(Design.PAIRED, [quiet, loud], readings, {"output_tps": Share(0.25, 30)})
    assert found.standard_error == pytest.approx(math.sqrt(0.8 * 0.25 * 0.01**2))


@pytest.mark.parametrize(
    ("stored", "tonight", "expected"),
    [
        (3.0, 1.0, 1.0),  # a part cannot be larger than the whole
        (0.5, 0.5, 0.5),
        (
            1.0,
            4.0,
            (16 + 4 * 8) / (16 + 8),
        ),  # four noisy suspects tonight: what was stored does not hide them
    ],
)
def test_the_stored_share_is_at_most_one_and_tonights_may_be_more(
    stored: float, tonight: float, expected: float
) -> None:
    step = SUSPECT.prior**0.5 * math.sqrt(2 * tonight)
    pair = (1000.0, 1000.0 * math.exp(step))
    loud = [replace(SUSPECT, cell=f"w/c{i}") for i in range(4)]
    readings = {(s.cell, s.metric): Readings(pair, pair) for s in loud}
    readings[CELL, "output_tps"] = Readings((920.0, 920.0), (1000.0, 1000.0))
    found = decide(Design.PAIRED, [SUSPECT, *loud], readings, {"output_tps": Share(stored, 16)})[0]
    assert found.standard_error**2 == pytest.approx(0.8 * expected * SUSPECT.prior)


def test_one_straggler_among_the_launches_proves_nothing() -> None:
    latency = replace(SUSPECT, metric="itl_ms_p99", direction=1, tolerance=math.log(1.1), prior=0.03**2)
    reading = {(CELL, "itl_ms_p99"): Readings((19.0, 28.0), (19.1, 18.9))}
    (found,) = decide(Design.PAIRED, [latency], reading, {"itl_ms_p99": Share(4 / 9, 80)})
    assert found.effect > found.suspect.tolerance and not found.failed


def test_unpaired_by_hand() -> None:
    found = one(Readings((880.0, 890.0)), Design.UNPAIRED)
    effect = math.log(1000) - math.log(880 * 890) / 2
    error = 0.02 * math.sqrt(1 + 1.57 / 10)
    assert found.effect == pytest.approx(effect)
    assert found.standard_error == pytest.approx(error), "launches of one night count once"
    assert found.p == pytest.approx(t_tail(effect / error, 17))
    assert found.failed and "2 more launches, unpaired" in found.text()


@pytest.mark.parametrize(
    ("design", "readings"),
    [
        (Design.PAIRED, Readings((900.0, 900.0), (1000.0,))),
        (Design.PAIRED, Readings((900.0,), (1000.0,))),
        (Design.PAIRED, Readings((900.0, math.nan), (1000.0, 1000.0))),
        (Design.PAIRED, Readings((900.0, 0.0), (1000.0, 1000.0))),
        (Design.UNPAIRED, Readings((900.0,))),
        (Design.UNPAIRED, Readings(())),
        (Design.UNPAIRED, Readings((900.0, math.inf))),
    ],
)
def test_a_missing_launch_clears_nobody(design: Design, readings: Readings) -> None:
    found = one(readings, design)
    assert not found.complete and not found.failed and found.noisy
    stored = baseline({"output_tps": [1000.0] * 5})
    verdict = judged({"output_tps": 900.0}, stored)
    after = apply_confirmations(CELL, verdict, [found])
    assert after.verdict is Verdict.SUSPECT and "not confirmed" in after.rows[0].note


def test_nothing_read_leaves_the_suspect_and_still_counts_in_the_family() -> None:
    other = replace(SUSPECT, cell="w/other")
    readings = {(CELL, "output_tps"): Readings((920.0, 920.0), (1000.0, 1000.0))}
    found, missing = decide(Design.PAIRED, [SUSPECT, other], readings, QUIET)
    assert not missing.complete
    assert found.adjusted == pytest.approx(2 * found.p)


def test_a_suspect_among_many_has_to_be_surer_than_alone() -> None:
    readings = {(CELL, "output_tps"): Readings((935.0, 935.0), (1000.0, 1000.0))}
    (alone,) = decide(Design.PAIRED, [SUSPECT], readings, {"output_tps": Share(1.0, 40)})
    suspects = [SUSPECT, *(replace(SUSPECT, cell=f"w/c{i}") for i in range(5))]
    among = decide(Design.PAIRED, suspects, readings, {"output_tps": Share(1.0, 40)})[0]
    assert alone.p == among.p < ALPHA < among.adjusted == pytest.approx(6 * alone.p)
    assert alone.failed and not among.failed


@pytest.mark.parametrize(("times", "noisy"), [(1.9, False), (2.1, True)])
def test_cleared_is_noisy_from_twice_the_tolerance(times: float, noisy: bool) -> None:
    error = times * SUSPECT.tolerance / t_quantile(CONFIDENCE, 10)
    cleared = Confirmation(SUSPECT, Design.PAIRED, True, 0.0, error, 10, 0.5, 0.5)
    assert cleared.noisy is noisy


def test_no_spread_at_all_means_that_every_difference_is_real() -> None:
    exact = replace(SUSPECT, prior=0.0, variance=0.0)
    key = (CELL, "output_tps")
    (worse,) = decide(Design.PAIRED, [exact], {key: Readings((900.0, 900.0), (1000.0, 1000.0))})
    (same,) = decide(Design.PAIRED, [exact], {key: Readings((1000.0, 1000.0), (1000.0, 1000.0))})
    assert worse.failed and not same.failed and same.p == 1.0


def test_plan_measures_suspect_cells_only() -> None:
    assert plan([], has_reference=True) is None
    suspects = [SUSPECT, replace(SUSPECT, metric="e2e_ms_p50"), replace(SUSPECT, cell="w/other")]
    paired = plan(suspects, has_reference=True)
    assert paired is not None
    assert (paired.design, paired.order, paired.cells) == (
        Design.PAIRED,
        ("A", "B", "B", "A"),
        (CELL, "w/other"),
    )
    alone = plan(suspects, has_reference=False)
    assert alone is not None and alone.order == ("B", "B") and "unpaired" in alone.why


def test_from_suspicion_to_verdict() -> None:
    series = {"output_tps": [1000.0, 1002.0, 998.0, 1001.0, 999.0], "ttft_ms_p50": [100.0] * 5}
    stored = baseline(series)
    verdict = judged({"output_tps": 900.0, "ttft_ms_p50": 115.0}, stored)
    suspects = find_suspects(CELL, verdict, stored, {}, tolerance_of, CATALOGUE)
    assert {s.metric for s in suspects} == {"output_tps", "ttft_ms_p50"}
    readings = {
        (CELL, "output_tps"): Readings((899.0, 901.0), (1000.0, 1001.0)),
        (CELL, "ttft_ms_p50"): Readings((114.0, 115.0), (114.5, 115.5)),
    }
    after = apply_confirmations(CELL, verdict, decide(Design.PAIRED, suspects, readings, QUIET))
    by_metric = {row.metric: row for row in after.rows}
    assert by_metric["output_tps"].verdict is Verdict.FAIL and by_metric["output_tps"].stage == 2
    assert by_metric["ttft_ms_p50"].verdict is Verdict.PASS and "cleared" in by_metric["ttft_ms_p50"].note
    assert after.verdict is Verdict.FAIL and "stage 2, p=" in by_metric["output_tps"].line()


def test_only_suspects_take_their_verdict_from_fresh_launches() -> None:
    cleared = one(Readings((1000.0, 1001.0), (1000.0, 1000.0)), within=QUIET)
    red = CellVerdict((VerdictRow("output_tps", Verdict.INCONCLUSIVE),), Verdict.INCONCLUSIVE)
    assert apply_confirmations(CELL, red, [cleared]) == red


def test_a_confirmation_settles_its_own_cell_only() -> None:
    elsewhere = one(Readings((1000.0, 1001.0), (1000.0, 1000.0)), within=QUIET)
    verdict = judged({"output_tps": 900.0}, baseline({"output_tps": [1000.0] * 5}))
    assert apply_confirmations("w/another", verdict, [elsewhere]) == verdict


def test_the_absolute_floor_is_part_of_what_a_suspect_may_lose() -> None:
    stored = baseline({"ttft_ms_p50": [2.0] * 9})
    verdict = judged({"ttft_ms_p50": 4.0}, stored)
    (suspect,) = find_suspects(CELL, verdict, stored, {}, tolerance_of, CATALOGUE)
    assert suspect.tolerance == pytest.approx(math.log(1.5)), "1 ms at 2 ms"


def test_launches_too_noisy_to_tell_end_in_noisy() -> None:
    wild = replace(SUSPECT, prior=0.15**2)
    reading = {(CELL, "output_tps"): Readings((940.0, 950.0), (1000.0, 1010.0))}
    (found,) = decide(Design.PAIRED, [wild], reading, {"output_tps": Share(1.0, 40)})
    assert found.noisy
    verdict = judged({"output_tps": 900.0}, baseline({"output_tps": [1000.0] * 5}))
    assert apply_confirmations(CELL, verdict, [found]).verdict is Verdict.NOISY


@given(st.floats(800, 1200), st.floats(1.0, 1.5), st.floats(-0.02, 0.02))
def test_a_larger_loss_is_never_cleared_where_a_smaller_one_fails(
    tps: float, factor: float, spread: float
) -> None:
    def outcome(value: float) -> Confirmation:
        return one(Readings((value, value * (1 + spread)), (1000.0, 1000.0)), within=QUIET)

    small, large = outcome(tps), outcome(tps / factor)
    assert large.effect >= small.effect - 1e-12
    assert large.failed or not small.failed
    assert small.adjusted <= ALPHA or not small.failed
