"""With xdist: workers measure, a topology each; the controller gathers, decides the suspects and writes, once."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from .judging import JudgedCell
from .parameters import of_topologies
from .session import Session

OUTPUT = "pdperf"
"""Key of a worker's findings among what it hands to the controller."""
SPREADING = ("load", "worksteal")
"""`--dist` modes that would bring every topology up on every worker; `-n` alone means `load`."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a worker has found out that is not in the run's folder."""

    cells: tuple[JudgedCell, ...]
    launch_lines: tuple[str, ...]
    problems: tuple[str, ...]
    surroundings: dict[str, dict[str, str]]
    """Launch -> canaries."""
    bring_up_s: dict[str, float]
    unwritten: dict[Path, bytes]
    """Files that the disk refused."""


class ByTopology(LoadScopeScheduling):  # type: ignore[misc]
    """Gives all items of one launch of a topology to one worker, as they would share one stack without xdist."""

    def __init__(self, config: pytest.Config, log: Any, launches: tuple[str, ...]) -> None:
        super().__init__(config, log)
        self._launches = launches

    def _split_scope(self, nodeid: str) -> str:
        return launch_of(nodeid, self._launches) or nodeid.split("::", 1)[0]


def launch_of(nodeid: str, launches: tuple[str, ...]) -> str:
    """The launch among an item's parameters: the longest name that stands there whole; empty when there is none."""
    found = [name for name in launches if re.search(rf"[\[-]{re.escape(name)}[\]-]", nodeid)]
    return max(found, key=len, default="")


def scheduler(session: Session, config: pytest.Config, log: Any) -> ByTopology | None:
    """One that keeps topologies together, unless the user has asked for another grouping."""
    if config.getoption("dist") not in SPREADING:
        return None
    launches = of_topologies(session.inputs, session.settings["launches"], "single")
    return ByTopology(config, log, tuple(str(launch.id) for launch in launches))


def pack(session: Session) -> bytes:
    """A worker's findings, for the controller of the same run."""
    bench = session.bench
    launches = {launch.id for launch in bench.selected}
    return pickle.dumps(
        Findings(
            cells=tuple(session.judging.cells),
            launch_lines=tuple(bench.launch_lines),
            problems=tuple(bench.problems),
            surroundings={id: dict(bench.surroundings(id)) for id in launches},
            bring_up_s=dict(bench.bring_ups),
            unwritten=dict(session.files.waiting),
        )
    )


def unpack(session: Session, worker: str, data: bytes | None) -> None:
    """Take over what a worker has found; one that ended without a word becomes a problem of the run."""
    bench = session.bench
    if data is None:
        bench.problems.append(
            f"worker {worker} ended before it could hand over its verdicts: suspects of its topology stay "
            "SUSPECT, and neither history nor baselines have its cells"
        )
        return
    found: Findings = pickle.loads(data)
    session.judging.cells += found.cells
    bench.launch_lines += found.launch_lines
    bench.problems += [line for line in found.problems if line not in bench.problems]
    bench.adopt(found.surroundings, found.bring_up_s)
    session.files.adopt(found.unwritten)
