"""Noise depends on concurrency: a cell borrows its variance from cells of its own, where there are enough."""

from __future__ import annotations

import math

import pytest

from pytest_pdperf.gate.baseline import CellBaseline
from pytest_pdperf.gate.confirm import Design, Readings, Suspect, decide
from pytest_pdperf.gate.fingerprint import CellRef
from pytest_pdperf.gate.judge import pooled_siblings
from pytest_pdperf.gate.statistics import Pooled
from tests.unit.gate.gate_tables import CATALOGUE, baseline

METRIC = "ttft_ms_p50"


def cells(launches: int) -> dict[str, CellBaseline]:
    """Four shapes at two concurrencies: 1 % apart from launch to launch at c1, 10 % at c8."""
    found = {}
    for shape in range(4):
        for level, step in (("c1", 0.01), ("c8", 0.10)):
            values = [100 * math.exp(step * (-1) ** i) for i in range(launches)]
            found[f"s{shape}-{level}"] = baseline({METRIC: values}, CellRef("w", f"s{shape}-{level}", "d"))
    return found


def test_cells_of_one_concurrency_are_pooled_alone_once_they_are_enough() -> None:
    pooled = {cell: pooled_siblings(cells(4), cell, CATALOGUE)[METRIC] for cell in ("s0-c1", "s0-c8")}
    # variance of +-step over 4 launches: 4 step^2 / 3; three siblings with 3 degrees of freedom each
    assert pooled["s0-c1"].variance == pytest.approx(4 * 0.01**2 / 3, rel=1e-2)
    assert pooled["s0-c8"].variance == pytest.approx(4 * 0.10**2 / 3, rel=1e-2)
    assert pooled["s0-c1"].freedom == pooled["s0-c8"].freedom == 9
    # beside all seven siblings: three quiet and four loud ones, or the other way round
    assert pooled["s0-c1"].scale == pytest.approx(0.01**2 / ((3 * 0.01**2 + 4 * 0.10**2) / 7), rel=1e-2)
    assert pooled["s0-c8"].scale == pytest.approx(0.10**2 / ((4 * 0.01**2 + 3 * 0.10**2) / 7), rel=1e-2)


@pytest.mark.parametrize("cell", ["s0-c1", "a cell without a baseline"])
def test_until_then_all_cells_are(cell: str) -> None:
    stored = cells(3)  # three siblings alike have 6 degrees of freedom
    pooled = pooled_siblings(stored, cell, CATALOGUE)[METRIC]
    assert pooled.freedom == 2 * (len(stored) - (cell in stored)) and pooled.scale == 1.0


def test_without_any_spread_nothing_is_scaled() -> None:
    still = {
        name: baseline({METRIC: [100.0] * 5}, CellRef("w", name, "d"))
        for name in ("a-c1", "b-c1", "d-c1", "e-c1")
    }
    pooled = pooled_siblings(still, "a-c1", CATALOGUE)[METRIC]
    assert (pooled.variance, pooled.scale) == (0.0, 1.0)


def test_the_variance_within_sessions_is_scaled_to_the_suspects_concurrency() -> None:
    def error(scale: float) -> float:
        suspect = Suspect("c", METRIC, 1, 0.095, math.log(100), 11, 0.01, 0.01, scale)
        readings = {("c", METRIC): Readings((115.0, 115.0), (100.0, 100.0))}
        (found,) = decide(Design.PAIRED, [suspect], readings, {METRIC: Pooled(0.008, 16)})
        return found.standard_error

    assert error(1.0) == pytest.approx(math.sqrt(0.8 * 0.008))
    assert error(0.25) == pytest.approx(error(1.0) / 2)
