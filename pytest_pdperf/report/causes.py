"""Puts a named fault beside the metric that it explains: stage and fault in one sentence, or no claim at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_pdperf.evidence.naming import Fault, Finding, Naming, against
from pytest_pdperf.evidence.speeds import MEASURES
from pytest_pdperf.gate.verdict import VERDICTS, Blocks, CellVerdict, Verdict, VerdictRow

from .outcomes import CellOutcome
from .ttft_stage import Stage, stage_to_blame, usual_split
from .usual_speed import usual_of

_TOLD = frozenset({Verdict.SUSPECT, Verdict.FAIL, Verdict.INCONCLUSIVE})
MARK = "cause: "
NOTICED = "noticed: "
"""Of a finding in a cell that is not red: no gated metric has moved for it."""

_ANY = frozenset({"ttft", "tpot", "itl", "e2e", "output"})
_SPEED_METRICS: Mapping[str, frozenset[str]] = {
    "step_s": frozenset({"tpot", "itl", "e2e", "output"}),
    "prefill_s": frozenset({"e2e", "output"}),
    "link_rate": frozenset({"e2e", "output"}),
}
"""What a slow engine makes worse beside TTFT, of which its stage decides. A slow server's prefill stalls its own tokens
too, but a decode engine of its own does none."""

_SPEED_STAGES: Mapping[str, frozenset[str]] = {
    "step_s": frozenset({"first_decode_step", "decode_queue", "prefill_queue"}),
    "prefill_s": frozenset({"prefill", "prefill_queue"}),
    "link_rate": frozenset({"transfer", "bootstrap"}),
}
_STAGES: Mapping[Fault, frozenset[str]] = {
    Fault.TRANSFER_FAILED: frozenset({"transfer", "bootstrap", "decode_queue", "first_decode_step"}),
    Fault.TRANSFER_LOST: frozenset({"transfer", "bootstrap", "decode_queue"}),
    Fault.RECOMPUTED: frozenset({"first_decode_step", "decode_queue"}),
    Fault.BYPASSED: frozenset({"first_decode_step", "decode_queue"}),
    Fault.LEAK: frozenset({"decode_queue", "prefill_queue"}),
}
"""Stages of TTFT that a fault can lengthen: where another one moved, it is not called the cause."""


def cause_lines(naming: Naming | None, mark: str = MARK) -> tuple[str, ...]:
    """One line for each finding; none for a healthy cell and for one that nobody named."""
    return tuple(f"{mark}{one.line}" for one in naming.findings) if naming else ()


@dataclass(frozen=True, slots=True)
class Explained:
    """A verdict with its causes told."""

    verdict: CellVerdict
    naming: Naming | None
    more: tuple[str, ...]
    """What was named and stands in no row: a line each."""


def explained(
    verdict: CellVerdict, outcome: CellOutcome, environments: Sequence[Mapping[str, str]]
) -> Explained:
    """Hold a cell's stages and speeds against those of its baseline's launches (`environments`) and say what is behind.

    A verdict is never another one for it. Doing it twice changes nothing.
    """
    worse = [_stem(row) for row in verdict.rows if row.verdict in _TOLD]
    suspected = {measure for measure, metrics in _SPEED_METRICS.items() if not metrics.isdisjoint(worse)}
    suspected |= set(MEASURES) if "ttft" in worse else set()
    naming = against(outcome.naming, usual_of(environments), suspected) if outcome.naming else None
    stage = stage_to_blame(outcome.ttft_split, usual_split(environments))
    verdict = with_causes(verdict, naming, stage)
    notes = "\n".join(row.note for row in verdict.rows)
    mark = MARK if VERDICTS[verdict.verdict].blocks is Blocks.ALWAYS else NOTICED
    more = [line for line in cause_lines(naming, mark) if line.removeprefix(mark) not in notes]
    return Explained(verdict, naming, tuple(more))


def with_causes(verdict: CellVerdict, naming: Naming | None, stage: Stage) -> CellVerdict:
    """The same verdict; rows that need attention end with their stage, where they are of TTFT, and their cause."""
    rows = []
    for row in verdict.rows:
        text = _words(row, naming, stage) if row.verdict in _TOLD else ""
        told = any(mark in row.note for mark in (stage.words, MARK))
        rows.append(replace(row, note="; ".join(filter(None, (row.note, "" if told else text)))))
    return replace(verdict, rows=tuple(rows))


def _words(row: VerdictRow, naming: Naming | None, stage: Stage) -> str:
    metric = _stem(row)
    findings = naming.findings if naming else ()
    if metric == "ttft":
        behind = [one.line for one in findings if stage.name in _stages_of(one)]
        return "; ".join((stage.words, *([f"{MARK}{', '.join(behind)}"] if behind else [])))
    behind = [one.line for one in findings if metric in _metrics_of(one)]
    if behind:
        return f"{MARK}{', '.join(behind)}"
    if metric not in _ANY:
        return ""
    if naming is None or naming.unknown:
        why = "; ".join(naming.unknown) if naming else "nobody looked"
        return f"{MARK}unknown ({why})"
    return f"{MARK}none seen in the engines' own counters and speeds"


def _stem(row: VerdictRow) -> str:
    """`ttft` of `burst.ttft_ms_p95`."""
    return row.metric.rpartition(".")[2].partition("_")[0]


def _metrics_of(finding: Finding) -> frozenset[str]:
    if finding.where.startswith("server") and finding.measure == "prefill_s":
        return _SPEED_METRICS["prefill_s"] | {"itl", "tpot"}
    if finding.fault is Fault.SLOW_START:
        return frozenset()
    return _SPEED_METRICS[finding.measure] if finding.measure else _ANY


def _stages_of(finding: Finding) -> frozenset[str]:
    return _SPEED_STAGES[finding.measure] if finding.measure else _STAGES.get(finding.fault, frozenset())
