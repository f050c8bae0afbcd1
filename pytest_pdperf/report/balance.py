"""Says how busy prefill and decode were and which of them requests wait for: what to give more GPUs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pytest_pdperf.evidence.utilisation import limiting_role

from .grid import Grid, Series, usable
from .outcomes import CellOutcome
from .section import Section
from .server_view import at

QUEUE = 0.5
"""Requests that wait in each engine of a role on average; below that they wait for a step to end, not for capacity."""

WORDS: Mapping[str, str] = {
    "prefill": "prefill limits: requests queue for a free prefill engine, so more prefill would help first",
    "decode": "decode limits: prompts are ready and queue for a free decode engine, so more decode would help first",
    "transfer": "the KV transfer limits: it is the longest wait before the first token; look at the link",
    "transfer or decode": "the KV transfer or decode limits: prompts wait longest at the decode engine, whose "
    "connector does not time the transfer; look at the link first",
    "none": "no role limits: queues are short, so more engines would change little for so many clients",
    "unknown": "which role limits is not known: the engines do not time all of their queues",
}


def limit_of(outcome: CellOutcome) -> str:
    """What is short in a cell, a key of `WORDS`: what requests wait for longest, if enough of them wait."""
    split = outcome.ttft_split
    longest = limiting_role(split) if split else str(at(outcome.details, "limiting") or "unknown")
    if longest in ("prefill", "decode"):
        waiting = at(outcome.details, "roles", longest, "waiting")
        if not isinstance(waiting, int | float):
            return "unknown"
        return longest if waiting >= QUEUE else "none"
    return longest if longest in WORDS else "unknown"


def balance(grid: Grid) -> Section | None:
    """Load of each role in every PD cell, and what limits there; None where no cell tells."""
    rows: list[tuple[str, ...]] = []
    lines: list[str] = []
    for series in grid.series:
        cells = [
            (row.cell, outcome)
            for row in grid.rows
            for one, outcome in row.outcomes()
            if one is series and outcome.kind == "pd" and usable(outcome) and _told(outcome)
        ]
        lines += list(_sentences(series, cells))
        for cell, outcome in cells:
            loads = (_load(outcome, role) for role in ("prefill", "decode"))
            rows.append((cell, series.label, *loads, limit_of(outcome)))
    if not rows:
        return None
    return Section(
        "Balance of prefill and decode",
        tuple(lines),
        ("cell", "topology", "prefill", "decode", "limits"),
        tuple(rows),
        "Load is the mean number of requests in each engine of a role over the cell: at work, and waiting for their "
        "turn. Prefill mostly works on one prompt at a time, so from about 1 on it is busy all the time; decode works "
        "on many requests at once.",
    )


def _told(outcome: CellOutcome) -> bool:
    return isinstance(at(outcome.details, "roles"), Mapping)


def _sentences(series: Series, cells: list[tuple[str, CellOutcome]]) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for cell, outcome in cells:
        found.setdefault(limit_of(outcome), []).append(cell)
    for limit, names in found.items():
        where = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        yield f"{series.label}: {WORDS[limit]} ({len(names)} of {len(cells)} cells: {where})."


def _load(outcome: CellOutcome, role: str) -> str:
    parts = [
        f"{value:.2g} {word}"
        for word, key in (("at work", "served"), ("waiting", "waiting"))
        if isinstance(value := at(outcome.details, "roles", role, key), int | float)
    ]
    return ", ".join(parts) or "unknown"
