"""A router's own clocks on the way of a request, so that its part need not be guessed from an idle stack."""

from __future__ import annotations

from dataclasses import dataclass

from .deltas import counter_delta, restarted
from .exposition import Snapshot, Unknown

LEG = "vllm_router_pd_decode_pending_seconds"
"""vllm-router 0.1.17: from a request's arrival until decode is asked. Prefill's whole answer and the hops to it and
back lie inside."""
HEAD = "vllm_router_pd_request_duration_seconds"
"""The same until the head of decode's answer, which may come before the first token or, from an engine that computes in
the process of its API server, together with it."""
ROUTES = ("/v1/completions", "/v1/chat/completions", "/generate")


@dataclass(frozen=True, slots=True)
class RouterTime:
    """Means over the requests of a window, ms; None where the router has no such clock."""

    leg_ms: float | None = None
    head_ms: float | None = None


def router_time(
    before: Snapshot | Unknown | None, after: Snapshot | Unknown | None, requests: int
) -> RouterTime | Unknown:
    """The router's clocks over a window in which exactly `requests` requests were sent.

    Unknown, with the reason, where it has none of them or counts other requests too.
    """
    if not isinstance(before, Snapshot) or not isinstance(after, Snapshot):
        page = before if isinstance(before, Unknown) else after
        return page if isinstance(page, Unknown) else Unknown("the router's page was not read")
    if reason := restarted(before, after):
        return Unknown(f"router: restarted in the window ({reason})")
    leg = _mean(before, after, LEG, (None,), requests)
    head = _mean(before, after, HEAD, ROUTES, requests)
    if isinstance(leg, Unknown) and isinstance(head, Unknown):
        return head
    return RouterTime(*(None if isinstance(value, Unknown) else value for value in (leg, head)))


def _mean(
    before: Snapshot, after: Snapshot, name: str, routes: tuple[str | None, ...], requests: int
) -> float | Unknown:
    if not after.has(f"{name}_count"):
        return Unknown(f"router: {name} is not on its page")
    totals = {"count": 0.0, "sum": 0.0}
    for route in routes:
        where = {"route": route} if route else None
        if not after.select(f"{name}_count", where):
            continue
        for part in totals:
            step = counter_delta(before, after, f"{name}_{part}", where, lazy=True)
            if isinstance(step, Unknown):
                return Unknown(f"router: {step.reason}")
            totals[part] += step
    if totals["count"] != requests or not requests:
        return Unknown(f"router: timed {totals['count']:g} requests, {requests} were sent")
    return totals["sum"] / totals["count"] * 1000.0
