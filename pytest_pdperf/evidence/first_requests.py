"""Ready is not disaggregated: a router whose workers all answer may still leave prefill's work to decode.

The first requests after a bring-up, sent to warm every pair, are the first that can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pytest_pdperf.spec.topology import Kind, Role

from .exposition import Snapshot, Unknown
from .names import Quantity
from .readings import change
from .record import Expected, Status
from .verdict import judge_evidence

_BORN_WITH = ("process_start_time_seconds", "_created", "_info")
"""Ends of names whose values a page has from its first moment on."""


def doubt(kind: Kind, pages: Mapping[str, Snapshot | Unknown], roles: Mapping[str, Role]) -> str | None:
    """What speaks against KV transfer in all that a fresh stack has served so far, None when nothing does.

    `pages` are those of engines that served nothing before their first requests. What is not known is no doubt here:
    every cell has evidence of its own.
    """
    if kind is not Kind.PD:
        return None
    before = {name: at_birth(page) if isinstance(page, Snapshot) else page for name, page in pages.items()}
    served = 0.0
    for name, role in roles.items():
        first, last = before.get(name), pages.get(name)
        if role is Role.DECODE and isinstance(first, Snapshot) and isinstance(last, Snapshot):
            count = change(first, last, Quantity.REQUESTS_FINISHED)
            served += count if isinstance(count, float) else 0.0
    found = judge_evidence(kind, before, pages, Expected(round(served)), roles)
    if found.status not in (Status.PARTIAL, Status.BYPASSED, Status.RECOMPUTED):
        return None
    return (
        f"the first requests were answered and not disaggregated ({found.summary}): a cell measured so is INVALID; "
        "look at the router's workers and policy, and at the engines' KV connector"
    )


def at_birth(page: Snapshot) -> Snapshot:
    """The page as it was when the process had just started: nothing counted yet."""
    return replace(
        page,
        series={
            name: rows if name.endswith(_BORN_WITH) else tuple(replace(row, value=0.0) for row in rows)
            for name, rows in page.series.items()
        },
    )
