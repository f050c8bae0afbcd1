"""Curves keep what a picture needs of a GPU's looks, throttled moments above all."""

from __future__ import annotations

import json

from pytest_pdperf.evidence.gpu_curve import curves_of
from pytest_pdperf.evidence.gpu_trace import Look

HOT = ("software thermal slowdown",)


def look(t: float, uuid: str = "GPU-a", reasons: tuple[str, ...] | None = (), idle: bool = False) -> Look:
    return Look(1_700_000_000.0 + t, uuid, 1980, 400.123, 61, reasons, idle)


def test_each_gpu_has_a_curve_from_the_first_look_of_all() -> None:
    rows = [look(0), look(0.5, "GPU-b"), look(1, reasons=HOT), look(1.5, "GPU-b", None), look(2, idle=True)]
    first, second = json.loads(json.dumps(curves_of(rows)))
    assert first == {
        "uuid": "GPU-a",
        "t_s": [0.0, 1.0, 2.0],
        "sm_mhz": [1980, 1980, 1980],
        "power_w": [400.1, 400.1, 400.1],
        "temperature_c": [61, 61, 61],
        "throttled": [[], list(HOT), None],
    }
    assert (second["uuid"], second["t_s"], second["throttled"]) == ("GPU-b", [0.5, 1.5], [[], None])
    assert curves_of([]) == []


def test_a_hole_stays_one() -> None:
    (curve,) = curves_of([Look(5.0, "GPU-a")])
    assert (curve["t_s"], curve["sm_mhz"], curve["power_w"], curve["throttled"]) == (
        [0.0],
        [None],
        [None],
        [None],
    )


def test_a_long_cell_is_thinned_and_no_throttled_look_is_lost() -> None:
    hot = {17, 333, 334, 998}
    rows = [look(t, reasons=HOT if t in hot else ()) for t in range(1000)]
    (curve,) = curves_of(rows, most=100)
    assert len(curve["t_s"]) == 100 and curve["t_s"][0] == 0.0
    marked = [t for t, reasons in zip(curve["t_s"], curve["throttled"], strict=True) if reasons]
    assert marked == [17.0, 333.0, 998.0], "one for each stretch of ten"
    assert len(curves_of(rows[:101], most=100)[0]["t_s"]) <= 100
