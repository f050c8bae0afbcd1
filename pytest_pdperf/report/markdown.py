"""The report as text that goes into a repository, a wiki or a pull request: in the manner of a published benchmark."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_pdperf import __version__
from pytest_pdperf.gate.verdict import number
from pytest_pdperf.measure.table import METRICS
from pytest_pdperf.writing import whole

from .balance import balance
from .claims import CLAIMED, HEADINGS, Kind, claims_of
from .contest import contest
from .facts import fact_table
from .grid import Grid, Row, Series, best_of, build_grid, metric_of, throughput_metric
from .heat import SYMBOLS, meaning
from .knee import KNEE_DEFINITION, knee_of_series
from .outcomes import CellOutcome
from .section import Section
from .source import Hole, Run
from .sweep import SWEEP_DEFINITION, sweep_lines

_SPECIAL = re.compile(r"([\\`*_{}\[\]|#~@])")
_BLANK = re.compile(r"\s+")


def escape(text: str) -> str:
    """Text from outside for one table cell or sentence: no markup, no HTML, no line break."""
    plain = _BLANK.sub(" ", "".join(c if c.isprintable() or c.isspace() else "�" for c in text))
    return _SPECIAL.sub(r"\\\1", plain).replace("<", "&lt;").replace(">", "&gt;")


def write_markdown(runs: Sequence[Run], path: Path) -> Path:
    """Write the report. Raises OSError."""
    with whole(path) as part:
        part.write_text("\n".join(render(runs)) + "\n", encoding="utf-8", errors="replace")
    return path


def render(runs: Sequence[Run]) -> Iterator[str]:
    """The report line by line."""
    grid = build_grid(runs)
    yield f"# {' and '.join(escape(run.name) for run in runs)}"
    yield ""
    yield from _banner(runs)
    yield from verdict_lines(grid)
    yield from environment_lines(runs)
    yield from result_lines(grid)
    yield from section_lines(contest(grid))
    yield from section_lines(balance(grid))
    yield from swept_lines(grid)
    yield from claim_lines(grid)
    yield from missing_lines(grid)
    yield from definition_lines(grid)
    yield f"Made by pytest-pdperf {__version__}."


def _banner(runs: Sequence[Run]) -> Iterator[str]:
    if any(run.simulated for run in runs):
        yield "> **SIMULATED engines: no number of a simulated run is a measurement of any hardware.**"
        yield ""
    for run in runs:
        if run.published:
            yield f"{escape(run.name)}: published, {escape(run.title)}."
            yield ""


def verdict_lines(grid: Grid) -> Iterator[str]:
    """Cells per verdict, what the gate said of those that are no PASS, and what was noticed in others."""
    outcomes = [
        outcome for row in grid.rows for _, outcome in row.outcomes() if outcome.engine != "published"
    ]
    if not outcomes:
        return
    counts: dict[str, int] = {}
    for outcome in outcomes:
        counts[outcome.verdict] = counts.get(outcome.verdict, 0) + 1
    yield "## Verdicts"
    yield ""
    for verdict, count in counts.items():
        yield f"- {SYMBOLS.get(verdict, '·')} {escape(verdict) or 'not judged'}: {count} ({meaning(verdict)})"
    yield ""
    told = [o for o in outcomes if o.verdict not in ("", "NO_BASELINE") and (o.rows or o.result.invalid)]
    for outcome in told:
        yield f"{escape(outcome.topology)}, {escape(outcome.result.cell)}:"
        yield ""
        yield from _code(outcome.rows or outcome.result.invalid)
        yield ""


def _code(lines: Sequence[str]) -> Iterator[str]:
    """A code block: indented, so that no fence inside of it can end it."""
    for text in lines:
        for line in text.splitlines() or [""]:
            yield "    " + "".join(c if c.isprintable() else "�" for c in line)


def environment_lines(runs: Sequence[Run]) -> Iterator[str]:
    """What all launches share, then what they differ in."""
    table = fact_table(runs)
    if not table.columns:
        return
    yield "## Environment"
    yield ""
    common = table.common()
    if common:
        yield from _table(
            ("", "all launches" if len(table.columns) > 1 else table.columns[0]), list(common.items())
        )
    different = [(name, *(value or "–" for value in values)) for name, values in table.different()]
    if different:
        yield from _table(("", *table.columns), different)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, raw: bool = False) -> Iterator[str]:
    """A table; `raw` cells hold our own markup already."""
    clean = (lambda text: text) if raw else escape
    yield "| " + " | ".join(escape(text) for text in head) + " |"
    yield "|" + "|".join([" --- "] * len(head)) + "|"
    for row in rows:
        yield "| " + " | ".join(clean(text) for text in row) + " |"
    yield ""


def result_lines(grid: Grid, level: str = "##") -> Iterator[str]:
    """A table a shape: topologies side by side, the better value of each pair in bold."""
    metrics = [name for name in (*CLAIMED, throughput_metric(grid.runs)) if _measured(grid, name)]
    for shape, rows in grid.shapes().items():
        yield f"{level} {escape(shape) + ' tokens in/out' if shape else 'Other cells'}"
        yield ""
        head = [
            "concurrency" if shape else "cell",
            "topology",
            *(f"{METRICS[m].label} ({METRICS[m].unit})" for m in metrics),
            "ok/all",
            "evidence",
            "verdict",
        ]
        lines = [line for row in rows for line in _result_rows(row, metrics, shape)]
        yield from _table(head, lines, raw=True)
        yield from _knee_lines(grid, rows)


def _measured(grid: Grid, metric: str) -> bool:
    return any(metric_of(outcome, metric) is not None for row in grid.rows for _, outcome in row.outcomes())


def _result_rows(row: Row, metrics: Sequence[str], shape: str) -> Iterator[list[str]]:
    place = str(row.concurrency) if shape and row.concurrency else escape(row.cell)
    best = {metric: best_of(row, metric) for metric in metrics}
    for series, entry in row.entries:
        if isinstance(entry, Hole):
            if entry in series.run.holes:
                yield [
                    place,
                    escape(series.label),
                    *["–"] * len(metrics),
                    "–",
                    "–",
                    f"missing: {escape(entry.reason)}",
                ]
            continue
        values = [_value(entry, metric, best[metric] is series) for metric in metrics]
        evidence = (
            "–" if entry.evidence == "not_applicable" or series.run.published else escape(entry.evidence)
        )
        ok = f"{entry.result.ok}/{entry.result.requests}" if entry.result.requests else "–"
        yield [place, escape(series.label), *values, ok, evidence, escape(entry.verdict) or "–"]


def _value(outcome: CellOutcome, metric: str, best: bool) -> str:
    value = metric_of(outcome, metric)
    if value is None or value.value is None:
        return "–"
    shown = number(value.value)
    return f"**{shown}**" if best else shown


def _knee_lines(grid: Grid, rows: Sequence[Row]) -> Iterator[str]:
    """The knee of each topology, where it was found."""
    rate = throughput_metric(grid.runs)
    found: list[tuple[Series, str]] = []
    for series in grid.series:
        knee = knee_of_series(rows, series, rate)
        if knee.concurrency is not None:
            found.append((series, knee.words))
    if found:
        yield f"Knee: {'; '.join(f'{escape(series.label)} {words}' for series, words in found)}."
        yield ""


def section_lines(section: Section | None) -> Iterator[str]:
    """One of the parts that all formats share."""
    if section is None:
        return
    yield f"## {escape(section.title)}"
    yield ""
    yield from (f"- {escape(text)}" for text in section.lines)
    yield ""
    yield from _table(section.head, section.rows)
    yield escape(section.note)
    yield ""


def swept_lines(grid: Grid) -> Iterator[str]:
    """Where goodput under the SLO peaks, and where PD is ahead of aggregated serving."""
    found = [line for run in grid.runs for line in sweep_lines(run.outcomes)]
    if found:
        yield "## Goodput over concurrency"
        yield ""
        yield from (f"- {escape(line)}" for line in found)
        yield ""
        yield f"Peak: {escape(SWEEP_DEFINITION)}."
        yield ""


def claim_lines(grid: Grid) -> Iterator[str]:
    """Benefits, trade-offs and limitations, each where the data supports it."""
    claims = claims_of(grid)
    for kind in Kind:
        texts = [claim.text for claim in claims if claim.kind is kind]
        if texts:
            yield f"## {HEADINGS[kind]}"
            yield ""
            yield from (f"- {escape(text)}" for text in texts)
            yield ""


def missing_lines(grid: Grid) -> Iterator[str]:
    """What should be here and is not."""
    lines = [f"- {escape(run.name)}: {escape(problem)}" for run in grid.runs for problem in run.problems]
    lines += [
        f"- {escape(hole.topology)} {escape(hole.cell)}: {escape(hole.reason)}"
        for run in grid.runs
        for hole in run.holes
    ]
    if lines:
        yield "## Missing and warnings"
        yield ""
        yield from lines
        yield ""


def definition_lines(grid: Grid) -> Iterator[str]:
    """Definitions of the numbers above."""
    names = [name for name in (*CLAIMED, throughput_metric(grid.runs)) if _measured(grid, name)]
    if not names:
        return
    yield "## Definitions"
    yield ""
    for name in names:
        metric = METRICS[name]
        yield f"- {metric.label}, {metric.unit}: {escape(metric.definition)}"
    yield f"- Knee: {escape(KNEE_DEFINITION.partition(';')[0])}"
    yield ""
