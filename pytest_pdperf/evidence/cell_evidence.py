"""One answer a cell: everything that was seen around it, judged together and ready for its file. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from enum import Enum
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pytest_pdperf.measure.records import CellRecords, RequestRecord
from pytest_pdperf.measure.samples import MS, tokens_of, ttft_ms
from pytest_pdperf.measure.window import wall
from pytest_pdperf.spec.topology import Kind, Role

from .access_log import RoleCounts, count_posts, judge_posts
from .drain import Drain
from .exposition import Snapshot, Unknown
from .gpu_curve import curves_of
from .gpu_findings import capped, throttled
from .gpu_trace import GpuSummary, Look, ThrottleVerdict, energy_per_token, judge_throttle, summarise
from .kv_errors import KvErrors, read_kv_errors
from .kv_logs import KvLogVerdict, judge_kv_logs
from .log_findings import LogFindings, read_log_findings
from .naming import Naming, name_faults
from .path import whole_block_tail
from .readings import block_tokens
from .record import Evidence, Expected
from .retries import router_retries, with_retries
from .router_time import RouterTime, router_time
from .transport import LinkBytes, LogTransport, TransportVerdict, judge_transport
from .ttft_split import TtftSplit, split_ttft
from .utilisation import Limit, RoleLoad, limiting_role, role_loads
from .verdict import judge_evidence

CLOSURE_LIMIT = 0.10
"""Part of the measured TTFT that the stages may leave unexplained, either way, before it is pointed out."""

KNOWN_SHARE = 0.8
"""Requests whose first token must have been seen by itself; the engines' means are over all of them."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What has to be known of a stack to look at it. Instance ids are the keys of all mappings."""

    kind: Kind
    roles: Mapping[str, Role]
    urls: Mapping[str, str]
    """Base URLs of the engines, never of the router."""
    logs: Mapping[str, Path] = field(default_factory=dict)
    uuids: tuple[str, ...] = ()
    """GPUs of this stack; none for the simulator and CPU."""
    asked: Literal["auto", "tcp", "rdma", "nvlink"] = "auto"
    whole_blocks: bool = False
    """The connector moves whole blocks only and leaves the end of each prompt to decode."""
    nvlink_between: bool | None = None
    """Whether NVLink joins the GPUs of prefill and decode; None when it is not known."""
    here: bool = True
    """The stack runs on this machine, so this machine's link counters count its bytes."""
    tensor_parallel: bool = False
    """NVLink then carries other traffic than KV too."""
    router_page: str | None = None
    """URL of the router's metrics page; None without one."""
    router_ms: float | None = None
    """What the router adds to a request; None when it was not measured. Below the noise it may be negative."""
    http_ms: float | None = None
    """What HTTP and the engines' API servers add to a request outside of the engines' own clocks (`outside_ms`)."""
    loading_s: Mapping[str, float] = field(default_factory=dict)
    """What the engines say their weights took."""
    first: bool = False
    """The cell is the first one after the bring-up."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Raw material of one cell, collected by `CellWindow`. Times of looks are epoch seconds, as in the records."""

    before: Mapping[str, Snapshot | Unknown]
    drain: Drain
    lines: Mapping[str, list[str] | None]
    """Log lines written during the cell; None where there is no log."""
    transport_log: LogTransport
    links_before: LinkBytes
    links_after: LinkBytes
    looks: tuple[Look, ...] = ()
    failed_looks: int = 0
    router_before: Snapshot | Unknown | None = None
    router_after: Snapshot | Unknown | None = None
    """The router's own page; None where it has none."""
    midway: Mapping[str, Snapshot | Unknown] | None = None
    """Pages from the middle of the cell; None where nobody looked then."""


@dataclass(frozen=True, slots=True)
class CellEvidence:
    """What the server side says about one cell. `problems` make it INVALID, `warnings` are worth reading."""

    evidence: Evidence
    ttft_split: TtftSplit | Unknown
    loads: tuple[RoleLoad, ...]
    limiting: Limit
    """What requests wait for longest before their first token."""
    transport: TransportVerdict | None
    """None without KV transfer."""
    gpus: tuple[GpuSummary, ...]
    gpu_looks: tuple[Look, ...]
    """What those summaries were made of."""
    throttle: ThrottleVerdict | None
    """None without GPUs."""
    energy_per_output_token_j: float | None
    kv_log: KvLogVerdict | None
    kv_errors: KvErrors
    logged: LogFindings
    role_counts: RoleCounts | None
    """From the access logs; None where engines do not write them."""
    drained_in_s: float | None
    naming: Naming = field(default_factory=Naming)
    """Which fault is behind all that, as far as the cell shows it by itself."""
    router_ms: float | None = None
    http_ms: float | None = None
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def split(self) -> TtftSplit | None:
        """The stages of TTFT, None where they are not known."""
        return self.ttft_split if isinstance(self.ttft_split, TtftSplit) else None

    def details(self) -> dict[str, Any]:
        """Everything but the split and the naming as plain data without NaN, for the cell's file."""
        split = self.split
        return {
            "evidence": self.evidence.to_json(),
            "ttft": {
                "stages": "known" if split else f"unknown: {_reason(self.ttft_split)}",
                "unexplained_share": split.closure_share if split else None,
                "unexplained_limit": CLOSURE_LIMIT,
                "adds_up": adds_up(split) if split else None,
            },
            "roles": {row.role.value: _plain(row) for row in self.loads},
            "limiting": self.limiting,
            "transport": _plain(self.transport),
            "gpus": [_plain(row) for row in self.gpus],
            "gpu_trace": curves_of(self.gpu_looks),
            "throttle": _plain(self.throttle),
            "energy_per_output_token_j": self.energy_per_output_token_j,
            "kv_log": _plain(self.kv_log),
            "kv_errors": _plain(self.kv_errors),
            "logged": {"generation_tps": dict(self.logged.generation_tps)},
            "role_counts": _plain(self.role_counts),
            "router_ms": self.router_ms,
            "http_ms": self.http_ms,
            "drained_in_s": self.drained_in_s,
        }


def adds_up(split: TtftSplit, limit: float = CLOSURE_LIMIT) -> bool:
    """Whether the known stages explain the measured TTFT within `limit`, either way."""
    share = split.closure_share
    return share is not None and abs(share) <= limit


def judge_cell(watched: Watched, seen: Seen, records: CellRecords) -> CellEvidence:
    """Put all witnesses of one cell together. Never raises for what engines print."""
    requests = records.requests
    after = seen.drain.snapshots
    span = wall(requests)
    expected = expected_of(records, _block(watched, after) if watched.whole_blocks else None)
    evidence = judge_evidence(
        watched.kind, seen.before, after, expected, watched.roles, wall_s=span.seconds or None
    )
    split = _split(watched, seen, after, records)
    pd = watched.kind is Kind.PD
    transport = _transport(watched, seen, evidence) if pd else None
    engine_lines = {name: seen.lines.get(name) for name in watched.roles}
    kv_log = judge_kv_logs(engine_lines, watched.roles) if pd else None
    errors = read_kv_errors(line for lines in engine_lines.values() for line in lines or ())
    looks = tuple(row for row in seen.looks if row.uuid in watched.uuids)
    gpus = summarise(looks)
    throttle = judge_throttle(gpus) if watched.uuids else None
    counts = _role_counts(watched, engine_lines, len(requests))
    evidence = with_retries(evidence, router_retries(seen.router_before, seen.router_after), counts)
    found = CellEvidence(
        evidence=evidence,
        ttft_split=split,
        loads=role_loads(seen.before, after, watched.roles, span.seconds) if span.seconds > 0 else (),
        limiting=limiting_role(split) if pd else "unknown",
        transport=transport,
        gpus=gpus,
        gpu_looks=looks,
        throttle=throttle,
        energy_per_output_token_j=_energy(seen.looks, watched.uuids, records),
        kv_log=kv_log,
        kv_errors=errors,
        logged=read_log_findings(engine_lines, watched.roles),
        role_counts=counts,
        drained_in_s=seen.drain.waited_s,
        naming=name_faults(
            evidence,
            requests,
            [seen.before, *([seen.midway] if seen.midway else []), after],
            watched.roles,
            watched.loading_s,
            first=watched.first,
        ),
        router_ms=watched.router_ms,
        http_ms=watched.http_ms,
    )
    return _with_findings(found, watched, seen)


def merged_ms(request: RequestRecord) -> float:
    """How much later than its arrival the first token is stamped, ms: the client's part of TTFT under kernel stamps.

    A client that wakes up in time adds nothing. One that is late finds several tokens in one read, and the kernel
    stamps them all with the last one's arrival: k tokens under one stamp make the first one k - 1 token times late.
    Tokens that were sent in one piece cannot be told from that.
    """
    stamps = request.event_ns
    together = sum(stamp == stamps[0] for stamp in stamps)
    rest = len(stamps) - together
    return (together - 1) * (stamps[-1] - stamps[0]) / rest / MS if rest else 0.0


def expected_of(records: CellRecords, block: int | None = None) -> Expected:
    """What the servers must have seen: unknown sums stay unknown. `block` is that of a connector of whole blocks."""
    prompts = [request.prompt_tokens for request in records.requests]
    known = [n for n in prompts if n is not None]
    outputs = [request.completion_tokens for request in records.requests]
    return Expected(
        requests=len(records.requests),
        prompt_tokens=None if None in prompts else sum(known),
        completion_tokens=None if None in outputs else sum(n for n in outputs if n is not None),
        tail_tokens=whole_block_tail(known, block) if block else 0.0,
    )


def _block(watched: Watched, pages: Mapping[str, Snapshot | Unknown]) -> int | None:
    ends = [pages.get(name) for name, role in watched.roles.items() if role is Role.DECODE]
    sizes = {block_tokens(page) for page in ends if isinstance(page, Snapshot)}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) else None


def _split(
    watched: Watched,
    seen_around: Seen,
    after: Mapping[str, Snapshot | Unknown],
    records: CellRecords,
) -> TtftSplit | Unknown:
    """The engines' histograms hold warm-ups too, so the client's mean must."""
    times = [None if r.not_streamed else ttft_ms(r) for r in records.requests]
    known = [t for t in times if t is not None]
    if len(known) < KNOWN_SHARE * max(1, len(times)):
        return Unknown(f"{len(times) - len(known)} of {len(times)} requests have no first token of their own")
    seen = [r for r in records.requests if not r.not_streamed and r.event_ns]
    client = fmean(map(merged_ms, seen)) if records.stamp_source == "kernel" else None
    clocks = router_time(seen_around.router_before, seen_around.router_after, len(times))
    timed = isinstance(clocks, RouterTime)
    split = split_ttft(
        watched.kind,
        seen_around.before,
        after,
        watched.roles,
        measured_ttft_ms=sum(known) / len(known),
        requests=len(times),
        router_ms=None if watched.router_ms is None else max(0.0, watched.router_ms),
        router_time=clocks if isinstance(clocks, RouterTime) else None,
        client_lag_ms=client,
    )
    if isinstance(split, Unknown):
        return split
    if client:
        why = "first tokens that came with later ones under one stamp; a router that flushes late looks the same"
        split = replace(split, notes=(*split.notes, f"client: {why}"))
    hand_over = split.stages.get("hand_over")
    if timed and watched.kind is Kind.PD:
        split = replace(split, notes=(*split.notes, "router: by its own clock, in this window"))
    elif watched.http_ms is not None and hand_over is not None:
        http = max(0.0, watched.http_ms)
        split = replace(
            split,
            stages={**split.stages, "hand_over": hand_over + http},
            closure_error_ms=split.closure_error_ms - http,
            notes=(
                *split.notes,
                f"hand-over holds {http:.1f} ms of HTTP and API servers, measured on the idle stack",
            ),
        )
    if len(known) == len(times):
        return split
    note = f"measured is the mean over {len(known)} of {len(times)} requests: the others came in one piece"
    return replace(split, notes=(*split.notes, note))


def _transport(watched: Watched, seen: Seen, evidence: Evidence) -> TransportVerdict:
    busy: frozenset[Literal["tcp", "nvlink"]] = frozenset(
        ("tcp", "nvlink") if watched.tensor_parallel else ("tcp",)
    )
    return judge_transport(
        watched.asked,
        seen.transport_log,
        evidence.transfer_bytes,
        seen.links_before,
        seen.links_after,
        nvlink_between=watched.nvlink_between,
        busy_links=frozenset(busy),
    )


def _role_counts(watched: Watched, lines: Mapping[str, Sequence[str] | None], sent: int) -> RoleCounts | None:
    posts = {name: None if rows is None else count_posts(rows) for name, rows in lines.items()}
    if not any(row is not None and (row.ok or row.failed) for row in posts.values()):
        return None
    return judge_posts(posts, watched.roles, sent)


def _energy(looks: Sequence[Look], uuids: Sequence[str], records: CellRecords) -> float | None:
    """Joules an output token: mean power of all GPUs between first send and last end, over the tokens made then."""
    span = wall(records.requests)
    inside = [row for row in looks if row.uuid in uuids and span.start_ns <= row.t * 1e9 <= span.end_ns]
    if not uuids or {row.uuid for row in inside} != set(uuids):
        return None
    covered = max(row.t for row in inside) - min(row.t for row in inside)
    per_token = energy_per_token(summarise(inside), sum(tokens_of(r) for r in records.requests))
    return per_token * span.seconds / covered if per_token is not None and covered > 0 else None


def _with_findings(found: CellEvidence, watched: Watched, seen: Seen) -> CellEvidence:
    problems = [f"evidence: {text}" for text in found.evidence.problems]
    if seen.drain.status == "busy":
        problems += [
            f"not drained after {seen.drain.waited_s or 0:.0f} s: {text}" for text in seen.drain.reasons
        ]
    warnings = list(found.logged.warnings)
    if found.transport is not None:
        if found.transport.as_asked is False:
            problems.append(
                f"transport: {watched.asked} was asked for, KV went over {found.transport.used}: a silent fall-back "
                f"({found.transport.proof}: {found.transport.detail})"
            )
        elif watched.asked != "auto" and found.transport.used == "unknown":
            warnings.append(
                f"transport: {watched.asked} was asked for, what ran is not known: {found.transport.detail}"
            )
    problems += throttled(found.gpus)
    warnings += capped(found.gpus)
    if failures := found.kv_errors.transport_failures:
        kinds = ", ".join(sorted({k for key in failures for k in found.kv_errors.by_request[key]}))
        problems.append(f"logs: KV transfer of {len(failures)} requests failed ({kinds})")
    counted = found.evidence.failed_transfers is not None
    if found.kv_log is not None and found.kv_log.status == "fail" and not counted:
        problems.append(f"logs: {found.kv_log.detail}")
    split = found.split
    if split is not None and not adds_up(split):
        warnings.append(
            f"TTFT: its stages leave {split.closure_error_ms:+.1f} of {split.measured_ms:.1f} ms unexplained "
            f"({split.closure_share or 0.0:+.0%}, limit {CLOSURE_LIMIT:.0%})"
        )
    if seen.failed_looks:
        warnings.append(f"GPUs: {seen.failed_looks} looks at clocks and power failed")
    return replace(found, problems=tuple(problems), warnings=tuple(warnings))


def _reason(value: TtftSplit | Unknown) -> str:
    return value.reason if isinstance(value, Unknown) else ""


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(_plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
