"""How long cells took in earlier runs, so that a run can say beforehand, and while it goes on, how long it takes."""

from __future__ import annotations

from collections.abc import Set
from itertools import islice
from pathlib import Path

from pytest_pdperf.stack.estimate import Key

from .outcomes import load

RUNS_LOOKED_AT = 50
"""The newest ones: a folder of a thousand runs of other topologies must not hold up a start."""


def earlier_durations(results: Path, workload: str, wanted: Set[Key]) -> tuple[dict[Key, float], str]:
    """Wall seconds of cells in the newest run below `results` that measured any of `wanted`, and that run's name.

    Empty when there is none.
    """
    for folder in islice(sorted(results.glob("*/cells"), reverse=True), RUNS_LOOKED_AT):
        known = {
            (outcome.engine, outcome.topology, outcome.result.cell): outcome.result.wall_s
            for outcome in load(folder)[0]
            if outcome.result.workload == workload and outcome.result.wall_s is not None
        }
        if wanted & known.keys():
            return known, folder.parent.name
    return {}, ""
