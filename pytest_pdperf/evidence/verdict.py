"""Turn the pages before and after a cell into proof: what went where, what failed, what is not known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pytest_pdperf.spec.topology import Kind, Role

from .deltas import restarted
from .drain import busy_reason
from .exposition import Snapshot, Unknown
from .findings import find
from .names import Quantity
from .path import Counts, Path, judge_path
from .readings import change, engine_of, level, observations
from .record import Evidence, Expected, InstanceEvidence, Status

COUNTING_ROLE: Mapping[str, Role] = {"vllm": Role.DECODE, "sglang": Role.PREFILL}
"""The side on which an engine counts finished transfers; the other side prints zeros or nothing."""


@dataclass
class _Window:
    """Pages of one instance with every quantity read once; holes collect their reasons."""

    id: str
    role: Role
    before: Snapshot | Unknown
    after: Snapshot | Unknown
    restart: str | None = None
    holes: list[str] = field(default_factory=list)

    def hole(self, reason: str) -> None:
        text = f"{self.id}: {reason}"
        if text not in self.holes:
            self.holes.append(text)

    @property
    def engine(self) -> str | None:
        return engine_of(self.after) if isinstance(self.after, Snapshot) else None

    def change(self, quantity: Quantity, *, quiet: bool = False) -> float | None:
        if isinstance(self.before, Unknown) or isinstance(self.after, Unknown) or self.restart:
            return None
        value = change(self.before, self.after, quantity)
        if isinstance(value, Unknown):
            if not quiet:
                self.hole(value.reason)
            return None
        return value

    def level(self, page: Snapshot | Unknown, quantity: Quantity) -> float | None:
        if isinstance(page, Unknown):
            return None
        value = level(page, quantity)
        if isinstance(value, Unknown):
            self.hole(value.reason)
            return None
        return value


def judge_evidence(
    kind: Kind | str,
    before: Mapping[str, Snapshot | Unknown],
    after: Mapping[str, Snapshot | Unknown],
    expected: Expected,
    roles: Mapping[str, Role],
    *,
    wall_s: float | None = None,
) -> Evidence:
    """Judge one cell from pages scraped right before its first and, drained, after its last request.

    `roles` names every engine of the stack: one that was not scraped is a hole, not an absence. `wall_s` is
    the length of the window in seconds; without it the scrape stamps are used. Never raises for odd pages.
    """
    windows = [_window(name, role, before, after) for name, role in roles.items()]
    instances = tuple(_instance(window) for window in windows)
    is_pd = Kind(kind) is Kind.PD
    front = Role.DECODE if is_pd else Role.SERVER
    counts = _counts(windows, instances)
    path = judge_path(counts, expected) if is_pd else Path(Status.NOT_APPLICABLE, None, "aggregated serving")
    retries = _retries(windows, instances, expected, (Role.PREFILL, Role.DECODE) if is_pd else (Role.SERVER,))
    evidence = Evidence(
        kind=Kind(kind).value,
        status=path.status,
        summary=f"{path.status.value}: {path.detail}",
        proven_requests=path.proven,
        expected_requests=expected.requests,
        instances=instances,
        prefill_imbalance=imbalance(row.requests for row in instances if row.role is Role.PREFILL),
        decode_imbalance=imbalance(row.requests for row in instances if row.role is front),
        recomputed_tokens=counts.computed if is_pd else None,
        transferred_tokens=counts.transferred if is_pd else None,
        retries=retries,
        preemptions=_sum(row.preemptions for row in instances),
        cache_hit_rate=_largest(row.cache_hit_rate for row in instances),
        leak=_any_false(row.idle for row in instances),
        restarts=tuple(f"{window.id}: {window.restart}" for window in windows if window.restart),
        window_s=_window_s(windows) if wall_s is None else wall_s,
    )
    if is_pd:
        evidence = _with_transfers(evidence, windows)
    return find(evidence, [hole for window in windows for hole in window.holes], expected, front)


def imbalance(requests: Iterable[float | None]) -> float | None:
    """Largest share over mean share of the replicas of a role: 1.0 is even, the replica count is worst.

    None when a replica's count is unknown, when there is none, or when none of them served anything.
    """
    rows = list(requests)
    known = [value for value in rows if value is not None]
    if not known or len(known) != len(rows) or sum(known) <= 0:
        return None
    return max(known) / (sum(known) / len(known))


def _window(
    name: str, role: Role, before: Mapping[str, Snapshot | Unknown], after: Mapping[str, Snapshot | Unknown]
) -> _Window:
    missing = Unknown("was not scraped")
    window = _Window(name, role, before.get(name, missing), after.get(name, missing))
    if isinstance(window.before, Unknown) and window.before == window.after:
        window.hole(f"no page: {window.before.reason}")
    else:
        for when, page in (("before", window.before), ("after", window.after)):
            if isinstance(page, Unknown):
                window.hole(f"no page {when} the window: {page.reason}")
    if isinstance(window.before, Snapshot) and isinstance(window.after, Snapshot):
        window.restart = restarted(window.before, window.after)
        if window.restart:
            window.hole(f"restarted in the window ({window.restart}); its counters say nothing")
    return window


def _instance(w: _Window) -> InstanceEvidence:
    transferred = w.change(Quantity.PROMPT_TOKENS_TRANSFERRED, quiet=True)
    computed = w.change(Quantity.PROMPT_TOKENS_COMPUTED, quiet=True)
    cached = w.change(Quantity.PROMPT_TOKENS_CACHED, quiet=True)
    prompt = w.change(Quantity.PROMPT_TOKENS)
    if transferred is None and w.engine == "vllm":
        # Before prompt_tokens_by_source: what the connector found is what was loaded.
        hits, own = w.change(Quantity.EXTERNAL_HITS), w.change(Quantity.PREFIX_HITS)
        if hits is not None and own is not None and prompt is not None:
            transferred, cached, computed = hits, own, max(0.0, prompt - hits - own)
    if computed is None and isinstance(w.after, Snapshot) and not w.restart:
        w.hole("prompt tokens by source are not on the page")
    queries, own_hits = (
        w.change(Quantity.PREFIX_QUERIES, quiet=True),
        w.change(Quantity.PREFIX_HITS, quiet=True),
    )
    busy = busy_reason(w.after, w.before)
    if isinstance(busy, Unknown) and isinstance(w.after, Snapshot):
        w.hole(busy.reason)
    known = isinstance(w.before, Snapshot) and isinstance(w.after, Snapshot)
    return InstanceEvidence(
        id=w.id,
        role=w.role,
        requests=w.change(Quantity.REQUESTS_FINISHED),
        requests_failed=w.change(Quantity.REQUESTS_FAILED),
        requests_aborted=w.change(Quantity.REQUESTS_ABORTED),
        prompt_tokens=prompt,
        computed_tokens=computed,
        cached_tokens=cached,
        transferred_tokens=transferred,
        generation_tokens=w.change(Quantity.GENERATION_TOKENS),
        preemptions=w.change(Quantity.PREEMPTIONS),
        cache_hit_rate=_rate(own_hits, queries),
        kv_usage_before=w.level(w.before, Quantity.KV_USAGE),
        kv_usage_after=w.level(w.after, Quantity.KV_USAGE),
        idle=None if isinstance(busy, Unknown) or not known else busy is None,
        restarted=w.restart is not None if known else None,
    )


def _rate(hits: float | None, queries: float | None) -> float | None:
    if hits is None or queries is None:
        return None
    return hits / queries if queries > 0 else 0.0


def _counts(windows: list[_Window], rows: tuple[InstanceEvidence, ...]) -> Counts:
    decode = [row for row in rows if row.role is Role.DECODE]
    prefill = [row for row in rows if row.role is Role.PREFILL]
    engines = {w.engine for w in windows if w.role is Role.DECODE}
    peers = [
        _sum(
            (
                w.change(Quantity.PROMPT_TOKENS_PEER, quiet=True),
                w.change(Quantity.PROMPT_TOKENS_UNTOLD, quiet=True),
            )
        )
        for w in windows
        if w.role is Role.DECODE
    ]
    return Counts(
        prefill_requests=_sum(row.requests for row in prefill),
        decode_requests=_sum(row.requests for row in decode),
        computed=_sum(row.computed_tokens for row in decode),
        cached=_sum(row.cached_tokens for row in decode),
        transferred=_sum(row.transferred_tokens for row in decode),
        peer=_sum(peers),
        transfers=_counted(windows, Quantity.TRANSFERS),
        per_request_transfers=engines == {"sglang"},
    )


def _counted(windows: list[_Window], quantity: Quantity) -> float | None:
    """Sum over the role that counts transfers."""
    return _sum(
        w.change(quantity) for w in windows if w.role is COUNTING_ROLE.get(w.engine or "", Role.DECODE)
    )


def _both(windows: list[_Window], quantity: Quantity) -> float | None:
    """Sum over the engines of both roles."""
    return _sum(w.change(quantity) for w in windows)


def _with_transfers(e: Evidence, windows: list[_Window]) -> Evidence:
    transfers = _counted(windows, Quantity.TRANSFERS)
    volume = _counted(windows, Quantity.TRANSFER_BYTES)
    seconds = _counted(windows, Quantity.TRANSFER_SECONDS)
    known = transfers is not None and e.expected_requests > 0
    return replace(
        e,
        transfers=transfers,
        transfers_per_request=transfers / e.expected_requests if known and transfers is not None else None,
        transfer_bytes=volume,
        bytes_per_request=volume / e.expected_requests
        if volume is not None and e.expected_requests > 0
        else None,
        transfer_seconds=seconds,
        transfer_rate=volume / seconds if volume and seconds else None,
        claimed_rate=_claimed_rate(windows),
        wall_rate=volume / e.window_s if volume is not None and e.window_s else None,
        failed_transfers=_both(windows, Quantity.FAILED_TRANSFERS),
        failed_notifications=_both(windows, Quantity.FAILED_NOTIFICATIONS),
        failed_bootstraps=_both(windows, Quantity.FAILED_BOOTSTRAPS),
        expired_requests=_both(windows, Quantity.EXPIRED_REQUESTS),
        late_notifications=_both(windows, Quantity.LATE_NOTIFICATIONS),
    )


def _claimed_rate(windows: list[_Window]) -> float | None:
    seen = [
        found
        for w in windows
        if isinstance(w.before, Snapshot) and isinstance(w.after, Snapshot) and not w.restart
        if not isinstance(found := observations(w.before, w.after, Quantity.TRANSFER_RATE), Unknown)
    ]
    count = sum(found.count for found in seen)
    return sum(found.total for found in seen) / count if count > 0 else None


def _window_s(windows: list[_Window]) -> float | None:
    starts = [w.before.scraped_at for w in windows if isinstance(w.before, Snapshot)]
    ends = [w.after.scraped_at for w in windows if isinstance(w.after, Snapshot)]
    first = min((t for t in starts if t is not None), default=None)
    last = max((t for t in ends if t is not None), default=None)
    return last - first if first is not None and last is not None and last > first else None


def _retries(
    windows: list[_Window], rows: tuple[InstanceEvidence, ...], expected: Expected, roles: tuple[Role, ...]
) -> float | None:
    extra: list[float | None] = []
    for role in roles:
        seen = _sum(row.requests for row in rows if row.role is role)
        extra.append(None if seen is None else max(0.0, seen - expected.requests))
    own = [w.change(Quantity.PREFILL_RETRIES, quiet=True) for w in windows if w.role is Role.PREFILL]
    return _largest([*extra, *(value for value in own if value is not None)])


def _sum(values: Iterable[float | None]) -> float | None:
    rows = list(values)
    known = [value for value in rows if value is not None]
    return sum(known) if rows and len(known) == len(rows) else None


def _largest(values: Iterable[float | None]) -> float | None:
    rows = list(values)
    known = [value for value in rows if value is not None]
    return max(known) if rows and len(known) == len(rows) else None


def _any_false(values: Iterable[bool | None]) -> bool | None:
    """True as soon as one instance is known not to be idle, False only when all are known to be idle."""
    rows = list(values)
    if any(value is False for value in rows):
        return True
    return None if not rows or any(value is None for value in rows) else False
