"""Access lines prove which engine answered how many requests where counters are missing or in doubt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pytest_pdperf.spec.topology import Role

from .findings import IMBALANCE_LIMIT
from .verdict import imbalance

INFERENCE_PATHS = ("/v1/completions", "/v1/chat/completions", "/generate", "/inference/v1/generate")
"""POSTs to these are work; health checks, metrics, `/tokenize` and the like are not."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(
    r"INFO:\s+(?P<client>\S+) - \"(?P<method>[A-Z]+) (?P<path>\S+) HTTP/[\d.]+\" (?P<status>\d{3})\b"
)


@dataclass(frozen=True, slots=True)
class AccessLine:
    """One request as uvicorn logs it, whatever prefix the engine puts in front."""

    method: str
    path: str
    status: int

    @property
    def work(self) -> bool:
        """True for a request that asks for tokens."""
        return self.method == "POST" and self.path.partition("?")[0] in INFERENCE_PATHS


@dataclass(frozen=True, slots=True)
class Posts:
    """Requests for tokens that one engine logged."""

    ok: int = 0
    failed: int = 0


def parse_access_line(line: str) -> AccessLine | None:
    """The access line in a log line, or None."""
    found = _LINE.search(_ANSI.sub("", line))
    return AccessLine(found["method"], found["path"], int(found["status"])) if found else None


def count_posts(lines: Iterable[str], *, skip: int = 0) -> Posts:
    """Requests for tokens in a log; the first `skip` that succeeded (warm-up) do not count."""
    ok = failed = 0
    for line in lines:
        parsed = parse_access_line(line)
        if parsed is None or not parsed.work:
            continue
        ok, failed = (ok + 1, failed) if parsed.status == 200 else (ok, failed + 1)
    return Posts(max(0, ok - skip), failed)


@dataclass(frozen=True, slots=True)
class RoleCounts:
    """Whether every request went through both roles. `problems` invalidate, `notes` do not."""

    status: Literal["pd", "decode_only", "mixed", "aggregated", "unknown"]
    detail: str
    decode_imbalance: float | None
    """Of the servers, where there is one role only."""
    retries: int | None = None
    """Requests that a role logged, failed ones included, beyond those that were sent; None where a log is missing."""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def judge_posts(posts: Mapping[str, Posts | None], roles: Mapping[str, Role], sent: int) -> RoleCounts:
    """Judge the requests that each engine logged against `sent`, all of one cell and without its warm-up.

    A router that skips prefill for short or cached prompts makes `decode_only` or `mixed` cells: no PD
    measurement. One that tries again makes more requests than were sent. None is an engine without a log: the
    answer is `unknown`.
    """
    rows = {name: posts.get(name) for name in roles}
    dark = sorted(name for name, row in rows.items() if row is None)
    if dark or sent <= 0:
        return RoleCounts(
            "unknown", f"no access log of {', '.join(dark)}" if dark else "nothing was sent", None
        )
    known = {name: row for name, row in rows.items() if row is not None}
    by_role = {
        role: [row for name, row in known.items() if roles[name] is role]
        for role in sorted({*roles.values()})
    }
    prefill = sum(row.ok for row in by_role.get(Role.PREFILL, ()))
    front_role = Role.DECODE if Role.DECODE in by_role else Role.SERVER
    front = [float(row.ok) for row in by_role.get(front_role, ())]
    problems = [f"{name}: {row.failed} failed requests" for name, row in known.items() if row.failed]
    retries = 0
    for role, seen in by_role.items():
        more = sum(row.ok + row.failed for row in seen) - sent
        retries = max(retries, more)
        if more > 0:
            problems.append(f"{role.value} answered {more} more requests than were sent: retries")
    if sum(front) < sent:
        problems.append(f"{front_role.value} answered {sum(front):g} of {sent} requests")
    skew = imbalance(front)
    name = "server" if front_role is Role.SERVER else "decode"
    notes = (f"{name} imbalance {skew:.3g} > {IMBALANCE_LIMIT:g}",) if skew and skew > IMBALANCE_LIMIT else ()
    if front_role is Role.SERVER:
        return RoleCounts("aggregated", f"{sum(front):g} of {sent}", skew, retries, tuple(problems), notes)
    if prefill == 0:
        problems.append("prefill answered no request: not a PD measurement")
        return RoleCounts("decode_only", "not a PD measurement", skew, retries, tuple(problems), notes)
    if prefill < sent:
        problems.append(f"prefill answered {prefill} of {sent} requests")
        return RoleCounts("mixed", f"mixed {prefill}/{sent}", skew, retries, tuple(problems), notes)
    return RoleCounts("pd", f"{sent} of {sent}", skew, retries, tuple(problems), notes)
