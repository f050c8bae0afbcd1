"""Colours of the overview: how far each number is from its baseline, or from the topology it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_pdperf.gate.verdict import VERDICTS, Verdict, VerdictRow, number
from pytest_pdperf.measure.cell_result import MetricValue
from pytest_pdperf.measure.table import METRICS, Metric

from .claims import threshold
from .grid import Grid, Row, Series, metric_of, throughput_metric, usable, worsening
from .outcomes import CellOutcome
from .source import Hole

SYMBOLS = {
    "PASS": "✓",
    "IMPROVED": "▲",
    "NOISY": "≈",
    "NO_BASELINE": "○",
    "INCONCLUSIVE": "?",
    "SUSPECT": "!",
    "FAIL": "✕",
    "INVALID": "⊘",
    "": "·",
}
"""A sign for every verdict, so that colour is never the only one who says it."""

RED = frozenset({Verdict.FAIL, Verdict.INVALID, Verdict.SUSPECT})


@dataclass(frozen=True, slots=True)
class Tile:
    """One square of the heat map."""

    text: str
    change: str
    tone: str
    """`worse1`..`worse3`, `better1`..`better3`, `flat`, `plain` (nothing to compare), `noisy` or `void`."""
    tip: str


def columns_of(grid: Grid) -> list[Metric]:
    """Gated metrics that at least one cell has, in the order of the metric table."""
    rate = throughput_metric(grid.runs)
    wanted = [name for name, row in METRICS.items() if row.gated and name != "output_tps"] + [rate]
    present = {
        name
        for row in grid.rows
        for _, outcome in row.outcomes()
        for name in wanted
        if metric_of(outcome, name) is not None
    }
    return [METRICS[name] for name in wanted if name in present]


def against_baseline(outcome: CellOutcome, metric: Metric) -> Tile:
    """A number and how far it lies from its baseline, in units of its limit."""
    value = outcome.result.metrics.get(metric.id)
    row = next((r for r in outcome.judged if r.metric == metric.id), None)
    if value is None or value.value is None:
        return _void(value, metric)
    if row is None or row.change is None:
        note = row.line() if row is not None else "the gate's comparison is not in this run's files"
        return Tile(shown(value), "", "plain", f"{tip(metric, value)}\n{note}")
    return Tile(shown(value), signed(row), _judged_tone(row), f"{tip(metric, value)}\n{row.line()}")


def against_reference(grid: Grid, row: Row, series: Series, outcome: CellOutcome, metric: Metric) -> Tile:
    """A number and how far it lies from the same cell of the column that this one is compared with."""
    value = outcome.result.metrics.get(metric.id)
    if value is None or value.value is None:
        return _void(value, metric)
    reference = grid.reference(series)
    other = next((o for s, o in row.outcomes() if s is reference), None) if reference is not None else None
    old = metric_of(other, metric.id) if other is not None and usable(other) else None
    if reference is None or old is None or old.value is None or not usable(outcome):
        why = "others are held against this column" if reference is None else f"no value on {reference.label}"
        if not usable(outcome):
            why = "invalid: no performance is read from this cell"
        return Tile(shown(value), "", "plain", f"{tip(metric, value)}\n{why}")
    change = worsening(metric.id, value.value, old.value)
    if change is None:
        return Tile(shown(value), "", "plain", tip(metric, value))
    words = f"{reference.label}: {number(old.value)} {metric.unit} (n={old.n or 'not said'})"
    unit = threshold(metric)
    return Tile(
        shown(value),
        _percent(change * metric.direction),
        _tone(change, (unit, 3 * unit, 10 * unit)),
        f"{tip(metric, value)}\n{words}\ndifferences below {unit:.0%} are left uncoloured",
    )


def _judged_tone(row: VerdictRow) -> str:
    if row.verdict in RED:
        return "worse3"
    if row.verdict is Verdict.IMPROVED:
        return "better3"
    if row.verdict is Verdict.NOISY:
        return "noisy"
    assert row.change is not None
    limit = row.limit or threshold(METRICS.get(row.metric, METRICS["e2e_ms_p50"]))
    return _tone(row.change, (0.5 * limit, limit, 2 * limit))


def _tone(change: float, steps: Sequence[float]) -> str:
    strength = sum(abs(change) > step for step in steps)
    return f"{'worse' if change > 0 else 'better'}{strength}" if strength else "flat"


def _void(value: MetricValue | None, metric: Metric) -> Tile:
    why = (value.note if value is not None else "") or "not measured"
    return Tile("–", "", "void", f"{metric.label}: {why}\n{metric.definition}")


def shown(value: MetricValue) -> str:
    """The number in as few characters as it needs; a dash when there is none."""
    if value.value is None:
        return "–"
    size = abs(value.value)
    return (
        f"{value.value:,.0f}"
        if size >= 1000
        else f"{value.value:.3g}"
        if size < 100
        else f"{value.value:.0f}"
    )


def signed(row: VerdictRow) -> str:
    """Change of a judged row as it reads: +12 % of a latency is slower, of a throughput faster."""
    assert row.change is not None
    return _percent(row.change * row.direction)


def _percent(change: float) -> str:
    """Whole percent with its sign; no sign for what rounds to nothing."""
    text = f"{change:+.0%}"
    return "0%" if text in ("+0%", "-0%") else text


def tip(metric: Metric, value: MetricValue) -> str:
    """Value, unit, sample count and definition of a number."""
    amount = f"{number(value.value)} {metric.unit}" if value.value is not None else "not measured"
    better = "lower is better" if metric.direction > 0 else "higher is better"
    note = f"\n{value.note}" if value.note else ""
    return f"{metric.label}: {amount} (n={value.n or 'not said'}, {better})\n{metric.definition}{note}"


def hole_tip(hole: Hole) -> str:
    """Why a crossing is empty."""
    return f"{hole.topology} {hole.cell}: {hole.reason}"


def meaning(verdict: str) -> str:
    """What a verdict says, from the verdict table."""
    return VERDICTS[Verdict(verdict)].meaning if verdict in set(Verdict) else "not judged"
