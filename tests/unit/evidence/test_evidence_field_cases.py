"""Server-side evidence, held to public bug reports: every input of a kind, with the answer that it must get."""

from __future__ import annotations

import pytest

from pytest_pdperf.evidence.access_log import Posts, count_posts, judge_posts
from pytest_pdperf.evidence.drain import IDLE_SLACK, judge_leak
from pytest_pdperf.evidence.engine_lines import parse_engine_line
from pytest_pdperf.evidence.exposition import Snapshot, Unknown, parse_exposition
from pytest_pdperf.evidence.gpu_trace import judge_throttle, read_smi_csv, summarise
from pytest_pdperf.evidence.kv_errors import read_kv_errors
from pytest_pdperf.evidence.kv_logs import KvWindow, judge_kv_logs, merge_windows, parse_kv_windows
from pytest_pdperf.evidence.record import Evidence, Expected
from pytest_pdperf.evidence.verdict import judge_evidence
from pytest_pdperf.spec.topology import Role
from tests.field_cases import FieldCase, field_case

PAIR = {"prefill": Role.PREFILL, "decode": Role.DECODE}
MIB = 2**20


def page(text: str) -> Snapshot:
    found = parse_exposition(text)
    assert isinstance(found, Snapshot), found
    return found


def zeroed(text: str) -> str:
    return "".join(line.rpartition(" ")[0] + " 0\n" for line in text.splitlines())


def decode_alone(after: Snapshot | Unknown, before: Snapshot | Unknown, sent: Expected) -> Evidence:
    return judge_evidence("pd", {"d": before}, {"d": after}, sent, {"d": Role.DECODE}, wall_s=1.0)


@field_case("034")
def test_034_answers_are_no_evidence(case: FieldCase) -> None:
    sent = Expected(case.given["requests"], case.given["requests"] * case.given["prompt_tokens"])
    words = {"pd_path_proven": "proven", "pd_bypassed": "bypassed", "pd_path_partial": "partial"}
    for name in ("good", "bad", "partial"):
        found = decode_alone(page(case.given[name]), page(zeroed(case.given[name])), sent)
        kind, _, detail = case.want[name].partition(": ")
        assert found.status.value == words[kind]
        assert detail in found.summary
        assert bool(found.problems) == (name != "good")
        ranks = case.given["tp"]
        assert found.transfers == ranks * round(found.proven_requests or 0), "a rank's transfer each"
    dark = decode_alone(Unknown("no metrics"), Unknown("no metrics"), sent)
    assert (dark.status.value, dark.valid) == ("unknown", False)
    assert case.want.get("no_metrics", "unknown").startswith(dark.status.value)


@field_case("036")
def test_036_prompts_that_skip_prefill(case: FieldCase) -> None:
    for cell in case.given["cells"]:
        posts = {"prefill": Posts(cell["prefill_posts"]), "decode": Posts(cell["decode_posts"])}
        found = judge_posts(posts, PAIR, cell["sent"])
        kind, _, more = case.want[str(cell["input"])].partition(": ")
        assert f"{found.status} {found.detail}".startswith(kind) or found.detail == kind
        assert bool(found.problems) == (kind != "pd")
        assert more in (found.detail, "fail or split", "")


@field_case("037")
def test_037_a_window_of_failures_only(case: FieldCase) -> None:
    for name in ("old", "new"):
        (window,) = parse_kv_windows(case.given[name])
        assert isinstance(window, KvWindow)
        for field in ("successful", "failed", "kv_expired", "avg_ms"):
            if field in case.want[name]:
                assert getattr(window, field) == case.want[name][field], field
        assert window.suspect == (name == "old")
    assert judge_kv_logs({"prefill": [], "decode": [case.given["old"]]}, PAIR).status == "unknown"
    after = "".join(f"{name} {value}\n" for name, value in case.given["prom"].items())
    found = decode_alone(page(after), page(zeroed(after)), Expected(9))
    wanted = case.want["prom_old_semantics"]
    assert (found.failed_any, found.expired_requests) == (wanted["failed_any"], wanted["kv_expired"])
    assert any("lease or overload, not transport" in line for line in found.problems)


@field_case("039")
def test_039_mib_ranks_and_rates(case: FieldCase) -> None:
    """From the log line that the engine prints of these transfers, and from its counters."""
    moved, requests = case.given["transfers"], case.given["requests"]
    n, total = len(moved), sum(t["bytes"] for t in moved)
    ms = sum(t["ms"] for t in moved)
    line = (
        f"KV Transfer metrics: Num successful transfers={n}, Avg xfer time (ms)={ms / n}, Avg post time (ms)=1.0, "
        f"Avg MB per transfer={total / n / MIB}, Throughput (MB/s)={total / MIB / ms * 1000:.3f}"
    )
    (window,) = parse_kv_windows(line)
    assert isinstance(window, KvWindow) and window.rate_mib_s == case.want["logged_mb_s"]
    totals = merge_windows([window])
    assert totals.successful == case.want["num_successful"]
    assert totals.avg_mib == pytest.approx(case.want["avg_mib"])
    assert totals.avg_ms == pytest.approx(case.want["avg_ms"])
    assert totals.rate_mib_s == pytest.approx(case.want["logged_mb_s"], abs=1e-3)
    assert totals.mib_per_request(requests) == pytest.approx(case.want["request_mib"])
    counters = (
        f"vllm:nixl_xfer_time_seconds_count {n}\nvllm:nixl_xfer_time_seconds_sum {ms / 1000}\n"
        f"vllm:nixl_bytes_transferred_count {n}\nvllm:nixl_bytes_transferred_sum {total}\n"
    )
    wall_s = case.given.get("wall_ms", 1000.0) / 1000
    found = judge_evidence(
        "pd",
        {"d": page(zeroed(counters))},
        {"d": page(counters)},
        Expected(requests),
        {"d": Role.DECODE},
        wall_s=wall_s,
    )
    assert (found.transfers, found.transfers_per_request) == (n, n / requests)
    assert found.bytes_per_request == pytest.approx(case.want["request_mib"] * MIB)
    rate, wall = found.transfer_rate, found.wall_rate
    assert rate is not None and wall is not None
    assert rate / 1e9 == pytest.approx(case.want["per_rank_gb_s_decimal"], abs=1e-4)
    if "wall_gb_s_decimal" in case.want:
        assert wall / 1e9 == pytest.approx(case.want["wall_gb_s_decimal"], abs=1e-4)


@field_case("040")
def test_040_both_roles_log_what_the_other_does_not(case: FieldCase) -> None:
    logs = {"prefill": case.given["producer"], "decode": case.given["consumer"]}
    found = judge_kv_logs(logs, PAIR)
    assert {key: getattr(found.totals, key) for key in case.want["sum"]} == case.want["sum"]
    assert found.totals.avg_ms == pytest.approx(case.want["avg_ms"])
    assert found.status == "fail"
    for name in ("failed_transfers", "failed_recvs", "kv_expired"):
        assert (f"{name} {case.want['sum'][name]}" in found.detail) == bool(case.want["sum"][name])
    clean = [
        line for line in case.given["producer"] if "failed transfers=0" in line and "expired reqs=0" in line
    ]
    alone = judge_kv_logs({"prefill": clean, "decode": None}, PAIR)
    assert alone.status == "unknown" and "no log of decode" in alone.detail


@field_case("041")
def test_041_a_failure_logged_by_every_rank(case: FieldCase) -> None:
    found = read_kv_errors(case.given["lines"])
    assert found.requests == case.want["distinct_requests"]
    assert {room: list(kinds) for room, kinds in found.by_request.items()} == case.want["by_room"]
    own = [room for room, kinds in case.want["by_room"].items() if set(kinds) != {"aborted"}]
    assert list(found.transport_failures) == own, "an abort follows from another error or from the client"


@field_case("042")
def test_042_blocks_that_stay_behind(case: FieldCase) -> None:
    limit = float(case.want["next_cell"].rpartition("+ ")[2])
    assert limit == IDLE_SLACK
    for name, looks in case.given["scrapes"].items():
        values = (looks["idle_before"], looks["after_5s"], looks["after_timeout"])
        found = judge_leak(*values, case.given["running_plus_waiting"])
        status, _, detail = case.want[name].partition(": ")
        assert found.status == status and found.detail.startswith(detail)
        early = judge_leak(*values[:2], None, case.given["running_plus_waiting"])
        assert early.next_cell_may_start == (looks["after_5s"] <= looks["idle_before"] + limit)


@field_case("049")
def test_049_access_lines_prove_who_worked(case: FieldCase) -> None:
    logs = {name: lines for name, lines in case.given.items() if isinstance(lines, list)}
    roles = {name: Role.PREFILL if name.startswith("prefill") else Role.DECODE for name in logs}
    posts = {name: count_posts(lines) for name, lines in logs.items()}
    assert {name: row.ok for name, row in posts.items()} == case.want["ok_posts"]
    assert {name: row.failed for name, row in posts.items() if row.failed} == case.want["non_ok_posts"]
    found = judge_posts(posts, roles, case.given["sent"])
    assert found.decode_imbalance == pytest.approx(case.want["imbalance_max_over_mean"])
    assert any("imbalance" in note for note in found.notes)
    failed = tuple(f"{name}: {n} failed requests" for name, n in case.want["non_ok_posts"].items())
    assert found.problems[: len(failed)] == failed


@field_case("055")
def test_055_vllm_lines(case: FieldCase) -> None:
    lines(case)


@field_case("056")
def test_056_sglang_lines(case: FieldCase) -> None:
    lines(case)


def lines(case: FieldCase) -> None:
    for line, want in zip(case.given["lines"], case.want["parsed"], strict=True):
        found = parse_engine_line(line)
        assert found is not None
        own = {"engine": found.engine, "kind": found.kind, "iter": found.iteration}
        assert {key: own[key] if key in own else found.get(key) for key in want} == want
    if "unknown_fields" in case.want:
        odd = parse_engine_line(case.given["lines"][0] + ", Novel thing: 7 x")
        assert odd is not None and odd.extra["Novel thing"] == "7 x"


@field_case("058")
def test_058_slow_because_hot(case: FieldCase) -> None:
    for header in case.given["csv_header"]:
        clocks = [f"{row['sm_mhz']} MHz" if row["sm_mhz"] else "[N/A]" for row in case.given["samples"]]
        rows = [
            f"2026/02/03 04:05:{i:02d}.000, 0, {mhz}, 500.0 W, 60, {row['reasons']}"
            for i, (mhz, row) in enumerate(zip(clocks, case.given["samples"], strict=True))
        ]
        head = f"timestamp, index, clocks.current.sm [MHz], power.draw [W], temperature.gpu, {header}"
        (found,) = summarise(read_smi_csv([head, *rows]).looks)
        assert (found.busy, found.throttled) == (case.want["busy_samples"], case.want["throttled"])
        idle = sum(row["reasons"].endswith("1") for row in case.given["samples"])
        assert idle == case.want["idle_ignored"] and found.looks - found.busy >= idle
        verdict = judge_throttle([found])
        status, _, detail = case.want["verdict"].partition(": ")
        assert verdict.status == status and detail.partition(" ")[2] in verdict.detail
        said = case.want["reason"].replace("SW", "software").lower()
        assert [reason.lower() for reason in found.reasons] == [said]
