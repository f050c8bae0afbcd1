"""Says outright where disaggregated serving wins against aggregated serving and where it loses, cell by cell."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_pdperf.measure.table import METRICS

from .claims import CLAIMED, effects_of, threshold
from .grid import Grid, Series, throughput_metric
from .section import Section

PD, AGGREGATED = "pd", "aggregated"


def contest(grid: Grid) -> Section | None:
    """Every PD topology against the aggregated one beside it; None where there are no two to compare.

    A win is a difference that `claims.threshold` calls one; what is named on neither side is alike or not measured.
    """
    lines: list[str] = []
    rows: list[tuple[str, ...]] = []
    for series in grid.series:
        reference = grid.control(series)
        if series.kind != PD or series.launch != 1 or reference is None or reference.kind != AGGREGATED:
            continue
        cells = _cells(grid, series, reference)
        lines += list(_sentences(cells, series, reference))
        rows += [
            (cell, series.label, reference.label, *(", ".join(side) or "–" for side in sides))
            for cell, sides in cells.items()
        ]
    if not rows:
        return None
    return Section(
        "Where PD wins and loses",
        tuple(lines),
        ("cell", "PD", "aggregated", "PD wins", "PD loses"),
        tuple(rows),
        "PD: prefill (reading the prompt) and decode (writing the answer) run on engines of their own. TTFT is the "
        "wait for the first token, TPOT the time of each further token, ITL p99 the gap between tokens that 1 in 100 "
        "exceeds. Percentages are PD's change; what stands on neither side differs by less than one launch can show.",
    )


def _cells(grid: Grid, series: Series, reference: Series) -> dict[str, tuple[list[str], list[str]]]:
    """Cell -> what PD wins there, and what it loses."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for name in (*CLAIMED, throughput_metric(grid.runs)):
        metric = METRICS[name]
        for effect in effects_of(grid, series, reference, metric)[0]:
            wins, loses = found.setdefault(effect.row.cell, ([], []))
            if abs(effect.change) > math.log1p(threshold(metric)):
                side = wins if effect.change < 0 else loses
                side.append(f"{metric.label} {effect.new / effect.old - 1:+.0%}")
    order = {row.cell: place for place, row in enumerate(grid.rows)}
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))


def _sentences(
    cells: dict[str, tuple[list[str], list[str]]], series: Series, reference: Series
) -> Iterator[str]:
    for side, verb in enumerate(("wins", "loses")):
        counts: dict[str, int] = {}
        for sides in cells.values():
            for text in sides[side]:
                counts[text.rpartition(" ")[0]] = counts.get(text.rpartition(" ")[0], 0) + 1
        of = f"{len(cells)} cell{'' if len(cells) == 1 else 's'}"
        what = ", ".join(f"{label} ({count} of {of})" for label, count in counts.items())
        if cells:
            yield f"{series.label} {verb} against {reference.label}: {what or 'nothing'}."
