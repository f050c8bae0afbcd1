"""A request that was tried twice was prefilled twice: count second tries wherever somebody saw them.

The client never tries again. Routers and proxies do: an engine then answers more requests than were sent, or, where the
first try never reached it, only the router knows.
"""

from __future__ import annotations

from dataclasses import replace

from .access_log import RoleCounts
from .deltas import counter_delta, restarted
from .exposition import Snapshot, Unknown
from .record import Evidence

COUNTERS = ("vllm_router_retries_total", "smg_worker_retries_total")
"""vllm-router 0.1.17; sglang-router 0.3.2 and smg. Printed from the first retry on."""
LEGS = "worker_type"
"""smg counts a retry of a PD request once for each of its two workers."""


def router_retries(
    before: Snapshot | Unknown | None, after: Snapshot | Unknown | None
) -> float | Unknown | None:
    """Second tries that the router counts in the window; None where its page has no such counter."""
    if not isinstance(before, Snapshot) or not isinstance(after, Snapshot):
        return None
    name = next((name for name in COUNTERS if after.has(name)), None)
    if name is None:
        return None
    if reason := restarted(before, after):
        return Unknown(f"router: restarted in the window ({reason})")
    legs = {row.label(LEGS) for row in after.select(name)}
    steps = [counter_delta(before, after, name, {LEGS: leg} if leg else None, lazy=True) for leg in legs]
    known = [step for step in steps if not isinstance(step, Unknown)]
    if len(known) != len(steps):
        return next(step for step in steps if isinstance(step, Unknown))
    return max(known, default=0.0)


def with_retries(evidence: Evidence, router: float | Unknown | None, logged: RoleCounts | None) -> Evidence:
    """The evidence with second tries that its counters did not show.

    Access lines speak where an engine's counters are a hole; the router speaks always, since a try that no engine
    answered is on no other page.
    """
    problems, count = list(evidence.problems), evidence.retries
    if count is None and logged is not None and logged.retries is not None:
        count = float(logged.retries)
        if count:
            problems.append(f"access logs show {count:g} more requests on a role than were sent: retries")
    if isinstance(router, float) and router > (count or 0.0):
        count = router
        problems.append(f"the router tried {router:g} times again: such prompts were prefilled twice")
    return replace(evidence, retries=count, problems=tuple(problems))
