"""The benchmark of the gate must judge as the gate does, and its noise must be what its knobs say."""

from __future__ import annotations

import math
import pickle
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gate import __main__ as command
from benchmarks.gate import bars
from benchmarks.gate.noise import (
    ASSUMED_SD,
    CELLS,
    CONCURRENCY,
    METRIC_IDS,
    RUN_SD,
    SERIES,
    Change,
    Generator,
    Nights,
    Noise,
    tolerances,
)
from benchmarks.gate.plot import power_plot
from benchmarks.gate.rules import OTHERS, Stored, ours, statistic
from benchmarks.gate.study import (
    PAIRED,
    QUIET,
    SCENARIOS,
    SLOW_HOST,
    THROUGHPUT,
    Side,
    Study,
    Tally,
    alone,
    matched,
    run,
)
from pytest_pdperf.gate.baseline import CellBaseline, Launch, Pin
from pytest_pdperf.gate.catalogue import MetricSpec
from pytest_pdperf.gate.confirm import Design, Readings, decide, find_suspects
from pytest_pdperf.gate.fingerprint import CellRef
from pytest_pdperf.gate.judge import Measurement, Sample, judge_cell, pooled_sessions, pooled_siblings
from pytest_pdperf.gate.mask import unmask
from pytest_pdperf.measure.table import METRICS
from tests.unit.gate.gate_tables import START, Tolerance


def tolerance_of(metric: str, spec: MetricSpec) -> Tolerance:
    return Tolerance(spec.tau or 0.0, 0.0)


def values(scores: np.ndarray, cell: int) -> dict[str, float]:
    """Plain values of one cell of one launch; 300 keeps far from any floor."""
    return {
        name: 300 * math.exp(METRICS[name].direction * float(scores[cell * len(METRIC_IDS) + index]))
        for index, name in enumerate(METRIC_IDS)
    }


def stored(nights: Nights, night: int) -> dict[str, CellBaseline]:
    """Baselines as the store would hand them out, without its rounding."""
    found = {}
    for cell in range(CELLS):
        launches = tuple(
            Launch.model_construct(
                id=f"l{i}",
                date=START,
                values=values(scores, cell),
                n=dict.fromkeys(METRIC_IDS, 400),
                session="first" if i < 2 else f"s{i}",
            )
            for i, scores in enumerate(nights.baseline[night])
        )
        pin = Pin.model_construct(key="k", workload_digest="w", reason="r", launches=launches)
        found[f"w/c{cell}"] = CellBaseline(CellRef("w", f"s{cell // 4}-c{CONCURRENCY[cell % 4]}", "w"), pin)
    return found


def by_the_gate(nights: Nights, night: int, design: Design) -> tuple[set[int], set[int]]:
    """Suspect and failed series, through the functions that a real session calls."""
    baselines = stored(nights, night)
    session = nights.sessions[0]
    siblings = {cell: pooled_siblings(baselines, cell, METRICS) for cell in baselines}
    verdicts = {}
    for number, (cell, baseline) in enumerate(baselines.items()):
        samples = {name: Sample(v, 400) for name, v in values(session.candidate[night, 0], number).items()}
        measured = Measurement(samples, 64, 64)
        verdicts[cell] = judge_cell(measured, baseline, siblings[cell], tolerance_of, METRICS)
    if design is Design.PAIRED:
        verdicts = unmask(verdicts)
    suspects = [
        suspect
        for cell, verdict in verdicts.items()
        for suspect in find_suspects(cell, verdict, baselines[cell], siblings[cell], tolerance_of, METRICS)
    ]
    place = {(f"w/c{i // len(METRIC_IDS)}", METRIC_IDS[i % len(METRIC_IDS)]): i for i in range(SERIES)}
    readings = {}
    for suspect in suspects:
        number = int(suspect.cell.removeprefix("w/c"))
        fresh = [values(session.candidate[night, i], number)[suspect.metric] for i in (1, 2)]
        old = [values(session.reference[night, i], number)[suspect.metric] for i in (0, 1)]
        readings[suspect.cell, suspect.metric] = Readings(tuple(fresh), tuple(old))
    within = pooled_sessions(baselines, METRICS)
    confirmed = decide(design, suspects, readings, within)
    failed = {place[c.suspect.cell, c.suspect.metric] for c in confirmed if c.failed}
    return {place[s.cell, s.metric] for s in suspects}, failed


@pytest.mark.parametrize("paired", [True, False])
def test_whole_arrays_are_judged_as_the_gate_judges_night_by_night(paired: bool) -> None:
    change = Change("output_tps", 0.08, 5)
    nights = Generator(11, Noise(night=0.025)).draw(12, change)
    judged = ours(Stored.of(nights.baseline), nights.sessions[0], paired=paired)
    design = Design.PAIRED if paired else Design.UNPAIRED
    suspects = failures = 0
    for night in range(12):
        suspect, failed = by_the_gate(nights, night, design)
        assert suspect == set(np.flatnonzero(judged.suspect[night])), night
        assert failed == set(np.flatnonzero(judged.failed[night])), night
        suspects, failures = suspects + len(suspect), failures + len(failed)
    assert suspects > failures > 0


def test_noise_is_what_the_knobs_say() -> None:
    quiet = Noise(night=0.0, launch=0.0, launch_cell=0.0, stragglers=0.0)
    drawn = Generator(1, quiet).draw(400).sessions[0].candidate[:, 0]
    tpot = drawn[:, METRIC_IDS.index("tpot_ms_p50") :: len(METRIC_IDS)]
    expected = math.sqrt(np.mean(np.square(RUN_SD["tpot_ms_p50"])))
    assert tpot.std() == pytest.approx(expected, rel=0.1)
    by_level = tpot.reshape(400, -1, len(CONCURRENCY)).std(axis=(0, 1))
    assert by_level == pytest.approx(RUN_SD["tpot_ms_p50"], rel=0.1), "each concurrency has its own"
    assumed = Generator(1, replace(quiet, observed=0.0)).draw(400).sessions[0].candidate[:, 0]
    ttft = assumed[:, METRIC_IDS.index("ttft_ms_p50") :: len(METRIC_IDS)]
    assert ttft.std() == pytest.approx(ASSUMED_SD["ttft_ms_p50"], rel=0.1)
    night = Generator(1, Noise(0.02, 0.0, 0.0, 0.0, 0.0)).draw(2000)
    candidate, reference = night.sessions[0].candidate, night.sessions[0].reference
    assert candidate.std() == pytest.approx(0.02, rel=0.1)
    assert np.ptp(candidate, axis=(1, 2)).max() == pytest.approx(0.0, abs=1e-12)
    assert np.allclose(candidate[:, 0, 0], reference[:, 0, 0]), "one night hits both builds"
    assert np.allclose(night.baseline[:, 0], night.baseline[:, 1]), "the first two launches share a night"
    assert not np.allclose(night.baseline[:, 1], night.baseline[:, 2])


def test_a_change_hits_its_cells_and_the_candidate_only() -> None:
    change = Change("ttft_ms_p50", 0.14, 4)
    drawn = Generator(1, Noise(0.0, 0.0, 0.0, 0.0, 0.0)).draw(3, change)
    assert change.affected.sum() == 4
    assert np.allclose(drawn.sessions[0].candidate[:, :, change.affected], 0.14)
    assert np.allclose(drawn.sessions[0].candidate[:, :, ~change.affected], 0.0)
    assert np.allclose(drawn.sessions[0].reference, 0.0) and np.allclose(drawn.baseline, 0.0)


def test_tolerances_are_the_tables() -> None:
    assert tolerances()[METRIC_IDS.index("output_tps")] == pytest.approx(math.log(1.05))
    assert tolerances().shape == (SERIES,) == (96,)


def test_other_rules_by_hand() -> None:
    nights = Generator(1, Noise(0.0, 0.0, 0.0, 0.0, 0.0)).draw(1, Change("output_tps", 0.2, 16))
    series = METRIC_IDS.index("output_tps")
    expected = {
        "fixed 5": 0.2 / math.log(1.05),
        "fixed 10": 0.2 / math.log(1.1),
        "rolling": 0.2 / math.log(1.05),
    }
    still = Stored.of(nights.baseline)
    for rule in OTHERS:
        for head, value in expected.items():
            if rule.name.startswith(head + " "):
                assert statistic(rule, still, nights.sessions[0])[0, series] == pytest.approx(value)
    baseline = nights.baseline.copy()
    baseline[0] = np.array([0.0, 0.02] * 5 + [0.0])[:, None]
    (z,) = [rule for rule in OTHERS if rule.name.startswith("z-score")]
    mean, sd = baseline[0, :, series].mean(), baseline[0, :, series].std(ddof=1)
    assert statistic(z, Stored.of(baseline), nights.sessions[0])[0, series] == pytest.approx(
        (0.2 - mean) / sd / 3
    )


def test_a_small_study_has_the_signs_right() -> None:
    study = run(Noise(), 60, (QUIET, THROUGHPUT), seed=3)
    ours_quiet, ours_loss = study.tally(PAIRED, QUIET.name), study.tally(PAIRED, THROUGHPUT.name)
    assert ours_quiet.nights == 60 and ours_quiet.red_rate < 0.1 and ours_loss.power > 0.9
    assert 1 < ours_quiet.launches_a_night < 5
    for rule in OTHERS:
        loud, wide = study.tally(rule.name, QUIET.name), study.tally(matched(rule), QUIET.name)
        assert wide.red <= loud.red and study.factors[rule.name] >= 1


def test_the_plot_is_valid_and_shows_every_curve() -> None:
    curves: Mapping[str, list[float]] = {"ours <&>": [0.0, 1.0], "theirs, at 1% false alarms": [0.0, 0.2]}
    root = ET.fromstring(power_plot("title", [0.0, 0.1], curves))
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2
    assert any("ours <&>" in (node.text or "") for node in root.iter())


def test_the_command_writes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "VARIANTS", {"no night drift": {"night": 0.0}})
    monkeypatch.setattr(command, "YOUNG", (3,))
    monkeypatch.setattr(command, "LOSSES", (0.0, 0.1))
    out, page = tmp_path / "out", tmp_path / "docs" / "gate.md"
    arguments = ["--nights", "40", "--fewest", "20", "--jobs", "1", "--out", str(out), "--page", str(page)]
    monkeypatch.setattr("sys.argv", ["gate", *arguments])
    assert command.main() == 0
    assert {path.name for path in out.iterdir()} == {"gate.json", "power.svg", "tables.txt"}
    printed = capsys.readouterr().out
    assert printed.count("found at least") == printed.count("found and named at least") == 4
    assert "96 series" in printed and "baseline of 3 launches" in printed
    assert (out / "tables.txt").read_text().strip() in printed
    text = page.read_text()
    assert "(gate-power.svg)" in text and ET.parse(page.with_name("gate-power.svg"))
    assert f"| {PAIRED} |" in text and "cores, load" in text and "| MET |" in text


def test_targets_that_are_missed_are_called_missed() -> None:
    study = run(Noise(run=8.0), 30, SCENARIOS, seed=3)
    assert any(not bar.met and bar.line().startswith("NOT MET") for bar in bars.rates(study))


def flags(*red: int) -> np.ndarray:
    found = np.zeros((1, SERIES), dtype=bool)
    found[0, list(red)] = True
    return found


def test_a_red_night_that_accuses_what_did_not_change_has_named_nothing() -> None:
    change = Change("output_tps", 0.08, 1)
    changed = int(np.flatnonzero(change.affected)[0])
    tally = Tally()
    tally.add([flags(changed)], change, 1.0)  # found and named
    tally.add([flags(changed, changed + 1)], change, 1.0)  # found, and an innocent with it
    tally.add([flags(changed + 1)], change, 1.0)  # a false alarm alone
    tally.add([flags()], change, 1.0)
    tally.add([flags(), flags(changed)], change, 1.0)  # in the second of two nights
    tally.add([flags(changed + 1), flags(changed)], change, 1.0)  # after a false alarm in the first
    assert (tally.nights, tally.red, tally.found, tally.named) == (6, 5, 4, 2)
    assert tally.named_rate == pytest.approx(2 / 6) and tally.power == pytest.approx(4 / 6)


def counted(study: Study, rule: str, quiet: int, slow: int, found: int, sent: int) -> None:
    for scenario in SCENARIOS:
        red = {QUIET.name: quiet, SLOW_HOST.name: slow}.get(scenario.name, found)
        tally = Tally(nights=100, red=red, found=found, named=sent)
        study.tallies[rule, scenario.name] = tally


def test_better_means_better_in_everything_at_once() -> None:
    study = run(Noise(), 2, (QUIET,), seed=3)
    counted(study, PAIRED, 1, 1, 90, 90)
    for name in bars.others(study):
        counted(study, name, 5, 5, 80, 70)
    everywhere, against = bars.best(study, "found", bars.power)
    assert everywhere.met and against == []
    loud, slow, tied = (rule.name for rule in OTHERS[:3])
    counted(study, loud, 100, 100, 100, 0)
    counted(study, slow, 5, 1, 80, 70)
    counted(study, tied, 5, 5, 80, 90)
    by_power, against = bars.best(study, "found", bars.power)
    assert not by_power.met and sum(line.startswith(f"{loud}: ") for line in against) == 4
    assert by_power.seen == f"{2 * len(OTHERS) - 2} of {2 * len(OTHERS)}"
    by_name, against = bars.best(study, "found and named", bars.named)
    assert not by_name.met and not any(line.startswith(f"{loud}: ") for line in against)
    assert f"{slow}: {SLOW_HOST.name}: red 1.00% against 1.00%" in against, "a draw is not better"
    assert sum(line.startswith(f"{tied}: ") for line in against) == 4


def test_times_are_held_against_their_bounds() -> None:
    slow, fast = bars.times(10, 301.0, 50.0, [0.9, 0.1]), bars.times(10, 299.0, 50.0, [1.1, 0.1])
    assert [bar.met for bar in slow] == [False, True] and [bar.met for bar in fast] == [True, False]


def test_it_does_not_matter_who_draws_the_nights() -> None:
    """A pool's `map` may be used instead of the built-in one: what it is given can be pickled, and back."""

    def elsewhere(function: Callable[[object], object], tasks: Iterable[object]) -> list[object]:
        return [pickle.loads(pickle.dumps(function(pickle.loads(pickle.dumps(task))))) for task in tasks]

    here, there = run(Noise(), 20, (QUIET,), seed=3), run(Noise(), 20, (QUIET,), seed=3, each=elsewhere)
    assert here.tallies == there.tallies and here.tallies


def test_a_side_study_has_the_baseline_it_is_asked_for() -> None:
    young = alone(Side(Noise(), 40, seed=3, launches=2))
    assert {name for name, _ in young.tallies} == {PAIRED}
    assert young.tally(PAIRED, QUIET.name).nights == 40
    grown = alone(Side(Noise(), 40, seed=3))
    assert young.tally(PAIRED, QUIET.name).launches > grown.tally(PAIRED, QUIET.name).launches, (
        "two launches of one night know nothing of the next, so more is suspected"
    )
