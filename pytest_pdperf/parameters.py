"""What pytest parametrises the suite with: launches of topologies and cells, marked so that `-m` can choose."""

from __future__ import annotations

from typing import Any

import pytest

from .errors import UsageProblem
from .inputs import Inputs
from .measuring import TopologyLaunch
from .spec.topology import Kind
from .spec.workload import Workload

OWN_MARKS = {"fault": "fault", "beside": "beside"}
"""Tests that are no part of `-m pd` and `-m aggregated`: what `pdperf_cells` says -> their mark."""


def of_topologies(inputs: Inputs, launches: int, streams: str) -> list[Any]:
    """One pytest parameter a topology and launch, marked with the topology's kind.

    Those of OWN_MARKS carry that mark instead, once each; `fault` wants PD topologies to break.
    """
    own = OWN_MARKS.get(streams)
    breaks = streams == "fault"
    numbers = range(1, 2 if own else launches + 1)
    topologies = [t for t in inputs.topologies if not breaks or t.kind is Kind.PD]
    reason = "--topology names no disaggregated topology, whose faults these are"
    if breaks and inputs.deployment:
        reason, topologies = "a deployment behind --target is not ours to break", []
    if not topologies:
        return [pytest.param(None, id="none", marks=[pytest.mark.fault, pytest.mark.skip(reason=reason)])]
    return [
        pytest.param(
            one := TopologyLaunch(topology, number),
            id=one.id,
            marks=getattr(pytest.mark, own or topology.kind.value),
        )
        for topology in topologies
        for number in numbers
    ]


def of_cells(workload: Workload, streams: str) -> list[Any]:
    """One pytest parameter a cell with one stream (`single`, `beside`) or several (`mixed`). Raises UsageProblem."""
    if streams not in ("single", "mixed", "beside"):
        raise UsageProblem(f"pdperf_cells({streams!r}): want 'single', 'mixed', 'none', 'fault' or 'beside'")
    wanted = [cell for cell in workload.cells if (len(cell.streams) > 1) == (streams == "mixed")]
    if not wanted:
        reason = f"workload {workload.name} has no cells with {streams} streams"
        return [pytest.param(None, id="none", marks=pytest.mark.skip(reason=reason))]
    return [pytest.param(cell, id=cell.id) for cell in wanted]
