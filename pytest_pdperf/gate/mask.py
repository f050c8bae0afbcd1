"""A fast night hides a loss: series that stand out from their session although each is within its own
limit.

When the machine as a whole is 2 % faster than when the baseline was made, a cell that lost 5 % seems to
have lost 3 %. With a reference build at hand a suspicion costs launches and never a false FAIL, so such
series are looked at as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median

from .verdict import CellVerdict, Verdict, VerdictRow, worst

MIN_SERIES = 12
"""Fewest compared series whose median is taken for the state of the machine."""


def score_difference(relative: float, direction: int) -> float:
    """Inverse of `relative_worsening`: a change that people quote as a difference of scores."""
    return math.log1p(relative) if direction == 1 else -math.log1p(-relative)


def session_offset(rows: Iterable[VerdictRow]) -> float | None:
    """How far the session as a whole stands from its baselines (median score difference, + is slower).

    None with fewer than `MIN_SERIES` compared series: a few could all have changed.
    """
    differences = [
        score_difference(row.change, row.direction)
        for row in rows
        if _compared(row) and row.change is not None
    ]
    return median(differences) if len(differences) >= MIN_SERIES else None


def unmask(cells: Mapping[str, CellVerdict]) -> dict[str, CellVerdict]:
    """Turn series that a fast night hides into suspects; for sessions that can confirm with a reference
    build only.

    Nothing changes on a night that is as slow as the baseline or slower: there nothing is hidden.
    """
    offset = session_offset(row for verdict in cells.values() for row in verdict.rows)
    if offset is None or offset >= 0:
        return dict(cells)
    found = {}
    for cell, verdict in cells.items():
        rows = tuple(_unmasked(row, offset) for row in verdict.rows)
        found[cell] = CellVerdict(rows, worst([row.verdict for row in rows]))
    return found


def _compared(row: VerdictRow) -> bool:
    return row.verdict in (Verdict.PASS, Verdict.NOISY, Verdict.IMPROVED, Verdict.SUSPECT)


def _unmasked(row: VerdictRow, offset: float) -> VerdictRow:
    if row.verdict not in (Verdict.PASS, Verdict.NOISY) or row.change is None or row.limit is None:
        return row
    difference = score_difference(row.change, row.direction)
    if difference - offset <= score_difference(row.limit, row.direction):
        return row
    note = f"hidden by a night that is {-math.expm1(offset):.1%} faster than its baselines"
    return replace(row, verdict=Verdict.SUSPECT, note=note)
