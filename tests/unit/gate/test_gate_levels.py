"""Noise depends on concurrency: a cell borrows its variance from cells of its own, where there are enough."""

from __future__ import annotations

import math

import pytest

from pytest_pdperf.gate.baseline import CellBaseline
from pytest_pdperf.gate.fingerprint import CellRef
from pytest_pdperf.gate.judge import pooled_sessions, pooled_siblings
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


@pytest.mark.parametrize("cell", ["s0-c1", "a cell without a baseline"])
def test_until_then_all_cells_are(cell: str) -> None:
    stored = cells(3)  # three siblings alike have 6 degrees of freedom
    pooled = pooled_siblings(stored, cell, CATALOGUE)[METRIC]
    assert pooled.freedom == 2 * (len(stored) - (cell in stored))


def sessions_of_two(pairs: int, steps: dict[str, tuple[float, float]]) -> dict[str, CellBaseline]:
    """Four shapes at each concurrency; `steps`: (between the launches of a session, between sessions)."""
    found = {}
    for shape in range(4):
        for level, (inner, outer) in steps.items():
            name = f"s{shape}-{level}"
            values = [
                100 * math.exp(inner * (-1) ** i + outer * (-1) ** pair)
                for pair in range(pairs)
                for i in (0, 1)
            ]
            stored = baseline({METRIC: values}, CellRef("w", name, "d"))
            launches = tuple(
                one.model_copy(update={"session": f"night{index // 2}"})
                for index, one in enumerate(stored.launches)
            )
            stored.pin = stored.pin.model_copy(update={"launches": launches})
            found[name] = stored
    return found


def test_what_is_left_within_a_session_is_a_share_of_each_cells_own_variance() -> None:
    # variance within a session 2 inner^2 (1 of 2), of all 6 launches about 6/5 (inner^2 + outer^2 (1 - 1/9))
    stored = sessions_of_two(3, {"c1": (0.01, 0.03), "c8": (0.10, 0.30)})
    share = pooled_sessions(stored, CATALOGUE)[METRIC]
    assert share.freedom == 3 * 8
    assert share.value == pytest.approx(2 / (6 / 5 * (1 + 9 * 8 / 9)), rel=0.02)


def test_a_quiet_concurrency_counts_as_much_as_a_loud_one() -> None:
    stored = sessions_of_two(3, {"c1": (0.01, 0.0), "c8": (0.0, 0.30)})
    share = pooled_sessions(stored, CATALOGUE)[METRIC]
    assert share.value == pytest.approx((2 / (6 / 5) + 0) / 2, rel=0.02)


def test_cells_without_any_spread_have_no_share() -> None:
    stored = sessions_of_two(5, {"c1": (0.0, 0.0)})
    assert pooled_sessions(stored, CATALOGUE) == {}


def test_sessions_of_one_launch_say_nothing() -> None:
    assert pooled_sessions(cells(4), CATALOGUE) == {}
