"""Sentences appear where the data supports them, with the right numbers, and nowhere else."""

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_pdperf.measure.cell_result import MetricValue
from pytest_pdperf.measure.table import METRICS
from pytest_pdperf.report.claims import Kind, claims_of, threshold
from pytest_pdperf.report.grid import build_grid
from pytest_pdperf.report.outcomes import CellOutcome
from pytest_pdperf.report.source import Hole, Run
from tests.unit.report.report_data import outcome

CELLS = ("in512-out256-c1", "in512-out256-c4", "in512-out256-c8")


def pair(metric: str, pd: list[float | None], aggregated: list[float | None]) -> list[CellOutcome]:
    made: list[CellOutcome] = []
    for cell, a, b in zip(CELLS, pd, aggregated, strict=False):
        for topology, value in (("pd-1p2d", a), ("aggregated-3x", b)):
            found = outcome(cell, topology)
            metrics = {metric: MetricValue(value, 64)}
            made.append(replace(found, result=replace(found.result, metrics=metrics)))
    return made


def texts(outcomes: list[CellOutcome], kind: Kind, **more: object) -> list[str]:
    run = Run(name="r", folder=Path("r"), outcomes=tuple(outcomes), **more)  # type: ignore[arg-type]
    return [claim.text for claim in claims_of(build_grid([run])) if claim.kind is kind]


def test_benefit_and_trade_off_carry_count_median_and_extreme() -> None:
    outcomes = pair("ttft_ms_p50", [50.0, 150.0, 300.0], [100.0, 100.0, 100.0])
    (benefit,) = texts(outcomes, Kind.BENEFIT)
    assert benefit == (
        "TTFT p50 is lower on pd-1p2d than on aggregated-3x in 1 of 3 cells "
        "at in512-out256-c1: 100.0 -> 50.00 ms (-50%)."
    )
    (cost,) = texts(outcomes, Kind.TRADE_OFF)
    assert (
        "higher on pd-1p2d than on aggregated-3x in 2 of 3 cells, by 125% in the middle and most at" in cost
    )
    assert "in512-out256-c8: 100.0 -> 300.0 ms (+200%)." in cost


def test_more_throughput_is_a_benefit_and_called_higher() -> None:
    (benefit,) = texts(pair("output_tps", [1200.0], [1000.0]), Kind.BENEFIT)
    assert "output throughput is higher on pd-1p2d" in benefit
    (cost,) = texts(pair("output_tps", [800.0], [1000.0]), Kind.TRADE_OFF)
    assert "output throughput is lower on pd-1p2d" in cost


@pytest.mark.parametrize("metric", ["ttft_ms_p50", "tpot_ms_p50", "output_tps"])
def test_a_difference_below_the_threshold_is_no_difference(metric: str) -> None:
    edge = threshold(METRICS[metric])
    inside = pair(metric, [100.0 * (1 + 0.9 * edge)] * 3, [100.0] * 3)
    assert texts(inside, Kind.BENEFIT) == texts(inside, Kind.TRADE_OFF) == []
    (alike,) = texts(inside, Kind.ALIKE)
    assert f"no more than {edge:.0%} in all 3 cells" in alike
    outside = pair(metric, [100.0 * (1 + 1.1 * edge)] * 3, [100.0] * 3)
    assert len(texts(outside, Kind.BENEFIT)) + len(texts(outside, Kind.TRADE_OFF)) == 1


def test_the_threshold_is_never_below_what_two_launches_differ_by() -> None:
    assert threshold(METRICS["tpot_ms_p50"]) == 0.05
    assert threshold(METRICS["itl_ms_p99"]) == pytest.approx(2 * 2**0.5 * 0.04)


def test_nothing_is_said_without_both_sides() -> None:
    outcomes = pair("ttft_ms_p50", [50.0, None], [None, 100.0])
    kinds = (Kind.BENEFIT, Kind.TRADE_OFF, Kind.ALIKE)
    assert [text for kind in kinds for text in texts(outcomes, kind)] == []


def test_invalid_cells_speak_for_nothing_and_are_named() -> None:
    outcomes = pair("ttft_ms_p50", [50.0], [100.0])
    outcomes[0] = replace(outcomes[0], verdict="INVALID")
    assert texts(outcomes, Kind.BENEFIT) == []
    assert any("1 invalid cell: pd-1p2d in512-out256-c1" in text for text in texts(outcomes, Kind.LIMITATION))


def test_a_straggler_moves_no_sentence() -> None:
    outcomes = pair("output_tps_wall", [1000.0, 1000.0], [700.0, 1000.0])
    noted = {"output_tps_wall": MetricValue(700.0, 64, "one straggler stretches the wall time 1.4 x")}
    outcomes[1] = replace(outcomes[1], result=replace(outcomes[1].result, metrics=noted))
    table = Run(name="t", folder=None, outcomes=tuple(outcomes), title="source")
    claims = claims_of(build_grid([table]))
    assert [claim for claim in claims if claim.kind is Kind.BENEFIT] == []
    assert any("1 with a straggler left out" in claim.text for claim in claims if claim.kind is Kind.ALIKE)


def test_thin_tails_are_left_out_and_told() -> None:
    outcomes = pair("ttft_ms_p95", [50.0], [100.0])
    thin = [
        replace(o, result=replace(o.result, metrics={"ttft_ms_p95": MetricValue(v, 32)}))
        for o, v in zip(outcomes, (50.0, 100.0), strict=True)
    ]
    assert texts(thin, Kind.BENEFIT) == []
    assert any("fewer than 59 samples in 2 of 2 cells" in text for text in texts(thin, Kind.LIMITATION))
    assert len(texts(outcomes, Kind.BENEFIT)) == 1


def test_simulated_unproven_and_missing_are_limitations() -> None:
    cell = replace(outcome(), evidence="unknown")
    found = texts([cell], Kind.LIMITATION, simulated=True, holes=(Hole("pd-1p2d", 1, "x", "gone"),))
    assert "Simulated engines: no number of r is a measurement of any hardware." in found
    assert "Disaggregation is unknown in 1 PD cell." in found
    assert "Missing or unreadable: 1 cell; their places say why." in found


def test_two_launches_need_no_warning_about_one() -> None:
    one = texts([outcome()], Kind.LIMITATION)
    two = texts([outcome(), outcome(launch=2)], Kind.LIMITATION)
    assert any(text.startswith("One launch") for text in one)
    assert not any(text.startswith("One launch") for text in two)


def test_runs_on_other_hardware_are_called_incomparable() -> None:
    def made(name: str, gpus: list[dict[str, object]]) -> Run:
        record = {"host": "h", "kernel": "k", "cpu": "c", "cpus": 1, "memory_gib": None, "gpus": gpus}
        return Run(name=name, folder=Path(name), outcomes=(outcome(),), environments={"pd-1p2d": record})

    gpu = {"name": "NVIDIA H100", "uuid": "GPU-1", "memory_mib": 80000}
    claims = claims_of(build_grid([made("a", []), made("b", [gpu])]))
    assert any("a and b are not comparable: gpus: 0 -> 1" in claim.text for claim in claims)
