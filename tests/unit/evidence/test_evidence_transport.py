"""What really carried the KV."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from pytest_pdperf.evidence.exposition import Unknown
from pytest_pdperf.evidence.transport import (
    Family,
    LinkBytes,
    LogTransport,
    family_of,
    infiniband_bytes,
    judge_transport,
    net_bytes,
    nvlink_bytes,
    read_links,
    read_transport_log,
)

STAMP = "[1750940543.886091] [node-1:2816367:a]      ucp_worker.c:1855 UCX  INFO    "
SELF = STAMP + "0x309e3070 self cfg#1 tag(self/memory cma/memory cuda_copy/cuda)"
IPC = STAMP + "0x309e3070 intra-node cfg#5 rma(cuda_ipc/cuda) am(cuda_ipc/cuda)"
MANY = STAMP + "0x309e3070 intra-node cfg#5 tag(sysv/memory rc_mlx5/mlx5_0:1 cuda_ipc/cuda)"
RDMA = STAMP + "ep_cfg[2]: tag(rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_1:1);"
TCP = STAMP + "ucp_context_0 inter-node cfg#2 tag(tcp/eth0)"
TABLE = "[1767930429.2] [n:1:0]   |     8177..inf | multi-frag zero-copy     | rc_mlx5/mlx5_0:1/path0 |"
SMALL = "[1767930429.2] [n:1:0]   |     0..2030 | short     | tcp/eth0 |"
NIXL = "2026-11-29 16:17:24 NIXL INFO    _api.py:405 Backend UCX was instantiated"
MOONCAKE = "I0203 04:05:06.000003 301 tcp_transport.cpp:343] TcpTransport: listen on port 12002"


def table(lane: str, title: str, scope: str = "intra-node") -> list[str]:
    """A protocol table as UCX 1.23 prints it with UCX_PROTO_INFO=y."""
    rows = [
        f"d65fa56a-0c80 {scope} cfg#1",
        title,
        "Range | Description | Config",
        f"0..inf | zero-copy | {lane}",
    ]
    return [f"[1795977919.756947] [host:1668 :1]   | {row} |" for row in rows]


MOONCAKE_STARTS = [
    "2026-11-29T20:38:26.634 (EngineCore pid=17077) INFO 11-29 20:38:26 [mooncake_connector.py:1208] The Mooncake "
    "Transfer Engine is using rdma as its protocol.",
    "2026-11-29T20:38:26.634 I1129 20:38:26.634647 17077 transfer_engine_impl.cpp:183] Transfer Engine RPC using P2P "
    "handshake, listening on 127.0.0.1:16896",
    "2026-11-29T20:38:26.634 I1129 20:38:26.634806 17077 tcp_transport.cpp:391] TcpTransport: listen on port 15080",
]
"""vLLM 0.32 with Mooncake 0.3.13 as logged on a machine without RDMA; `rdma` in the first line was `tcp` there."""

Asked = Literal["auto", "tcp", "rdma", "nvlink"]


@pytest.mark.parametrize(
    ("lines", "backend", "families", "bulk"),
    [
        ([NIXL], "UCX", set(), set()),
        (["NIXL KVManager initialized with backend: UCX"], "UCX", set(), set()),
        ([SELF], None, set(), set()),
        ([NIXL, SELF, IPC], "UCX", {"cuda_ipc"}, set()),
        ([MANY], None, {"shm", "rdma", "cuda_ipc"}, set()),
        ([RDMA], None, {"rdma"}, set()),
        ([TCP, SMALL, TABLE], None, {"tcp"}, {"rdma"}),
        (
            [
                TCP,
                SMALL,
                TABLE,
                *table("cma/memory", "remote memory read by ucp_get*(multi) into host memory from host"),
            ],
            None,
            {"tcp"},
            {"shm"},
        ),
        (
            [
                *table("cma/memory", "remote memory write by ucp_put* from host memory to host"),
                *table("cuda_ipc/cuda", "remote memory read by ucp_get* into cuda/GPU0 memory from cuda"),
                TABLE,
            ],
            None,
            set(),
            {"cuda_ipc", "rdma"},
        ),
        (
            table("cma/memory", "remote memory read by ucp_get* into host memory from host", "self"),
            None,
            set(),
            set(),
        ),
        (
            [*table("tcp/lo", "active message by ucp_am_send*(egr) from host memory"), TCP],
            None,
            {"tcp"},
            {"tcp"},
        ),
        ([MOONCAKE], "mooncake", {"tcp"}, set()),
        (MOONCAKE_STARTS, "mooncake", {"tcp"}, set()),
        (["nothing to see"], None, set(), set()),
    ],
)
def test_what_logs_say(lines: list[str], backend: str | None, families: set[str], bulk: set[str]) -> None:
    found = read_transport_log(lines)
    assert (found.backend, set(found.families), set(found.bulk)) == (backend, families, bulk)
    assert bool(found.lines) == bool(families or bulk)


def test_ucx_names() -> None:
    assert [
        family_of(name) for name in ("rc_mlx5", "dc_mlx5", "ud_verbs", "srd", "tcp", "cma", "cuda_ipc", "x")
    ] == [
        *["rdma"] * 4,
        "tcp",
        "shm",
        "cuda_ipc",
        None,
    ]


def links(**sent: float) -> LinkBytes:
    return LinkBytes(dict(sent))  # type: ignore[arg-type]


def log(*lines: str) -> LogTransport:
    return read_transport_log(lines)


@pytest.mark.parametrize(
    ("asked", "lines", "sent", "used", "proof", "as_asked"),
    [
        ("auto", (RDMA,), {}, "rdma", "log", None),
        ("rdma", (RDMA,), {}, "rdma", "log", True),
        ("rdma", (TCP,), {}, "tcp", "log", False),
        ("rdma", (MANY,), {}, "unknown", "none", None),
        ("rdma", (MANY,), {"rdma": 1000.0}, "rdma", "counters", True),
        ("rdma", (MANY,), {"rdma": 799.0}, "unknown", "none", None),
        ("auto", (), {"rdma": 1000.0}, "rdma", "counters", None),
        ("nvlink", (NIXL,), {"nvlink": 900.0}, "nvlink", "counters", True),
        ("nvlink", (IPC,), {"nvlink": 900.0}, "nvlink", "counters", True),
        ("nvlink", (IPC,), {}, "cuda_ipc", "log", None),
        ("tcp", (IPC,), {}, "cuda_ipc", "log", False),
        ("tcp", (NIXL,), {"tcp": 5000.0}, "unknown", "none", None),
        ("tcp", (TCP,), {"tcp": 5000.0}, "tcp", "counters", True),
        ("auto", (), {"rdma": 900.0, "nvlink": 900.0}, "unknown", "none", None),
        ("auto", (NIXL,), {}, "unknown", "none", None),
        ("tcp", (RDMA,), {"nvlink": 900.0, "rdma": 0.0}, "rdma", "log", False),
        ("rdma", tuple(MOONCAKE_STARTS), {}, "tcp", "log", False),
        ("tcp", tuple(MOONCAKE_STARTS), {}, "tcp", "log", True),
    ],
)
def test_verdicts(
    asked: Asked,
    lines: tuple[str, ...],
    sent: dict[str, float],
    used: str,
    proof: str,
    as_asked: bool | None,
) -> None:
    before = links(**dict.fromkeys(sent, 10.0))
    after = links(**{name: 10.0 + value for name, value in sent.items()})
    found = judge_transport(asked, log(*lines), 1000.0, before, after)
    assert (found.used, found.proof, found.as_asked) == (used, proof, as_asked)
    assert (found.problem is not None) == (as_asked is False)
    assert found.detail


def test_nvlink_that_also_carries_tensor_parallelism_proves_nothing() -> None:
    busy: frozenset[Family] = frozenset({"tcp", "nvlink"})
    old, new = links(nvlink=0.0), links(nvlink=9e9)
    assert judge_transport("auto", log(NIXL), 1000.0, old, new, busy_links=busy).used == "unknown"
    assert judge_transport("auto", log(IPC), 1000.0, old, new, busy_links=busy).used == "cuda_ipc"
    known = judge_transport("nvlink", log(IPC), 1000.0, old, new, busy_links=busy, nvlink_between=True)
    assert (known.used, known.as_asked) == ("nvlink", True)


def test_without_kv_bytes_counters_prove_nothing() -> None:
    assert judge_transport("auto", log(), None, links(rdma=0.0), links(rdma=1e9)).used == "unknown"
    assert judge_transport("auto", log(), 0.0, links(rdma=0.0), links(rdma=1e9)).used == "unknown"


def test_infiniband_counts_in_units_of_four_bytes(tmp_path: Path) -> None:
    for device, words in (("mlx5_0", "250"), ("mlx5_1", "1000\n")):
        folder = tmp_path / device / "ports" / "1" / "counters"
        folder.mkdir(parents=True)
        (folder / "port_xmit_data").write_text(words)
    assert infiniband_bytes(tmp_path) == 5000.0
    (tmp_path / "mlx5_0" / "ports" / "1" / "counters" / "port_xmit_data").write_text("N/A")
    assert isinstance(infiniband_bytes(tmp_path), Unknown)
    assert isinstance(infiniband_bytes(tmp_path / "none"), Unknown)


def test_ip_bytes_are_the_ninth_column(tmp_path: Path) -> None:
    path = tmp_path / "dev"
    path.write_text(
        "Inter-|   Receive                            |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs\n"
        "    lo:  111 1 0 0 0 0 0 0  222 1 0 0 0 0 0 0\n"
        "  eth0:5 1 0 0 0 0 0 0  1000 1 0 0 0 0 0 0\n"
    )
    assert net_bytes(path) == 1222.0
    assert isinstance(net_bytes(tmp_path / "none"), Unknown)


class FakeNvml:
    """Two GPUs that sent 3 KiB over NVLink each."""

    class NVMLError(Exception):
        """As in the binding."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid == "GPU-x":
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[tuple[int, int]]) -> list[SimpleNamespace]:  # noqa: N802
        assert fields == [(138, 0xFFFFFFFF)]
        return [SimpleNamespace(nvmlReturn=self.status, value=SimpleNamespace(ullVal=3))]


def test_nvlink_counters_are_kib() -> None:
    nvml = FakeNvml()
    assert nvlink_bytes(("GPU-0", "GPU-1"), nvml) == 6144.0
    assert nvml.open == 0
    assert isinstance(nvlink_bytes((), nvml), Unknown)
    assert isinstance(nvlink_bytes(("GPU-0",), FakeNvml(status=3)), Unknown)
    missing = nvlink_bytes(("GPU-x",), nvml)
    assert isinstance(missing, Unknown)
    assert "not found" in missing.reason
    assert nvml.open == 0


def test_links_that_cannot_be_read_are_absent(tmp_path: Path) -> None:
    found = read_links(("GPU-0",), nvml=FakeNvml(), infiniband=tmp_path, net_dev=tmp_path / "none")
    assert found.sent == {"nvlink": 3072.0}
