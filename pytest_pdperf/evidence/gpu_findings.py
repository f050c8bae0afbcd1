"""Says in words which GPUs were slowed: what no healthy GPU does makes a cell INVALID, a power cap is only told."""

from __future__ import annotations

from collections.abc import Sequence

from .gpu_trace import GpuSummary, judge_throttle

FORCED_DOWN = frozenset(
    ("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake")
)
"""Heat and power supply: no healthy GPU is slowed by these. A power cap or locked clocks may be its normal state."""


def throttled(gpus: Sequence[GpuSummary]) -> list[str]:
    """Only what no GPU does in health: its own summary may hold a power cap as well."""
    lines = []
    for row in gpus:
        forced = sorted(FORCED_DOWN & set(row.reasons))
        if forced and judge_throttle([row]).status == "inconclusive":
            clock = f" at {row.sm_mhz:.0f} MHz" if row.sm_mhz is not None else ""
            heat = f", {row.temperature_c} °C" if row.temperature_c is not None else ""
            lines.append(
                f"GPU {row.uuid} throttled ({', '.join(forced)}) in {row.throttled_share or 0.0:.0%} of the busy "
                f"looks{clock}{heat}"
            )
    return lines


def capped(gpus: Sequence[GpuSummary]) -> list[str]:
    """Slower than it could be, by a limit that may be its normal state."""
    return [
        f"GPU {row.uuid} ran below its clocks in {row.throttled_share:.0%} of the busy looks ({', '.join(row.reasons)})"
        for row in gpus
        if row.throttled_share
        and not FORCED_DOWN & set(row.reasons)
        and judge_throttle([row]).status != "clean"
    ]
