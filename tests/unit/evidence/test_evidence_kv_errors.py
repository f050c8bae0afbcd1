"""One failure, however many ranks and roles log it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_pdperf.evidence.kv_errors import glog_errors, parse_glog, read_kv_errors

SAMPLES = Path(__file__).parents[4] / "shared" / "samples"


def sglang(side: str, phase: str, room: int, text: str, rank: int = 0, more: str = "") -> str:
    owner = "req" if side == "Prefill" else "decode_req.req"
    return (
        f"[2026-01-02 03:04:05 TP{rank}] {side} {phase} failed for request rank={rank} {owner}.rid='r1' "
        f"{owner}.bootstrap_room={room} with exception KVTransferError(bootstrap_room={room}{more}): {text}"
    )


SEND = "Failed to send kv chunk of 111 to 192.0.2.7:12003"
LINES = [
    sglang("Prefill", "transfer", 111, SEND),
    sglang("Prefill", "transfer", 111, SEND, rank=1),
    sglang("Decode", "transfer", 111, "Request 111 timed out after 300.0s in KVPoll.WaitingForInput"),
    sglang("Prefill", "bootstrap", 222, "Request 222 timed out after 120.0s in KVPoll.Bootstrapping"),
    sglang("Decode", "transfer", 333, "Aborted by AbortReq.", more=", remote_endpoint=192.0.2.8:1"),
]


def test_lines_of_ranks_and_roles_are_one_request() -> None:
    found = read_kv_errors(LINES)
    assert found.requests == 3
    assert found.by_request == {
        "111": ("send_failed", "timeout_waiting_for_input"),
        "222": ("timeout_bootstrapping",),
        "333": ("aborted",),
    }
    assert found.transport_failures == ("111", "222")
    assert found.unknown == ()


def test_unknown_words_are_kept_and_still_count() -> None:
    line = sglang("Decode", "transfer", 5, "The moon was in the way")
    found = read_kv_errors([line, "KVTransferError without anything"])
    assert found.by_request == {"5": ("unknown",)}
    assert found.transport_failures == ("5",)
    assert found.unknown == (line, "KVTransferError without anything")
    state = read_kv_errors(
        [sglang("Decode", "transfer", 6, "Request 6 timed out after 5s in KVPoll.Transferring")]
    )
    assert state.by_request == {"6": ("timeout_transferring",)}


def test_vllm_wordings() -> None:
    prefix = "(EngineCore_DP0 pid=201) ERROR 02-03 04:05:06 [nixl_connector.py:2281] "
    found = read_kv_errors(
        [
            prefix + "NIXL transfer setup/initiation failed for request cmpl-1. Marking blocks as invalid.",
            prefix
            + "NIXL transfer failure: transfer_failed. Marking | Context: {'x': 1, 'request_id': 'cmpl-1'}",
            prefix + "Handshake failed for request cmpl-2, marking blocks as invalid",
            prefix + "Releasing expired KV blocks for request cmpl-3 ... before lease expired.",
            prefix + "pulling kv_caches for ['req-4', 'req-5'] failed: Timeout waiting for P side ready.",
            "Lost connection with prefill instance (bootstrap_addr: 192.0.2.9:8998)",
            "INFO all is well",
        ]
    )
    assert found.by_request == {
        "cmpl-1": ("setup_failed", "nixl_failure"),
        "cmpl-2": ("handshake_failed",),
        "cmpl-3": ("expired",),
        "req-4": ("pull_failed",),
        "req-5": ("pull_failed",),
    }
    assert found.expired == ("cmpl-3",)
    assert "cmpl-3" not in found.transport_failures
    assert found.without_request == (
        "Lost connection with prefill instance (bootstrap_addr: 192.0.2.9:8998)",
    )


@pytest.mark.parametrize("date", ["0203", "20260203"])
def test_both_date_forms_of_glog(date: str) -> None:
    line = f"E{date} 04:05:07.000004 302 tcp_transport.cpp:170] Session::readBody failed. Error: End of file"
    parsed = parse_glog(line)
    assert parsed is not None
    assert (parsed.level, parsed.date, parsed.source) == ("E", date, "tcp_transport.cpp:170")
    assert glog_errors([line, line.replace("E", "I", 1), "Exception: no glog"]) == (parsed,)


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the shared samples are not beside this repository")
def test_field_samples() -> None:
    sglang_lines = (SAMPLES / "sglang_disagg_errors.log").read_text().splitlines()
    assert read_kv_errors(sglang_lines).transport_failures == ("101", "102", "103", "104")
    vllm = read_kv_errors((SAMPLES / "vllm_errors.log").read_text().splitlines())
    assert vllm.transport_failures == ("cmpl-t1", "cmpl-t2", "req-t4")
    assert vllm.expired == ("cmpl-t3",)
    assert len(glog_errors((SAMPLES / "mooncake_te.log").read_text().splitlines())) == 2
