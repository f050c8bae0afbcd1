"""Where there is no metric the engines' own log windows are the only witness of KV transfers: read them by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pytest_pdperf.spec.topology import Role

MARK = "KV Transfer metrics:"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PID = re.compile(r"^\((?P<process>[\w.-]+) pid=(?P<pid>\d+)\)")
_NUMBER = re.compile(r"^(?:np\.\w+\()?(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\)?$")
_NESTED = re.compile(r"(?P<connector>\w+)=\{(?P<body>[^{}]*)\}")
_CALL = re.compile(r"^\w+\((?P<body>.*)\)$")

FIELD_NAMES: Mapping[str, str] = {
    "num successful transfers": "successful",
    "num_successful_transfers": "successful",
    "avg xfer time (ms)": "avg_ms",
    "p90 xfer time (ms)": "p90_ms",
    "avg post time (ms)": "avg_post_ms",
    "p90 post time (ms)": "p90_post_ms",
    "avg mb per transfer": "avg_mib",
    "throughput (mb/s)": "rate_mib_s",
    "avg number of descriptors": "avg_descriptors",
    "num failed transfers": "failed_transfers",
    "num failed recvs": "failed_recvs",
    "num kv expired reqs": "kv_expired",
    "num notifs after expiry": "late_notifications",
}
"""Name in the log, lower case -> field. What the log calls MB is MiB (2**20 bytes)."""

_MEANS = ("avg_ms", "p90_ms", "avg_post_ms", "p90_post_ms", "avg_mib", "rate_mib_s", "avg_descriptors")
_COUNTS = ("successful", "failed_transfers", "failed_recvs", "kv_expired", "late_notifications")


@dataclass(frozen=True, slots=True)
class KvWindow:
    """One log window (about 10 s) of one API server. Transfers are counted for each rank, not for each request.

    None is a field that the line does not have, or a mean over nothing. `rate_mib_s` is bytes over the summed
    durations of single transfers: a mean per transfer, never the bandwidth of the link.
    """

    successful: int
    avg_ms: float | None = None
    p90_ms: float | None = None
    avg_post_ms: float | None = None
    p90_post_ms: float | None = None
    avg_mib: float | None = None
    rate_mib_s: float | None = None
    avg_descriptors: float | None = None
    failed_transfers: int | None = None
    """Newer NIXL builds fold failed handshakes and notifications in."""
    failed_recvs: int | None = None
    """Mooncake; counted by the consumer only."""
    kv_expired: int | None = None
    late_notifications: int | None = None
    connector: str | None = None
    process: str = ""
    """`APIServer pid=101`: windows of different servers are different windows."""
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> int | None:
        """Transport failures of both kinds; None when the line has no failure field: that is not zero."""
        known = [value for value in (self.failed_transfers, self.failed_recvs) if value is not None]
        return sum(known) if known else None

    @property
    def suspect(self) -> bool:
        """True when a window exists although nothing succeeded and the line cannot say what failed.

        An idle engine prints no window at all, so something happened.
        """
        return self.successful == 0 and self.failed is None


@dataclass(frozen=True, slots=True)
class UnknownLine:
    """A transfer window in a form that is not known; kept word for word so that a person can look."""

    line: str
    reason: str


def parse_kv_windows(line: str) -> tuple[KvWindow | UnknownLine, ...]:
    """Windows in one log line: none for other lines, one as a rule, one a connector for combined connectors.

    Fields are split at commas and read by name, so new ones and other orders do no harm.
    """
    text = _ANSI.sub("", line).strip()
    if MARK not in text:
        return ()
    head, _, tail = text.partition(MARK)
    tail = tail.strip()
    found = _PID.match(head)
    process = f"{found['process']} pid={found['pid']}" if found else ""
    nested = list(_NESTED.finditer(tail))
    if nested:
        bodies = [(item["connector"], _pairs(item["body"], ":")) for item in nested]
    else:
        call = _CALL.match(tail)
        bodies = [(None, _pairs(call["body"] if call else tail, "="))]
    return tuple(_window(pairs, connector, process, text) for connector, pairs in bodies)


def _pairs(body: str, mark: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for piece in body.split(","):
        name, sign, value = piece.partition(mark)
        if sign:
            pairs[name.strip().strip("'\"")] = value.strip()
    return pairs


def _window(
    pairs: Mapping[str, str], connector: str | None, process: str, line: str
) -> KvWindow | UnknownLine:
    numbers: dict[str, float] = {}
    extra: dict[str, str] = {}
    for name, value in pairs.items():
        key = FIELD_NAMES.get(name.lower())
        number = _NUMBER.match(value)
        if key is None:
            extra[name] = value
        elif number is None:
            return UnknownLine(line, f"{name} is {value!r}, no number")
        else:
            numbers[key] = float(number["number"])
    if "successful" not in numbers:
        return UnknownLine(line, "no count of successful transfers")
    counts = {key: int(numbers[key]) for key in _COUNTS if key in numbers}
    means = {key: numbers[key] for key in _MEANS if key in numbers and counts["successful"] > 0}
    return KvWindow(
        successful=counts["successful"],
        avg_ms=means.get("avg_ms"),
        p90_ms=means.get("p90_ms"),
        avg_post_ms=means.get("avg_post_ms"),
        p90_post_ms=means.get("p90_post_ms"),
        avg_mib=means.get("avg_mib"),
        rate_mib_s=means.get("rate_mib_s"),
        avg_descriptors=means.get("avg_descriptors"),
        failed_transfers=counts.get("failed_transfers"),
        failed_recvs=counts.get("failed_recvs"),
        kv_expired=counts.get("kv_expired"),
        late_notifications=counts.get("late_notifications"),
        connector=connector or _connector_of(numbers),
        process=process,
        extra=extra,
    )


def _connector_of(numbers: Mapping[str, float]) -> str | None:
    if "avg_post_ms" in numbers:
        return "nixl"
    if "failed_recvs" in numbers or ("avg_ms" in numbers and "failed_transfers" in numbers):
        return "mooncake"
    return None


@dataclass(frozen=True, slots=True)
class KvTotals:
    """Windows put together by counts, never by averaging averages."""

    windows: int
    suspect_windows: int
    successful: int
    total_ms: float | None
    """Summed durations of single transfers."""
    total_mib: float | None
    failed_transfers: int | None
    """None when any window lacks the field: failures not printed are not failures that did not happen."""
    failed_recvs: int | None
    kv_expired: int | None
    worst_p90_ms: float | None
    """Largest p90 of a window; percentiles of windows cannot be merged."""
    unknown: tuple[UnknownLine, ...] = ()

    @property
    def avg_ms(self) -> float | None:
        """Mean duration of a transfer, weighted by the transfers of each window."""
        return self.total_ms / self.successful if self.total_ms is not None and self.successful else None

    @property
    def avg_mib(self) -> float | None:
        """Mean MiB of a transfer of one rank."""
        return self.total_mib / self.successful if self.total_mib is not None and self.successful else None

    @property
    def rate_mib_s(self) -> float | None:
        """MiB over summed durations: the mean rate of one transfer of one rank, as the engine logs it."""
        return self.total_mib / self.total_ms * 1000 if self.total_mib is not None and self.total_ms else None

    def mib_per_request(self, requests: int) -> float | None:
        """MiB that a request moved over all its ranks. `requests` must be those of the same windows."""
        return self.total_mib / requests if self.total_mib is not None and requests > 0 else None


def merge_windows(found: Iterable[KvWindow | UnknownLine]) -> KvTotals:
    """Sum windows. The last window before a shutdown is never printed, so totals are lower bounds."""
    rows = list(found)
    windows = [row for row in rows if isinstance(row, KvWindow)]
    busy = [row for row in windows if row.successful > 0]
    return KvTotals(
        windows=len(windows),
        suspect_windows=sum(row.suspect for row in windows),
        successful=sum(row.successful for row in busy),
        total_ms=_weighted(busy, "avg_ms"),
        total_mib=_weighted(busy, "avg_mib"),
        failed_transfers=_count(windows, "failed_transfers"),
        failed_recvs=_count(windows, "failed_recvs"),
        kv_expired=_count(windows, "kv_expired"),
        worst_p90_ms=max((row.p90_ms for row in busy if row.p90_ms is not None), default=None),
        unknown=tuple(row for row in rows if isinstance(row, UnknownLine)),
    )


def _weighted(windows: Sequence[KvWindow], name: str) -> float | None:
    values = [(row.successful, getattr(row, name)) for row in windows]
    if not values or any(value is None for _, value in values):
        return None
    return float(sum(count * value for count, value in values))


def _count(windows: Sequence[KvWindow], name: str) -> int | None:
    values = [getattr(row, name) for row in windows]
    return sum(values) if values and all(value is not None for value in values) else None


@dataclass(frozen=True, slots=True)
class KvLogVerdict:
    """What the logs of all engines say together about KV transfers."""

    status: Literal["pass", "fail", "unknown"]
    detail: str
    totals: KvTotals


def judge_kv_logs(logs: Mapping[str, Iterable[str] | None], roles: Mapping[str, Role]) -> KvLogVerdict:
    """Judge the transfer windows of both roles; None is a log that is not there.

    Failures are summed over both roles (Mooncake counts failed receives on the consumer, expiry on the producer).
    Without one role's log, without any window, or with a form that hides failures the answer is `unknown`.
    """
    rows = [window for lines in logs.values() for line in lines or () for window in parse_kv_windows(line)]
    totals = merge_windows(rows)
    bad = [
        f"{name} {value}"
        for name in ("failed_transfers", "failed_recvs", "kv_expired")
        if (value := sum(getattr(row, name) or 0 for row in rows if isinstance(row, KvWindow)))
    ]
    if bad:
        return KvLogVerdict("fail", ", ".join(bad), totals)
    missing = sorted(name for name in roles if logs.get(name) is None)
    if missing:
        return KvLogVerdict("unknown", f"no log of {', '.join(missing)}", totals)
    if totals.unknown:
        return KvLogVerdict("unknown", f"{totals.unknown[0].reason}: {totals.unknown[0].line}", totals)
    if totals.suspect_windows:
        return KvLogVerdict(
            "unknown", f"{totals.suspect_windows} windows without a success: something failed", totals
        )
    if not totals.successful:
        return KvLogVerdict("unknown", "no transfer window in the logs", totals)
    if any(isinstance(row, KvWindow) and row.failed is None for row in rows):
        return KvLogVerdict("unknown", "this build does not print failures", totals)
    return KvLogVerdict("pass", f"{totals.successful} transfers, none failed", totals)
