"""Sentences that the data supports, and no others: benefits, trade-offs and limitations of what was measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from pytest_pdperf.evidence.environment import Environment, compare_environments
from pytest_pdperf.gate.verdict import number
from pytest_pdperf.measure.cell_result import MetricValue
from pytest_pdperf.measure.table import HIGHER, METRICS, Metric

from .grid import Grid, Row, Series, metric_of, throughput_metric, usable
from .outcomes import CellOutcome
from .source import Run

CLAIMED = ("ttft_ms_p50", "ttft_ms_p95", "tpot_ms_p50", "itl_ms_p99")
"""Metrics that sentences are made of, with the throughput of the report."""


class Kind(StrEnum):
    """What a sentence speaks for."""

    BENEFIT = "benefit"
    TRADE_OFF = "trade-off"
    ALIKE = "no difference"
    LIMITATION = "limitation"


HEADINGS = {
    Kind.BENEFIT: "Benefits",
    Kind.TRADE_OFF: "Trade-offs",
    Kind.ALIKE: "No difference",
    Kind.LIMITATION: "Limitations",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Effect:
    """A metric of one cell on both sides."""

    row: Row
    old: float
    new: float
    change: float
    """Logarithm of the ratio, + is worse."""


def threshold(metric: Metric) -> float:
    """Smallest relative difference of two launches that a sentence is made of.

    The metric's tolerance, or two standard deviations of the difference of two launches (2 * sqrt(2) * prior_sd)
    where that is more: a smaller one may be noise.
    """
    return max(metric.tau or 0.05, 2 * math.sqrt(2) * metric.prior_sd)


def claims_of(grid: Grid) -> list[Claim]:
    """All sentences, benefits first."""
    claims = []
    for series in grid.series:
        beside = {
            id(one): one for one in (grid.reference(series), grid.other_path(series)) if one is not None
        }
        for reference in beside.values() if series.launch == 1 else ():
            for metric in (*CLAIMED, throughput_metric(grid.runs)):
                claims += _compared(grid, series, reference, METRICS[metric])
    order = list(Kind)
    return sorted(claims, key=lambda claim: order.index(claim.kind)) + _limitations(grid)


def _compared(grid: Grid, series: Series, reference: Series, metric: Metric) -> list[Claim]:
    effects, left_out = effects_of(grid, series, reference, metric)
    if not effects:
        return []
    limit = math.log1p(threshold(metric))
    better = [effect for effect in effects if effect.change < -limit]
    worse = [effect for effect in effects if effect.change > limit]
    told = f"{_cells(len(effects))}" + (f" ({left_out} with {_fault(metric)} left out)" if left_out else "")
    if not better and not worse:
        return [
            Claim(
                Kind.ALIKE,
                f"{metric.label}: {series.label} and {reference.label} differ by no more than {threshold(metric):.0%} "
                f"in {'all ' if len(effects) > 1 else ''}{told}.",
            )
        ]
    claims = []
    for kind, group in ((Kind.BENEFIT, better), (Kind.TRADE_OFF, worse)):
        if group:
            claims.append(Claim(kind, _sentence(kind, group, told, series, reference, metric)))
    return claims


def effects_of(grid: Grid, series: Series, reference: Series, metric: Metric) -> tuple[list[Effect], int]:
    """The metric on both sides of every cell that has it on both, and in how many it may not be used."""
    effects, left_out = [], 0
    for row in grid.rows:
        by_series = {id(one): outcome for one, outcome in row.outcomes() if usable(outcome)}
        new, old = by_series.get(id(series)), by_series.get(id(reference))
        if new is None or old is None:
            continue
        a, b = metric_of(old, metric.id), metric_of(new, metric.id)
        if a is None or b is None or not a.value or not b.value or a.value < 0 or b.value < 0:
            continue
        if any(0 < found.n < metric.min_n or _moved(metric, found) for found in (a, b)):
            left_out += 1
            continue
        effects.append(Effect(row, a.value, b.value, metric.direction * math.log(b.value / a.value)))
    return effects, left_out


def _moved(metric: Metric, value: MetricValue) -> bool:
    """A wall-time rate with a note was moved by one straggler: it says nothing about the rest."""
    return metric.id.endswith("_wall") and bool(value.note)


def _cells(count: int, what: str = "") -> str:
    return f"{count} {what}cell{'' if count == 1 else 's'}"


def _fault(metric: Metric) -> str:
    return "a straggler" if metric.id.endswith("_wall") else "too few samples"


def _sentence(
    kind: Kind, group: Sequence[Effect], told: str, series: Series, reference: Series, metric: Metric
) -> str:
    higher = (kind is Kind.BENEFIT) == (metric.direction == HIGHER)
    sizes = [abs(math.expm1(math.log(e.new / e.old))) for e in group]
    most = max(group, key=lambda e: abs(e.change))
    middle = "" if len(group) == 1 else f", by {median(sizes):.0%} in the middle and most"
    place = f"at {most.row.cell}: {number(most.old)} -> {number(most.new)} {metric.unit}"
    return (
        f"{metric.label} is {'higher' if higher else 'lower'} on {series.label} than on {reference.label} in "
        f"{len(group)} of {told}{middle} {place} ({most.new / most.old - 1:+.0%})."
    )


def _limitations(grid: Grid) -> list[Claim]:
    outcomes = [(series, outcome) for row in grid.rows for series, outcome in row.outcomes()]
    sentences = [
        *_simulated(grid.runs),
        *_few_launches(grid),
        *_verdicts([outcome for _, outcome in outcomes]),
        *_thin_tails([outcome for _, outcome in outcomes]),
        *_unproven([outcome for series, outcome in outcomes if not series.run.published]),
        *_holes(grid),
        *_mixtures(grid),
    ]
    return [Claim(Kind.LIMITATION, sentence) for sentence in sentences]


def _simulated(runs: Sequence[Run]) -> list[str]:
    names = [run.name for run in runs if run.simulated]
    return (
        [f"Simulated engines: no number of {', '.join(names)} is a measurement of any hardware."]
        if names
        else []
    )


def _few_launches(grid: Grid) -> list[str]:
    counts = Counter(series.colour for series in grid.series if not series.run.published)
    if not counts or min(counts.values()) > 1:
        return []
    return [
        "One launch of a topology stands behind its numbers: how much launches differ was not measured, and "
        "differences below the thresholds named here are not called differences."
    ]


def _verdicts(outcomes: Sequence[CellOutcome]) -> list[str]:
    counts = Counter(outcome.verdict for outcome in outcomes)
    found = []
    if invalid := [o for o in outcomes if not usable(o)]:
        names = ", ".join(f"{o.topology} {o.result.cell}" for o in invalid[:4])
        more = f" and {len(invalid) - 4} more" if len(invalid) > 4 else ""
        found.append(f"No performance is read from {_cells(len(invalid), 'invalid ')}: {names}{more}.")
    if counts["NOISY"]:
        found.append(f"Too noisy to prove anything: {_cells(counts['NOISY'])}.")
    if counts["NO_BASELINE"]:
        found.append(f"No baseline, so held against nothing: {_cells(counts['NO_BASELINE'])}.")
    return found


def _thin_tails(outcomes: Sequence[CellOutcome]) -> list[str]:
    found = []
    for name in ("ttft_ms_p95", "itl_ms_p99"):
        metric = METRICS[name]
        known = [v for o in outcomes if (v := metric_of(o, name)) is not None and v.n > 0]
        few = [v for v in known if v.n < metric.min_n]
        if few:
            found.append(
                f"{metric.label} rests on fewer than {metric.min_n} samples in {len(few)} of {_cells(len(known))} and "
                "is interpolated towards the maximum there."
            )
    return found


def _unproven(outcomes: Sequence[CellOutcome]) -> list[str]:
    bad = Counter(o.evidence for o in outcomes if o.kind == "pd" and o.evidence != "proven")
    return [f"Disaggregation is {status} in {_cells(count, 'PD ')}." for status, count in bad.items()]


def _holes(grid: Grid) -> list[str]:
    holes = [hole for run in grid.runs for hole in run.holes]
    if not holes:
        return []
    return [f"Missing or unreadable: {_cells(len(holes))}; their places say why."]


def _mixtures(grid: Grid) -> list[str]:
    """Why columns of one report may not be the same measurement."""
    found = []
    for run in grid.runs:
        if run.published:
            found.append(
                f"{run.name} is published, not measured here ({run.title}): client, warm-up and evidence are its "
                "publisher's, throughput is over the whole wall time."
            )
    loads = {(o.result.workload) for r in grid.rows for s, o in r.outcomes() if not s.run.published}
    if len(loads) > 1:
        found.append(f"Cells of the same name come from different workloads: {', '.join(sorted(loads))}.")
    return found + _incomparable([run for run in grid.runs if run.environments])


def _incomparable(runs: Sequence[Run]) -> list[str]:
    records = []
    for run in runs:
        try:
            records.append((run.name, Environment.from_json(next(iter(run.environments.values())))))
        except ValueError:
            continue
    found = []
    for (first, old), (name, new) in zip(records[:1] * len(records[1:]), records[1:], strict=True):
        compared = compare_environments(old, new)
        if compared.blocking:
            found.append(f"{first} and {name} are not comparable: {'; '.join(compared.blocking)}.")
    return found
