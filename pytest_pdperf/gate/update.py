"""What `--update-baselines` does to one baseline file: pure, so that every rule of acceptance is a table of
cases.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from statistics import median

from .baseline import BaselineFile, CellBaseline, Launch, Pin, note_for
from .catalogue import Catalogue, spec_of
from .fingerprint import BaselineKey, CellRef
from .judge import CLOCK_SLACK, drift_from_anchor
from .statistics import log_score
from .verdict import CellVerdict, Verdict, number


class Mode(StrEnum):
    """Which cells an update may touch; the values are the option's choices."""

    AUTO = "auto"
    """A passing cell adds its launch, a new one is created; a failing or improved one starts a new pin,
    given a reason.
    """
    CREATE = "create"
    """Only cells without a baseline."""
    FIX = "fix"
    """Only failing cells and hand-edited pins: a new pin, given a reason."""
    TIGHTEN = "tighten"
    """Only improved cells: a new pin from the better launch."""
    PRUNE = "prune"
    """Remove cells that no workload defines any more."""


class Action(StrEnum):
    """What an update did with one cell."""

    CREATED = "created"
    ADDED = "launch added"
    PINNED = "new pin"
    PRUNED = "removed"
    KEPT = "unchanged"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A measured and judged cell, ready to be stored."""

    key: BaselineKey
    ref: CellRef
    verdict: CellVerdict
    launch: Launch
    doubts: tuple[str, ...] = ()
    """Why its times are no measure of anything, though its requests were good: never to be a baseline."""


@dataclass(frozen=True, slots=True)
class Change:
    """What an update did with one cell, old -> new."""

    cell: str
    action: Action
    values: tuple[tuple[str, str, float | None, float | None], ...] = ()
    """(metric, unit, old median, new median)."""
    note: str = ""

    def lines(self) -> list[str]:
        """A headline, then `metric: old -> new unit` for each value that an update changed."""
        head = f"{self.cell}: {self.action}" + (f" ({self.note})" if self.note else "")
        rows = [
            f"  {metric}: {_shown(old)} -> {_shown(new)} {unit}" for metric, unit, old, new in self.values
        ]
        return [head, *(row.rstrip() for row in rows)]


def _shown(value: float | None) -> str:
    return "none" if value is None else number(value)


FAILING = frozenset({Verdict.FAIL, Verdict.SUSPECT})
IMPROVING = frozenset({Verdict.IMPROVED})
UNUSABLE = frozenset({Verdict.INVALID, Verdict.INCONCLUSIVE})
MAX_LAUNCHES = 40
"""Launches kept in a pin: the first five stay as its anchor, of the rest the newest stay."""


def apply(
    file: BaselineFile,
    outcome: Outcome,
    mode: Mode,
    reason: str,
    now: datetime,
    catalogue: Catalogue,
) -> tuple[BaselineFile, Change]:
    """Update one cell of a file and say what changed. A refused cell leaves the file as it was."""
    cell = outcome.ref.id
    old = file.current(outcome.key).get((cell, outcome.ref.digest))
    verdict = outcome.verdict.verdict
    failing, improved = _has(outcome, FAILING), _has(outcome, IMPROVING)
    refusal = _refusal(outcome, old, now)
    if refusal:
        return file, Change(cell, Action.REFUSED, note=refusal)
    if old is None:
        if mode not in (Mode.AUTO, Mode.CREATE):
            return file, Change(
                cell, Action.KEPT, note=f"no baseline yet; --update-baselines={Mode.CREATE} makes one"
            )
        return _pin(file, outcome, None, reason or "first baseline", now, catalogue, Action.CREATED)
    edited = old.digest != old.content_digest(outcome.key)
    if mode is Mode.FIX and (edited or failing):
        if not reason:
            return file, Change(cell, Action.REFUSED, note="say why with --baseline-reason TEXT")
        return _pin(file, outcome, old, reason, now, catalogue, Action.PINNED)
    if mode is Mode.TIGHTEN and improved and not failing:
        if not reason and any(row.suspicious for row in outcome.verdict.rows):
            return file, Change(
                cell,
                Action.REFUSED,
                note="suspiciously fast; say why it is right with --baseline-reason TEXT",
            )
        return _pin(file, outcome, old, reason or "improved", now, catalogue, Action.PINNED)
    if mode is Mode.AUTO:
        return _auto(file, outcome, old, reason, now, catalogue)
    return file, Change(cell, Action.KEPT, note=f"{verdict}: not a case for {mode}")


def apply_all(
    file: BaselineFile,
    outcomes: Iterable[Outcome],
    mode: Mode,
    reason: str,
    now: datetime,
    catalogue: Catalogue,
) -> tuple[BaselineFile, list[Change]]:
    """Update every cell of a session. Further launches of a cell that got a new pin join it: one
    acceptance, one pin.
    """
    changes: list[Change] = []
    accepted: set[tuple[BaselineKey, CellRef]] = set()
    for outcome in outcomes:
        place = (outcome.key, outcome.ref)
        if place in accepted:
            file, change = _join(file, outcome, now, catalogue)
        else:
            file, change = apply(file, outcome, mode, reason, now, catalogue)
        if change.action in (Action.CREATED, Action.PINNED):
            accepted.add(place)
        changes.append(change)
    return file, changes


def _join(
    file: BaselineFile, outcome: Outcome, now: datetime, catalogue: Catalogue
) -> tuple[BaselineFile, Change]:
    pin = file.current(outcome.key)[outcome.ref.id, outcome.ref.digest]
    refusal = _refusal(outcome, pin, now)
    if refusal:
        return file, Change(outcome.ref.id, Action.REFUSED, note=refusal)
    return _add(file, outcome, pin, catalogue)


def _add(file: BaselineFile, outcome: Outcome, old: Pin, catalogue: Catalogue) -> tuple[BaselineFile, Change]:
    added = _longer(old, outcome)
    new = _with_metrics(_replace(file, outcome.ref.id, old, [added.signed(outcome.key)]), outcome, catalogue)
    return new, Change(outcome.ref.id, Action.ADDED, _medians(old, added, outcome.ref, catalogue))


def _longer(old: Pin, outcome: Outcome) -> Pin:
    return old.model_copy(update={"launches": _trimmed((*old.launches, outcome.launch))})


def _auto(
    file: BaselineFile, outcome: Outcome, old: Pin, reason: str, now: datetime, catalogue: Catalogue
) -> tuple[BaselineFile, Change]:
    cell, verdict = outcome.ref.id, outcome.verdict.verdict
    failing, improved = _has(outcome, FAILING), _has(outcome, IMPROVING)
    if failing or improved:
        if reason:
            return _pin(file, outcome, old, reason, now, catalogue, Action.PINNED)
        if not failing:
            note = f"improved: accept with --update-baselines={Mode.TIGHTEN} or --baseline-reason TEXT"
            return file, Change(cell, Action.KEPT, note=note)
        return file, Change(
            cell,
            Action.REFUSED,
            note=f"{verdict}: say why this is the new normal with --baseline-reason TEXT",
        )
    if (
        verdict is Verdict.NO_BASELINE
        and not set(outcome.launch.values) & CellBaseline(outcome.ref, old).metrics
    ):
        return file, Change(cell, Action.REFUSED, note="it shares no metric with its baseline")
    crept = _crept(_longer(old, outcome), outcome, catalogue)
    if not crept:
        return _add(file, outcome, old, catalogue)
    if not reason:
        note = f"{crept}; accept the drift with --baseline-reason TEXT"
        return file, Change(cell, Action.REFUSED, note=note)
    return _pin(file, outcome, old, reason, now, catalogue, Action.PINNED)


def _has(outcome: Outcome, wanted: frozenset[Verdict]) -> bool:
    """Whether any metric of the cell, or the cell itself, has one of these verdicts: one is enough to need
    a decision.
    """
    return outcome.verdict.verdict in wanted or any(row.verdict in wanted for row in outcome.verdict.rows)


def _refusal(outcome: Outcome, old: Pin | None, now: datetime) -> str:
    verdict, launch = outcome.verdict.verdict, outcome.launch
    if verdict in UNUSABLE:
        notes = next((row.note for row in outcome.verdict.rows if row.verdict in UNUSABLE), "")
        return f"{verdict}: {notes}"
    if outcome.doubts:
        return f"{Verdict.INCONCLUSIVE}: {outcome.doubts[0]}"
    if launch.date > now + CLOCK_SLACK:
        return f"the launch is dated {launch.date.isoformat()}, in the future: is a clock wrong?"
    if old is None:
        return ""
    if any(stored.id == launch.id for stored in old.launches):
        return f"launch {launch.id} is in the baseline already"
    newest = max(stored.date for stored in old.launches)
    if launch.date < newest - CLOCK_SLACK:
        return (
            f"the launch is dated {launch.date.isoformat()}, before the newest stored ({newest.isoformat()})"
        )
    return ""


def _pin(
    file: BaselineFile,
    outcome: Outcome,
    old: Pin | None,
    reason: str,
    now: datetime,
    catalogue: Catalogue,
    action: Action,
) -> tuple[BaselineFile, Change]:
    """Start a new pin from this launch; the old one stays, marked as superseded."""
    pin = Pin(
        key=outcome.key.digest,
        workload_digest=outcome.ref.digest,
        reason=reason,
        launches=(outcome.launch.model_copy(update={"reason": reason}),),
    ).signed(outcome.key)
    pins = [pin]
    if old is not None:
        stamp = f"{now.date().isoformat()}: {reason}"
        edited = " (edited by hand before)" if old.digest != old.content_digest(outcome.key) else ""
        retired = old.model_copy(update={"status": "superseded", "superseded": stamp + edited})
        pins.append(retired.signed(outcome.key))
    new = _with_metrics(_replace(file, outcome.ref.id, old, pins), outcome, catalogue)
    return new, Change(outcome.ref.id, action, _medians(old, pin, outcome.ref, catalogue), reason)


def _replace(file: BaselineFile, cell: str, old: Pin | None, pins: Sequence[Pin]) -> BaselineFile:
    kept = [pin for pin in file.cells.get(cell, ()) if pin is not old]
    return file.model_copy(update={"cells": {**file.cells, cell: (*pins, *kept)}})


def _with_metrics(file: BaselineFile, outcome: Outcome, catalogue: Catalogue) -> BaselineFile:
    notes = {name: note_for(name, catalogue) for name in outcome.launch.values}
    keys = {**file.keys, outcome.key.digest: outcome.key}
    return file.model_copy(update={"metrics": {**file.metrics, **notes}, "keys": keys})


def _trimmed(launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
    if len(launches) <= MAX_LAUNCHES:
        return launches
    anchor = launches[:5]
    return (*anchor, *launches[-(MAX_LAUNCHES - len(anchor)) :])


def _crept(pin: Pin, outcome: Outcome, catalogue: Catalogue) -> str:
    """Say which metric's accepted launches have drifted out of its tolerance, each step inside the limit."""
    series = CellBaseline(outcome.ref, pin)
    for name in sorted(outcome.launch.values):
        spec = spec_of(name, catalogue)
        if spec is None or not spec.gated:
            continue
        drift = drift_from_anchor([log_score(value, spec.direction) for value in series.values(name)])
        if drift > math.log1p(spec.tau or 0.0):
            return f"{name} has crept {math.expm1(drift):+.1%} from this pin's first launches"
    return ""


def _medians(
    old: Pin | None, new: Pin | None, ref: CellRef, catalogue: Catalogue
) -> tuple[tuple[str, str, float | None, float | None], ...]:
    before = CellBaseline(ref, old) if old is not None else None
    after = CellBaseline(ref, new) if new is not None else None
    names = (before.metrics if before else frozenset()) | (after.metrics if after else frozenset())
    rows = []
    for name in sorted(names):
        spec = spec_of(name, catalogue)
        was = median(before.values(name)) if before and name in before.metrics else None
        now = median(after.values(name)) if after and name in after.metrics else None
        if was != now:
            rows.append((name, spec.unit if spec else "", was, now))
    return tuple(rows)


def prune(
    file: BaselineFile, selected: Collection[str], known: Collection[str]
) -> tuple[BaselineFile, list[Change]]:
    """Remove cells of the selected workloads that no workload defines any more.

    `selected` names workloads (the part of a cell id before `/`), `known` the cell ids that still exist.
    Cells of other workloads are not touched.
    """
    gone = sorted(cell for cell in file.cells if cell.partition("/")[0] in selected and cell not in known)
    cells = {cell: pins for cell, pins in file.cells.items() if cell not in gone}
    used = {pin.key for pins in cells.values() for pin in pins}
    keys = {digest: key for digest, key in file.keys.items() if digest in used}
    names = {
        name for pins in cells.values() for pin in pins for launch in pin.launches for name in launch.values
    }
    metrics = {name: note for name, note in file.metrics.items() if name in names}
    pruned = file.model_copy(update={"cells": cells, "keys": keys, "metrics": metrics})
    return pruned, [Change(cell, Action.PRUNED, note="no workload defines it") for cell in gone]
