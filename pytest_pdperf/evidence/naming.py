"""Say which fault it was: the counters, speeds and answers around one cell, turned into findings. Pure.

One path for everybody: a cell of a run and the study of the simulator's knobs both take what `name_faults` found and,
once there is something to compare with, what `against` adds to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from pytest_pdperf.errors import RoleDied
from pytest_pdperf.measure.records import RequestRecord
from pytest_pdperf.measure.records import Status as Ended
from pytest_pdperf.spec.topology import Role

from .exposition import Snapshot, Unknown
from .names import Quantity
from .record import Evidence, Status
from .speeds import MEASURES, Level, Pages, Speed, Speeds, Usual, step, windows

LOADING_SLACK_S = 0.5
"""Loading may take so much longer than usual, beyond its factor, on a machine that is busy."""

SCHEMA = 1


class Fault(StrEnum):
    """What can be wrong with one engine, as far as it can be told from outside. Values are kept in files."""

    DIED = "died"
    SLOW_START = "slow_start"
    TRANSFER_FAILED = "transfer_failed"
    TRANSFER_LOST = "transfer_lost"
    RECOMPUTED = "recomputed"
    BYPASSED = "bypassed"
    CORRUPT = "corrupt"
    LEAK = "leak"
    ERROR_IN_STREAM = "error_in_stream"
    SHORT_OUTPUT = "short_output"
    THROTTLED = "throttled"
    SLOW_DECODE = "slow_decode"
    SLOW_PREFILL = "slow_prefill"
    SLOW_LINK = "slow_link"


WORDS: Mapping[Fault, str] = {
    Fault.DIED: "process died",
    Fault.SLOW_START: "loading slowed",
    Fault.TRANSFER_FAILED: "KV transfers failed",
    Fault.TRANSFER_LOST: "KV transfers never ended",
    Fault.RECOMPUTED: "decode computed prompts itself although prefill had",
    Fault.BYPASSED: "prompts went past prefill",
    Fault.CORRUPT: "KV arrived damaged",
    Fault.LEAK: "KV blocks stayed behind",
    Fault.ERROR_IN_STREAM: "errors in the stream",
    Fault.SHORT_OUTPUT: "answers too short",
    Fault.THROTTLED: "slower from the middle of the cell on",
    Fault.SLOW_DECODE: "decode slowed",
    Fault.SLOW_PREFILL: "prefill slowed",
    Fault.SLOW_LINK: "KV transfer slowed",
}

COMPARED = frozenset(
    {Fault.SLOW_START, Fault.THROTTLED, Fault.SLOW_DECODE, Fault.SLOW_PREFILL, Fault.SLOW_LINK}
)
"""Faults that nobody can tell without healthy cells beside."""

_SLOW: Mapping[str, Fault] = {
    "step_s": Fault.SLOW_DECODE,
    "prefill_s": Fault.SLOW_PREFILL,
    "link_rate": Fault.SLOW_LINK,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One named fault: whose it is, and the observation that names it."""

    fault: Fault
    where: str
    """Instance id, or a role where its replicas cannot be told apart."""
    because: str
    measure: str = ""
    """Speed that it is about (`speeds.MEASURES`); empty for what is no speed."""

    @property
    def line(self) -> str:
        """The finding in one line for people."""
        return f"{WORDS[self.fault]} ({self.where}): {self.because}"


@dataclass(frozen=True, slots=True)
class Naming:
    """Everything that was named around one cell, with what could not be told and what a later comparison needs."""

    findings: tuple[Finding, ...] = ()
    """Empty for a healthy cell."""
    unknown: tuple[str, ...] = ()
    """Which faults nobody could look for, and why."""
    speeds: Speeds = field(default_factory=dict)
    loading_s: Mapping[str, float] = field(default_factory=dict)
    """Instance id -> seconds that it says its weights took."""
    first: bool = False
    """The first cell after the engines came up: how they started is said there, and once."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for the cell's file; `from_json` is the inverse."""
        return {
            "schema": SCHEMA,
            "findings": [asdict(one) for one in self.findings],
            "unknown": list(self.unknown),
            "speeds": {name: [asdict(one) for one in rows] for name, rows in self.speeds.items()},
            "loading_s": dict(self.loading_s),
            "first": self.first,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Naming:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError for what is not such data."""
        if data["schema"] != SCHEMA:
            raise ValueError(f"naming has schema {data['schema']!r}, this version reads {SCHEMA}")
        return cls(
            tuple(Finding(**{**row, "fault": Fault(row["fault"])}) for row in data["findings"]),
            tuple(data["unknown"]),
            {name: tuple(Speed(**row) for row in rows) for name, rows in data["speeds"].items()},
            dict(data["loading_s"]),
            data["first"],
        )


def died(death: RoleDied) -> Finding:
    """The finding of a cell whose process ended: whatever else is off around a death follows from it."""
    return Finding(Fault.DIED, death.instance, death.reason)


def damaged(where: str = Role.DECODE.value) -> Finding:
    """The finding where the same prompt gives other greedy tokens over the KV transfer than without it."""
    return Finding(Fault.CORRUPT, where, "greedy tokens differ over the transfer and without it")


def name_faults(
    evidence: Evidence,
    requests: Sequence[RequestRecord],
    pages: Sequence[Pages],
    roles: Mapping[str, Role],
    loading_s: Mapping[str, float] | None = None,
    *,
    first: bool = False,
) -> Naming:
    """Every fault that a cell shows by itself; none for a healthy one. What is not known accuses nobody.

    `pages` are two looks or more, in order: with looks inside the cell, a speed that changes there can be told from one
    that was off from the start.
    """
    kv = [*_path(evidence), *_transfers(evidence, pages, roles)]
    found = [*kv, *_answers(requests, pages, roles, bool(kv))]
    if not kv:
        found += _leaks(evidence)
    return Naming(
        tuple(found),
        tuple(_holes(evidence, pages, roles)),
        windows(pages, roles),
        dict(loading_s or {}),
        first,
    )


def against(naming: Naming, usual: Usual, suspected: Collection[str] = ()) -> Naming:
    """The same with what only a comparison shows. Doing it twice, with whatever, leaves the latter.

    `suspected` are the measures (`speeds.MEASURES`) behind metrics that the gate found worse: less is enough there.
    """
    own = tuple(one for one in naming.findings if one.fault not in COMPARED)
    holes = tuple(text for text in naming.unknown if not text.startswith(_SPEEDS))
    if usual.why_not:
        return replace(naming, findings=own, unknown=(*holes, f"{_SPEEDS}{usual.why_not}"))
    starts = _slow_starts(naming.loading_s, usual.loading_s) if naming.first else []
    slow = (*starts, *_slower(naming.speeds, usual, suspected))
    dark = [
        name for name, rows in usual.speeds.items() if any(rows) and not _known(naming.speeds.get(name, ()))
    ]
    more = (f"{_SPEEDS}{', '.join(dark)} did not tell them in this cell",) if dark else ()
    return replace(naming, findings=(*own, *slow), unknown=(*holes, *more))


_SPEEDS = "speeds: "


def _known(rows: Sequence[Speed]) -> bool:
    return bool(rows) and any(getattr(rows[0], measure) is not None for measure in MEASURES)


def _path(e: Evidence) -> list[Finding]:
    """Prompts that decode prefilled itself: because it dropped the KV, or because prefill never got them."""
    if e.status not in (Status.PARTIAL, Status.BYPASSED, Status.RECOMPUTED) or e.failed_transfers:
        return []
    own = [row for row in e.instances if row.role is Role.DECODE and row.computed_tokens]
    prefilled = [row.requests for row in e.instances if row.role is Role.PREFILL]
    served = sum(count for count in prefilled if count is not None)
    past = None not in prefilled and served < e.expected_requests
    if past and (own or e.status is Status.BYPASSED):
        because = f"{e.expected_requests - served:g} of {e.expected_requests} requests never reached it"
        computed = ", ".join(f"{row.id} computed {row.computed_tokens:g} prompt tokens" for row in own)
        return [Finding(Fault.BYPASSED, Role.PREFILL.value, f"{because}; {computed}".removesuffix("; "))]
    return [
        Finding(Fault.RECOMPUTED, row.id, f"{row.computed_tokens:g} prompt tokens computed on decode")
        for row in own
    ]


def _transfers(e: Evidence, pages: Sequence[Pages], roles: Mapping[str, Role]) -> list[Finding]:
    failed = _each(pages, roles, Quantity.FAILED_TRANSFERS)
    if failed:
        return [Finding(Fault.TRANSFER_FAILED, name, f"{n:g} failed transfers") for name, n in failed.items()]
    return [
        Finding(Fault.TRANSFER_LOST, name, f"KV of {n:g} requests expired before it was fetched")
        for name, n in _each(pages, roles, Quantity.EXPIRED_REQUESTS).items()
    ]


def _answers(
    requests: Sequence[RequestRecord], pages: Sequence[Pages], roles: Mapping[str, Role], kv_broken: bool
) -> list[Finding]:
    ends = Counter(request.status for request in requests)
    front = Role.DECODE if Role.DECODE in roles.values() else Role.SERVER
    found = []
    if ends[Ended.ERROR_IN_STREAM] and not kv_broken:
        failed = _each(pages, roles, Quantity.REQUESTS_FAILED)
        where = next(iter(failed)) if len(failed) == 1 else front.value
        because = f"{ends[Ended.ERROR_IN_STREAM]} answers ended in an error object"
        found.append(Finding(Fault.ERROR_IN_STREAM, where, because))
    if ends[Ended.SHORT]:
        replicas = [name for name, role in roles.items() if role is front]
        where = replicas[0] if len(replicas) == 1 else front.value
        because = f"{ends[Ended.SHORT]} answers stopped before their length"
        found.append(Finding(Fault.SHORT_OUTPUT, where, because))
    return found


def _leaks(e: Evidence) -> list[Finding]:
    found = []
    for row in e.instances:
        before, after = row.kv_usage_before, row.kv_usage_after
        if row.idle is False and before is not None and after is not None and after > before:
            found.append(Finding(Fault.LEAK, row.id, f"KV usage {before:.4f} before, {after:.4f} after"))
    return found


def _holes(e: Evidence, pages: Sequence[Pages], roles: Mapping[str, Role]) -> list[str]:
    """What could not be looked for: an engine without a page, a path without its counters."""
    found = []
    for name in roles:
        for when, one in (("before", pages[0]), ("after", pages[-1])):
            page = one.get(name, Unknown("was not scraped"))
            if isinstance(page, Unknown):
                found.append(f"{name}: no page {when} the cell: {page.reason}")
    if e.status is Status.UNKNOWN and not found:
        found.append(f"KV path: {e.reasons[0] if e.reasons else e.summary}")
    return found


def _slower(seen: Speeds, usual: Usual, suspected: Collection[str]) -> list[Finding]:
    found = []
    for name, rows in seen.items():
        for measure in MEASURES:
            levels = usual.speeds.get(name, ())
            slow = [
                _is_slow(row, level, measure, measure in suspected)
                for row, level in zip(rows, levels, strict=False)
            ]
            if finding := _slow(name, measure, rows, levels, slow):
                found.append(finding)
    return found


def _slow(
    name: str,
    measure: str,
    rows: Sequence[Speed],
    levels: Sequence[Mapping[str, Level]],
    slow: Sequence[bool | None],
) -> Finding | None:
    """One engine's speed: slow as a whole, or only from some look on."""

    def shown(window: int) -> str:
        now, level = getattr(rows[window], measure), levels[window][measure]
        return f"{_speed_words(measure, now)} against {_speed_words(measure, level.value)} in the baseline"

    halves = slow[1:]
    if measure != "link_rate" and len(halves) > 1 and halves[0] is False and halves[-1]:
        because = f"{shown(len(slow) - 1)} at the end of the cell, as usual at its start"
        return Finding(Fault.THROTTLED, name, because, measure)
    return Finding(_SLOW[measure], name, shown(0), measure) if slow and slow[0] else None


def _is_slow(row: Speed, levels: Mapping[str, Level], measure: str, suspected: bool) -> bool | None:
    """Whether a speed is slower than is usual; None where either is not known."""
    now, level = getattr(row, measure), levels.get(measure)
    if now is None or level is None or now <= 0 or level.value <= 0:
        return None
    factor = level.value / now if measure == "link_rate" else now / level.value
    return bool(factor > (level.suspected if suspected else level.limit))


def _speed_words(measure: str, value: float) -> str:
    if measure == "link_rate":
        for size, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
            if value >= size:
                return f"{value / size:.3g} {unit}"
        return f"{value:.3g} B/s"
    return f"{value * 1e3:.3g} ms a {'token' if measure == 'step_s' else 'prompt'}"


def _slow_starts(took: Mapping[str, float], usual: Mapping[str, Level]) -> list[Finding]:
    return [
        Finding(Fault.SLOW_START, name, f"{seconds:.1f} s against {usual[name].value:.1f} s in the baseline")
        for name, seconds in took.items()
        if name in usual and seconds > usual[name].limit * usual[name].value + LOADING_SLACK_S
    ]


def _each(pages: Sequence[Pages], roles: Mapping[str, Role], quantity: Quantity) -> dict[str, float]:
    """Instance id -> increase over the whole, of those where it is known and not zero."""
    found = {}
    for name in roles:
        old, new = pages[0].get(name), pages[-1].get(name)
        if isinstance(old, Snapshot) and isinstance(new, Snapshot) and (more := step(old, new, quantity)):
            found[name] = more
    return found
