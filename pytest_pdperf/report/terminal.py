"""The table people look for at the end of a run: PD beside aggregated, the better value of each pair in bold."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pytest_pdperf.measure.cell_result import MetricValue
from pytest_pdperf.measure.table import METRICS

from .grid import metric_of, usable
from .outcomes import CellOutcome, RunSummary, cells_of
from .sweep import sweep_lines

COLUMNS: tuple[tuple[str, str], ...] = (
    ("ttft_ms_p50", "TTFT p50"),
    ("ttft_ms_p95", "TTFT p95"),
    ("tpot_ms_p50", "TPOT p50"),
    ("itl_ms_p99", "ITL p99"),
    ("output_tps", "output"),
)
"""Metrics of the published benchmark, in its order: milliseconds, then tokens a second."""

MIN_WIDTH = 120
"""Columns of the table where the terminal is narrower or unknown: a wrapped table cannot be read."""

EVIDENCE_SHOWN = {"not_applicable": "-"}
"""Aggregated cells have no path to prove."""

VERDICT_STYLE = {
    "PASS": "green",
    "IMPROVED": "cyan",
    "FAIL": "bold red",
    "INVALID": "bold red",
    "NOISY": "yellow",
}


def write_summary(reporter: Any, summary: RunSummary) -> None:
    """Print tables, verdict rows and baseline changes through pytest's terminal reporter."""
    if not summary.outcomes and not summary.changes and not summary.launches:
        return
    title = "PD performance" + (
        " (SIMULATED engines: not a measurement of any hardware)" if summary.simulated else ""
    )
    reporter.write_sep("=", title)
    quiet = reporter.verbosity < 0
    if summary.outcomes:
        width = max(reporter._tw.fullwidth, MIN_WIDTH)
        reporter.write_line(render_table(summary.outcomes, width=width, colour=reporter._tw.hasmarkup))
    for line in sweep_lines(summary.outcomes):
        reporter.write_line(f"sweep: {line}")
    if not quiet:
        for line in summary.launches:
            reporter.write_line(line)
    _write_verdict_rows(reporter, summary.outcomes)
    for line in summary.changes:
        reporter.write_line(f"baseline: {line}")
    for line in summary.problems:
        reporter.write_line(f"warning: {line}", yellow=True)
    counts = ", ".join(f"{number} {verdict}" for verdict, number in summary.counts().items())
    reporter.write_line(f"verdicts: {counts or 'none'}; records and logs: {summary.folder}")


def _write_verdict_rows(reporter: Any, outcomes: Sequence[CellOutcome]) -> None:
    """One line a row that is no PASS; cells that merely lack a baseline share one."""
    missing = [outcome for outcome in outcomes if outcome.verdict == "NO_BASELINE"]
    for outcome in outcomes:
        if outcome not in missing:
            for row in outcome.rows:
                reporter.write_line(f"{outcome.topology}-{outcome.result.cell}: {row}")
    if missing:
        first = missing[0]
        others = f" and {len(missing) - 1} more cells" if len(missing) > 1 else ""
        why = first.rows[0] if first.rows else "nothing was compared"
        reporter.write_line(f"{first.topology}-{first.result.cell}{others}: {why}")


def render_table(outcomes: Sequence[CellOutcome], *, width: int = MIN_WIDTH, colour: bool = False) -> str:
    """The comparison table as text. Better values are bold, or marked with * where there is no colour."""
    table = Table(box=None, pad_edge=False, header_style="", show_edge=False)
    table.add_column("cell", no_wrap=True)
    table.add_column("topology", no_wrap=True)
    for metric, label in COLUMNS:
        table.add_column(f"{label}\n{METRICS[metric].unit}", justify="right")
    table.add_column("ok/all", justify="right")
    table.add_column("evidence", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for cell, group in cells_of(outcomes).items():
        best = {metric: _best(group, metric) for metric, _ in COLUMNS}
        for number, outcome in enumerate(group):
            values = [
                _shown(outcome.result.metrics.get(metric), outcome is best[metric], colour)
                for metric, _ in COLUMNS
            ]
            name = outcome.topology if outcome.launch == 1 else f"{outcome.topology} #{outcome.launch}"
            table.add_row(
                cell if number == 0 else "",
                name,
                *values,
                f"{outcome.result.ok}/{outcome.result.requests}",
                EVIDENCE_SHOWN.get(outcome.evidence, outcome.evidence),
                Text(outcome.verdict or "-", style=VERDICT_STYLE.get(outcome.verdict, "")),
            )
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=colour, color_system="standard" if colour else None).print(
        table
    )
    note = (
        "better of each group: "
        + ("bold" if colour else "*")
        + "; ms are milliseconds, output is tokens a second"
    )
    return out.getvalue().rstrip("\n") + "\n" + note


def _best(group: Sequence[CellOutcome], metric: str) -> CellOutcome | None:
    """The outcome with the better value, None when there is nothing to compare or they are equal."""
    known = [
        (METRICS[metric].direction * value.value, outcome)
        for outcome in group
        if usable(outcome) and (value := metric_of(outcome, metric)) is not None and value.value is not None
    ]
    if len({outcome.topology for _, outcome in known}) < 2 or len({score for score, _ in known}) < 2:
        return None
    return min(known, key=lambda pair: pair[0])[1]


def _shown(value: MetricValue | None, best: bool, colour: bool) -> Text:
    if value is None or value.value is None:
        return Text("-")
    text = f"{value.value:.1f}" if abs(value.value) < 1000 else f"{value.value:,.0f}"
    if best and not colour:
        text += "*"
    return Text(text, style="bold" if best else "")
