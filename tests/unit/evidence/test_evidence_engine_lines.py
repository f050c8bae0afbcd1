"""Progress lines of engines, by field name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_pdperf.evidence.engine_lines import parse_engine_line, steady_gen_tps, transfer_stuck

SAMPLES = Path(__file__).parents[4] / "shared" / "samples"

VLLM_OLD = (
    "INFO 02-03 04:05:06 [loggers.py:120] Engine 000: Avg prompt throughput: 64.5 tokens/s, Avg generation "
    "throughput: 0.2 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.4%, Prefix cache hit rate: 0.0%"
)
VLLM_V0 = (
    "INFO 02-03 04:05:06 metrics.py:455] Avg prompt throughput: 1,064.5 tokens/s, Avg generation throughput: 0.2 "
    "tokens/s, Running: 1 reqs, Swapped: 0 reqs, Pending: 3 reqs, GPU KV cache usage: 0.4%, CPU KV cache usage: 0.0%."
)
VLLM_NEW = (
    "(APIServer pid=9) INFO 11-02 04:05:16 [loggers.py:210] Engine 001: Avg prompt throughput: 5.0 tokens/s, Avg "
    "generation throughput: 15.0 tokens/s, Running: 2 reqs, Waiting: 1 reqs, Preemptions: 3, GPU KV cache usage: "
    "10.0%, Prefix cache hit rate: 0.0%, External prefix cache hit rate: 50.0%, MM cache hit rate: 1.5%, Novel: 7 x"
)
VLLM_MANY = (
    "(APIServer pid=9) INFO 06-02 04:05:26 [loggers.py:300] 2 Engines Aggregated: Avg prompt throughput: 5.0 tokens/s, "
    "Avg generation throughput: 15.0 tokens/s, Running: 2 reqs, Waiting: 1 reqs, Deferred: 7 reqs, GPU KV cache usage: "
    "10.0%, Prefix cache hit rate: 0.0%"
)
SGLANG_OLD = (
    "[2025-05-20 04:05:06 TP0] Prefill batch. #new-seq: 1, #new-token: 12288, #cached-token: 0, token usage: 0.00, "
    "#running-req: 0, #unbootstrapped-req: 2, #queue-req: 1, #transferring-req: 3 "
)
SGLANG_NUMBERED = (
    "[2026-02-01 12:00:01 DP0 TP0 EP0] Prefill batch [17], #new-seq: 2, #new-token: 8192, #cached-token: 64, full "
    "token usage: 0.10, #running-req: 0, #queue-req: 1, #pending-token: 500, #prealloc-req: 2, #inflight-req: 3, cuda "
    "graph: False, input throughput (token/s): 1000.00"
)
SGLANG_DECODE = (
    "[2026-02-01 12:00:02 TP0] Decode batch, #running-req: {run}, #token: 40960, token usage: 0.25, accept len: 2.50, "
    "accept rate: 0.83, pre-allocated usage: 0.01, #prealloc-req: 4, #transfer-req: {wait}, #retracted-req: 0, cuda "
    "graph: True, gen throughput (token/s): {tps}, #queue-req: 0, "
)
SGLANG_ANSI = (
    "\x1b[2m2026-04-02T04:05:06.123456Z\x1b[0m INFO Decode batch, #running-req: 4, #full token: 10000, full token "
    "usage: 0.20, mamba num: 6, pre-allocated usage: 0.00, #prealloc-req: 1, #transfer-req: 0, #retracted-req: 0, "
    "cuda graph: True, gen throughput (token/s): 500.00, #queue-req: 0"
)


@pytest.mark.parametrize(
    ("line", "kind", "engine", "values"),
    [
        (
            VLLM_OLD,
            "engine",
            "000",
            {"prompt_tps": 64.5, "gen_tps": 0.2, "running": 1, "waiting": 0, "kv_pct": 0.4},
        ),
        (VLLM_V0, "engine", "", {"prompt_tps": 1064.5, "gen_tps": 0.2, "waiting": 3, "kv_pct": 0.4}),
        (VLLM_V0.replace("GPU KV", "KV"), "engine", "", {"kv_pct": 0.4}),
        (
            VLLM_NEW,
            "engine",
            "001",
            {"preemptions": 3, "external_hit_pct": 50.0, "waiting": 1, "mm_hit_pct": 1.5},
        ),
        (VLLM_MANY, "engine", "aggregated", {"deferred": 7, "waiting": 1}),
        (SGLANG_OLD, "prefill", "", {"new_token": 12288, "waiting_bootstrap": 2, "inflight": 3, "queued": 1}),
        (
            SGLANG_NUMBERED,
            "prefill",
            "",
            {"cached": 64, "waiting_bootstrap": 2, "inflight": 3, "input_tps": 1000.0, "usage": 0.1},
        ),
        (
            SGLANG_DECODE.format(run=14, wait=1, tps="150.25"),
            "decode",
            "",
            {
                "running": 14,
                "tokens": 40960,
                "accept_len": 2.5,
                "prealloc": 4,
                "transfer": 1,
                "gen_tps": 150.25,
            },
        ),
        (SGLANG_ANSI, "decode", "", {"running": 4, "tokens": 10000, "gen_tps": 500.0, "usage": 0.2}),
    ],
)
def test_fields_by_name(line: str, kind: str, engine: str, values: dict[str, float]) -> None:
    parsed = parse_engine_line(line)
    assert parsed is not None
    assert (parsed.kind, parsed.engine) == (kind, engine)
    assert {name: parsed.get(name) for name in values} == values


def test_absent_fields_are_none_and_unknown_ones_are_kept() -> None:
    old, new = parse_engine_line(VLLM_OLD), parse_engine_line(VLLM_NEW)
    assert old is not None
    assert new is not None
    assert old.get("deferred") is None
    assert old.get("preemptions") is None
    assert new.extra == {"Novel": "7 x"}
    sglang = parse_engine_line(SGLANG_OLD)
    assert sglang is not None
    assert sglang.get("input_tps") is None
    numbered = parse_engine_line(SGLANG_NUMBERED)
    assert numbered is not None
    assert numbered.iteration == 17
    assert numbered.extra == {"cuda graph": "False"}


def test_other_lines_are_none() -> None:
    assert parse_engine_line("[2026-02-03 04:05:08] The server is fired up and ready to roll!") is None
    assert parse_engine_line("Engine core initialization failed") is None


def test_requests_that_wait_for_kv_while_nothing_is_generated_are_a_hang() -> None:
    stuck = SGLANG_DECODE.format(run=0, wait=1, tps="0.00")
    fine = SGLANG_DECODE.format(run=4, wait=1, tps="100.00")
    assert transfer_stuck([stuck] * 3)
    assert not transfer_stuck([stuck, stuck, fine, stuck, stuck])
    assert not transfer_stuck([SGLANG_DECODE.format(run=0, wait=0, tps="0.00")] * 9)


def test_the_first_rate_after_idling_is_dropped() -> None:
    lines = [
        SGLANG_DECODE.format(run=run, wait=0, tps=tps)
        for run, tps in ((4, "1.5"), (4, "90"), (0, "0"), (3, "2"), (3, "80"))
    ]
    assert steady_gen_tps(lines) == [90.0, 80.0]


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the shared samples are not beside this repository")
@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("vllm_throughput.log", 4),
        ("sglang_batches.log", 6),
        ("h200-sglang-0.5.17-pd-nixl/prefill.log", 6),
    ],
)
def test_field_samples(name: str, parsed: int) -> None:
    lines = (SAMPLES / name).read_text().splitlines()
    found = [row for line in lines if (row := parse_engine_line(line))]
    assert len(found) == parsed
    assert all(row.values for row in found)
