"""Foreign numbers beside those of a run, compared only where both mean the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.measure.table import METRICS
from pytest_pdperf.report.outcomes import CellOutcome

from .imported import ImportedMetric, ImportedResult

_CELL = re.compile(r"in(?P<input>\d+)-out(?P<output>\d+)-c(?P<clients>\d+)\Z")


@dataclass(frozen=True, slots=True)
class Compared:
    """Our number for one foreign metric in one of our cells."""

    value: float | None
    change: float | None
    """(theirs - ours) / ours, None where either is unknown."""


@dataclass(frozen=True, slots=True)
class BesideRow:
    """One foreign metric and ours of every matching cell."""

    metric: str
    theirs: ImportedMetric
    same: bool
    """True when it has our definition."""
    ours: tuple[Compared, ...]


def matching(result: ImportedResult, outcomes: Sequence[CellOutcome], cell: str | None) -> list[CellOutcome]:
    """Our cells of the same shape and concurrency, or those named `cell`.

    Raises UsageProblem, listing the cells there are, when none matches.
    """
    known = ", ".join(sorted({o.result.cell for o in outcomes})) or "none"
    if cell is not None:
        found = [o for o in outcomes if o.result.cell == cell]
        if not found:
            raise UsageProblem(f"--cell {cell!r}: the run has no such cell (there is: {known})")
        return found
    wanted = (result.input_tokens, result.output_tokens, result.concurrency)
    if None in wanted:
        raise UsageProblem(
            f"{result.source}: shape {result.shape} at concurrency {result.concurrency or '?'} is not whole: say which "
            f"cell to put beside it with --cell (there is: {known})"
        )
    found = [outcome for outcome in outcomes if same_load(result, outcome)]
    if not found:
        raise UsageProblem(
            f"{result.source}: the run has no cell of {result.shape} at concurrency {result.concurrency}; choose one "
            f"with --cell (there is: {known})"
        )
    return found


def same_load(result: ImportedResult, outcome: CellOutcome) -> bool:
    """True when the cell's id says the very shape and concurrency of the foreign benchmark."""
    match = _CELL.match(outcome.result.cell)
    wanted = (result.input_tokens, result.output_tokens, result.concurrency)
    return match is not None and tuple(float(match[g]) for g in ("input", "output", "clients")) == wanted


def rows(result: ImportedResult, outcomes: Sequence[CellOutcome] = ()) -> list[BesideRow]:
    """Every metric, those with our definition first and in our order."""
    order = {name: i for i, name in enumerate(METRICS)}
    names = sorted(result.metrics, key=lambda name: (order.get(name, len(order)), name.partition(":")[0]))
    return [_row(name, result.metrics[name], outcomes) for name in names]


def _row(name: str, theirs: ImportedMetric, outcomes: Sequence[CellOutcome]) -> BesideRow:
    same = name in METRICS
    if not same:
        return BesideRow(name, theirs, False, tuple(Compared(None, None) for _ in outcomes))
    return BesideRow(name, theirs, True, tuple(_compared(name, theirs, o) for o in outcomes))


def _compared(name: str, theirs: ImportedMetric, outcome: CellOutcome) -> Compared:
    found = outcome.result.metrics.get(name)
    value = found.value if found is not None else None
    if value is None or theirs.value is None or value == 0:
        return Compared(value, None)
    return Compared(value, (theirs.value - value) / value)
