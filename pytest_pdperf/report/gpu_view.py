"""Clocks, power and temperature of a cell's GPUs over time: when a GPU slowed, and not only that it did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from .charts import Curve, Figure, Point, over_time
from .outcomes import CellOutcome
from .server_view import at

KEY = "gpu_trace"
"""Where the curves lie in a cell's details (`evidence.gpu_curve`)."""
PANELS = (
    ("sm_mhz", "SM clock", "MHz"),
    ("power_w", "power", "W"),
    ("temperature_c", "temperature", "°C"),
)


def gpu_figures(outcome: CellOutcome, label: str) -> Iterator[Figure]:
    """One for each measure that the driver told; none where no GPU was sampled."""
    stored = at(outcome.details, KEY)
    traces = [one for one in stored if isinstance(one, Mapping)] if isinstance(stored, list) else []
    marks = [mark for number, one in enumerate(traces) for mark in _marks(number, one)]
    caption = f"red: throttled ({', '.join(sorted({words for _, words in marks}))})" if marks else ""
    for measure, what, unit in PANELS:
        curves = [
            (Curve(f"GPU {number}", number), _points(number, one, measure, unit))
            for number, one in enumerate(traces)
        ]
        if any(points for _, points in curves):
            title = f"{what[:1].upper()}{what[1:]}, {unit}: {label}"
            yield Figure(title, over_time(curves, what, marks), caption)


def _points(number: int, trace: Mapping[str, Any], measure: str, unit: str) -> list[Point]:
    name = f"GPU {number} ({trace.get('uuid')})"
    return [
        Point(float(second), float(value), f"{name} at {second:.0f} s: {value:g} {unit}")
        for second, value in _pairs(trace, measure)
        if _drawable(value)
    ]


def _marks(number: int, trace: Mapping[str, Any]) -> list[tuple[float, str]]:
    """(second, what the driver says) of every look at a throttled GPU."""
    return [
        (float(second), f"GPU {number}: {', '.join(map(str, reasons))}")
        for second, reasons in _pairs(trace, "throttled")
        if isinstance(reasons, list) and reasons
    ]


def _pairs(trace: Mapping[str, Any], measure: str) -> Iterator[tuple[float, Any]]:
    """Moments with their values; data of another shape than expected is not drawn."""
    seconds, values = (one if isinstance(one := trace.get(key), list) else [] for key in ("t_s", measure))
    for second, value in zip_longest(seconds, values):
        if _drawable(second):
            yield second, value


def _drawable(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
