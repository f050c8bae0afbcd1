"""The page that people look at after a run: one file, no network, every number with unit, count and definition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from pytest_pdperf import __version__
from pytest_pdperf.gate.verdict import VERDICTS
from pytest_pdperf.measure.table import METRICS
from pytest_pdperf.writing import whole

from .balance import balance
from .cell_view import cell_views, curve_of
from .charts import COLOURS, Curve, Figure, Point, over_concurrency
from .claims import HEADINGS, Claim, Kind, claims_of
from .contest import contest
from .facts import commands_of, fact_table, settings_of
from .grid import Grid, Row, Series, build_grid, metric_of, throughput_metric, usable
from .heat import SYMBOLS, Tile, against_baseline, against_reference, columns_of, hole_tip, meaning, tip
from .knee import KNEE_DEFINITION, Knee, knee_of_series
from .outcomes import CellOutcome
from .source import Hole, Run
from .sweep import SWEEP_DEFINITION, sweep_lines

CONTROL = {
    **{code: "�" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"},
    **{code: f"[U+{code:04X}]" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))},
}
"""Characters that HTML forbids, and marks that turn the direction of text around: shown, never obeyed."""


@dataclass(frozen=True, slots=True)
class HeatRow:
    """One line of the overview."""

    cell: str
    number: int
    first: bool
    """Whether the cell's name stands here: it does so once for all its series."""
    span: int
    series: Series
    outcome: CellOutcome | None
    hole: Hole | None
    baseline: tuple[Tile, ...]
    reference: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class ShapeView:
    """Charts over concurrency of one shape."""

    shape: str
    charts: tuple[Figure, ...]
    knees: tuple[tuple[Curve, Knee], ...]


def write_html(runs: Sequence[Run], path: Path) -> Path:
    """Write the report of one run, or the comparison of several, piece by piece. Raises OSError."""
    with whole(path) as part, part.open("w", encoding="utf-8", errors="replace") as file:
        for piece in render(runs):
            file.write(piece.translate(CONTROL))
    return path


def render(runs: Sequence[Run]) -> Iterator[str]:
    """The page in pieces, in order."""
    grid = build_grid(runs)
    columns = columns_of(grid)
    counts: dict[str, int] = {}
    outcomes = [outcome for row in grid.rows for _, outcome in row.outcomes()]
    for outcome in outcomes:
        counts[outcome.verdict] = counts.get(outcome.verdict, 0) + 1
    environment = _templates()
    yield from environment.get_template("report.html.j2").generate(
        runs=runs,
        title=" and ".join(run.name for run in runs),
        version=__version__,
        simulated=any(run.simulated for run in runs),
        grid=grid,
        columns=columns,
        judged=any(row.change is not None for outcome in outcomes for row in outcome.judged),
        comparable=any(grid.reference(series) for series in grid.series),
        heat=list(heat_rows(grid)) if outcomes or any(run.holes for run in runs) else [],
        counts=counts,
        requests=sum(outcome.result.requests for outcome in outcomes),
        ok=sum(outcome.result.ok for outcome in outcomes),
        sections=[section for section in (contest(grid), balance(grid)) if section is not None],
        claims=by_kind(claims_of(grid)),
        shapes=[view for shape, rows in grid.shapes().items() if shape and (view := shape_view(grid, rows))],
        sweep=[line for run in grid.runs for line in sweep_lines(run.outcomes)],
        cells=cell_views(grid),
        facts=fact_table(runs),
        commands=[pair for run in runs for pair in commands_of(run)],
        settings=[pair for run in runs for pair in settings_of(run)],
        metrics=METRICS.values(),
        verdicts=VERDICTS.items(),
    )


def by_kind(claims: Sequence[Claim]) -> list[tuple[str, list[str]]]:
    """Sentences under their headings, in the order of the kinds."""
    groups = [(HEADINGS[kind], [claim.text for claim in claims if claim.kind is kind]) for kind in Kind]
    return [(heading, texts) for heading, texts in groups if texts]


def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pytest_pdperf.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        knee_definition=KNEE_DEFINITION,
        sweep_definition=SWEEP_DEFINITION,
        symbol=lambda verdict: SYMBOLS.get(verdict, "·"),
        meaning=meaning,
        hole_tip=hole_tip,
        curve=curve_of,
        colours=COLOURS,
    )
    return environment


def heat_rows(grid: Grid) -> Iterator[HeatRow]:
    """One line for each crossing of cell and series; series that have nothing to do with a cell are left out."""
    columns = columns_of(grid)
    for number, row in enumerate(grid.rows):
        shown = [(s, e) for s, e in row.entries if isinstance(e, CellOutcome) or _is_told(s, e)]
        for position, (series, entry) in enumerate(shown):
            outcome = entry if isinstance(entry, CellOutcome) else None
            yield HeatRow(
                cell=row.cell,
                number=number,
                first=position == 0,
                span=len(shown),
                series=series,
                outcome=outcome,
                hole=entry if isinstance(entry, Hole) else None,
                baseline=tuple(against_baseline(outcome, m) for m in columns) if outcome else (),
                reference=tuple(against_reference(grid, row, series, outcome, m) for m in columns)
                if outcome
                else (),
            )


def _is_told(series: Series, hole: Hole) -> bool:
    """Whether a hole is worth a line: always within a run, not for cells that a published table never had."""
    return not series.run.published or hole in series.run.holes


def shape_view(grid: Grid, rows: Sequence[Row]) -> ShapeView | None:
    """Throughput and latency of one shape over concurrency; None for a single concurrency."""
    if len({row.concurrency for row in rows if row.concurrency}) < 2:
        return None
    rate = throughput_metric(grid.runs)
    present = [
        series for series in grid.series if any(series is s for row in rows for s, _ in row.outcomes())
    ]
    knees = [(curve_of(series), knee_of_series(rows, series, rate)) for series in present]
    marks = {
        label: knee.concurrency
        for curve, knee in knees
        if knee.concurrency is not None
        for label in (curve.label, f"{curve.label} p50")
    }
    charts = (
        _figure(rows, present, (rate,), "output throughput", "tok/s", marks),
        _figure(rows, present, ("ttft_ms_p50", "ttft_ms_p95"), "TTFT", "ms", marks),
        _figure(rows, present, ("tpot_ms_p50",), "TPOT p50", "ms", marks),
        _figure(rows, present, ("itl_ms_p99",), "ITL p99", "ms", marks),
    )
    return ShapeView(rows[0].shape, charts, tuple(knees))


def _figure(
    rows: Sequence[Row],
    present: Sequence[Series],
    metrics: Sequence[str],
    what: str,
    unit: str,
    knees: Mapping[str, float],
) -> Figure:
    curves = []
    for series in present:
        for position, metric in enumerate(metrics):
            suffix = "" if len(metrics) == 1 else METRICS[metric].label.rpartition(" ")[2]
            curves.append((curve_of(series, position, suffix), _points(rows, series, metric)))
    caption = "" if len(metrics) == 1 else "solid p50, dashed p95"
    title = f"{what[:1].upper()}{what[1:]}, {unit}"
    return Figure(title, over_concurrency(curves, what, knees), caption)


def _points(rows: Sequence[Row], series: Series, metric: str) -> list[Point]:
    points = []
    for row in rows:
        for one, outcome in row.outcomes():
            if one is not series or row.concurrency is None or not usable(outcome):
                continue
            value = metric_of(outcome, metric)
            if value is not None and value.value is not None:
                words = f"{series.label} at concurrency {row.concurrency}\n{tip(METRICS[metric], value)}"
                points.append(Point(float(row.concurrency), value.value, words))
    return points
