"""Transfer windows in every form they were ever printed in."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.evidence.kv_logs import (
    KvWindow,
    UnknownLine,
    judge_kv_logs,
    merge_windows,
    parse_kv_windows,
)
from pytest_pdperf.spec.topology import Role

SAMPLES = Path(__file__).parents[4] / "shared" / "samples"
HEAD = "(APIServer pid=4242) INFO 09-30 10:00:10 [metrics.py:103] KV Transfer metrics: "
NIXL = (
    "Num successful transfers={n}, Avg xfer time (ms)={ms}, P90 xfer time (ms)={p90}, Avg post time (ms)=1.0, "
    "P90 post time (ms)=1.2, Avg MB per transfer={mib}, Throughput (MB/s)=1.0, Avg number of descriptors=64.0"
)
MOONCAKE = (
    "Num successful transfers={n}, Avg xfer time (ms)={ms}, P90 xfer time (ms)={ms}, Avg MB per transfer=48.0, "
    "Throughput (MB/s)=2400.0, Avg number of descriptors=96.0, Num failed transfers={ft}, Num failed recvs={fr}, "
    "Num KV expired reqs={ex}"
)
ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}


def one(line: str) -> KvWindow:
    (window,) = parse_kv_windows(line)
    assert isinstance(window, KvWindow), window
    return window


def nixl(n: int, ms: float = 0, mib: float = 0, p90: float = 0, more: str = "") -> str:
    return HEAD + NIXL.format(n=n, ms=ms, mib=mib, p90=p90) + more


def mooncake(n: int, ms: float, ft: int, fr: int, ex: int) -> str:
    return HEAD + MOONCAKE.format(n=n, ms=ms, ft=ft, fr=fr, ex=ex)


def test_an_all_failed_window_of_an_old_build_is_suspect_and_has_no_means() -> None:
    window = one(nixl(0))
    assert (window.successful, window.failed, window.avg_ms, window.rate_mib_s) == (0, None, None, None)
    assert window.suspect
    assert (window.connector, window.process) == ("nixl", "APIServer pid=4242")


def test_a_newer_window_tells_failures_and_expiry_apart() -> None:
    window = one(nixl(2, 5.5, 12.0, 6.3, ", Num failed transfers=3, Num KV expired reqs=4"))
    assert (window.successful, window.failed, window.kv_expired) == (2, 3, 4)
    assert (window.avg_ms, window.p90_ms, window.avg_mib, window.avg_descriptors) == (5.5, 6.3, 12.0, 64.0)
    assert not window.suspect


@pytest.mark.parametrize(
    ("body", "successful", "connector"),
    [
        ("num_successful_transfers=7", 7, None),
        (
            "KVTransferAggregatedStats(avg_transfer_durations=0.5, num_blocks_transferred=3, "
            "num_successful_transfers=2)",
            2,
            None,
        ),
        (MOONCAKE.format(n=2, ms=20.0, ft=0, fr=1, ex=0), 2, "mooncake"),
        (
            "Num successful transfers=2, Num failed transfers=1, Avg xfer time (ms)=20.0, P90 xfer time (ms)=24.0",
            2,
            "mooncake",
        ),
    ],
)
def test_other_forms(body: str, successful: int, connector: str | None) -> None:
    window = one(HEAD + body)
    assert (window.successful, window.connector) == (successful, connector)


def test_combined_connectors_print_one_window_each_with_numpy_reprs() -> None:
    line = (
        HEAD + "NixlConnector={'Num successful transfers': 4, 'Avg xfer time (ms)': np.float64(8.125), "
        "'Throughput (MB/s)': np.float64(3938.462)}, OffloadingConnector={'Num successful transfers': 1}"
    )
    first, second = parse_kv_windows(line)
    assert isinstance(first, KvWindow)
    assert isinstance(second, KvWindow)
    assert (first.connector, first.successful, first.avg_ms, first.rate_mib_s) == (
        "NixlConnector",
        4,
        8.125,
        3938.462,
    )
    assert (second.connector, second.successful, second.avg_ms) == ("OffloadingConnector", 1, None)


@pytest.mark.parametrize(
    "body", ["transfers ok", "Num successful transfers=many", "Num good transfers=4", ""]
)
def test_unknown_forms_are_kept_word_for_word(body: str) -> None:
    (found,) = parse_kv_windows(HEAD + body)
    assert isinstance(found, UnknownLine)
    assert found.line == (HEAD + body).strip()
    assert found.reason
    assert merge_windows([found]).unknown == (found,)


def test_new_fields_are_kept_and_other_lines_are_none() -> None:
    window = one("\x1b[2m" + nixl(1, 2, 3, 4, ", Num rainbows=5") + "\x1b[0m")
    assert window.extra == {"Num rainbows": "5"}
    assert parse_kv_windows("(APIServer pid=1) INFO Avg prompt throughput: 5 tokens/s") == ()


def test_windows_merge_by_counts_and_not_by_averages() -> None:
    rows = [one(nixl(1, 10.0, 32.0, 12.0)), one(nixl(9, 20.0, 64.0, 30.0)), one(nixl(0))]
    total = merge_windows(rows)
    assert (total.windows, total.successful, total.suspect_windows) == (3, 10, 1)
    assert total.avg_ms == 19.0
    assert total.avg_mib == pytest.approx(60.8)
    assert total.rate_mib_s == pytest.approx(608 / 190 * 1000)
    assert total.worst_p90_ms == 30.0
    assert total.failed_transfers is None
    assert merge_windows([]).avg_ms is None


def test_mib_and_ranks() -> None:
    """Two ranks of one request, 48 MiB each in 34.514 and 30 ms: the logged rate is that of one transfer."""
    total = merge_windows([one(nixl(2, 32.257, 48.0, 34.514))])
    assert total.successful == 2
    assert total.avg_mib == 48.0
    assert total.rate_mib_s == pytest.approx(1488.049, abs=0.001)
    assert total.mib_per_request(1) == 96.0
    assert total.mib_per_request(2) == 48.0
    assert total.mib_per_request(0) is None
    rate = total.rate_mib_s
    assert rate is not None
    assert rate * 2**20 / 1e9 == pytest.approx(1.5603, abs=1e-4)


def test_failed_receives_are_on_the_consumer_and_expiry_on_the_producer() -> None:
    logs = {
        "prefill-0": [mooncake(4, 20.0, 0, 0, 2)],
        "decode-0": [
            mooncake(0, 0, 0, 3, 0),
            "(Worker_TP0 pid=13) ERROR 10-01 09:00:11 [mooncake.py:1] pulling kv_caches for ['req-a'] failed: Timeout",
        ],
    }
    found = judge_kv_logs(logs, ROLES)
    assert (found.status, found.detail) == ("fail", "failed_recvs 3, kv_expired 2")
    total = found.totals
    assert (total.successful, total.failed_transfers, total.failed_recvs, total.kv_expired) == (4, 0, 3, 2)
    assert total.avg_ms == 20.0


@pytest.mark.parametrize(
    ("logs", "status", "words"),
    [
        ({"prefill-0": [mooncake(4, 20.0, 0, 0, 0)], "decode-0": []}, "pass", "4 transfers, none failed"),
        ({"prefill-0": [mooncake(4, 20.0, 0, 0, 0)], "decode-0": None}, "unknown", "no log of decode-0"),
        ({"prefill-0": [mooncake(4, 20.0, 0, 0, 0)]}, "unknown", "no log of decode-0"),
        ({"prefill-0": [], "decode-0": []}, "unknown", "no transfer window"),
        ({"prefill-0": [], "decode-0": [nixl(4, 1, 1)]}, "unknown", "does not print failures"),
        ({"prefill-0": [], "decode-0": [nixl(4, 1, 1), nixl(0)]}, "unknown", "something failed"),
        ({"prefill-0": [], "decode-0": [HEAD + "surprise"]}, "unknown", "surprise"),
        ({"prefill-0": None, "decode-0": [mooncake(4, 1, 2, 0, 0)]}, "fail", "failed_transfers 2"),
    ],
)
def test_logs_are_judged_together_or_not_at_all(
    logs: dict[str, list[str] | None], status: str, words: str
) -> None:
    found = judge_kv_logs(logs, ROLES)
    assert found.status == status
    assert words in found.detail


@given(st.text(max_size=120))
def test_no_line_raises(tail: str) -> None:
    for found in parse_kv_windows(HEAD + tail):
        assert isinstance(found, KvWindow | UnknownLine)


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the shared samples are not beside this repository")
def test_field_samples() -> None:
    lines = (SAMPLES / "vllm_kv_transfer.log").read_text().splitlines()
    windows = [found for line in lines for found in parse_kv_windows(line)]
    assert [w.successful for w in windows if isinstance(w, KvWindow)] == [0, 7, 4, 0, 4, 4, 2, 2]
    for folder, transfers in (("h200-vllm-0.26-pd-nixl", 126), ("cpu-vllm-0.32-pd-nixl", 20)):
        text = (SAMPLES / folder / "decode.log").read_text()
        total = merge_windows(found for line in text.splitlines() for found in parse_kv_windows(line))
        assert total.successful == transfers
        assert total.unknown == ()
