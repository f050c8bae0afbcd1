"""Stage 2: fresh launches confirm or clear what stage 1 suspects, once.

With a reference build the launches go A B B A on the same GPUs (A the reference): what changed on the
machine overnight hits both arms and a drift within the session cancels. Without one, two more launches of
the candidate are held against the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean

from .baseline import CellBaseline
from .catalogue import Catalogue, spec_of
from .judge import ToleranceOf
from .statistics import (
    CONFIDENCE,
    PRIOR_WEIGHT,
    Pooled,
    Share,
    floor_score,
    freedom_of,
    holm,
    log_score,
    moderated_variance,
    prior_variance,
    relative_worsening,
    sample_variance,
    standard_error,
    summarise,
    t_quantile,
    t_tail,
    value_of,
)
from .verdict import CellVerdict, Verdict, VerdictRow, worst

ALPHA = 0.01
"""Chance of one false FAIL a session, over all suspects (Holm)."""

PAIRED_ORDER = ("A", "B", "B", "A")
UNPAIRED_LAUNCHES = 2


class Design(StrEnum):
    """How stage 2 compares."""

    PAIRED = "paired"
    UNPAIRED = "unpaired"
    REPEATED = "repeated"
    """The same stack measured again, where nothing fresh can be launched: it can clear a suspect, never confirm one,
    because a launch that came up slow without any cause stays slow."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """One series that stage 1 flagged, with what stage 2 needs of its baseline (all in score units)."""

    cell: str
    metric: str
    direction: int
    tolerance: float
    """max(ln(1+tau), absolute floor): the effect that a FAIL must exceed."""
    center: float
    launches: int
    variance: float
    """s2: moderated launch-to-launch variance, nights included."""
    prior: float
    """v0."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What to launch: A is the reference build, B the candidate; each launch measures `cells` and nothing
    else.
    """

    design: Design
    order: tuple[str, ...]
    cells: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Readings:
    """A suspect's values in the fresh launches, in launch order. `reference` is empty when unpaired."""

    candidate: tuple[float, ...]
    reference: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What stage 2 found for one suspect. `effect` and `tolerance` are score differences, + is worse."""

    suspect: Suspect
    design: Design
    complete: bool
    """False when a launch is missing or invalid: the suspect stays a suspect."""
    effect: float = math.nan
    standard_error: float = math.nan
    freedom: int = 0
    p: float = 1.0
    adjusted: float = 1.0
    """p after Holm over all suspects of the session."""
    note: str = ""

    @property
    def failed(self) -> bool:
        """FAIL: the new effect exceeds the tolerance and is no accident."""
        return self.complete and self.effect > self.suspect.tolerance and self.adjusted <= ALPHA

    @property
    def noisy(self) -> bool:
        """The fresh launches could not have told either."""
        noise = t_quantile(CONFIDENCE, self.freedom) * self.standard_error if self.complete else math.inf
        return noise > 2 * self.suspect.tolerance

    def text(self) -> str:
        """`confirmed by A B B A: +9.1% worse than the reference build, p=0.0004`."""
        if not self.complete:
            return f"not confirmed: {self.note}"
        against = "the reference build" if self.design is Design.PAIRED else "the baseline"
        how = " ".join(PAIRED_ORDER) if self.design is Design.PAIRED else "2 more launches, unpaired"
        if self.design is Design.REPEATED:
            how = "2 more measurements of the same deployment"
        change = relative_worsening(self.effect, self.suspect.direction)
        word = "worse" if change > 0 else "better"
        found = f"{abs(change):.1%} {word} than {against}, p={self.adjusted:.2g}"
        if self.failed and self.design is Design.REPEATED:
            return f"seen again in {how}: {found}; only a fresh deployment can confirm it"
        return f"{'confirmed' if self.failed else 'cleared'} by {how}: {found}"


def find_suspects(
    cell: str,
    verdict: CellVerdict,
    baseline: CellBaseline,
    siblings: Mapping[str, Pooled],
    tolerance_of: ToleranceOf,
    catalogue: Catalogue,
) -> tuple[Suspect, ...]:
    """The suspect series of one judged cell, with the numbers of their baseline."""
    found = []
    for row in verdict.suspects:
        spec = spec_of(row.metric, catalogue)
        if spec is None:
            continue
        allowed = tolerance_of(row.metric, spec)
        summary = summarise([log_score(value, spec.direction) for value in baseline.values(row.metric)])
        prior = prior_variance(siblings.get(row.metric), spec.prior_sd)
        floor = floor_score(value_of(summary.center, spec.direction), allowed.floor, spec.direction)
        found.append(
            Suspect(
                cell=cell,
                metric=row.metric,
                direction=spec.direction,
                tolerance=max(math.log1p(allowed.tau), floor),
                center=summary.center,
                launches=summary.launches,
                variance=moderated_variance(prior, summary.variance, summary.launches),
                prior=prior,
            )
        )
    return tuple(found)


def plan(suspects: Collection[Suspect], *, has_reference: bool, relaunches: bool = True) -> StagePlan | None:
    """Which launches stage 2 needs; None when nothing is suspect. Without `relaunches` the same stack again."""
    if not suspects:
        return None
    cells = tuple(dict.fromkeys(suspect.cell for suspect in suspects))
    count = f"{len(suspects)} suspect series in {len(cells)} cells"
    if has_reference:
        return StagePlan(
            Design.PAIRED, PAIRED_ORDER, cells, f"{count}: reference and candidate on the same GPUs"
        )
    order = ("B",) * UNPAIRED_LAUNCHES
    if not relaunches:
        why = f"{count}: nothing fresh can be launched, so the same deployment twice more"
        return StagePlan(Design.REPEATED, order, cells, why)
    return StagePlan(
        Design.UNPAIRED, order, cells, f"{count}: no reference build, so two more launches, unpaired"
    )


def decide(
    design: Design,
    suspects: Sequence[Suspect],
    readings: Mapping[tuple[str, str], Readings],
    within: Mapping[str, Share] | None = None,
) -> tuple[Confirmation, ...]:
    """Judge every suspect on its fresh launches alone; the launch that raised the suspicion takes no part.

    `readings` is keyed (cell, metric). `within` is phi per metric: what part of v0 is left within a session
    (`BaselineStore.sessions`). A suspect without complete readings counts in Holm's family with p = 1.
    """
    if design is Design.PAIRED:
        raw = _paired(suspects, readings, within or {})
    else:
        raw = [
            replace(_unpaired(suspect, readings.get((suspect.cell, suspect.metric))), design=design)
            for suspect in suspects
        ]
    adjusted = holm([confirmation.p for confirmation in raw])
    return tuple(replace(confirmation, adjusted=p) for confirmation, p in zip(raw, adjusted, strict=True))


def _scores(values: Sequence[float], direction: int) -> list[float] | None:
    try:
        return [log_score(value, direction) for value in values]
    except ValueError:
        return None


def _unpaired(suspect: Suspect, reading: Readings | None) -> Confirmation:
    """Mean of the fresh launches against the baseline's median.

    The fresh launches share one night, which the mean does not average out: they count as n = 1 in SE(n).
    """
    scores = _scores(reading.candidate, suspect.direction) if reading is not None else None
    if not scores or len(scores) < UNPAIRED_LAUNCHES:
        return Confirmation(
            suspect, Design.UNPAIRED, complete=False, note="a fresh launch is missing or invalid"
        )
    error = standard_error(suspect.variance, 1, suspect.launches)
    freedom = freedom_of(suspect.launches)
    return _tested(suspect, Design.UNPAIRED, fmean(scores) - suspect.center, error, freedom)


def _paired(
    suspects: Sequence[Suspect], readings: Mapping[tuple[str, str], Readings], within: Mapping[str, Share]
) -> list[Confirmation]:
    """Mean of the candidate's launches against that of the reference's, tested with

        s2_w = (8*phi*v0 + 2*r) / (8 + 2)        SE = sqrt(s2_w * (1/2 + 1/2))        t on 8 + 2

    r: variance of this suspect's launches around the mean of their arm, phi: see `_share`.
    """
    arms: list[tuple[list[float], list[float]] | None] = []
    for suspect in suspects:
        reading = readings.get((suspect.cell, suspect.metric))
        candidate = _scores(reading.candidate, suspect.direction) if reading is not None else None
        reference = _scores(reading.reference, suspect.direction) if reading is not None else None
        whole = candidate and reference and len(candidate) == len(reference) >= 2
        arms.append((candidate, reference) if whole and candidate and reference else None)
    residuals = [_residual(arm) if arm is not None else Pooled(0.0, 0) for arm in arms]
    found = []
    for index, (suspect, arm) in enumerate(zip(suspects, arms, strict=True)):
        if arm is None:
            found.append(
                Confirmation(
                    suspect, Design.PAIRED, complete=False, note="a fresh launch is missing or invalid"
                )
            )
            continue
        others = [
            (residual.variance / suspects[other].prior, residual.freedom)
            for other, residual in enumerate(residuals)
            if other != index and suspects[other].metric == suspect.metric and suspects[other].prior > 0
        ]
        prior = _share(within.get(suspect.metric), others) * suspect.prior
        own = residuals[index]
        variance = (PRIOR_WEIGHT * prior + own.freedom * own.variance) / (PRIOR_WEIGHT + own.freedom)
        candidate, reference = arm
        error = math.sqrt(variance * (1 / len(candidate) + 1 / len(reference)))
        effect = fmean(candidate) - fmean(reference)
        found.append(_tested(suspect, Design.PAIRED, effect, error, PRIOR_WEIGHT + own.freedom))
    return found


def _residual(arm: tuple[list[float], list[float]]) -> Pooled:
    """Spread of the launches of each arm around their own mean."""
    candidate, reference = arm
    freedom = len(candidate) + len(reference) - 2
    squares = sample_variance(candidate) * (len(candidate) - 1) + sample_variance(reference) * (
        len(reference) - 1
    )
    return Pooled(squares / freedom, freedom)


def _share(stored: Share | None, others: Sequence[tuple[float, int]]) -> float:
    """phi for one suspect: from the baselines' sessions and from tonight's launches of the metric's other suspects.

    A component of a variance cannot exceed it, so the stored one counts as 1 at most. Tonight's may: a night that
    is noisier than any before it must not be tested against the calm ones. With fewer than 8 degrees of freedom
    it is 1, which is too large and therefore safe.
    """
    known = Share.of([*others, *([(min(stored.value, 1.0), stored.freedom)] if stored is not None else [])])
    return known.value if known.freedom >= PRIOR_WEIGHT else 1.0


def _tested(suspect: Suspect, design: Design, effect: float, error: float, freedom: int) -> Confirmation:
    """One-sided test of no effect. Without any spread, as on a virtual clock, every difference is real."""
    p = t_tail(effect / error, freedom) if error > 0 else float(effect <= 0)
    return Confirmation(suspect, design, True, effect, error, freedom, p)


def apply_confirmations(
    cell: str, verdict: CellVerdict, confirmations: Collection[Confirmation]
) -> CellVerdict:
    """The cell's final verdict: suspects become FAIL, PASS or NOISY; those without complete launches stay
    SUSPECT.
    """
    by_metric = {c.suspect.metric: c for c in confirmations if c.suspect.cell == cell}
    rows = tuple(
        _resolved(row, by_metric[row.metric])
        if row.verdict is Verdict.SUSPECT and row.metric in by_metric
        else row
        for row in verdict.rows
    )
    return CellVerdict(rows=rows, verdict=worst([row.verdict for row in rows]))


def _resolved(row: VerdictRow, confirmation: Confirmation) -> VerdictRow:
    if not confirmation.complete:
        return replace(row, note=confirmation.text())
    cleared = Verdict.NOISY if confirmation.noisy else Verdict.PASS
    red = Verdict.SUSPECT if confirmation.design is Design.REPEATED else Verdict.FAIL
    verdict = red if confirmation.failed else cleared
    return replace(row, verdict=verdict, stage=2, p=confirmation.adjusted, note=confirmation.text())
