"""Which requests' KV came from prefill: by tokens where engines count them, else by requests and transfers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.evidence.exposition import Snapshot
from pytest_pdperf.evidence.path import Counts, judge_path, whole_block_tail
from pytest_pdperf.evidence.record import Expected, Status
from pytest_pdperf.evidence.verdict import judge_evidence
from pytest_pdperf.spec.topology import Role
from tests.unit.evidence.evidence_pages import (
    BEFORE,
    IDLE,
    ROLES,
    SAMPLES,
    SENT,
    Pages,
    edited,
    judge,
    pages,
    snap,
    text_of,
    without,
)


def by_source(external: int, local: int, transfers: int) -> str:
    return (
        f'vllm:prompt_tokens_by_source_total{{engine="0",source="external_kv_transfer"}} {external}\n'
        f'vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {local}\n'
        f'vllm:nixl_xfer_time_seconds_count{{engine="0"}} {transfers}\n'
    )


@pytest.mark.parametrize(
    ("after", "status", "summary"),
    [
        (by_source(50960, 500, 30), Status.PROVEN, "proven: 10 of 10"),
        (by_source(10000, 41460, 10), Status.BYPASSED, "bypassed: 0 of 10: no KV was transferred"),
        (by_source(38672, 12788, 24), Status.PARTIAL, "partial: 7 of 10 by tokens (recompute share 0.3)"),
    ],
)
def test_token_sources_on_decode_alone_decide_over_the_window(
    after: str, status: Status, summary: str
) -> None:
    """Two ranks make 20 transfers of 10 requests: tokens decide, and only those added in the window."""
    before = {"decode-0": snap(by_source(10000, 500, 10))}
    found = judge_evidence(
        "pd", before, {"decode-0": snap(after)}, Expected(10, 40960), {"decode-0": Role.DECODE}
    )
    assert found.status is status
    assert found.summary.startswith(summary)
    assert (status is Status.PROVEN) == (not found.problems)


def test_decode_that_computes_what_prefill_computed_is_recomputed() -> None:
    swapped = edited(
        "vllm_decode.prom",
        ('source="local_compute"} 0.0', 'source="local_compute"} 40960.0'),
        ('source="external_kv_transfer"} 40960.0', 'source="external_kv_transfer"} 0.0'),
        ('source="p2p"} 40960.0', 'source="p2p"} 0.0'),
    )
    found = judge(pages(text_of("vllm_prefill.prom"), swapped))
    assert found.status is Status.RECOMPUTED
    assert found.recomputed_tokens == 40960
    assert not found.valid
    assert judge(pages(IDLE, swapped)).status is Status.BYPASSED


def test_kv_from_a_disk_tier_is_no_transfer_from_prefill() -> None:
    other = edited(
        "vllm_decode.prom",
        ('source="p2p"} 40960.0', 'source="p2p"} 0.0'),
        ('source="disk"} 0.0', 'source="disk"} 40960.0'),
    )
    assert judge(pages(text_of("vllm_prefill.prom"), other)).status is Status.BYPASSED


def test_kv_of_a_connector_that_names_no_source_counts_as_transferred() -> None:
    """ExampleConnector in vLLM 0.32: nothing tells its files from a peer, and there is no other tier."""
    untold = edited(
        "vllm_decode.prom",
        ('source="p2p"} 40960.0', 'source="p2p"} 0.0'),
        ('source="disk"} 0.0', 'source="external_unspecified"} 40960.0'),
    )
    assert judge(pages(text_of("vllm_prefill.prom"), untold)).status is Status.PROVEN


def test_prefill_that_served_less_than_was_sent_limits_the_proof() -> None:
    short = edited("vllm_prefill.prom", ('finished_reason="length"} 10.0', 'finished_reason="length"} 7.0'))
    found = judge(pages(short, text_of("vllm_decode.prom")))
    assert found.summary == "partial: 7 of 10 by requests on prefill"
    none = judge(pages(IDLE, text_of("vllm_decode.prom")))
    assert none.status is Status.BYPASSED
    assert "prefill served no request" in none.summary


def test_older_vllm_proves_by_what_the_connector_found() -> None:
    old = pages(text_of("vllm_prefill.prom"), without(text_of("vllm_decode.prom"), "by_source"))
    idle: Pages = {name: snap(without(IDLE, "by_source")) for name in ROLES}
    assert judge(old, before=idle).status is Status.PROVEN
    miss = without(text_of("vllm_decode.prom"), "by_source").replace(
        'external_prefix_cache_hits_total{engine="0",model_name="m"} 40960.0',
        'external_prefix_cache_hits_total{engine="0",model_name="m"} 28672.0',
    )
    found = judge(pages(text_of("vllm_prefill.prom"), miss), before=idle)
    assert found.summary == "partial: 7 of 10 by tokens (recompute share 0.3)"


def test_sglang_is_proven_by_transfers_of_distinct_requests() -> None:
    before = pages("sglang:token_usage 0\n", "sglang:token_usage 0\n")
    after = pages(text_of("sglang_prefill.prom"), text_of("sglang_decode.prom"))
    sent = Expected(requests=4, prompt_tokens=4000, completion_tokens=32)
    found = judge(after, sent, before)
    assert found.status is Status.PROVEN
    assert (found.transfers, found.transfer_bytes) == (4, 4 * 64 * 1024 * 1024)
    assert found.claimed_rate == 2.5 * 1024**3
    assert found.failed_transfers is None
    assert any("num_transfer_failed_reqs_total" in reason for reason in found.reasons)
    assert judge(after, Expected(requests=5, prompt_tokens=4000), before).summary.startswith(
        "partial: 4 of 5"
    )
    dark = pages(
        without(text_of("sglang_prefill.prom"), "kv_transfer_latency"), text_of("sglang_decode.prom")
    )
    assert judge(dark, sent, before).status is Status.UNKNOWN


def test_connectors_that_move_whole_blocks_may_leave_a_tail() -> None:
    counts = Counts(10, 10, computed=440, cached=0, transferred=2560)
    assert judge_path(counts, Expected(10, 3000)).status is Status.PARTIAL
    assert judge_path(counts, Expected(10, 3000, tail_tokens=127)).status is Status.PROVEN
    assert judge_path(counts, Expected(10, 3000, tail_tokens=43)).status is Status.PARTIAL


@pytest.mark.parametrize(
    ("prompts", "tail"),
    [([300], 44), ([258], 2), ([257], 129), ([129], 129), ([64], 64), ([300, 64], 54), ([1], 1), ([], 0)],
)
def test_the_tail_is_exact_so_that_no_bypassed_request_hides_in_it(prompts: list[int], tail: float) -> None:
    assert whole_block_tail(prompts, 128) == tail


def test_an_empty_window_proves_nothing_and_divides_by_nothing() -> None:
    found = judge(BEFORE, Expected(0, 0, 0))
    assert found.status is Status.UNKNOWN
    assert (found.transfers, found.transfers_per_request, found.transfer_rate) == (0, None, None)
    unsent = judge(BEFORE, SENT)
    assert unsent.status is Status.BYPASSED


def test_one_token_that_moved_is_no_transfer_of_a_request() -> None:
    counts = Counts(10, 10, computed=40959, cached=0, transferred=1)
    path = judge_path(counts, SENT)
    assert (path.status, path.proven) == (Status.BYPASSED, 0)
    assert path.detail == "0 of 10 by tokens (recompute share 1)"


@pytest.mark.parametrize("moved", range(1, 10))
def test_whole_requests_are_counted_out_of_tokens(moved: int) -> None:
    counts = Counts(10, 10, computed=4096.0 * (10 - moved), cached=0, transferred=4096.0 * moved)
    path = judge_path(counts, SENT)
    assert (path.status, path.proven) == (Status.PARTIAL, moved)
    short = judge_path(Counts(10, 10, counts.computed, 1.0, 4096.0 * moved - 1), SENT)
    assert short.proven == moved - 1


tokens = st.one_of(st.none(), st.integers(min_value=0, max_value=10_000).map(float))


@given(
    counts=st.builds(
        Counts,
        prefill_requests=tokens,
        decode_requests=tokens,
        computed=tokens,
        cached=tokens,
        transferred=tokens,
        peer=tokens,
        transfers=tokens,
        per_request_transfers=st.booleans(),
    ),
    expected=st.builds(
        Expected,
        requests=st.integers(min_value=0, max_value=50),
        prompt_tokens=st.one_of(st.none(), st.integers(min_value=1, max_value=20_000)),
    ),
)
def test_proven_needs_every_token_and_no_computed_one(counts: Counts, expected: Expected) -> None:
    path = judge_path(counts, expected)
    if path.status is Status.PROVEN:
        assert path.proven == expected.requests > 0
        assert not counts.computed
        if counts.transferred is not None:
            assert counts.transferred >= (expected.prompt_tokens or 0)
            assert not counts.cached
        for seen in (counts.prefill_requests, counts.decode_requests):
            assert seen is None or seen >= expected.requests
    if path.status is Status.PARTIAL and path.proven is not None:
        assert 0 < path.proven < expected.requests


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the shared samples are not beside this repository")
@pytest.mark.parametrize(
    ("folder", "requests", "prompt", "output", "volume", "seconds"),
    [
        ("h200-vllm-0.26-pd-nixl", 177, 405508, 33796, 59796357120, 4.728506),
        ("cpu-vllm-0.32-pd-nixl", 20, 1280, 640, 5242880, 0.124517),
    ],
)
def test_real_dumps_give_the_known_facts(
    folder: str, requests: int, prompt: int, output: int, volume: int, seconds: float
) -> None:
    after = pages(
        *((SAMPLES / folder / f"metrics_{role}.prom").read_text() for role in ("prefill", "decode"))
    )
    before: Pages = {name: _zeroed(page) for name, page in after.items() if isinstance(page, Snapshot)}
    found = judge(after, Expected(requests, prompt, output), before)
    assert found.status is Status.PROVEN
    assert found.problems == ()
    assert [row.requests for row in found.instances] == [requests, requests]
    assert [row.computed_tokens for row in found.instances] == [prompt, 0]
    assert [row.transferred_tokens for row in found.instances] == [0, prompt]
    assert (found.transfers, found.transfer_bytes) == (requests, volume)
    assert found.transfer_seconds == pytest.approx(seconds)


def _zeroed(page: Snapshot) -> Snapshot:
    from pytest_pdperf.evidence.exposition import Sample

    moving = ("_total", "_count", "_sum", "_bucket")
    return Snapshot(
        {
            name: tuple(Sample(row.labels, 0.0 if name.endswith(moving) else row.value) for row in rows)
            for name, rows in page.series.items()
        },
        page.types,
    )
