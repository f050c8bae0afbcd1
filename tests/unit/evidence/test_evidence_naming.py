"""Each fault is named by what is seen of it, and a healthy stack names none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pytest_pdperf.errors import RoleDied
from pytest_pdperf.evidence.drain import busy_reason
from pytest_pdperf.evidence.exposition import Snapshot, Unknown, parse_exposition
from pytest_pdperf.evidence.naming import WORDS, Fault, Naming, against, damaged, died, name_faults
from pytest_pdperf.evidence.record import Expected
from pytest_pdperf.evidence.record import Status as Status_
from pytest_pdperf.evidence.speeds import Level, Pages, Speed, Usual, speeds, windows
from pytest_pdperf.evidence.verdict import judge_evidence
from pytest_pdperf.measure.records import RequestRecord, Status
from pytest_pdperf.spec.topology import Role

ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
USUAL = Usual(
    {
        "prefill-0": ({"prefill_s": Level(0.010, 1.1, 1.03)},) * 3,
        "decode-0": ({"step_s": Level(0.005, 1.1, 1.03), "link_rate": Level(1e9, 1.1, 1.03)},) * 3,
    },
    {"decode-0": Level(1.0, 1.1, 1.05)},
)


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


def seen(*looks: Pages, ended: Status = Status.OK, loading_s: float | None = None) -> Naming:
    """What a cell of six requests shows, not yet held against anything."""
    evidence = judge_evidence("pd", looks[0], looks[-1], Expected(6, 600, 60), ROLES)
    records = [replace(GOOD, status=ended if index == 0 else Status.OK) for index in range(6)]
    loading = {} if loading_s is None else {"decode-0": loading_s}
    return name_faults(evidence, records, looks, ROLES, loading, first=True)


def named(
    *looks: Pages, ended: Status = Status.OK, suspected: tuple[str, ...] = ()
) -> list[tuple[Fault, str]]:
    found = against(seen(*looks, ended=ended), USUAL, suspected).findings
    assert all(one.because and WORDS[one.fault] in one.line and one.where in one.line for one in found)
    return [(one.fault, one.where) for one in found]


START, MIDDLE, END = pages(0), pages(3), pages(6)


def test_a_healthy_stack_names_nobody() -> None:
    assert named(START, MIDDLE, END) == []
    assert named(START, END) == []
    healthy = against(seen(START, MIDDLE, END), USUAL)
    assert (healthy.findings, healthy.unknown) == ((), ())
    assert all(len(rows) == 3 for rows in healthy.speeds.values()), "the whole and two halves"


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
    assert (damaged().fault, damaged().where) == (Fault.CORRUPT, "decode")
    broken = pages(6, decode={"nixl_num_failed_transfers_total": 1})
    assert named(START, broken, ended=Status.ERROR_IN_STREAM) == [(Fault.TRANSFER_FAILED, "decode-0")]


def test_a_death_is_named_by_who_died_and_a_dark_page_accuses_nobody() -> None:
    line = died(RoleDied("decode-0", "killed by SIGKILL", "log tail")).line
    assert line == "process died (decode-0): killed by SIGKILL"
    dark: Pages = {"prefill-0": END["prefill-0"], "decode-0": Unknown("connection refused")}
    found = against(seen(START, dark), USUAL)
    assert found.findings == ()
    assert found.unknown == (
        "decode-0: no page after the cell: connection refused",
        "speeds: decode-0 did not tell them in this cell",
    )


def test_a_slow_start_is_measured_against_the_usual_one_and_said_once() -> None:
    def starts(found: Naming, usual: Usual = USUAL) -> list[str]:
        return [one.line for one in against(found, usual).findings]

    slow = seen(START, END, loading_s=2.0)
    assert starts(slow) == ["loading slowed (decode-0): 2.0 s against 1.0 s in the baseline"]
    assert starts(seen(START, END, loading_s=1.5)) == []
    assert starts(slow, replace(USUAL, loading_s={})) == [], "nothing to compare with"
    assert starts(replace(slow, first=False)) == [], "later cells of the bring-up have other troubles"


def test_prompts_that_prefill_never_saw_went_past_it() -> None:
    own = {"prompt_tokens_by_source_total__source='local_compute'": 600.0}
    lost = {"prompt_tokens_by_source_total__source='external_kv_transfer'": -600.0}
    idle = {"prefill-0": page(0), "decode-0": page(6, **own, **lost)}
    (found,) = seen(START, idle).findings
    assert found.line == (
        "prompts went past prefill (prefill): 6 of 6 requests never reached it; "
        "decode-0 computed 600 prompt tokens"
    )
    nowhere = {"prefill-0": page(0), "decode-0": page(6, **lost)}
    assert seen(START, nowhere).findings[0].because == "6 of 6 requests never reached it"


def test_slow_speeds_come_with_both_numbers() -> None:
    slow = {"nixl_xfer_time_seconds_sum": 5.6, "inter_token_latency_seconds_sum": 0.135}
    lines = [one.line for one in against(seen(START, pages(6, decode=slow)), USUAL).findings]
    assert lines == [
        "decode slowed (decode-0): 7.5 ms a token against 5 ms a token in the baseline",
        "KV transfer slowed (decode-0): 96.8 MB/s against 1 GB/s in the baseline",
    ]
    late = pages(6, decode={"inter_token_latency_seconds_sum": 0.135})
    (one,) = against(seen(START, MIDDLE, late), USUAL).findings
    assert one.line == (
        "slower from the middle of the cell on (decode-0): 10 ms a token against 5 ms a token in the baseline "
        "at the end of the cell, as usual at its start"
    )


def test_where_a_metric_is_worse_already_less_is_enough_and_only_for_what_is_behind_it() -> None:
    slow = pages(6, decode={"inter_token_latency_seconds_sum": 0.27 * 0.05})
    assert named(START, slow) == []
    assert named(START, slow, suspected=("link_rate",)) == []
    assert named(START, slow, suspected=("step_s",)) == [(Fault.SLOW_DECODE, "decode-0")]


def test_a_start_that_is_slow_by_itself_is_no_fault() -> None:
    early = pages(3, decode={"inter_token_latency_seconds_sum": 0.4 * 0.135})
    end = pages(6, decode={"inter_token_latency_seconds_sum": 0.4 * 0.135})
    usual = replace(USUAL, speeds={"decode-0": ({"step_s": Level(0.005, 1.3, 1.2)},) * 3})
    assert against(seen(START, early, end), usual).findings == ()


def test_without_a_baseline_speeds_are_unknown_with_the_reason_and_the_rest_is_named() -> None:
    slow = pages(6, decode={"nixl_xfer_time_seconds_sum": 0.2, "nixl_num_failed_transfers_total": 1})
    found = against(seen(START, slow), Usual(why_not="there is no baseline to compare with"))
    assert [one.fault for one in found.findings] == [Fault.TRANSFER_FAILED]
    assert found.unknown == ("speeds: there is no baseline to compare with",)
    later = against(found, USUAL)
    assert [one.fault for one in later.findings] == [Fault.TRANSFER_FAILED, Fault.SLOW_LINK]
    assert later.unknown == ()
    assert against(later, USUAL) == later


def test_a_naming_comes_back_from_its_file() -> None:
    slow = pages(6, decode={"nixl_xfer_time_seconds_sum": 0.2})
    found = against(seen(START, MIDDLE, slow, loading_s=2.0), USUAL)
    assert found.findings
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert Naming.from_json(data) == found
    with pytest.raises(ValueError, match="schema 2"):
        Naming.from_json({**data, "schema": 2})


def test_a_restart_has_no_speed() -> None:
    assert speeds(END, START, ROLES) == {"prefill-0": Speed(), "decode-0": Speed()}
    assert speeds(START, END, ROLES)["decode-0"].link_rate == pytest.approx(1e9)


def test_a_look_in_the_middle_that_failed_leaves_the_whole() -> None:
    dark: Pages = {"prefill-0": MIDDLE["prefill-0"], "decode-0": Unknown("too slow")}
    found = windows([START, dark, END], ROLES)
    assert len(found["prefill-0"]) == 3
    assert found["decode-0"] == (speeds(START, END, ROLES)["decode-0"],)


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
    assert seen(start, end).unknown[0].startswith("KV path: ")
    assert isinstance(busy_reason(end["decode-0"], start["decode-0"]), Unknown), "nor is it called idle"
