"""A baseline that no launch had to produce, for tests that are about what comes after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_pdperf.inputs import read_inputs
from pytest_pdperf.judging import Judging
from pytest_pdperf.measure.cell_result import CellResult, MetricValue
from pytest_pdperf.options import resolve
from pytest_pdperf.provenance import Hardware, LaunchRecord


def accepted(
    pytester: pytest.Pytester,
    arguments: Mapping[str, str],
    cell: str,
    numbers: Mapping[str, float],
    *,
    environment: Mapping[str, str] | None = None,
    n: int = 12,
) -> Path:
    """The baseline file of the one topology of `arguments`: `numbers` of simulated engines, `n` samples each."""
    given = {f"pdperf_{name}": value for name, value in arguments.items()}
    settings = resolve((given | {"pdperf_update_baselines": "create"}).get, lambda name: None)
    inputs = read_inputs(settings, pytester.path)
    (topology,) = inputs.topologies
    judging = Judging(settings, inputs, pytester.path, "earlier")
    values = {name: MetricValue(value, n) for name, value in numbers.items()}
    result = CellResult(topology.name, inputs.workload.name, cell, values, requests=n, ok=n)
    record = LaunchRecord(Hardware("simulated", 0, "loopback"), environment=environment or {})
    judging.judge(topology, result, record, 1)
    assert judging.update_baselines()
    (path,) = (pytester.path / "baselines").rglob(f"{topology.name}.json")
    return path
