"""A slower first token names its stage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_pdperf.evidence.exposition import Sample, Snapshot, Unknown, parse_exposition
from pytest_pdperf.evidence.ttft_split import STAGES, TtftSplit, moved_stage, split_ttft
from pytest_pdperf.evidence.utilisation import limiting_role, role_loads
from pytest_pdperf.spec.topology import Role

DATA = Path(__file__).parents[2] / "data" / "evidence"
SAMPLES = Path(__file__).parents[4] / "shared" / "samples"
ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
Pages = dict[str, Snapshot | Unknown]


def snap(text: str) -> Snapshot:
    page = parse_exposition(text)
    assert isinstance(page, Snapshot), page
    return page


def load(name: str) -> Snapshot:
    return snap((DATA / name).read_text())


def split(before: Pages, after: Pages, measured: float, requests: int = 10, **known: float) -> TtftSplit:
    found = split_ttft("pd", before, after, ROLES, measured_ttft_ms=measured, requests=requests, **known)  # type: ignore[arg-type]
    assert isinstance(found, TtftSplit), found
    return found


VLLM_BEFORE: Pages = dict.fromkeys(ROLES, load("vllm_idle.prom"))
VLLM_AFTER: Pages = {"prefill-0": load("vllm_prefill.prom"), "decode-0": load("vllm_decode.prom")}


def test_sequential_stages_add_up_to_what_was_measured() -> None:
    """Prefill: 5 queue + 200 work of 210; decode: 18 queue, 8 of it transfer, + 10 step of 30 ms."""
    found = split(VLLM_BEFORE, VLLM_AFTER, measured=241.5, router_ms=0.5)
    assert found.stages == pytest.approx(
        {
            "prefill_queue": 5.0,
            "bootstrap": None,
            "prefill": 200.0,
            "transfer": 8.0,
            "decode_queue": 10.0,
            "first_decode_step": 10.0,
            "hand_over": 7.0,
            "router": 0.5,
            "client": None,
        }
    )
    assert found.closure_error_ms == pytest.approx(1.0)
    assert found.closure_share == pytest.approx(1 / 241.5)
    assert found.largest == "prefill"
    assert found.notes == ()
    assert TtftSplit.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert set(found.stages) == set(STAGES)


def test_parallel_stages_lie_inside_the_first_token_of_decode() -> None:
    before: Pages = dict.fromkeys(ROLES, snap("sglang:token_usage 0\n"))
    after: Pages = {"prefill-0": load("sglang_prefill.prom"), "decode-0": load("sglang_decode.prom")}
    found = split(before, after, measured=151.0, requests=4)
    assert found.stages["bootstrap"] == pytest.approx(5.0)
    assert found.stages["prefill"] == pytest.approx(80.0)
    assert found.stages["transfer"] == pytest.approx(25.0)
    assert found.closure_error_ms == pytest.approx(1.0)
    assert any("mean over 5 observations, not 4" in note for note in found.notes)


def test_a_stage_without_a_metric_stays_unknown_and_is_said() -> None:
    text = "".join(
        line + "\n" for line in (DATA / "vllm_decode.prom").read_text().splitlines() if "nixl_" not in line
    )
    after: Pages = {**VLLM_AFTER, "decode-0": snap(text)}
    found = split(VLLM_BEFORE, after, measured=241.5)
    assert found.stages["transfer"] is None
    assert found.stages["decode_queue"] == pytest.approx(18.0)
    assert any("transfer_seconds" in note for note in found.notes)
    assert limiting_role(found) == "none", "decode's queue holds the transfer, and is short"
    late = {**found.stages, "decode_queue": 80.0}
    assert limiting_role(replace(found, stages=late)) == "transfer or decode"
    assert limiting_role(replace(found, stages={**late, "prefill_queue": 90.0})) == "prefill"
    assert limiting_role(replace(found, stages={**found.stages, "decode_queue": None})) == "unknown"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({}, VLLM_AFTER, "was not scraped"),
        (VLLM_BEFORE, {**VLLM_AFTER, "decode-0": Unknown("HTTP 404")}, "decode-0: HTTP 404"),
        (VLLM_AFTER, VLLM_BEFORE, "restarted"),
    ],
)
def test_no_split_without_both_pages_of_one_process(before: Pages, after: Pages, words: str) -> None:
    found = split_ttft("pd", before, after, ROLES, measured_ttft_ms=1.0, requests=1)
    assert isinstance(found, Unknown)
    assert words in found.reason


def test_aggregated_serving_has_queue_work_and_the_rest() -> None:
    found = split_ttft(
        "aggregated",
        {"server-0": load("vllm_idle.prom")},
        {"server-0": load("vllm_prefill.prom")},
        {"server-0": Role.SERVER},
        measured_ttft_ms=212.0,
        requests=10,
    )
    assert isinstance(found, TtftSplit)
    assert found.stages["prefill"] == pytest.approx(200.0)
    assert found.stages["hand_over"] == pytest.approx(5.0)
    assert found.stages["transfer"] is None
    assert found.closure_error_ms == pytest.approx(2.0)


BASE = TtftSplit(
    100.0, {**dict.fromkeys(STAGES), "prefill": 60.0, "transfer": 20.0, "decode_queue": 5.0}, 15.0
)


def changed(measured: float, **stages: float | None) -> TtftSplit:
    return replace(BASE, measured_ms=measured, stages={**BASE.stages, **stages})


@pytest.mark.parametrize(
    ("now", "stage", "change"),
    [
        (changed(130.0, transfer=45.0, prefill=62.0), "transfer", 25.0),
        (changed(130.0, transfer=15.0, prefill=95.0), "prefill", 35.0),
        (changed(80.0, prefill=40.0), "prefill", -20.0),
        (changed(80.0, prefill=45.0, transfer=35.0), "unexplained", -20.0),
        (changed(130.0), "unexplained", 30.0),
        (changed(130.0, transfer=None), "unexplained", 30.0),
        (changed(100.5, transfer=45.0), "none", 0.0),
        (changed(101.0, transfer=21.0), "transfer", 1.0),
    ],
)
def test_the_stage_that_moved_is_named(now: TtftSplit, stage: str, change: float) -> None:
    found = moved_stage(BASE, now)
    assert found.stage == stage
    assert found.change_ms == pytest.approx(change)
    if found.share is not None:
        assert found.share == pytest.approx(change / found.ttft_change_ms)


@pytest.mark.parametrize(
    ("waits", "limit"),
    [
        ((30.0, 5.0, 5.0), "prefill"),
        ((5.0, 30.0, 5.0), "transfer"),
        ((5.0, 5.0, 30.0), "decode"),
        ((9.9, 5.0, 5.0), "none"),
        ((30.0, None, 5.0), "unknown"),
    ],
)
def test_the_longest_wait_limits(waits: tuple[float | None, ...], limit: str) -> None:
    stages = dict(zip(("prefill_queue", "transfer", "decode_queue"), waits, strict=True))
    assert limiting_role(changed(100.0, **stages)) == limit
    assert limiting_role(Unknown("x")) == "unknown"


def test_load_of_a_role_is_requests_in_it_per_replica() -> None:
    loads = {load.role: load for load in role_loads(VLLM_BEFORE, VLLM_AFTER, ROLES, wall_s=4.0)}
    assert loads[Role.PREFILL].served == pytest.approx(2.0 / 4.0)
    assert loads[Role.PREFILL].waiting == pytest.approx(0.05 / 4.0)
    assert loads[Role.DECODE].served == pytest.approx(12.0 / 4.0)
    twice = {**ROLES, "decode-1": Role.DECODE}
    pages = {**VLLM_AFTER, "decode-1": VLLM_AFTER["decode-0"]}
    before = {**VLLM_BEFORE, "decode-1": VLLM_BEFORE["decode-0"]}
    assert {load.role: load.served for load in role_loads(before, pages, twice, 4.0)}[
        Role.DECODE
    ] == pytest.approx(3.0)
    dark = role_loads(VLLM_BEFORE, {}, ROLES, 4.0)
    assert [load.served for load in dark] == [None, None]
    with pytest.raises(ValueError, match="window"):
        role_loads(VLLM_BEFORE, VLLM_AFTER, ROLES, 0.0)


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the shared samples are not beside this repository")
def test_stages_of_a_real_run_explain_what_its_clients_measured() -> None:
    folder = SAMPLES / "h200-vllm-0.26-pd-nixl"
    after: Pages = {
        f"{role}-0": snap((folder / f"metrics_{role}.prom").read_text()) for role in ("prefill", "decode")
    }
    before: Pages = {
        name: Snapshot(
            {
                key: tuple(Sample(row.labels, row.value * ("_created" in key)) for row in rows)
                for key, rows in page.series.items()
            },
            page.types,
        )
        for name, page in after.items()
        if isinstance(page, Snapshot)
    }
    results = [json.loads(path.read_text()) for path in folder.glob("bench_*.json")]
    measured = sum(r["mean_ttft_ms"] * r["completed"] for r in results) / sum(r["completed"] for r in results)
    found = split(before, after, measured, requests=177)
    assert found.largest == "prefill"
    # 17 of the 177 requests are warm-ups that the result files leave out; they were short.
    assert found.closure_share == pytest.approx(0.05, abs=0.10)
