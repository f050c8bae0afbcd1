"""A cell is over only when the engines are idle again: wait for that, and tell what a leak looks like."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Literal

from .exposition import Snapshot, Unknown
from .names import Quantity
from .readings import LOOKS, kv_block_share, level
from .scrape import Scraper

IDLE_SLACK = 0.01
"""KV usage may be this much above its idle level when the engine does not say how large a block is."""

Scrape = Callable[[Mapping[str, str], float], Mapping[str, Snapshot | Unknown]]


@dataclass(frozen=True)
class Drain:
    """How the wait ended. `snapshots` are of the last look and can serve as those after the cell."""

    status: Literal["drained", "busy", "unknown"]
    waited_s: float | None
    """None when nobody was waited for."""
    snapshots: Mapping[str, Snapshot | Unknown] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


def usage_slack(snapshot: Snapshot) -> float:
    """How far KV usage may be off its idle level: one block, or 0.01 when the block share is unknown."""
    share = kv_block_share(snapshot)
    return IDLE_SLACK if share is None else share * 1.001


def busy_reason(now: Snapshot | Unknown, idle: Snapshot | Unknown | None = None) -> str | Unknown | None:
    """Why an engine is not idle, or None when it is; Unknown when its page does not tell.

    Idle means running = waiting = 0 and, where the page before the cell is given, KV usage back to its level.
    """
    if isinstance(now, Unknown):
        return now
    counts: dict[str, float] = {}
    for quantity in (Quantity.RUNNING, Quantity.WAITING):
        value = level(now, quantity)
        if isinstance(value, Unknown):
            return value
        counts[quantity.value] = value
    if any(counts.values()):
        return f"running {counts['running']:g}, waiting {counts['waiting']:g}"
    if not isinstance(idle, Snapshot):
        return None
    usage, before = level(now, Quantity.KV_USAGE), level(idle, Quantity.KV_USAGE)
    if isinstance(usage, Unknown):
        return usage
    if isinstance(before, Unknown):
        return before
    if usage > before + usage_slack(now):
        return f"KV usage {usage:.4f}, idle level {before:.4f}"
    return None


def wait_drained(
    urls: Mapping[str, str],
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    *,
    before: Mapping[str, Snapshot | Unknown] | None = None,
    poll_s: float = 0.25,
    scrape_timeout_s: float = 5.0,
    scraper: Scrape | None = None,
) -> Drain:
    """Look until every engine is idle, at most `timeout_s`; with `before`, KV usage has to return as well.

    Two idle looks in a row are needed: engines update their gauges once a step. `unknown` means that at the
    deadline at least one engine could not be judged and none was seen busy. Looks read the gauges only; at the end
    whole pages are read, which get their full `scrape_timeout_s` too: they are the evidence of the cell.
    """
    if not urls:
        return Drain("unknown", None, reasons=("no engine could be asked",))
    with ExitStack() as exits:
        if scraper is None:
            kept = exits.enter_context(Scraper(urls))
            look: Scrape = lambda _, seconds: kept.read(seconds, only=LOOKS)  # noqa: E731
            whole: Scrape | None = lambda _, seconds: kept.read(seconds)  # noqa: E731
        else:
            look, whole = scraper, None
        drain = _wait(urls, timeout_s, clock, sleep, before, poll_s, scrape_timeout_s, look)
        return drain if whole is None else replace(drain, snapshots=whole(urls, scrape_timeout_s))


def _wait(
    urls: Mapping[str, str],
    timeout_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    before: Mapping[str, Snapshot | Unknown] | None,
    poll_s: float,
    scrape_timeout_s: float,
    look: Scrape,
) -> Drain:
    start = clock()
    idle_looks = 0
    while True:
        pages = look(urls, scrape_timeout_s)
        idle_pages = before or {}
        states = {name: busy_reason(pages[name], idle_pages.get(name)) for name in urls}
        idle_looks = idle_looks + 1 if all(state is None for state in states.values()) else 0
        waited = clock() - start
        if idle_looks >= 2:
            return Drain("drained", waited, pages)
        if waited >= timeout_s:
            busy = [f"{name}: {state}" for name, state in states.items() if isinstance(state, str)]
            dark = [f"{name}: {state.reason}" for name, state in states.items() if isinstance(state, Unknown)]
            late = [] if busy or dark else ["idle was seen once only before the time was up"]
            return Drain("busy" if busy else "unknown", waited, pages, tuple(busy + dark + late))
        sleep(min(poll_s, max(0.0, timeout_s - waited)))


@dataclass(frozen=True, slots=True)
class LeakVerdict:
    """Whether KV blocks stayed behind after requests ended or were cancelled."""

    status: Literal["pass", "fail", "unknown"]
    detail: str
    next_cell_may_start: bool


def judge_leak(
    idle_before: float | None,
    after: float | None,
    after_timeout: float | None,
    running_plus_waiting: float | None,
    *,
    slack: float = IDLE_SLACK,
) -> LeakVerdict:
    """Judge three looks at KV usage (0..1): idle, seconds after the requests ended, after the hold timeout.

    Blocks that return only when the engine's hold time is over are a failure as well: until then they take
    room from the next cell.
    """
    if running_plus_waiting is None or idle_before is None or after is None:
        return LeakVerdict("unknown", "usage or queue gauges are not known", False)
    if running_plus_waiting > 0:
        return LeakVerdict("unknown", f"{running_plus_waiting:g} requests still run or wait", False)
    limit = idle_before + slack
    if after <= limit:
        return LeakVerdict("pass", f"usage {after:.4f} is back at its idle level {idle_before:.4f}", True)
    if after_timeout is None:
        return LeakVerdict("fail", f"stranded: usage {after:.4f}, idle level {idle_before:.4f}", False)
    if after_timeout <= limit:
        return LeakVerdict("fail", f"stranded until timeout: usage was {after:.4f}", True)
    return LeakVerdict(
        "fail", f"permanent leak: usage {after_timeout:.4f} stays above {idle_before:.4f}", False
    )
