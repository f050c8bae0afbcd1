"""A run as pytest-benchmark's JSON, so that `pytest-benchmark compare` and what reads its files can show it.

A benchmark there is a set of rounds with a time each: TTFT, TPOT, ITL and E2E have one a request or a gap. Throughput
has none and is in `extra_info`. Cells without records are left out: minimum and deviation would be made up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_pdperf import __version__
from pytest_pdperf.measure.alternatives import populations
from pytest_pdperf.measure.records import CellRecords
from pytest_pdperf.measure.samples import streamed, successes
from pytest_pdperf.measure.table import DEFINITIONS, METRICS
from pytest_pdperf.report.source import Run

from .chosen import Chosen

FORMAT = "5.0.0"
"""Version of pytest-benchmark whose layout this is."""
_NAMES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "itl", "e2e_ms": "e2e"}


def pytest_benchmark_json(run: Run, cells: Iterable[Chosen]) -> tuple[dict[str, Any], list[str]]:
    """(the document, one line for each cell that is left out)."""
    benchmarks: list[dict[str, Any]] = []
    left_out = []
    started: list[int] = []
    for chosen in cells:
        if chosen.records is None:
            left_out.append(f"{chosen.name}: left out, {chosen.missing}")
            continue
        started.append(chosen.records.started_ns)
        for stream, records in chosen.streams():
            if records is not None:
                benchmarks += _benchmarks(chosen, stream, records)
    when = datetime.fromtimestamp(min(started) / 1e9, UTC) if started else None
    first = next(iter(run.environments.values()), {})
    document = {
        "machine_info": {
            "node": str(first.get("host", "unknown")),
            "processor": str(first.get("cpu", "unknown")),
            "machine": "unknown",
            "gpus": [str(gpu.get("name")) for gpu in first.get("gpus") or [] if isinstance(gpu, dict)],
        },
        "commit_info": {
            "id": "unknown",
            "time": None,
            "dirty": None,
            "project": "unknown",
            "branch": "unknown",
        },
        "benchmarks": benchmarks,
        "datetime": when.isoformat() if when else None,
        "version": FORMAT,
        "pdperf": {"version": __version__, "run": run.name, "definitions": DEFINITIONS},
    }
    return document, left_out


def _benchmarks(chosen: Chosen, stream: str, records: CellRecords) -> Iterable[dict[str, Any]]:
    good = streamed(successes(records.requests))
    outcome = chosen.outcome
    label = f"{chosen.name}/{stream}" if stream else chosen.name
    for population in populations("vllm"):
        ours = population.ours or population.name
        seconds = population.sample(successes(records.requests) if ours == "e2e_ms" else good) / 1e3
        if not seconds.size:
            continue
        name = _NAMES[ours]
        cell = f"{outcome.result.cell}/{stream}" if stream else outcome.result.cell
        yield {
            "group": f"{name} {cell}",
            "name": f"{name}[{label}]",
            "fullname": f"{outcome.nodeid}::{name}[{label}]",
            "params": {"topology": outcome.topology, "cell": cell, "launch": outcome.launch},
            "param": label,
            "extra_info": {
                "definition": population.definition,
                "engine": outcome.engine,
                "verdict": outcome.verdict,
                "evidence": outcome.evidence,
                "invalid": list(outcome.result.invalid),
                "metrics": {
                    key: value.value
                    for key, value in (outcome.result.streams.get(stream) or outcome.result.metrics).items()
                    if key in METRICS
                },
            },
            "options": {
                "disable_gc": False,
                "timer": f"{records.stamp_source} receive stamps",
                "min_rounds": 1,
                "max_time": 0.0,
                "min_time": 0.0,
                "warmup": True,
            },
            "stats": statistics(seconds),
        }


def statistics(seconds: NDArray[np.float64]) -> dict[str, Any]:
    """The fields of pytest-benchmark's `stats`, for at least one round.

    `stddev` is that of a sample (n - 1), 0 for one round as there. Outliers are those beyond one standard deviation of
    the mean, and beyond 1.5 IQR of the quartiles.
    """
    values = np.sort(seconds)
    q1, median, q3 = (float(v) for v in np.percentile(values, [25, 50, 75]))
    iqr = q3 - q1
    mean = float(values.mean())
    deviation = float(values.std(ddof=1)) if values.size > 1 else 0.0
    low, high = q1 - 1.5 * iqr, q3 + 1.5 * iqr
    far = int(((values < low) | (values > high)).sum())
    wide = int((np.abs(values - mean) > deviation).sum())
    inside: Sequence[float] = values[(values >= low) & (values <= high)].tolist()
    return {
        "min": float(values[0]),
        "max": float(values[-1]),
        "mean": mean,
        "stddev": deviation,
        "rounds": int(values.size),
        "median": median,
        "iqr": iqr,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": far,
        "stddev_outliers": wide,
        "outliers": f"{wide};{far}",
        "ld15iqr": inside[0] if inside else float(values[0]),
        "hd15iqr": inside[-1] if inside else float(values[-1]),
        "ops": 1.0 / mean if mean > 0 else 0.0,
        "total": float(values.sum()),
        "iterations": 1,
    }
