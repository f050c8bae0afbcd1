"""One failed transfer is logged by every rank and by both roles: group the lines by request before counting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_ANSI = re.compile(r"\x1b\[[0-9;]*m")

_SGLANG = re.compile(
    r"(?P<side>Prefill|Decode) (?P<phase>bootstrap|transfer|handshake|\w+) failed for request "
    r"(?:rank=(?P<rank>\d+) )?.*?KVTransferError\(bootstrap_room=(?P<room>\d+)(?:, [^)]*)?\):\s*(?P<text>.*)"
)
_SGLANG_KINDS: tuple[tuple[str, str], ...] = (
    (r"timed out after [\d.]+s in KVPoll\.Bootstrapping", "timeout_bootstrapping"),
    (r"timed out after [\d.]+s in KVPoll\.WaitingForInput", "timeout_waiting_for_input"),
    (r"timed out after [\d.]+s in KVPoll\.(?P<state>\w+)", "timeout"),
    (r"Failed to send kv chunk", "send_failed"),
    (r"[Dd]ecode instance could be dead", "peer_dead"),
    (r"Failed to get kvcache from prefill instance", "peer_dead"),
    (r"Aborted by AbortReq", "aborted"),
)

_PLAIN: tuple[tuple[str, str], ...] = (
    (r"NIXL transfer setup/initiation failed for request (?P<id>\S+?)\.", "setup_failed"),
    (r"NIXL transfer failure: (?P<what>\w+).*?'request_id': '(?P<id>[^']+)'", "nixl_failure"),
    (r"Handshake failed for request (?P<id>[^\s,]+)", "handshake_failed"),
    (r"Releasing expired KV blocks for request (?P<id>\S+)", "expired"),
    (r"pulling kv_caches for \[(?P<ids>[^\]]*)\] failed: (?P<what>.*)", "pull_failed"),
    (r"Lost connection with prefill instance", "lost_prefill"),
    (r"No kv_transfer_params for prefill", "no_kv_params"),
)
"""Lines without a bootstrap room: vLLM's connectors, SGLang's heartbeat, vllm-router."""

_GLOG = re.compile(
    r"^(?P<level>[IWEF])(?P<date>\d{8}|\d{4}) (?P<time>\d{2}:\d{2}:\d{2}\.\d+)\s+(?P<thread>\d+) "
    r"(?P<file>[\w./-]+):(?P<line>\d+)\] (?P<text>.*)$"
)

CONSEQUENCES = frozenset({"aborted"})
"""Kinds that follow from another error or from a client that left: no transport failure by themselves."""
EXPIRIES = frozenset({"expired"})
"""Kinds that speak of lease or overload."""


@dataclass(frozen=True, slots=True)
class KvErrors:
    """What failed, by request. Keys are bootstrap rooms (SGLang) or request ids; each kind is there once."""

    by_request: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    without_request: tuple[str, ...] = ()
    """Lines that name no request, word for word."""
    unknown: tuple[str, ...] = ()
    """Transfer errors in words that are not known."""

    @property
    def requests(self) -> int:
        """Distinct requests with any error."""
        return len(self.by_request)

    @property
    def transport_failures(self) -> tuple[str, ...]:
        """Requests that a transfer itself failed for: more than an abort or an expiry was logged."""
        harmless = CONSEQUENCES | EXPIRIES
        return tuple(key for key, kinds in self.by_request.items() if not set(kinds) <= harmless)

    @property
    def expired(self) -> tuple[str, ...]:
        """Requests whose KV was given up because nobody fetched it in time."""
        return tuple(key for key, kinds in self.by_request.items() if set(kinds) & EXPIRIES)


def read_kv_errors(lines: Iterable[str]) -> KvErrors:
    """Collect transfer errors from the logs of all roles, in order of first appearance."""
    found: dict[str, list[str]] = {}
    loose: list[str] = []
    unknown: list[str] = []
    for raw in lines:
        line = _ANSI.sub("", raw).strip()
        if "KVTransferError" in line:
            match = _SGLANG.search(line)
            kind = _kind(match["text"]) if match else None
            if match is None or kind is None:
                unknown.append(line)
            if match is not None:
                _add(found, match["room"], kind or "unknown")
            continue
        for pattern, kind in _PLAIN:
            if match := re.search(pattern, line):
                ids = _ids(match)
                for key in ids:
                    _add(found, key, kind)
                if not ids:
                    loose.append(line)
                break
    return KvErrors({key: tuple(kinds) for key, kinds in found.items()}, tuple(loose), tuple(unknown))


def _kind(text: str) -> str | None:
    for pattern, kind in _SGLANG_KINDS:
        if found := re.search(pattern, text):
            state = found.groupdict().get("state")
            return f"{kind}_{state.lower()}" if state else kind
    return None


def _ids(match: re.Match[str]) -> list[str]:
    groups = match.groupdict()
    if groups.get("ids"):
        return [item.strip().strip("'\"") for item in groups["ids"].split(",") if item.strip()]
    return [groups["id"]] if groups.get("id") else []


def _add(found: dict[str, list[str]], key: str, kind: str) -> None:
    kinds = found.setdefault(key, [])
    if kind not in kinds:
        kinds.append(kind)


@dataclass(frozen=True, slots=True)
class GlogLine:
    """One line of Mooncake's transfer engine. Older builds print no year: `date` is MMDD or YYYYMMDD."""

    level: str
    """`I`, `W`, `E` or `F`."""
    date: str
    time: str
    source: str
    """`tcp_transport.cpp:170`."""
    text: str


def parse_glog(line: str) -> GlogLine | None:
    """A glog line, or None for any other line."""
    found = _GLOG.match(_ANSI.sub("", line).strip())
    if found is None:
        return None
    return GlogLine(
        found["level"], found["date"], found["time"], f"{found['file']}:{found['line']}", found["text"]
    )


def glog_errors(lines: Iterable[str]) -> tuple[GlogLine, ...]:
    """Errors and fatal lines of Mooncake's transfer engine."""
    return tuple(row for line in lines if (row := parse_glog(line)) is not None and row.level in "EF")
