"""Each fault is named by what is seen of it, and a healthy stack names none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_pdperf.evidence.drain import busy_reason
from pytest_pdperf.evidence.exposition import Snapshot, Unknown, parse_exposition
from pytest_pdperf.evidence.naming import Fault, Pages, Speed, name_faults, speeds
from pytest_pdperf.evidence.record import Expected
from pytest_pdperf.evidence.record import Status as Status_
from pytest_pdperf.evidence.verdict import judge_evidence
from pytest_pdperf.measure.records import RequestRecord, Status
from pytest_pdperf.spec.topology import Role

ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
USUAL = {"prefill-0": Speed(prefill_s=0.010), "decode-0": Speed(step_s=0.005, link_rate=1e9)}


def page(n: int, **changed: float) -> Snapshot:
    """A page after `n` requests of 100/10 at the usual speed; `changed` is added to what it prints."""
    values = {
        "request_success_total{finished_reason='length'}": n,
        "request_success_total{finished_reason='error'}": 0,
        "prompt_tokens_total": 100 * n,
        "generation_tokens_total": 10 * n,
        "prompt_tokens_by_source_total{source='local_compute'}": 0,
        "prompt_tokens_by_source_total{source='external_kv_transfer'}": 100 * n,
        "prompt_tokens_by_source_total{source='local_cache_hit'}": 0,
        "nixl_num_failed_transfers_total": 0,
        "nixl_num_failed_notifications_total": 0,
        "nixl_num_kv_expired_reqs_total": 0,
        "nixl_xfer_time_seconds_count": n,
        "nixl_xfer_time_seconds_sum": 0.1 * n,
        "nixl_bytes_transferred_count": n,
        "nixl_bytes_transferred_sum": 1e8 * n,
        "inter_token_latency_seconds_count": 9 * n,
        "inter_token_latency_seconds_sum": 9 * n * 0.005,
        "request_prefill_time_seconds_count": n,
        "request_prefill_time_seconds_sum": n * 0.010,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0.1,
        "num_preemptions_total": 0,
        "prefix_cache_queries_total": 0,
        "prefix_cache_hits_total": 0,
    }
    for name, more in changed.items():
        (key,) = [key for key in values if key.split("{")[0] == name or key == name.replace("__", "{") + "}"]
        values[key] += more
    text = "".join(f"vllm:{key} {value}\n".replace("'", '"') for key, value in values.items())
    parsed = parse_exposition(text)
    assert isinstance(parsed, Snapshot), parsed
    return parsed


def pages(
    n: int, *, prefill: dict[str, float] | None = None, decode: dict[str, float] | None = None
) -> Pages:
    return {"prefill-0": page(n, **(prefill or {})), "decode-0": page(n, **(decode or {}))}


GOOD = RequestRecord("main", 0, False, Status.OK, 100, 10, 0, prompt_tokens=100, completion_tokens=10)


def named(
    *looks: Pages, ended: Status = Status.OK, greedy_equal: bool | None = True, **more: object
) -> list[tuple[Fault, str]]:
    evidence = judge_evidence("pd", looks[0], looks[-1], Expected(6, 600, 60), ROLES)
    records = [replace(GOOD, status=ended if index == 0 else Status.OK) for index in range(6)]
    found = name_faults(
        evidence,
        records,
        looks,
        ROLES,
        usual=USUAL,
        greedy_equal=greedy_equal,
        **more,  # type: ignore[arg-type]
    )
    assert all(accusation.because for accusation in found)
    return [(accusation.fault, accusation.where) for accusation in found]


START, MIDDLE, END = pages(0), pages(3), pages(6)


def test_a_healthy_stack_names_nobody() -> None:
    assert named(START, MIDDLE, END) == []
    assert named(START, END, greedy_equal=None) == []


@pytest.mark.parametrize(
    ("end", "fault", "where"),
    [
        (pages(6, decode={"inter_token_latency_seconds_sum": 0.15}), Fault.THROTTLED, "decode-0"),
        (pages(6, prefill={"request_prefill_time_seconds_sum": 0.02}), Fault.THROTTLED, "prefill-0"),
        (pages(6, decode={"nixl_xfer_time_seconds_sum": 0.2}), Fault.SLOW_LINK, "decode-0"),
        (pages(6, decode={"nixl_num_failed_transfers_total": 1}), Fault.TRANSFER_FAILED, "decode-0"),
        (pages(6, prefill={"nixl_num_kv_expired_reqs_total": 1}), Fault.TRANSFER_LOST, "prefill-0"),
        (pages(6, decode={"kv_cache_usage_perc": 0.2}), Fault.LEAK, "decode-0"),
        (pages(6, prefill={"kv_cache_usage_perc": 0.2}), Fault.LEAK, "prefill-0"),
    ],
)
def test_what_a_page_shows_is_named(end: Pages, fault: Fault, where: str) -> None:
    assert named(START, MIDDLE, end) == [(fault, where)]


@pytest.mark.parametrize(
    ("name", "role", "fault"),
    [
        ("inter_token_latency_seconds_sum", "decode-0", Fault.SLOW_DECODE),
        ("request_prefill_time_seconds_sum", "prefill-0", Fault.SLOW_PREFILL),
    ],
)
def test_slow_from_the_start_is_no_throttling(name: str, role: str, fault: Fault) -> None:
    usual = {"inter_token_latency_seconds_sum": 0.135, "request_prefill_time_seconds_sum": 0.03}[name]
    part = role.split("-", maxsplit=1)[0]
    middle, end = pages(3, **{part: {name: 0.2 * usual}}), pages(6, **{part: {name: 0.4 * usual}})
    assert named(START, middle, end) == [(fault, role)]
    a_little = pages(6, **{part: {name: 0.05 * 2 * usual}})
    assert named(START, a_little) == [], "5 % is within what is usual"
    faster = pages(6, **{part: {name: -0.4 * usual}})
    assert named(START, faster) == []


def test_what_decode_computed_itself_is_named_unless_its_transfers_failed() -> None:
    own = {"prompt_tokens_by_source_total__source='local_compute'": 100.0}
    lost = {"prompt_tokens_by_source_total__source='external_kv_transfer'": -100.0}
    assert named(START, pages(6, decode=own | lost)) == [(Fault.RECOMPUTED, "decode-0")]
    failed = {"nixl_num_failed_transfers_total": 1.0}
    assert named(START, pages(6, decode=own | lost | failed)) == [(Fault.TRANSFER_FAILED, "decode-0")]


def test_what_only_clients_see_is_named() -> None:
    failed = pages(6, decode={"request_success_total__finished_reason='error'": 1.0})
    assert named(START, failed, ended=Status.ERROR_IN_STREAM) == [(Fault.ERROR_IN_STREAM, "decode-0")]
    assert named(START, END, ended=Status.ERROR_IN_STREAM) == [(Fault.ERROR_IN_STREAM, "decode")]
    assert named(START, END, ended=Status.SHORT) == [(Fault.SHORT_OUTPUT, "decode-0")]
    assert named(START, END, greedy_equal=False) == [(Fault.CORRUPT, "decode")]
    broken = pages(6, decode={"nixl_num_failed_transfers_total": 1})
    assert named(START, broken, ended=Status.ERROR_IN_STREAM) == [(Fault.TRANSFER_FAILED, "decode-0")]


def test_a_death_explains_everything_else() -> None:
    dark: Pages = {"prefill-0": END["prefill-0"], "decode-0": Unknown("connection refused")}
    found = named(START, dark, ended=Status.SHORT, greedy_equal=None, deaths={"decode-0": "exit code 1"})
    assert found == [(Fault.DIED, "decode-0")]
    assert named(START, dark, greedy_equal=None) == [], "a dark page alone accuses nobody"


def test_a_slow_start_is_measured_against_the_usual_one() -> None:
    usual = {"decode-0": 1.0}
    slow = [(Fault.SLOW_START, "decode-0")]
    assert named(START, END, loading_s={"decode-0": 2.0}, usual_loading_s=usual) == slow
    assert named(START, END, loading_s={"decode-0": 1.5}, usual_loading_s=usual) == []
    assert named(START, END, loading_s={"decode-0": 9.0}) == [], "nothing to compare with"


def test_a_restart_has_no_speed() -> None:
    assert speeds(END, START, ROLES) == {"prefill-0": Speed(), "decode-0": Speed()}
    assert speeds(START, END, ROLES)["decode-0"].link_rate == pytest.approx(1e9)


def renamed(found: Pages) -> Pages:
    """The same pages from a version that calls everything otherwise."""
    series = {
        name: {key.replace("vllm:", "vllm:v2_"): rows for key, rows in page.series.items()}
        for name, page in found.items()
        if isinstance(page, Snapshot)
    }
    return {name: Snapshot(rows) for name, rows in series.items()}


def test_renamed_metrics_are_unknown_with_reasons_and_no_zero_that_looks_like_health() -> None:
    start, end = renamed(START), renamed(END)
    evidence = judge_evidence("pd", start, end, Expected(6, 600, 60), ROLES)
    assert evidence.status is Status_.UNKNOWN
    assert any("not on the page" in reason for reason in evidence.reasons)
    assert (evidence.transferred_tokens, evidence.recomputed_tokens, evidence.failed_transfers) == (None,) * 3
    assert not evidence.valid
    assert named(start, end) == [], "and nobody is accused for it"
    assert isinstance(busy_reason(end["decode-0"], start["decode-0"]), Unknown), "nor is it called idle"
