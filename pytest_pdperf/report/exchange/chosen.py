"""Which cells of a run go into a foreign file, and what is known of each beyond its summary."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.load.results import read_records
from pytest_pdperf.measure.records import CellRecords
from pytest_pdperf.report.outcomes import CellOutcome
from pytest_pdperf.report.source import Run, launch_id

_CLIENTS = re.compile(r"-c(\d+)\Z")


@dataclass(frozen=True, slots=True)
class Chosen:
    """One cell, its records where they lie in the run's folder."""

    run: Run
    outcome: CellOutcome
    records: CellRecords | None
    missing: str
    """Why there are no records; empty when there are."""

    @property
    def name(self) -> str:
        """`pd-1p2d/in512-out256-c4`, with the launch where it is not the first."""
        return f"{launch_id(self.outcome.topology, self.outcome.launch)}/{self.outcome.result.cell}"

    @property
    def concurrency(self) -> int | None:
        """Clients of a closed loop, as the cell's id says."""
        match = _CLIENTS.search(self.outcome.result.cell)
        return int(match[1]) if match else None

    @property
    def facts(self) -> dict[str, str]:
        """Model, dtype and so on as the run recorded them, empty where it did not."""
        return self._recorded("facts")

    @property
    def commands(self) -> dict[str, str]:
        """Instance -> command line as recorded, secrets masked; empty where the run did not."""
        return self._recorded("commands")

    def version(self, of: str) -> str:
        """Version of `engine`, `router` or another part as recorded; empty where it is not known."""
        found = self._recorded("versions").get(of, "")
        return "" if found == "unknown" else found

    def _recorded(self, section: str) -> dict[str, str]:
        record = self.run.environments.get(launch_id(self.outcome.topology, self.outcome.launch), {})
        found = record.get(section)
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}

    def streams(self) -> Iterator[tuple[str, CellRecords | None]]:
        """(stream, its records) of every stream; the name is empty where there is only one."""
        names = list(self.outcome.result.streams)
        if not names:
            yield "", self.records
            return
        for name in names:
            found = self.records
            if found is not None:
                found = replace(found, requests=tuple(r for r in found.requests if r.stream == name))
            yield name, found


def choose(run: Run, topology: str = "*", cell: str = "*") -> Iterator[Chosen]:
    """Measured cells whose names match both shell patterns, one in memory at a time.

    Raises UsageProblem for a published table, and when nothing matches.
    """
    if run.published:
        raise UsageProblem(f"{run.name}: a published table, not a run: there is nothing of ours to export")
    found = [
        o
        for o in run.outcomes
        if fnmatch.fnmatchcase(o.topology, topology) and fnmatch.fnmatchcase(o.result.cell, cell)
    ]
    if not found:
        known = ", ".join(f"{o.topology}/{o.result.cell}" for o in run.outcomes) or "none"
        raise UsageProblem(f"{run.name}: no measured cell matches {topology}/{cell} (there is: {known})")
    return (_chosen(run, outcome) for outcome in found)


def _chosen(run: Run, outcome: CellOutcome) -> Chosen:
    folder = run.samples_folder(outcome)
    try:
        if folder is None:
            return Chosen(run, outcome, None, "a published table has no records")
        return Chosen(run, outcome, read_records(folder), "")
    except FileNotFoundError:
        return Chosen(run, outcome, None, "the records of single requests are not in the run's folder")
    except Exception as problem:  # damaged or newer records: the summary can still be exported
        return Chosen(
            run, outcome, None, f"the records cannot be read: {str(problem) or type(problem).__name__}"
        )
