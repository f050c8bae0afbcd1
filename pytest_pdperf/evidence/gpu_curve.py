"""A GPU's looks as curves for a cell's file: a mean hides the minute in which it throttled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .gpu_trace import Look

MAX_POINTS = 120
"""Of one GPU: more are not seen in a picture, and a cell's file is read by people too."""


def curves_of(looks: Iterable[Look], most: int = MAX_POINTS) -> list[dict[str, Any]]:
    """One curve a GPU, in order of first appearance, as plain data; none where nothing was sampled.

    `t_s` are seconds since the first look of all. `throttled` has the driver's reasons of each point, null where the
    GPU was idle or the driver did not say. A throttled look is not left out for a neighbour that was not.
    """
    rows = list(looks)
    start = min((row.t for row in rows), default=0.0)
    return [
        {
            "uuid": uuid,
            "t_s": [round(row.t - start, 2) for row in kept],
            "sm_mhz": [row.sm_mhz for row in kept],
            "power_w": [None if row.power_w is None else round(row.power_w, 1) for row in kept],
            "temperature_c": [row.temperature_c for row in kept],
            "throttled": [
                list(row.throttle_reasons) if row.idle is False and row.throttle_reasons is not None else None
                for row in kept
            ],
        }
        for uuid in dict.fromkeys(row.uuid for row in rows)
        for kept in [list(_thinned([row for row in rows if row.uuid == uuid], most))]
    ]


def _thinned(rows: Sequence[Look], most: int) -> Iterator[Look]:
    """Evenly over the looks; a throttled one stands for its neighbours."""
    size = -(-len(rows) // most)
    for begin in range(0, len(rows), size or 1):
        bin_ = rows[begin : begin + size]
        yield next((row for row in bin_ if row.idle is False and row.throttle_reasons), bin_[0])
