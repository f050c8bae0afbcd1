"""The comparison table of `pdperf report`: any number of runs side by side, in a terminal."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pytest_pdperf.measure.table import METRICS

from .claims import CLAIMED
from .grid import Grid, best_of, metric_of, throughput_metric
from .heat import SYMBOLS, shown
from .outcomes import CellOutcome
from .source import Hole
from .terminal import VERDICT_STYLE


def comparison_table(grid: Grid, *, colour: bool) -> Table:
    """Cells by series; the better value of each cell is bold, or marked with * where there is no colour."""
    metrics = (*CLAIMED, throughput_metric(grid.runs))
    simulated = any(run.simulated for run in grid.runs)
    table = Table(
        box=None,
        pad_edge=False,
        title="SIMULATED engines: not a measurement of any hardware" if simulated else None,
        caption=f"better of each cell: {'bold' if colour else '*'}",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("cell", no_wrap=True)
    table.add_column("topology", no_wrap=True)
    for name in metrics:
        table.add_column(
            f"{METRICS[name].label.replace(' throughput', '')}\n{METRICS[name].unit}", justify="right"
        )
    for label in ("ok/all", "evidence", "verdict"):
        table.add_column(label, no_wrap=True, justify="right" if label == "ok/all" else "left")
    for row in grid.rows:
        best = {name: best_of(row, name) for name in metrics}
        first = True
        for series, entry in row.entries:
            if isinstance(entry, Hole) and entry not in series.run.holes:
                continue
            cell = escape(row.cell) if first else ""
            first = False
            if isinstance(entry, Hole):
                blanks = [""] * (len(metrics) + 2)
                table.add_row(
                    cell, escape(series.label), *blanks, Text(f"missing: {entry.reason}", style="yellow")
                )
                continue
            values = [_value(entry, name, best[name] is series, colour) for name in metrics]
            table.add_row(cell, escape(series.label), *values, *_status(entry))
    return table


def _value(outcome: CellOutcome, metric: str, best: bool, colour: bool) -> Text:
    value = metric_of(outcome, metric)
    if value is None:
        return Text("-")
    text = shown(value) + ("*" if best and not colour else "")
    return Text(text, style="bold" if best else "")


def _status(outcome: CellOutcome) -> tuple[Text, Text, Text]:
    done = f"{outcome.result.ok}/{outcome.result.requests}" if outcome.result.requests else "-"
    applies = outcome.evidence != "not_applicable" and outcome.engine != "published"
    verdict = f"{SYMBOLS.get(outcome.verdict, '?')} {outcome.verdict}" if outcome.verdict else "-"
    return (
        Text(done),
        Text(outcome.evidence if applies else "-"),
        Text(verdict, style=VERDICT_STYLE.get(outcome.verdict, "")),
    )
