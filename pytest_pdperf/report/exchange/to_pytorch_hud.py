"""A run as records of PyTorch's benchmark database (`oss_ci_benchmark_v3`), so that its HUD can show it.

One record a metric and cell; launches of one cell are the values of one record, as the format wants repeats. What the
uploading workflow knows better (runner, repository, commit, time) is left to it. Every `extra_info` there maps strings
to strings. An INVALID cell is left out: the format has no place to say that a number does not count.

Format: https://github.com/pytorch/pytorch/wiki/How-to-integrate-with-PyTorch-OSS-benchmark-database
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pytest_pdperf import __version__
from pytest_pdperf.measure.cell_result import MetricValue
from pytest_pdperf.measure.table import DEFINITIONS, METRICS

from .chosen import Chosen

NAME = "pytest-pdperf"


def pytorch_hud_records(cells: Iterable[Chosen]) -> tuple[list[dict[str, Any]], list[str]]:
    """(the records, one line for each cell that is left out)."""
    records: dict[tuple[str, str, str], dict[str, Any]] = {}
    left_out = []
    for chosen in cells:
        result = chosen.outcome.result
        if result.invalid:
            left_out.append(f"{chosen.name}: left out, INVALID: {result.invalid[0]}")
            continue
        streams: Mapping[str, Mapping[str, MetricValue]] = result.streams or {"": result.metrics}
        for stream, metrics in streams.items():
            cell = f"{result.cell}/{stream}" if stream else result.cell
            for name, measured in metrics.items():
                if measured.value is None or name not in METRICS:
                    continue
                record = records.setdefault(
                    (chosen.outcome.topology, cell, name), _record(chosen, cell, name, measured.n)
                )
                record["metric"]["benchmark_values"].append(measured.value)
    return list(records.values()), left_out


def _record(chosen: Chosen, cell: str, metric: str, n: int) -> dict[str, Any]:
    outcome, facts = chosen.outcome, chosen.facts
    return {
        "benchmark": {
            "name": NAME,
            "mode": "inference",
            "dtype": facts.get("dtype", ""),
            "extra_info": {
                "topology": outcome.topology,
                "kind": outcome.kind,
                "workload": outcome.result.workload,
                "cell": cell,
                "definitions": str(DEFINITIONS),
                "run": chosen.run.name,
            },
        },
        "model": {
            "name": facts.get("model", "unknown"),
            "type": "LLM",
            "backend": outcome.engine,
            "extra_info": {"evidence": outcome.evidence, "verdict": outcome.verdict},
        },
        "dependencies": {NAME: {"version": __version__}} | _engine(chosen),
        "metric": {
            "name": metric,
            "benchmark_values": [],
            "extra_info": {
                "unit": METRICS[metric].unit,
                "n": str(n),
                "definition": METRICS[metric].definition,
            },
        },
    }


def _engine(chosen: Chosen) -> dict[str, Any]:
    version = chosen.version("engine")
    return {chosen.outcome.engine: {"version": version}} if version else {}
