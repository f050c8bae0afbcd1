"""Stage 1: hold one measured cell against its baseline, validity before performance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from statistics import median
from typing import Protocol

from .baseline import ANCHOR_LAUNCHES, PROVISIONAL_BELOW, CellBaseline
from .catalogue import Catalogue, MetricSpec, nearest, spec_of
from .statistics import (
    PRIOR_WEIGHT,
    Pooled,
    Share,
    floor_score,
    limit_for,
    log_score,
    merged,
    pool,
    prior_variance,
    relative_worsening,
    summarise,
    value_of,
)
from .verdict import CellVerdict, Verdict, VerdictRow, worst

IMPLAUSIBLE_RATIO = 20.0
"""A ratio outside 1/20..20 is a unit or definition error, not a change of speed."""

STALE_RATIO = 0.5
"""Cost under half the baseline's: the baseline is too slow for its limit ever to be reached."""

SUSPICIOUS_TAUS = 3.0
"""Faster by more than this many tolerances: the work may have shrunk."""

CLOCK_SLACK = timedelta(minutes=10)
"""How far hosts' clocks may disagree before a measurement older than its baseline is refused."""


class ToleranceLike(Protocol):
    """What a metric may lose: `spec.tolerances.Tolerance`."""

    @property
    def tau(self) -> float: ...
    @property
    def floor(self) -> float: ...


ToleranceOf = Callable[[str, MetricSpec], ToleranceLike]
"""(full metric id, its table entry) -> tolerance for the cell being judged."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One metric as measured: None is "not measured" and never compares as zero or as better."""

    value: float | None
    n: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What the judge needs of a measured cell."""

    metrics: Mapping[str, Sample]
    requests: int
    ok: int
    invalid: tuple[str, ...] = ()
    """Reasons why no performance may be read from this cell."""
    inconclusive: tuple[str, ...] = ()
    """Reasons why the surroundings differ from the baseline's; valid, but neither pass nor fail."""
    taken: datetime | None = None
    absent: str = ""
    """Why there is no baseline: the nearest keys and what differs."""
    extra: tuple[str, ...] = field(default=())
    """Notes to show on every row, e.g. SIMULATED."""


def judge_cell(
    measured: Measurement,
    baseline: CellBaseline | None,
    siblings: Mapping[str, Pooled],
    tolerance_of: ToleranceOf,
    catalogue: Catalogue,
) -> CellVerdict:
    """Judge every gated metric of a cell; the cell's verdict is the one of highest rank.

    `siblings` is v0 per metric, pooled over the other cells of the same key. Nothing is compared when the
    measurement is invalid, and a cell in which nothing could be compared is never a PASS.
    """
    broken = _validity(measured, baseline)
    if broken:
        return _cell(broken, measured)
    names = _gated(measured, baseline, catalogue)
    if not names:
        return _cell([VerdictRow("cell", Verdict.INVALID, note="no gated metric was measured")], measured)
    rows = [
        _judge_metric(
            name,
            measured.metrics.get(name),
            baseline,
            siblings.get(name),
            tolerance_of,
            catalogue,
            measured.absent,
        )
        for name in names
    ]
    return set_aside(_cell(rows, measured), measured.inconclusive)


def set_aside(verdict: CellVerdict, reasons: Sequence[str]) -> CellVerdict:
    """Make every comparison inconclusive when the surroundings differ from the baseline's.

    What is INVALID stays so (errors count whatever the machine did), and so does what was compared with nothing.
    """
    if not reasons:
        return verdict
    rows = tuple(
        row
        if row.verdict in (Verdict.INVALID, Verdict.NO_BASELINE)
        else replace(row, verdict=Verdict.INCONCLUSIVE, note=_join(*reasons, row.note))
        for row in verdict.rows
    )
    return CellVerdict(rows=rows, verdict=worst([row.verdict for row in rows]))


def _cell(rows: list[VerdictRow], measured: Measurement) -> CellVerdict:
    if measured.extra:
        rows = [replace(row, note=_join(*measured.extra, row.note)) for row in rows]
    return CellVerdict(rows=tuple(rows), verdict=worst([row.verdict for row in rows]))


def _validity(measured: Measurement, baseline: CellBaseline | None) -> list[VerdictRow]:
    """Rows that end the matter before a number is read."""
    reasons = []
    if measured.requests <= 0 or measured.ok <= 0:
        reasons.append(f"no request completed ({measured.ok} of {measured.requests})")
    elif measured.ok != measured.requests:
        reasons.append(f"{measured.requests - measured.ok} of {measured.requests} requests failed")
    reasons += measured.invalid
    if (
        baseline is not None
        and measured.taken is not None
        and measured.taken < baseline.last_date - CLOCK_SLACK
    ):
        reasons.append(
            f"measured at {measured.taken:%Y-%m-%d %H:%M} UTC, before the baseline's newest launch "
            f"({baseline.last_date:%Y-%m-%d %H:%M} UTC): a clock goes backwards"
        )
    return [VerdictRow("cell", Verdict.INVALID, note=reason) for reason in reasons]


def _gated(measured: Measurement, baseline: CellBaseline | None, catalogue: Catalogue) -> list[str]:
    """Metrics to judge: those gated by the table with enough samples or a stored value, and stored ones no
    table knows.
    """
    names = set()
    stored = baseline.metrics if baseline is not None else frozenset[str]()
    for name, sample in measured.metrics.items():
        spec = spec_of(name, catalogue)
        if (
            spec is not None
            and spec.gated
            and (name in stored or (sample.value is not None and sample.n >= spec.min_n))
        ):
            names.add(name)
    for name in stored:
        spec = spec_of(name, catalogue)
        if spec is None or spec.gated:
            names.add(name)
    return sorted(names)


def _judge_metric(
    name: str,
    sample: Sample | None,
    baseline: CellBaseline | None,
    pooled: Pooled | None,
    tolerance_of: ToleranceOf,
    catalogue: Catalogue,
    absent: str,
) -> VerdictRow:
    spec = spec_of(name, catalogue)
    if spec is None:
        near = nearest(name, catalogue)
        hint = f"; renamed to {near}?" if near else ""
        return VerdictRow(
            name, Verdict.INVALID, note=f"the baseline holds {name!r}, which is no metric{hint}"
        )
    row = VerdictRow(name, Verdict.INVALID, unit=spec.unit, direction=spec.direction)
    if sample is None or sample.value is None:
        why = sample.note if sample is not None and sample.note else "not measured"
        return replace(row, n=sample.n if sample else 0, note=f"{why}, but the baseline has it")
    row = replace(row, value=sample.value, n=sample.n)
    if not math.isfinite(sample.value) or sample.value <= 0:
        return replace(row, note="not a finite positive number")
    if sample.n < spec.min_n:
        return replace(row, note=f"{sample.n} samples, {spec.min_n} needed, and the baseline had them")
    history = baseline.values(name) if baseline is not None else ()
    if baseline is None or not history:
        missing = absent or "no comparable baseline"
        return replace(
            row,
            verdict=Verdict.NO_BASELINE,
            note=missing if baseline is None else "the baseline lacks this metric",
        )
    return judge_series(row, history, pooled, spec.prior_sd, tolerance_of(name, spec))


def judge_series(
    row: VerdictRow,
    history: Sequence[float],
    pooled: Pooled | None,
    prior_sd: float,
    tolerance: ToleranceLike,
) -> VerdictRow:
    """Judge one value against the launches of its baseline: the formula, without any question of validity.

    `row` brings metric, unit, direction, value (finite, positive) and n; `history` is one value a launch.
    """
    assert row.value is not None
    scores = [log_score(value, row.direction) for value in history]
    summary = summarise(scores)
    limit = limit_for(
        summary, prior_variance(pooled, prior_sd), tolerance.tau, tolerance.floor, row.direction
    )
    difference = log_score(row.value, row.direction) - summary.center
    base = value_of(summary.center, row.direction)
    row = replace(
        row,
        baseline=base,
        change=relative_worsening(difference, row.direction),
        limit=relative_worsening(limit.limit, row.direction),
        binding=limit.binding,
        launches=summary.launches,
        provisional=summary.launches < PROVISIONAL_BELOW,
        detectable=relative_worsening(limit.detectable, row.direction),
    )
    ratio = math.exp(row.direction * difference)
    if not 1 / IMPLAUSIBLE_RATIO <= ratio <= IMPLAUSIBLE_RATIO:
        return replace(row, note=f"ratio {ratio:.3g} is implausible: another unit or definition?")
    if difference > limit.limit:
        return replace(row, verdict=Verdict.SUSPECT, note="worse than the limit in one launch")
    notes = []
    if difference < math.log(STALE_RATIO):
        notes.append(
            f"baseline stale: cost ratio {math.exp(difference):.3g}; refresh it, its limit cannot fire"
        )
    suspicious = difference < -max(SUSPICIOUS_TAUS * tolerance.tau, limit.tolerance)
    if suspicious:
        notes.append("suspiciously fast: did the work shrink?")
    if difference < -limit.limit:
        notes.append("accept with --update-baselines=tighten")
        return replace(row, verdict=Verdict.IMPROVED, suspicious=suspicious, note="; ".join(notes))
    crept = _creep(scores, row.direction, base, tolerance)
    if crept:
        notes.append(crept)
    if limit.noisy:
        return replace(
            row, verdict=Verdict.NOISY, suspicious=suspicious, note=_join(*notes, "too noisy to tell")
        )
    return replace(row, verdict=Verdict.PASS, note="; ".join(notes))


def _creep(scores: Sequence[float], direction: int, base: float, tolerance: ToleranceLike) -> str:
    """Warn when accepted launches have drifted away from the pin's first ones, each within the limit."""
    change = drift_from_anchor(scores)
    if change > max(math.log1p(tolerance.tau), floor_score(base, tolerance.floor, direction)):
        worse = relative_worsening(change, direction)
        return f"accepted launches have crept {worse:.1%} worse than this pin's first ones"
    return ""


def drift_from_anchor(scores: Sequence[float]) -> float:
    """How much worse (score units) the newest launches of a pin are than its first `ANCHOR_LAUNCHES`; 0
    while it is short.
    """
    if len(scores) < 2 * ANCHOR_LAUNCHES:
        return 0.0
    return median(scores[-ANCHOR_LAUNCHES:]) - median(scores[:ANCHOR_LAUNCHES])


def pooled_siblings(
    baselines: Mapping[str, CellBaseline], cell: str, catalogue: Catalogue
) -> dict[str, Pooled]:
    """v0 per metric over other cells than `cell`: the variances of those that share its key, weighted with B-1.

    Noise depends on concurrency (TTFT spreads several times as much at 8 as at 1), so cells of the same concurrency
    are pooled alone as soon as they carry `PRIOR_WEIGHT` degrees of freedom; until then all are.
    """
    every: dict[str, list[Pooled]] = {}
    alike: dict[str, list[Pooled]] = {}
    own = baselines.get(cell)
    for other, baseline in baselines.items():
        if other == cell:
            continue
        for name in baseline.metrics:
            spec = spec_of(name, catalogue)
            if spec is None:
                continue
            spread = baseline.spread(name, spec.direction)
            every.setdefault(name, []).append(spread)
            if own is not None and own.ref.level == baseline.ref.level:
                alike.setdefault(name, []).append(spread)
    found = {}
    for name, spreads in every.items():
        near = merged(alike.get(name, ()))
        found[name] = near if near.freedom >= PRIOR_WEIGHT else merged(spreads)
    return found


def pooled_sessions(baselines: Mapping[str, CellBaseline], catalogue: Catalogue) -> dict[str, Share]:
    """phi per metric: how much of v0 is left between launches of one session, over every cell and session with
    two launches or more.

    Each cell's variance within a session is taken relative to the v0 that the judge would use for that cell, so
    that quiet cells count as much as loud ones. At most 1 in truth; a larger value is chance, and left to the
    user of the number.
    """
    parts: dict[str, list[tuple[float, int]]] = {}
    for cell, baseline in baselines.items():
        sessions: dict[str, list[Mapping[str, float]]] = {}
        for launch in baseline.launches:
            if launch.session:
                sessions.setdefault(launch.session, []).append(launch.values)
        repeated = [launches for launches in sessions.values() if len(launches) > 1]
        siblings = pooled_siblings(baselines, cell, catalogue) if repeated else {}
        for name in baseline.metrics:
            spec = spec_of(name, catalogue)
            if spec is None:
                continue
            within = pool(
                [log_score(values[name], spec.direction) for values in launches if name in values]
                for launches in repeated
            )
            v0 = prior_variance(siblings.get(name), spec.prior_sd)
            if within.freedom and v0 > 0:
                parts.setdefault(name, []).append((within.variance / v0, within.freedom))
    return {name: Share.of(known) for name, known in parts.items()}


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
