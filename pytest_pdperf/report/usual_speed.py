"""How fast healthy cells were, kept with a baseline's launches: what a slow link or role is held against."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_pdperf.evidence.naming import Naming
from pytest_pdperf.evidence.speeds import MEASURES, Level, Usual
from pytest_pdperf.gate.baseline import significant
from pytest_pdperf.gate.statistics import (
    freedom_of,
    moderated_variance,
    standard_error,
    summarise,
    t_quantile,
    value_of,
)

KEY = "speeds"
"""Name under which a launch's speeds lie in `gate.baseline.Launch.environment`, as JSON."""
LOADING = "loading_s"

SLOWER, CONFIDENCE = 1.10, 0.999
"""No factor below this is a finding, however quiet the baseline is. The confidence is one-sided and for each speed: a
cell has about ten, and a healthy one is to have no finding."""
SUSPECTED_SLOWER, SUSPECTED_CONFIDENCE = 1.03, 0.95
"""The same for speeds behind a metric that became worse: there the gate has the last word on whether, not this."""
PRIOR_SD: Mapping[str, float] = {"step_s": 0.02, "prefill_s": 0.02, "link_rate": 0.05, LOADING: 0.10}
"""Launch-to-launch standard deviation of a log speed that is assumed until launches tell."""


def speeds_of(naming: Naming) -> dict[str, str]:
    """What a stored launch keeps of a cell's speeds: four significant digits, unknown ones left out."""
    rows = {
        name: [
            {
                measure: significant(value)
                for measure in MEASURES
                if (value := getattr(one, measure)) is not None and value > 0
            }
            for one in windows
        ]
        for name, windows in naming.speeds.items()
    }
    found = (
        {KEY: json.dumps(rows, sort_keys=True)} if any(row for one in rows.values() for row in one) else {}
    )
    loading = {name: significant(value) for name, value in naming.loading_s.items() if value > 0}
    return found | ({LOADING: json.dumps(loading, sort_keys=True)} if loading else {})


def usual_of(environments: Iterable[Mapping[str, str]]) -> Usual:
    """What is usual by the launches of a baseline; one without launches, or whose launches kept none, says so.

    The limits are the gate's for a single fresh launch.
    """
    launches = list(environments)
    if not launches:
        return Usual(why_not="there is no baseline to compare with")
    kept = [rows for launch in launches if (rows := _read(launch.get(KEY)))]
    speeds = {
        name: tuple(
            {
                measure: level
                for measure in MEASURES
                if (level := _level(measure, [_at(rows, name, window, measure) for rows in kept]))
            }
            for window in range(max(len(_windows(rows, name)) for rows in kept))
        )
        for name in dict.fromkeys(name for rows in kept for name in rows)
    }
    loading = [rows for launch in launches if (rows := _read(launch.get(LOADING)))]
    starts = {
        name: level
        for name in dict.fromkeys(name for rows in loading for name in rows)
        if (level := _level(LOADING, [_positive(rows.get(name)) for rows in loading]))
    }
    why_not = "" if any(any(one) for one in speeds.values()) else "the baseline's launches kept none"
    return Usual(speeds, starts, why_not)


def _level(measure: str, values: Sequence[float | None]) -> Level | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    seen = summarise([math.log(value) for value in known])
    s2 = moderated_variance(PRIOR_SD[measure] ** 2, seen.variance, seen.launches)
    error, freedom = standard_error(s2, 1, seen.launches), freedom_of(seen.launches)
    return Level(
        value_of(seen.center, 1),
        limit=max(SLOWER, math.exp(t_quantile(CONFIDENCE, freedom) * error)),
        suspected=max(SUSPECTED_SLOWER, math.exp(t_quantile(SUSPECTED_CONFIDENCE, freedom) * error)),
    )


def _at(rows: Mapping[str, Any], name: str, window: int, measure: str) -> float | None:
    windows = _windows(rows, name)
    row = windows[window] if window < len(windows) else None
    return _positive(row.get(measure)) if isinstance(row, Mapping) else None


def _windows(rows: Mapping[str, Any], name: str) -> list[Any]:
    windows = rows.get(name)
    return windows if isinstance(windows, list) else []


def _positive(value: object) -> float | None:
    """A stored number that can be compared with; files may have been written by anybody."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and isinstance(value, int | float) and 0 < value < math.inf else None


def _read(text: str | None) -> dict[str, Any]:
    try:
        data = json.loads(text or "{}")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}
