"""Puts runs side by side: which columns there are, which cells, and what is missing at each crossing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_pdperf.measure.cell_result import MetricValue
from pytest_pdperf.measure.table import METRICS

from .kv_path import KvPath, kin_together, read_kv_path
from .outcomes import CellOutcome
from .source import Hole, Run, launch_id, told_apart

_CELL = re.compile(r"in(?P<input>\d+(?:-\d+)?)-out(?P<output>\d+)(?:-c(?P<clients>\d+))?")
USELESS = frozenset({"INVALID"})
"""Verdicts after which no performance may be read from a cell."""


@dataclass(frozen=True, slots=True)
class Series:
    """One column of a comparison: a topology of a run, once for each launch."""

    run: Run
    topology: str
    launch: int
    kind: str
    label: str
    """Distinct in its report."""
    colour: int
    """Position of its (run, topology): launches of one topology share a colour."""
    path: KvPath | None = None
    """How it was asked to move its KV cache, where its run says so."""

    @property
    def id(self) -> str:
        """Folder name of its launch."""
        return launch_id(self.topology, self.launch)


@dataclass(frozen=True, slots=True)
class Row:
    """One cell over all series: an outcome or the reason why there is none."""

    cell: str
    shape: str
    """`512/256`, or empty for a cell that is not one shape."""
    concurrency: int | None
    entries: tuple[tuple[Series, CellOutcome | Hole], ...]

    def outcomes(self) -> list[tuple[Series, CellOutcome]]:
        """The crossings that hold a result."""
        return [(series, entry) for series, entry in self.entries if isinstance(entry, CellOutcome)]


@dataclass(frozen=True, slots=True)
class Grid:
    """All cells of a report in order, and its columns."""

    runs: tuple[Run, ...]
    series: tuple[Series, ...]
    rows: tuple[Row, ...]

    def shapes(self) -> dict[str, list[Row]]:
        """Rows by shape in order of appearance, by rising concurrency; cells that are not one shape under ''."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.shape, []).append(row)
        return {
            shape: sorted(rows, key=lambda r: r.concurrency or 0) if shape else rows
            for shape, rows in found.items()
        }

    def reference(self, series: Series) -> Series | None:
        """What a column is held against where no baseline is.

        The same topology of the first run; else the first aggregated topology of its own run, of the first run, or
        of any; else the topology that differs only in how the KV cache moves. None for the column that the others
        are held against.
        """
        first = self.runs[0]
        same = [s for s in self.series if s.run is first and s.topology == series.topology and s.launch == 1]
        if series.run is not first and same:
            return same[0]
        plain = [s for s in self.series if s.kind == "aggregated" and s.launch == 1]
        nearest = sorted(plain, key=lambda s: (s.run is not series.run, s.run is not first))
        if not nearest:
            return self.other_path(series)
        return nearest[0] if nearest[0].colour != series.colour else None

    def control(self, series: Series) -> Series | None:
        """The aggregated column that a PD column is compared with: of its own run first, which has the same engine."""
        own = [s for s in self.series if s.run is series.run and s.kind == "aggregated" and s.launch == 1]
        return own[0] if own else self.reference(series)

    def other_path(self, series: Series) -> Series | None:
        """What TCP is held against: the column of the same run that differs only in how the KV cache moves.

        None for a topology that has no such column, and for the one that the others are held against: the first that
        was not asked for TCP.
        """
        if series.path is None:
            return None
        kin = [
            (one.path.fallback, number, one)
            for number, one in enumerate(self.series)
            if one.run is series.run
            and one.launch == 1
            and one.path is not None
            and one.path.layout == series.path.layout
        ]
        first = min(kin)[2] if kin else series
        return first if first.colour != series.colour else None


def build_grid(runs: Sequence[Run]) -> Grid:
    """Cross every series with every cell. Cells keep the order of their runs."""
    series = _series(runs)
    found: dict[tuple[int, str, int, str], CellOutcome | Hole] = {}
    cells: dict[str, None] = {}
    for number, run in enumerate(runs):
        for outcome in run.outcomes:
            cells.setdefault(outcome.result.cell)
            found[(number, outcome.topology, outcome.launch, outcome.result.cell)] = outcome
    for number, run in enumerate(runs):
        for hole in run.holes:
            cells.setdefault(hole.cell)
            found.setdefault((number, hole.topology, hole.launch, hole.cell), hole)
    place = {id(run): number for number, run in enumerate(runs)}
    rows = []
    for cell in cells:
        entries = tuple(
            (
                one,
                found.get(
                    (place[id(one.run)], one.topology, one.launch, cell),
                    Hole(one.topology, one.launch, cell, "not measured in this run"),
                ),
            )
            for one in series
        )
        rows.append(Row(cell, *shape_of(cell), entries))
    return Grid(tuple(runs), series, tuple(rows))


def _series(runs: Sequence[Run]) -> tuple[Series, ...]:
    columns: dict[tuple[int, str, int], str] = {}
    paths: dict[tuple[int, str, int], KvPath | None] = {}
    for number, run in enumerate(runs):
        for outcome in run.outcomes:
            column = (number, outcome.topology, outcome.launch)
            columns.setdefault(column, outcome.kind)
            paths[column] = paths.get(column) or read_kv_path(outcome.details)
    for number, run in enumerate(runs):
        for hole in run.holes:
            columns.setdefault((number, hole.topology, hole.launch), "")
    owners: dict[str, set[int]] = {}
    for number, topology, _ in columns:
        owners.setdefault(topology, set()).add(number)
    names = {
        (number, topology): name
        for topology, numbers in owners.items()
        for number, name in zip(sorted(numbers), told_apart([runs[n] for n in sorted(numbers)]), strict=True)
    }
    colours: dict[tuple[int, str], int] = {}
    found = []
    by_run = [[column for column in columns if column[0] == number] for number in range(len(runs))]
    for column in (one for those in by_run for one in kin_together(those, paths.get)):
        number, topology, launch = column
        colour = colours.setdefault((number, topology), len(colours))
        label = topology if len(owners[topology]) == 1 else f"{topology} ({names[number, topology]})"
        label += f" #{launch}" if launch != 1 else ""
        found.append(
            Series(runs[number], topology, launch, columns[column], label, colour, paths.get(column))
        )
    return tuple(found)


def shape_of(cell: str) -> tuple[str, int | None]:
    """(`512/256`, clients) of a cell of one shape; an empty text for any other cell."""
    match = _CELL.fullmatch(cell)
    if match is None:
        return "", None
    return f"{match['input']}/{match['output']}", int(match["clients"]) if match["clients"] else None


def metric_of(outcome: CellOutcome, metric: str) -> MetricValue | None:
    """The metric when it was measured, else None: a hole is never a number."""
    found = outcome.result.metrics.get(metric)
    return found if found is not None and found.value is not None else None


def usable(outcome: CellOutcome) -> bool:
    """Whether performance may be read from a cell."""
    return outcome.verdict not in USELESS and not outcome.result.invalid


def best_of(row: Row, metric: str) -> Series | None:
    """The series with the better value, None where fewer than two topologies or runs have one, or they are equal."""
    known = [
        (METRICS[metric].direction * value.value, series)
        for series, outcome in row.outcomes()
        if usable(outcome) and (value := metric_of(outcome, metric)) is not None and value.value is not None
    ]
    if len({series.colour for _, series in known}) < 2 or len({score for score, _ in known}) < 2:
        return None
    return min(known, key=lambda pair: pair[0])[1]


def worsening(metric: str, value: float, reference: float) -> float | None:
    """Relative change signed so that + is worse: 0.1 is 10 % slower, or 10 % less throughput. None without a ratio."""
    if reference <= 0 or value < 0:
        return None
    return METRICS[metric].direction * (value / reference - 1)


def throughput_metric(runs: Sequence[Run]) -> str:
    """The steady-window rate, or the rate over the wall time when a published table stands beside it."""
    return "output_tps_wall" if any(run.published for run in runs) else "output_tps"
