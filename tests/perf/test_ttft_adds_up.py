"""The stages of the time to the first token must explain it, or a slower stage cannot be told from a hole.

It measures nothing itself and looks at what this run has measured with one request at a time.
"""

from __future__ import annotations

import os
from statistics import fmean

import pytest

from pytest_pdperf.evidence.cell_evidence import CLOSURE_LIMIT
from pytest_pdperf.session import Session
from pytest_pdperf.spec.topology import Kind, Topology

pytestmark = pytest.mark.pdperf_cells("none")

SLACK_MS = 3.0
"""Two hops over the loopback and the wake-ups that they take: no server's clock sees them."""
BUSY = 1.5
"""Load a core above which processes wait for each other between the stages, where nobody's clock runs."""


def test_ttft_adds_up(pdperf: Session, topology: Topology) -> None:
    """Over the cells with one client: measured and explained differ by less than a tenth."""
    if topology.kind is not Kind.PD:
        pytest.skip(
            "the stages of an aggregated server end at its engine: its API server has no clock for them"
        )
    splits = [
        outcome.ttft_split
        for outcome in pdperf.summary().outcomes
        if outcome.topology == topology.name and outcome.ttft_split and outcome.result.cell.endswith("-c1")
    ]
    if not splits:
        pytest.skip(f"no cell of {topology.name} with one client has known stages")
    measured = fmean(split.measured_ms for split in splits)
    open_ms = fmean(split.closure_error_ms for split in splits)
    stages = ", ".join(
        f"{name} {fmean(known):.1f}"
        for name in splits[0].stages
        if (known := [value for split in splits if (value := split.stages[name]) is not None])
    )
    text = f"TTFT {measured:.1f} ms = {stages}, unexplained {open_ms:+.1f} ms ({open_ms / measured:+.1%})"
    print(text)
    if abs(open_ms) <= max(CLOSURE_LIMIT * measured, SLACK_MS):
        return
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    if load > BUSY:
        pytest.skip(f"{text}; the machine is too busy to tell (load {load:.1f} a core)")
    pytest.fail(text, pytrace=False)
