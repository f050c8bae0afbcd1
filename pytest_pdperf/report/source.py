"""Reads a finished, broken-off or published run, so that every report shows the same thing, holes included."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from pytest_pdperf.errors import UsageProblem

from .outcomes import SCHEMA, CellOutcome, RunSummary
from .published import PublishedTable, read_published

_FILE = re.compile(r"(?P<topology>.+?)--(?P<cell>.+?)(?:\.launch(?P<launch>\d+))?\.json\Z")
_LAUNCH = re.compile(r"(?P<topology>.+)-launch(?P<launch>\d+)(?:-reference)?\Z")
STAGE_2 = 1000
"""Launch numbers beyond this are fresh launches of suspects: their cells are in the suspects' rows, and not missing."""
_SIMULATED = "sim"
"""First word of every simulated engine's name, and of no other's."""


@dataclass(frozen=True, slots=True)
class Hole:
    """A cell that should be in a report and is not, with the reason to print in its place."""

    topology: str
    launch: int
    cell: str
    reason: str


@dataclass(frozen=True, slots=True)
class Run:
    """One source of numbers: a run folder or a published table."""

    name: str
    folder: Path | None
    outcomes: tuple[CellOutcome, ...]
    holes: tuple[Hole, ...] = ()
    environments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Launch id -> environment record as it was written, unchecked: newer versions may say more."""
    problems: tuple[str, ...] = ()
    """Files that could not be read, one line each."""
    simulated: bool = False
    title: str = ""
    """For published tables: what they are and where they come from."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """For published tables: hardware, engine, model as their publisher says."""
    launches: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def published(self) -> bool:
        """True for numbers that others measured."""
        return self.folder is None

    @property
    def engine(self) -> str:
        """Name of the engine behind all cells; empty for a published table and where cells do not agree."""
        found = {outcome.engine for outcome in self.outcomes} if not self.published else set()
        return found.pop() if len(found) == 1 else ""

    @property
    def engine_version(self) -> str:
        """Version of the engine in every launch; empty where launches do not agree or none tells."""
        records = [record.get("versions") for record in self.environments.values()]
        found = {str(record.get("engine", "")) for record in records if isinstance(record, Mapping)}
        return found.pop() if len(found) == 1 else ""

    def samples_folder(self, outcome: CellOutcome) -> Path | None:
        """Where the cell's stamps lie, None for a published table."""
        if self.folder is None:
            return None
        return self.folder / "records" / launch_id(outcome.topology, outcome.launch) / outcome.result.cell


def told_apart(runs: Sequence[Run]) -> list[str]:
    """A short name for each of several runs: what readers know them by, where that is enough to tell them apart.

    The engine, else the engine and its version, else the run's own name, with its position where names are equal.
    """
    for names in (
        [run.engine for run in runs],
        [run.engine_version and f"{run.engine} {run.engine_version}" for run in runs],
        [run.name for run in runs],
    ):
        if len(set(names)) == len(names) and all(names):
            return names
    return [
        run.name if sum(other.name == run.name for other in runs) == 1 else f"{run.name}, {number}"
        for number, run in enumerate(runs, 1)
    ]


def launch_id(topology: str, launch: int) -> str:
    """Name of a launch in the folders of a run."""
    return topology if launch == 1 else f"{topology}-launch{launch}"


RESULTS = Path("pdperf-results")
"""Where runs lie below the project's root, unless an option says otherwise."""


def folder_of(run: Path, results: Path = RESULTS) -> Path:
    """The path of a run that may be named by its bare id, as pytest prints it."""
    inside = results / run
    return inside if len(run.parts) == 1 and not run.exists() and inside.is_dir() else run


def open_source(path: Path) -> Run:
    """A run folder, or a published table (a JSON file). Raises UsageProblem for what is neither."""
    if path.is_file() and path.suffix == ".json":
        return _published_run(read_published(path))
    if not path.is_dir():
        raise UsageProblem(f"{path}: no such run folder or published table")
    if not any((path / name).is_dir() for name in ("cells", "records", "environment", "logs")):
        raise UsageProblem(f"{path}: not the folder of a run (it has neither cells/ nor records/)")
    return load_run(path)


def load_run(folder: Path) -> Run:
    """All that a run folder holds. Never raises for what lies in it: unreadable files become problems and holes."""
    outcomes: list[CellOutcome] = []
    holes: list[Hole] = []
    problems: list[str] = []
    for path in sorted((folder / "cells").glob("*.json")):
        try:
            outcomes.append(CellOutcome.from_json(_object(path)))
        except Exception as problem:  # whatever a broken or newer file does, the rest is shown
            reason = _reason(path, problem)
            problems.append(f"cells/{path.name}: {reason}")
            if match := _FILE.match(path.name):
                holes.append(Hole(match["topology"], int(match["launch"] or 1), match["cell"], reason))
    outcomes.sort(key=_place)
    seen = {(o.topology, o.launch, o.result.cell) for o in outcomes} | {
        (h.topology, h.launch, h.cell) for h in holes
    }
    holes += [hole for hole in _unfinished(folder) if (hole.topology, hole.launch, hole.cell) not in seen]
    environments, troubles = _environments(folder)
    return Run(
        name=folder.resolve().name,
        folder=folder,
        outcomes=tuple(outcomes),
        holes=tuple(holes),
        environments=environments,
        problems=(*problems, *troubles),
        simulated=_is_simulated(outcomes, environments),
    )


def run_of(summary: RunSummary) -> Run:
    """The same for a run that has just ended, with what only its session knows: also cells that no disk took."""
    run = load_run(summary.folder)
    told = {(o.topology, o.launch, o.result.cell): o for o in (*run.outcomes, *summary.outcomes)}
    return replace(
        run,
        name=summary.run_id,
        outcomes=tuple(sorted(told.values(), key=_place)),
        holes=tuple(hole for hole in run.holes if (hole.topology, hole.launch, hole.cell) not in told),
        simulated=summary.simulated or run.simulated,
        problems=tuple(dict.fromkeys((*run.problems, *summary.problems))),
        launches=summary.launches,
        changes=summary.changes,
    )


def _place(outcome: CellOutcome) -> tuple[int, str, int]:
    return outcome.order, outcome.nodeid, outcome.launch


def _published_run(table: PublishedTable) -> Run:
    return Run(
        name=table.name, folder=None, outcomes=table.outcomes(), title=table.source, facts=dict(table.facts)
    )


def _object(path: Path) -> dict[str, Any]:
    data = orjson.loads(path.read_bytes())
    if not isinstance(data, dict):
        raise ValueError("holds no JSON object")
    return data


def _reason(path: Path, problem: Exception) -> str:
    """Why a cell's file cannot be shown, in words that tell a newer version from a damaged file."""
    try:
        data = _object(path)
        for place in (data, data.get("result") or {}):
            schema = place.get("schema")
            if isinstance(schema, int) and schema > SCHEMA:
                return f"written by a newer version (schema {schema}, this one reads {SCHEMA}): update pytest-pdperf"
    except (OSError, ValueError, AttributeError):
        return "cannot be read: the file is damaged or half-written"
    text = f"{problem.__class__.__name__}: {problem}" if isinstance(problem, KeyError) else str(problem)
    return f"cannot be read: {text}"


def _unfinished(folder: Path) -> list[Hole]:
    """Cells that have a folder for their records and no result: the run ended while they were measured."""
    found = []
    for path in sorted((folder / "records").glob("*/*")):
        if not path.is_dir():
            continue
        match = _LAUNCH.match(path.parent.name)
        if match and int(match["launch"]) > STAGE_2:
            continue
        topology = match["topology"] if match else path.parent.name
        reason = (
            "measured but never judged: the run broke off"
            if (path / "records.json").exists()
            else "the run broke off while this cell was measured, or its load failed"
        )
        found.append(Hole(topology, int(match["launch"]) if match else 1, path.name, reason))
    return found


def _environments(folder: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    found: dict[str, dict[str, Any]] = {}
    problems = []
    for path in sorted((folder / "environment").glob("*.json")):
        try:
            found[path.stem] = _object(path)
        except (OSError, ValueError):
            problems.append(f"environment/{path.name}: cannot be read: the file is damaged or half-written")
    return found, problems


def _is_simulated(outcomes: Sequence[CellOutcome], environments: Mapping[str, Mapping[str, Any]]) -> bool:
    if any(outcome.engine.partition("-")[0] == _SIMULATED for outcome in outcomes):
        return True
    versions = [record.get("versions") for record in environments.values()]
    return any("simulated" in str(found.get("engine", "")) for found in versions if isinstance(found, dict))
