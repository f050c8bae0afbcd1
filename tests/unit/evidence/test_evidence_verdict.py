"""`proven` must be earned, and a hole never looks like health."""

from __future__ import annotations

import json

import pytest

from pytest_pdperf.evidence.exposition import Unknown
from pytest_pdperf.evidence.record import Evidence, Expected, Status
from pytest_pdperf.evidence.verdict import imbalance, judge_evidence
from pytest_pdperf.spec.topology import Kind, Role
from tests.unit.evidence.evidence_pages import (
    AFTER,
    BEFORE,
    IDLE,
    ROLES,
    SENT,
    Pages,
    edited,
    judge,
    pages,
    snap,
    text_of,
    without,
)


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
