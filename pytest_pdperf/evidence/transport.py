"""A transport that was asked for is not the one that was used: read back from logs and byte counters what ran."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .exposition import Unknown

Family = Literal["tcp", "rdma", "nvlink", "cuda_ipc", "shm", "cuda_copy"]

_UCX_FAMILIES: tuple[tuple[str, Family], ...] = (
    (r"rc(_\w+)?|dc(_\w+)?|ud(_\w+)?|srd|ib|gga_mlx5", "rdma"),
    (r"cuda_ipc", "cuda_ipc"),
    (r"tcp", "tcp"),
    (r"sysv|posix|cma|knem|xpmem|self|mm", "shm"),
    (r"cuda_copy|gdr_copy", "cuda_copy"),
)
"""UCX transport names. cuda_ipc is peer to peer between GPUs of one host: NVLink where there is one, else PCIe."""

_UCX_CONFIG = re.compile(
    r"UCX\s+INFO\b.*?\b(?:(?P<scope>self|intra-node|inter-node) cfg#\d+|ep_cfg\[\d+\]:)\s*(?P<rest>.*)"
)
_LANE = re.compile(r"(?P<transport>[a-z]\w*)/(?P<device>[\w:.-]+)")
_UCX_TABLE = re.compile(r"\|\s*\d+\.\.inf\s*\|(?P<how>[^|]*)\|(?P<lanes>[^|]*)\|")
_UCX_SCOPE = re.compile(r"\|.*\b(?P<scope>self|intra-node|inter-node) cfg#\d+\s*\|")
_UCX_WHAT = re.compile(r"\|\s*(?P<what>[a-z][\w ()-]*) by ucp_\w+\*?.*\|")
_NIXL_BACKEND = re.compile(
    r"Backend (?P<a>\w+) was instantiated|NIXL KVManager initialized with backend: (?P<b>\w+)"
)
_MOONCAKE = re.compile(r"\b(?P<kind>tcp|rdma|nvlink|cxl|shm)_(?:transport|context|endpoint)\.cpp:\d+\]")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class LogTransport:
    """What the logs of the engines say. `families` are candidates: UCX sets lanes up that carry nothing."""

    backend: str | None = None
    """`UCX`, `mooncake`, ... as the connector names it."""
    families: frozenset[Family] = frozenset()
    bulk: frozenset[Family] = frozenset()
    """Families of the lanes that UCX picks for its largest messages, where its protocol table is logged."""
    lines: tuple[str, ...] = ()
    """The lines that named the families."""
    bulk_rank: int = 0
    """2: `bulk` is of remote access to GPU memory alone, 1: of any remote memory access, 0: of whatever there was."""


def family_of(transport: str) -> Family | None:
    """Family of a UCX transport name such as `rc_mlx5` or `cuda_ipc`."""
    return next((family for pattern, family in _UCX_FAMILIES if re.fullmatch(pattern, transport)), None)


def read_transport_log(lines: Iterable[str]) -> LogTransport:
    """Collect what UCX (UCX_LOG_LEVEL=info, UCX_PROTO_INFO=y), NIXL and Mooncake print about their lanes.

    Lanes of a process to itself do not count. Of UCX's protocol tables those for remote memory access decide, as
    soon as there is one, and before them those of GPU memory: that is how NIXL moves KV, while active messages
    carry its control traffic.
    """
    backend: str | None = None
    families: set[Family] = set()
    bulk: dict[int, set[Family]] = {}
    tables: dict[int, list[str]] = {}
    proof: list[str] = []
    own, rank = False, 0
    for raw in lines:
        line = _ANSI.sub("", raw).strip()
        if found := _NIXL_BACKEND.search(line):
            backend = found["a"] or found["b"]
        elif found := _UCX_CONFIG.search(line):
            if found["scope"] != "self" and (seen := _families(found["rest"])):
                families |= seen
                proof.append(line)
        elif found := _UCX_TABLE.search(line):
            if not own and (seen := _families(found["lanes"] + " " + found["how"])):
                bulk.setdefault(rank, set()).update(seen)
                tables.setdefault(rank, []).append(line)
        elif found := _UCX_SCOPE.search(line):
            own = found["scope"] == "self"
        elif found := _UCX_WHAT.search(line):
            rank = 0 if not found["what"].startswith("remote memory") else 2 if "cuda" in line else 1
        elif found := _MOONCAKE.search(line):
            backend = backend or "mooncake"
            if kind := _MOONCAKE_FAMILIES.get(found["kind"]):
                families.add(kind)
                proof.append(line)
    best = max(bulk, default=0)
    told = tuple(dict.fromkeys([*proof, *tables.get(best, ())]))
    return LogTransport(backend, frozenset(families), frozenset(bulk.get(best, ())), told, best)


_MOONCAKE_FAMILIES: Mapping[str, Family] = {"tcp": "tcp", "rdma": "rdma", "nvlink": "nvlink", "shm": "shm"}


def _families(text: str) -> set[Family]:
    found = (family_of(lane["transport"]) for lane in _LANE.finditer(text))
    return {family for family in found if family is not None}


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Bytes that passed the links of this host since they came up, by family. A missing family is not known."""

    sent: Mapping[Family, float] = field(default_factory=dict)


def read_links(
    uuids: Iterable[str] = (),
    *,
    nvml: Any = None,
    infiniband: Path = Path("/sys/class/infiniband"),
    net_dev: Path = Path("/proc/net/dev"),
) -> LinkBytes:
    """Read the byte counters of this host's links: InfiniBand/RoCE ports, NVLink of some GPUs, IP interfaces."""
    readings: dict[Family, float | Unknown] = {
        "rdma": infiniband_bytes(infiniband),
        "tcp": net_bytes(net_dev),
        "nvlink": nvlink_bytes(uuids, nvml),
    }
    return LinkBytes({family: value for family, value in readings.items() if isinstance(value, float)})


def infiniband_bytes(root: Path = Path("/sys/class/infiniband")) -> float | Unknown:
    """Bytes sent over all ports. The kernel counts `port_xmit_data` in units of four bytes."""
    counters = sorted(root.glob("*/ports/*/counters/port_xmit_data"))
    if not counters:
        return Unknown(f"no InfiniBand or RoCE port under {root}")
    try:
        return 4.0 * sum(int(path.read_text()) for path in counters)
    except (OSError, ValueError) as problem:
        return Unknown(f"InfiniBand counters cannot be read: {problem}")


def net_bytes(path: Path = Path("/proc/net/dev")) -> float | Unknown:
    """Bytes sent over all IP interfaces, loopback included."""
    try:
        rows = [line.partition(":")[2].split() for line in path.read_text().splitlines() if ":" in line]
        return float(sum(int(row[8]) for row in rows))
    except (OSError, ValueError, IndexError) as problem:
        return Unknown(f"{path} cannot be read: {problem}")


NVLINK_TX_FIELD = 138
"""NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: payload sent, KiB; scope id UINT_MAX asks for all links together."""
_ALL_LINKS = 0xFFFFFFFF


def nvlink_bytes(uuids: Iterable[str], nvml: Any = None) -> float | Unknown:
    """Payload bytes that some GPUs sent over NVLink, from NVML's field values."""
    wanted = list(uuids)
    if not wanted:
        return Unknown("no GPU was named")
    if nvml is None:
        from pytest_pdperf.gpus.nvml import load_nvml

        nvml = load_nvml()
    try:
        nvml.nvmlInit()
        try:
            total = 0.0
            for uuid in wanted:
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                answer = nvml.nvmlDeviceGetFieldValues(handle, [(NVLINK_TX_FIELD, _ALL_LINKS)])[0]
                if answer.nvmlReturn != 0:
                    return Unknown(
                        f"{uuid}: NVLink counters are not supported (NVML status {answer.nvmlReturn})"
                    )
                total += 1024.0 * answer.value.ullVal
            return total
        finally:
            nvml.nvmlShutdown()
    except (nvml.NVMLError, AttributeError) as problem:
        return Unknown(f"NVLink counters cannot be read: {problem}")


@dataclass(frozen=True, slots=True)
class TransportVerdict:
    """The transport that really carried the KV, with what proves it. `unknown` is an answer."""

    used: Family | Literal["unknown"]
    proof: Literal["counters", "log", "none"]
    detail: str
    as_asked: bool | None = None
    """False when another transport was asked for than ran; None for `auto` and when it is unknown."""
    candidates: tuple[Family, ...] = ()

    @property
    def problem(self) -> str | None:
        """A line for an INVALID cell when the transport is not the one that was asked for."""
        return (
            f"KV went over {self.used}, asked for was another transport ({self.detail})"
            if self.as_asked is False
            else None
        )


CARRIED_SHARE = 0.8
"""A link counter that grew by this part of the KV bytes carried them: headers add, loss does not take away."""


def judge_transport(
    asked: Literal["auto", "tcp", "rdma", "nvlink"],
    log: LogTransport,
    kv_bytes: float | None = None,
    before: LinkBytes | None = None,
    after: LinkBytes | None = None,
    *,
    nvlink_between: bool | None = None,
    busy_links: frozenset[Family] = frozenset({"tcp"}),
) -> TransportVerdict:
    """Decide which transport ran: a link counter that grew by the KV bytes and that the log allows comes first.

    Several candidates are `unknown`. `busy_links` carry other traffic as well (IP always, NVLink with tensor
    parallelism): their counters prove nothing without a log line. Same-host traffic of a NIC may not show in
    its counters, so a counter that did not grow proves nothing either. `nvlink_between` says whether the GPUs
    of both roles are joined by NVLink, which turns cuda_ipc into nvlink.
    """
    candidates = log.bulk or frozenset(log.families - {"cuda_copy"})
    carried = _carried(kv_bytes, before, after)
    if "cuda_ipc" in candidates and (nvlink_between or "nvlink" in carried.keys() - busy_links):
        candidates = (candidates - {"cuda_ipc"}) | {"nvlink"}
    grown = {f: n for f, n in carried.items() if f in candidates or (not candidates and f not in busy_links)}
    if len(grown) == 1:
        family, amount = next(iter(grown.items()))
        return _verdict(
            asked, family, "counters", f"{family} links sent {amount / 1e9:.3g} GB in the window", log
        )
    if len(candidates) == 1:
        (family,) = candidates
        return _verdict(asked, family, "log", log.lines[-1], log)
    if grown:
        detail = f"several links grew by the KV bytes: {', '.join(sorted(grown))}"
    elif candidates:
        detail = f"the log leaves {', '.join(sorted(candidates))}"
    else:
        detail = (
            f"backend {log.backend} names no transport" if log.backend else "no log line names a transport"
        )
    return TransportVerdict("unknown", "none", detail, None, tuple(sorted(candidates)))


def _carried(
    kv_bytes: float | None, before: LinkBytes | None, after: LinkBytes | None
) -> dict[Family, float]:
    if not kv_bytes or before is None or after is None:
        return {}
    grown = {family: after.sent[family] - old for family, old in before.sent.items() if family in after.sent}
    return {family: amount for family, amount in grown.items() if amount >= CARRIED_SHARE * kv_bytes}


def _verdict(
    asked: str, family: Family, proof: Literal["counters", "log"], detail: str, log: LogTransport
) -> TransportVerdict:
    as_asked = None if asked == "auto" or (asked, family) == ("nvlink", "cuda_ipc") else asked == family
    return TransportVerdict(family, proof, detail, as_asked, tuple(sorted(log.families)))
