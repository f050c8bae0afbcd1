"""`proven` must be earned, and a hole never looks like health."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.evidence.exposition import Snapshot, Unknown, parse_exposition
from pytest_pdperf.evidence.path import Counts, judge_path, whole_block_tail
from pytest_pdperf.evidence.record import Evidence, Expected, Status
from pytest_pdperf.evidence.verdict import imbalance, judge_evidence
from pytest_pdperf.spec.topology import Kind, Role

DATA = Path(__file__).parents[2] / "data" / "evidence"
SAMPLES = Path(__file__).parents[4] / "shared" / "samples"
ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
SENT = Expected(requests=10, prompt_tokens=40960, completion_tokens=1280)

Pages = dict[str, Snapshot | Unknown]


def snap(text: str) -> Snapshot:
    page = parse_exposition(text)
    assert isinstance(page, Snapshot), page
    return page


def text_of(name: str) -> str:
    return (DATA / name).read_text()


def pages(prefill: str, decode: str) -> Pages:
    return {"prefill-0": snap(prefill), "decode-0": snap(decode)}


IDLE = text_of("vllm_idle.prom")
BEFORE = pages(IDLE, IDLE)
AFTER = pages(text_of("vllm_prefill.prom"), text_of("vllm_decode.prom"))


def edited(name: str, *edits: tuple[str, str]) -> str:
    text = text_of(name)
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


def judge(
    after: Mapping[str, Snapshot | Unknown], expected: Expected = SENT, before: Pages | None = None
) -> Evidence:
    return judge_evidence(Kind.PD, before or BEFORE, after, expected, ROLES, wall_s=2.0)


def without(text: str, *words: str) -> str:
    return "".join(line + "\n" for line in text.splitlines() if not any(word in line for word in words))


def test_a_clean_cell_is_proven_with_all_its_numbers() -> None:
    found = judge(AFTER)
    assert (found.status, found.summary, found.proven_requests) == (Status.PROVEN, "proven: 10 of 10", 10)
    assert found.valid
    assert (found.problems, found.notes) == ((), ())
    assert (found.recomputed_tokens, found.transferred_tokens) == (0, 40960)
    assert (found.transfers, found.transfers_per_request) == (20, 2)
    volume = 20 * 32 * 1024 * 1024
    assert found.transfer_bytes == volume
    assert found.transfer_rate == pytest.approx(volume / 0.16)
    assert found.wall_rate == volume / 2.0
    assert (found.failed_transfers, found.failed_notifications, found.expired_requests) == (0, 0, 0)
    assert (found.retries, found.preemptions, found.cache_hit_rate, found.leak) == (0, 0, 0, False)
    assert (found.prefill_imbalance, found.decode_imbalance) == (1, 1)
    assert [row.requests for row in found.instances] == [10, 10]


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


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (
            {"prefill-0": AFTER["prefill-0"], "decode-0": Unknown("HTTP 404")},
            "decode-0: no page after the window: HTTP 404",
        ),
        ({"prefill-0": AFTER["prefill-0"]}, "decode-0: no page after the window: was not scraped"),
        (pages(text_of("vllm_prefill.prom"), "go_goroutines 5\n"), "no known engine"),
        (
            pages(
                text_of("vllm_prefill.prom"), without(text_of("vllm_decode.prom"), "by_source", "external_")
            ),
            "external_prefix_cache_hits_total not on the page",
        ),
    ],
)
def test_a_missing_page_or_series_is_unknown_and_says_which(after: Pages, words: str) -> None:
    found = judge(after)
    assert found.status is Status.UNKNOWN
    assert not found.valid
    assert found.recomputed_tokens is None
    assert found.proven_requests is None
    assert any(words in reason for reason in found.reasons), found.reasons


def test_no_page_before_the_window_is_no_baseline_of_zero() -> None:
    found = judge_evidence("pd", {}, AFTER, SENT, ROLES)
    assert found.status is Status.UNKNOWN
    assert found.transfers is None
    assert found.leak is None


def test_two_decode_replicas_of_which_one_is_dark_prove_nothing() -> None:
    roles = {**ROLES, "decode-1": Role.DECODE}
    found = judge_evidence("pd", BEFORE, AFTER, SENT, roles)
    assert found.status is Status.UNKNOWN
    assert found.decode_imbalance is None


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


@pytest.mark.parametrize(
    ("series", "field", "words"),
    [
        ("nixl_num_failed_transfers_total", "failed_transfers", "3 failed KV transfers"),
        ("nixl_num_failed_notifications_total", "failed_notifications", "3 failed KV notifications"),
        ("nixl_num_kv_expired_reqs_total", "expired_requests", "lease or overload, not transport"),
    ],
)
def test_failures_are_told_apart_and_invalidate(series: str, field: str, words: str) -> None:
    label = f'vllm:{series}{{engine="0",model_name="m"}}'
    text = edited("vllm_decode.prom", (f"{label} 0.0", f"{label} 3.0"))
    found = judge(pages(text_of("vllm_prefill.prom"), text))
    assert getattr(found, field) == 3
    assert any(words in problem for problem in found.problems)
    assert not found.valid
    assert found.status is Status.PROVEN


def test_newer_logs_fold_what_counters_keep_apart() -> None:
    edits = []
    for series, count in (("failed_transfers", 3), ("failed_notifications", 1), ("kv_expired_reqs", 4)):
        label = f'vllm:nixl_num_{series}_total{{engine="0",model_name="m"}}'
        edits.append((f"{label} 0.0", f"{label} {count}.0"))
    found = judge(pages(text_of("vllm_prefill.prom"), edited("vllm_decode.prom", *edits)))
    assert (found.failed_any, found.expired_requests) == (4, 4)
    silent = without(text_of("vllm_decode.prom"), "failed_notifications")
    dark = judge(pages(text_of("vllm_prefill.prom"), silent))
    assert (dark.failed_any, dark.failed_transfers, dark.failed_notifications) == (None, 0, None)


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


def test_more_on_decode_than_was_sent_is_said_once() -> None:
    text = edited("vllm_decode.prom", ('finished_reason="length"} 10.0', 'finished_reason="length"} 12.0'))
    found = judge(pages(text_of("vllm_prefill.prom"), text))
    assert found.problems == ("2 more requests on a role than were sent: retries or foreign traffic",)


def test_a_retry_is_a_second_request_on_the_server() -> None:
    text = edited("vllm_prefill.prom", ('finished_reason="length"} 10.0', 'finished_reason="length"} 11.0'))
    found = judge(pages(text, text_of("vllm_decode.prom")))
    assert found.retries == 1
    assert found.problems == ("1 more requests on a role than were sent: retries or foreign traffic",)


def test_the_server_and_the_client_must_agree_on_the_work() -> None:
    found = judge(AFTER, Expected(10, 40960, completion_tokens=1281))
    assert found.problems == ("decode counts 1280 output tokens, the client 1281",)
    found = judge(AFTER, Expected(12, 40960, 1280))
    assert "decode counts 10 requests, the client 12" in found.problems
    assert found.summary == "partial: 10 of 12 by requests on prefill"


def test_a_warm_prefix_cache_is_contamination_but_transferred_tokens_are_not_hits() -> None:
    label = 'vllm:prefix_cache_hits_total{engine="0",model_name="m"}'
    warm = edited("vllm_prefill.prom", (f"{label} 0.0", f"{label} 40960.0"))
    found = judge(pages(warm, text_of("vllm_decode.prom")))
    assert found.cache_hit_rate == 1.0
    assert "prefill-0: prefix cache hit rate 1 > 0.01" in found.problems
    edge = edited("vllm_prefill.prom", (f"{label} 0.0", f"{label} 409.0"))
    assert judge(pages(edge, text_of("vllm_decode.prom"))).problems == ()


def test_a_restart_makes_the_counters_of_that_process_worthless() -> None:
    text = edited(
        "vllm_decode.prom",
        ("process_start_time_seconds 1.7959659e+09", "process_start_time_seconds 1.7959999e+09"),
    )
    found = judge(pages(text_of("vllm_prefill.prom"), text))
    assert found.status is Status.UNKNOWN
    assert len(found.restarts) == 1
    assert found.restarts[0].startswith("decode-0: process_start_time_seconds")
    assert [row.restarted for row in found.instances] == [False, True]
    assert any(problem.startswith("restarted: decode-0") for problem in found.problems)


def test_kv_that_stays_behind_is_a_leak_from_more_than_one_block_on() -> None:
    gauge = 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0'
    one = edited("vllm_decode.prom", (gauge, gauge[:-3] + "0.001"))
    two = edited("vllm_decode.prom", (gauge, gauge[:-3] + "0.002"))
    assert judge(pages(text_of("vllm_prefill.prom"), one)).leak is False
    found = judge(pages(text_of("vllm_prefill.prom"), two))
    assert found.leak is True
    assert found.problems == (
        "decode-0 is not idle after the cell, KV usage 0.0020: leak or work left behind",
    )
    silent = without(text_of("vllm_decode.prom"), "kv_cache_usage_perc")
    assert judge(pages(text_of("vllm_prefill.prom"), silent)).leak is None


@pytest.mark.parametrize(
    ("requests", "value"),
    [
        ([19, 1], 1.9),
        ([10, 10], 1.0),
        ([10], 1.0),
        ([30, 0, 0], 3.0),
        ([1, 0], 2.0),
        ([0, 0], None),
        ([5, None], None),
        ([], None),
    ],
)
def test_imbalance_is_the_largest_over_the_mean(requests: list[float | None], value: float | None) -> None:
    assert imbalance(requests) == value


def test_an_uneven_split_is_a_note_and_not_a_failure() -> None:
    half = ('finished_reason="length"} 10.0', 'finished_reason="length"} 0.5')
    after = {
        **AFTER,
        "decode-1": snap(edited("vllm_decode.prom", half)),
    }
    found = judge_evidence(
        "pd", {**BEFORE, "decode-1": snap(IDLE)}, after, Expected(10), {**ROLES, "decode-1": Role.DECODE}
    )
    assert found.notes[0].startswith("decode imbalance 1.9 > 1.25")


def test_aggregated_serving_has_no_path_to_prove_but_the_rest_counts() -> None:
    found = judge_evidence(
        Kind.AGGREGATED,
        {"server-0": snap(IDLE)},
        {"server-0": snap(text_of("vllm_prefill.prom"))},
        Expected(10, 40960, 10),
        {"server-0": Role.SERVER},
    )
    assert found.status is Status.NOT_APPLICABLE
    assert found.valid
    assert found.transfers is None
    assert found.recomputed_tokens is None
    assert (found.retries, found.leak, found.decode_imbalance) == (0, False, 1)


def test_json_round_trip_is_exact_and_strict() -> None:
    found = judge(AFTER)
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert Evidence.from_json(data) == found
    with pytest.raises(ValueError, match="unknown keys: surprise"):
        Evidence.from_json({**data, "surprise": 1})
    with pytest.raises(ValueError, match="great"):
        Evidence.from_json({**data, "status": "great"})
    with pytest.raises(ValueError, match="malformed"):
        Evidence.from_json({"kind": "pd", "status": "proven"})
    with pytest.raises(ValueError, match="transfers is nan"):
        Evidence.from_json({**data, "transfers": float("nan")})


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


def test_an_engine_that_nobody_could_ask_is_one_hole_and_not_three() -> None:
    dark = Unknown("its address is not known")
    pages = {"prefill-0": dark, "decode-0": dark}
    roles = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
    evidence = judge_evidence(Kind.PD, pages, pages, Expected(2), roles)
    assert evidence.status is Status.UNKNOWN
    assert evidence.reasons == (
        "prefill-0: no page: its address is not known",
        "decode-0: no page: its address is not known",
    )
