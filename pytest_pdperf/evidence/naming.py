"""Say which fault it was: the counters, speeds and answers around one cell, turned into accusations. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from pytest_pdperf.measure.records import RequestRecord
from pytest_pdperf.measure.records import Status as Ended
from pytest_pdperf.spec.topology import Role

from .deltas import restarted
from .exposition import Snapshot, Unknown
from .names import Quantity
from .readings import change, observations
from .record import Evidence

SLOWER = 1.10
"""A speed that differs from the usual one by more than this factor is accused."""
LOADING_SLACK_S = 0.5
"""Loading may take so much longer than usual, beyond the factor, on a machine that is busy."""

Pages = Mapping[str, Snapshot | Unknown]


class Fault(StrEnum):
    """What can be wrong with one engine, as far as it can be told from outside."""

    DIED = "died"
    SLOW_START = "slow start"
    TRANSFER_FAILED = "transfers failed"
    TRANSFER_LOST = "transfers never ended"
    RECOMPUTED = "decode computed prompts itself"
    CORRUPT = "KV arrived damaged"
    LEAK = "KV blocks stayed behind"
    ERROR_IN_STREAM = "errors in the stream"
    SHORT_OUTPUT = "answers too short"
    THROTTLED = "slower from a moment on"
    SLOW_DECODE = "decode steps slower"
    SLOW_PREFILL = "prefill slower"
    SLOW_LINK = "KV link slower"


@dataclass(frozen=True, slots=True)
class Accusation:
    """One named fault: whose it is, and the observation that names it."""

    fault: Fault
    where: str
    """Instance id, or a role where its replicas cannot be told apart."""
    because: str


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast one engine was over one window, by its own clocks; None where its page does not tell."""

    step_s: float | None = None
    """Mean time from a token to the next."""
    prefill_s: float | None = None
    """Mean time of one prompt's prefill."""
    link_rate: float | None = None
    """Bytes per second while its transfers ran."""


def speeds(before: Pages, after: Pages, roles: Mapping[str, Role]) -> dict[str, Speed]:
    """Instance id -> its speed between two looks. Compare only windows of equal load: batches change a mean."""
    found = {}
    for name, role in roles.items():
        old, new = before.get(name), after.get(name)
        if not isinstance(old, Snapshot) or not isinstance(new, Snapshot) or restarted(old, new):
            found[name] = Speed()
            continue
        decodes, prefills = role is not Role.PREFILL, role is not Role.DECODE
        volume = _step(old, new, Quantity.TRANSFER_BYTES)
        seconds = _step(old, new, Quantity.TRANSFER_SECONDS)
        found[name] = Speed(
            step_s=_mean(old, new, Quantity.INTER_TOKEN_SECONDS) if decodes else None,
            prefill_s=_mean(old, new, Quantity.PREFILL_SECONDS) if prefills else None,
            link_rate=volume / seconds if volume and seconds else None,
        )
    return found


def name_faults(
    evidence: Evidence,
    requests: Sequence[RequestRecord],
    pages: Sequence[Pages],
    roles: Mapping[str, Role],
    *,
    usual: Mapping[str, Speed] | None = None,
    deaths: Mapping[str, str] | None = None,
    greedy_equal: bool | None = None,
    loading_s: Mapping[str, float] | None = None,
    usual_loading_s: Mapping[str, float] | None = None,
) -> tuple[Accusation, ...]:
    """Every fault that what was seen around a cell names; empty for a healthy stack.

    `pages` are two looks or more, in order: with looks inside the cell, a speed that changes there is told from one
    that was off from the start. Speeds need `usual` ones of the same load. `greedy_equal` says whether the same prompt
    gave the same tokens over the KV transfer and without it. What is None is not known, and accuses nobody.
    """
    dead = [Accusation(Fault.DIED, name, why) for name, why in (deaths or {}).items()]
    slow = _slow_starts(loading_s or {}, usual_loading_s or {})
    if dead:
        # Whatever else is off around a death follows from it.
        return (*dead, *slow)
    kv = _transfers(evidence, pages, roles)
    found = [*slow, *kv, *_answers(requests, pages, roles, bool(kv))]
    if greedy_equal is False:
        found.append(
            Accusation(
                Fault.CORRUPT, Role.DECODE.value, "greedy tokens differ over the transfer and without it"
            )
        )
    if not kv:
        found += _leaks(evidence)
    return (*found, *_slower(pages, roles, usual or {}))


def _transfers(e: Evidence, pages: Sequence[Pages], roles: Mapping[str, Role]) -> list[Accusation]:
    found = []
    failed = _each(pages, roles, Quantity.FAILED_TRANSFERS)
    expired = _each(pages, roles, Quantity.EXPIRED_REQUESTS)
    found += [
        Accusation(Fault.TRANSFER_FAILED, name, f"{n:g} failed transfers") for name, n in failed.items()
    ]
    if not failed:
        found += [
            Accusation(Fault.TRANSFER_LOST, name, f"KV of {n:g} requests expired before it was fetched")
            for name, n in expired.items()
        ]
    if e.recomputed_tokens and not failed:
        own = [row for row in e.instances if row.role is Role.DECODE and row.computed_tokens]
        found += [
            Accusation(Fault.RECOMPUTED, row.id, f"{row.computed_tokens:g} prompt tokens computed on decode")
            for row in own
        ]
    return found


def _answers(
    requests: Sequence[RequestRecord], pages: Sequence[Pages], roles: Mapping[str, Role], kv_broken: bool
) -> list[Accusation]:
    ends = Counter(request.status for request in requests)
    front = Role.DECODE if Role.DECODE in roles.values() else Role.SERVER
    found = []
    if ends[Ended.ERROR_IN_STREAM] and not kv_broken:
        failed = _each(pages, roles, Quantity.REQUESTS_FAILED)
        where = next(iter(failed)) if len(failed) == 1 else front.value
        found.append(
            Accusation(
                Fault.ERROR_IN_STREAM,
                where,
                f"{ends[Ended.ERROR_IN_STREAM]} answers ended in an error object",
            )
        )
    if ends[Ended.SHORT]:
        replicas = [name for name, role in roles.items() if role is front]
        where = replicas[0] if len(replicas) == 1 else front.value
        found.append(
            Accusation(Fault.SHORT_OUTPUT, where, f"{ends[Ended.SHORT]} answers stopped before their length")
        )
    return found


def _leaks(e: Evidence) -> list[Accusation]:
    found = []
    for row in e.instances:
        before, after = row.kv_usage_before, row.kv_usage_after
        if row.idle is False and before is not None and after is not None and after > before:
            found.append(Accusation(Fault.LEAK, row.id, f"KV usage {before:.4f} before, {after:.4f} after"))
    return found


def _slower(
    pages: Sequence[Pages], roles: Mapping[str, Role], usual: Mapping[str, Speed]
) -> list[Accusation]:
    """Speeds against the usual ones, window by window."""
    windows = [speeds(a, b, roles) for a, b in pairwise(pages)]
    found = []
    for name in roles:
        base = usual.get(name, Speed())
        kinds = (
            (Fault.SLOW_DECODE, "a token", [_ratio(w[name].step_s, base.step_s) for w in windows]),
            (Fault.SLOW_PREFILL, "a prompt", [_ratio(w[name].prefill_s, base.prefill_s) for w in windows]),
            (Fault.SLOW_LINK, "a byte", [_ratio(base.link_rate, w[name].link_rate) for w in windows]),
        )
        for fault, unit, ratios in kinds:
            known = [ratio for ratio in ratios if ratio is not None]
            slow = [ratio > SLOWER for ratio in known]
            if not any(slow):
                continue
            shown = ", ".join(f"{ratio:.2f}" for ratio in known)
            because = f"{unit} takes {shown} times as long as usual"
            if fault is not Fault.SLOW_LINK and slow[-1] and not slow[0]:
                found.append(Accusation(Fault.THROTTLED, name, because))
            else:
                found.append(Accusation(fault, name, because))
    return found


def _slow_starts(took: Mapping[str, float], usual: Mapping[str, float]) -> list[Accusation]:
    return [
        Accusation(Fault.SLOW_START, name, f"loading took {seconds:.1f} s, usually {usual[name]:.1f} s")
        for name, seconds in took.items()
        if name in usual and seconds > SLOWER * usual[name] + LOADING_SLACK_S
    ]


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _each(pages: Sequence[Pages], roles: Mapping[str, Role], quantity: Quantity) -> dict[str, float]:
    """Instance id -> increase over the whole, of those where it is known and not zero."""
    found = {}
    for name in roles:
        old, new = pages[0].get(name), pages[-1].get(name)
        if isinstance(old, Snapshot) and isinstance(new, Snapshot) and (step := _step(old, new, quantity)):
            found[name] = step
    return found


def _step(old: Snapshot, new: Snapshot, quantity: Quantity) -> float | None:
    value = change(old, new, quantity)
    return None if isinstance(value, Unknown) else value


def _mean(old: Snapshot, new: Snapshot, quantity: Quantity) -> float | None:
    seen = observations(old, new, quantity)
    return None if isinstance(seen, Unknown) else seen.mean
