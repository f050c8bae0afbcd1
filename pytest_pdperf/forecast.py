"""How long this run takes: every selected cell by the newest run that measured any of them, else by a guess."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .inputs import Inputs
from .measuring import TopologyLaunch
from .report.earlier import earlier_durations
from .spec.workload import Cell
from .stack.estimate import Estimate, Key, cell_s, estimate, start_up_s
from .stack.eta import CellKey, Remaining


def estimate_of(inputs: Inputs, launches: Sequence[TopologyLaunch], results: Path) -> Estimate:
    """Every cell of the workload on each of the launches, before anything starts. `results` holds earlier runs."""
    known, source = _earlier(inputs, launches, results)
    pairs = [(_engine(inputs, launch), launch.topology.name) for launch in launches]
    return estimate(pairs, inputs.workload.cells, known, source)


def remaining_of(
    inputs: Inputs, cells: Mapping[CellKey, tuple[TopologyLaunch, Cell]], results: Path
) -> Remaining:
    """The selected cells, to be corrected as they finish."""
    launches = {launch.id: launch for launch, _ in cells.values()}
    known, _ = _earlier(inputs, launches.values(), results)
    return Remaining(
        {
            key: cell_s(_engine(inputs, launch), launch.topology.name, cell, known)
            for key, (launch, cell) in cells.items()
        },
        {id: start_up_s(_engine(inputs, launch)) for id, launch in launches.items()},
    )


def _earlier(
    inputs: Inputs, launches: Iterable[TopologyLaunch], results: Path
) -> tuple[dict[Key, float], str]:
    wanted = {
        (_engine(inputs, launch), launch.topology.name, cell.id)
        for launch in launches
        for cell in inputs.workload.cells
    }
    return earlier_durations(results, inputs.workload.name, wanted)


def _engine(inputs: Inputs, launch: TopologyLaunch) -> str:
    return inputs.engines[launch.topology.name].name
