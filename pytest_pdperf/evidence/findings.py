"""Say in words what the counters mean: which findings make a cell INVALID and which are worth a note."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_pdperf.spec.topology import Role

from .record import Evidence, Expected, Status

IMBALANCE_LIMIT = 1.25
"""Largest replica / mean above which an uneven split is pointed out."""
CACHE_HIT_LIMIT = 0.01
"""Prompts are unique by construction; a higher hit rate means that they were not."""

_BROKEN_PATHS = (Status.PARTIAL, Status.BYPASSED, Status.RECOMPUTED)


def find(evidence: Evidence, holes: Sequence[str], expected: Expected, front: Role) -> Evidence:
    """The same evidence with problems, notes and reasons filled in; `front` is the role that clients see."""
    problems = [*_path(evidence), *_failures(evidence), *_work(evidence, expected, front), *_state(evidence)]
    return replace(
        evidence, problems=tuple(problems), notes=tuple(_notes(evidence)), reasons=tuple(dict.fromkeys(holes))
    )


def _path(e: Evidence) -> list[str]:
    return [f"PD path {e.summary}"] if e.status in _BROKEN_PATHS else []


def _failures(e: Evidence) -> list[str]:
    found = [
        (e.failed_transfers, "failed KV transfers"),
        (e.failed_notifications, "failed KV notifications"),
        (e.failed_bootstraps, "failed KV bootstraps"),
        (
            e.expired_requests,
            "requests whose KV expired before it was fetched (lease or overload, not transport)",
        ),
    ]
    lines = [f"{count:g} {what}" for count, what in found if count]
    for row in e.instances:
        if row.requests_failed:
            lines.append(f"{row.id}: {row.requests_failed:g} requests finished with an error")
        if row.requests_aborted:
            lines.append(f"{row.id}: {row.requests_aborted:g} requests were aborted")
    return lines


def _work(e: Evidence, expected: Expected, front: Role) -> list[str]:
    rows = [row for row in e.instances if row.role is front]
    lines = []
    if e.retries:
        lines.append(f"{e.retries:g} more requests on a role than were sent: retries or foreign traffic")
    wanted = (
        ("requests", [row.requests for row in rows], expected.requests),
        ("prompt tokens", [row.prompt_tokens for row in rows], expected.prompt_tokens),
        ("output tokens", [row.generation_tokens for row in rows], expected.completion_tokens),
    )
    for what, values, plan in wanted:
        known = [value for value in values if value is not None]
        if plan is None or not known or len(known) != len(values):
            continue
        if what == "requests" and sum(known) > plan:
            continue
        if sum(known) != plan:
            lines.append(f"{front.value} counts {sum(known):g} {what}, the client {plan}")
    return lines


def _state(e: Evidence) -> list[str]:
    lines = [f"restarted: {line}" for line in e.restarts]
    for row in e.instances:
        if row.idle is False:
            usage = "" if row.kv_usage_after is None else f", KV usage {row.kv_usage_after:.4f}"
            lines.append(f"{row.id} is not idle after the cell{usage}: leak or work left behind")
        if row.cache_hit_rate is not None and row.cache_hit_rate > CACHE_HIT_LIMIT:
            lines.append(f"{row.id}: prefix cache hit rate {row.cache_hit_rate:.3g} > {CACHE_HIT_LIMIT:g}")
    return lines


def _notes(e: Evidence) -> list[str]:
    lines = []
    for role, value in (("prefill", e.prefill_imbalance), ("decode", e.decode_imbalance)):
        if value is not None and value > IMBALANCE_LIMIT:
            name = "server" if e.status is Status.NOT_APPLICABLE else role
            lines.append(f"{name} imbalance {value:.3g} > {IMBALANCE_LIMIT:g}")
    if e.preemptions:
        lines.append(f"{e.preemptions:g} preemptions: the KV cache was too small for this load")
    if e.late_notifications:
        lines.append(f"{e.late_notifications:g} KV notifications came after expiry")
    return lines
